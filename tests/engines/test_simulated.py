"""The simulated engine: its batch keeps its limits, its answers are reproducible and always marked."""

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import openai.types
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types import chat

import batchrunner
from batchrunner.core.types import Completion, PromptKind, Request, RowRef
from batchrunner.engines.simulated import (
    Simulator,
    answer,
)
from batchrunner.job.engine import SimulatedEngine
from tests.conftest import INSTANT, batchrun, examples, results_of, write_rows

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


SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "minLength": 40}, "grade": {"type": "integer"}},
    "required": ["name", "grade"],
}
PATTERNS = [
    "(yes|no)", r"\d{4}-\d{2}-\d{2}",
    "[A-Z]{3}[^a-z]+", r"(ab|cd)\1?", r"^\$[0-9]+(\.[0-9]{2})?$", "(?i:no){3,}",
    "[\u00e4\u00f6\u00fc]+", r"\S+ \w*\D", r"[^\x00-\x7f]a+", "(?:[^x]|x(?!y))+z", ".{30,}",
]  # fmt: skip


def rows_of(texts: list[str], **options: Any) -> list[dict[str, Any]]:
    """Return the results of a call of the library for texts."""
    rows: list[dict[str, Any]] = batchrunner.generate(texts, engine=INSTANT, **options).to_pylist()
    return rows


def test_json_is_cut_as_a_real_engine_does() -> None:
    """A limit that the JSON does not fit into cuts it; with a larger one it is whole."""
    texts = [f"row {n}" for n in range(10)]
    for row in rows_of(texts, sampling={"json_schema": SCHEMA, "max_new_tokens": 6}):
        assert (row["finish_reason"], row["completion_tokens"]) == ("length", 6)
        assert row["output"].startswith('{"name":"')
        assert row["parsed"] is None
    for row in rows_of(texts, sampling={"json_schema": SCHEMA}):
        assert row["finish_reason"] == "stop"
        assert row["parsed"] == json.loads(row["output"])
        assert row["completion_tokens"] == -(-len(row["output"]) // 4)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_regular_expression_is_followed(pattern: str) -> None:
    """Each answer matches it as a whole, and rows differ."""
    texts = [f"row {n}" for n in range(20)]
    rows = rows_of(texts, sampling={"regex": pattern})
    assert all(re.fullmatch(pattern, row["output"]) for row in rows)
    assert len({row["output"] for row in rows}) > 1
    assert {row["finish_reason"] for row in rows} == {"stop"}


def test_an_answer_by_a_regular_expression_is_cut() -> None:
    """A limit cuts it."""
    sampling = {"regex": "[a-z]{100,}", "max_new_tokens": 5}
    for row in rows_of([f"row {n}" for n in range(5)], sampling=sampling):
        assert (len(row["output"]), row["completion_tokens"], row["finish_reason"]) == (20, 5, "length")


def test_thinking_obeys_its_budget(tmp_path: Path) -> None:
    """Answers think for at most the budget; rows that used all of it are counted."""
    budgets = [40, 40, 0, None, 100_000] * 8
    write_rows(tmp_path / "input.parquet", len(budgets), budget=budgets)
    job = {
        "input": {"path": str(tmp_path / "input.parquet")},
        "prompt": {"text": "text"},
        "sampling": {"max_new_tokens": 4096, "max_thinking_tokens": {"column": "budget"}},
        "output": {"path": str(tmp_path / "run"), "columns": ["reasoning"]},
        "engine": INSTANT,
    }
    report = batchrunner.run(job)
    rows = results_of(job)
    words = [len(row["reasoning"].split()) - 1 if row["reasoning"] else 0 for row in rows]
    assert all(count <= min(budget or 0, 200) for count, budget in zip(words, budgets, strict=True))
    assert all((count > 0) == bool(budget) for count, budget in zip(words, budgets, strict=True))
    assert all(row["output"].startswith("[simulated] ") for row in rows)
    assert report.rows_thinking_cut == sum(count == 40 for count in words) > 0


def test_thinking_may_take_the_whole_limit(tmp_path: Path) -> None:
    """An answer whose thinking reaches max_new_tokens has no text, and its limit cuts it."""
    write_rows(tmp_path / "input.parquet", 2, budget=[8, 8])
    job = {
        "input": {"path": str(tmp_path / "input.parquet")},
        "prompt": {"text": "text"},
        "sampling": {"max_new_tokens": 3, "max_thinking_tokens": {"column": "budget"}},
        "output": {"path": str(tmp_path / "run"), "columns": ["reasoning"]},
        "engine": INSTANT,
    }
    assert batchrunner.run(job).rows_ok == 2
    for row in results_of(job):
        assert (row["output"], row["completion_tokens"], row["finish_reason"]) == ("", 3, "length")
        assert len(row["reasoning"].split()) == 1 + 3


def tool_of(name: str) -> dict[str, Any]:
    """Return a tool with two arguments."""
    parameters = {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "unit": {"enum": ["m", "km"]}},
        "required": ["a", "unit"],
    }
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = [tool_of("look"), tool_of("measure")]


async def tool_loop(row: dict[str, Any], generate: Any) -> dict[str, Any]:
    """Let the model call tools until it answers."""
    messages = [{"role": "user", "content": row["text"]}]
    called = list[str]()
    while True:
        answer = await generate(messages, tools=TOOLS)
        messages.append(answer.message)
        if not answer.tool_calls:
            return {"turns_with_calls": len(called), "answer": answer.text, "called": sorted(set(called))}
        assert answer.finish_reason == "tool_calls"
        for call in answer.tool_calls:
            assert isinstance(call.arguments["a"], int)
            assert call.arguments["unit"] in {"m", "km"}
            called.append(call.name)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "5"})


def test_a_rollout_calls_tools_in_a_turn_or_two() -> None:
    """Then comes an answer; all tools are called, with arguments of their schemas."""
    rows = rows_of([f"row {n}" for n in range(40)], rollout=tool_loop)
    made = [json.loads(row["returned"]) if "returned" in row else row for row in rows]
    assert {row["turns_with_calls"] for row in made} == {1, 2}
    assert {name for row in made for name in row["called"]} == {"look", "measure"}
    assert all(row["answer"].startswith("[simulated] ") for row in made)


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("none", set()),
        ("required", {"look", "measure"}),
        ({"type": "function", "function": {"name": "look"}}, {"look"}),
    ],
)
def test_the_choice_of_tools_is_followed(choice: Any, names: set[str]) -> None:
    """No call, a call of any tool, or of the one that is named."""
    prompt = {"user": "{{ text }}", "tools": TOOLS}
    rows = rows_of([f"row {n}" for n in range(20)], prompt=prompt, sampling={"tool_choice": choice})
    calls = [call for row in rows for call in row["tool_calls"] or []]
    assert {call["function"]["name"] for call in calls} == names
    assert len(calls) == (20 if names else 0)


URLS = {"chat": "/v1/chat/completions", "text": "/v1/completions", "vector": "/v1/embeddings"}
TYPES: dict[str, Any] = {
    "chat": chat.ChatCompletion,
    "text": openai.types.Completion,
    "vector": openai.types.CreateEmbeddingResponse,
}
MESSAGES = {"messages": [{"role": "user", "content": "Why?"}]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "grade", "schema": SCHEMA}}
BODIES: list[tuple[str, int, dict[str, Any]]] = [
    ("chat", 1, MESSAGES),
    ("chat", 3, {**MESSAGES, "n": 3, "max_tokens": 5, "seed": 7}),
    ("chat", 1, {**MESSAGES, "tools": TOOLS}),
    ("chat", 1, {**MESSAGES, "response_format": FORMAT}),
    ("chat", 1, {**MESSAGES, "response_format": FORMAT, "max_completion_tokens": 6}),
    ("chat", 1, {**MESSAGES, "regex": "(yes|no)"}),
    ("chat", 1, {**MESSAGES, "reasoning": {"max_tokens": 4}}),
    ("text", 1, {"prompt": "Why?"}),
    ("text", 4, {"prompt": ["Why?", "How?"], "n": 2, "max_tokens": 300}),
    ("text", 1, {"prompt": [1, 2, 3]}),
]
"""The kind of a request, the choices of its answer, and its body."""
VECTORS = [("vector", 2, {"input": ["a", "b"], "dimensions": 8}), ("vector", 1, {"input": "a"})]


@pytest.mark.parametrize("bodies", [BODIES, VECTORS])
def test_whole_answers_are_of_openai_s_types(tmp_path: Path, bodies: list[tuple[str, int, Any]]) -> None:
    """The bodies of a batch's results are valid by openai's own models, and their counts fit together."""
    lines = [
        {"custom_id": str(n), "method": "POST", "url": URLS[kind], "body": {"model": "any", **body}}
        for n, (kind, _, body) in enumerate(bodies)
    ]
    requests, results = tmp_path / "requests.jsonl", tmp_path / "results.jsonl"
    requests.write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = batchrun("batch", requests, "-o", results, "--engine", "simulated", "--set", "engine.step_s=0")
    assert done.exit_code == 0, done.stderr
    found = [json.loads(line) for line in results.read_text().splitlines()]
    assert [line["error"] for line in found] == [None] * len(lines)
    for line, (kind, count, _) in zip(found, bodies, strict=True):
        answer = TYPES[kind].model_validate(line["response"]["body"])
        usage = answer.usage
        assert usage.total_tokens == usage.prompt_tokens + getattr(usage, "completion_tokens", 0)
        parts = answer.data if kind == "vector" else answer.choices
        assert [part.index for part in parts] == [*range(count)]


def test_whole_requests_are_followed(tmp_path: Path) -> None:
    """Limits, tools, schemas and expressions of a batch file's lines decide their answers."""
    bodies = [body for kind, _, body in BODIES if kind == "chat"]
    lines = [
        {"custom_id": str(n), "method": "POST", "url": URLS["chat"], "body": body}
        for n, body in enumerate(bodies)
    ]
    requests, results = tmp_path / "requests.jsonl", tmp_path / "results.jsonl"
    requests.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert batchrun("batch", requests, "-o", results, "--engine", "simulated").exit_code == 0
    found = [json.loads(line)["response"]["body"] for line in results.read_text().splitlines()]
    choices = [body["choices"][0] for body in found]
    assert [choice["finish_reason"] for choice in choices[1:]] == [
        "length", "tool_calls", "stop", "length", "stop", "stop",
    ]  # fmt: skip
    _, _, calls, whole, cut, expression, thinking = (choice["message"] for choice in choices)
    assert len(thinking["reasoning_content"].split()) == 1 + 4
    assert (calls["content"], len(calls["tool_calls"])) == (None, 1)
    assert json.loads(whole["content"]).keys() == {"name", "grade"}
    assert whole["content"].startswith(cut["content"])
    assert expression["content"] in {"yes", "no"}
    assert found[4]["usage"]["completion_tokens"] == 6
