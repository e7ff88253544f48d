"""An engine that holds requests back is asked to admit more; that is taken back when it costs too much."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from batchrunner.core.engine_info import EngineInfo, QueueBand, SchedulerLoad
from batchrunner.dispatch.concurrency.limits import ConcurrencyLimits
from batchrunner.dispatch.held_back import HoldingBack
from batchrunner.dispatch.route_totals import RouteTotals
from batchrunner.engines.base import Conservativeness
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
    """An engine whose servers can, or cannot, change how carefully they schedule."""

    def __init__(self, *, at_once: bool) -> None:
        super().__init__(SimulatedEngine(kind="simulated"))
        self.at_once = at_once
        self.asked: list[float] = []

    async def admit_more(self) -> Conservativeness | None:
        self.asked.append(0.3)
        return Conservativeness(0.3, self.at_once)

    async def admit_as_before(self) -> Conservativeness | None:
        self.asked.append(1.0)
        return Conservativeness(1.0, self.at_once)


class Run:
    """A scheduler that tells its load, and what follows it."""

    def __init__(self, log: OpenLog, *, at_once: bool = True, helps: bool = True) -> None:
        self.log = log
        self.engine = Adjustable(at_once=at_once)
        self.totals = RouteTotals(["engine"], 0.0)
        self.limits = ConcurrencyLimits(
            EngineInfo("server", "m"), QueueBand(100, 2000), 100, most=1000, fixed=None
        )
        self.limits.begin([self._load(0, 0.0, 0.0)], 0.0, unsent=10**6)
        self.following = HoldingBack(self.engine, self.limits, self.totals, log.events, helps=helps)
        self.now = 0.0

    def passes(self, seconds: int, *, queue: int, usage: float) -> None:
        for _ in range(seconds):
            self.now += 1.0
            in_flight = {"engine": self.limits.windows["engine"]}
            self.limits.observe([self._load(queue, usage, self.now)], in_flight, self.now, unsent=10**6)
            asyncio.run(self.following.follow(self.now))

    def answers(self, rows: int, retractions: int) -> None:
        for index in range(rows):
            self.totals.add("engine", output_tokens=100, retractions=int(index < retractions))
            self.limits.row_tokens.add(10, 100)

    def changes(self) -> list[tuple[float, bool]]:
        """The events of the log."""
        found = [json.loads(line) for line in self.log.path.read_text().splitlines()]
        return [(e["new"], e["at_once"]) for e in found if e["event"] == "conservativeness"]

    def _load(self, queue: int, usage: float, now: float) -> SchedulerLoad:
        return SchedulerLoad("s", "loads", 200, queue, usage, 0, 10_000, 4096, "engine", now)


@pytest.fixture(name="log")
def _log(tmp_path: Path) -> Iterator[OpenLog]:
    events = EventLog(tmp_path / "events.jsonl")
    events.open()
    yield OpenLog(events, tmp_path / "events.jsonl")
    events.close()


def test_it_is_asked_once_and_taken_back_when_it_costs(log: OpenLog) -> None:
    """Some retractions are fine; many that lose a quarter of the tokens are not, and then it is over."""
    run = Run(log)
    run.passes(59, queue=150, usage=0.6)
    assert run.engine.asked == []
    run.passes(60, queue=150, usage=0.6)
    assert run.engine.asked == [0.3]
    run.answers(1000, retractions=5)
    run.passes(60, queue=150, usage=0.9)
    assert run.engine.asked == [0.3]
    run.answers(1000, retractions=900)
    run.passes(1, queue=150, usage=0.95)
    assert run.engine.asked == [0.3, 1.0]
    run.passes(300, queue=150, usage=0.6)
    assert run.changes() == [(0.3, True), (1.0, True)]


def test_a_server_that_cannot_change_is_not_asked_back(log: OpenLog) -> None:
    """What was learned is for the next start: the retractions of this one are none of its doing."""
    run = Run(log, at_once=False)
    run.passes(120, queue=150, usage=0.6)
    run.answers(1000, retractions=900)
    run.passes(60, queue=150, usage=0.95)
    assert run.changes() == [(0.3, False)]


@pytest.mark.parametrize(("usage", "helps"), [(0.95, True), (0.6, False)])
def test_nothing_is_asked_where_it_cannot_help(log: OpenLog, *, usage: float, helps: bool) -> None:
    """Neither with a well used pool, nor where SGLang reserves whole outputs anyway."""
    run = Run(log, helps=helps)
    run.passes(200, queue=150, usage=usage)
    assert run.engine.asked == []


def answers_of(engine: Simulator) -> Any:
    """What an engine of which the servers are not ours says."""
    return asyncio.run(engine.admit_more()), asyncio.run(engine.admit_as_before())


def test_other_engines_have_nothing_to_change() -> None:
    """Only servers that the run launched are changed."""
    assert answers_of(Simulator(SimulatedEngine(kind="simulated"))) == (None, None)
