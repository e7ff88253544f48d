"""One row of the table of rules, and how it is applied. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from batchrunner.advise.advice import Advice
from batchrunner.advise.situation import command_line

if TYPE_CHECKING:
    from collections.abc import Callable

    from batchrunner.advise.advice import Certainty
    from batchrunner.advise.situation import Finding, Situation
    from batchrunner.engines.flags import Flags


@dataclass(frozen=True, slots=True)
class Rule:
    """One row of the table."""

    name: str
    sign: str
    """With its thresholds, for the table."""
    advice: str
    """For the table."""
    source: str
    """The guides: G1 the newest, G2 SGLang's own of 2025, G3 the oldest, G4 the Chinese one; or SGLang."""
    judge: Callable[[Situation, Flags], Finding | None]
    effect: str
    tradeoff: str = ""
    certainty: Certainty = "medium"
    option: bool = False
    """It could be better; nothing is wrong."""

    def apply(self, situation: Situation, flags: Flags) -> Advice | None:
        """Return this rule's advice; None where it has none, or none that this version can follow."""
        found = self.judge(situation, flags)
        if found is None:
            return None
        if found.fine:
            return Advice(self.name, found.sign, certainty="high", evidence=found.evidence)
        change = found.change or command_line(found.args)
        if not change:
            return None
        certainty = found.certainty or self.certainty
        return Advice(
            self.name, found.sign, change, found.args, self.effect, self.tradeoff, certainty, found.evidence
        )
