"""What the tests share: a small input, a job on it, the command, and a look at what came out."""

import contextlib
import ctypes
import functools
import gc
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from hypothesis import HealthCheck, settings
from typer.main import get_command
from typer.testing import CliRunner, Result

from batchrunner.cli import app
from batchrunner.core.timing import TIMING
from batchrunner.output.events import read_events
from batchrunner.sglang.flags import Flags
from tests.support.fake_sglang import FakeSGLang
from tests.support.scheduling import GroupScheduling, by_group
from tests.support.server_thread import PATIENCE_S
from tests.support.store_server import VARIABLES, StoreBucket, new_bucket, store_server

EXAMPLES = 50
"""Number for a property whose examples take no time; `make torture` tries 20 times as many of each."""

# a run starts threads, writes files and fsyncs: on a busy machine that takes its time
_PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("short", _PATIENT, max_examples=EXAMPLES)
settings.register_profile("torture", _PATIENT, max_examples=20 * EXAMPLES)  # make torture
settings.load_profile("short")


def examples(count: int) -> settings:
    """Return the settings for a property that is tried with so many examples."""
    default = settings.default
    assert default
    return settings(max_examples=count * default.max_examples // EXAMPLES)


ROOT = Path(__file__).parent.parent
SMALL_MODEL = ROOT / "data" / "smollm2-135m-instruct"
INSTANT = {"kind": "simulated", "step_s": 0}


def pytest_configure() -> None:
    """Prepare this process, which those that the tests start take after.

    SIGINT interrupts, as in a terminal: a shell has it ignored in what it starts in the background. Bytecode
    is kept: without it each of the workers compiles all tests, and each command that a test starts the
    package.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Look for no garbage among 5,000 tests while they are collected, nor later: all of them stay."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> GroupScheduling:
    """Give tests that share something to one worker."""
    return GroupScheduling(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Let pytest-xdist begin with what takes longest."""
    if hasattr(config, "workerinput"):
        items[:] = by_group(items)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests of the gateway, by name, where it is missing; under CI they fail."""
    if item.get_closest_marker("gateway"):
        require_modules("smg")


def pytest_unconfigure() -> None:
    """Let what sentencepiece has of SWIG live to the end.

    It is freed after its types, at times: a segmentation fault, after all tests have passed (sentencepiece
    0.2.1, which transformers loads).
    """
    swig = sys.modules.get("swig_runtime_data4")
    if swig is not None:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(swig.type_pointer_capsule))


@pytest.fixture(scope="session", autouse=True)
def _for_all_tests(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Set what all tests and what they start need."""
    ray_s = {"agent_register_timeout_ms": 1000 * PATIENCE_S, "worker_register_timeout_seconds": PATIENCE_S}
    with pytest.MonkeyPatch.context() as patch:
        # what runs learn is not for the home of whoever runs the tests
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        # engines share the cores: threads that wait for a core would spin
        patch.setenv("OMP_NUM_THREADS", "1")
        # processes of Ray start as slowly as the machine does; a full memory kills none
        for name, value in {**ray_s, "memory_monitor_refresh_ms": 0}.items():
            patch.setenv(f"RAY_{name}", f"{value:.0f}")
        # servers get the module `sitecustomize` that makes their imports quick
        patch.setenv("PYTHONPATH", str(ROOT / "tests" / "support" / "engine_site"), prepend=os.pathsep)
        # typer makes the command of its functions once, and not for each `batchrun` of a test
        patch.setattr("typer.testing._get_command", functools.cache(get_command))
        # parts are written when they are full, and not because a machine is slow
        patch.setattr(TIMING, "part", 3600.0)
        yield


LOGGERS = tuple(map(logging.getLogger, (None, "batchrunner", "batchrunner.runner.tune")))
SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextlib.contextmanager
def _logging_set_back() -> Iterator[None]:
    kept = [(log, log.handlers[:], log.level, log.propagate) for log in LOGGERS]
    try:
        yield
    finally:
        for log, handlers, level, propagate in kept:
            log.handlers[:], log.propagate = handlers, propagate
            log.setLevel(level)  # the attribute alone would leave what children remember of it


@pytest.fixture(autouse=True)
def _process_set_back() -> Iterator[None]:
    """Set back what an engine or Ray in this process changes for all tests after: log levels and signals."""
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    with _logging_set_back():
        yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture(autouse=True)
def _no_installed_sglang(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Advice does not ask an installed SGLang for its --help, 20 s of CPU, but in tests marked `engine`."""
    if not request.node.get_closest_marker("engine"):
        monkeypatch.setattr("batchrunner.runner.advise.installed", lambda _: Flags())


@pytest.fixture
def server() -> Iterator[FakeSGLang]:
    """A server that answers everything, until the test gives it another script."""
    with FakeSGLang() as fake:
        yield fake


@pytest.fixture(scope="session")
def store_address() -> Iterator[str]:
    """The address of a store that speaks S3, shared by the tests of a worker."""
    with store_server() as address:
        yield address


@pytest.fixture
def store_bucket(store_address: str, monkeypatch: pytest.MonkeyPatch) -> StoreBucket:
    """A new bucket, which the environment leads to."""
    for name, value in {**VARIABLES, "AWS_ENDPOINT_URL": store_address}.items():
        monkeypatch.setenv(name, value)
    return new_bucket(store_address)


@pytest.fixture
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of its own for the working copies of runs in a store, and what runs learn."""
    directory = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(directory))
    return directory


@pytest.fixture
def quiet_fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gateway asks every worker by HTTP/2 too, which the fake's library logs as an error."""
    monkeypatch.setattr(logging.getLogger("aiohttp.server"), "disabled", True)


@pytest.fixture
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retries without the pauses that are for real engines."""
    monkeypatch.setattr(TIMING, "first_retry", 0.001)


@pytest.fixture
def full_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let requests with several rows go when they are full, or nothing else comes, however slow it comes."""
    monkeypatch.setattr(TIMING, "bundle_fill", PATIENCE_S)


def require_modules(*modules: str) -> None:
    """Skip, by name, what needs modules of `make .venv/.engine` that are missing; under CI it fails."""
    skip_without(f"{module} (make .venv/.engine)" for module in modules if not find_spec(module))


def require_engine(*modules: str) -> None:
    """Skip, by name, what needs the real engine where it or its model is missing; under CI it fails."""
    require_modules(*modules)
    config = SMALL_MODEL / "config.json"
    skip_without(["data/smollm2-135m-instruct (make test)"] if not config.exists() else [])


def skip_without(missing: Iterable[str]) -> None:
    """Skip where something is missing, by name; under CI that fails."""
    if names := ", ".join(missing):
        (pytest.fail if os.environ.get("CI") else pytest.skip)(f"missing: {names}")


def write_rows(path: Path, rows: int, first: int = 0, **columns: Any) -> Path:
    """Write a Parquet file of rows `id, text`, whose texts are "row 0", "row 1", …, in small row groups."""
    ids = list(range(first, first + rows))
    table = pa.table({"id": ids, "text": [f"row {i}" for i in ids], **columns})
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path, row_group_size=max(1, rows // 3))
    return path


def job_of(
    directory: Path,
    engine: FakeSGLang | list[FakeSGLang] | Mapping[str, Any] = INSTANT,
    *,
    rows: int = 10,
    **changes: Any,
) -> dict[str, Any]:
    """Return a job on a new input of `rows` rows; `changes` are merged into its sections."""
    servers = [engine] if isinstance(engine, FakeSGLang) else engine if isinstance(engine, list) else []
    path = directory / "input.parquet"
    if "path" not in changes.get("input", {}) and not path.exists():
        write_rows(path, rows)
    job: dict[str, Any] = {
        "input": {"path": str(path)},
        "prompt": {"text": "text"},
        "output": {"path": str(directory / "run")},
        "engine": {"kind": "attach", "urls": [server.url for server in servers]} if servers else engine,
    }
    for section, change in changes.items():
        merge = isinstance(change, dict) and section not in {"prompt", "engine"}
        job[section] = {**job.get(section, {}), **change} if merge else change
    return job


DIGEST = "request_digest"
"""The last column of parts."""


def parts_of(run: str | Path) -> list[pa.Table]:
    """Return the parts of a run, oldest first, as a user reads them: without the digests of requests."""
    tables = [pq.read_table(path) for path in sorted((Path(run) / "parts").glob("*.parquet"))]
    return [table.select([name for name in table.schema.names if name != DIGEST]) for table in tables]


def results_of(job: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the result rows of a job in input order."""
    rows = [row for part in parts_of(job["output"]["path"]) for row in part.to_pylist()]
    return sorted(rows, key=lambda row: row["row"])


def rows_in(job: Mapping[str, Any]) -> list[int]:
    """Return the ordinals of the result rows of a job."""
    return column_of(job, "row")


def column_of(job: Mapping[str, Any], name: str) -> list[Any]:
    """Return a column of the results of a job, in input order."""
    return [row[name] for row in results_of(job)]


def report_of(job: Mapping[str, Any]) -> dict[str, Any]:
    """Return what report.json says."""
    report: dict[str, Any] = json.loads((Path(job["output"]["path"]) / "report.json").read_text())
    return report


def events_of(job: Mapping[str, Any], what: str = "engine_") -> list[str]:
    """Return the names of a run's events that begin so, in order."""
    return [event["event"] for event in log_of(job) if event["event"].startswith(what)]


def log_of(job: Mapping[str, Any], event: str | None = None) -> list[dict[str, Any]]:
    """Return the events of a run, in order, or those of one name."""
    events = read_events(Path(job["output"]["path"]) / "events.jsonl")
    return [each for each in events if event in {None, each["event"]}]


def eventually(
    condition: Callable[[], object], patience_s: float = PATIENCE_S, every_s: float = 0.01
) -> None:
    """Return when the condition holds; another process makes it true and cannot tell us.

    Pauses grow from `every_s` to 0.1 s: a look at a run, such as `status`, costs more CPU than the run.
    """
    ticks = threading.Event()
    deadline = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        ticks.wait(every_s)
        every_s = max(every_s, min(1.5 * every_s, 0.1))


def write_job(job: Mapping[str, Any], directory: Path) -> Path:
    """Write the job file of a job."""
    path = directory / "job.yaml"
    path.write_text(yaml.safe_dump(dict(job)))
    return path


def batchrun(*args: object) -> Result:
    """Run the command in this process."""
    with _logging_set_back():  # the command sets up logging as a program may
        return CliRunner().invoke(app, [str(arg) for arg in args])


def printed(*args: object, code: int = 0) -> dict[str, Any]:
    """Return what the command prints with --json; it ends with this exit code."""
    result = batchrun(*args, "--json")
    assert result.exit_code == code, result.stderr
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def run_job(job: Mapping[str, Any], directory: Path, *options: object, code: int = 0) -> Result:
    """Run the command on a job, with its file in a directory; it ends with this exit code."""
    result = batchrun(write_job(job, directory), *options)
    assert result.exit_code == code, result.stderr
    return result


def merged_table(run: Path) -> pa.Table:
    """Merge a run with the command; return its table."""
    result = batchrun("merge", run)
    assert result.exit_code == 0, result.stderr
    return pq.read_table(result.stdout.strip())


def ended(*command: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, and return what it said."""
    done: subprocess.CompletedProcess[str] = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, timeout=PATIENCE_S, check=False, **options
    )
    return done


class Started:
    """The command in another process, and its standard error as it comes."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.lines: list[str] = []

    def wait_for_line(self, text: str) -> None:
        """Read standard error up to a line with this text."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)
            if text in line:
                return
        raise AssertionError(f"no {text!r} in {''.join(self.lines)}")

    def kill(self) -> None:
        """End it by a SIGKILL."""
        self.process.kill()
        self.process.wait()

    def end(self) -> int:
        """Wait for the end; return the exit status. A test that fails shows what the command said."""
        assert self.process.stderr is not None
        self.lines += self.process.stderr.readlines()
        print("".join(self.lines))  # noqa: T201
        return self.process.wait(PATIENCE_S)


_COMMAND = f"""
import os, sys
from batchrunner.cli import main
from batchrunner.core.timing import TIMING
TIMING.part = 3600.0
TIMING.server_open = {PATIENCE_S}
sys.argv[0] = "batchrun"
main()
"""
"""The command, but that parts are written when they are full, and servers may be silent for long before the
first row."""


@contextlib.contextmanager
def started(*args: object) -> Iterator[Started]:
    """Run the command in another process, which is gone afterwards."""
    with started_python("-c", _COMMAND, *args, PYTHONUNBUFFERED="1") as running:
        yield running


@contextlib.contextmanager
def started_python(*args: object, **environ: str) -> Iterator[Started]:
    """Run Python with these arguments and variables in another process, which is gone afterwards."""
    command = [sys.executable, *map(str, args)]
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env={**os.environ, **environ}
    ) as process:
        running = Started(process)
        try:
            yield running
        except BaseException as failure:
            failure.add_note("standard error of the command:\n" + "".join(running.lines[-40:]))
            raise
        finally:
            process.kill()
