"""Outputs of `sglang.Engine` on their way from its thread to the runner's loop."""

import asyncio
from collections.abc import Sequence
from typing import Any

from batchrunner.core.errors import RequestError
from batchrunner.core.types import Completion
from batchrunner.engines.base import PlacedRequest, RowAnswers
from batchrunner.engines.http import replies


class Inbox:
    """Takes outputs in the engine's thread, and passes them on as answers in the runner's loop."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, rows: Sequence[PlacedRequest], answers: RowAnswers
    ) -> None:
        self._loop = loop
        self._rows = rows
        self._answers = answers

    def put(self, output: Any) -> None:
        """Pass on an output that ends a row."""
        if output["meta_info"]["finish_reason"] is None:
            return
        place, request = self._rows[output["index"]]
        result: Completion | RequestError
        try:
            result = replies.completion_of(request, output)
        except RequestError as failure:
            result = failure
        self._loop.call_soon_threadsafe(self._answers.ended, place, result)
