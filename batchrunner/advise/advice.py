"""What one rule has to say: the sign with its figures, the change, what it gains and what it costs."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Certainty = Literal["high", "medium", "low"]


@dataclass(frozen=True, slots=True)
class Advice:
    """One piece of advice; without a `change` it says that something is as it should be."""

    rule: str
    """The rule's name in the table of rules."""
    sign: str
    """What is seen, in one line with its figures, share of samples and time span."""
    change: str = ""
    """What to do, exactly: a flag with its value as the installed version spells it, or a job's field."""
    args: dict[str, Any] = field(default_factory=dict)
    """The same as `engine.args` has it, where it is server flags; None takes a flag away."""
    effect: str = ""
    """What is expected of the change."""
    tradeoff: str = ""
    """What the change costs."""
    certainty: Certainty = "medium"
    evidence: dict[str, Any] = field(default_factory=dict)
    """The figures behind the sign, for machines; names have their units."""

    def as_dict(self) -> dict[str, Any]:
        """Return it as `--json` and report.json have it."""
        return asdict(self)

    def lines(self) -> list[str]:
        """Return what a person reads."""
        if not self.change:
            return [f"healthy: {self.sign}"]
        notes = [("gain", self.effect), ("cost", self.tradeoff)]
        return [
            f"{self.sign}",
            f"  -> {self.change} ({self.certainty} certainty)",
            *(f"     {name}: {text}" for name, text in notes if text),
        ]
