"""Whole answers: reasoning, tool calls, token ids and probabilities, several outputs of a row."""

import json
import math
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import batchrunner
from batchrunner.core.errors import JobError
from tests.conftest import (
    job_of,
    merged_table,
    parts_of,
    printed,
    results_of,
    run_job,
    write_rows,
)
from tests.support.answers import TOOL_CALL, Body
from tests.support.fake_sglang import FakeSGLang, Sent, answer
from tests.support.runs import status_of

pytestmark = pytest.mark.usefixtures("quick_retries")

CHAT = {"user": "{{ text }}"}
KINDS: dict[str, dict[str, Any]] = {
    "text": {"prompt": {"text": "text"}},
    "chat": {"prompt": CHAT},
    "ids": {"prompt": {"input_ids": "ids"}, "bundle": "off"},
    "bundled": {"prompt": {"input_ids": "ids"}, "bundle": 8, "window": 16},
}
TOKEN = "struct<id: int32, token: string, logprob: float>"
CALLS_TYPE = "list<item: struct<id: string, type: string, function: struct<name: string, arguments: string>>>"
TYPES = {
    "reasoning": "string",
    "tool_calls": CALLS_TYPE.replace("item", "element"),
    "output_ids": "list<element: int32>",
    "logprobs": f"list<element: {TOKEN}>",
    "top_logprobs": f"list<element: list<element: {TOKEN}>>",
    "prompt_logprobs": f"list<element: {TOKEN}>",
    "matched_stop": "string",
}


def asking(directory: Path, server: Any, columns: list[str], *, rows: int = 20, **changes: Any) -> Any:
    """Return a job that asks for columns."""
    if not (directory / "input.parquet").exists():
        write_rows(directory / "input.parquet", rows, ids=[[row] for row in range(rows)])
    output = {"columns": columns, **changes.pop("output", {})}
    return job_of(directory, server, output=output, **changes)


def token(number: int, text: str, *, first: int = 0) -> dict[str, Any]:
    """A token as the stand-in counts them."""
    return {"id": 100 + number, "token": text, "logprob": -0.5 - number - first}


def says(text: str, **message: Any) -> Body:
    """A chat's answer with a text, and what else its message has."""
    choice = {"index": 0, "message": {"content": text, **message}, "finish_reason": "stop"}
    return Body(json.dumps({"choices": [choice], "usage": {"completion_tokens": 9}}).encode())


def types_of(part: pa.Table) -> dict[str, str]:
    """Return the types of the columns after `error`."""
    names = part.schema.names
    return {name: str(part.schema.field(name).type) for name in names[names.index("error") + 1 :]}


@pytest.mark.usefixtures("full_requests")
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_and_their_probabilities(tmp_path: Path, server: FakeSGLang, kind: str) -> None:
    """Each way of sending brings the same columns, in bundles too."""
    asked = ["top_logprobs", "output_ids", "logprobs", "finish_reason"]
    job = asking(tmp_path, server, asked, **KINDS[kind], output={"top_logprobs": 2})
    report = batchrunner.run(job)
    assert (report.exit_code, report.rows_ok) == (0, 20)
    assert (report.bundles["most_rows"] > 1) == (kind == "bundled")
    expected = {"reasoning"} if kind == "chat" else set()
    assert {*types_of(parts_of(tmp_path / "run")[0])} == {"output_ids", "logprobs", "top_logprobs", *expected}
    for row in results_of(job):
        words = row["output"].split()
        assert row["output_ids"] == [*range(len(words))]
        assert row["logprobs"] == [token(n, word) for n, word in enumerate(words)]
        assert row["top_logprobs"] == [[token(n, word)] * 2 for n, word in enumerate(words)]


@pytest.mark.parametrize("kind", ["text", "chat", "ids"])
def test_probabilities_that_json_does_not_have(
    tmp_path: Path, server: FakeSGLang, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """NaN is null, and minus infinity stays; half a surrogate pair is replaced, and the row is ok."""
    odd = [[-math.inf, 1, "a"], [math.nan, 2, "half \ud800"], [math.inf, 3, "c"], [-0.5, 4, "d"]]
    monkeypatch.setattr("tests.support.answers.logprobs_of", lambda _: odd)
    asked = ["logprobs", "top_logprobs"]
    job = asking(tmp_path, server, asked, rows=2, **KINDS[kind], output={"top_logprobs": 1})
    report = batchrunner.run(job)
    assert (report.rows_ok, report.rows_failed) == (2, 0)
    for row in results_of(job):
        tokens = [(each["logprob"], each["token"]) for each in row["logprobs"]]
        assert tokens == [(-math.inf, "a"), (None, "half \ufffd"), (None, "c"), (-0.5, "d")]
        assert row["top_logprobs"] == [[each] for each in row["logprobs"]]
    assert {sent.tries for sent in server.sent} == {1}


def test_types_are_fixed(tmp_path: Path, server: FakeSGLang) -> None:
    """Also where no row has a value, and in the order of the documentation."""
    columns = [name for name in reversed(TYPES) if name != "tool_calls"]
    batchrunner.run(asking(tmp_path, server, columns, rows=1))
    found = types_of(parts_of(tmp_path / "run")[0])
    assert [*found] == [name for name in TYPES if name in columns]
    assert found == {name: TYPES[name] for name in found}
    chat = asking(tmp_path, server, ["tool_calls"], prompt=CHAT, output={"path": str(tmp_path / "chat")})
    batchrunner.run(chat)
    assert types_of(parts_of(tmp_path / "chat")[0]) == {n: TYPES[n] for n in ("reasoning", "tool_calls")}


@pytest.mark.parametrize("kind", ["text", "chat"])
def test_an_answer_without_what_was_asked_for(tmp_path: Path, server: FakeSGLang, kind: str) -> None:
    """An older server may not know it: the row says so, and is not stored as if it were whole."""

    def script(sent: Sent) -> Body:
        plain = Sent(sent.path, sent.prompt, {**sent.body, "return_logprob": False, "logprobs": False}, 1)
        return Body(json.dumps(answer(plain)).encode())

    server.script = script
    job = asking(tmp_path, server, ["logprobs"], rows=2, **KINDS[kind], limits={"max_attempts": 2})
    assert batchrunner.run(job).exit_code == 3
    (row, _) = results_of(job)
    assert row["error"] == "the answer lacks logprobs, which output.columns requests"
    assert (row["output"], row["attempts"]) == (None, 2)


THOUGHTS = [
    (says("It is 4.", reasoning_content="2 + 2"), "2 + 2", "It is 4."),
    (says("<think>\n2 + 2\n</think>\n\nIt is 4."), "2 + 2", "It is 4."),
    (says("2 + 2\n</think>\n\nIt is 4."), "2 + 2", "It is 4."),
    (says("<think>2 + 2 is"), "2 + 2 is", ""),
    (says("Write </think> and <think> so."), None, "Write </think> and <think> so."),
]


@pytest.mark.parametrize(("said", "reasoning", "output"), THOUGHTS)
def test_reasoning_comes_by_itself(
    tmp_path: Path, server: FakeSGLang, said: Body, reasoning: str | None, output: str
) -> None:
    """In chats, whether the server parts it from the answer or not."""
    server.script = lambda _: said
    job = job_of(tmp_path, server, rows=1, prompt=CHAT)
    batchrunner.run(job)
    (row,) = results_of(job)
    assert (row["reasoning"], row["output"], row["error"]) == (reasoning, output, None)


def test_reasoning_in_texts_is_parted_on_demand(tmp_path: Path, server: FakeSGLang) -> None:
    """A text that is no chat is left as it is, unless the job asks."""
    thought = {"text": "<think>hm</think>yes", "meta_info": {"finish_reason": {"type": "stop"}}}
    server.script = lambda _: Body(json.dumps(thought).encode())
    job = job_of(tmp_path, server, rows=1)
    batchrunner.run(job)
    assert results_of(job)[0]["output"] == "<think>hm</think>yes"
    batchrunner.run(job, overrides=["output.columns=[reasoning]"], fresh=True)
    assert [(row["reasoning"], row["output"]) for row in results_of(job)] == [("hm", "yes")]


@pytest.mark.parametrize("name", ["reasoning", "tool_calls"])
def test_a_carried_column_of_that_name_stays(tmp_path: Path, server: FakeSGLang, name: str) -> None:
    """Then no column comes by itself, and answers are not parted; asked for, the name is taken."""
    server.script = lambda _: says("<think>a</think>b", tool_calls=[TOOL_CALL])
    columns: dict[str, Any] = {name: ["mine"]}
    write_rows(tmp_path / "input.parquet", 1, **columns)
    job = job_of(tmp_path, server, prompt=TOOL_CHAT, input={"columns": [name]})
    batchrunner.run(job)
    (row,) = results_of(job)
    assert row[name] == "mine"
    assert row["output"] == ("<think>a</think>b" if name == "reasoning" else "b")
    with pytest.raises(JobError, match=f"the results already have a column '{name}'"):
        batchrunner.run(job, overrides=[f"output.columns=[{name}]"])


def test_starts_with_other_columns(tmp_path: Path, server: FakeSGLang) -> None:
    """Rows of starts without a column have nulls in it, once they are merged."""
    job = asking(tmp_path, server, [], rows=6, input={"limit": 2})
    for limit, columns in ((2, "[]"), (4, "[output_ids]"), (6, "[matched_stop]")):
        overrides = [f"input.limit={limit}", f"output.columns={columns}"]
        assert batchrunner.run(job, overrides=overrides).exit_code == 0
    merged = merged_table(tmp_path / "run")
    assert [bool(ids) for ids in merged["output_ids"].to_pylist()] == [False] * 2 + [True] * 2 + [False] * 2
    assert merged["matched_stop"].to_pylist() == [None] * 4 + ["2"] * 2
    assert merged["output_ids"].type == pa.list_(pa.int32())


def test_several_outputs(tmp_path: Path, server: FakeSGLang) -> None:
    """They are lists, and everything that counts rows counts those of the input; row 1 is refused."""
    server.script = lambda sent: "too long" if sent.prompt == "row 1" else "answer"
    limits = {"max_failed_rows": 1}
    job = asking(tmp_path, server, ["output_ids"], rows=4, sampling={"n": 3}, limits=limits)
    report = batchrunner.run(job)
    assert (report.exit_code, report.rows_ok, report.rows_failed, report.output_tokens) == (0, 3, 1, 45)
    found = results_of(job)
    assert [row["output_ids"] for row in found] == [
        None if n == 1 else [[0, 1, 2, 3, 4]] * 3 for n in range(4)
    ]
    assert found[0]["output"] == [f"answer {n} to row 0" for n in range(3)]
    status = status_of(tmp_path / "run")
    assert (status["rows_on_disk"], status["rows_failed"]) == (4, 1)
    merged = printed("merge", tmp_path / "run")
    assert (merged["rows"], merged["report"]["output_tokens"]) == (4, 45)
    assert merged["report"]["finish_reasons"] == {"stop": 9}
    again = batchrunner.run(job)
    assert (again.rows_resumed, again.rows_ok, again.rows_failed) == (4, 3, 1)


async def test_a_stream_and_a_table_of_them(server: FakeSGLang) -> None:
    """The library asks by `answers`."""
    options: dict[str, Any] = {
        "prompt": {"text": "text"}, "engine": server.url, "sampling": {"n": 2}, "answers": ["output_ids"],
    }  # fmt: skip
    table = batchrunner.generate(["a", "b"], **options)
    assert table["output_ids"].to_pylist() == [[[0, 1, 2, 3]] * 2] * 2
    rows = [row async for row in batchrunner.stream(["a", "b"], **options)]
    assert [[*row] for row in rows] == [table.column_names] * 2
    assert rows[0]["output_ids"] == [[0, 1, 2, 3]] * 2


def test_prompt_logprobs_of_chats_need_their_tokens(tmp_path: Path, server: FakeSGLang) -> None:
    """The chat endpoint gives none: without a tokenizer here the run is refused before anything is sent."""
    job = asking(tmp_path, server, ["prompt_logprobs"], rows=2, prompt=CHAT)
    refused = run_job(job, tmp_path, code=2)
    assert "output.columns: prompt_logprobs: batchrunner cannot tokenize the prompts itself" in refused.stderr
    assert server.sent == []


# --- chats with tools: those of the job, or of a column; the calls are a column of the results ---


def tool(name: str, **properties: Any) -> dict[str, Any]:
    """A tool in OpenAI's form."""
    parameters = {"type": "object", "properties": {key: {"type": kind} for key, kind in properties.items()}}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = [tool("get_weather", city="string"), tool("get_time")]
TOOL_CHAT = {"user": "{{ text }}", "tools": TOOLS}
CALLS = [
    {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Bern"}'}}
]
NAMED = {"type": "function", "function": {"name": "get_time"}}


@pytest.mark.parametrize("choice", [None, "required", NAMED])
def test_tools_of_the_job(tmp_path: Path, server: FakeSGLang, choice: Any) -> None:
    """Each request has them; the column of calls is there by itself, with the text where there is one."""
    server.script = lambda sent: "answer" if sent.prompt == "row 1" else "tool call"
    job = job_of(tmp_path, server, rows=2, prompt=TOOL_CHAT, sampling={"tool_choice": choice})
    batchrunner.run(job)
    for sent in server.sent:
        assert (sent.body["tools"], sent.body.get("tool_choice")) == (TOOLS, choice)
    found = [(row["tool_calls"], row["output"], row["finish_reason"]) for row in results_of(job)]
    assert found == [(CALLS, "", "tool_calls"), (None, "answer 0 to row 1", "stop")]


WRONG = {
    "[{": "prompt.tools: column 'tools': not JSON",
    '[{"type": "function"}]': "prompt.tools: column 'tools': tool 1 is not of the form",
    json.dumps([TOOLS[0]] * 2): "prompt.tools: column 'tools': two tools have the name 'get_weather'",
}


@pytest.mark.parametrize("wrong", [WRONG, {}], ids=["JSON", "structs"])
def test_tools_of_a_column(tmp_path: Path, server: FakeSGLang, wrong: dict[str, str]) -> None:
    """Each row has its own, or none; what is no list of tools fails its row."""
    given: list[Any] = [[TOOLS[0]], None, [TOOLS[1]], []]
    if wrong:
        given = [None if tools is None else json.dumps(tools) for tools in given] + [*wrong]
    write_rows(tmp_path / "input.parquet", len(given), tools=pa.array(given))
    prompt = {"user": "{{ text }}", "tools": "tools"}
    job = job_of(
        tmp_path, server, prompt=prompt, sampling={"tool_choice": "required", "temperature": 0},
        limits={"max_failed_rows": len(wrong)},
    )  # fmt: skip
    assert batchrunner.run(job).exit_code == 0
    sent = [sent.body for sent in sorted(server.sent, key=lambda sent: sent.row)]
    assert [body.get("tools") for body in sent] == [[TOOLS[0]], None, [TOOLS[1]], None]
    assert [body.get("tool_choice") for body in sent] == ["required", None, "required", None]
    for row, told in zip(results_of(job)[4:], wrong.values(), strict=True):
        assert row["error"].startswith(told)


def test_equal_prompts_with_unlike_tools_are_unlike_requests(tmp_path: Path, server: FakeSGLang) -> None:
    """At temperature 0 only rows with equal tools share an answer."""
    tools = [json.dumps([TOOLS[row % 2]]) for row in range(6)]
    pq.write_table(pa.table({"text": ["same"] * 6, "tools": tools}), tmp_path / "input.parquet")
    prompt = {"user": "{{ text }}", "tools": "tools"}
    job = job_of(tmp_path, server, prompt=prompt, sampling={"temperature": 0})
    assert batchrunner.run(job).rows_deduplicated == 4
    assert sorted(sent.body["tools"] == TOOLS[:1] for sent in server.sent) == [False, True]


def test_several_outputs_with_calls(tmp_path: Path, server: FakeSGLang) -> None:
    """Each has its calls, or none."""

    def script(sent: Sent) -> Body:
        reply = answer(sent, "words")
        reply["choices"][1].update(
            finish_reason="tool_calls",
            message={"role": "assistant", "content": None, "tool_calls": [TOOL_CALL]},
        )
        return Body(json.dumps(reply).encode())

    server.script = script
    job = job_of(tmp_path, server, rows=1, prompt=TOOL_CHAT, sampling={"n": 2})
    assert batchrunner.run(job).exit_code == 0
    (row,) = results_of(job)
    assert (row["output"], row["tool_calls"]) == (["words", ""], [None, CALLS])
