"""What reaches the engine of a row: its prompt, its conversation and its sampling values."""

import csv
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import batchrunner
from tests.conftest import (
    batchrun,
    job_of,
    results_of,
    write_job,
    write_rows,
)
from tests.support.fake_sglang import FakeSGLang, Sent
from tests.support.refusals import refusal


def test_templates_make_messages(tmp_path: Path, server: FakeSGLang) -> None:
    """`system` and `user` templates reach the server as messages; its chat template is applied there."""
    job = job_of(
        tmp_path,
        server,
        rows=1,
        prompt={
            "system": "Be {{ id }}.",
            "user": "Say {{ text }}",
            "chat_template_kwargs": {"enable_thinking": False},
        },
    )
    batchrunner.run(job)
    (sent,) = server.sent
    assert sent.path == "/v1/chat/completions"
    assert sent.body["messages"] == [
        {"role": "system", "content": "Be 0."},
        {"role": "user", "content": "Say row 0"},
    ]
    assert sent.body["chat_template_kwargs"] == {"enable_thinking": False}


@pytest.mark.parametrize("prompt", ["text", "{{ text }}"])
def test_text_is_sent_as_it_is(tmp_path: Path, server: FakeSGLang, prompt: str) -> None:
    """A text column, or a template of a text, goes to the model without a chat template."""
    batchrunner.run(job_of(tmp_path, server, rows=1, prompt={"text": prompt}))
    (sent,) = server.sent
    assert (sent.path, sent.body["text"]) == ("/generate", "row 0")


@pytest.mark.parametrize(
    "kind", [pa.list_(pa.int8()), pa.large_list(pa.int64()), pa.list_(pa.uint64(), 2), pa.list_(pa.uint32())]
)
def test_token_ids_of_any_type(tmp_path: Path, server: FakeSGLang, kind: Any) -> None:
    """Filtered rows, and those after a null, have their own ids too; a null among the ids fails its row."""
    lists = [[row, 100 + row] for row in range(6)]
    path = tmp_path / "ids.parquet"
    for ids, sent in ((lists, lists[2:]), ([*lists[:3], None, [4, None], lists[5]], [lists[2], lists[5]])):
        pq.write_table(pa.table({"n": range(6), "ids": pa.array(ids, kind)}), path)
        source = {"path": str(path), "filter": "n > 1"}
        job = job_of(tmp_path, server, input=source, prompt={"input_ids": "ids"})
        server.sent.clear()
        batchrunner.run(job, fresh=True)
        assert sorted(row.body["input_ids"] for row in server.sent) == sent


@pytest.mark.parametrize("prompt", [{"text": "text"}, {"user": "{{ text }}"}])
def test_sampling_from_columns(tmp_path: Path, server: FakeSGLang, prompt: dict[str, str]) -> None:
    """A row brings its own value, a null leaves the engine's default, and the rest is the job's."""
    write_rows(tmp_path / "input.parquet", 3, heat=[0.5, None, 0.0], seed=[1, 2, None])
    job = job_of(
        tmp_path,
        server,
        prompt=prompt,
        sampling={"temperature": {"column": "heat"}, "sampling_seed": {"column": "seed"}, "top_k": 7},
    )
    batchrunner.run(job)
    found = {
        sent.prompt: (
            sampling_of(sent).get("temperature"),
            sampling_of(sent).get("sampling_seed", sampling_of(sent).get("seed")),
            sampling_of(sent)["top_k"],
        )
        for sent in server.sent
    }
    assert found == {"row 0": (0.5, 1, 7), "row 1": (None, 2, 7), "row 2": (0.0, None, 7)}


def test_an_empty_text_of_csv_is_no_value(tmp_path: Path, server: FakeSGLang) -> None:
    """CSV has no nulls: an empty cell means no tools or no schema, as a null does in other files."""
    tools = json.dumps([{"type": "function", "function": {"name": "look_up"}}])
    with (tmp_path / "input.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerows([("text", "tools", "schema"), ("a", tools, '{"type": "object"}'), ("b", " ", "")])
    job = job_of(
        tmp_path,
        server,
        input={"path": str(tmp_path / "input.csv")},
        prompt={"user": "{{ text }}", "tools": "tools"},
        sampling={"json_schema": {"column": "schema"}},
        limits={"max_failed_rows": "100%"},
    )
    batchrunner.run(job)
    (sent,) = [sent for sent in server.sent if sent.prompt == "b"]
    assert not {"tools", "response_format", "json_schema"} & sent.body.keys()
    assert not {"tools", "json_schema"} & sampling_of(sent).keys()


def sampling_of(sent: Sent) -> dict[str, Any]:
    found: dict[str, Any] = sent.body.get("sampling_params", sent.body)
    return found


def test_a_schema_reaches_either_endpoint(tmp_path: Path, server: FakeSGLang) -> None:
    """One job with a JSON schema means the same with and without a chat template."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    job = job_of(tmp_path, server, rows=1, sampling={"json_schema": schema, "stop": ["END"]})
    batchrunner.run(job)
    batchrunner.run({**job, "prompt": {"user": "{{ text }}"}, "output": {"path": str(tmp_path / "chat")}})
    raw, chat = server.sent
    assert json.loads(raw.body["sampling_params"]["json_schema"]) == schema
    assert chat.body["response_format"]["json_schema"]["schema"] == schema
    assert raw.body["sampling_params"]["stop"] == chat.body["stop"] == ["END"]
    assert raw.body["sampling_params"]["max_new_tokens"] == chat.body["max_completion_tokens"] == 1024


def test_numbers_that_json_has_not(tmp_path: Path, server: FakeSGLang) -> None:
    """A NaN in a sampling column fails its row; sent, it would be the engine's default."""
    write_rows(tmp_path / "input.parquet", 2, t=[float("nan"), 0.5])
    job = job_of(tmp_path, server, sampling={"temperature": {"column": "t"}})
    batchrunner.run(job)
    assert [row["error"] for row in results_of(job)] == [
        "sampling.temperature: nan is not a valid value",
        None,
    ]


def sent_for(tmp_path: Path, server: FakeSGLang, talks: list[Any], **prompt: Any) -> list[dict[str, Any]]:
    """Return the bodies that are sent for these conversations, in order."""
    pq.write_table(pa.table({"talk": talks}), tmp_path / "input.parquet")
    job = job_of(
        tmp_path, server, prompt={"messages": "talk", **prompt}, window=1, order="input", dedupe=False
    )
    assert batchrunner.run(job, fresh=True).rows_ok == len(talks)
    return [sent.body for sent in server.sent]


def said(*turns: tuple[str, Any]) -> list[dict[str, Any]]:
    return [{"role": role, "content": content} for role, content in turns]


SHARE_GPT = [
    {"from": "system", "value": "Be brief.", "weight": None},
    {"from": "human", "value": "Hi", "weight": None},
    {"from": "gpt", "value": "Hello!", "weight": 1.0},
    {"from": "observation", "value": "42", "weight": None},
    {"from": "Human", "value": "Why?", "weight": None},
]
SENT = said(
    ("system", "Be brief."), ("user", "Hi"), ("assistant", "Hello!"), ("tool", "42"), ("user", "Why?")
)


@pytest.mark.parametrize("as_text", [False, True])
@pytest.mark.parametrize("closing", [0, 2])
def test_share_gpt(tmp_path: Path, server: FakeSGLang, as_text: bool, closing: int) -> None:
    """ShareGPT's names become those of the endpoint; what the assistant says at the end is left out."""
    talk = SHARE_GPT + [{"from": "gpt", "value": "Because.", "weight": 1.0}] * closing
    (body,) = sent_for(tmp_path, server, [json.dumps(talk) if as_text else talk])
    assert body["messages"] == SENT
    assert "continue_final_message" not in body


def test_parts(tmp_path: Path, server: FakeSGLang) -> None:
    """Parts of text are joined, also beside contents that are texts; other parts stay as they are."""
    image = {"type": "image_url", "image_url": {"url": "data:,"}}
    talks = [
        said(("user", [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}])),
        said(("system", "s"), ("user", [{"type": "text", "text": "c"}, "d"])),
        said(("user", [{"type": "text", "text": "e"}, image]), ("user", "f")),
    ]
    bodies = sent_for(tmp_path, server, [json.dumps(talk) for talk in talks])
    assert [body["messages"] for body in bodies] == [
        said(("user", "a b")),
        said(("system", "s"), ("user", "c d")),
        said(("user", [{"type": "text", "text": "e"}, image]), ("user", "f")),
    ]


def test_continue(tmp_path: Path, server: FakeSGLang) -> None:
    """With `continue` the assistant's last message is sent, and the endpoint is told to go on with it."""
    talks = [said(("user", "a"), ("assistant", "It ")), said(("user", "b"))]
    first, second = sent_for(tmp_path, server, talks, **{"continue": True})
    assert (first["messages"], first["continue_final_message"]) == (talks[0], True)
    assert second["messages"] == talks[1]


def test_templates(tmp_path: Path, server: FakeSGLang) -> None:
    """A list of messages is filled in for each row; an assistant's message at its end begins the answer."""
    shots = [
        *said(("system", "Be brief."), ("user", "1"), ("assistant", "one")),
        *said(("user", "{{ id }}{{ text }}")),
    ]
    job = job_of(tmp_path, server, rows=1, prompt={"messages": shots})
    batchrunner.run(job)
    assert server.sent[0].body["messages"] == [*shots[:-1], *said(("user", "0row 0"))]
    server.forget()
    job["prompt"] = {"messages": [*shots, *said(("assistant", "{{ text[:3] }}"))]}
    file = write_job(job, tmp_path)
    assert batchrun(file, "--fresh").exit_code == 0
    assert server.sent[0].body["messages"][-1] == {"role": "assistant", "content": "row"}
    assert server.sent[0].body["continue_final_message"] is True
    assert batchrun(file).exit_code == 0  # the run is recognised
    assert batchrun("check", file).exit_code == 0


BAD = [
    ([{"role": "critic", "content": "a"}], "message 1 has the unknown role 'critic'"),
    (said(("user", "a"), ("user", None)), "message 2 has content that is not text"),
    (said((None, "a")), "message 1 has no role"),  # type: ignore[arg-type]
    (said(("user", [{"text": "a"}])), "message 1 has a part without a type"),
    (said(("assistant", "a")), "all messages are from the assistant"),
    ([None, "Hi"], "message 1 has no role"),
    ([], "is empty"),
    ({"role": "user", "content": "a"}, "the JSON is not a list of messages"),
]


@pytest.mark.parametrize("more", [{}, {"continue": True}])
def test_bad_conversations(tmp_path: Path, server: FakeSGLang, more: dict[str, Any]) -> None:
    """Each is a failed row with the reason, and the others are done."""
    problems = [*(problem for _, problem in BAD), "not JSON", "is empty", "is null"]
    texts = [*(json.dumps(talk) for talk, _ in BAD), "no JSON", " ", None, json.dumps(said(("user", "fine")))]
    pq.write_table(pa.table({"talk": texts}), tmp_path / "input.parquet")
    job = job_of(tmp_path, server, prompt={"messages": "talk", **more}, limits={"max_failed_rows": "100%"})
    batchrunner.run(job)
    *errors, last = (row["error"] for row in results_of(job))
    for error, problem in zip(errors, problems, strict=True):
        assert error.startswith("prompt: column 'talk'")
        assert problem in error
    assert last is None
    assert server.prompts == ["fine"]


@pytest.mark.parametrize(
    ("prompt", "problem"),
    [
        ({"messages": []}, "prompt.messages"),
        ({"messages": [{"role": "critic", "content": "a"}]}, "prompt.messages"),
        ({"messages": said(("user", "{{ txt }}"))}, "prompt.messages.0.content: unknown column 'txt'"),
        ({"user": "Row {id}."}, "prompt: {id} does not insert the column: write {{ id }}"),
        ({"messages": said(("assistant", "a"))}, "has only assistant messages: add a message"),
        ({"messages": said(("user", "a")), "continue": True}, "`continue` has no effect together with"),
        ({"messages": "id"}, "must hold lists of {role, content} or {from, value}"),
    ],
)
def test_bad_prompts(tmp_path: Path, prompt: dict[str, Any], problem: str) -> None:
    """What is wrong in the job is refused in one line."""
    assert problem in refusal(job_of(tmp_path, prompt=prompt), tmp_path)
