"""A row that is refused is itself why only while others are answered; a replica may be wrong, too."""

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import batchrunner
from batchrunner.core.errors import EngineLostError
from batchrunner.core.timing import TIMING
from tests.conftest import events_of, job_of, results_of, run_job, write_rows
from tests.e2e.test_batch_files import CHAT, COMPLETIONS, Batch, request_of
from tests.e2e.test_bundles import bundled_job, only
from tests.e2e.test_tasks import ROWS, job_for
from tests.support.answers import Body, OnWire
from tests.support.fake_sglang import Behaviour, FakeSGLang, Sent
from tests.support.runs import failed_rows, rows_once
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
    assert failed_rows(job) == list(rows)
    for row in rows:
        error = results[row]["error"]
        assert error.startswith("refused ")
        assert " times while other rows were answered: " in error
        assert error.endswith(words)
        assert 5 <= results[row]["attempts"] <= 20


@pytest.mark.parametrize("prompt", [{"text": "text"}, {"user": "{{ text }}"}], ids=str)
@pytest.mark.parametrize("what", REFUSED)
@pytest.mark.parametrize("alone", [False, True])
def test_a_row_that_is_always_refused(
    tmp_path: Path, server: FakeSGLang, what: Behaviour, prompt: dict[str, str], alone: bool
) -> None:
    """It has an error, and the others are answered.

    A resumed run that has this row alone sends something small, and knows that the engine works.
    """
    job = job_of(tmp_path, server, rows=30, prompt=prompt, limits=PATIENT)
    if alone:
        batchrunner.run(job, overrides=["input.limit=29"])
        server.forget()
    server.script = lambda sent: what if sent.prompt == "row 29" else "answer"
    run_job(job, tmp_path, code=3)
    check_failed(job, 29, of=30, words=REFUSED[what])
    assert not alone or set(server.prompts) == {"row 29", "r" if "text" in prompt else "1"}


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
    job = job_for("embed", tmp_path, server, limits=PATIENT)
    assert batchrunner.run(job).exit_code == 3
    check_failed(job, 9, of=ROWS)


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
    "a redirect": (
        OnWire(b"HTTP/1.1 302 Found\r\nLocation: https://login.invalid/\r\n" + EMPTY),
        "redirects to https://login.invalid/ (status 302): correct engine.urls",
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
    with pytest.raises(
        EngineLostError, match=r"accepted no row for 1 s \(row \d and \d more wait\): 504: Gateway"
    ):
        batchrunner.run(job_of(tmp_path, server, rows=2, limits={"engine_wait": 1}))


# --- replicas that refuse what others answer ---


MANY = 200


def families(directory: Path, rows: int) -> None:
    """Write an input whose rows begin alike."""
    texts = [f"{'long beginning ' * 60} {row % 4} {'of a family ' * 60} {row}" for row in range(rows)]
    write_rows(directory / "input.parquet", rows, text=texts)


def says(status: int) -> OnWire:
    """A refusal with a status."""
    return OnWire(f"HTTP/1.1 {status} No\r\nConnection: close\r\nContent-Length: 2\r\n\r\nNo".encode())


@pytest.fixture
def wrong() -> Iterator[FakeSGLang]:
    """A server that refuses everything."""
    with FakeSGLang(lambda _: says(404)) as fake:
        yield fake


@pytest.mark.parametrize("status", [400, 404])
def test_a_replica_that_refuses_everything(
    tmp_path: Path, server: FakeSGLang, wrong: FakeSGLang, status: int
) -> None:
    """All rows are answered by the other one, and one line says why."""
    wrong.script, server.delay_s = lambda _: says(status), 0.01
    job = job_of(tmp_path, [wrong, server], rows=MANY)
    result = run_job(job, tmp_path)
    rows_once(job, MANY)
    (line,) = (line for line in result.stderr.splitlines() if "gets no rows" in line)
    assert (
        f"{wrong.url} gets no rows for 30 s: other replicas answer rows that fail on it ({status}: No)"
        in line
    )
    assert events_of(job, "route_out") == ["route_out"]
    assert len(wrong.sent) <= MANY


FAILURES: list[Behaviour] = ["disconnect", "broken 500", "abort", "empty", "no answer"]
"""Ways to fail a row that may be the row's fault."""
WRONG: dict[str, Behaviour | Body | OnWire] = {
    **{what: what for what in (*FAILURES, *REFUSED)},
    **{str(status): says(status) for status in (401, 404, 418, 500, 507)},
    "truncated JSON": Body(b'{"text": "answ'),
    "a body that ends": OnWire(b'HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{"text": "a'),
    "no body": Body(b""),
    "nothing": OnWire(b""),
    "an error with 200": Body(b'{"error": {"message": "CUDA error", "code": 500}}'),
    "a refusal with 200": Body(b'{"object": "error", "message": "no", "code": 400}'),
    "a page": PAGE,
}
"""Everything that a replica may answer at once in place of an answer."""


@pytest.mark.parametrize(("what", "replicas"), [*((what, 3) for what in WRONG), ("418", 8), ("abort", 8)])
def test_a_replica_that_fails_everything(tmp_path: Path, wrong: FakeSGLang, what: str, replicas: int) -> None:
    """However it fails rows, no row fails that the others answer, and no attempt there counts."""
    wrong.script = lambda _: WRONG[what]
    with contextlib.ExitStack() as stack:
        right = [stack.enter_context(FakeSGLang(delay_s=0.01)) for _ in range(replicas - 1)]
        job = job_of(tmp_path, [wrong, *right], rows=MANY, limits={**PATIENT, "max_attempts": 1})
        run_job(job, tmp_path)
    rows_once(job, MANY)


@pytest.mark.parametrize("what", [what for what in WRONG if what != "empty"])  # in a body this is an answer
def test_a_replica_that_fails_the_requests_of_a_batch(
    tmp_path: Path, server: FakeSGLang, wrong: FakeSGLang, what: str
) -> None:
    """So it is with a batch file."""
    wrong.script, server.delay_s = lambda _: WRONG[what], 0.01
    batch = Batch(tmp_path, map(request_of, range(MANY)))
    patient = ("--set", "limits.max_attempts=1", "--set", f"limits.engine_wait={PATIENCE_S}")
    ran = batch.do("--errors", batch.errors, "--engine", wrong.url, *patient, engine=server)
    assert (ran.exit_code, batch.errors.read_text()) == (0, "")
    assert len(batch.results.read_text().splitlines()) == MANY


@pytest.mark.parametrize("what", FAILURES)
def test_a_replica_that_fails_is_suspended(
    tmp_path: Path, server: FakeSGLang, wrong: FakeSGLang, what: Behaviour
) -> None:
    """It gets no rows once another one has answered three that it failed, and one line says why."""

    def script(_: Sent) -> Behaviour:
        if len(wrong.sent) == 8:
            server.answer_held()
        return what

    wrong.script, server.script = script, lambda _: "hold"
    job = job_of(tmp_path, [wrong, server], rows=MANY)
    result = run_job(job, tmp_path)
    rows_once(job, MANY)
    (line,) = (line for line in result.stderr.splitlines() if "gets no rows" in line)
    assert f"{wrong.url} gets no rows for 30 s: other replicas answer rows that fail on it (" in line
    assert events_of(job, "route_out") == ["route_out"]


@pytest.mark.parametrize("what", [says(404), "disconnect"], ids=["404", "disconnect"])
@pytest.mark.parametrize("kind", ["bundles", "lists", "families"])
def test_other_ways_of_sending(
    tmp_path: Path, server: FakeSGLang, wrong: FakeSGLang, kind: str, what: Behaviour | OnWire
) -> None:
    """Rows that share a request, or a prefix whose cache the wrong replica would have had."""
    server.delay_s, rows, wrong.script = 0.01, MANY, lambda _: what
    if kind == "bundles":
        job = bundled_job(tmp_path, [wrong, server], rows=MANY)
    elif kind == "lists":
        server.arguments = wrong.arguments = {"is_generation": False}
        job, rows = job_for("embed", tmp_path, [wrong, server]), ROWS
    else:
        families(tmp_path, MANY)
        job = job_of(tmp_path, [wrong, server], window=16)
    batchrunner.run(job)
    rows_once(job, rows)


@pytest.mark.parametrize("bad", [0, 5])
def test_most_replicas_refuse_everything(
    tmp_path: Path, server: FakeSGLang, wrong: FakeSGLang, bad: int
) -> None:
    """Their word counts for nothing while another one answers; but its own does."""
    server.delay_s = 0.01
    server.script = lambda sent: "too long" if sent.row in range(50, 50 + bad) else "answer"
    with FakeSGLang(wrong.script) as another:
        job = job_of(tmp_path, [wrong, another, server], rows=MANY)
        result = run_job(job, tmp_path, code=3 if bad else 0)
    assert failed_rows(job) == [*range(50, 50 + bad)]
    assert result.stderr.count("gets no rows") == 2


def test_a_replica_that_turns_wrong_and_right(
    tmp_path: Path, server: FakeSGLang, wrong: FakeSGLang, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Families of rows that it has are no longer its own; after a while it is tried again."""
    monkeypatch.setattr("batchrunner.dispatch.route.FIRST_SUSPENSION_S", 0.3)
    monkeypatch.setattr("batchrunner.dispatch.route.LONGEST_SUSPENSION_S", 0.3)
    wrong.script = lambda _: says(404) if 20 <= len(wrong.sent) < 60 else "answer"
    wrong.delay_s = server.delay_s = 0.02
    families(tmp_path, 1000)
    job = job_of(tmp_path, [wrong, server], window=16)
    batchrunner.run(job)
    rows_once(job, 1000)
    assert len(wrong.sent) > 70
    assert events_of(job, "route_out")


def test_rows_that_are_bad(tmp_path: Path, server: FakeSGLang) -> None:
    """Two replicas say so: they fail, and no replica is taken out."""
    server.script = lambda sent: "too long" if sent.row % 10 == 0 else "answer"
    with FakeSGLang(server.script) as other:
        job = job_of(tmp_path, [server, other], rows=MANY, window=8)
        result = run_job(job, tmp_path, code=3)
    assert failed_rows(job) == list(range(0, MANY, 10))
    assert {row["attempts"] for row in results_of(job) if row["error"]} == {2}
    assert "gets no rows" not in result.stderr


@pytest.mark.parametrize("fate", ["die", "gateway 504", "too long"])
def test_bad_rows_and_no_other_replica(
    tmp_path: Path, server: FakeSGLang, fate: Behaviour, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The word of a replica that answers rows is enough where the other one is away, busy or taken out."""
    monkeypatch.setattr("batchrunner.dispatch.route.LONGEST_COOLDOWN_S", 0.5)
    server.delay_s = 0.01

    server.script = lambda sent: "too long" if sent.row in {5, 170} else "answer"
    with FakeSGLang(lambda _: fate) as other:
        job = job_of(tmp_path, [server, other], rows=MANY, window=8)
        assert batchrunner.run(job).exit_code == 3
    assert (failed_rows(job), len(results_of(job))) == ([5, 170], MANY)


def test_all_replicas_refuse_all(tmp_path: Path, wrong: FakeSGLang) -> None:
    """Then it is the job that is wrong."""
    with FakeSGLang(wrong.script) as other:
        job = job_of(tmp_path, [wrong, other])
        assert batchrunner.run(job).exit_code == 3
    assert {(row["error"], row["attempts"]) for row in results_of(job)} == {("404: No", 2)}
