"""Files on their way to the engine: prepared in the processes of the job's functions, then sent."""

from __future__ import annotations

import asyncio

from batchrunner.core.engine_info import EngineInfo
from batchrunner.core.errors import EngineStartError
from batchrunner.core.hook_pool import HookPool
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


class MediaPreparer:
    """Prepares the files of rows, and passes the rows on to a tokenizer."""

    def __init__(self, pool: HookPool, tokenizer: RowTokenizer) -> None:
        """Take the pool that has the function `MEDIA`."""
        self._pool = pool
        self._tokenizer = tokenizer

    async def tokenize(self, requests: list[Request]) -> list[Request | Outcome]:
        """Return the requests with files as they are sent; one that has a bad file becomes an Outcome.

        Raises HookLostError, and as the tokenizer does.
        """
        found: list[Request | Outcome] = [*requests]
        places = [at for at, request in enumerate(requests) if _is_waiting(request)]
        if places:
            rows = [(requests[at].media,) for at in places]
            results = await asyncio.to_thread(self._pool.call_many, MEDIA, rows)
            if len(results) < len(places):  # the pool is closed
                raise asyncio.CancelledError
            for at, result in zip(places, results, strict=True):
                request = requests[at]
                error = result.error if result.error is not None else result.value
                if isinstance(error, str):
                    found[at] = Outcome(request.ref, None, error, None, 0)
                    continue
                ready = zip(request.media, result.value, strict=True)
                found[at] = request._replace(
                    media=tuple(
                        file._replace(content=b"", ready=files, tokens=tokens)
                        for file, (files, tokens) in ready
                    )
                )
        left = [at for at, item in enumerate(found) if isinstance(item, Request)]
        sent = await self._tokenizer.tokenize([item for item in found if isinstance(item, Request)])
        for at, item in zip(left, sent, strict=True):
            found[at] = item
        return found


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
