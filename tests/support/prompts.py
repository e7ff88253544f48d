"""Requests whose prompts share long prefixes."""

import random
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import pyarrow as pa

from batchrunner.core.engine_info import EngineInfo
from batchrunner.core.types import Request, RowRef
from batchrunner.dispatch.route import Routes
from batchrunner.input.prompt_bytes import common_length

CARRIED = pa.RecordBatch.from_pydict({"a": [1]})
PASS_TOKENS = 1000
INFO = EngineInfo(kind="test", model="m", max_total_tokens=100_000, prefill_tokens=PASS_TOKENS)


def request(row: int, text: str, **sampling: Any) -> Request:
    return Request(
        RowRef(row, CARRIED, row), "text", text, {"temperature": 0, "max_new_tokens": 64, **sampling}
    )


def words(seed: str, count: int) -> str:
    luck = random.Random(seed)
    return " ".join(str(luck.randrange(10**7)) for _ in range(count))


def shared(prefixes: Iterable[bytes]) -> int:
    """Return how many bytes of some prompts an engine need not compute, if it still has all the others'."""
    return sum(common_length(one, other) for one, other in pairwise(sorted(prefixes)))


def routes(**in_flight: int) -> Routes:
    """Return routes with large windows, and so many requests in flight on each."""
    made = Routes()
    for url, count in in_flight.items():
        route = made.open(url)
        route.window = 1000
        for _ in range(count):
            made.acquire_slot(0.0, wants=lambda other, route=route: other is route)  # type: ignore[misc]
    return made
