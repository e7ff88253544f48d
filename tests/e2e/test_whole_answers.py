"""Whole answers: reasoning, tool calls, token ids and probabilities, several outputs of a row."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import batchrunner
from batchrunner.core.errors import JobError
from tests.conftest import (
    batchrun,
    batchrun_merge,
    job_of,
    parts_of,
    results_of,
    run_job,
    write_rows,
)
from tests.support.answers import Body
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
CALLS = "list<item: struct<id: string, type: string, function: struct<name: string, arguments: string>>>"
TYPES = {
    "reasoning": "string",
    "tool_calls": CALLS.replace("item", "element"),
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
    assert row["error"] == "the answer came without logprobs, which output.columns asks for"
    assert (row["output"], row["logprobs"], row["attempts"]) == (None, None, 2)


@pytest.mark.parametrize("calls", ["x", [7], [{"function": "f"}]])
def test_odd_tool_calls(tmp_path: Path, server: FakeSGLang, calls: Any) -> None:
    """They fail their row."""
    server.script = lambda sent: says("", tool_calls=calls) if sent.prompt == "row 0" else "answer"
    job = asking(tmp_path, server, ["tool_calls"], rows=2, prompt=CHAT, limits={"max_attempts": 1})
    assert batchrunner.run(job).rows_failed == 1


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


def test_a_carried_column_called_reasoning_stays(tmp_path: Path, server: FakeSGLang) -> None:
    """Then no column comes by itself, and answers are not parted; asked for, the name is taken."""
    server.script = lambda _: says("<think>a</think>b")
    write_rows(tmp_path / "input.parquet", 1, reasoning=["mine"])
    job = job_of(tmp_path, server, prompt=CHAT, input={"columns": ["reasoning"]})
    batchrunner.run(job)
    (row,) = results_of(job)
    assert (row["reasoning"], row["output"]) == ("mine", "<think>a</think>b")
    with pytest.raises(JobError, match="a result has a column 'reasoning' of its own"):
        batchrunner.run(job, overrides=["output.columns=[reasoning]"])


def test_starts_with_other_columns(tmp_path: Path, server: FakeSGLang) -> None:
    """Rows of starts without a column have nulls in it, once they are merged."""
    job = asking(tmp_path, server, [], rows=6, input={"limit": 2})
    for limit, columns in ((2, "[]"), (4, "[output_ids]"), (6, "[matched_stop]")):
        overrides = [f"input.limit={limit}", f"output.columns={columns}"]
        assert batchrunner.run(job, overrides=overrides).exit_code == 0
    merged = pq.read_table(batchrun_merge(tmp_path / "run"))
    assert [bool(ids) for ids in merged["output_ids"].to_pylist()] == [False] * 2 + [True] * 2 + [False] * 2
    assert merged["matched_stop"].to_pylist() == [None] * 4 + ["2"] * 2
    assert merged["output_ids"].type == pa.list_(pa.int32())
    assert batchrun("merge", tmp_path / "run", tmp_path / "all.jsonl").exit_code == 0
    lines = [json.loads(line) for line in (tmp_path / "all.jsonl").read_text().splitlines()]
    assert [line["matched_stop"] for line in lines] == [None] * 4 + ["2"] * 2


def test_several_outputs(tmp_path: Path, server: FakeSGLang) -> None:
    """They are lists, and everything that counts rows counts those of the input; row 1 is refused."""
    server.script = lambda sent: "too long" if sent.prompt == "row 1" else "answer"
    limits = {"max_failed_rows": 1}
    job = asking(tmp_path, server, ["output_ids"], rows=4, sampling={"n": 3}, limits=limits)
    report = batchrunner.run(job)
    assert (report.exit_code, report.rows_ok, report.rows_failed, report.output_tokens) == (0, 3, 1, 45)
    found = results_of(job)
    assert [row["output"] and len(row["output"]) for row in found] == [3, None, 3, 3]
    assert found[0]["output_ids"] == [[0, 1, 2, 3, 4]] * 3
    run = tmp_path / "run"
    status = status_of(run)
    assert (status["rows_on_disk"], status["rows_failed"]) == (4, 1)
    merged = json.loads(batchrun("merge", run, "--json").stdout)
    assert (merged["rows"], merged["report"]["output_tokens"]) == (4, 45)
    assert merged["report"]["finish_reasons"] == {"stop": 9}
    assert batchrun("merge", run, tmp_path / "all.csv").exit_code == 0
    with (tmp_path / "all.csv").open() as file:
        ids = [row["output_ids"] for row in csv.DictReader(file)]
    assert ids == ["" if row == 1 else "[[0,1,2,3,4],[0,1,2,3,4],[0,1,2,3,4]]" for row in range(4)]
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
    assert sorted(row["row"] for row in rows) == [0, 1]
    assert [*rows[0]] == table.column_names
    assert rows[0]["output_ids"] == [[0, 1, 2, 3]] * 2
    with pytest.raises(JobError, match=r"output\.columns: should be a valid list"):
        batchrunner.generate(["a"], **{**options, "answers": "output_ids"})
    assert batchrunner.generate([], **options).schema.names == table.schema.names


def test_prompt_logprobs_of_chats_need_their_tokens(tmp_path: Path, server: FakeSGLang) -> None:
    """The chat endpoint gives none: without a tokenizer here the run is refused before anything is sent."""
    job = asking(tmp_path, server, ["prompt_logprobs"], rows=2, prompt=CHAT)
    refused = run_job(job, tmp_path, code=2)
    assert "output.columns: prompt_logprobs: prompts cannot be tokenised here" in refused.stderr
    assert server.sent == []
