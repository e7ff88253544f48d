"""Has an engine that holds requests back admit more, from its next start on."""

import logging

from batchrunner.core.engine_info import Corner
from batchrunner.dispatch.concurrency.limits import ConcurrencyLimits
from batchrunner.engines.base import Engine
from batchrunner.output.events import EventLog

log = logging.getLogger(__name__)


class HoldingBack:
    """Follows the corners of an engine's schedulers; asks the engine once at most."""

    def __init__(self, engine: Engine, limits: ConcurrencyLimits, events: EventLog, *, helps: bool) -> None:
        """Do nothing unless it `helps`: with `ignore_eos` SGLang reserves all of `max_new_tokens`."""
        self._engine = engine
        self._limits = limits
        self._events = events
        self._is_over = not helps

    def follow(self) -> None:
        """React to the newest load sample."""
        if self._is_over or Corner.HELD not in self._limits.corners.values():
            return
        self._is_over = True
        if (value := self._engine.admit_more()) is None:
            return
        self._events.write("conservativeness", new=value)
        log.info(
            "the server holds back: schedule-conservativeness %g at the next start, and in the next run",
            value,
        )
