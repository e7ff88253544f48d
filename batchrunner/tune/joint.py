"""Flags that limit one another, changed together: what the forecast expects most of. Pure.

More slots bring little where chunks are too small to fill them, and larger chunks little where slots are few:
one flag at a time, neither looks worth its trial. So settings are climbed in the forecast, where a step may
change all flags of a group at once, and only what comes out at the top is tried.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from batchrunner.advise.rules.passes import LARGEST_CHUNK
from batchrunner.engines.recovery.safer_args import LESS_CONSERVATIVE, NORMAL
from batchrunner.engines.simulation.replica import RowLengths
from batchrunner.engines.simulation.request import CLIP_TOKENS, SchedulerConfig
from batchrunner.tune.forecast import Forecast, config_of
from batchrunner.tune.machine import Machine
from batchrunner.tune.race import WORTH
from batchrunner.tune.space import LEAST_CONSERVATIVE, MOST_RAISE, Args, FlagChange, TuningState
from batchrunner.tune.variables import CLIP

FLAGS = {
    "max_running": "max-running-requests",
    "chunked_prefill_tokens": "chunked-prefill-size",
    "max_total_tokens": "max-total-tokens",
    "conservativeness": "schedule-conservativeness",
    "clip_tokens": CLIP,
    "decode_interval": "prefill-decode-interval",
    "mixed_chunk": "enable-mixed-chunk",
}
"""The flag of each part of a setting that is changed here."""
GROUPS = (
    ("max_running", "chunked_prefill_tokens", "max_total_tokens"),
    ("conservativeness", "clip_tokens"),
    ("decode_interval", "max_running"),
    ("mixed_chunk", "chunked_prefill_tokens"),
)
"""Parts that limit one another."""
SIZES = ("max_running", "chunked_prefill_tokens", "max_total_tokens")
"""Parts that take memory."""
STEPS = (0.5, 2.0, 4.0)
"""Factors by which a step changes a size."""
SMALLEST_CHUNK = 128
INTERVALS = (0, 2, 4, 8, 16, 32)
"""Values of `--prefill-decode-interval`, in decode passes."""
QUANTILES = (0.5, 0.9, 0.99)
"""Quantiles of the outputs' lengths that are tried as the clip of `max_new_tokens`."""
CLIP_STEP = 16
ROOM = 2
"""A mixed chunk has to have room for this many times the running requests: the server fails without any."""
MOST_ROUNDS = 6
STEEP = 1.005
"""Gain from which a step of the climb counts."""


class JointMoves:
    """Proposes settings that differ from the best in several flags, by their expected speed."""

    def __init__(self, forecast: Forecast, machine: Machine) -> None:
        self._forecast = forecast
        self._machine = machine

    def candidates(self, state: TuningState) -> list[FlagChange]:
        """Return changes of the best setting that are expected to be worth a trial, the best first.

        These are the top of the climb, and what is left of it when one of its flags stays as it is.
        """
        now = config_of(state)
        if now is None or not self._forecast.is_ready:
            return []
        top = self._simplest(now, self._climb(now))
        changed = [name for name in FLAGS if getattr(top, name) != getattr(now, name)]
        partly = [replace(top, **{name: getattr(now, name)}) for name in changed if len(changed) > 1]
        speed = self._forecast.speed
        ranked = sorted([top, *partly], key=speed, reverse=True)
        gains = [(config, speed(config) / max(speed(now), 1e-9)) for config in ranked if config != now]
        return [
            FlagChange(arguments_of(config, now), f"the simulated scheduler expects {gain:.2f} x")
            for config, gain in gains
            if gain >= 1 + WORTH
        ]

    def halfway(self, state: TuningState, change: FlagChange) -> FlagChange | None:
        """Return a change that goes half as far as one that a server died of: by the root of each factor.

        None where it is expected to bring too little, or where the other changes no size.
        """
        now = config_of(state)
        if now is None or not any(FLAGS[part] in change.args for part in SIZES):
            return None
        parts: dict[str, Any] = {
            part: change.args[flag] or False for part, flag in FLAGS.items() if flag in change.args
        }
        sizes = {part: round(math.sqrt(getattr(now, part) * parts[part])) for part in SIZES if part in parts}
        config = replace(now, **(parts | sizes))
        gain = self._forecast.speed(config) / max(self._forecast.speed(now), 1e-9)
        if gain < 1 + WORTH or not _is_sound(config):
            return None
        why = f"half as far as before: the simulated scheduler expects {gain:.2f} x"
        return FlagChange(arguments_of(config, now), why)

    def gain_of(self, state: TuningState, name: str) -> float | None:
        """Return the largest gain expected of changing one part alone; None where that is not known."""
        now = config_of(state)
        if now is None or not self._forecast.is_ready:
            return None
        others = [config for config in self._around(now, (name,)) if config != now]
        speeds = [self._forecast.speed(config) for config in others]
        return max(speeds, default=0.0) / max(self._forecast.speed(now), 1e-9)

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
        return [config, *(other for other in made if _is_sound(other))]

    def _values(self, config: SchedulerConfig, name: str) -> list[Any]:
        values: dict[str, Callable[[], list[Any]]] = {
            "max_running": lambda: self._slots(config),
            "chunked_prefill_tokens": lambda: _chunks(config),
            "max_total_tokens": lambda: self._pools(config),
            "conservativeness": lambda: [LEAST_CONSERVATIVE, LESS_CONSERVATIVE, NORMAL],
            "clip_tokens": lambda: clips(self._forecast.rows),
            "decode_interval": lambda: list(INTERVALS),
            "mixed_chunk": lambda: [False, True],
        }
        return values[name]()

    def _slots(self, config: SchedulerConfig) -> list[int]:
        """Return numbers of slots, up to the most that the pool could hold of prompts alone."""
        rows = self._forecast.rows
        prompt_tokens = sum(row.prompt for row in rows) / len(rows)
        most = min(MOST_RAISE * config.max_running, math.ceil(config.max_total_tokens / prompt_tokens))
        return [v for v in (int(config.max_running * step) for step in STEPS) if 1 <= v <= most]

    def _pools(self, config: SchedulerConfig) -> list[int]:
        """Return sizes of a CPU's pool; a GPU's depends on memory, which is tuned by itself."""
        most = self._machine.most_pool_tokens if self._machine.cpu else 0
        return [v for v in (min(2 * config.max_total_tokens, most),) if v > config.max_total_tokens]


def arguments_of(config: SchedulerConfig, now: SchedulerConfig) -> Args:
    """Return the flags by which a setting differs from the present one."""
    different = {flag: (getattr(config, name), getattr(now, name)) for name, flag in FLAGS.items()}
    return {
        flag: (None if value is False else value) for flag, (value, old) in different.items() if value != old
    }


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


def _is_sound(config: SchedulerConfig) -> bool:
    chunk = config.chunked_prefill_tokens
    return not config.mixed_chunk or (chunk is not None and chunk >= ROOM * config.max_running)
