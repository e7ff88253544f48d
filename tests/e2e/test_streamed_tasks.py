"""`stream` does tasks without decoding, with the columns of each, and takes the same memory at any length."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

import batchrunner
from tests.conftest import INSTANT, ROOT
from tests.support.answers import vector_for
from tests.support.fake_sglang import FakeSGLang

EVERY = {"row", "prompt_tokens", "cached_tokens", "latency_s", "attempts", "error"}
TEXTS = [f"text {n}" for n in range(6)]


async def rows_of(rows: Any, **options: Any) -> list[dict[str, Any]]:
    """Return the rows of a stream, in the order of the input."""
    return sorted([row async for row in batchrunner.stream(rows, **options)], key=lambda row: row["row"])


@pytest.mark.parametrize("dtype", ["float32", "float16"])
async def test_vectors_are_lists(dtype: str) -> None:
    """Those of a server, in each type."""
    with FakeSGLang(arguments={"is_generation": False}) as server:
        call: dict[str, Any] = {"task": "embed", "task_options": {"dtype": dtype}, "engine": server.url}
        found = await rows_of([*TEXTS, ""], **call)
        assert len(server.sent) == len(TEXTS)
    assert [row["embedding"] for row in found] == [*map(vector_for, TEXTS), None]
    assert {*found[0]} == {*found[-1]} == {*EVERY, "embedding"}
    assert found[-1]["error"]


async def test_options_of_each_task() -> None:
    """The arguments that only a task has, and rows with further columns."""
    scores = await rows_of(
        TEXTS, task="score", task_options={"labels": [" yes", " no"], "softmax": True}, engine=INSTANT
    )
    assert all(sum(row["scores"]) == pytest.approx(1) for row in scores)
    choices = await rows_of(TEXTS, task="score", task_options={"choices": [" a", " b"]}, engine=INSTANT)
    assert {*choices[0]} == {*EVERY, "scores", "scores_per_token", "scores_per_byte"}
    documents = [{"q": text, "d": [text, "x"]} for text in TEXTS]
    ranked = await rows_of(
        documents, task="rerank", task_options={"documents": "d"}, prompt="{{ q }}", engine=INSTANT
    )
    assert [len(row["scores"]) for row in ranked] == [2] * 6
    classes = await rows_of(TEXTS, task="classify", task_options={"softmax": True}, engine=INSTANT)
    assert {row["label"] for row in classes} <= {"LABEL_0", "LABEL_1", "LABEL_2"}
    rewards = await rows_of(TEXTS, task="reward", engine=INSTANT)
    assert all(isinstance(row["score"], float) for row in rewards)


@pytest.mark.parametrize(
    "call",
    [
        {"task": "embed"},
        {"task": "score", "task_options": {"choices": [" a", " b"]}},
        {"sampling": {"n": 2}},
        {"answers": ["output_ids", "logprobs"]},
    ],
)
async def test_rows_that_all_failed_have_the_same_keys(call: dict[str, Any]) -> None:
    """What a row does not have is None."""
    call = {"prompt": {"text": "text"}, "engine": INSTANT, **call}
    good, *_ = await rows_of(["x"], **call)
    limits = {"max_failed_rows": "100%", "abort_failed_share": 1}
    rows = await rows_of([""] * 3, **call, limits=limits)
    assert all(row["error"] for row in rows)
    assert [list(row) for row in rows] == [list(good)] * 3


ROWS, MOST_GROWTH_MIB = 80_000, 60
PROGRAM = """
import asyncio, resource, sys
import batchrunner

ROWS = int(sys.argv[1])

def most_memory_mib():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10

def rows():
    for number in range(ROWS):
        yield {"text": f"{number} " + "x" * 2500}

async def main():
    ended, begin = 0, 0
    async for row in batchrunner.stream(
        rows(), prompt={"text": "text"}, engine={"kind": "simulated", "step_s": 0},
        columns=["text"], sampling={"max_new_tokens": 1},
    ):
        ended += 1
        if ended == ROWS // 10:
            begin = most_memory_mib()
    print(ended, most_memory_mib() - begin)

asyncio.run(main())
"""


def test_a_long_stream_takes_no_more_memory_than_a_short_one() -> None:
    """After the first 8,000 rows of 2.5 kB, the other 72,000 add nothing to the process."""
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(ROWS)], check=True, capture_output=True, text=True, cwd=ROOT
    )
    rows, growth_mib = map(int, ended.stdout.split())
    assert rows == ROWS
    assert growth_mib < MOST_GROWTH_MIB  # the rows have 200 MB together
