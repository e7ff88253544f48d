"""Images on their way to the engine: prepared in the processes of the job's functions, then sent as files."""

from __future__ import annotations

import asyncio

from batchrunner.core.engine_info import EngineInfo
from batchrunner.core.errors import EngineStartError
from batchrunner.core.hooks.pool import HookPool
from batchrunner.core.types import Outcome, Request
from batchrunner.dispatch.tokenize import RowTokenizer
from batchrunner.job.python_functions import IMAGES
from batchrunner.job.spec import Job


class ImagePreparer:
    """Prepares the images of rows, and passes the rows on to a tokenizer."""

    def __init__(self, pool: HookPool, tokenizer: RowTokenizer) -> None:
        """Take the pool that has the function `IMAGES`."""
        self._pool = pool
        self._tokenizer = tokenizer

    async def tokenize(self, requests: list[Request]) -> list[Request | Outcome]:
        """Return the requests with images as they are sent; one that has a bad image becomes an Outcome.

        Raises HookLostError, and as the tokenizer does.
        """
        found: list[Request | Outcome] = [*requests]
        places = [at for at, request in enumerate(requests) if _is_waiting(request)]
        if places:
            rows = [(requests[at].images,) for at in places]
            results = await asyncio.to_thread(self._pool.call_many, IMAGES, rows)
            if len(results) < len(places):  # the pool is closed
                raise asyncio.CancelledError
            for at, result in zip(places, results, strict=True):
                request = requests[at]
                error = result.error if result.error is not None else result.value
                if isinstance(error, str):
                    found[at] = Outcome(request.ref, None, error, None, 0)
                    continue
                ready = zip(request.images, result.value, strict=True)
                found[at] = request._replace(
                    images=tuple(
                        image._replace(content=b"", ready=files, tokens=tokens)
                        for image, (files, tokens) in ready
                    )
                )
        left = [at for at, item in enumerate(found) if isinstance(item, Request)]
        sent = await self._tokenizer.tokenize([item for item in found if isinstance(item, Request)])
        for at, item in zip(left, sent, strict=True):
            found[at] = item
        return found


def check_takes_images(job: Job, info: EngineInfo) -> None:
    """Raise EngineStartError where the job has images and the engine's model takes none."""
    if job.prompt.has_images and info.takes_images is False:
        raise EngineStartError(
            f"prompt.{'pdf' if job.prompt.images is None else 'images'}: {info.model} takes no images",
            hint="choose a vision model; one whose vision part is off needs --enable-multimodal",
        )


def _is_waiting(request: Request) -> bool:
    return any(image.ready is None for image in request.images)
