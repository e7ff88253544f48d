"""`batchrun advise`: read a log, watch a server or read a run, and apply the rules."""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batchrunner.advise.from_run import read_run
from batchrunner.advise.from_server import watch_server
from batchrunner.advise.rules import BY_NAME, Advice, apply_all
from batchrunner.advise.situation import Situation
from batchrunner.core.console import counted
from batchrunner.core.errors import InputError, hidden
from batchrunner.output.addresses import store_address
from batchrunner.output.run_dir import look_at_run
from batchrunner.sglang.flags import CHECK_HELP, Flags, installed, of_arguments
from batchrunner.sglang.logs.reader import KNOWN_CARDS, Facts, LogReader, architecture_of
from batchrunner.sglang.model_files import read_config
from batchrunner.tuning.signals import GUIDES, has_enough, share, span_in_words

log = logging.getLogger(__name__)

WATCH_S = 20.0
"""Seconds for which a live server is watched."""


@dataclass(frozen=True, slots=True)
class AdviceReport:
    """A situation and the advice that follows from it."""

    source: str
    situation: Situation
    advice: list[Advice]
    flags: Flags

    @property
    def healthy(self) -> bool:
        """Whether there are enough samples and nothing is wrong."""
        wrong = any(advice.change and not BY_NAME[advice.rule].option for advice in self.advice)
        return self.situation.is_judged and has_enough(self.situation.load) and not wrong

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
                **self.situation.evidence("empty", "in_band", "deep", "conservative", "full", "no_graph"),
                "schedulers": len(load.tracks),
                "retractions": self.situation.retractions,
                "retractions_per_min": round(self.situation.retractions_per_min, 2),
            },
            "version": self.flags.version,
            "flags_known": bool(self.flags.names),
            "advice": [advice.as_dict() for advice in self.advice],
        }

    def reading(self) -> str:
        """Describe the samples; where they are too few for advice, say how many advice needs."""
        load, client = self.situation.load, self.situation.client
        if self.situation.facts.mute:
            return "the server does not tell its load (no /v1/loads)"
        if client is not None and client.simulated:
            return "simulated: there is no advice on figures that are made up"
        if not load.counted and client is None:
            return "no request was running when the load was sampled"
        if has_enough(load):
            return span_in_words(load)
        steady = " between its start and its drain or tail" if client else ""
        return (
            f"{self.figures()}. A reading, not advice: {span_in_words(load)}{steady}, and advice needs "
            f"{GUIDES.samples:g} over {GUIDES.span_s:g} s"
        )

    def figures(self) -> str:
        """Return the usual figures: medians, and the retractions."""
        load = self.situation.load
        rate, retractions = load.median("rate"), counted(self.situation.retractions, "retraction")
        return (
            f"median #running-req {load.median('running'):.0f}, #queue-req {load.median('queue'):.0f} "
            f"(0 in {share(load.samples, 'empty'):.0%}), token usage {load.median('usage'):.2f}, "
            f"{retractions}" + (f", {rate:,.0f} tokens/s" if rate else "")
        )


def advise(
    source: str,
    *,
    span_s: float = WATCH_S,
    card: str | None = None,
    python: str | None = None,
) -> AdviceReport:
    """Advise on a log file, the server at a URL (watched for `span_s` seconds) or a run's output path.

    `card` is the GPU's name where the source lacks it; `python` is the interpreter that has SGLang. Raises
    InputError or OutputError where the source is none of these, InputError for an unknown card.
    """
    if card and architecture_of(card) is None:
        raise InputError(f"--card {card}: not known here; known are {KNOWN_CARDS}")
    situation = _read(source, span_s)
    situation.facts.card = card or situation.facts.card
    situation.facts.config = _config(situation.facts)
    names_flags = any(found.args for found in apply_all(situation, Flags()))
    flags = _flags(situation, python, ask=names_flags)
    return AdviceReport(hidden(source), situation, apply_all(situation, flags), flags)


def advise_run(run: Path) -> AdviceReport:
    """Advise on a run, without asking an installed SGLang. Raises OutputError where the path holds no run."""
    situation = read_run(run)
    situation.facts.config = _config(situation.facts)
    flags = of_arguments(situation.facts.version, situation.facts.arguments)
    return AdviceReport(str(run), situation, apply_all(situation, flags), flags)


def _read(source: str, span_s: float) -> Situation:
    if source.startswith(("http://", "https://")):
        return watch_server(source, span_s)
    if store_address(source):
        return read_run(look_at_run(source))
    path = Path(source).expanduser()
    if path.is_dir():
        return read_run(path)
    if not path.exists():
        raise InputError(
            f"{source}: no such file or directory",
            hint="give a log, a run's output path or an http:// URL",
        )
    log = LogReader().read(path)
    return Situation(log.series, log.series, log.facts)


def _config(facts: Facts) -> dict[str, Any]:
    """Return the model's config.json, where the server's arguments name a model that is on this machine."""
    model, revision = facts.arguments.get("model_path"), facts.arguments.get("revision")
    return (
        read_config(model, revision if isinstance(revision, str) else None) if isinstance(model, str) else {}
    )


def _flags(situation: Situation, python: str | None, *, ask: bool) -> Flags:
    """Return the server's flags; with `ask`, those of the installed SGLang where versions may agree."""
    facts = situation.facts
    if facts.arguments:
        return of_arguments(facts.version, facts.arguments)
    here = installed(python) if ask else Flags()
    return here if facts.version in {None, here.version} else Flags(facts.version)
