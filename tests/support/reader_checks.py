"""Reads whatever bytes a server may send, and checks that no error comes but a RequestError."""

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

import orjson
import pyarrow as pa
from hypothesis import strategies as st

from batchrunner.core.errors import (
    AnotherModelError,
    AttemptFailedError,
    RequestError,
    RowRefusedError,
)
from batchrunner.core.server_replies import error_of
from batchrunner.core.types import Completion, Outcome, Request, RowRef
from batchrunner.engines.hang_detector import HangDetector
from batchrunner.engines.http import replies
from batchrunner.engines.http.client import BundleAnswer
from batchrunner.engines.http.guard import ModelGuard
from batchrunner.engines.http.server import Endpoint
from batchrunner.engines.http.server_info import loads_in
from batchrunner.job.answers import AnswerPlan
from batchrunner.output.columns import schema_of_run, table_of
from batchrunner.output.counts import RowCounts

URL = "http://127.0.0.1:30000"
KINDS = ("text", "messages", "input_ids")
_CARRIED = pa.RecordBatch.from_pydict({"id": [1]})
_PLANS = {n: AnswerPlan(columns=(), samples=n) for n in (1, 2, 4)}


def check_answer(reply: bytes, kind: str = "text", samples: int = 1) -> bool:
    """Read an answer, count it and make a table of it; tell whether it is one."""
    assert kind in KINDS
    ref = RowRef(0, _CARRIED, 0)
    request = Request(ref, kind, "a prompt", {"n": samples} if samples > 1 else {})  # type: ignore[arg-type]
    try:
        completion = replies.completion_of(request, reply)
    except RequestError as error:
        outcome = Outcome(ref, None, str(error), 0.1, 1)
    else:
        assert len(completion.texts) == samples
        outcome = Outcome(ref, completion, None, 0.1, 1)
    table = table_of([outcome], schema_of_run(_CARRIED.schema, _PLANS[samples]), _PLANS[samples])
    table.validate(full=True)
    counts = RowCounts()
    counts.add(outcome)
    orjson.dumps([counts.finish_reasons, counts.failures.summary(), counts.output_tokens])
    tokens = replies.tokens_in(reply)
    assert tokens is None or all(type(token) is int and token >= 0 for token in tokens)
    return outcome.completion is not None


class _Answers:
    """Counts the answers to the rows of a bundle."""

    def __init__(self) -> None:
        self.ends: Counter[int] = Counter()
        self.texts: dict[int, list[str]] = {}

    def ended(self, index: int, result: Completion | RequestError) -> None:
        self.ends[index] += 1
        if isinstance(result, Completion):
            self.texts[index] = result.texts


async def _abort(_: Endpoint, rids: Sequence[str]) -> bool:
    return bool(rids)


def check_bundle(events: list[bytes], rows: int) -> dict[int, list[str]]:
    """Read the events of an answer to so many rows; return the texts of those that were answered."""
    ref = RowRef(0, _CARRIED, 0)
    requests = [Request(ref, "input_ids", [n], {}) for n in range(rows)]
    answers = _Answers()
    endpoint = Endpoint(URL, HangDetector(60.0))
    answer = BundleAnswer(
        requests=requests,
        ended=answers.ended,
        endpoint=endpoint,
        guard=ModelGuard(),
        large_answers=asyncio.Semaphore(),
        rids=[f"rid_{n}" for n in range(rows)],
        abort=_abort,
    )

    async def read() -> None:
        with contextlib.suppress(AnotherModelError):  # two versions of the weights: it ends a run on purpose
            for event in events:
                await answer.process([event])

    asyncio.run(read())
    assert set(answers.ends) <= {*range(rows)}
    assert set(answers.ends.values()) <= {1}
    if answer.refusal is not None:
        refusal = answer.refusal
        str(error_of(refusal.status, refusal.content)).encode("utf-8")
    return answers.texts


def check_error(code: int, body: bytes, retry_after: str | None) -> None:
    """Read a reply with another status."""
    error = error_of(code, body, retry_after)
    assert isinstance(error, RequestError)
    assert code not in {429, 502, 503, 504} or not isinstance(error, (AttemptFailedError, RowRefusedError))
    str(error).encode("utf-8")


def check_load(reply: bytes) -> bool:
    """Read a load; tell whether it is one."""
    with contextlib.suppress(ValueError):
        return bool(loads_in(reply, URL))
    return False


ODD_NUMBERS = (2**31, -(2**31), 2**33, 2**63, 2**64, 10**30, -1, 1e308, float("inf"), float("nan"), 0.5)
ODD_TEXTS = ("", "\0", "\ud800", "\udfff\ud800", "\u00b2", "a" * 1000, "../../x", "abort")
LEAVES = (
    st.none() | st.booleans() | st.sampled_from(ODD_NUMBERS) | st.integers() | st.floats()
    | st.sampled_from(ODD_TEXTS) | st.text(max_size=20)
)  # fmt: skip
ANY_JSON = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


def json_of(value: Any) -> bytes:
    """Return a value as JSON, with NaN, Infinity and lone surrogates as Python writes them."""
    return json.dumps(value).encode()


def places_in(value: Any, here: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the path of every value within a value, its own first."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [here, *(path for key, found in inner for path in places_in(found, (*here, key)))]


def replaced(value: Any, path: tuple[Any, ...], odd: Any) -> Any:
    """Return a value of which the part at a path is another one."""
    if not path:
        return odd
    key, *rest = path
    if isinstance(value, dict):
        return {**value, key: replaced(value[key], tuple(rest), odd)}
    if isinstance(value, list) and key < len(value):
        return [*value[:key], replaced(value[key], tuple(rest), odd), *value[key + 1 :]]
    return value


@st.composite
def some_odd(draw: st.DrawFn, known: list[Any]) -> Any:
    """One of the known values, of which up to three parts are odd."""
    value = draw(st.sampled_from(known))
    for _ in range(draw(st.integers(0, 3))):
        value = replaced(value, draw(st.sampled_from(places_in(value))), draw(ANY_JSON))
    return value
