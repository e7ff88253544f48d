"""Puts the state of a run together from the parts that know it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from batchrunner.dispatch.rates import Rates
from batchrunner.dispatch.snapshot import Snapshot

if TYPE_CHECKING:
    from collections.abc import Sequence

    from batchrunner.core.types import SchedulerLoad
    from batchrunner.dispatch.concurrency.limits import ConcurrencyLimits
    from batchrunner.dispatch.queue import Backlog
    from batchrunner.dispatch.route_totals import RouteTotals
    from batchrunner.dispatch.slots import Slots
    from batchrunner.output.counts import RowCounts
    from batchrunner.output.resume import DoneRows


class RowTotal(Protocol):
    """What knows how many rows this task has."""

    @property
    def total(self) -> int:
        """Number of rows, those that earlier attempts ended included; with leases an estimate."""


class Monitor:
    """Makes snapshots of a run."""

    def __init__(
        self,
        rows: RowTotal,
        done: DoneRows,
        counts: RowCounts,
        slots: Slots,
        limits: ConcurrencyLimits,
        backlog: Backlog,
        totals: RouteTotals,
        *,
        now: float,
        simulated: bool,
    ) -> None:
        """`done` are the rows of earlier attempts, `counts` those of this one, which began `now`."""
        self._rows = rows
        self._done = done
        self._counts = counts
        self._slots = slots
        self._limits = limits
        self._backlog = backlog
        self._totals = totals
        self._rates = Rates(now, counts=4)
        self._simulated = simulated

    def snapshot(self, loads: Sequence[SchedulerLoad], now: float) -> Snapshot:
        """Return the state of the run; `loads` is the newest load sample."""
        counts = self._counts
        rows_s, output_s, prompt_s, cached_s = self._rates.update(
            now, counts.done, counts.output_tokens, counts.prompt_tokens, counts.cached_tokens
        )
        return Snapshot(
            rows_total=self._rows.total,
            rows_done=len(self._done.rows) + counts.done,
            rows_failed=self._done.counts.failed + counts.failed,
            rows_per_s=rows_s,
            output_tokens_per_s=output_s,
            prompt_tokens_per_s=prompt_s,
            cached_tokens_per_s=cached_s,
            window=self._slots.window,
            in_flight=self._slots.in_flight,
            waiting=self._backlog.waiting,
            retractions=self._totals.retractions,
            loads=tuple(loads),
            bands={name: (band.low, band.high) for name, band in self._limits.bands.items()},
            by_scheduler=self._by_scheduler(now),
            simulated=self._simulated,
        )

    def _by_scheduler(self, now: float) -> dict[str, dict[str, float]]:
        """Return each scheduler's window and, if it has a route of its own, what came back on it."""
        known: dict[str, dict[str, float]] = {
            name: {"window": window} for name, window in self._limits.windows_of_schedulers.items()
        }
        for route, returned in self._totals.sample(now).items():
            if scheduler := self._limits.only_scheduler_on(route):
                known.setdefault(scheduler, {}).update(returned)
        return known
