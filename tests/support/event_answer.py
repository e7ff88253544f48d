"""Answers to requests with several rows, as SGLang 0.5.23 gives them: events, each of one row."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import orjson
from aiohttp import web

from tests.support.asked_answers import ASKED


def is_bundle(body: dict[str, Any]) -> bool:
    """Tell whether a body has several prompts of token ids."""
    ids = body.get("input_ids")
    return isinstance(ids, list) and bool(ids) and isinstance(ids[0], list)


def rows_of(body: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the body that each row would have alone."""
    assert body["stream"] is True
    prompts, sampling, lora = body["input_ids"], body["sampling_params"], body.get("lora_path")
    samplings = sampling if isinstance(sampling, list) else [sampling] * len(prompts)
    loras = lora if isinstance(lora, list) else [lora] * len(prompts)
    rows = []
    for prompt, own, path in zip(prompts, samplings, loras, strict=True):
        row = {"input_ids": prompt, "sampling_params": own} | {n: body[n] for n in ASKED if n in body}
        rows.append(row if path is None else {**row, "lora_path": path})
    return rows


class EventAnswer:
    """An answer of events."""

    def __init__(self, request: web.Request) -> None:
        self._request = request
        self._response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})

    async def begin(self) -> None:
        """Send the head."""
        await self._response.prepare(self._request)

    async def write(self, event: bytes) -> None:
        """Send an event."""
        await self._response.write(b"data: " + event + b"\n\n")

    async def write_json(self, event: dict[str, Any]) -> None:
        """Send an event of JSON."""
        await self.write(orjson.dumps(event))

    async def refuse(self, status: int, message: str) -> web.StreamResponse:
        """Refuse all rows: the status is 200 by then, so the error is an event."""
        await self.begin()
        error = {"message": message, "type": "invalid_request_error", "code": status, "retryable": False}
        await self.write_json({"error": error})
        return await self.finish()

    async def stay_open(self, events: Iterable[bytes]) -> web.StreamResponse:
        """Send events, and nothing more until the client goes away."""
        await self.begin()
        for event in events:
            await self.write(event)
        await asyncio.Event().wait()
        return self._response

    async def finish(self) -> web.StreamResponse:
        """End the answer."""
        await self.write(b"[DONE]")
        await self._response.write_eof()
        return self._response
