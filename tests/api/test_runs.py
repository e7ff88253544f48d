"""`run` and `arun`: the same runs as the command's, from scripts, notebooks and pipelines."""

from __future__ import annotations

import asyncio
import logging
import re
import signal
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

import pytest

import batchrunner
from batchrunner.core.errors import (
    BatchrunError,
    EngineStartError,
    InputError,
    JobError,
    OutputError,
    ResumeError,
)
from tests.conftest import INSTANT, job_of, results_of, write_job
from tests.support.fake_sglang import Behaviour, FakeSGLang, Sent
from tests.support.server_thread import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
if TYPE_CHECKING:
    from pathlib import Path


def attach(server: FakeSGLang) -> dict[str, Any]:
    return {"kind": "attach", "urls": [server.url]}


# --- run ---


def test_a_job_may_be_a_path_a_mapping_or_a_job(tmp_path: Path) -> None:
    """Whatever a caller has at hand as a job means the same."""
    job = job_of(tmp_path)
    sources = (write_job(job, tmp_path), str(tmp_path / "job.yaml"), job, batchrunner.Job(**job))
    reports = [batchrunner.run(source, fresh=True) for source in sources]
    assert [(report.rows_ok, report.exit_code) for report in reports] == [(10, 0)] * 4


def test_overrides(tmp_path: Path) -> None:
    """Overrides are those of the command."""
    assert batchrunner.run(job_of(tmp_path), overrides=["input.limit=4"]).rows_ok == 4


def test_failed_rows_are_reported_and_not_raised(tmp_path: Path, server: FakeSGLang) -> None:
    """A caller decides himself what failed rows mean to him."""
    server.script = lambda _: "too long"
    report = batchrunner.run(job_of(tmp_path, server))
    assert isinstance(report, batchrunner.Report)
    assert (report.exit_code, report.rows_failed) == (3, 10)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"window": "wide"}, JobError),
        ({"prompt": {"text": "{{ nothing }}"}}, JobError),
        ({"input": {"path": "/no/such/file"}}, InputError),
        ({"output": {"path": "/proc/run"}}, OutputError),
        ({"input": {"filter": "id < 0"}}, InputError),
        ({"engine": {"kind": "attach", "urls": ["http://127.0.0.1:9"]}}, EngineStartError),
    ],
)
def test_errors_are_types(tmp_path: Path, change: dict[str, Any], error: type[BatchrunError]) -> None:
    """Each kind of mistake can be caught by its type, and all of them as BatchrunError with an exit code."""
    with pytest.raises(error) as caught:
        batchrunner.run(job_of(tmp_path, **change))
    assert isinstance(caught.value, batchrunner.BatchrunError)
    assert caught.value.exit_code == 2
    assert len(str(caught.value).splitlines()) == 1


def test_another_run_is_its_own_error(tmp_path: Path) -> None:
    """A path that holds another run can be told from a broken one."""
    job = job_of(tmp_path)
    batchrunner.run(job)
    with pytest.raises(ResumeError):
        batchrunner.run({**job, "prompt": {"text": "Say {{ text }}"}})


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda: batchrunner.run(None), "job: give a path, a mapping or a Job"),  # type: ignore[arg-type]
        (lambda: batchrunner.run({}, engine=INSTANT), "engine: give one that `open_engine` opened"),  # type: ignore[arg-type]
        (lambda: batchrunner.run("."), "Is a directory"),
    ],
)
def test_wrong_arguments_are_explained(call: Callable[[], object], told: str) -> None:
    """A caller's slip is an error of ours in one line, and not an AttributeError from within."""
    with pytest.raises(BatchrunError, match=re.escape(told)):
        call()


# --- event loops ---


async def test_arun_in_a_running_loop(tmp_path: Path, server: FakeSGLang) -> None:
    """A service awaits a run in its own loop, and its other tasks go on."""
    server.script = lambda _: "hold"
    running = asyncio.create_task(batchrunner.arun(job_of(tmp_path, server)))
    await asyncio.to_thread(server.wait_for, 10)
    assert not running.done()
    server.answer_held()
    assert (await running).rows_ok == 10


async def test_run_in_a_running_loop(tmp_path: Path, server: FakeSGLang) -> None:
    """A notebook, where a loop is always running, can use the blocking calls as they are."""
    assert batchrunner.run(job_of(tmp_path, server)).rows_ok == 10
    table = batchrunner.generate([{"a": 1}], prompt="{{ a }}", engine=attach(server))
    assert table.num_rows == 1


async def test_two_runs_at_once(tmp_path: Path, server: FakeSGLang) -> None:
    """Runs share no state: two of them in one loop do not mix."""
    jobs = [job_of(tmp_path / name, server, rows=50) for name in ("one", "two")]
    reports = await asyncio.gather(*map(batchrunner.arun, jobs))
    assert [report.rows_ok for report in reports] == [50, 50]
    assert len(server.sent) == 100


async def test_starts_that_share_a_run(tmp_path: Path, server: FakeSGLang) -> None:
    """Workers of a pipeline that say `join` do one run between them, in one process too."""
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
    assert [row["row"] for row in results_of(job)] == list(range(4000))
    assert len(server.sent) == 4000


def test_a_shared_run_is_not_begun_anew(tmp_path: Path) -> None:
    """A worker that says both is told so, before it discards what the others have done or taken."""
    job = job_of(tmp_path)
    batchrunner.run(job, join=True)
    with pytest.raises(JobError, match="--fresh would discard"):
        batchrunner.run(job, join=True, fresh=True)
    assert len(results_of(job)) == 10


def held_from(row: int) -> Callable[[Sent], Behaviour]:
    return lambda sent: "hold" if int(sent.prompt.split()[1]) >= row else "answer"


async def cancel_in_mid_run(server: FakeSGLang, job: dict[str, Any], **options: Any) -> None:
    """Let rows 0 to 9 end and cancel while others are in flight."""
    server.script = held_from(10)
    running = asyncio.create_task(batchrunner.arun(job, **options))
    await asyncio.to_thread(server.wait_for, 13)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    # a window of 3 and 13 requests: ten have been answered before
    assert [row["row"] for row in results_of(job)] == list(range(10))


async def finish(server: FakeSGLang, job: dict[str, Any], **options: Any) -> None:
    server.script = lambda _: "answer"
    await asyncio.to_thread(server.forget, clients_stay="engine" in options)
    report = await batchrunner.arun(job, **options)
    assert (report.rows_ok, report.rows_resumed, len(server.sent)) == (20, 10, 10)


async def test_cancelling_keeps_finished_rows(tmp_path: Path, server: FakeSGLang) -> None:
    """Cancelling a run writes what has ended before it returns; running it again does the rest."""
    job = job_of(tmp_path, server, rows=20, window=3)
    await cancel_in_mid_run(server, job)
    await finish(server, job)


async def test_cancelling_on_an_open_engine(tmp_path: Path, server: FakeSGLang) -> None:
    """The same holds on an engine that is shared, which stays open and usable."""
    job = job_of(tmp_path, server, rows=20, window=3)
    with batchrunner.open_engine(attach(server)) as engine:
        await cancel_in_mid_run(server, job, engine=engine)
        await finish(server, job, engine=engine)


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
    if shared:
        with batchrunner.open_engine(attach(server)) as engine, pytest.raises(KeyboardInterrupt):
            batchrunner.run(job, engine=engine)
    else:
        with pytest.raises(KeyboardInterrupt):
            batchrunner.run(job)
    assert [row["row"] for row in results_of(job)] == list(range(10))


# --- a good guest ---


def test_no_logging_setup(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The library logs through `logging` and leaves handlers and levels to the program."""
    names = ("", "batchrunner")
    before = [(list(logging.getLogger(n).handlers), logging.getLogger(n).level) for n in names]
    with caplog.at_level(logging.INFO, logger="batchrunner"):
        batchrunner.run(job_of(tmp_path))
    assert "rows to do" in caplog.text
    assert [(list(logging.getLogger(n).handlers), logging.getLogger(n).level) for n in names] == before


def test_nothing_is_printed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Standard output and error belong to the program that uses the library."""
    batchrunner.run(job_of(tmp_path))
    assert tuple(capfd.readouterr()) == ("", "")


def test_signals_are_the_programs_own(tmp_path: Path) -> None:
    """A library call takes no signal handler away."""
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    batchrunner.run(job_of(tmp_path))
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_no_thread_stays(tmp_path: Path, server: FakeSGLang) -> None:
    """A call that has returned has cleaned up after itself."""
    before = set(threading.enumerate())
    batchrunner.run(job_of(tmp_path, server))
    left = {thread for thread in threading.enumerate() if not thread.daemon} - before
    assert left == set()


def test_a_script_ends(tmp_path: Path) -> None:
    """A script that only calls `run` ends by itself, without a word on standard error."""
    job = write_job(job_of(tmp_path), tmp_path)
    code = f"import batchrunner; print(batchrunner.run({str(job)!r}).rows_ok)"
    ended = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        check=False,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "10\n", "")


def test_a_report_is_shown_in_a_line(tmp_path: Path) -> None:
    """Whoever prints it, or has it as the value of a notebook's cell, sees what became of the rows."""
    shown = repr(batchrunner.run(job_of(tmp_path)))
    assert shown.startswith(f"Report(path='{tmp_path / 'run'}', exit_code=0, reason='done', rows_total=10")
    assert "rows_left=0" in shown
    assert len(shown) < 300 + len(str(tmp_path))


def test_one_engine_serves_several_jobs(tmp_path: Path, server: FakeSGLang) -> None:
    """An engine that takes minutes to load is opened once for all jobs of a script."""
    with batchrunner.open_engine({"kind": "attach", "urls": [server.url]}) as engine:
        assert engine.info.model == "fake/model"
        for name in ("one", "two"):
            (tmp_path / name).mkdir()
            assert batchrunner.run(job_of(tmp_path / name, INSTANT), engine=engine).rows_ok == 10
        table = batchrunner.generate([{"a": "hello"}], prompt={"text": "{{ a }}"}, engine=engine)
    assert table.column("output").to_pylist() == ["answer 0 to hello"]
    assert len(server.sent) == 21


def test_an_engine_that_cannot_open(tmp_path: Path) -> None:
    """`open_engine` raises what a run would."""
    with (
        pytest.raises(EngineStartError),
        batchrunner.open_engine({"kind": "attach", "urls": ["http://127.0.0.1:9"]}),
    ):
        pass
    with pytest.raises(JobError), batchrunner.open_engine({"kind": "attached"}):
        pass


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


def test_an_engine_by_its_address(server: FakeSGLang) -> None:
    """An address, or a list of addresses, is enough to name servers that run."""
    assert batchrunner.generate(["a"], engine=server.url).num_rows == 1
    with FakeSGLang() as second:
        assert batchrunner.generate(["a", "b"], engine=[server.url, second.url]).num_rows == 2
        with batchrunner.open_engine((server.url, second.url)) as engine:
            assert set(engine.info.routes) == {server.url, second.url}


def test_an_engine_by_its_name() -> None:
    """A text is the model of a server that the run starts, except for `simulated`."""
    with batchrunner.open_engine("simulated") as engine:
        assert engine.info.simulated
    with pytest.raises(BatchrunError, match="no/such-model"):
        batchrunner.generate(["a"], engine="/no/such-model")


@pytest.mark.parametrize(
    ("engine", "told"),
    [
        ("http://[::1", "nvalid IPv6 URL"),
        ("http://host:99999999", "ort out of range 0-65535"),
        ("http://host:port", "ort could not be cast to integer value"),
        (["host"], "an address is http://HOST:PORT"),
        ([], "urls"),
        ("", "engine: model: no model is named so"),
        ("Qwen/Qwen3 8B", "engine: model: no model is named so: give a folder (./NAME), a name on the Hub"),
        ("Qwen/Qwen3-8B ", "(got 'Qwen/Qwen3-8B ')"),
        ("user@host:30000", "no model is named so"),
        (7, "engine: give an open engine"),
    ],
)
def test_wrong_engines_are_explained(engine: Any, told: str) -> None:
    """What is no engine is a JobError in one line."""
    with pytest.raises(JobError, match=re.escape(told)) as caught:
        batchrunner.generate(["a"], engine=engine)
    assert len(str(caught.value).splitlines()) == 1
