"""Commands on URIs: each works, or is refused in one line before anything is sent."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

import batchrunner
from batchrunner.core.timing import TIMING
from tests.conftest import INSTANT, batchrun, job_of, write_job, write_rows
from tests.support.refusals import refusal, told
from tests.support.store_server import Refusal, StoreProxy

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.fake_sglang import FakeSGLang
    from tests.support.store_server import StoreBucket

REQUEST = {"custom_id": "a", "url": "/v1/chat/completions", "body": {"messages": [], "model": "m"}}


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """The working copies of this machine."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture
def run(tmp_path: Path, store_bucket: StoreBucket) -> str:
    """A run in the store that is over."""
    uri = f"{store_bucket.uri}/run"
    batchrunner.run(job_of(tmp_path, INSTANT, output={"path": uri}))
    return uri


def one_line(*arguments: object) -> str:
    """Return the refusal of a command."""
    result = batchrun(*arguments)
    assert result.exit_code == 2, (result.stderr, result.exception)
    (line,) = result.stderr.splitlines()
    return line


@pytest.mark.parametrize("command", ["status", "merge", "report", "advise"])
def test_no_run(store_bucket: StoreBucket, command: str) -> None:
    """A URI without a run is named as it was given."""
    uri = f"{store_bucket.uri}/nothing"
    told(one_line(command, uri), uri, "not a run's output path")


def test_files_that_are_local(tmp_path: Path, store_bucket: StoreBucket, run: str) -> None:
    """What is written as a plain file is refused as a URI, also in capitals, and makes no directory."""
    data, requests = write_rows(tmp_path / "a.parquet", 3), tmp_path / "r.jsonl"
    requests.write_text(json.dumps(REQUEST))
    uri = store_bucket.uri.replace("s3", "S3")
    job = write_job(job_of(tmp_path), tmp_path)
    commands: list[list[object]] = [
        ["merge", run, f"{uri}/a.csv"],
        ["init", data, "-o", f"{uri}/job.yaml"],
        ["slurm", job, "--array", "0-1", "-o", f"{uri}/a.sh"],
        ["batch", requests, "-o", f"{uri}/a.jsonl", "--model", "simulated"],
        ["batch", requests, "-o", tmp_path / "a.jsonl", "--errors", f"{uri}/a.jsonl", "--model", "simulated"],
    ]
    for command in commands:
        told(one_line(*command), f"{uri}/a" if "init" not in command else uri, "is a URI")
    assert not any(":" in path.name for path in tmp_path.iterdir())


def test_capitals(tmp_path: Path, store_bucket: StoreBucket) -> None:
    """The scheme of a URI may be written in capitals; of a store that is not known it is refused."""
    store_bucket.put("in/a.parquet", write_rows(tmp_path / "a.parquet", 3))
    name = store_bucket.name
    job = job_of(tmp_path, input={"path": f"S3://{name}/in"}, output={"path": f"S3://{name}/run"})
    assert batchrunner.run(job).rows_ok == 3
    assert batchrun("merge", f"s3://{name}/run").exit_code == 0
    told(refusal({**job, "output": {"path": "FTP://host/run"}}, tmp_path), "not to a URI")


def test_tune(tmp_path: Path, store_bucket: StoreBucket) -> None:
    """Trials are kept on a disk."""
    engine = {"kind": "server", "model": "some/model"}
    job = write_job(job_of(tmp_path, engine, output={"path": f"{store_bucket.uri}/run"}), tmp_path)
    told(one_line("tune", job), f"{store_bucket.uri}/run", "trials are kept on a disk", "--set output.path")


def test_requests_of_a_batch(tmp_path: Path, store_bucket: StoreBucket) -> None:
    """A batch file is read from a store, also one that only the base job knows."""
    line = {
        **REQUEST,
        "method": "POST",
        "body": {"model": "m", "messages": [{"role": "user", "content": "a"}]},
    }
    store_bucket.put("r.jsonl", json.dumps(line).encode())
    base = job_of(tmp_path, storage={"endpoint": store_bucket.endpoint})
    base = {name: base[name] for name in ("engine", "storage")}
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("AWS_ENDPOINT_URL")
        done = batchrun(
            "batch", f"{store_bucket.uri}/r.jsonl", "-o", tmp_path / "a.jsonl",
            "--job", write_job(base, tmp_path),
        )  # fmt: skip
    assert done.exit_code == 0, done.stderr
    assert len((tmp_path / "a.jsonl").read_text().splitlines()) == 1


REFUSALS = [
    (Refusal(301, "PermanentRedirect"), "the bucket is in another region: give storage.region"),
    (Refusal(400, "AuthorizationHeaderMalformed"), "the region is wrong: give storage.region"),
    (Refusal(403, "AccessDenied"), "the credentials do not allow it"),
    (Refusal(403, "SignatureDoesNotMatch"), "the credentials are wrong"),
    (Refusal(400, "ExpiredToken"), "the session token has expired"),
    (Refusal(501, "NotImplemented"), "the store has no conditional writes"),
    (Refusal(500, "InternalError"), "This is InternalError"),
]


@pytest.mark.parametrize("what", ["every request", "every write"])
@pytest.mark.parametrize(("answer", "problem"), REFUSALS, ids=[answer.code for answer, _ in REFUSALS])
def test_what_a_store_refuses(
    tmp_path: Path,
    store_bucket: StoreBucket,
    server: FakeSGLang,
    monkeypatch: pytest.MonkeyPatch,
    answer: Refusal,
    problem: str,
    what: str,
) -> None:
    """A store that refuses all, or writes only, is one line with exit code 2, before a row is sent."""
    monkeypatch.setattr(TIMING, "store_retries", 0.1)
    uri = f"{store_bucket.uri}/run"
    with StoreProxy(store_bucket.endpoint) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        refused = {"PUT"} if what == "every write" else {"GET", "PUT", "HEAD", "POST", "DELETE"}
        proxy.faults = lambda method, *_: answer if method in refused else "none"
        told(refusal(job_of(tmp_path, server, output={"path": uri}), tmp_path), uri, problem)
    assert not server.sent


def test_no_credentials(
    tmp_path: Path, store_bucket: StoreBucket, server: FakeSGLang, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without credentials the line says how to give them."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    job: dict[str, Any] = job_of(tmp_path, server, output={"path": f"{store_bucket.uri}/run"})
    told(refusal(job, tmp_path), "AWS credentials: none were found", "AWS_PROFILE")
    assert not server.sent


def test_slurm(tmp_path: Path, store_bucket: StoreBucket, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tasks of an array join a run in a store; their logs lie where they are submitted."""
    monkeypatch.chdir(tmp_path)
    uri = f"{store_bucket.uri}/runs/mine"
    job = write_job(job_of(tmp_path, output={"path": uri}), tmp_path)
    made = batchrun("slurm", job, "--array", "0-3", "--json")
    assert made.exit_code == 0, made.stderr
    planned = json.loads(made.stdout)
    assert (planned["run"], planned["logs"]) == (uri, str(tmp_path / "mine.slurm"))
    assert "--join" in planned["script"]
    assert "s3:/" not in planned["script"]
