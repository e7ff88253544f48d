"""A run in an object store: parts, resume, commands on URIs, refusals, and what is lost with a machine."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq
import pytest

import batchrunner
from batchrunner.core.timing import TIMING
from tests.conftest import (
    INSTANT,
    ROOT,
    batchrun,
    eventually,
    job_of,
    started,
    started_python,
    write_job,
    write_rows,
)
from tests.support.fake_sglang import FakeSGLang
from tests.support.launchable import never_ready
from tests.support.refusals import refusal, told
from tests.support.server_thread import PATIENCE_S
from tests.support.store_server import Refusal, StoreProxy

if TYPE_CHECKING:
    from tests.support.store_server import StoreBucket


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working copies of this machine."""
    directory = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(directory))
    return directory


def stored_rows(bucket: StoreBucket, run: str = "run") -> list[dict[str, Any]]:
    """Return the rows of all parts, as any reader of the bucket finds them."""
    parts = [key for key in bucket.keys(f"{run}/parts/") if key.endswith(".parquet")]
    rows = [row for key in parts for row in pq.read_table(io.BytesIO(bucket.get(key))).to_pylist()]
    return sorted(rows, key=lambda row: row["row"])


def test_a_run(tmp_path: Path, store_bucket: StoreBucket, cache: Path) -> None:
    """All rows are in the store, once; every command reads them there, on a machine that has nothing."""
    uri = f"{store_bucket.uri}/out/run"
    job = job_of(tmp_path, rows=20, output={"path": uri}, input={"columns": ["id"]})
    file = write_job(job, tmp_path)
    done = batchrun(file)
    assert done.exit_code == 0, done.stderr
    assert f"results: {uri}/parts" in done.stderr
    assert [row["id"] for row in stored_rows(store_bucket, "out/run")] == list(range(20))
    keys = {key.removeprefix("out/run/") for key in store_bucket.keys("out/run/")}
    assert {"run.json", "report.json", "events.jsonl", "tasks/main/owner"} <= keys
    assert not any("journal" in key for key in keys)
    shutil.rmtree(cache)
    state = json.loads(batchrun("status", uri, "--json").stdout)
    assert (state["path"], state["rows_on_disk"], state["finished"]) == (uri, 20, True)
    again = batchrun(file, "--json")
    assert again.exit_code == 0
    assert json.loads(again.stdout)["rows_resumed"] == 20
    merged = batchrun("merge", uri)
    assert (merged.exit_code, merged.stdout.strip()) == (0, f"{uri}/merged"), merged.stderr
    table = pq.read_table(io.BytesIO(store_bucket.get("out/run/merged/merged-000000.parquet")))
    assert table.column("row").to_pylist() == list(range(20))
    assert "out/run/merged/_SUCCESS" in store_bucket.keys("out/run/merged/")
    assert batchrun("report", uri).stdout.strip() == f"{uri}/report.html"
    assert b"<html" in store_bucket.get("out/run/report.html")
    assert batchrun("advise", uri).exit_code == 0
    exported = batchrun("merge", uri, tmp_path / "a.csv")
    assert exported.exit_code == 0, exported.stderr
    assert len((tmp_path / "a.csv").read_text().splitlines()) == 21
    assert not any(":" in path.name for path in tmp_path.iterdir())


def test_the_example(tmp_path: Path) -> None:
    """`make run-s3` does a job on a store that it starts, and shows what is in it."""
    file = write_rows(tmp_path / "docs.parquet", 20)
    job = write_job(
        {**job_of(tmp_path, input={"path": str(file)}), "prompt": {"user": "{{ text }}"}}, tmp_path
    )
    command = [sys.executable, str(ROOT / "jobs" / "on_s3.py"), str(job), str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stderr
    assert "s3://batchrunner/run/merged/merged-000000.parquet" in done.stdout
    assert "20 of 20 rows on disk" in done.stdout


def test_added_rows_and_fresh(tmp_path: Path, store_bucket: StoreBucket) -> None:
    """Added files are done in the same run; a merged data set of before is gone; --fresh begins again."""
    source = tmp_path / "in"
    write_rows(source / "a.parquet", 5)
    job = job_of(tmp_path, input={"path": str(source)}, output={"path": f"{store_bucket.uri}/run"})
    file = write_job(job, tmp_path)
    assert batchrun(file).exit_code == 0
    assert batchrun("merge", f"{store_bucket.uri}/run").exit_code == 0
    store_bucket.put("run/of-mine.txt", b"precious")
    write_rows(source / "b.parquet", 5, first=5)
    assert batchrun(file).exit_code == 0
    assert len(stored_rows(store_bucket)) == 10
    assert store_bucket.keys("run/merged/") == []
    other = {**job, "prompt": {"user": "Say {{ text }}"}}
    told(refusal(other, tmp_path), f"{store_bucket.uri}/run holds another run", "prompt", "--fresh")
    assert batchrun(write_job(other, tmp_path), "--fresh").exit_code == 0
    assert [row["row"] for row in stored_rows(store_bucket)] == list(range(10))
    assert store_bucket.get("run/of-mine.txt") == b"precious"


@pytest.mark.parametrize("is_lost", [False, True], ids=["same-machine", "other-machine"])
def test_a_kill(tmp_path: Path, store_bucket: StoreBucket, cache: Path, is_lost: bool) -> None:
    """What was uploaded is not done again by another machine, and on the same one nothing that was stored."""
    with FakeSGLang(lambda _: "hold" if len(server.prompts) > 20 else "answer") as server:
        job = job_of(
            tmp_path, server, rows=40, output={"path": f"{store_bucket.uri}/run", "durable": 0.5}, window=4
        )
        with started(write_job(job, tmp_path)) as run:
            eventually(lambda: store_bucket.keys("run/parts/"))
            run.process.kill()
            run.process.wait()
        if is_lost:
            shutil.rmtree(cache)
        server.answer_held()
        server.wait_until_left()
        sent = len(server.prompts)
        report = batchrunner.run(job)
    assert report.rows_ok == 40
    assert report.rows_resumed > 0
    assert len(server.prompts) - sent == 40 - report.rows_resumed
    assert [row["row"] for row in stored_rows(store_bucket)] == list(range(40))


def test_kills_before_the_first_row(tmp_path: Path, store_bucket: StoreBucket) -> None:
    """Two machines die before their engine answers, one in place of the other; the next one begins."""
    script = ROOT / "tests" / "support" / "other_machine.py"
    job = job_of(tmp_path, output={"path": f"{store_bucket.uri}/run"})

    def recovered(host: str) -> bool:
        if not store_bucket.keys("run/tasks/main/owner"):
            return False
        owner = json.loads(store_bucket.get("run/tasks/main/owner"))
        return bool(owner["host"] == host)

    waiting = write_job({**job, "engine": never_ready(tmp_path)}, tmp_path)
    for name in "ab":
        with started_python(script, name, waiting) as run:
            eventually(partial(recovered, name))
            run.process.kill()
            run.process.wait()
    with started_python(script, "c", write_job(job, tmp_path)) as run:
        assert run.end() == 0
    assert [row["row"] for row in stored_rows(store_bucket)] == list(range(10))


def test_another_run_in_its_place(tmp_path: Path, store_bucket: StoreBucket, cache: Path) -> None:
    """A working copy of a run that was replaced by another machine is not mixed with the new one."""
    job = job_of(tmp_path, INSTANT, output={"path": f"{store_bucket.uri}/run"})
    batchrunner.run(job)
    mine = cache.with_name("kept")
    cache.rename(mine)
    other = {**job, "prompt": {"user": "Say {{ text }}"}}
    batchrunner.run(other, fresh=True)
    shutil.rmtree(cache)
    mine.rename(cache)
    assert batchrunner.run(other).rows_resumed == 10
    for key in store_bucket.keys("run/"):
        store_bucket.delete(key)
    assert batchrunner.run(job).rows_resumed == 0
    assert len(stored_rows(store_bucket)) == 10


@pytest.mark.parametrize(
    ("uri", "storage", "problem"),
    [
        ("s3://not-a-bucket-of-anyone/run", {}, "there is no such bucket (NoSuchBucket)"),
        ("{uri}/run", {"endpoint": "http://127.0.0.1:9"}, "the store does not answer"),
        ("{uri}/run?endpoint_override=x", {}, "not to a URI"),
        ("hdfs://host/run", {}, "not to a URI of this kind: give a directory, or s3://, gs:// or az://"),
    ],
)
def test_what_cannot_be_an_output_path(
    tmp_path: Path, store_bucket: StoreBucket, cache: Path, uri: str, storage: dict[str, Any], problem: str
) -> None:
    """Each mistake is one line with exit code 2."""
    batchrunner.run(job_of(tmp_path, output={"path": f"{store_bucket.uri}/run"}))
    shutil.rmtree(cache)
    path = uri.format(uri=store_bucket.uri)
    file = write_job(job_of(tmp_path, output={"path": path}, storage=storage), tmp_path)
    result = batchrun(file)
    assert result.exit_code == 2, (result.stderr, result.exception)
    told(result.stderr, f"output.path {path}", problem)
    assert len(result.stderr.splitlines()) == 1


REQUEST = {"custom_id": "a", "url": "/v1/chat/completions", "body": {"messages": [], "model": "m"}}


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
    requests = tmp_path / "r.jsonl"
    requests.write_text(json.dumps(REQUEST))
    uri = store_bucket.uri.replace("s3", "S3")
    commands: list[list[object]] = [
        ["merge", run, f"{uri}/a.csv"],
        ["batch", requests, "-o", f"{uri}/a.jsonl", "--model", "simulated"],
        ["batch", requests, "-o", tmp_path / "a.jsonl", "--errors", f"{uri}/a.jsonl", "--model", "simulated"],
    ]
    for command in commands:
        told(one_line(*command), f"{uri}/a", "is a URI")
    assert not any(":" in path.name for path in tmp_path.iterdir())


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


def test_slurm(tmp_path: Path, store_bucket: StoreBucket, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tasks of an array join a run in a store; their logs lie where they are submitted."""
    monkeypatch.chdir(tmp_path)
    uri = f"{store_bucket.uri}/runs/mine"
    job = write_job(job_of(tmp_path, output={"path": uri}), tmp_path)
    made = batchrun("slurm", job, "--array", "0-3")
    assert made.exit_code == 0, made.stderr
    assert f"--output={tmp_path}/mine.slurm/" in made.stdout
    assert "--join" in made.stdout
    assert "s3:/" not in made.stdout
