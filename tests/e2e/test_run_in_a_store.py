"""A run in an object store: commands on URIs, lost machines, tasks that share it, a store that fails."""

import contextlib
import io
import json
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

import batchrunner
from batchrunner.core.timing import TIMING
from batchrunner.output.parts import read_journal
from tests.conftest import (
    INSTANT,
    ROOT,
    batchrun,
    ended,
    eventually,
    job_of,
    run_job,
    started,
    write_job,
    write_rows,
)
from tests.e2e.test_batch_files import request_of, write_batch
from tests.support.fake_sglang import Behaviour, FakeSGLang, Sent
from tests.support.functions import write_module
from tests.support.launchable import never_ready
from tests.support.other_machine import CLOCK_OFF_S, GONE_AFTER_S
from tests.support.refusals import refusal, told
from tests.support.runs import machine, status_of
from tests.support.server_thread import PATIENCE_S
from tests.support.store_server import Fault, Refusal, StoreBucket, StoreProxy, rows_in_parts

pytestmark = pytest.mark.usefixtures("cache")


def test_a_run(tmp_path: Path, store_bucket: StoreBucket, cache: Path) -> None:
    """All rows are in the store, once; every command reads them there, on a machine that has nothing."""
    uri = f"{store_bucket.uri}/run"
    job = job_of(tmp_path, rows=20, output={"path": uri}, input={"columns": ["id"]})
    assert f"results: {uri}/parts" in run_job(job, tmp_path).stderr
    assert rows_in_parts(store_bucket) == list(range(20))
    keys = {key.removeprefix("run/") for key in store_bucket.keys("run/")}
    assert {"run.json", "report.json", "events.jsonl", "tasks/main/owner"} <= keys
    assert not any("journal" in key for key in keys)
    shutil.rmtree(cache)
    state = status_of(uri)
    assert (state["path"], state["rows_on_disk"], state["finished"]) == (uri, 20, True)
    assert batchrunner.run(job).rows_resumed == 20
    merged = batchrun("merge", uri)
    assert (merged.exit_code, merged.stdout.strip()) == (0, f"{uri}/merged"), merged.stderr
    assert "run/merged/_SUCCESS" in store_bucket.keys("run/merged/")
    assert batchrun("report", uri).stdout.strip() == f"{uri}/report.html"
    assert b"<html" in store_bucket.get("run/report.html")
    assert batchrun("advise", uri).exit_code == 0
    assert batchrun("merge", uri, tmp_path / "a.csv").exit_code == 0
    assert len((tmp_path / "a.csv").read_text().splitlines()) == 21
    assert not any(":" in path.name for path in tmp_path.iterdir())


def test_the_example(tmp_path: Path) -> None:
    """`make run-s3` does a job on a store that it starts, and shows what is in it."""
    file = write_rows(tmp_path / "docs.parquet", 20)
    job = write_job(
        {**job_of(tmp_path, input={"path": str(file)}), "prompt": {"user": "{{ text }}"}}, tmp_path
    )
    done = ended(sys.executable, ROOT / "jobs" / "on_s3.py", job, file)
    assert done.returncode == 0, done.stderr
    assert "s3://batchrunner/run/merged/merged-000000.parquet" in done.stdout
    assert "20 of 20 rows on disk" in done.stdout


def test_added_rows_and_fresh(tmp_path: Path, store_bucket: StoreBucket) -> None:
    """Added files are done in the same run; a merged data set of before is gone; --fresh begins again."""
    source = tmp_path / "in"
    write_rows(source / "a.parquet", 5)
    job = job_of(tmp_path, input={"path": str(source)}, output={"path": f"{store_bucket.uri}/run"})
    run_job(job, tmp_path)
    assert batchrun("merge", f"{store_bucket.uri}/run").exit_code == 0
    store_bucket.put("run/of-mine.txt", b"precious")
    write_rows(source / "b.parquet", 5, first=5)
    run_job(job, tmp_path)
    assert len(rows_in_parts(store_bucket)) == 10
    assert store_bucket.keys("run/merged/") == []
    other = {**job, "prompt": {"user": "Say {{ text }}"}}
    told(refusal(other, tmp_path), f"{store_bucket.uri}/run holds another run", "prompt", "--fresh")
    run_job(other, tmp_path, "--fresh")
    assert rows_in_parts(store_bucket) == list(range(10))
    assert store_bucket.get("run/of-mine.txt") == b"precious"


def test_rollouts_that_were_killed(tmp_path: Path, store_bucket: StoreBucket, server: FakeSGLang) -> None:
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
    with started(write_job(job, tmp_path)) as running:
        eventually(lambda: len(server.sent) == 12)
        running.kill()
    server.wait_until_left()
    server.script = lambda _: "answer"
    run_job(job, tmp_path)
    assert {server.prompts.count(f"row {row} first") for row in range(6)} == {1}


@pytest.mark.parametrize("is_lost", [False, True], ids=["same-machine", "other-machine"])
def test_a_kill(tmp_path: Path, store_bucket: StoreBucket, cache: Path, is_lost: bool) -> None:
    """What was uploaded is not done again by another machine, and on the same one nothing that was stored."""
    with FakeSGLang(lambda _: "hold" if len(server.prompts) > 20 else "answer") as server:
        job = job_of(
            tmp_path, server, rows=40, output={"path": f"{store_bucket.uri}/run", "durable": 0.5}, window=4
        )
        with started(write_job(job, tmp_path)) as run:
            eventually(lambda: store_bucket.keys("run/parts/"))
            run.kill()
        if is_lost:
            shutil.rmtree(cache)
        server.answer_held()
        server.wait_until_left()
        sent = len(server.prompts)
        report = batchrunner.run(job)
    assert report.rows_ok == 40
    assert report.rows_resumed > 0
    assert len(server.prompts) - sent == 40 - report.rows_resumed
    assert rows_in_parts(store_bucket) == list(range(40))


def test_kills_before_the_first_row(tmp_path: Path, store_bucket: StoreBucket) -> None:
    """Two machines die before their engine answers, one in place of the other; the next one begins."""
    job = job_of(tmp_path, output={"path": f"{store_bucket.uri}/run"})

    def recovered(host: str) -> bool:
        if not store_bucket.keys("run/tasks/main/owner"):
            return False
        owner = json.loads(store_bucket.get("run/tasks/main/owner"))
        return bool(owner["host"] == host)

    waiting = write_job({**job, "engine": never_ready(tmp_path)}, tmp_path)
    for name in "ab":
        with machine(name, waiting) as run:
            eventually(partial(recovered, name))
            run.kill()
    with machine("c", write_job(job, tmp_path)) as run:
        assert run.end() == 0
    assert rows_in_parts(store_bucket) == list(range(10))


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
    assert len(rows_in_parts(store_bucket)) == 10


@pytest.mark.parametrize(
    ("uri", "problem"),
    [
        ("s3://not-a-bucket-of-anyone/run", "there is no such bucket (NoSuchBucket)"),
        ("{uri}/run?endpoint_override=x", "not to a URI"),
        ("hdfs://host/run", "not to a URI of this kind: give a directory, or s3://, gs:// or az://"),
    ],
)
def test_what_cannot_be_an_output_path(
    tmp_path: Path, store_bucket: StoreBucket, uri: str, problem: str
) -> None:
    """Each mistake is one line with exit code 2."""
    path = uri.format(uri=store_bucket.uri)
    told(refusal(job_of(tmp_path, output={"path": path}), tmp_path), f"output.path {path}", problem)


@pytest.mark.parametrize(("fault", "only_input"), [("reset", True), (Refusal(500, "InternalError"), False)])
@pytest.mark.parametrize("away_for", [5, 10**9], ids=["a-while", "for-good"])
def test_a_store_that_is_away_at_the_start(
    tmp_path: Path,
    store_bucket: StoreBucket,
    server: FakeSGLang,
    monkeypatch: pytest.MonkeyPatch,
    proxy: StoreProxy,
    fault: Fault | Refusal,
    only_input: bool,
    away_for: int,
) -> None:
    """It is waited for as during a run; then the exit code is that of a run that may go on."""
    monkeypatch.setattr(TIMING, "store_retries", 0.1)
    store_bucket.put("in/a.parquet", write_rows(tmp_path / "a.parquet", 10))
    proxy.faults = lambda *_: fault if proxy.asked.total() < away_for else "none"
    comes_back = away_for == 5
    path = str(tmp_path / "run") if only_input else f"{store_bucket.uri}/run"
    job = job_of(
        tmp_path, server, input={"path": f"{store_bucket.uri}/in"}, output={"path": path},
        limits={"disk_wait": 60 if comes_back else 0.1},
    )  # fmt: skip
    result = run_job(job, tmp_path, code=0 if comes_back else 1)
    told(result.stderr, "waiting for the store (limits.disk_wait)" if comes_back else "s3://")
    assert len(server.sent) == (10 if comes_back else 0)


def test_a_store_that_is_away_while_the_lock_is_taken(
    tmp_path: Path,
    store_bucket: StoreBucket,
    server: FakeSGLang,
    monkeypatch: pytest.MonkeyPatch,
    proxy: StoreProxy,
) -> None:
    """The lock of the run is taken once the store answers again."""
    monkeypatch.setattr(TIMING, "store_retries", 0.1)
    refusals_of_owner = 5

    def refuse_owner(method: str, path: str, times: int) -> Fault | Refusal:
        is_refused = method == "PUT" and path.endswith("tasks/main/owner") and times < refusals_of_owner
        return Refusal(500, "InternalError") if is_refused else "none"

    proxy.faults = refuse_owner
    result = run_job(job_of(tmp_path, server, output={"path": f"{store_bucket.uri}/run"}), tmp_path)
    told(result.stderr, "waiting for the store (limits.disk_wait)")
    assert proxy.asked["PUT", f"/{store_bucket.name}/run/tasks/main/owner"] > refusals_of_owner
    assert rows_in_parts(store_bucket) == list(range(10))


def test_commands_that_are_refused(tmp_path: Path, store_bucket: StoreBucket) -> None:
    """A URI without a run, and what is written as a plain file as a URI: one line, and nothing is made."""
    run = f"{store_bucket.uri}/run"
    batchrunner.run(job_of(tmp_path, output={"path": run}))
    requests = write_batch(tmp_path / "r.jsonl", [request_of(0)])
    uri = store_bucket.uri.replace("s3", "S3")
    commands: list[list[object]] = [
        ["merge", f"{run}/of/nobody"],
        ["merge", run, f"{uri}/a.csv"],
        [
            "batch",
            requests,
            "-o",
            tmp_path / "a.jsonl",
            "--errors",
            f"{uri}/a.jsonl",
            "--engine",
            "simulated",
        ],
    ]
    for command in commands:
        refused = batchrun(*command)
        (line,) = refused.stderr.splitlines()
        told(line, "is a URI" if len(command) > 2 else "not a run's output path")
        assert refused.exit_code == 2


def test_requests_of_a_batch(
    tmp_path: Path, store_bucket: StoreBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch file is read from a store, also one that only the base job knows."""
    store_bucket.put("r.jsonl", json.dumps(request_of(0)).encode())
    base = write_job({"engine": "simulated", "storage": {"endpoint": store_bucket.endpoint}}, tmp_path)
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    out = tmp_path / "a.jsonl"
    done = batchrun("batch", f"{store_bucket.uri}/r.jsonl", "-o", out, "--engine", base)
    assert done.exit_code == 0, done.stderr
    assert len(out.read_text().splitlines()) == 1


REFUSALS = [
    (Refusal(400, "AuthorizationHeaderMalformed"), "the region is wrong: set storage.region"),
    (Refusal(403, "AccessDenied"), "the credentials do not allow this request"),
    (Refusal(403, "SignatureDoesNotMatch"), "the credentials are wrong"),
    (Refusal(501, "NotImplemented"), "the store has no conditional writes"),
]


@pytest.mark.parametrize("refused", [{"PUT"}, {"GET", "PUT", "HEAD", "POST", "DELETE"}], ids=len)
@pytest.mark.parametrize(("answer", "problem"), REFUSALS, ids=[answer.code for answer, _ in REFUSALS])
def test_what_a_store_refuses(
    tmp_path: Path,
    store_bucket: StoreBucket,
    server: FakeSGLang,
    monkeypatch: pytest.MonkeyPatch,
    proxy: StoreProxy,
    answer: Refusal,
    problem: str,
    refused: set[str],
) -> None:
    """A store that refuses all, or writes only, is one line with exit code 2, before a row is sent."""
    monkeypatch.setattr(TIMING, "store_retries", 0.1)
    uri = f"{store_bucket.uri}/run"
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
    assert batchrunner.run(job).rows_resumed == 30
    assert rows_in_parts(store_bucket) == list(range(60))
    proxy.asked.clear()
    assert batchrun("merge", run["path"]).exit_code == 0
    (key,) = (key for key in store_bucket.keys("run/merged/") if key.endswith(".parquet"))
    assert pq.read_table(io.BytesIO(store_bucket.get(key)))["row"].to_pylist() == list(range(60))


def test_the_requests_of_a_run(tmp_path: Path, store_bucket: StoreBucket, proxy: StoreProxy) -> None:
    """A start, a part and an end cost a few dozen requests, whatever the number of rows."""
    job = job_of(tmp_path, INSTANT, rows=300, output={"path": f"{store_bucket.uri}/run"})
    batchrunner.run(job)
    assert proxy.asked.total() < 40, proxy.asked


MID_RUN: dict[str, Fault | Refusal] = {
    "reset": "reset",
    "no-rights": Refusal(403, "AccessDenied"),
    "no-bucket": Refusal(404, "NoSuchBucket"),
}


@pytest.mark.parametrize("join", [False, True], ids=["alone", "join"])
@pytest.mark.parametrize("fault", MID_RUN.values(), ids=list(MID_RUN))
def test_a_store_that_fails_for_good(
    tmp_path: Path,
    store_bucket: StoreBucket,
    cache: Path,
    proxy: StoreProxy,
    fault: Fault | Refusal,
    join: bool,
) -> None:
    """One line, exit code 1, a report on this machine; the next start sends no row again."""
    options = ["--join"] if join else []

    def fail_from_the_20th_prompt(_: Sent) -> Behaviour:
        if len(server.prompts) <= 20:
            return "answer"
        proxy.faults = lambda *_: fault
        return "hold"

    with FakeSGLang(fail_from_the_20th_prompt) as server:
        run = {"path": f"{store_bucket.uri}/run", "durable": 0.2}
        job = job_of(tmp_path, server, rows=40, output=run, limits={"disk_wait": 0.5}, window=4)
        failed = run_job(job, tmp_path, *options, code=1)
        (error,) = (line for line in failed.stderr.splitlines() if line.startswith("batchrun: "))
        assert "stored rows are kept" in error
        assert "Traceback" not in failed.stderr
        (report,) = cache.rglob("report.json")
        assert json.loads(report.read_text())["exit_code"] == 1
        proxy.faults = lambda *_: "none"
        server.script = lambda _: "answer"
        run_job(job, tmp_path, *options)
    assert rows_in_parts(store_bucket) == list(range(40))
    assert len(server.prompts) - 40 <= 4  # in flight when it ended


# --- tasks on several machines that share only a store ---


def job_in(directory: Path, bucket: StoreBucket, server: FakeSGLang, **changes: Any) -> Path:
    """Write a job with its results in the bucket."""
    output = {"path": f"{bucket.uri}/run", "durable": 0.3, **changes.pop("output", {})}
    return write_job(job_of(directory, server, output=output, **changes), directory)


def test_machines_do_a_run_together(
    tmp_path: Path,
    store_bucket: StoreBucket,
    server: FakeSGLang,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Three starts write one data set, a later one does what was added; no disk keeps anything.

    The clock of one machine is an hour ahead, that of another one an hour behind.
    """
    monkeypatch.setenv(GONE_AFTER_S, str(PATIENCE_S))  # none is taken for gone that only stands still
    source = tmp_path / "in"
    write_rows(source / "a.parquet", 90)
    job = job_in(
        tmp_path, store_bucket, server, input={"path": str(source), "columns": ["id"]}, order="prefix"
    )
    with contextlib.ExitStack() as stack:
        clocks = {"a": "0", "b": "3600", "c": "-3600"}
        tasks = [
            stack.enter_context(machine(name, job, "--join", **{CLOCK_OFF_S: off_s}))
            for name, off_s in clocks.items()
        ]
        assert [task.end() for task in tasks] == [0, 0, 0]
    assert rows_in_parts(store_bucket) == list(range(90))
    assert len(server.prompts) == 90
    write_rows(source / "b.parquet", 10, first=90)
    with machine("d", job, "--join") as late:
        assert late.end() == 0
    assert rows_in_parts(store_bucket) == list(range(100))
    assert "done: 100 of 100 rows ok" in batchrun(job, "--join").stderr
    assert not [*cache.glob("*/batchrunner/runs/*"), *cache.glob("batchrunner/runs/*")]
    told(refusal(job.read_text(), tmp_path), "was started with --join")


def _rows_stored(cache: Path, bucket: StoreBucket) -> int:
    """Return the rows that are in parts of the store, or in journals."""
    journals = 0
    with contextlib.suppress(FileNotFoundError):  # it has just become a part
        journals = sum(table.num_rows for path in cache.rglob("journal-*") for table in read_journal(path))
    return len(rows_in_parts(bucket)) + journals


@pytest.mark.parametrize("is_lost", [False, True], ids=["same-machine", "lost-machine"])
def test_a_task_dies(tmp_path: Path, store_bucket: StoreBucket, cache: Path, is_lost: bool) -> None:
    """Its rows that were uploaded are done once; on the same machine all that it had finished."""
    with FakeSGLang(lambda sent: "answer" if sent.row % 4 else "hold") as server:
        job = job_in(tmp_path, store_bucket, server, rows=60, window=60)
        with machine("a", job, "--join") as first:
            eventually(lambda: rows_in_parts(store_bucket) and _rows_stored(cache, store_bucket) == 45)
            first.kill()
        if is_lost:
            shutil.rmtree(cache / "a")
        server.script = lambda _: "answer"
        server.answer_held()
        with machine("b" if is_lost else "a", job, "--join") as second:
            second.wait_for_line("took over from")
            assert second.end() == 0
        twice = sum(count > 1 for count in Counter(server.prompts).values())
    assert rows_in_parts(store_bucket) == list(range(60))
    assert not [*cache.glob("*/batchrunner/runs/*")]
    assert twice == 15 if not is_lost else 15 <= twice < 60


def test_a_task_that_was_paused(tmp_path: Path, store_bucket: StoreBucket) -> None:
    """It comes back after its lease was taken, finds that out, and writes nothing any more."""
    with FakeSGLang(lambda _: "hold") as server:
        job = job_in(tmp_path, store_bucket, server, rows=30, window=30)
        with machine("a", job, "--join") as first:
            eventually(lambda: len(server.prompts) == 30)
            first.process.send_signal(signal.SIGSTOP)
            server.script = lambda _: "answer"
            with machine("b", job, "--join") as second:
                second.wait_for_line("took over from")
                assert second.end() == 0
            server.answer_held()
            first.process.send_signal(signal.SIGCONT)
            first.wait_for_line("took this task over")
            assert first.end() == 1
    assert rows_in_parts(store_bucket) == list(range(30))


def test_a_write_that_arrives_late(tmp_path: Path, store_bucket: StoreBucket) -> None:
    """A write was under way when its machine died, and arrives when the task was taken over."""

    def hold(method: str, path: str, _: int) -> Fault:
        return "held" if method == "PUT" and "/parts/" in path else "none"

    with FakeSGLang() as server, StoreProxy(store_bucket.endpoint, hold) as proxy:
        job = job_in(tmp_path, store_bucket, server, rows=30, output={"part_rows": 10})
        with machine("a", job, "--join", AWS_ENDPOINT_URL=proxy.url) as first:
            eventually(lambda: proxy.held)
            first.process.kill()
        server.script = lambda _: "answer"
        with machine("b", job, "--join") as second:
            second.wait_for_line("took over from")
            proxy.let_go()
            eventually(lambda: proxy.passed == proxy.held)
            assert second.end() == 0
        with machine("c", job, "--join") as third:
            assert third.end() == 0
    assert rows_in_parts(store_bucket) == list(range(30))
    merged = batchrun("merge", f"{store_bucket.uri}/run")
    assert merged.exit_code == 0, merged.stderr
    assert rows_in_parts(store_bucket) == list(range(30))


def test_a_store_that_cannot_keep_tasks_apart(
    tmp_path: Path, store_bucket: StoreBucket, server: FakeSGLang, proxy: StoreProxy
) -> None:
    """Several tasks need conditional writes; that is said before anything is sent, and nothing is left."""
    proxy.faults = lambda *_: "no conditions"
    job = job_of(tmp_path, server, output={"path": f"{store_bucket.uri}/run"})
    told(refusal(job, tmp_path, "--join"), "the store has no conditional writes", "run a single worker")
    assert store_bucket.keys() == []
    assert not server.sent
