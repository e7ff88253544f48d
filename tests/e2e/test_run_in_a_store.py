"""A run in an object store: parts, commands on URIs, lost machines, a store that fails or refuses."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

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
    run_job,
    started,
    started_python,
    write_job,
    write_rows,
)
from tests.support.fake_sglang import Behaviour, FakeSGLang
from tests.support.functions import write_module
from tests.support.launchable import never_ready
from tests.support.refusals import refusal, told
from tests.support.server_thread import PATIENCE_S
from tests.support.store_server import Fault, Refusal, StoreBucket, StoreProxy


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working copies of this machine."""
    directory = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(directory))
    return directory


def ids_in(bucket: StoreBucket) -> list[int]:
    """Return the ordinals of the rows of all parts, as any reader of the bucket finds them."""
    parts = [pq.read_table(io.BytesIO(bucket.get(key))) for key in bucket.keys("run/parts/")]
    return sorted(row for part in parts for row in part["row"].to_pylist())


def test_rollouts_that_were_killed(
    tmp_path: Path, store_bucket: StoreBucket, cache: Path, server: FakeSGLang
) -> None:
    """Answers of rollouts stay in the working copy of this machine: nothing is asked for twice."""
    write_module(
        tmp_path,
        """
        async def solve(row, generate):
            first = await generate(f"row {row['id']} first")
            second = await generate(f"row {row['id']} second")
            return {"texts": [first.text, second.text]}
        """,
    )
    server.script = lambda sent: "hold" if "second" in sent.prompt else "answer"
    uri = f"{store_bucket.uri}/run"
    job = job_of(tmp_path, server, rows=6, output={"path": uri}, prompt={"rollout": "hooks:solve"})
    file = write_job(job, tmp_path)
    with started(file) as running:
        eventually(lambda: len(server.sent) == 12)
        running.process.send_signal(signal.SIGKILL)
        running.process.wait()
    server.wait_until_left()
    server.script = lambda sent: "answer"
    assert batchrun(file).exit_code == 0
    assert {server.prompts.count(f"row {row} first") for row in range(6)} == {1}
    assert not list(cache.rglob("turns-*"))


def test_a_run(tmp_path: Path, store_bucket: StoreBucket, cache: Path) -> None:
    """All rows are in the store, once; every command reads them there, on a machine that has nothing."""
    uri = f"{store_bucket.uri}/run"
    job = job_of(tmp_path, rows=20, output={"path": uri}, input={"columns": ["id"]})
    file = write_job(job, tmp_path)
    done = batchrun(file)
    assert done.exit_code == 0, done.stderr
    assert f"results: {uri}/parts" in done.stderr
    assert ids_in(store_bucket) == list(range(20))
    keys = {key.removeprefix("run/") for key in store_bucket.keys("run/")}
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
    table = pq.read_table(io.BytesIO(store_bucket.get("run/merged/merged-000000.parquet")))
    assert table.column("row").to_pylist() == list(range(20))
    assert "run/merged/_SUCCESS" in store_bucket.keys("run/merged/")
    assert batchrun("report", uri).stdout.strip() == f"{uri}/report.html"
    assert b"<html" in store_bucket.get("run/report.html")
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
    assert len(ids_in(store_bucket)) == 10
    assert store_bucket.keys("run/merged/") == []
    other = {**job, "prompt": {"user": "Say {{ text }}"}}
    told(refusal(other, tmp_path), f"{store_bucket.uri}/run holds another run", "prompt", "--fresh")
    run_job(other, tmp_path, "--fresh")
    assert ids_in(store_bucket) == list(range(10))
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
    assert ids_in(store_bucket) == list(range(40))


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
    assert ids_in(store_bucket) == list(range(10))


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
    assert len(ids_in(store_bucket)) == 10


@pytest.mark.parametrize(
    ("uri", "storage", "problem"),
    [
        ("s3://not-a-bucket-of-anyone/run", {}, "there is no such bucket (NoSuchBucket)"),
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


@pytest.mark.parametrize("fault", ["reset", Refusal(500, "InternalError")], ids=["reset", "refusal"])
@pytest.mark.parametrize("away_for", [5, 10**9], ids=["a-while", "for-good"])
def test_a_store_that_is_away_at_the_start(
    tmp_path: Path,
    store_bucket: StoreBucket,
    server: FakeSGLang,
    monkeypatch: pytest.MonkeyPatch,
    proxy: StoreProxy,
    fault: Fault | Refusal,
    away_for: int,
) -> None:
    """It is waited for as during a run; then the exit code is that of a run that may go on."""
    monkeypatch.setattr(TIMING, "store_retries", 0.1)
    store_bucket.put("in/a.parquet", write_rows(tmp_path / "a.parquet", 10))
    whole = {"input": {"path": f"{store_bucket.uri}/in"}, "output": {"path": f"{store_bucket.uri}/run"}}
    part = {"input": whole["input"], "output": {"path": str(tmp_path / "run")}}
    waits_s = 60 if away_for == 5 else 0.1
    for places in (whole, part):
        proxy.asked.clear()
        proxy.faults = lambda *_: fault if proxy.asked.total() < away_for else "none"
        job = {**job_of(tmp_path, server, limits={"disk_wait": waits_s}), **places}
        result = batchrun(write_job(job, tmp_path))
        assert result.exit_code == (0 if away_for == 5 else 1), result.stderr
        told(result.stderr, "waiting for the store (limits.disk_wait)" if away_for == 5 else "s3://")
    assert len(server.sent) == (20 if away_for == 5 else 0)


REQUEST = {"custom_id": "a", "url": "/v1/chat/completions", "body": {"messages": [], "model": "m"}}


def test_commands_that_are_refused(tmp_path: Path, store_bucket: StoreBucket) -> None:
    """A URI without a run, and what is written as a plain file as a URI: one line, and nothing is made."""
    run = f"{store_bucket.uri}/run"
    batchrunner.run(job_of(tmp_path, output={"path": run}))
    requests = tmp_path / "r.jsonl"
    requests.write_text(json.dumps(REQUEST))
    uri = store_bucket.uri.replace("s3", "S3")
    commands: list[list[object]] = [
        ["status", f"{run}/of/nobody"],
        ["merge", f"{run}/of/nobody"],
        ["merge", run, f"{uri}/a.csv"],
        ["batch", requests, "-o", f"{uri}/a.jsonl", "--model", "simulated"],
        ["batch", requests, "-o", tmp_path / "a.jsonl", "--errors", f"{uri}/a.jsonl", "--model", "simulated"],
    ]
    for command in commands:
        refused = batchrun(*command)
        (line,) = refused.stderr.splitlines()
        told(line, "is a URI" if len(command) > 2 else "not a run's output path")
        assert refused.exit_code == 2
    assert not any(":" in path.name for path in tmp_path.iterdir())


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
]


@pytest.mark.parametrize("refused", [{"PUT"}, {"GET", "PUT", "HEAD", "POST", "DELETE"}], ids=len)
@pytest.mark.parametrize(("answer", "problem"), REFUSALS, ids=[answer.code for answer, _ in REFUSALS])
def test_what_a_store_refuses(
    tmp_path: Path,
    store_bucket: StoreBucket,
    server: FakeSGLang,
    monkeypatch: pytest.MonkeyPatch,
    answer: Refusal,
    problem: str,
    refused: set[str],
) -> None:
    """A store that refuses all, or writes only, is one line with exit code 2, before a row is sent."""
    monkeypatch.setattr(TIMING, "store_retries", 0.1)
    uri = f"{store_bucket.uri}/run"
    with StoreProxy(store_bucket.endpoint) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        proxy.faults = lambda method, *_: answer if method in refused else "none"
        told(refusal(job_of(tmp_path, server, output={"path": uri}), tmp_path), uri, problem)
    assert not server.sent


@pytest.fixture
def proxy(store_bucket: StoreBucket, monkeypatch: pytest.MonkeyPatch) -> Iterator[StoreProxy]:
    """A proxy before the store, to which the environment leads."""
    with StoreProxy(store_bucket.endpoint) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        yield proxy


FAULTS: list[tuple[Fault, set[str]]] = [
    ("slow down", {"GET", "PUT", "HEAD", "POST", "DELETE"}),
    ("reset", {"GET", "PUT", "HEAD"}),
    ("lost reply", {"PUT"}),
    ("half answer", {"GET"}),
    ("late", {"PUT"}),
]


@pytest.mark.parametrize(("fault", "methods"), FAULTS, ids=[fault for fault, _ in FAULTS])
def test_each_request_fails_once(
    tmp_path: Path, store_bucket: StoreBucket, proxy: StoreProxy, fault: Fault, methods: set[str]
) -> None:
    """Input, results, lock, logs, `merge`: what fails once is repeated, and done once."""
    store_bucket.put("in/a.parquet", write_rows(tmp_path / "a.parquet", 30))
    run = {"path": f"{store_bucket.uri}/run", "durable": 0.2, "part_rows": 10}
    job = job_of(tmp_path, INSTANT, input={"path": f"{store_bucket.uri}/in"}, output=run)
    proxy.faults = lambda method, _, before: fault if method in methods and not before else "none"
    assert batchrunner.run(job).rows_ok == 30
    proxy.asked.clear()
    store_bucket.put("in/b.parquet", write_rows(tmp_path / "b.parquet", 30, first=30))
    report = batchrunner.run(job)
    assert (report.rows_ok, report.rows_resumed) == (60, 30)
    assert ids_in(store_bucket) == list(range(60))
    assert batchrunner.run(job).rows_resumed == 60
    proxy.asked.clear()
    assert batchrun("merge", run["path"]).exit_code == 0
    proxy.asked.clear()
    assert batchrun("merge", run["path"], tmp_path / "all.parquet").exit_code == 0
    (key,) = (key for key in store_bucket.keys("run/merged/") if key.endswith(".parquet"))
    for whole in (io.BytesIO(store_bucket.get(key)), tmp_path / "all.parquet"):
        assert pq.read_table(whole).column("row").to_pylist() == list(range(60))


def test_the_requests_of_a_run(tmp_path: Path, store_bucket: StoreBucket, proxy: StoreProxy) -> None:
    """A start, a part and an end cost a few dozen requests, whatever the number of rows."""
    job = job_of(tmp_path, INSTANT, rows=300, output={"path": f"{store_bucket.uri}/run"})
    batchrunner.run(job)
    assert proxy.asked.total() < 40, proxy.asked


MID_RUN: dict[str, Fault | Refusal] = {
    "slow-down": "slow down",
    "reset": "reset",
    "no-rights": Refusal(403, "AccessDenied"),
    "no-bucket": Refusal(404, "NoSuchBucket"),
    "old-token": Refusal(400, "ExpiredToken"),
}


@pytest.mark.parametrize("join", [False, True], ids=["alone", "join"])
@pytest.mark.parametrize("fault", MID_RUN.values(), ids=list(MID_RUN))
def test_a_store_that_fails_for_good(
    tmp_path: Path, store_bucket: StoreBucket, proxy: StoreProxy, fault: Fault | Refusal, join: bool
) -> None:
    """One line, exit code 1, a report on this machine; the next start sends no row again."""
    options = ["--join"] if join else []
    with FakeSGLang(lambda _: _fails(proxy, server, fault)) as server:
        run = {"path": f"{store_bucket.uri}/run", "durable": 0.2}
        job = job_of(tmp_path, server, rows=40, output=run, limits={"disk_wait": 0.5}, window=4)
        failed = run_job(job, tmp_path, *options, code=1)
        (error,) = (line for line in failed.stderr.splitlines() if line.startswith("batchrun: "))
        assert "what is stored is kept" in error
        assert "Traceback" not in failed.stderr
        (report,) = Path(os.environ["XDG_CACHE_HOME"]).rglob("report.json")
        assert json.loads(report.read_text())["exit_code"] == 1
        sent = len(server.prompts)
        proxy.faults = lambda *_: "none"
        server.script = lambda _: "answer"
        assert batchrun(tmp_path / "job.yaml", *options).exit_code == 0
    assert ids_in(store_bucket) == list(range(40))
    assert sent >= 20
    assert len(server.prompts) - 40 <= 4  # in flight when it ended


def _fails(proxy: StoreProxy, server: FakeSGLang, fault: Fault | Refusal) -> Behaviour:
    """Let the store refuse everything from the 20th prompt on, and let the last rows wait until then."""
    if len(server.prompts) > 20:
        proxy.faults = lambda *_: fault
        return "hold"
    return "answer"
