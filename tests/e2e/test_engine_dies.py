"""An engine that dies or hangs is started again, after a want of memory with safer arguments."""

import contextlib
import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import batchrunner
from batchrunner.core.errors import EngineLostError
from batchrunner.core.timing import TIMING
from batchrunner.dispatch.attempt import MOST_DEATHS
from batchrunner.engines.hang_detector import WARM_UP
from batchrunner.engines.launched.server import MOST_QUICK_DEATHS
from batchrunner.tuning.recover import MOST_CHANGES
from tests.conftest import (
    batchrun,
    ended,
    events_of,
    eventually,
    job_of,
    report_of,
    results_of,
    rows_in,
    run_job,
    write_job,
)
from tests.support.fake_sglang import Behaviour, FakeSGLang, Sent
from tests.support.launchable import HUNGRY, OOM, hungry, launchable
from tests.support.runs import failed_rows, rows_once

FRAGILE = """
class Handler(Server):
    known = {
        "/ready": {}, "/health": {}, "/model_info": {"model_path": "fragile"},
        "/server_info": {"version": "0.5.23", "max_running_requests": 8},
        "/v1/loads": {"loads": [{
            "num_running_reqs": 4, "num_waiting_reqs": 9, "token_usage": 0.5, "max_running_requests": 8,
            "max_total_num_tokens": 900, "num_used_tokens": 450, "dp_rank": 0, "timestamp": 1.0}]},
    }
    def asked(self, body):
        time.sleep(0.02)
        broken = os.path.exists(os.environ.get("BROKEN_BY_IT", "/no"))
        if body["text"] in os.environ["POISON"].split(",") and not broken:
            print("RuntimeError: CUDA error: an illegal memory access was encountered", flush=True)
            open(os.environ.get("BROKEN_BY_IT", os.devnull), "w").close()
            os._exit(1)
        self.answer("to " + body["text"])

if os.path.exists(os.environ.get("BROKEN_BY_IT", "/no")):
    sys.exit("RuntimeError: no CUDA GPUs are available")
"""


@pytest.fixture(autouse=True)
def _quick_restarts(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    """Restarts without the pauses that are for real engines; nothing learned from another test."""
    for name in ("first_restart", "first_retry", "launch_poll"):
        monkeypatch.setattr(TIMING, name, 0.01)
    monkeypatch.setattr(TIMING, "quick_death", 3600.0)  # a slow machine starts a server for minutes


def fragile_job(directory: Path, **environ: str) -> dict[str, Any]:
    """A job of which row 117 kills the engine."""
    return job_of(directory, launchable(directory, FRAGILE, POISON="row 117", **environ), rows=300)


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_poisonous_row_is_found(tmp_path: Path, replicas: int) -> None:
    """The row that kills the engine, or replicas here and there, fails and says so; no other is blamed."""
    job = fragile_job(tmp_path) | {"limits": {"max_attempts": 1}}
    job["engine"]["replicas"] = replicas
    result = run_job(job, tmp_path, code=3)
    assert rows_in(job) == list(range(300))
    (failed,) = (row for row in results_of(job) if row["error"])
    assert failed["row"] == 117
    assert f"the engine died {MOST_DEATHS} times while it had this row" in failed["error"]
    assert events_of(job).count("engine_died") == MOST_DEATHS
    assert "an illegal memory access was encountered" in result.stderr


def test_a_server_that_finds_no_port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not started for ever, and the start after does not take the old log for its own."""
    monkeypatch.setattr(TIMING, "launch_word", 0.01)
    loses = """
if not os.path.exists(os.environ["WINS"]):
    sys.exit("OSError: [Errno 98] error while attempting to bind on address: address already in use")
time.sleep(0.2)
"""
    loads = "print('Load weight begin.', flush=True); print('UserWarning: odd', flush=True); time.sleep(1.5)"
    engine = launchable(tmp_path, FRAGILE + loses + loads, POISON="", WINS=str(tmp_path / "wins"))
    job = job_of(tmp_path, engine, rows=5)
    result = run_job(job, tmp_path, code=2)
    assert "the engine did not start" in result.stderr
    (tmp_path / "wins").touch()
    result = run_job(job, tmp_path)
    assert re.search(r"the engine is still starting, \d+ s: loading the weights\n", result.stderr)


def test_a_crash_loop_ends_the_run(tmp_path: Path) -> None:
    """An engine that dies whenever it is started ends the run with the cause; what is done is kept."""
    job = fragile_job(tmp_path, BROKEN_BY_IT=str(tmp_path / "mark"))
    result = run_job(job, tmp_path, code=1)
    last = result.stderr.splitlines()[-1]
    assert "no CUDA GPUs are available" in last
    assert f"for the {MOST_QUICK_DEATHS + 1}th time in a row" in last
    assert 0 < report_of(job)["rows_ok"] < 300


def starts_of(directory: Path) -> list[list[str]]:
    """Return the arguments of each start."""
    return [json.loads(line) for line in (directory / "starts").read_text().splitlines()]


def test_an_engine_out_of_memory_comes_back_safer(tmp_path: Path) -> None:
    """It gets the guides' next step at each death; every row ends once; log, events and report tell it."""
    job = job_of(tmp_path, hungry(tmp_path), rows=300)
    result = run_job(job, tmp_path)
    rows_once(job, 300)
    chunks = [start[start.index("--chunked-prefill-size") + 1] for start in starts_of(tmp_path)[1:]]
    assert chunks == ["4096", "2048"]
    assert "out of memory in prefill: chunked-prefill-size 8192 -> 4096 at the next start" in result.stderr
    assert events_of(job).count("engine_healed") == events_of(job).count("engine_died") == 2
    assert healed_in(job) == [{"chunked-prefill-size": 4096}, {"chunked-prefill-size": 2048}]
    assert "the engine died or hung 2 times" in result.stderr
    assert "the engine was restarted with chunked-prefill-size 4096" in result.stderr


def healed_in(job: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what each healing of a run has changed."""
    return [told["new"] for told in report_of(job)["incidents"] if told["what"] == "healed"]


def test_no_row_is_blamed_for_memory(tmp_path: Path) -> None:
    """However often an engine dies of memory with a row, the row is answered once there is enough."""
    job = job_of(tmp_path, hungry(tmp_path, f"if share > 0.6: {OOM}", ROW="row 3"), rows=100, window=8)
    run_job(job, tmp_path)
    rows_once(job, 100)
    assert events_of(job).count("engine_died") == 5 > MOST_DEATHS


def test_the_next_run_starts_with_what_worked(tmp_path: Path, cache: Path) -> None:
    """It says so in a line, with the file to delete; without the file it learns again."""
    job = job_of(tmp_path, hungry(tmp_path), rows=100)
    run_job(job, tmp_path, "--fresh")
    (file,) = cache.rglob("*.jsonl")
    result = run_job(job, tmp_path, "--fresh")
    assert "starting with chunked-prefill-size 2048, learned on 2" in result.stderr
    assert f"from out of memory in prefill; engine.args overrules it; delete {file}" in result.stderr
    assert events_of(job) == ["engine_recalled"]
    file.unlink()
    run_job(job, tmp_path, "--fresh")
    assert events_of(job).count("engine_healed") == 2


CHILD = """[
    print("ConnectionResetError: [Errno 104] Connection reset by peer"),  # an older, harmless error
    print("[2026-11-22 04:46:38] Subprocess scheduler_0 (pid=7) crashed with exit code -9. Cleanup"),
    print("[2026-11-22 04:46:39] Sleeping 5 seconds before crash diagnostics", flush=True), os._exit(137)]"""


@pytest.mark.parametrize("death", [CHILD, "os._exit(3)", "os.kill(os.getpid(), 9)"])
def test_a_crash_changes_nothing(tmp_path: Path, death: str) -> None:
    """Only a want of memory is healed: after a crash or somebody's kill -9 the arguments are the same."""
    once = f'if not os.path.exists(os.environ["ONCE"]): open(os.environ["ONCE"], "w").close(); {death}'
    job = job_of(tmp_path, hungry(tmp_path, once, ONCE=str(tmp_path / "once")), rows=100)
    result = run_job(job, tmp_path)
    rows_once(job, 100)
    first, *others = starts_of(tmp_path)
    assert others == [first] * len(others)
    assert "engine_healed" not in events_of(job)
    if death == CHILD:  # the cause is told, not what was done then
        assert "the engine died (exit 137): Subprocess scheduler_0 (pid=7) crashed" in result.stderr


def test_healing_can_be_switched_off(tmp_path: Path, cache: Path) -> None:
    """With `engine.heal: false` a server is started again as it was, and nothing is remembered."""
    job = job_of(tmp_path, {**hungry(tmp_path), "heal": False}, rows=100)
    batchrun(write_job(job, tmp_path))
    first, *others = starts_of(tmp_path)
    assert others == [first] * len(others)
    assert not [*cache.rglob("*.jsonl")]


def test_tries_are_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that no argument saves is given up, with the cause; every change was another one."""
    monkeypatch.setattr("batchrunner.engines.launched.server.MOST_QUICK_DEATHS", 1)
    job = job_of(tmp_path, hungry(tmp_path, OOM), rows=300)
    result = run_job(job, tmp_path, code=1)
    assert "Prefill out of memory" in result.stderr.splitlines()[-1]
    assert "out of memory in prefill: no safer arguments are left" in result.stderr
    changed = healed_in(job)
    assert 1 < len(changed) <= MOST_CHANGES
    assert all(change not in changed[:n] for n, change in enumerate(changed))


def test_a_start_is_healed_too(tmp_path: Path) -> None:
    """What goes wrong before the engine is ready is tried again, before the run gives up."""
    at_start = """
print("Capture cuda graph bs [1, 2, 160]", flush=True)
if option("--cuda-graph-max-bs-decode", 160) > 40:
    print("Exception: Capture cuda graph failed: CUDA out of memory.", flush=True); os._exit(1)"""
    job = job_of(tmp_path, hungry(tmp_path, "", AT_START=at_start), rows=20)
    run_job(job, tmp_path)
    assert healed_in(job)[-1]["cuda-graph-max-bs-decode"] == 32


def test_a_start_that_nothing_heals(tmp_path: Path) -> None:
    """Weights that leave no memory end the run at once, with what would help."""
    at_start = """
print("Load weight begin. avail mem=14.2 GB")
print("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.", flush=True); os._exit(1)"""
    job = job_of(tmp_path, hungry(tmp_path, "", AT_START=at_start), rows=20)
    result = run_job(job, tmp_path, code=2)
    assert "the weights do not fit: use more GPUs (tp-size), quantise" in result.stderr
    assert len(starts_of(tmp_path)) == 1


def test_replicas_share_what_was_learned(tmp_path: Path, cache: Path) -> None:
    """The change that one replica's death led to reaches the other at its next start."""
    engine = {**hungry(tmp_path), "replicas": 2}
    job = job_of(tmp_path, engine, rows=400)
    run_job(job, tmp_path)
    rows_once(job, 400)
    assert healed_in(job) == [{"chunked-prefill-size": 4096}, {"chunked-prefill-size": 2048}]
    assert len([*cache.rglob("*.jsonl")]) == 1


PLACES = {"/sys/fs/cgroup/memory": "memory.limit_in_bytes", "/sys/fs/cgroup": "memory.max"}


@contextlib.contextmanager
def memory_cgroup(limit_bytes: int) -> Iterator[Path]:
    """Make a cgroup with this limit, empty again at the end; skips by name where that cannot be done."""
    for root, limit in PLACES.items():
        group = Path(root) / f"batchrunner-test-{os.getpid()}"
        with contextlib.suppress(OSError):
            group.mkdir()
            (group / limit).write_text(str(limit_bytes))
            break
        with contextlib.suppress(OSError):
            group.rmdir()
    else:
        pytest.skip("skipped: no memory cgroup can be made here")

    def gone() -> bool:  # those that were killed in it leave when the kernel has freed their memory
        with contextlib.suppress(OSError):
            group.rmdir()
        return not group.exists()

    try:
        yield group
    finally:
        eventually(gone)


GREEDY = """
hoard = bytearray()
class Handler(Handler):
    def asked(self, body):
        if len(hoard) < pool * 20_000:
            hoard.extend(b"x" * 40_000_000)
        self.answer("to " + body["text"])
"""


def test_an_engine_killed_by_the_kernel_comes_back_smaller(tmp_path: Path) -> None:
    """In a memory cgroup whose limit it exceeds: the kernel's kill is told from others, the pool halved."""
    engine = {
        **launchable(tmp_path, HUNGRY + GREEDY, DEATH="", STARTS=str(tmp_path / "starts")),
        "device": "cpu",
    }
    job = job_of(tmp_path, engine, rows=100)
    command = [sys.executable, "-m", "batchrunner", write_job(job, tmp_path)]
    inside = ["sh", "-c", 'echo $$ > "$0/cgroup.procs" && exec "$@"']
    with memory_cgroup(450 << 20) as group:
        done = ended(*inside, group, *command)
    assert done.returncode == 0, done.stderr
    rows_once(job, 100)
    assert "killed by the kernel for lack of memory: max-total-tokens 20000 -> 10000" in done.stderr
    assert next(told["kind"] for told in report_of(job)["incidents"] if told["what"] == "healed") == (
        "killed"
    )


# --- a server that lives but does nothing ---

STUCK = """
import threading
stuck = threading.Event()

class Handler(Server):
    @property
    def known(self):
        work = int(time.time() * 1000) if not stuck.is_set() else 5
        return {
            "/ready": {}, "/health": {}, "/model_info": {"model_path": "fragile"},
            "/server_info": {"version": "0.5.23", "max_running_requests": 8},
            "/v1/loads": {"loads": [{
                "num_running_reqs": 4, "num_waiting_reqs": 9, "token_usage": 0.5, "max_running_requests": 8,
                "max_total_num_tokens": 900, "num_used_tokens": 450, "dp_rank": 0,
                "timestamp": time.time(), "total_prefill_busy_us": work}]},
        }
    def asked(self, body):
        time.sleep(float(os.environ.get("SLOW_S", "0.01")))
        mark = os.environ.get("ONCE", "/no")
        if body["text"] == os.environ["POISON"] and not os.path.exists(mark):
            if mark != "/no":
                open(mark, "w").close()
            with open(os.environ["STUCK"], "a") as file:
                print(body["text"], file=file)
            stuck.set()
        if stuck.is_set():
            until = time.monotonic() + 600
            while time.monotonic() < until and not os.path.exists(os.environ.get("GO_ON", "/no")):
                time.sleep(0.02)
            stuck.clear()
        self.answer("to " + body["text"])
"""
HANG_S = 1.0  # five times as long at first: a process that is stopped for 3 s does not hang


def sticky_job(directory: Path, rows: int, poison: str, **environ: str) -> dict[str, Any]:
    engine = launchable(directory, STUCK, POISON=poison, STUCK=str(directory / "stuck"), **environ)
    return job_of(directory, engine, rows=rows, limits={"hang": HANG_S, "max_attempts": 1})


def test_a_server_that_hangs_is_started_again(tmp_path: Path) -> None:
    """Its rows in flight go back unharmed and are answered; the event log tells of it."""
    job = sticky_job(tmp_path, 300, "row 117", ONCE=str(tmp_path / "once"))
    result = run_job(job, tmp_path)
    rows_once(job, 300)
    assert "the engine did nothing for" in result.stderr
    assert events_of(job)[:2] == ["engine_hangs", "engine_back"]


def test_a_row_that_hangs_the_server_is_found(tmp_path: Path) -> None:
    """As one that kills it is: all others are answered."""
    job = sticky_job(tmp_path, 300, "row 117")
    run_job(job, tmp_path, code=3)
    assert rows_in(job) == list(range(300))
    assert failed_rows(job) == [117]
    assert (tmp_path / "stuck").read_text().splitlines() == ["row 117"] * MOST_DEATHS
    assert events_of(job).count("engine_hangs") >= MOST_DEATHS


def test_a_slow_server_is_left_alone(tmp_path: Path) -> None:
    """No answer for longer than the limit is no hang while the scheduler works."""
    hang_s = 2.0  # the server may be stopped for 3 s
    job = sticky_job(tmp_path, 3, "none", SLOW_S=str(1.2 * WARM_UP * hang_s))
    job["limits"]["hang"] = hang_s
    report = batchrunner.run(job)
    assert (report.rows_ok, report.retries) == (3, 0)
    assert events_of(job) == []


def test_an_attached_server_that_hangs(tmp_path: Path, server: FakeSGLang) -> None:
    """Its rows go to the other one at once, instead of waiting for `request_timeout`."""
    with FakeSGLang(lambda sent: "hold" if server.sent else "answer") as stuck:
        engine = [stuck, server]
        job = job_of(tmp_path, engine, rows=200, window=8, limits={"hang": HANG_S, "max_attempts": 1})
        report = batchrunner.run(job)
        assert stuck.sent
    assert (report.exit_code, report.rows_ok, report.rows_failed) == (0, 200, 0)
    assert "engine_hangs" in events_of(job)


def test_an_attached_server_that_hangs_and_goes_on(tmp_path: Path, server: FakeSGLang) -> None:
    """Its rows wait until it moves again, and are then answered as if nothing had been."""
    hangs = [True]

    def script(sent: Sent) -> Behaviour:
        hangs[0] &= sent.tries < 2
        return "hold" if hangs[0] else "answer"

    server.script = script
    job = job_of(tmp_path, server, rows=50, window=8, limits={"hang": HANG_S, "max_attempts": 1})
    report = batchrunner.run(job)
    assert (report.exit_code, report.rows_ok) == (0, 50)
    assert events_of(job)[:2] == ["engine_hangs", "engine_back"]


def test_an_attached_server_that_hangs_for_good(tmp_path: Path, server: FakeSGLang) -> None:
    """It ends the run when `engine_wait` has passed; nothing is blamed on a row."""
    server.script = lambda _: "hold"
    limits = {"hang": HANG_S, "engine_wait": 1, "max_attempts": 1, "request_timeout": "1d"}
    with pytest.raises(EngineLostError, match="did nothing for"):
        batchrunner.run(job_of(tmp_path, server, rows=50, window=8, limits=limits))
