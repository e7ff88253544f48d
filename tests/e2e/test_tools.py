"""Chats with tools: those of the job, or of a column; the calls are a column of the results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import batchrunner
from tests.conftest import batchrun_merge, job_of, results_of, write_rows
from tests.support.answers import TOOL_CALL, Body
from tests.support.fake_sglang import FakeSGLang, Sent, answer

pytestmark = pytest.mark.usefixtures("quick_retries")


def tool(name: str, **properties: Any) -> dict[str, Any]:
    """A tool in OpenAI's form."""
    parameters = {"type": "object", "properties": {key: {"type": kind} for key, kind in properties.items()}}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = [tool("get_weather", city="string"), tool("get_time")]
CHAT = {"user": "{{ text }}", "tools": TOOLS}
CALLS = [
    {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Bern"}'}}
]
NAMED = {"type": "function", "function": {"name": "get_time"}}


@pytest.mark.parametrize("choice", [None, "required", NAMED])
def test_tools_of_the_job(tmp_path: Path, server: FakeSGLang, choice: Any) -> None:
    """Each request has them; the column of calls is there by itself, with the text where there is one."""
    server.script = lambda sent: "answer" if sent.prompt == "row 1" else "tool call"
    job = job_of(tmp_path, server, rows=3, prompt=CHAT, sampling={"tool_choice": choice})
    assert batchrunner.run(job).exit_code == 0
    for sent in server.sent:
        assert sent.path == "/v1/chat/completions"
        assert sent.body["tools"] == TOOLS
        assert sent.body.get("tool_choice") == choice
    rows = results_of(job)
    assert [row["tool_calls"] for row in rows] == [CALLS, None, CALLS]
    assert [row["output"] for row in rows] == ["", "answer 0 to row 1", ""]
    assert [row["finish_reason"] for row in rows] == ["tool_calls", "stop", "tool_calls"]


WRONG = {
    "[{": "prompt.tools: column 'tools': not JSON",
    '{"a": 1}': "prompt.tools: column 'tools': no list of tools",
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
    sent = {int(sent.prompt.split()[1]): sent.body for sent in server.sent}
    assert [sent[row].get("tools") for row in range(4)] == [[TOOLS[0]], None, [TOOLS[1]], None]
    assert [sent[row].get("tool_choice") for row in range(4)] == ["required", None, "required", None]
    for row, told in zip(results_of(job)[4:], wrong.values(), strict=True):
        assert row["error"].startswith(told)


def test_equal_prompts_with_unlike_tools_are_unlike_requests(tmp_path: Path, server: FakeSGLang) -> None:
    """At temperature 0 only rows with equal tools share an answer."""
    tools = [json.dumps([TOOLS[row % 2]]) for row in range(6)]
    pq.write_table(pa.table({"text": ["same"] * 6, "tools": tools}), tmp_path / "input.parquet")
    prompt = {"user": "{{ text }}", "tools": "tools"}
    job = job_of(tmp_path, server, prompt=prompt, sampling={"temperature": 0})
    assert batchrunner.run(job).rows_deduplicated == 4
    assert sorted(sent.body["tools"][0]["function"]["name"] for sent in server.sent) == [
        "get_time", "get_weather",
    ]  # fmt: skip


def test_the_column_of_calls_in_later_starts(tmp_path: Path, server: FakeSGLang) -> None:
    """It is merged from all starts; a carried column of that name keeps its place."""
    server.script = lambda _: "tool call"
    job = job_of(tmp_path, server, rows=4, prompt=CHAT)
    for limit in (2, 4):
        assert batchrunner.run(job, overrides=[f"input.limit={limit}"]).exit_code == 0
    merged = pq.read_table(batchrun_merge(tmp_path / "run"))
    assert merged["tool_calls"].to_pylist() == [CALLS] * 4
    write_rows(tmp_path / "input.parquet", 2, tool_calls=["mine", "own"])
    carried = {**job, "input": {**job["input"], "columns": ["tool_calls"]}}
    assert batchrunner.run(carried, fresh=True).exit_code == 0
    assert [row["tool_calls"] for row in results_of(job)] == ["mine", "own"]


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
    job = job_of(tmp_path, server, rows=1, prompt=CHAT, sampling={"n": 2})
    assert batchrunner.run(job).exit_code == 0
    (row,) = results_of(job)
    assert (row["output"], row["tool_calls"]) == (["words", ""], [None, CALLS])
