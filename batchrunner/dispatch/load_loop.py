"""Closes the loop: polls the load, lets the admission move the windows, shows it and writes it down."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from batchrunner.dispatch.load_summary import LoadSummary
from batchrunner.dispatch.snapshot import Rates

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from batchrunner.core.types import Completion, SchedulerLoad
    from batchrunner.dispatch.concurrency.controller import Decision
    from batchrunner.dispatch.concurrency.limits import ConcurrencyLimits
    from batchrunner.dispatch.dispatcher import Dispatcher
    from batchrunner.dispatch.pending_row import PendingRow
    from batchrunner.dispatch.prefix_order.reorder import Reorderer
    from batchrunner.dispatch.slots import Slots
    from batchrunner.dispatch.snapshot import Display, Snapshot
    from batchrunner.engines.base import Engine
    from batchrunner.output.events import EventLog

POLL_S = 0.25
"""`/v1/loads` reads shared memory and can be polled at 2-10 Hz."""
SAMPLE_S = 2.0
"""Between two samples in the event log: 43,000 lines a day. A run that is young is sampled more often."""

TOLD = frozenset({"recalled", "died", "hangs", "healed", "lost"})
"""The incidents that the report tells of; how a gateway's list follows them is in the event log alone."""


class LoadLoop:
    """The loop around one start. It is the submitter's listener."""

    def __init__(
        self, engine: Engine, admission: ConcurrencyLimits, arranger: Reorderer, gate: Slots, events: EventLog
    ) -> None:
        self._engine = engine
        self._arranger = arranger
        self._admission = admission
        self._gate = gate
        self._events = events
        self.summary = LoadSummary()
        self.incidents: list[dict[str, Any]] = []
        """What befell the engine, as report.json has it."""
        self._tokens: Counter[str] = Counter()
        self._retractions: Counter[str] = Counter()
        """By route, like the output tokens."""
        self._rates = {route: Rates(time.monotonic(), counts=1) for route in gate.by_route}

    def answered(self, route: str, work: PendingRow, completion: Completion | None) -> None:
        """Take note of a row that the engine brought to its end."""
        retractions = completion.retractions if completion else 0
        self.summary.retractions += retractions
        self._retractions[route] += retractions
        self._tokens[route] += (
            sum(tokens or 0 for tokens in completion.completion_tokens) if completion else 0
        )
        self._admission.ended(route, retractions, time.monotonic())
        change = self._arranger.saw(work, completion) if completion else None
        if change is not None:
            self._events.write("lead", **asdict(change))

    def refused(self, route: str, what: str) -> None:
        """Take note of a route that took no more, or let a row wait too long."""
        self._apply(self._admission.pressed(route, what, time.monotonic()))

    async def watch(
        self,
        submitter: Dispatcher,
        snapshot: Callable[[Sequence[SchedulerLoad]], Snapshot],
        display: Display,
        on_tick: Callable[[], None],
    ) -> None:
        """Poll until cancelled; `on_tick` is called after every poll."""
        began = time.monotonic()
        next_sample = 0.0
        while True:
            signals = await self._engine.signals()
            now = time.monotonic()
            decisions = self._admission.observe(signals, self._gate.by_route, now, unsent=submitter.unsent)
            self._apply(decisions)
            submitter.wake()
            state = snapshot(signals)
            self.summary.add(now, signals, self._admission, self._gate.window)
            display.show(state)
            if now >= next_sample:
                next_sample = now + min(SAMPLE_S, (now - began) / 50)
                write_sample(self._events, state)
            self.write_incidents()
            on_tick()
            await asyncio.sleep(POLL_S)

    def by_scheduler(self, now: float) -> dict[str, dict[str, float]]:
        """Return of each scheduler its window and, where a route leads to it alone, what came back."""
        told: dict[str, dict[str, float]] = {
            name: {"window": window} for name, window in self._admission.windows_of_schedulers.items()
        }
        for route, rates in self._rates.items():
            (rate,) = rates.update(now, self._tokens[route])
            if scheduler := self._admission.alone_on(route):
                returned = {"output_tokens_per_s": round(rate, 1), "retractions": self._retractions[route]}
                told.setdefault(scheduler, {}).update(returned)
        return told

    def write_incidents(self) -> None:
        """Write what befell the engine to the event log."""
        for incident in self._engine.incidents():
            told = {"who": incident.who, "why": incident.why, **incident.facts}
            self._events.write(f"engine_{incident.what}", **told)
            if incident.what in TOLD:
                self.incidents.append({"what": incident.what, **told})

    def write_decisions(self, decisions: Iterable[Decision]) -> None:
        """Write decisions to the event log."""
        for decision in decisions:
            self._events.write("window", **asdict(decision))

    def _apply(self, decisions: Sequence[Decision]) -> None:
        for route, window in self._admission.windows.items():
            self._gate.resize(route, window)
        self.write_decisions(decisions)


def write_sample(events: EventLog, state: Snapshot) -> None:
    """Write one sample of the run's state to the event log."""
    events.write(
        "sample",
        rows_total=state.rows_total,
        rows_done=state.rows_done,
        rows_failed=state.rows_failed,
        rows_per_s=round(state.rows_per_s, 2),
        output_tokens_per_s=round(state.output_tokens_per_s, 1),
        prompt_tokens_per_s=round(state.prompt_tokens_per_s, 1),
        cached_tokens_per_s=round(state.cached_tokens_per_s, 1),
        window=state.window,
        in_flight=state.in_flight,
        resting=state.resting,
        retractions=state.retractions,
        signals=[asdict(signal) | state.by_scheduler.get(signal.scheduler, {}) for signal in state.signals],
        bands=state.bands,
    )
