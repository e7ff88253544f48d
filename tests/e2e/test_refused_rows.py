"""A row that is refused for now, again and again, is itself the reason only while others are answered."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import pytest

import batchrunner
from batchrunner.core.errors import EngineLostError
from batchrunner.core.timing import TIMING
from tests.conftest import batchrun_merge, job_of, results_of, run_job, write_rows
from tests.e2e.test_batch_files import CHAT, COMPLETIONS, Batch, request_of
from tests.e2e.test_bundles import bundled_job, only
from tests.e2e.test_embeddings import ids_job
from tests.support.answers import Body, OnWire
from tests.support.fake_sglang import Behaviour, FakeSGLang, Sent
from tests.support.server_thread import PATIENCE_S

pytestmark = pytest.mark.usefixtures("quick_retries")

REFUSED: dict[Behaviour, str] = {
    "gateway 504": "504: Gateway Time-out",
    "busy 429": "429: Too many requests",
    "busy 503": "503: The request queue is full.",
    "denied 401": "refuses the API key (401: Unauthorized): see engine.api_key_env",
}
EMPTY = b"Connection: close\r\nContent-Length: 0\r\n\r\n"
PATIENT = {"engine_wait": PATIENCE_S}


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TIMING, "longest_retry", 0.1)


def check_failed(job: dict[str, Any], *rows: int, of: int, words: str = "") -> None:
    """Check that these rows of a job failed, by their own fault, and all others were answered."""
    results = results_of(job)
    assert [row["row"] for row in results] == list(range(of))
    assert [row["row"] for row in results if row["error"] is not None] == list(rows)
    for row in rows:
        error = results[row]["error"]
        assert error.startswith("refused ")
        assert " times while others were answered: " in error
        assert error.endswith(words)
        assert 5 <= results[row]["attempts"] <= 20


@pytest.mark.parametrize("prompt", [{"text": "text"}, {"user": "{{ text }}"}], ids=str)
@pytest.mark.parametrize("what", REFUSED)
def test_a_row_that_is_always_refused(
    tmp_path: Path, server: FakeSGLang, what: Behaviour, prompt: dict[str, str]
) -> None:
    """It has an error, the others are answered, and the run is merged."""
    server.script = lambda sent: what if sent.prompt == "row 7" else "answer"
    job = job_of(tmp_path, server, rows=30, prompt=prompt, limits=PATIENT)
    run_job(job, tmp_path, code=3)
    check_failed(job, 7, of=30, words=REFUSED[what])
    batchrun_merge(Path(job["output"]["path"]))


@pytest.mark.parametrize("prompt", [{"text": "text"}, {"user": "{{ text }}"}], ids=str)
@pytest.mark.parametrize("what", REFUSED)
def test_no_other_row_is_left(
    tmp_path: Path, server: FakeSGLang, what: Behaviour, prompt: dict[str, str]
) -> None:
    """A resumed run that has this row alone sends something small, and knows that the engine works."""
    job = job_of(tmp_path, server, rows=30, prompt=prompt, limits=PATIENT)
    batchrunner.run(job, overrides=["input.limit=29"])
    server.forget()
    server.script = lambda sent: what if sent.prompt == "row 29" else "answer"
    assert batchrunner.run(job).exit_code == 3
    check_failed(job, 29, of=30, words=REFUSED[what])
    assert set(server.prompts) == {"row 29", "r" if "text" in prompt else "1"}


@pytest.mark.parametrize("url", [CHAT, COMPLETIONS])
def test_an_only_request(tmp_path: Path, server: FakeSGLang, url: str) -> None:
    """So it is with a batch file, whose results are published."""
    server.script = lambda sent: "gateway 504" if sent.prompt == "question 0" else "answer"
    batch = Batch(tmp_path, [request_of(0, url=url)])
    assert batch.do("--errors", batch.errors, engine=server).exit_code == 0
    assert "504: Gateway Time-out" in batch.errors.read_text()
    assert set(server.prompts) == {"question 0", "1"}


@pytest.mark.parametrize("task", ["embed", "classify", "rerank"])
def test_an_only_row_without_decoding(tmp_path: Path, server: FakeSGLang, task: str) -> None:
    """So it is with the other tasks."""
    server.arguments = {"is_generation": False, "architectures": ["QwenForSequenceClassification"]}
    server.script = lambda sent: "gateway 504" if "row 0" in sent.prompt else "answer"
    write_rows(tmp_path / "input.parquet", 1, found=[["one", "two"]])
    prompt = {"text": "text"} | ({"documents": "found"} if task == "rerank" else {})
    job = job_of(tmp_path, server, task=task, prompt=prompt, limits=PATIENT)
    assert batchrunner.run(job).exit_code == 3
    check_failed(job, 0, of=1)


def test_several_rows_on_several_routes(tmp_path: Path, server: FakeSGLang) -> None:
    """It does not matter which replica refuses them."""
    server.script = lambda sent: "gateway 504" if sent.prompt in {"row 3", "row 99"} else "answer"
    with FakeSGLang(server.script) as other:
        engine = {"kind": "attach", "urls": [server.url, other.url]}
        job = job_of(tmp_path, engine, rows=100, window=8, limits=PATIENT)
        assert batchrunner.run(job).exit_code == 3
    check_failed(job, 3, 99, of=100)


@pytest.mark.usefixtures("full_requests")
@pytest.mark.parametrize("together", [False, True])
def test_a_row_in_a_bundle(tmp_path: Path, server: FakeSGLang, *, together: bool) -> None:
    """It is refused alone, or with others and then alone."""
    server.script = only(5, "gateway 504")
    refused = OnWire(b"HTTP/1.1 504 Late\r\n" + EMPTY)
    server.bundles = lambda body: refused if together and [5] in body["input_ids"] else "rows"
    job = bundled_job(tmp_path, server, limits=PATIENT)
    assert batchrunner.run(job).exit_code == 3
    check_failed(job, 5, of=40)


def test_a_row_in_a_list(tmp_path: Path, server: FakeSGLang) -> None:
    """So it is without decoding."""
    server.arguments = {"is_generation": False}
    server.script = lambda sent: "gateway 504" if sent.prompt.startswith("[9,") else "answer"
    job = ids_job(tmp_path, server, limits=PATIENT)
    assert batchrunner.run(job).exit_code == 3
    check_failed(job, 9, of=40)


def test_a_row_of_a_batch_file(tmp_path: Path, server: FakeSGLang) -> None:
    """The results are published, with its line in the file of errors."""
    server.script = lambda sent: "gateway 504" if sent.prompt == "question 4" else "answer"
    paths = [CHAT, COMPLETIONS]
    batch = Batch(tmp_path, [request_of(number, url=paths[number % 2]) for number in range(20)])
    result = batch.do("--errors", batch.errors, "--set", "limits.engine_wait=10", engine=server)
    assert result.exit_code == 0, result.stderr
    assert len(batch.results.read_text().splitlines()) == 19
    (line,) = batch.errors.read_text().splitlines()
    assert '"request-4"' in line
    assert "504" in line


def test_a_server_that_refuses_half_of_all(tmp_path: Path, server: FakeSGLang) -> None:
    """As a load balancer does with a backend that is gone: no row fails."""
    rng = random.Random(1)
    server.script = lambda _: rng.choice(["busy 503", "answer"])
    report = batchrunner.run(job_of(tmp_path, server, rows=400, limits=PATIENT))
    assert (report.exit_code, report.rows_ok) == (0, 400)


@pytest.mark.parametrize("row", [10, 95])
@pytest.mark.parametrize("what", ["gateway 504", "denied 401"])
def test_an_outage(tmp_path: Path, server: FakeSGLang, what: Behaviour, row: int) -> None:
    """No row fails for it, in mid-run, or when only a few are left."""
    began: list[float] = []

    def script(sent: Sent) -> Behaviour:
        if sent.prompt == f"row {row}":
            began.append(time.monotonic())
        return what if began and time.monotonic() < began[0] + 1.5 else "answer"

    server.script = script
    job = job_of(tmp_path, server, rows=100, window=4, order="input", limits={**PATIENT, "max_attempts": 2})
    report = batchrunner.run(job)
    assert (report.exit_code, report.rows_ok) == (0, 100)
    assert report.wall_s > 1.5


PAGE = Body(b"\n<!DOCTYPE html><title>Log in</title>")
NO_ENGINE: dict[str, tuple[Body | OnWire, str]] = {
    "a page": (PAGE, "not an answer of SGLang: <!DOCTYPE html><title>Log in</title>"),
    "nothing": (Body(b""), "not an answer of SGLang: nothing"),
    "a redirect": (
        OnWire(b"HTTP/1.1 302 Found\r\nLocation: https://login.invalid/\r\n" + EMPTY),
        "leads to https://login.invalid/: correct engine.urls",
    ),
    "a redirect to a page": (
        OnWire(b"HTTP/1.1 302 Found\r\nLocation: /login\r\n" + EMPTY),
        "/login: correct engine.urls",
    ),
}


@pytest.mark.parametrize("other", NO_ENGINE)
def test_something_else_answers_all_rows(tmp_path: Path, server: FakeSGLang, other: str) -> None:
    """Then no row fails, and the run ends and says so; it goes on where the engine answers."""
    answer, words = NO_ENGINE[other]
    server.script = lambda _: answer
    job = job_of(tmp_path, server, limits={"engine_wait": 0.5})
    assert words in run_job(job, tmp_path, code=1).stderr.splitlines()[-1]
    assert results_of(job) == []
    server.script = lambda _: "answer"
    run_job(job, tmp_path)


@pytest.mark.parametrize("other", NO_ENGINE)
def test_something_else_answers_a_row(tmp_path: Path, server: FakeSGLang, other: str) -> None:
    """As a proxy may do that refuses some words."""
    answer, words = NO_ENGINE[other]
    server.script = lambda sent: answer if sent.prompt == "row 2" else "answer"
    job = job_of(tmp_path, server, limits=PATIENT)
    run_job(job, tmp_path, code=3)
    check_failed(job, 2, of=10, words=words)


@pytest.mark.usefixtures("full_requests")
def test_a_page_in_place_of_a_bundle(tmp_path: Path, server: FakeSGLang) -> None:
    """It is sent again until the engine answers."""
    server.bundles = lambda _: PAGE if server.requests < 3 else "rows"
    job = bundled_job(tmp_path, server, limits=PATIENT)
    assert batchrunner.run(job).exit_code == 0
    assert len(results_of(job)) == 40


def test_nothing_is_answered(tmp_path: Path, server: FakeSGLang) -> None:
    """Then the engine is lost, and the message has a row."""
    server.script = lambda _: "gateway 504"
    with pytest.raises(EngineLostError, match=r"took no row for 1 s \(row \d and \d more\): 504: Gateway"):
        batchrunner.run(job_of(tmp_path, server, rows=2, limits={"engine_wait": 1}))
