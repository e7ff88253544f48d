"""Flags that limit one another, changed together: what the forecast expects most of. Pure.

More slots bring little where chunks are too small to fill them, and larger chunks little where slots are few:
one flag at a time, neither looks worth its trial. So settings are climbed in the forecast, where a step may
change all flags of a group at once, and only what comes out at the top is tried.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from batchrunner.engines.flag_table import (
    LARGEST_CHUNK,
    LEAST_CONSERVATIVE,
    LESS_CONSERVATIVE,
    MOST_RAISE,
    NORMAL,
)
from batchrunner.engines.flags import CLIP
from batchrunner.engines.simulation.replica import CostModel, PassWork, RowLengths, fit_spans, steady_work
from batchrunner.engines.simulation.scheduler import CLIP_TOKENS, SchedulerConfig
from batchrunner.tune.measurement import WORTH, PassSpan, TrialResult
from batchrunner.tune.space import Args, FlagChange, Machine, TuningState

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
    if state.value("enable-mixed-chunk", False) or state.value("schedule-policy", "fcfs") != "fcfs":
        return None  # neither is simulated
    chunk = int(signs.prefill_limit)
    return SchedulerConfig(
        max_running=signs.max_running,
        max_total_tokens=signs.pool_tokens,
        chunked_prefill_tokens=chunk if chunk > 0 else None,
        max_prefill_tokens=int(state.value("max-prefill-tokens", MOST_PREFILL_TOKENS)),
        conservativeness=float(state.value("schedule-conservativeness", 1.0)),
        radix_cache=not state.value("disable-radix-cache", False),
        clip_tokens=int(state.value(CLIP, CLIP_TOKENS)),
        decode_interval=int(state.value("prefill-decode-interval", 0)),
    )


FLAGS = {
    "max_running": "max-running-requests",
    "chunked_prefill_tokens": "chunked-prefill-size",
    "max_total_tokens": "max-total-tokens",
    "conservativeness": "schedule-conservativeness",
    "clip_tokens": CLIP,
    "decode_interval": "prefill-decode-interval",
}
"""The flag of each part of a setting that is changed here."""
GROUPS = (
    ("max_running", "chunked_prefill_tokens", "max_total_tokens"),
    ("conservativeness", "clip_tokens"),
    ("decode_interval", "max_running"),
)
"""Parts that limit one another."""
STEPS = (0.5, 2.0, 4.0)
"""Factors by which a step changes a size."""
SMALLEST_CHUNK = 128
INTERVALS = (0, 2, 4, 8, 16, 32)
"""Values of `--prefill-decode-interval`, in decode passes."""
QUANTILES = (0.5, 0.9, 0.99)
"""Quantiles of the outputs' lengths that are tried as the clip of `max_new_tokens`."""
CLIP_STEP = 16
MOST_ROUNDS = 6
STEEP = 1.005
"""Gain from which a step of the climb counts."""


@dataclass(frozen=True, slots=True)
class JointMoves:
    """Proposes settings that differ from the best in several flags, by their expected speed."""

    _forecast: Forecast
    _machine: Machine

    def candidates(self, state: TuningState) -> list[FlagChange]:
        """Return the change to the top of the climb, if that is expected to be worth a trial."""
        now = config_of(state)
        if now is None or not self._forecast.is_ready:
            return []
        top, speed = self._simplest(now, self._climb(now)), self._forecast.speed
        gain = speed(top) / max(speed(now), 1e-9)
        why = f"the simulated scheduler expects {gain:.2f} x"
        return [FlagChange(arguments_of(top, now), why)] if gain >= 1 + WORTH else []

    def _climb(self, now: SchedulerConfig) -> SchedulerConfig:
        speed = self._forecast.speed
        top = now
        for _ in range(MOST_ROUNDS):
            began = top
            for group in GROUPS:
                best = max(self._around(top, group), key=speed)
                if speed(best) >= STEEP * speed(top):
                    top = best
            if top == began:
                break
        return top

    def _simplest(self, now: SchedulerConfig, top: SchedulerConfig) -> SchedulerConfig:
        """Undo each change without which the setting is expected to be about as fast."""
        for name in FLAGS:
            without = replace(top, **{name: getattr(now, name)})
            if self._forecast.speed(without) * STEEP >= self._forecast.speed(top):
                top = without
        return top

    def _around(self, config: SchedulerConfig, group: Sequence[str]) -> Iterable[SchedulerConfig]:
        """Return the settings that a change of these parts leads to, and the setting itself."""
        values = [dict.fromkeys([getattr(config, name), *self._values(config, name)]) for name in group]
        made = (replace(config, **dict(zip(group, chosen, strict=True))) for chosen in product(*values))
        return [config, *made]

    def _values(self, config: SchedulerConfig, name: str) -> list[Any]:
        values: dict[str, list[Any]] = {
            "max_running": self._slots(config),
            "chunked_prefill_tokens": _chunks(config),
            "max_total_tokens": self._pools(config),
            "conservativeness": [LEAST_CONSERVATIVE, LESS_CONSERVATIVE, NORMAL],
            "clip_tokens": clips(self._forecast.rows),
            "decode_interval": list(INTERVALS),
        }
        return values[name]

    def _slots(self, config: SchedulerConfig) -> list[int]:
        """Return numbers of slots, up to the most that the pool could hold of prompts alone."""
        rows = self._forecast.rows
        prompt_tokens = sum(row.prompt for row in rows) / len(rows)
        most = min(MOST_RAISE * config.max_running, math.ceil(config.max_total_tokens / prompt_tokens))
        return [v for v in (int(config.max_running * step) for step in STEPS) if 1 <= v <= most]

    def _pools(self, config: SchedulerConfig) -> list[int]:
        """Return sizes of a CPU's pool; a GPU's depends on memory, which is tuned by itself."""
        larger = min(2 * config.max_total_tokens, self._machine.most_pool_tokens)
        return [larger] if larger > config.max_total_tokens else []


def arguments_of(config: SchedulerConfig, now: SchedulerConfig) -> Args:
    """Return the flags by which a setting differs from the present one."""
    names = (name for name in FLAGS if getattr(config, name) != getattr(now, name))
    return {FLAGS[name]: getattr(config, name) for name in names}


def clips(rows: Sequence[RowLengths]) -> list[int]:
    """Return clips of `max_new_tokens` that outputs stay under; none where rows ask for no more."""
    free = [row for row in rows if not row.fixed]
    if not free:
        return []
    outputs = sorted(row.output for row in free)
    found = [
        math.ceil(outputs[int(share * (len(outputs) - 1))] / CLIP_STEP) * CLIP_STEP for share in QUANTILES
    ]
    return [tokens for tokens in found if tokens < max(row.asked for row in free)] + [CLIP_TOKENS]


def _chunks(config: SchedulerConfig) -> list[int]:
    chunk = config.chunked_prefill_tokens
    if chunk is None:
        return []
    return [v for v in (int(chunk * step) for step in STEPS) if SMALLEST_CHUNK <= v <= LARGEST_CHUNK]
