"""Files on their way to the engine: prepared in the processes of the job's functions, then sent."""

from __future__ import annotations

import asyncio
from typing import Any

from batchrunner.core.engine_info import EngineInfo
from batchrunner.core.errors import EngineStartError
from batchrunner.core.hook_pool import HookPool
from batchrunner.core.hook_worker import HookResult
from batchrunner.core.media import KIND_OF_FIELD
from batchrunner.core.types import Outcome, Request
from batchrunner.dispatch.tokenize import RowTokenizer
from batchrunner.job.fields import MEDIA
from batchrunner.job.spec import Job

_HINTS = {
    "image": "choose a vision model; one whose vision part is off needs --enable-multimodal",
    "audio": "choose a model for audio; one whose part for audio is off needs --enable-multimodal",
    "video": "choose a model for videos; one whose vision part is off needs --enable-multimodal",
}
"""What to do where a model takes no media of a kind."""


class MediaTokenizer(RowTokenizer):
    """Prepares the files of rows, before their prompts are tokenised."""

    def __init__(self, pool: HookPool, *arguments: Any) -> None:
        """Take the pool that has the function `MEDIA`, and the arguments of a RowTokenizer."""
        super().__init__(*arguments)
        self._pool = pool

    async def tokenize(self, requests: list[Request]) -> list[Request | Outcome]:
        """Return the requests with files as they are sent; one that has a bad file becomes an Outcome.

        Raises HookLostError, and as RowTokenizer does.
        """
        found: list[Request | Outcome] = [*requests]
        places = [at for at, request in enumerate(requests) if _is_waiting(request)]
        if places:
            rows = [(requests[at].media,) for at in places]
            results = await asyncio.to_thread(self._pool.call_many, MEDIA, rows)
            if len(results) < len(places):  # the pool is closed
                raise asyncio.CancelledError
            for at, result in zip(places, results, strict=True):
                found[at] = _with_files(requests[at], result)
        left = [at for at, item in enumerate(found) if isinstance(item, Request)]
        sent = await super().tokenize([item for item in found if isinstance(item, Request)])
        for at, item in zip(left, sent, strict=True):
            found[at] = item
        return found


def _with_files(request: Request, result: HookResult) -> Request | Outcome:
    """Return a request with what is sent of its files, or the error of its row."""
    error = result.error if result.error is not None else result.value
    if isinstance(error, str):
        return Outcome(request.ref, None, error, None, 0)
    ready = zip(request.media, result.value, strict=True)
    media = tuple(file._replace(content=b"", ready=files, tokens=tokens) for file, (files, tokens) in ready)
    return request._replace(media=media)


def check_takes_media(job: Job, info: EngineInfo) -> None:
    """Raise EngineStartError where the job has media of a kind that the engine's model does not take."""
    for field in job.prompt.media:
        kind = KIND_OF_FIELD[field]
        if getattr(info, f"takes_{kind.field}") is False:
            raise EngineStartError(
                f"prompt.{field}: {info.model} takes no {kind.field}", hint=_HINTS[kind.name]
            )


def _is_waiting(request: Request) -> bool:
    return any(file.ready is None for file in request.media)
