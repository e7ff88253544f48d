"""`on_repetition`: answers that repeat themselves are stopped, and then kept or rejected."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import batchrunner
from tests.conftest import batchrun, job_of, merged_table, report_of, results_of, run_job
from tests.support.answers import Growing
from tests.support.fake_sglang import FakeSGLang, Sent
from tests.support.functions import write_module

pytestmark = pytest.mark.usefixtures("quick_retries")

SENSE = "All is well at first: "
LOOP = "But then it is not. "
GROWING = tuple(SENSE + LOOP * periods for periods in (0, 20, 60, 120))
KEPT = (SENSE + LOOP).strip()
ROOMY = {"max_new_tokens": 4000, "temperature": 0}


def loops_in(*numbers: int, good: str = "fine") -> Callable[[Sent], Any]:
    """Return a script in which the first try of some rows loops until it is aborted."""

    def script(sent: Sent) -> Any:
        if sent.row in numbers and sent.tries == 1:
            return Growing(GROWING)
        return Growing((good,), ends=True) if sent.body.get("stream") else "answer"

    return script


def watching_job(directory: Path, server: FakeSGLang, **changes: Any) -> dict[str, Any]:
    changes = {"on_repetition": "stop", "dedupe": False, **changes}
    return job_of(directory, server, rows=3, sampling={**ROOMY, **changes.pop("sampling", {})}, **changes)


def test_a_loop_is_stopped(tmp_path: Path, server: FakeSGLang) -> None:
    """Its request is aborted; the row keeps its text up to the first repeat; the end counts such rows."""
    server.script = loops_in(1)
    job = watching_job(tmp_path, server)
    outcome = run_job(job, tmp_path)
    rows = results_of(job)
    assert [row["finish_reason"] for row in rows] == ["length", "repetition", "length"]
    assert rows[1]["output"].strip() == KEPT
    assert rows[1]["error"] is None
    assert rows[1]["completion_tokens"] == len(GROWING[-1].split())  # all that were computed
    (sent,) = [sent for sent in server.sent if sent.row == 1]
    assert server.aborted == [sent.body["rid"]]
    assert "1 stopped because they repeated themselves" in outcome.stderr
    assert report_of(job)["finish_reasons"]["repetition"] == 1


def test_a_loop_in_a_bundle_is_stopped_alone(tmp_path: Path, server: FakeSGLang) -> None:
    """The other rows of its request are answered, and nothing is sent twice.

    SGLang aborts every request whose id begins with the id to abort.
    """
    server.script = lambda sent: Growing(GROWING) if sent.row == 1 else Growing(("fine",), ends=True)
    pq.write_table(pa.table({"ids": [[row, 7] for row in range(16)]}), tmp_path / "input.parquet")
    job = watching_job(tmp_path, server, prompt={"input_ids": "ids"}, window=16, bundle=16)
    report = batchrunner.run(job)
    assert (report.exit_code, report.rows_ok) == (0, 16)
    assert report.bundles["most_rows"] == 16
    by_output = [row["output"].strip() for row in results_of(job)]
    assert sorted(by_output) == sorted([KEPT, *["fine"] * 15])
    (aborted,) = server.aborted
    assert [sent.row for sent in server.sent if sent.body["rid"].startswith(aborted)] == [1]
    assert len(server.sent) == 16


def test_a_loop_is_asked_again(tmp_path: Path, server: FakeSGLang) -> None:
    """`fail` rejects it: the next try has other sampling, and its answer is the row's."""
    server.script = loops_in(1)
    job = watching_job(tmp_path, server, on_repetition="fail", accept={"tries": 2})
    assert batchrunner.run(job).exit_code == 0
    assert [row["finish_reason"] for row in results_of(job)] == ["length"] * 3
    first, second = (sent.body["sampling_params"] for sent in server.sent if sent.row == 1)
    assert (first["temperature"], second["temperature"]) == (0, 0.4)
    assert "sampling_seed" in second
    (cause,) = report_of(job)["checks"]["causes"]
    assert cause["example"] == "the answer repeats itself without end"


def test_a_loop_fails_its_row(tmp_path: Path, server: FakeSGLang) -> None:
    """Without further tries `fail` ends the row with its text and the reason."""
    server.script = loops_in(1)
    job = watching_job(tmp_path, server, on_repetition="fail")
    assert batchrunner.run(job).rows_failed == 1
    row = results_of(job)[1]
    assert row["output"].strip() == KEPT
    assert row["error"] == "the answer repeats itself without end"


def test_a_loop_inside_of_json(tmp_path: Path, server: FakeSGLang) -> None:
    """With a schema the beginning is no answer: its row is told why, and not that its JSON is broken."""
    server.script = lambda _: Growing(tuple(f'{{"why": "{text}' for text in GROWING))
    schema = {"type": "object", "properties": {"why": {"type": "string"}}}
    job = watching_job(tmp_path, server, sampling={"json_schema": schema})
    assert batchrunner.run(job).rows_failed == 3
    assert {row["error"] for row in results_of(job)} == {"the answer repeats itself without end"}


def test_what_may_repeat_goes_on(tmp_path: Path, server: FakeSGLang) -> None:
    """A row whose prompt repeats the same, and one with a schema of lists, are not stopped."""
    prompt = {"text": "{{ text }}: " + LOOP * 9}
    server.script = lambda _: Growing(GROWING, ends=True)
    job = watching_job(tmp_path, server, prompt=prompt)
    assert batchrunner.run(job).exit_code == 0
    assert {row["output"] for row in results_of(job)} == {GROWING[-1]}
    server.forget()
    server.script = lambda _: "answer"
    schema = {"type": "array", "items": {"const": 1}}
    lists = watching_job(
        tmp_path, server, sampling={"json_schema": schema}, accept={"json": False},
        output={"path": str(tmp_path / "lists")},
    )  # fmt: skip
    assert batchrunner.run(lists).exit_code == 0
    assert not any("stream" in sent.body for sent in server.sent)
    assert server.aborted == []


def test_loops_go_on(tmp_path: Path, server: FakeSGLang) -> None:
    """With `keep`, every answer comes whole."""
    job = watching_job(tmp_path, server, on_repetition="keep")
    assert batchrunner.run(job).exit_code == 0
    assert not any("stream" in sent.body for sent in server.sent)


def test_prose_is_stopped_by_default(tmp_path: Path, server: FakeSGLang) -> None:
    """A long answer ends at its first repeat; the end of the run and `status` count it, and name `keep`."""
    server.script = loops_in(1)
    job = watching_job(tmp_path, server)
    del job["on_repetition"]
    outcome = run_job(job, tmp_path)
    assert [row["finish_reason"] for row in results_of(job)] == ["length", "repetition", "length"]
    assert results_of(job)[1]["output"].strip() == KEPT
    assert "on_repetition: keep lets them go on" in outcome.stderr
    assert "1 stopped because they repeated themselves" in batchrun("status", tmp_path / "run").stdout


def test_a_text_that_repeats_itself_is_translated_whole(tmp_path: Path, server: FakeSGLang) -> None:
    """By default, an answer may repeat other words than a prompt that repeats itself."""
    prompt = {"text": "{{ text }} Traduis : " + "Merci d'avoir suivi cette vidéo. " * 40}
    server.script = lambda _: Growing(GROWING, ends=True)
    job = watching_job(tmp_path, server, prompt=prompt, on_repetition="auto")
    assert batchrunner.run(job).exit_code == 0
    assert {row["output"] for row in results_of(job)} == {GROWING[-1]}
    assert server.aborted == []


def test_an_answer_stopped_by_default_is_not_whole(tmp_path: Path, server: FakeSGLang) -> None:
    """A job that rejects truncated answers also rejects those that would have been truncated."""
    server.script = loops_in(1)
    job = watching_job(tmp_path, server, on_repetition="auto", on_length="fail")
    assert batchrunner.run(job).rows_failed == 3
    cut = "the answer was truncated at max_new_tokens"
    repeats = "the answer repeats itself without end"
    assert [row["error"] for row in results_of(job)] == [cut, repeats, cut]


@pytest.mark.parametrize(
    "changes",
    [
        {"sampling": {"max_new_tokens": 1024}},
        {"sampling": {"min_new_tokens": 9}},
        {"sampling": {"stop_regex": "x+"}},
        {"sampling": {"json_schema": {"type": "string"}}, "accept": {"json": False}},
        {"sampling": {"n": 2}},
        {"output": {"columns": ["output_ids"]}},
        {"prompt": {"user": "{{ text }}"}},
    ],
    ids=lambda changes: next(iter(changes)) + str(next(iter(changes.values()))),
)
def test_other_rows_are_not_watched_by_default(
    tmp_path: Path, server: FakeSGLang, changes: dict[str, Any]
) -> None:
    """Short rows, rows that may have to repeat, and rows that need one reply are sent as before, silently."""
    if "output" in changes:
        changes = {"output": {"path": str(tmp_path / "run"), **changes["output"]}}
    job = watching_job(tmp_path, server, on_repetition="auto", **changes)
    outcome = run_job(job, tmp_path)
    assert len(server.sent) == 3
    assert not any("stream" in sent.body for sent in server.sent)
    assert "on_repetition" not in outcome.stderr


@pytest.mark.parametrize(
    ("text", "loop"),
    [("{{ text }}", "| 0 | none |\n"), ("{{ text }} 'But then it is not.' 500 times", LOOP)],
    ids=["data", "prompt"],
)
def test_what_goes_on_by_default(tmp_path: Path, server: FakeSGLang, text: str, loop: str) -> None:
    """Data that repeats itself, and a sentence of which the prompt speaks, come to their end."""
    whole = SENSE + loop * 300
    server.script = lambda _: Growing((SENSE, SENSE + loop * 250, whole), ends=True)
    job = watching_job(tmp_path, server, on_repetition="auto", prompt={"text": text})
    assert batchrunner.run(job).exit_code == 0
    assert {row["output"] for row in results_of(job)} == {whole}
    assert all(sent.body["stream"] for sent in server.sent)
    assert server.aborted == []


@pytest.mark.parametrize("why", ["chats", "pieces"])
def test_answers_that_cannot_be_watched(tmp_path: Path, server: FakeSGLang, why: str) -> None:
    """A chat that the server renders, and a server that sends pieces, are told in one line."""
    changes: dict[str, Any] = {"prompt": {"user": "{{ text }}"}} if why == "chats" else {}
    if why == "pieces":
        server.arguments = {"incremental_streaming_output": True}
    job = watching_job(tmp_path, server, **changes)
    outcome = run_job(job, tmp_path)
    text = outcome.stderr
    assert text.count("on_repetition has no effect, so answers that repeat themselves go on to") == 1
    assert ("renders the chats" if why == "chats" else "--incremental-streaming-output") in text
    assert not any("stream" in sent.body for sent in server.sent)


def test_a_stream_that_breaks_off(tmp_path: Path, server: FakeSGLang) -> None:
    """A row whose events end without an answer is sent again; a refusal is final."""
    server.script = lambda sent: "disconnect" if sent.tries == 1 else Growing(("fine",), ends=True)
    job = watching_job(tmp_path, server)
    assert batchrunner.run(job).exit_code == 0
    assert len(server.sent) == 6
    server.forget()
    server.script = lambda sent: "too long" if sent.row == 1 else Growing(("fine",), ends=True)
    refused = watching_job(tmp_path, server, output={"path": str(tmp_path / "refused")})
    assert batchrunner.run(refused).rows_failed == 1
    assert "longer than the model's context length" in results_of(refused)[1]["error"]


def test_only_texts_have_repetitions(tmp_path: Path, server: FakeSGLang) -> None:
    """A task without decoding has no such field."""
    job = job_of(tmp_path, server, task="embed", on_repetition="stop")
    (tmp_path / "job.json").write_text(json.dumps(job))
    outcome = batchrun(tmp_path / "job.json")
    assert outcome.exit_code == 2
    assert "on_repetition: cannot be used for task: embed" in outcome.stderr


def test_a_loop_in_a_rollout(tmp_path: Path, server: FakeSGLang) -> None:
    """Its function gets the text up to the first repeat, and why it ended."""
    write_module(
        tmp_path,
        """
        async def ask(row, generate):
            answer = await generate(row["text"])
            return {"said": answer.text, "why": answer.finish_reason}
        """,
    )
    server.script = loops_in(1)
    job = watching_job(tmp_path, server, prompt={"rollout": "hooks:ask"}, python_path=[str(tmp_path)])
    assert batchrunner.run(job).exit_code == 0
    rows = merged_table(tmp_path / "run").to_pylist()
    assert [row["why"] for row in rows] == ["length", "repetition", "length"]
    assert rows[1]["said"].strip() == KEPT


def test_rollouts_are_not_watched_by_default(tmp_path: Path, server: FakeSGLang) -> None:
    """Their function may judge the answers, so each is whole."""
    write_module(
        tmp_path, "async def ask(row, generate): return {'said': (await generate(row['text'])).text}"
    )
    changes = {"prompt": {"rollout": "hooks:ask"}, "python_path": [str(tmp_path)]}
    job = watching_job(tmp_path, server, on_repetition="auto", **changes)
    assert batchrunner.run(job).exit_code == 0
    assert not any("stream" in sent.body for sent in server.sent)
