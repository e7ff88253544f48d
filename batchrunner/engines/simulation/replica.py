"""A server in virtual time: a scheduler, the time that its passes take, and gauges as late as real ones."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from batchrunner.engines.simulation.config import SchedulerConfig
from batchrunner.engines.simulation.cost import CostModel
from batchrunner.engines.simulation.sample import SimulatedRequest
from batchrunner.engines.simulation.scheduler import Scheduler, StepResult

INTERVAL_STEPS: Mapping[str, int] = {"loads": 15, "metrics": 40}
"""Decode passes between two updates of the gauges, which are updated at each prefill too: SGLang's defaults
of `--load-snapshot-publish-interval` for `/v1/loads` and of `--decode-log-interval` for `/metrics`."""


class EndedRequest(NamedTuple):
    """A sample that left the replica, with the time in seconds."""

    at_s: float
    sample: SimulatedRequest


@dataclass(frozen=True, slots=True)
class Gauges:
    """The load that the server last published."""

    at_s: float
    """Time of publication in seconds; the load may have changed since."""
    running: int
    """Samples that decode, those that ended with the pass included, as SGLang counts. Samples in a prefill
    are neither here nor in `queue`."""
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

    Submit and drop take effect at the replica's next pass: move the clock to that time first. A sample that
    is dropped while it waits is not reported; one that decodes is reported when its last pass ends.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        cost: CostModel,
        *,
        source: Literal["loads", "metrics"] = "loads",
        interval_steps: int | None = None,
    ) -> None:
        """`source` is the endpoint that the gauges stand for, `interval_steps` the server's flag for it."""
        self.scheduler = Scheduler(config)
        self.cost = cost
        self.now_s = 0.0
        self.busy_s = 0.0
        """Seconds spent in passes."""
        self._interval_steps = interval_steps or INTERVAL_STEPS[source]
        self._publishes_when_idle = source == "loads"  # `/metrics` keeps its last values
        self._unpublished_steps = 0
        self._free_at_s = 0.0  # when the current pass ends
        self._ended: list[EndedRequest] = []  # with the current pass
        self._next_gauges: Gauges | None = None  # published with the current pass
        self.gauges = self._gauges(0.0, 0, 0, 0)

    @property
    def busy(self) -> bool:
        """Whether a sample waits or runs, or something is still to be reported."""
        return bool(self.scheduler.in_flight or self._ended) or not self._shows_idle

    def submit(self, sample: SimulatedRequest) -> None:
        """Send a sample now. Raises ValueError where the server would refuse it."""
        self.scheduler.submit(sample)

    def drop(self, sample: SimulatedRequest) -> None:
        """Abort a sample now."""
        self.scheduler.drop(sample)

    def advance(self, until_s: float) -> list[EndedRequest]:
        """Let the clock run to a finite time; return the samples that ended by then, in order.

        A pass that has begun by then continues; its results are reported once the clock reaches its end.
        """
        ended: list[EndedRequest] = []
        while self._free_at_s <= until_s:
            ended += self._deliver()
            if self._free_at_s == until_s or not self._step(until_s):
                break
        self.now_s = max(self.now_s, until_s)
        return ended

    def _step(self, until_s: float) -> bool:
        """Run the passes that end by that time, or the one that ends after it; return False when idle."""
        scheduler, began_s = self.scheduler, self._free_at_s
        within = self.cost.steps_within(until_s - began_s, scheduler.running, scheduler.context_tokens)
        step = scheduler.step(max(1, within))
        if step is None:
            if self._publishes_when_idle and not self._shows_idle:
                self.gauges = self._gauges(began_s, 0, 0, 0)
            self._free_at_s = until_s
            return False
        took_s = self.cost.step_s(step)
        self.busy_s += took_s
        self._free_at_s = began_s + took_s
        self._ended = [EndedRequest(self._free_at_s, sample) for sample in step.finished]
        self._publish(step, began_s)
        return True

    def _publish(self, step: StepResult, began_s: float) -> None:
        """Publish the gauges at a prefill, or with the last pass that is due."""
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
    def _shows_idle(self) -> bool:
        return not (self.gauges.running or self.gauges.queue or self.gauges.used_tokens)

    def _deliver(self) -> list[EndedRequest]:
        """Return the samples of the pass that ended, and show its gauges."""
        ended, self._ended = self._ended, []
        if self._next_gauges is not None:
            self.gauges, self._next_gauges = self._next_gauges, None
        return ended
