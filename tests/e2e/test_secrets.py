"""Nobody reads a key or a password in what a run says and stores, whatever a server echoes."""

import json
from pathlib import Path

import pytest

from tests.conftest import batchrun, job_of, results_of, run_job
from tests.e2e.test_batch_files import Batch, request_of
from tests.support.answers import OnWire
from tests.support.fake_sglang import FakeSGLang, Sent

KEY = "sk-0123456789abcdef"


def refusal(status: int, *, padding: int = 0) -> OnWire:
    """A refusal that echoes the key."""
    body = json.dumps({"error": {"message": "x" * padding + f" the key {KEY} may not", "header": KEY}})
    head = f"HTTP/1.1 {status} No\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    return OnWire(f"{head}{body}".encode())


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_API_KEY", KEY)


def files_with_key(directory: Path) -> list[Path]:
    """Return the files below a directory that have the key, or the first half of it."""
    half = KEY[:10].encode()
    return [path for path in directory.rglob("*") if path.is_file() and half in path.read_bytes()]


@pytest.mark.parametrize("padding", [0, 480])
def test_a_row_that_is_refused(tmp_path: Path, server: FakeSGLang, padding: int) -> None:
    """The error says `***`, also where it is cut within the key."""
    server.script = lambda sent: refusal(400, padding=padding) if sent.prompt == "row 3" else "answer"
    job = job_of(tmp_path, server)
    result = run_job(job, tmp_path, "--json", code=3)
    assert "***" in results_of(job)[3]["error"]
    assert KEY[:10] not in result.output
    assert files_with_key(tmp_path) == []


def test_an_engine_that_is_lost(tmp_path: Path, server: FakeSGLang) -> None:
    """Neither do the line of its end, the log and the events."""
    server.script = lambda _: refusal(401)
    result = run_job(job_of(tmp_path, server, limits={"engine_wait": 0.1}), tmp_path, "--json", code=1)
    assert "refuses the API key (401: the key *** may not)" in result.stderr
    assert KEY not in result.output
    assert files_with_key(tmp_path) == []


def test_a_line_of_a_batch_file(tmp_path: Path, server: FakeSGLang) -> None:
    """The server's error is kept whole, but for the key."""

    def script(sent: Sent) -> OnWire | str:
        return refusal(400) if sent.prompt == "question 1" else "answer"

    server.script = script  # type: ignore[assignment]
    batch = Batch(tmp_path, [request_of(number) for number in range(3)])
    result = batch.do("--errors", batch.errors, engine=server)
    assert result.exit_code == 0, result.stderr
    assert '"header":"***"' in batch.errors.read_text().replace(": ", ":")
    assert KEY not in result.output
    assert files_with_key(tmp_path) == []


@pytest.mark.parametrize(
    "user", ["http://me:hunter2", "me:hunter2", "http://me:p@hunter2", "http://me:hunter2/p"]
)
def test_a_password_in_an_address(tmp_path: Path, user: str) -> None:
    """It is refused, and not printed, also where the address is none."""
    job = job_of(tmp_path, {"kind": "attach", "urls": [f"{user}@host:30000"]})
    result = run_job(job, tmp_path, code=2)
    assert "without a user and a password (got '***@host:30000')" in result.stderr
    for options in ([], ["--json"]):
        result = batchrun("batch", tmp_path / "x.jsonl", "--engine", f"{user}@host:30000", *options)
        assert result.exit_code == 2
        assert "hunter2" not in result.output
