"""What the scheduler's simulation expects of a setting, calibrated with the trials so far. Pure.

The simulation says which passes a setting makes; the trials' logs say what passes cost. Their product ranks
settings before a trial is spent on them. It is no verdict: the trial is.
"""

from batchrunner.engines.simulation.replica import CostModel, PassWork, RowLengths, fit_spans, steady_work
from batchrunner.engines.simulation.request import CLIP_TOKENS, SchedulerConfig
from batchrunner.tune.measurement import PassSpan, TrialResult
from batchrunner.tune.space import TuningState
from batchrunner.tune.variables import CLIP

FEWEST_ROWS = 64
"""Rows whose lengths are known, from which they stand for the job's."""
MOST_SPANS = 400
"""Stretches of passes that costs are fitted to; the newest trials count."""
MOST_PREFILL_TOKENS = 16_384
"""SGLang's own default of `--max-prefill-tokens`."""


class Forecast:
    """Expects the output tokens per second of settings."""

    def __init__(self) -> None:
        self.rows: tuple[RowLengths, ...] = ()
        """The rows that stand for the job's: those of the first trial, so that forecasts compare."""
        self._spans: list[PassSpan] = []
        self._cost: CostModel | None = None
        self._works: dict[SchedulerConfig, PassWork | None] = {}

    def learn(self, result: TrialResult) -> None:
        """Take account of a trial."""
        if not self.rows and len(result.rows) >= FEWEST_ROWS:
            self.rows = result.rows
        if result.spans:
            self._spans = [*self._spans, *result.spans][-MOST_SPANS:]
            self._cost = fit_spans(self._spans)

    @property
    def is_ready(self) -> bool:
        """Whether the trials so far tell lengths and costs."""
        return bool(self.rows) and self._cost is not None

    def speed(self, config: SchedulerConfig) -> float:
        """Return output tokens per second; 0 for a setting that cannot serve the rows."""
        if config not in self._works:
            self._works[config] = self._work(config)
        work = self._works[config]
        if work is None or self._cost is None:
            return 0.0
        seconds = self._cost.work_s(work)
        return work.tokens / seconds if seconds > 0 else 0.0

    def _work(self, config: SchedulerConfig) -> PassWork | None:
        try:
            return steady_work(config, self.rows)
        except ValueError:  # a row is larger than the pool
            return None


def config_of(state: TuningState) -> SchedulerConfig | None:
    """Return the best setting as the simulation has it; None where the signs do not say enough."""
    signs = state.signs
    if not signs.max_running or not signs.pool_tokens or signs.prefill_limit is None:
        return None
    if int(state.value("dp-size", 1)) > 1 or int(state.value("page-size", 1)) > 1:
        return None  # the signs are sums over schedulers; the simulation's pages have one token
    chunk = int(signs.prefill_limit)
    return SchedulerConfig(
        max_running=signs.max_running,
        max_total_tokens=signs.pool_tokens,
        chunked_prefill_tokens=chunk if chunk > 0 else None,
        max_prefill_tokens=int(state.value("max-prefill-tokens", MOST_PREFILL_TOKENS)),
        policy="lpm" if state.value("schedule-policy", "fcfs") == "lpm" else "fcfs",
        conservativeness=float(state.value("schedule-conservativeness", 1.0)),
        radix_cache=not state.value("disable-radix-cache", False),
        clip_tokens=int(state.value(CLIP, CLIP_TOKENS)),
        decode_interval=int(state.value("prefill-decode-interval", 0)),
        decode_interval_samples=int(state.value("prefill-decode-interval-min-bs", 0)),
        mixed_chunk=bool(state.value("enable-mixed-chunk", False)),
    )
