"""One rule, what it finds, and the advice that follows. Pure."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from batchrunner.advise.situation import Situation
from batchrunner.engines.flags import Flags, command_line

Certainty = Literal["high", "medium", "low"]


@dataclass(frozen=True, slots=True)
class Advice:
    """One piece of advice; without a `change` it says that something is as it should be."""

    rule: str
    """Name of the rule in the table."""
    sign: str
    """The sign that was seen, in one line with figures, share of samples and time span."""
    change: str = ""
    """The change: a flag with its value, as the installed version spells it, or a field of the job."""
    args: dict[str, Any] = field(default_factory=dict)
    """The same for `engine.args`, where the change is server flags; None removes a flag."""
    effect: str = ""
    """The expected gain."""
    tradeoff: str = ""
    """The cost of the change."""
    certainty: Certainty = "medium"
    """How certain the advice is: `high`, `medium` or `low`."""
    evidence: dict[str, Any] = field(default_factory=dict)
    """The figures behind the sign, for `--json`; their names have the units."""
    estimated_gain: float | None = None
    """Throughput with the change over throughput without, by the log's own pass times; None where they do not
    tell it."""
    env: dict[str, str] = field(default_factory=dict)
    """Variables of the server for `engine.env`, where no flag but a variable is the change."""
    fewer_passes: float | None = None
    """Passes without the change over passes with it, by the log's counts; None where they do not tell."""

    def as_dict(self) -> dict[str, Any]:
        """Return the advice as `--json` prints it."""
        return asdict(self)

    def lines(self) -> list[str]:
        """Return the lines for the terminal."""
        if not self.change:
            return [f"healthy: {self.sign}"]
        notes = [("gain", self.effect), ("cost", self.tradeoff)]
        return [
            f"{self.sign}",
            f"  -> {self.change} ({self.certainty} certainty{self._source_of_gain()})",
            *(f"     {name}: {text}" for name, text in notes if text),
        ]

    @property
    def gain_in_words(self) -> str:
        """The estimated gain in words, empty where it is not known."""
        return f"about {self.estimated_gain:.2f} times the throughput" if self.estimated_gain else ""

    def _source_of_gain(self) -> str:
        return f"; {self.gain_in_words}, by the log's own pass times" if self.gain_in_words else ""


@dataclass(frozen=True, slots=True)
class Finding:
    """The finding of a rule: a sign with its figures, and the change."""

    sign: str
    args: dict[str, Any] = field(default_factory=dict)
    """Server flags for `engine.args`; without them and `change`, the rule gives no advice."""
    change: str = ""
    """The change in words, where flags alone do not say it."""
    evidence: dict[str, Any] = field(default_factory=dict)
    certainty: Certainty | None = None
    """How certain it is, where that differs from the rule."""
    gain: float | None = None
    """Throughput with the change over throughput without, where the log's pass times tell it."""
    fewer: float | None = None
    """Passes without the change over passes with it, where the log's counts tell it: it puts advice in order
    where times are not known."""
    fine: bool = False
    """Whether the finding is that all is well."""
    env: dict[str, str] = field(default_factory=dict)
    """Variables for `engine.env`; `change` names them."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule, a row of the table in the docs."""

    name: str
    sign: str
    """The sign with its thresholds, for the table in the docs."""
    advice: str
    """The advice in general, for the table in the docs."""
    source: str
    """The source: SGLang, or a tuning guide: G1 is the newest, G2 SGLang's own of 2025, G3 the oldest, G4 the
    Chinese one."""
    judge: Callable[[Situation, Flags], Finding | None]
    effect: str
    tradeoff: str = ""
    certainty: Certainty = "medium"
    option: bool = False
    """Whether nothing is wrong, and the advice is only an option."""

    def apply(self, situation: Situation, flags: Flags) -> Advice | None:
        """Return this rule's advice; None without a finding, or where this version lacks the flags."""
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
            self.name, found.sign, change, found.args, self.effect, self.tradeoff, certainty, found.evidence,
            found.gain, found.env, found.fewer,
        )  # fmt: skip
