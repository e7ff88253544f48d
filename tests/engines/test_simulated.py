"""The simulated engine: its batch keeps its limits, its answers are reproducible and always marked."""

import asyncio
from typing import Any

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from batchrunner.core.types import Completion, PromptKind, Request, RowRef
from batchrunner.engines.simulated import (
    Simulator,
    answer,
)
from batchrunner.job.engine import SimulatedEngine
from tests.conftest import examples

REF = RowRef(0, pa.record_batch([pa.array([0])], names=["id"]), 0)
NO_TIME_S = 1e-9


def make_request(prompt: Any = "Why?", kind: PromptKind = "text", **sampling: Any) -> Request:
    return Request(REF, kind, prompt, sampling)


def make_engine(**spec: Any) -> Simulator:
    return Simulator(SimulatedEngine(kind="simulated", **spec))


@examples(40)
@given(
    rows=st.lists(
        st.tuples(
            st.integers(1, 6), st.integers(1, 3), st.sampled_from(["stay", "leave at once", "leave later"])
        ),
        min_size=1,
        max_size=25,
    ),
    max_running=st.integers(1, 4),
)
def test_every_request_ends_once(rows: list[tuple[int, int, str]], max_running: int) -> None:
    """Callers that give up, waiting or running, neither hang the others nor leave anything behind."""

    async def scenario() -> None:
        engine = make_engine(max_running=max_running, max_total_tokens=30, step_s=NO_TIME_S)

        async def call(tokens: int, n: int) -> Completion:
            completion = await engine.generate(make_request(max_new_tokens=tokens, n=n), "engine")
            (load,) = await engine.loads()
            assert load.running <= max_running
            assert load.used_tokens is not None
            assert load.used_tokens <= 30
            return completion

        calls = [asyncio.create_task(call(tokens, n)) for tokens, n, _ in rows]
        for task, (*_, when) in zip(calls, rows, strict=True):
            if when == "leave at once":
                task.cancel()
        await call(2, 1)
        for task, (*_, when) in zip(calls, rows, strict=True):
            if when == "leave later":
                task.cancel()
        ends = await asyncio.gather(*calls, return_exceptions=True)
        for end, (_, n, when) in zip(ends, rows, strict=True):
            gave_up = isinstance(end, asyncio.CancelledError) and when != "stay"
            assert gave_up or (isinstance(end, Completion) and len(end.texts) == n)
        for _ in range(1000):  # what was dropped goes with the pass under way
            (load,) = await engine.loads()
            if (load.running, load.queue, load.used_tokens) == (0, 0, 0):
                break
            await asyncio.sleep(0.001)
        else:
            raise AssertionError(f"left behind: {load}")
        await engine.close()

    asyncio.run(scenario())


def test_answers_do_not_depend_on_the_process() -> None:
    """Answers do not come from hash(), which differs in each process."""
    completion = answer(make_request("Why is the sky blue?", max_new_tokens=5, sampling_seed=7), 8192)
    assert completion.texts == ["[simulated] order text it part one"]
