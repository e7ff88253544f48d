"""`run` and `arun`: the same runs as the command's, from scripts, notebooks and pipelines."""

import asyncio
import logging
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

import batchrunner
from batchrunner.core.errors import (
    BatchrunError,
    EngineStartError,
    InputError,
    JobError,
    OutputError,
)
from tests.conftest import INSTANT, batchrun, ended, job_of, log_of, rows_in, write_job
from tests.support.fake_sglang import Behaviour, FakeSGLang, Sent
from tests.support.runs import held_from

# --- run ---


def test_a_job_may_be_a_path_a_mapping_or_a_job(tmp_path: Path) -> None:
    """Whatever a caller has at hand as a job means the same."""
    job = job_of(tmp_path)
    sources = (write_job(job, tmp_path), str(tmp_path / "job.yaml"), job, batchrunner.Job(**job))
    reports = [batchrunner.run(source, fresh=True) for source in sources]
    assert [(report.rows_ok, report.exit_code) for report in reports] == [(10, 0)] * 4
    assert batchrunner.run(job, overrides="input.limit=3", fresh=True).rows_ok == 3  # one needs no list


@pytest.mark.parametrize(
    ("change", "error", "told"),
    [
        ({"window": "wide"}, JobError, "window"),
        ({"prompt": {"text": "{{ nothing }}"}}, JobError, "unknown column 'nothing'"),
        ({"input": {"path": "/no/such/file"}}, InputError, "no such file"),
        ({"output": {"path": "/proc/run"}}, OutputError, "output.path /proc/run: cannot be used"),
        (
            {"engine": "http://127.0.0.1:9"},
            EngineStartError,
            "no connection to http.*start the server, or correct engine.urls",
        ),
    ],
)
def test_errors_are_types(
    tmp_path: Path, change: dict[str, Any], error: type[BatchrunError], told: str
) -> None:
    """Each kind of mistake can be caught by its type, and all of them as BatchrunError with an exit code."""
    with pytest.raises(error, match=told) as caught:
        batchrunner.run(job_of(tmp_path, **change))
    assert isinstance(caught.value, batchrunner.BatchrunError)
    assert caught.value.exit_code == 2
    assert len(str(caught.value).splitlines()) == 1


# --- event loops ---


async def test_arun_in_a_running_loop(tmp_path: Path, server: FakeSGLang) -> None:
    """A service awaits runs in its own loop, its other tasks go on, and the runs do not mix."""
    server.script = lambda _: "hold"
    jobs = [job_of(tmp_path / name, server) for name in ("one", "two")]
    running = asyncio.gather(*map(batchrunner.arun, jobs))
    await asyncio.to_thread(server.wait_for, 20)
    assert not running.done()
    server.answer_held()
    assert [report.rows_ok for report in await running] == [10, 10]
    assert len(server.sent) == 20


def test_the_other_calls_are_awaited_too() -> None:
    """A program awaits tables as it awaits runs, and its rows may come from an iterator that is slow."""

    async def main() -> list[Any]:
        calls = (
            batchrunner.agenerate(iter(["a"]), engine=INSTANT),
            batchrunner.aembed(["a"], engine=INSTANT, dimensions=8),
            batchrunner.ascore(["a"], engine=INSTANT, labels=[1, 2]),
            batchrunner.arerank([{"q": "a", "d": ["b"]}], prompt="{{ q }}", documents="d", engine=INSTANT),
        )
        return [table.num_rows for table in await asyncio.gather(*calls)]

    assert asyncio.run(main()) == [1, 1, 1, 1]


async def test_cancelling_a_table(server: FakeSGLang) -> None:
    """It ends its requests; while its rows are read it sends none; the engine that it shares goes on."""
    server.script = lambda _: "hold"
    reads = threading.Event()

    def rows() -> Iterator[str]:
        for number in range(20_000):  # for a quarter of an hour
            yield f"row {number}"
            reads.set()
            time.sleep(0.05)

    with batchrunner.open_engine(server.url) as engine:
        waiting = asyncio.create_task(batchrunner.agenerate(["a", "b"], engine=engine))
        await asyncio.to_thread(server.wait_for, 2)
        reading = asyncio.create_task(batchrunner.agenerate(rows(), engine=engine))
        await asyncio.to_thread(reads.wait)
        began = time.monotonic()
        for call in (waiting, reading):
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
        assert time.monotonic() - began < 300
        assert len(server.sent) == 2
        server.answer_held()
        assert (await batchrunner.agenerate(["c"], engine=engine)).num_rows == 1


async def test_starts_that_share_a_run(tmp_path: Path, server: FakeSGLang) -> None:
    """Workers of a pipeline that say `join` do one run between them, in one process too.

    One that says `fresh` as well is refused, before it discards what the others have done.
    """
    job = job_of(tmp_path, server, rows=4000, window=2)
    server.script = lambda _: "hold"
    reports = asyncio.gather(
        batchrunner.arun(job, join=True), asyncio.to_thread(batchrunner.run, job, join=True)
    )
    try:  # two of each: not all 4,000 rows are taken when the second one comes
        await asyncio.to_thread(server.wait_for, 4)
    finally:
        server.answer_held()
    assert [report.exit_code for report in await reports] == [0, 0]
    assert len(server.sent) == 4000
    with pytest.raises(JobError, match="--fresh would discard"):
        await batchrunner.arun(job, join=True, fresh=True)
    assert rows_in(job) == list(range(4000))


@pytest.mark.parametrize("shared", [False, True])
async def test_cancelling_keeps_finished_rows(tmp_path: Path, server: FakeSGLang, *, shared: bool) -> None:
    """Cancelling a run writes what has ended before it returns; running it again does the rest.

    The same holds on an engine that is shared, which stays open and usable.
    """
    job = job_of(tmp_path, server, rows=20, window=3)
    server.script = held_from(10)
    with batchrunner.open_engine(server.url) if shared else nullcontext() as engine:
        running = asyncio.create_task(batchrunner.arun(job, engine=engine))
        await asyncio.to_thread(server.wait_for, 13)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        # a window of 3 and 13 requests: ten have been answered before
        assert rows_in(job) == list(range(10))
        server.script = lambda _: "answer"
        await asyncio.to_thread(server.forget, clients_stay=shared)
        report = await batchrunner.arun(job, engine=engine)
    assert (report.rows_ok, report.rows_resumed, len(server.sent)) == (20, 10, 10)


@pytest.mark.parametrize("shared", [False, True])
def test_an_interrupt_keeps_finished_rows(tmp_path: Path, server: FakeSGLang, *, shared: bool) -> None:
    """Ctrl-C in a script or notebook raises KeyboardInterrupt, after the finished rows were written."""
    job = job_of(tmp_path, server, rows=20, window=3)
    main = threading.main_thread().ident
    assert main is not None

    def script(sent: Sent) -> Behaviour:
        if len(server.sent) == 13:
            signal.pthread_kill(main, signal.SIGINT)
        return held_from(10)(sent)

    server.script = script
    opened = batchrunner.open_engine(server.url) if shared else nullcontext()
    with opened as engine, pytest.raises(KeyboardInterrupt):
        batchrunner.run(job, engine=engine)
    assert rows_in(job) == list(range(10))


# --- a good guest ---


def test_a_run_is_a_good_guest(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """Handlers, levels, signals and standard output are the program's own, and no thread stays."""

    def belongings() -> object:
        loggers = (logging.getLogger(name) for name in ("", "batchrunner"))
        signals = (signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM))
        threads = {thread for thread in threading.enumerate() if not thread.daemon}
        return [(list(logger.handlers), logger.level) for logger in loggers], list(signals), threads

    with caplog.at_level(logging.INFO, logger="batchrunner"):
        before = belongings()
        shown = repr(batchrunner.run(job_of(tmp_path)))
        assert belongings() == before
    assert "rows to do" in caplog.text
    assert tuple(capfd.readouterr()) == ("", "")
    # whoever has the report as the value of a notebook's cell sees what became of the rows
    assert shown.startswith(f"Report(path='{tmp_path / 'run'}', exit_code=0, reason='done', rows_total=10")
    assert len(shown) < 300 + len(str(tmp_path))


def test_a_script_ends(tmp_path: Path) -> None:
    """A script that only calls `run` ends by itself, without a word on standard error."""
    job = write_job(job_of(tmp_path), tmp_path)
    code = f"import batchrunner; print(batchrunner.run({str(job)!r}).rows_ok)"
    done = ended(sys.executable, "-W", "error", "-c", code)
    assert (done.returncode, done.stdout, done.stderr) == (0, "10\n", "")


# --- engines ---


def test_one_engine_serves_several_jobs(tmp_path: Path, server: FakeSGLang) -> None:
    """An engine that takes minutes to load is opened once for all jobs of a script."""
    with batchrunner.open_engine({"kind": "attach", "urls": [server.url]}) as engine:
        assert engine.info.model == "fake/model"
        for name in ("one", "two"):
            assert batchrunner.run(job_of(tmp_path / name, INSTANT), engine=engine).rows_ok == 10
        table = batchrunner.generate([{"a": "hello"}], prompt={"text": "{{ a }}"}, engine=engine)
    assert table.column("output").to_pylist() == ["answer 0 to hello"]
    assert len(server.sent) == 21


async def test_runs_at_once_share_the_engine(tmp_path: Path) -> None:
    """Each has its part of the one window, so a short run does not wait for the end of a long one."""
    slow = {"kind": "simulated", "step_s": 0.01, "max_running": 40}
    options: dict[str, Any] = {"window": 40, "sampling": {"max_new_tokens": 30}}
    long, short = (
        job_of(tmp_path / name, slow, rows=rows, **options) for name, rows in (("long", 600), ("short", 80))
    )
    with batchrunner.open_engine(slow) as engine:
        sampled, tell = asyncio.Event(), asyncio.get_running_loop().call_soon_threadsafe
        running = asyncio.ensure_future(
            batchrunner.arun(long, engine=engine, on_progress=lambda _: tell(sampled.set))
        )
        await sampled.wait()
        assert (await batchrunner.arun(short, engine=engine)).rows_ok == 80
        assert not running.done()
        assert (await running).rows_ok == 600
    windows = [[sample["window"] for sample in log_of(job, "sample")] for job in (long, short)]
    assert max(windows[0]) == 40  # all of it while it is alone
    assert min(windows[0]) <= 20 <= max(windows[1])


def test_an_open_engine_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The directory of its log is its own, and stays only where an error sends people there."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with batchrunner.open_engine(INSTANT):
        (logs,) = tmp_path.iterdir()
        assert logs.stat().st_mode & 0o077 == 0
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(KeyError), batchrunner.open_engine(INSTANT):
        raise KeyError
    assert len(list(tmp_path.iterdir())) == 1


def test_an_engine_that_another_process_shares(
    tmp_path: Path, server: FakeSGLang, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second process gives the path of a file, which has the address and is gone with the engine."""
    monkeypatch.setenv("MY_KEY", "a-secret-key")
    server.api_key = "a-secret-key"
    file, run = tmp_path / "engine.json", str(tmp_path / "run")
    given = {"kind": "attach", "urls": [server.url], "api_key_env": "MY_KEY"}
    with batchrunner.open_engine(given, share=file) as engine:
        monkeypatch.delenv("MY_KEY")
        assert batchrunner.generate(["a"], engine=engine).num_rows == 1
        job = write_job(job_of(tmp_path, INSTANT), tmp_path)
        result = batchrun(job, "--set", f"engine={file}", "--set", f"output.path={run}")
        assert result.exit_code == 0, result.stderr
        assert len(server.sent) == 11
        assert "a-secret-key" not in Path(run, "run.json").read_text() + file.read_text()
        assert file.with_suffix(".key").stat().st_mode & 0o077 == 0
    assert not list(tmp_path.glob("engine.*"))
    with pytest.raises(
        JobError, match=r"engine.json: no such file: the program that shares the engine must be running"
    ):
        batchrunner.generate(["a"], engine=file)
    with pytest.raises(JobError, match="share"), batchrunner.open_engine(INSTANT, share=file):
        pass


@pytest.mark.parametrize(
    ("engine", "told"),
    [
        ("http://[::1", "nvalid IPv6 URL"),
        ("http://host:99999999", "ort out of range 0-65535"),
        (["host"], "an address is http://HOST:PORT"),
        ([], "urls"),
        ({"kind": "attached"}, "attached"),
        ("/no/such-model", "no/such-model"),
        (
            "Qwen/Qwen3 8B",
            "engine: model: no model has this name: give a folder (./NAME) or a name on the Hugging Face Hub",
        ),
        (7, "engine: give an open engine (`with open_engine(…) as engine`)"),
    ],
)
def test_wrong_engines_are_explained(engine: Any, told: str) -> None:
    """What is no engine is an error in one line."""
    with pytest.raises(BatchrunError, match=re.escape(told)) as caught, batchrunner.open_engine(engine):
        pass
    assert len(str(caught.value).splitlines()) == 1
