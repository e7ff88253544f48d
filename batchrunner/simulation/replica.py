"""A server in virtual time: a scheduler, the seconds of its passes, and gauges as stale as the real ones."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

from batchrunner.simulation.scheduler import Scheduler

if TYPE_CHECKING:
    from collections.abc import Mapping

    from batchrunner.simulation.cost import CostModel
    from batchrunner.simulation.sample import SimulatedRequest
    from batchrunner.simulation.scheduler import SchedulerConfig, StepResult

INTERVAL_STEPS: Mapping[str, int] = {"loads": 15, "metrics": 40}
"""Both are written at each prefill, else when so many decode passes are over: SGLang's defaults of
`--load-snapshot-publish-interval` for `/v1/loads` and of `--decode-log-interval` for `/metrics`."""
UNLIMITED = sys.maxsize


class Ended(NamedTuple):
    """A sample that left the replica, and when."""

    at_s: float
    sample: SimulatedRequest


@dataclass(frozen=True, slots=True)
class Gauges:
    """The load as the server last wrote it down."""

    at_s: float
    """When: what was published before says nothing of the load since."""
    running: int
    """As SGLang counts: samples in their prefill are in neither number, a pass's ended ones in `running`."""
    queue: int
    used_tokens: int
    max_total_tokens: int
    max_running: int
    retractions: int

    @property
    def token_usage(self) -> float:
        """The used share of the pool."""
        return self.used_tokens / self.max_total_tokens


class Replica:
    """One server with one scheduler on a virtual clock that the caller moves.

    Submit and drop take effect at the replica's next pass: move the clock to the moment first. A dropped
    sample that waited is gone without a word; one that decoded is told of when its last pass ends.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        cost: CostModel,
        *,
        source: Literal["loads", "metrics"] = "loads",
        interval_steps: int | None = None,
    ) -> None:
        """`source` is what is polled for the gauges, `interval_steps` the server's flag for it."""
        self.scheduler = Scheduler(config)
        self.cost = cost
        self.now_s = 0.0
        self.busy_s = 0.0
        """Seconds spent in passes."""
        self._interval_steps = interval_steps or INTERVAL_STEPS[source]
        self._seen_when_idle = source == "loads"  # `/metrics` keeps what it had
        self._unpublished_steps = 0
        self._free_at_s = 0.0  # when the pass under way ends
        self._ended: list[Ended] = []  # with the pass under way
        self._next_gauges: Gauges | None = None  # written with the pass under way
        self.gauges = self._gauges(0.0, 0, 0, 0)

    @property
    def busy(self) -> bool:
        """Whether something waits, runs, or has still to be told of."""
        return bool(self.scheduler.in_flight or self._ended) or not self._is_idle_told

    def submit(self, sample: SimulatedRequest) -> None:
        """Send a sample now. Raises ValueError where the server would refuse it."""
        self.scheduler.submit(sample)

    def drop(self, sample: SimulatedRequest) -> None:
        """Abort a sample now."""
        self.scheduler.drop(sample)

    def advance(self, until_s: float) -> list[Ended]:
        """Let the clock run to a moment; return what ended by then, in order.

        A pass that has begun by then goes on beyond; what it brings is told once the clock is there.
        """
        ended: list[Ended] = []
        while self._free_at_s <= until_s:
            ended += self._deliver()
            if self._free_at_s == until_s or not self._step(until_s):
                break
        self.now_s = max(self.now_s, until_s)
        return ended

    def advance_to_end(self, until_s: float = math.inf) -> list[Ended]:
        """Let the clock run until a sample ends, at most to a moment; return all that ended with that pass.

        For a loop with one replica in which each end brings the next sample at once.
        """
        while self._free_at_s <= until_s:
            ended = self._deliver()
            if ended:
                self.now_s = max(self.now_s, self._free_at_s)
                return ended
            if self._free_at_s == until_s or not self._step(until_s):
                break
        if until_s < math.inf:
            self.now_s = max(self.now_s, until_s)
        return []

    def _step(self, until_s: float) -> bool:
        """Run the passes that end by the moment, or else the one that goes on beyond; False when idle."""
        scheduler, began_s = self.scheduler, self._free_at_s
        within = UNLIMITED
        if until_s < math.inf:
            within = self.cost.steps_within(until_s - began_s, scheduler.running, scheduler.context_tokens)
        step = scheduler.step(max(1, within))
        if step is None:
            if self._seen_when_idle and not self._is_idle_told:
                self.gauges = self._gauges(began_s, 0, 0, 0)
            if until_s < math.inf:
                self._free_at_s = until_s
            return False
        took_s = self.cost.of_step(step)
        self.busy_s += took_s
        self._free_at_s = began_s + took_s
        self._ended = [Ended(self._free_at_s, sample) for sample in step.finished]
        self._publish(step, began_s)
        return True

    def _publish(self, step: StepResult, began_s: float) -> None:
        """Write the gauges down at a prefill, or with the last pass whose turn it is."""
        if step.kind == "prefill":
            self._unpublished_steps = 0
            self._next_gauges = self._gauges(self._free_at_s, step.running, step.queue, step.used_tokens)
            return
        since = self._unpublished_steps + step.steps
        self._unpublished_steps = since % self._interval_steps
        if since < self._interval_steps or not step.steps:
            return
        late = self._unpublished_steps  # passes of this step after the one that published
        at_s = self._free_at_s - (self._free_at_s - began_s) * late / step.steps
        used_tokens = step.used_tokens - late * step.running
        self._next_gauges = self._gauges(at_s, step.running, step.queue, used_tokens)

    def _gauges(self, at_s: float, running: int, queue: int, used_tokens: int) -> Gauges:
        config, retractions = self.scheduler.config, self.scheduler.retractions
        return Gauges(
            at_s, running, queue, used_tokens, config.max_total_tokens, config.max_running, retractions
        )

    @property
    def _is_idle_told(self) -> bool:
        return not (self.gauges.running or self.gauges.queue or self.gauges.used_tokens)

    def _deliver(self) -> list[Ended]:
        """Make visible what the pass that is over brought."""
        ended, self._ended = self._ended, []
        if self._next_gauges is not None:
            self.gauges, self._next_gauges = self._next_gauges, None
        return ended
