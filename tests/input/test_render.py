"""What reaches the engine of a row: its prompt and its sampling values."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import batchrunner
from tests.conftest import (
    job_of,
    results_of,
    write_rows,
)

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.fake_sglang import FakeSGLang, Sent


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


def test_null_token_ids(tmp_path: Path, server: FakeSGLang) -> None:
    ids = pa.array([[None], [7, None]], pa.list_(pa.int32()))
    path = write_rows(tmp_path / "input.parquet", 2, ids=ids)
    job = job_of(tmp_path, server, input={"path": str(path)}, prompt={"input_ids": "ids"})
    batchrunner.run(job)
    assert [row["error"] for row in results_of(job)] == ["a token id is null"] * 2


def test_a_prompt_without_columns(tmp_path: Path, server: FakeSGLang) -> None:
    """A prompt that is the same for all rows needs no column, and nothing is carried either."""
    job = job_of(tmp_path, server, rows=5, prompt={"user": "Make up a name."}, input={"limit": 3})
    batchrunner.run(job)
    assert server.prompts == ["Make up a name."] * 3
    assert [row["row"] for row in results_of(job)] == [0, 1, 2]


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


def test_an_override_can_be_a_template(tmp_path: Path, server: FakeSGLang) -> None:
    """`--set prompt.text={{ text }}` is what it looks like, though YAML reads braces otherwise."""
    job = job_of(tmp_path, server, rows=1, prompt={"text": "id {{ id }}"})
    batchrunner.run(job, overrides=["prompt.text={{ text }}!"])
    assert server.prompts == ["row 0!"]


def test_numbers_that_json_has_not(tmp_path: Path, server: FakeSGLang) -> None:
    """A NaN in a sampling column fails its row; sent, it would be the engine's default."""
    write_rows(tmp_path / "input.parquet", 2, t=[float("nan"), 0.5])
    job = job_of(tmp_path, server, sampling={"temperature": {"column": "t"}})
    batchrunner.run(job)
    assert [row["error"] for row in results_of(job)] == [
        "sampling.temperature: nan is not a number that can be sent",
        None,
    ]
