"""Choose the steps of flag tuning during a run, by the rules of advice, and compute their gains. Pure."""

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
"""Expected gain of an untried step for each doubling of its flag, or of the running requests or the speed if
the advice predicts them. So a step from 4 to 64 running requests promises more than one from 4 to 8. A step
is untried if no run with this model, machine and kind of job has measured it."""
CARE = "schedule-conservativeness"
"""Flag that is lowered whenever `max_running_requests` or the state pool is raised. As long as one of these
limits holds requests back, no load sample shows that the scheduler's reservation for outputs would do so
next."""
WIDER = ("running-capped", "states-full")
"""Rules whose changes let more requests run."""
ADAPTING_RULES = frozenset({
    "conservative", "running-capped", "memory-left", "cuda-graph", "prefill-full", "running-low",
    "long-prompts", "retractions", "pool-small", "states-full", "answers-repeat",
})  # fmt: skip
"""Rules of advice whose flags change during a run."""


class Step(NamedTuple):
    """A change of flags or variables."""

    name: str
    """Names of the rules that call for the step, each with the old values of its flags."""
    args: Mapping[str, Any]
    why: str


def _doublings(old: Mapping[str, Any], new: Mapping[str, Any]) -> float:
    """Return the largest change of a numeric flag, counted in doublings or halvings; at least 1."""
    numbers = [(old[name], value) for name, value in new.items() if isinstance(value, (int, float))]
    return max([1.0, *(abs(math.log2(value / before)) for before, value in numbers if before and value > 0)])


def _may_be_bolder(s: Situation) -> bool:
    """Tell whether the scheduler reserves more for outputs than advised, though these may end early."""
    return conservativeness(s) > LESS_CONSERVATIVE and not (s.client and s.client.ignore_eos)


def steps_for(
    situation: Situation, gains: Mapping[str, float], may_change: Callable[[str], bool]
) -> list[tuple[Step, float]]:
    """Return the steps that advice calls for, with their expected gains.

    The first step combines all the others, which follow it one by one. `gains` holds the measured gains of
    earlier steps, by name. A step that made the server slower is not proposed again.
    """
    flags = of_arguments(situation.facts.version, situation.facts.arguments)
    steps: list[tuple[Step, float]] = []
    for advice in apply_all(situation, flags):
        args = {**advice.args, **advice.env}
        if args and advice.rule in WIDER and may_change(CARE) and _may_be_bolder(situation):
            args |= next_setting("held", CARE, situation.server, flags)
        if advice.rule not in ADAPTING_RULES or not args or not all(map(may_change, args)):
            continue
        old = {name: situation.server.now(name) for name in args}
        name = f"{advice.rule}, {command_line(old)}"
        doublings = _doublings(old, args)
        if would_run := advice.evidence.get("would_run"):
            doublings = max(doublings, math.log2(would_run / situation.server.running))
        if speedup := advice.evidence.get("speedup"):
            doublings = math.log2(speedup)
        gain = gains.get(name, EXPECTED * doublings)
        if gain > 0:
            steps.append((Step(name, args, advice.sign), gain))
    if not steps:
        return []
    together = _together([step for step, _ in steps])
    expected = gains.get(together.name, sum(gain for _, gain in steps))
    return [(together, expected), *steps]


def _together(steps: Sequence[Step]) -> Step:
    """Combine several steps into one; if two set the same flag, the first one wins."""
    args: dict[str, Any] = {}
    for step in reversed(steps):
        args |= step.args
    return Step("; ".join(step.name for step in steps), args, "; ".join(step.why for step in steps))


def gain_over_others(ratios: Sequence[float], ratios_of_others: Sequence[Sequence[float]]) -> float:
    """Return a server's gain relative to the other servers; 0 if its two rates changed in opposite ways.

    Each ratio divides a rate after the step by the same rate before it. The rates are output tokens/s and
    all tokens/s.
    """
    by_others = zip(*ratios_of_others, strict=True) if ratios_of_others else [(1.0,) for _ in ratios]
    gains = [ratio / fmean(others) - 1 for ratio, others in zip(ratios, by_others, strict=True)]
    agree = min(gains) * max(gains) > 0
    return min(gains, key=abs) if agree else 0.0
