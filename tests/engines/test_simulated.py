"""The simulated engine: its batch keeps its limits, its answers are reproducible and always marked."""

from __future__ import annotations

import asyncio
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchrunner.core.errors import RowRefusedError
from batchrunner.core.types import Completion, PromptKind, Request, RowRef
from batchrunner.engines.base import Engine
from batchrunner.engines.simulated import (
    LONGEST_TEXT_WORDS,
    MARK,
    Simulator,
    answer,
    count_tokens,
)
from batchrunner.job.engine import SimulatedEngine
from tests.conftest import examples

REF = RowRef(0, pa.record_batch([pa.array([0])], names=["id"]), 0)
NO_TIME_S = 1e-9

prompts = st.one_of(
    st.tuples(st.just("text"), st.text(max_size=200)),
    st.tuples(st.just("input_ids"), st.lists(st.integers(0, 99_999), min_size=1, max_size=50)),
    st.tuples(
        st.just("messages"),
        st.lists(
            st.fixed_dictionaries(
                {"role": st.sampled_from(["system", "user"]), "content": st.text(max_size=80)}
            ),
            min_size=1,
            max_size=3,
        ),
    ),
)
samplings = st.fixed_dictionaries(
    {"max_new_tokens": st.integers(1, 3000)},
    optional={"n": st.integers(1, 4), "sampling_seed": st.integers(0, 9), "ignore_eos": st.booleans()},
)


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


@given(prompt=prompts, sampling=samplings, room=st.integers(1, 300))
def test_lengths(prompt: tuple[PromptKind, Any], sampling: dict[str, Any], room: int) -> None:
    """What is answered fits the context and max_new_tokens, says why it ended, and is marked."""
    request = Request(REF, prompt[0], prompt[1], sampling)
    prompt_tokens = count_tokens(request)
    completion = answer(request, prompt_tokens + room)
    assert completion.prompt_tokens == prompt_tokens
    most = min(sampling["max_new_tokens"], room)
    assert len(completion.texts) == len(completion.finish_reasons) == sampling.get("n", 1)
    for text, reason, tokens in zip(
        completion.texts, completion.finish_reasons, completion.completion_tokens, strict=True
    ):
        assert tokens is not None
        assert 1 <= tokens <= most
        assert reason in {"stop", "length"}
        assert tokens == most or (reason == "stop" and not sampling.get("ignore_eos"))
        assert text.startswith(MARK)
        assert len(text.removeprefix(MARK).split()) == min(tokens, LONGEST_TEXT_WORDS)


@given(tokens=st.integers(1, 300), context=st.integers(1, 200), pool=st.integers(1, 200))
def test_too_long_rows_are_refused(tokens: int, context: int, pool: int) -> None:
    """A prompt that leaves no room for an answer is refused at once and never waits for ever."""
    engine = make_engine(context_length=context, max_total_tokens=pool, step_s=0)
    call = engine.generate(
        make_request([1] * tokens, "input_ids", max_new_tokens=9, ignore_eos=True), "engine"
    )
    if tokens >= min(context, pool):
        with pytest.raises(RowRefusedError, match=rf"The input \({tokens} tokens\) is longer than"):
            call.send(None)
    else:
        with pytest.raises(StopIteration):
            call.send(None)


async def test_says_that_it_is_simulated() -> None:
    """No reader of a log, a report or a signal can take simulated figures for real ones."""
    engine: Engine = make_engine(max_running=8, max_total_tokens=500, context_length=100)
    info = await engine.open()
    assert info.simulated
    assert info.kind == info.model == "simulated"
    assert (info.max_running, info.max_total_tokens, info.context_length) == (8, 500, 100)
    assert "simulated" in " ".join(info.notes)
    (load,) = await engine.loads()
    assert load.source == load.scheduler == "simulated"
    assert (load.max_running, load.max_total_tokens) == (8, 500)
    await engine.close()
