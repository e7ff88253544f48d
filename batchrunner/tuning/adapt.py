"""The steps of flag tuning during a run, and their gains: decisions by the rules of advice. Pure."""

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

from batchrunner.sglang.flags import command_line, of_arguments
from batchrunner.tuning.flags import LESS_CONSERVATIVE, next_setting
from batchrunner.tuning.load_rules import conservativeness
from batchrunner.tuning.rules import apply_all
from batchrunner.tuning.situation import Situation

EXPECTED = 0.05
"""Gain of a step that was never tried with this model, machine and shape of job, for each doubling of its
flag: 64 running requests instead of 4 promise more than 8 do."""
CARE = "schedule-conservativeness"
"""Flag that is lowered with a higher cap: requests that the cap holds back do not show what else does."""
STEPS = frozenset({
    "conservative", "running-capped", "memory-left", "cuda-graph", "prefill-full", "running-low",
    "long-prompts", "retractions", "pool-small",
})  # fmt: skip
"""Rules of advice whose flags change during a run."""


class Step(NamedTuple):
    """A change of flags or variables."""

    name: str
    """The rules that call for it, with the values before it."""
    args: Mapping[str, Any]
    why: str


def _doublings(old: Mapping[str, Any], new: Mapping[str, Any]) -> float:
    """Return the largest change of a number in doublings, up or down; at least 1."""
    numbers = [(old[name], value) for name, value in new.items() if isinstance(value, (int, float))]
    return max([1.0, *(abs(math.log2(value / before)) for before, value in numbers if before and value > 0)])


def _may_be_bolder(s: Situation) -> bool:
    """Tell whether a scheduler reserves more than the guides advise for outputs of unknown length."""
    return conservativeness(s) > LESS_CONSERVATIVE and not (s.client and s.client.ignore_eos)


def steps_for(
    situation: Situation, gains: Mapping[str, float], may_change: Callable[[str], bool]
) -> list[tuple[Step, float]]:
    """Return the steps that advice calls for with their expected gains: all at once, then each alone.

    `gains` are those of steps that were tried before. A step that lost is not proposed again.
    """
    flags = of_arguments(situation.facts.version, situation.facts.arguments)
    steps: list[tuple[Step, float]] = []
    for advice in apply_all(situation, flags):
        args = {**advice.args, **advice.env}
        if advice.rule == "running-capped" and may_change(CARE) and _may_be_bolder(situation):
            args |= next_setting("held", CARE, situation.server, flags)
        if advice.rule not in STEPS or not args or not all(map(may_change, args)):
            continue
        old = {name: situation.server.now(name) for name in args}
        name = f"{advice.rule}, {command_line(old)}"
        gain = gains.get(name, EXPECTED * _doublings(old, args))
        if gain > 0:
            steps.append((Step(name, args, advice.sign), gain))
    if not steps:
        return []
    together = _together([step for step, _ in steps])
    expected = gains.get(together.name, sum(gain for _, gain in steps))
    return [(together, expected), *steps]


def _together(steps: Sequence[Step]) -> Step:
    """Return several steps as one; where they set the same flag, the first counts."""
    args: dict[str, Any] = {}
    for step in reversed(steps):
        args |= step.args
    return Step("; ".join(step.name for step in steps), args, "; ".join(step.why for step in steps))


def gain_over_others(ratios: Sequence[float], ratios_of_others: Sequence[Sequence[float]]) -> float:
    """Return a server's gain over that of the other servers; 0 where its rates disagree.

    A server's ratios are those of its rates to its rates before: of output tokens, and of all tokens.
    """
    by_others = zip(*ratios_of_others, strict=True) if ratios_of_others else [(1.0,) for _ in ratios]
    gains = [ratio / fmean(others) - 1 for ratio, others in zip(ratios, by_others, strict=True)]
    agree = min(gains) * max(gains) > 0
    return min(gains, key=abs) if agree else 0.0
