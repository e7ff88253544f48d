"""Chooses which flags to try during a run, by the rules of advice, and computes the gains. No I/O.

A step is a change of flags with which one server of the run is restarted.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any, NamedTuple

from batchrunner.sglang.flags import command_line, of_arguments
from batchrunner.tuning.flags import LESS_CONSERVATIVE, next_setting
from batchrunner.tuning.load_rules import conservativeness
from batchrunner.tuning.rules import apply_all
from batchrunner.tuning.situation import Situation

EXPECTED = 0.05
"""Expected relative gain of doubling a flag, if no earlier run has measured it. So a change from 4 to 64
running requests promises more than one from 4 to 8."""
RESERVATION_FLAG = "schedule-conservativeness"
"""Flag that sets how much of the KV pool the scheduler reserves for outputs. It is lowered together with a
rise of `max_running_requests` or of the state pool, because it would be the next bottleneck. Load samples
cannot show that in advance."""
WIDER = ("running-capped", "states-full")
"""Rules of advice whose changes let more requests run."""
ADAPTING_RULES = frozenset({
    "conservative", "running-capped", "memory-left", "cuda-graph", "prefill-full", "running-low",
    "long-prompts", "retractions", "pool-small", "states-full", "answers-repeat",
})  # fmt: skip
"""Rules of advice whose flags are changed by flag tuning during a run."""


class Step(NamedTuple):
    """A change of flags or variables."""

    name: str
    """Name of the step: the rules that call for it, each with the old values of its flags."""
    args: Mapping[str, Any]
    """New values of the flags and variables."""
    why: str
    """Observations about the load that call for the step, in words."""


def _doublings(old: Mapping[str, Any], new: Mapping[str, Any]) -> float:
    """Return the largest change of a numeric flag, counted in doublings or halvings; at least 1."""
    doublings = [1.0]
    for name, value in new.items():
        if isinstance(value, (int, float)) and value > 0 and old[name]:
            doublings.append(abs(math.log2(value / old[name])))
    return max(doublings)


def _reserves_too_much(situation: Situation) -> bool:
    """Tell whether the scheduler reserves more for outputs than advised, though outputs may be short."""
    return conservativeness(situation) > LESS_CONSERVATIVE and not (
        situation.client and situation.client.ignore_eos
    )


def steps_for(
    situation: Situation, gains: Mapping[str, float], may_change: Callable[[str], bool]
) -> list[tuple[Step, float]]:
    """Return the steps that advice calls for, with their expected gains.

    The first step combines all the others, which follow one by one. `gains` holds the measured gains of
    earlier steps, by name. A step that made the server slower is not proposed again. `may_change` tells
    whether a flag may be changed; the job's own flags may not.
    """
    flags = of_arguments(situation.facts.version, situation.facts.arguments)
    situation = replace(situation, raises_running=may_change("max-running-requests"))
    steps: list[tuple[Step, float]] = []
    for advice in apply_all(situation, flags):
        args = {**advice.args, **advice.env}
        # If more requests may run, the memory reserved for outputs would be the next limit.
        if args and advice.rule in WIDER and may_change(RESERVATION_FLAG) and _reserves_too_much(situation):
            args |= next_setting("held", RESERVATION_FLAG, situation.server, flags)
        if advice.rule not in ADAPTING_RULES or not args or not all(map(may_change, args)):
            continue
        old = {name: situation.server.value_of(name) for name in args}
        name = f"{advice.rule}, {command_line(old)}"
        # The expected gain of an untried step grows with the size of the change; see EXPECTED.
        doublings = _doublings(old, args)
        would_run = advice.evidence.get("would_run")
        if would_run:
            doublings = max(doublings, math.log2(would_run / situation.server.running))
        # If a speedup is predicted, it counts instead of the size of the change.
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
    """Return a server's gain from a step relative to the other servers, which kept their flags.

    There are two rates: output tokens/s and all tokens/s. A ratio is a rate after the step, divided by the
    rate before it. Rows may get longer or shorter on all servers, so the server's ratios are compared with
    the mean ratios of the other servers (1 if there are none). The result is the smaller gain of the two
    rates, or 0 if one rate rose and the other fell.
    """
    mean_of_others = [fmean(others) for others in zip(*ratios_of_others, strict=True)] or [1.0] * len(ratios)
    gains = [ratio / others - 1 for ratio, others in zip(ratios, mean_of_others, strict=True)]
    have_same_sign = min(gains) * max(gains) > 0
    return min(gains, key=abs) if have_same_sign else 0.0
