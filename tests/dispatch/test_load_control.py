"""An engine that holds requests back is asked once to admit more."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from batchrunner.core.engine_info import EngineInfo, QueueBand, SchedulerLoad
from batchrunner.dispatch.concurrency.limits import ConcurrencyLimits
from batchrunner.dispatch.load_control import LoadControl
from batchrunner.dispatch.queue import Slots
from batchrunner.engines.simulated import Simulator
from batchrunner.job.engine import SimulatedEngine
from batchrunner.output.events import EventLog

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class OpenLog(NamedTuple):
    events: EventLog
    path: Path


class Adjustable(Simulator):
    """An engine whose servers can be started less careful."""

    def __init__(self) -> None:
        super().__init__(SimulatedEngine(kind="simulated"))
        self.asked: list[float] = []

    def admit_more(self) -> float | None:
        self.asked.append(0.3)
        return 0.3


class Run:
    """A scheduler that tells its load, and what follows it."""

    def __init__(self, log: OpenLog, *, helps: bool = True) -> None:
        self.log = log
        self.engine = Adjustable()
        self.limits = ConcurrencyLimits(
            EngineInfo("server", "m"), QueueBand(100, 2000), 100, most=1000, fixed=None
        )
        self.limits.begin([self._load(0, 0.0, 0.0)], 0.0, unsent=10**6)
        self.slots = Slots({"engine": 1})
        backlog: Any = None  # observing a poll needs none
        self.control = LoadControl(
            self.engine, self.limits, self.slots, backlog, log.events, may_admit_more=helps
        )
        self.now = 0.0

    def passes(self, seconds: int, *, queue: int, usage: float) -> None:
        for _ in range(seconds):
            self.now += 1.0
            while self.slots.take(self.now) is not None:
                pass  # all are in use
            self.control.observe([self._load(queue, usage, self.now)], self.now, unsent=10**6)

    def changes(self) -> list[float]:
        """The events of the log."""
        found = [json.loads(line) for line in self.log.path.read_text().splitlines()]
        return [e["new"] for e in found if e["event"] == "conservativeness"]

    def _load(self, queue: int, usage: float, now: float) -> SchedulerLoad:
        return SchedulerLoad("s", "loads", 200, queue, usage, 0, 10_000, 4096, "engine", now)


@pytest.fixture(name="log")
def _log(tmp_path: Path) -> Iterator[OpenLog]:
    events = EventLog(tmp_path / "events.jsonl")
    events.open()
    yield OpenLog(events, tmp_path / "events.jsonl")
    events.close()


def test_it_is_asked_once(log: OpenLog) -> None:
    """It takes more than a minute in the corner; what is learned is for the next start."""
    run = Run(log)
    run.passes(59, queue=150, usage=0.6)
    assert run.engine.asked == []
    run.passes(300, queue=150, usage=0.6)
    assert run.engine.asked == [0.3]
    assert run.changes() == [0.3]


@pytest.mark.parametrize(("usage", "helps"), [(0.95, True), (0.6, False)])
def test_nothing_is_asked_where_it_cannot_help(log: OpenLog, *, usage: float, helps: bool) -> None:
    """Neither with a well used pool, nor where SGLang reserves whole outputs anyway."""
    run = Run(log, helps=helps)
    run.passes(200, queue=150, usage=usage)
    assert run.engine.asked == []
