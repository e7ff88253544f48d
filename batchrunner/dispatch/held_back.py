"""Asks an engine that holds requests back to admit more, and takes it back when retractions cost too much."""

import logging
from dataclasses import dataclass

from batchrunner.core.engine_info import Corner
from batchrunner.dispatch.concurrency.limits import ConcurrencyLimits
from batchrunner.dispatch.route_totals import RouteTotals
from batchrunner.engines.base import Engine
from batchrunner.engines.logs.thresholds import Thresholds
from batchrunner.output.events import EventLog

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Since:
    """What the engine had done when it was asked."""

    at: float
    retractions: int
    output_tokens: int


def costs(since: Since, now: Since, held: float | None, limits: Thresholds) -> bool:
    """Tell whether retractions are more than the guides call fine, and lose much; pure.

    A retraction loses what a running row holds on average, `held` tokens; None if that is not known.
    """
    retractions = now.retractions - since.retractions
    a_minute = retractions / max(1.0, (now.at - since.at) / 60)
    if a_minute <= limits.retractions_per_min:
        return False
    generated = now.output_tokens - since.output_tokens
    return held is None or retractions * held >= limits.recomputed * max(1, generated)


class HoldingBack:
    """Follows the corners of an engine's schedulers; changes the engine at most once, and back once."""

    def __init__(
        self,
        engine: Engine,
        limits: ConcurrencyLimits,
        totals: RouteTotals,
        events: EventLog,
        *,
        helps: bool,
    ) -> None:
        """Do nothing unless it `helps`: with `ignore_eos` SGLang reserves all of `max_new_tokens`."""
        self._engine = engine
        self._limits = limits
        self._totals = totals
        self._events = events
        self._since: Since | None = None
        self._is_over = not helps

    async def follow(self, now: float) -> None:
        """React to the newest load sample."""
        if self._is_over:
            return
        if self._since is None:
            if Corner.HELD in self._limits.corners.values():
                self._since = self._state(now)
                await self._ask(admits_more=True)
        elif costs(self._since, self._state(now), self._limits.row_tokens.held, Thresholds()):
            self._is_over = True
            await self._ask(admits_more=False)

    async def _ask(self, *, admits_more: bool) -> None:
        change = await self._engine.admit_more() if admits_more else await self._engine.admit_as_before()
        if change is None:
            self._is_over = True
            return
        self._is_over |= not change.at_once  # what runs now stays as it is
        self._events.write("conservativeness", new=change.value, at_once=change.at_once)
        why = "the server holds back" if admits_more else "retractions cost too much"
        when = "from now on" if change.at_once else "at the next start, and in the next run"
        log.info("%s: schedule-conservativeness %g %s", why, change.value, when)

    def _state(self, now: float) -> Since:
        return Since(now, self._totals.retractions, self._totals.output_tokens)
