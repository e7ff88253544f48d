"""A server that lives but does nothing is told from one that is slow, and the run goes on without it."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import batchrunner
from batchrunner.core.errors import EngineLostError
from batchrunner.core.types import SchedulerLoad
from batchrunner.dispatch.poison_rows import MOST_DEATHS
from batchrunner.engines.hang_detector import TIMES_LONGEST, WARM_UP, HangDetector, Pulse
from tests.conftest import batchrun, events_of, job_of, needs_gateway, results_of, write_job
from tests.support.fake_sglang import Behaviour, FakeSGLang, Sent
from tests.support.launchable import launchable

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

SHORTEST_S = 60.0
URL = "http://127.0.0.1:30000"

# --- the decision, on made-up time ---


def warm_pulse(pause_s: float = 1.0) -> tuple[Pulse, float]:
    """Return a pulse that has seen work every so often for long enough, and the time."""
    pulse, now = Pulse(SHORTEST_S), 0.0
    while now <= WARM_UP * SHORTEST_S + 2 * pause_s:
        now += pause_s
        assert pulse.look(now, now, busy=True) is None
    return pulse, now


def silence_of(pulse: Pulse, now: float, work: object) -> float:
    """Return after how long a silence is called a hang, looked at every half second."""
    began = now
    while pulse.look(now, work, busy=True) is None:
        now += 0.5
        assert now - began < 10_000, "never"
    return now - began


@given(pauses=st.lists(st.floats(0.1, SHORTEST_S), min_size=1, max_size=50), polls=st.floats(0.1, 10))
def test_work_is_never_a_hang(pauses: list[float], polls: float) -> None:
    """Something done at least every `limits.hang` is no hang, however rare the looks."""
    pulse, now = Pulse(SHORTEST_S), 0.0
    for work, pause in enumerate(pauses):
        until = now + pause
        while now < until:
            assert pulse.look(now, work, busy=True) is None
            now += polls


def test_how_long_a_silence_is_borne() -> None:
    """Five times the floor at first, the floor when the server is known to be quick."""
    assert silence_of(Pulse(SHORTEST_S), 0.0, "x") == pytest.approx(WARM_UP * SHORTEST_S, abs=1)
    pulse, now = warm_pulse()
    assert silence_of(pulse, now, "x") == pytest.approx(SHORTEST_S, abs=1)


def test_a_slow_server_is_given_longer() -> None:
    """What was silent for 30 s and went on may be silent for longer."""
    pulse, now = warm_pulse()
    for step in range(60):
        assert pulse.look(now + step / 2, "x", busy=True) is None
    assert silence_of(pulse, now + 30, "y") == pytest.approx(TIMES_LONGEST * 30, rel=0.05)


def test_what_did_nothing_since_its_last_hang_is_given_twice_as_long() -> None:
    """Work that only takes long comes to its end at the second try; after work it is as before."""
    pulse, now = warm_pulse()
    now += silence_of(pulse, now, "x")
    second_s = silence_of(pulse, now, "x")
    assert second_s == pytest.approx(2 * SHORTEST_S, abs=1)
    assert silence_of(pulse, now + second_s, "y") == pytest.approx(SHORTEST_S, abs=1)


def test_what_nobody_saw_does_not_count() -> None:
    """A runner that was stopped for an hour does not find its server hung when it goes on."""
    pulse, now = warm_pulse()
    pulse.look(now, "x", busy=True)
    assert pulse.look(now + 3600, "x", busy=True) is None


def test_idleness_is_no_silence() -> None:
    """Without rows there is nothing to do; the silence begins with the first one."""
    pulse, now = warm_pulse()
    for second in range(1000):
        assert pulse.look(now + second, "x", busy=False) is None
    assert silence_of(pulse, now + 1000, "x") == pytest.approx(SHORTEST_S, abs=1)


def load(running: int, work: float, *, queue: int = 0, at: float = 0.0) -> SchedulerLoad:
    return SchedulerLoad(URL, "loads", running, queue, 0.5, used_tokens=100, taken_at=at, work=work)


def two_ranks(first: SchedulerLoad, second: SchedulerLoad) -> list[SchedulerLoad]:
    return [replace(first, scheduler=f"{URL}#dp0"), replace(second, scheduler=f"{URL}#dp1")]


@pytest.mark.parametrize(
    ("told", "hangs"),
    [
        (lambda step: [load(4, step)], False),
        (lambda step: [load(4, 1, at=step)], True),  # the clock of the telling is no work
        (lambda step: [load(4, 1, queue=step)], True),  # nor is an arrival
        (lambda step: [load(4 + step % 2, 1)], False),  # rows began or ended
        (lambda step: [load(4, 1)] if step == 0 else [], True),  # a poll that fails is no work
        (lambda _: [], False),  # a server that never told its load cannot be judged
        (lambda step: two_ranks(load(4, step), load(4, 1)), True),  # one rank of two stands still
        (lambda step: two_ranks(load(4, step), load(0, 1)), False),  # it has nothing to do
    ],
)
def test_what_counts_as_work(told: Callable[[int], list[SchedulerLoad]], hangs: bool) -> None:
    """A forward pass does, counted or seen in what is running; a reply to a poll does not."""
    vigil = HangDetector(1.0)
    assert any(vigil.look(step / 2, told(step), in_flight=8) for step in range(40)) is hangs


def test_answers_are_work() -> None:
    """Rows that come back prove that the server works, whatever its gauges say; fewer polls matter not."""
    vigil = HangDetector(1.0)
    looks = [vigil.look(step / 2, [load(4, 1)], in_flight=8, answers=step // 4) for step in range(100)]
    assert not any(looks)


def test_a_replica_behind_a_gateway_without_rows() -> None:
    """Rows in flight at the gateway are another replica's where this one tells that it has none."""
    idle, working = HangDetector(1.0, alone=False), HangDetector(1.0, alone=False)
    assert not any(idle.look(step / 2, [load(0, 1)], in_flight=8) for step in range(100))
    assert any(working.look(step / 2, [load(4, 1)], in_flight=8) for step in range(100))


# --- servers that we started ---

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
            stuck.set()
        if stuck.is_set():
            time.sleep(float(os.environ.get("STUCK_S", "600")))
            stuck.clear()
        self.answer("to " + body["text"])
"""
HANG_S = 0.3


@pytest.fixture
def quick_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restarts and retries without the pauses that are for real engines."""
    monkeypatch.setattr("batchrunner.engines.launched.supervisor.FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr("batchrunner.core.backoff.FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr("batchrunner.engines.launched.process.POLL_S", 0.02)


def sticky_job(directory: Path, rows: int, poison: str, **environ: str) -> dict[str, Any]:
    engine = launchable(directory, STUCK, POISON=poison, **environ)
    return job_of(directory, engine, rows=rows, limits={"hang": HANG_S, "max_attempts": 1})


@pytest.mark.usefixtures("quick_restarts")
def test_a_server_that_hangs_is_started_again(tmp_path: Path) -> None:
    """Its rows in flight go back unharmed and are answered; the event log tells of it."""
    job = sticky_job(tmp_path, 300, "row 117", ONCE=str(tmp_path / "once"))
    result = batchrun(write_job(job, tmp_path))
    assert result.exit_code == 0, result.stderr
    assert [row["row"] for row in results_of(job) if row["error"] is None] == list(range(300))
    assert "the engine did nothing for" in result.stderr
    assert events_of(job) == ["engine_hangs", "engine_back"]


@pytest.mark.usefixtures("quick_restarts")
def test_a_row_that_hangs_the_server_is_found(tmp_path: Path) -> None:
    """As one that kills it is: all others are answered."""
    job = sticky_job(tmp_path, 300, "row 117")
    result = batchrun(write_job(job, tmp_path))
    assert result.exit_code == 3, result.stderr
    assert [row["row"] for row in results_of(job)] == list(range(300))
    assert [row["row"] for row in results_of(job) if row["error"]] == [117]
    assert events_of(job).count("engine_hangs") == MOST_DEATHS


def test_a_slow_server_is_left_alone(tmp_path: Path) -> None:
    """No answer for ten times the limit is no hang while the scheduler works."""
    job = sticky_job(tmp_path, 3, "none", SLOW_S=str(10 * WARM_UP * 0.05))
    job["limits"]["hang"] = 0.05
    report = batchrunner.run(job)
    assert (report.rows_ok, report.retries) == (3, 0)
    assert events_of(job) == []


@needs_gateway
@pytest.mark.usefixtures("quick_restarts")
def test_a_replica_that_hangs_behind_a_gateway(tmp_path: Path) -> None:
    """It is taken out and started again; every row is answered, and none is blamed."""
    job = sticky_job(tmp_path, 2000, "row 117", ONCE=str(tmp_path / "once"))
    job["engine"] |= {"kind": "gateway", "replicas": 2}
    result = batchrun(write_job(job, tmp_path))
    assert result.exit_code == 0, result.stderr
    assert [row["row"] for row in results_of(job) if row["error"] is None] == list(range(2000))
    assert events_of(job) == ["engine_out", "engine_hangs", "engine_in", "engine_back"]


@needs_gateway
@pytest.mark.usefixtures("quick_restarts")
def test_a_replica_that_stalls_behind_a_gateway(tmp_path: Path) -> None:
    """It gets no rows until it moves again, long before it is taken to hang, so that the other has work."""
    job = sticky_job(tmp_path, 2000, "row 117", ONCE=str(tmp_path / "once"), STUCK_S="3")
    job["engine"] |= {"kind": "gateway", "replicas": 2}
    job["limits"]["hang"] = 2
    report = batchrunner.run(job)
    assert (report.rows_ok, report.retries) == (2000, 0)
    assert events_of(job)[0] == "engine_out"
    assert set(events_of(job)) <= {"engine_out", "engine_in"}


# --- servers of others ---


def test_an_attached_server_that_hangs(tmp_path: Path, server: FakeSGLang) -> None:
    """Its rows go to the other one at once, instead of waiting for `request_timeout`."""
    with FakeSGLang(lambda sent: "hold" if server.sent else "answer") as stuck:
        engine = {"kind": "attach", "urls": [stuck.url, server.url]}
        job = job_of(tmp_path, engine, rows=200, window=8, limits={"hang": HANG_S, "max_attempts": 1})
        report = batchrunner.run(job)
        assert stuck.sent
    assert (report.exit_code, report.rows_ok, report.rows_failed) == (0, 200, 0)
    assert "engine_hangs" in events_of(job)


def test_an_attached_server_that_hangs_and_goes_on(tmp_path: Path, server: FakeSGLang) -> None:
    """Its rows wait until it moves again, and are then answered as if nothing had been."""
    hangs = {"now": True}

    def script(sent: Sent) -> Behaviour:
        hangs["now"] &= sent.tries < 2
        return "hold" if hangs["now"] else "answer"

    server.script = script
    job = job_of(tmp_path, server, rows=50, window=8, limits={"hang": HANG_S, "max_attempts": 1})
    report = batchrunner.run(job)
    assert (report.exit_code, report.rows_ok) == (0, 50)
    assert events_of(job)[:2] == ["engine_hangs", "engine_back"]


def test_an_attached_server_that_hangs_for_good(tmp_path: Path, server: FakeSGLang) -> None:
    """It ends the run when `engine_wait` has passed; nothing is blamed on a row."""
    server.script = lambda _: "hold"
    limits = {"hang": HANG_S, "engine_wait": 1, "max_attempts": 1}
    began = time.monotonic()
    with pytest.raises(EngineLostError, match="did nothing for"):
        batchrunner.run(job_of(tmp_path, server, rows=50, window=8, limits=limits))
    assert time.monotonic() - began < 60
