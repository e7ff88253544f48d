"""The advice on a server's flags, as `batchrun advise` and a run's page show it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batchrunner.core.console import counted
from batchrunner.sglang.flags import CHECK_HELP, Flags, of_arguments
from batchrunner.sglang.logs.reader import Facts
from batchrunner.sglang.model_files import read_config
from batchrunner.tuning.from_run import read_run
from batchrunner.tuning.rules import BY_NAME, Advice, apply_all
from batchrunner.tuning.signals import GUIDES, has_enough, share, span_in_words
from batchrunner.tuning.situation import Situation

READING_SIGNS = ("empty", "in_band", "deep", "conservative", "full", "no_graph")
"""Observations about the load for which `--json` shows the fraction of the samples that show them."""


@dataclass(frozen=True, slots=True)
class AdviceReport:
    """The load and setup of a server, and the advice that follows from them."""

    source: str
    """Path or URL from which the load was read."""
    situation: Situation
    advice: list[Advice]
    flags: Flags
    """Flags of the server's version of SGLang."""

    @property
    def healthy(self) -> bool:
        """Whether there are enough load samples, and all advice is optional."""
        needs_change = any(advice.change and not BY_NAME[advice.rule].option for advice in self.advice)
        return self.situation.is_judged and has_enough(self.situation.load) and not needs_change

    def lines(self) -> list[str]:
        """Return the lines for the terminal."""
        lines = [f"{self.source}: {self.reading()}"]
        if self.healthy:
            lines.append(f"healthy: {self.figures()}")
        lines += [line for advice in self.advice for line in advice.lines()]
        if any(advice.args for advice in self.advice) and not self.flags.names:
            lines.append(f"({CHECK_HELP})")
        return lines

    def as_dict(self) -> dict[str, Any]:
        """Return the report as `--json` prints it."""
        load = self.situation.load
        return {
            "source": self.source,
            "healthy": self.healthy,
            "enough": has_enough(load),
            "reading": {
                **self.situation.evidence(*READING_SIGNS),
                "schedulers": len(load.tracks),
                "retractions": self.situation.retractions,
                "retractions_per_min": round(self.situation.retractions_per_min, 2),
            },
            "version": self.flags.version,
            "flags_known": bool(self.flags.names),
            "advice": [advice.as_dict() for advice in self.advice],
        }

    def reading(self) -> str:
        """Describe the load samples; if there are too few, say how many are needed."""
        load, client = self.situation.load, self.situation.client
        if self.situation.facts.mute:
            return "the server does not report its load (no path /v1/loads)"
        if client is not None and client.simulated:
            return "simulated: there is no advice on simulated figures"
        if not load.counted and client is None:
            return "no request was running when the load was sampled"
        if has_enough(load):
            return span_in_words(load)
        steady = " of steady work (without the start and the end of the run)" if client else ""
        return (
            f"{self.figures()}. Too short for advice: {span_in_words(load)}{steady}; advice needs "
            f"{GUIDES.samples:g} samples over {GUIDES.span_s:g} s"
        )

    def figures(self) -> str:
        """Return the medians of the load, and the number of retractions, in words."""
        load = self.situation.load
        rate = load.median("rate")
        figures = [
            f"median #running-req {load.median('running'):.0f}",
            f"#queue-req {load.median('queue'):.0f} (0 in {share(load.samples, 'empty'):.0%} of samples)",
            f"token usage {load.median('usage'):.2f}",
            counted(self.situation.retractions, "retraction"),
        ]
        if rate:
            figures.append(f"{rate:,.0f} tokens/s")
        return ", ".join(figures)


def advise_run(run: Path) -> AdviceReport:
    """Advise on a run, without asking an installed SGLang. Raises OutputError if the path holds no run."""
    situation = read_run(run)
    situation.facts.config = config_of(situation.facts)
    flags = of_arguments(situation.facts.version, situation.facts.arguments)
    return AdviceReport(str(run), situation, apply_all(situation, flags), flags)


def config_of(facts: Facts) -> dict[str, Any]:
    """Return the model's config.json if the server's arguments name a model on this machine; else {}."""
    model, revision = facts.arguments.get("model_path"), facts.arguments.get("revision")
    if not isinstance(model, str):
        return {}
    return read_config(model, revision if isinstance(revision, str) else None)
