"""`batchrun advise`: reads a server's log or a run, or watches a server, and advises on its flags."""

from pathlib import Path

from batchrunner.core.errors import InputError, hidden
from batchrunner.engines.http.watch import watch_server
from batchrunner.output.addresses import store_address
from batchrunner.output.run_dir import look_at_run
from batchrunner.sglang.flags import Flags, installed, of_arguments
from batchrunner.sglang.logs.reader import KNOWN_CARDS, LogReader, architecture_of
from batchrunner.tuning.advise import AdviceReport, config_of
from batchrunner.tuning.from_run import read_run
from batchrunner.tuning.rules import apply_all
from batchrunner.tuning.situation import Situation

WATCH_S = 20.0
"""Default time in seconds for which a running server is watched."""


def advise(
    source: str,
    *,
    span_s: float = WATCH_S,
    card: str | None = None,
    python: str | None = None,
) -> AdviceReport:
    """Advise on a log file, the server at a URL (watched for `span_s` seconds) or a run's output path.

    `card` is the GPU's name if the source lacks it; `python` is the interpreter that has SGLang. Raises
    InputError or OutputError if the source is none of these, and InputError for an unknown card.
    """
    if card and architecture_of(card) is None:
        raise InputError(f"--card {card}: not a known GPU; known are {KNOWN_CARDS}")
    situation = _read(source, span_s)
    situation.facts.card = card or situation.facts.card
    situation.facts.config = config_of(situation.facts)
    # Asking an interpreter for SGLang's flags takes seconds, so this is done only if the advice names flags.
    names_flags = any(advice.args for advice in apply_all(situation, Flags()))
    flags = _flags(situation, python, ask=names_flags)
    return AdviceReport(hidden(source), situation, apply_all(situation, flags), flags)


def _read(source: str, span_s: float) -> Situation:
    """Return the load and the setup of a server, from its URL, a run's output path or a log file."""
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
            hint="give an SGLang log, a run's output.path or the http:// URL of a server",
        )
    log = LogReader().read(path)
    return Situation(log.series, log.series, log.facts)


def _flags(situation: Situation, python: str | None, *, ask: bool) -> Flags:
    """Return the flags that the server's SGLang version has; empty if unknown.

    With `ask`, and if the source does not name them, the interpreter `python` is asked for the flags of its
    SGLang.
    """
    facts = situation.facts
    if facts.arguments:
        return of_arguments(facts.version, facts.arguments)
    if ask:
        installed_flags = installed(python)
        if facts.version in {None, installed_flags.version}:
            return installed_flags
    return Flags(facts.version)
