"""`sampling.max_thinking_tokens`: requests that have it, servers that obey, rows that used it up."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import batchrunner
from batchrunner.core.errors import EngineStartError
from batchrunner.engines.registry import engine_of
from batchrunner.job.call import job_of_batch
from batchrunner.job.load import load_job
from tests.conftest import batchrun, job_of, report_of, results_of, run_job, write_job, write_rows
from tests.support.answers import Body
from tests.support.fake_sglang import FakeSGLang, Sent, answer
from tests.support.launchable import launchable

pytestmark = pytest.mark.usefixtures("quick_retries")

OBEYS = {"reasoning_parser": "qwen3", "enable_strict_thinking": True}
CHAT = {"user": "{{ text }}"}


def thinks(tokens: int) -> Callable[[Sent], Body]:
    """Return a script in which each answer comes after so much thinking, and the end tag."""

    def script(sent: Sent) -> Body:
        reply = answer(sent, "An answer.")
        if sent.path == "/generate":
            reply["meta_info"]["reasoning_tokens"] = tokens + 1
        else:
            reply["usage"]["reasoning_tokens"] = tokens + 1
            for choice in reply["choices"]:
                choice.get("meta_info", {})["reasoning_tokens"] = tokens + 1
        return Body(json.dumps(reply).encode())

    return script


def budget_of(sent: Sent) -> int | None:
    """Return the budget of a request, where SGLang's scheduler reads it."""
    sampling = sent.body.get("sampling_params", sent.body)
    assert "max_thinking_tokens" not in sampling
    params = sampling.get("custom_params") or {}
    budget: int | None = params.get("thinking_budget")
    return budget


def thinking_job(directory: Path, server: FakeSGLang, **changes: Any) -> dict[str, Any]:
    server.arguments = {**OBEYS, **server.arguments}
    sampling = {"max_thinking_tokens": 100, "max_new_tokens": 300, **changes.pop("sampling", {})}
    return job_of(directory, server, rows=3, sampling=sampling, **changes)


@pytest.mark.parametrize("prompt", [CHAT, {"text": "text"}])
def test_every_request_has_the_budget(tmp_path: Path, server: FakeSGLang, prompt: Any) -> None:
    """It stands among the custom parameters, beside the job's own; a text also says that it thinks."""
    server.script = thinks(99)
    job = thinking_job(tmp_path, server, prompt=prompt, sampling={"custom_params": {"a": 1}})
    outcome = run_job(job, tmp_path)
    assert [budget_of(sent) for sent in server.sent] == [100] * 3
    for sent in server.sent:
        assert sent.body.get("sampling_params", sent.body)["custom_params"]["a"] == 1
        assert sent.body.get("require_reasoning", False) is ("text" in sent.body)
    assert report_of(job)["rows_thinking_cut"] == 0
    assert "max_thinking_tokens" not in outcome.stderr


def test_a_budget_by_row(tmp_path: Path, server: FakeSGLang) -> None:
    """A column gives it; rows with a null have none, and share no request with the others."""
    write_rows(tmp_path / "input.parquet", 3, budget=[5, None, 7], ids=[[1, row] for row in range(3)])
    server.script = thinks(5)
    job = thinking_job(
        tmp_path, server, prompt={"input_ids": "ids"}, bundle=3,
        sampling={"max_thinking_tokens": {"column": "budget"}}, window=3,
    )  # fmt: skip
    report = batchrunner.run(job)
    by_row = {sent.body["input_ids"][1]: budget_of(sent) for sent in server.sent}
    assert by_row == {0: 5, 1: None, 2: 7}
    assert report.rows_thinking_cut == 1


def test_thinking_that_took_all_is_counted(tmp_path: Path, server: FakeSGLang) -> None:
    """Such rows are ok, and the end of the run says how many they are and what to set."""
    server.script = thinks(100)
    job = thinking_job(tmp_path, server, prompt=CHAT)
    outcome = run_job(job, tmp_path)
    assert report_of(job)["rows_thinking_cut"] == 3
    told = "but the thinking used all of max_thinking_tokens: raise this limit, or set on_length: longer"
    assert f"3 rows ok, {told}" in outcome.stderr


def test_thinking_that_took_all_is_given_more(tmp_path: Path, server: FakeSGLang) -> None:
    """`on_length: longer` doubles the budget and the length; `fail` fails the rows."""
    server.script = thinks(150)
    job = thinking_job(tmp_path, server, prompt=CHAT, on_length="longer")
    report = batchrunner.run(job)
    assert (report.rows_ok, report.rows_thinking_cut) == (3, 0)
    row = [sent for sent in server.sent if sent.row == 1]
    assert [(budget_of(sent), sent.body["max_completion_tokens"]) for sent in row] == [(100, 300), (200, 600)]
    failing = thinking_job(
        tmp_path, server, prompt=CHAT, on_length="fail", output={"path": str(tmp_path / "fail")}
    )
    assert batchrunner.run(failing).rows_failed == 3
    assert {row["error"] for row in results_of(failing)} == {
        "the thinking was truncated at max_thinking_tokens"
    }


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"reasoning_parser": None}, "the server runs without --reasoning-parser"),
        ({"enable_strict_thinking": False}, "the server runs without --enable-strict-thinking"),
        (
            {"reasoning_parser": "deepseek-r1"},
            "the server would ignore the budget with --reasoning-parser deepseek-r1",
        ),
    ],
)
def test_a_server_that_would_ignore_it(
    tmp_path: Path, server: FakeSGLang, arguments: dict[str, Any], why: str
) -> None:
    """The run does not begin, and says which flag is missing."""
    server.arguments = arguments
    job = thinking_job(tmp_path, server, prompt=CHAT)
    (tmp_path / "job.yaml").write_text(json.dumps(job))
    outcome = batchrun(tmp_path / "job.yaml")
    assert outcome.exit_code != 0
    assert f"sampling.max_thinking_tokens: {why}" in outcome.stderr
    assert server.sent == []


def test_a_budget_in_a_batch_file(tmp_path: Path, server: FakeSGLang) -> None:
    """`reasoning.max_tokens` is sent as SGLang reads it; where it would be ignored, its row fails."""
    fields: list[dict[str, Any]] = [{"reasoning": {"max_tokens": 50}}, {"reasoning": {"effort": "low"}}, {}]
    lines = [
        {"custom_id": f"r{row}", "method": "POST", "url": "/v1/chat/completions", "body": {
            "model": "fake/model", "messages": [{"role": "user", "content": f"row {row}"}], **more}}
        for row, more in enumerate(fields)
    ]  # fmt: skip
    path = tmp_path / "batch.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    server.arguments = OBEYS
    server.script = thinks(50)
    run = tmp_path / "run"
    report = batchrunner.run(job_of_batch(str(path), str(run), engine=[server.url], overrides=[]))
    assert (report.rows_ok, report.rows_thinking_cut) == (3, 1)
    assert {sent.row: budget_of(sent) for sent in server.sent} == {0: 50, 1: None, 2: None}
    server.forget(clients_stay=True)
    server.arguments = {}
    report = batchrunner.run(job_of_batch(str(path), str(tmp_path / "no"), engine=[server.url], overrides=[]))
    assert (report.rows_ok, report.rows_failed) == (2, 1)
    assert "max_thinking_tokens: the server runs without --reasoning-parser" in str(report.failures)


def test_a_budget_without_room_for_an_answer(tmp_path: Path, server: FakeSGLang) -> None:
    """The default of max_new_tokens is often smaller than a budget, so that every answer would be cut."""
    job = thinking_job(tmp_path, server, sampling={"max_new_tokens": 4000, "max_thinking_tokens": 4000})
    outcome = batchrun(write_job(job, tmp_path))
    assert outcome.exit_code == 2
    assert (
        "max_thinking_tokens (4000) leaves no room for an answer in max_new_tokens (4000)" in outcome.stderr
    )
    assert server.sent == []


PROGRAM = """
async def rollout(row, generate):
    answer = await generate([{"role": "user", "content": row["text"]}], max_thinking_tokens=30)
    return {"text": answer.text}
"""


def test_a_budget_in_a_rollout(tmp_path: Path, server: FakeSGLang, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each request may have its own."""
    (tmp_path / "thoughts.py").write_text(PROGRAM)
    monkeypatch.chdir(tmp_path)
    server.arguments = OBEYS
    server.script = thinks(30)
    job = job_of(
        tmp_path, server, rows=2, prompt={"rollout": "thoughts:rollout"}, python_path=[str(tmp_path)]
    )
    report = batchrunner.run(job)
    assert (report.rows_ok, report.rows_thinking_cut) == (2, 2)
    assert [budget_of(sent) for sent in server.sent] == [30, 30]


@pytest.mark.parametrize(
    ("args", "budget", "limit"),
    [
        ({}, 100, "100"),
        ({"reasoning-parser": "qwen3"}, 100, None),
        ({"reasoning-parser": "deepseek-r1"}, {"column": "budget"}, str(1 << 20)),
    ],
)
def test_servers_that_the_run_starts(tmp_path: Path, args: Any, budget: Any, limit: str | None) -> None:
    """They get the flags, and the variable with which any parser obeys; on a CPU SGLang cannot do it."""
    tree: dict[str, Any] = {
        "input": {"path": "rows.parquet"},
        "prompt": CHAT,
        "sampling": {"max_thinking_tokens": budget},
        "output": {"path": str(tmp_path)},
        "engine": {"kind": "server", "model": "a/b", "device": "cuda", "args": args},
    }
    spec = engine_of(load_job(tree)).model_dump()
    assert spec["args"] == {"reasoning-parser": "auto", "enable-strict-thinking": True, **args}
    assert spec["env"].get("SGLANG_MAX_THINK_TOKENS") == limit
    tree["engine"]["device"] = "cpu"
    with pytest.raises(EngineStartError, match="does not work on a CPU"):
        engine_of(load_job(tree))


THINKER = """
parser = os.environ["PARSER"] or None
strict = "--enable-strict-thinking" in sys.argv

class Handler(Server):
    known = {
        "/ready": {}, "/health": {}, "/model_info": {"model_path": "thinker"},
        "/server_info": {
            "version": "0.5.23", "max_running_requests": 8,
            "reasoning_parser": parser, "enable_strict_thinking": strict},
    }
    def asked(self, body):
        limit = os.environ["SGLANG_MAX_THINK_TOKENS"]
        self.answer(f"{limit} {body['sampling_params']['custom_params']['thinking_budget']}")
"""


def test_a_started_server_obeys_with_any_parser(tmp_path: Path) -> None:
    """A parser that ignores the budget of a request obeys with the variable that the server gets."""
    engine = launchable(tmp_path, THINKER, PARSER="deepseek-r1")
    job = job_of(tmp_path, engine, rows=2, sampling={"max_thinking_tokens": 40})
    run_job(job, tmp_path)
    assert {row["output"] for row in results_of(job)} == {"40 40"}


def test_a_started_server_without_a_parser(tmp_path: Path) -> None:
    """If SGLang finds no parser for the model, the run does not begin."""
    job = job_of(tmp_path, launchable(tmp_path, THINKER, PARSER=""), sampling={"max_thinking_tokens": 40})
    outcome = batchrun(write_job(job, tmp_path))
    assert outcome.exit_code != 0
    assert "sampling.max_thinking_tokens: the server runs without --reasoning-parser" in outcome.stderr
