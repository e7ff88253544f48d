"""The last line of a run: the one change that would gain most, as a person types it."""

import logging
import shlex
from pathlib import Path
from typing import Any

from batchrunner.advise.advise import advise_run
from batchrunner.advise.rules.rule import Advice
from batchrunner.advise.rules.table import BY_NAME

LAUNCHED = frozenset({"server", "gateway"})
"""Kinds of engines whose flags are in the job."""

log = logging.getLogger(__name__)


def closing_line(run: Path) -> str | None:
    """Return the change that would gain most in the next run; None where nothing is wrong.

    `run` is the run's output path. A failure is logged and ends nothing: the results are written already.
    """
    try:
        report = advise_run(run)
    except Exception as failure:  # noqa: BLE001 - a log may hold anything
        log.debug("no advice: %s: %s", type(failure).__name__, failure)
        return None
    found = [advice for advice in report.advice if advice.change and not BY_NAME[advice.rule].option]
    if not found:
        return None
    client = report.situation.client
    launched = client is not None and client.kind in LAUNCHED
    change = ", ".join(filter(None, [_typed(found[0], launched=launched), found[0].gain_in_words]))
    return f"to gain more: {change}: {found[0].sign} (batchrun advise {shlex.quote(str(run))})"


def _typed(advice: Advice, *, launched: bool) -> str:
    """Return the change as options of `batchrun`, or as flags of a server that somebody else starts."""
    if advice.args and not launched:
        return f"start the server {'' if advice.change.startswith('without ') else 'with '}{advice.change}"
    settings = [f"engine.args.{name}={_value(value)}" for name, value in advice.args.items()]
    if launched:
        settings += [f'engine.env.{name}="{value}"' for name, value in advice.env.items()]  # YAML: a text
    if not settings or None in advice.args.values():
        return advice.change
    return " ".join(f"--set {shlex.quote(setting)}" for setting in settings)


def _value(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
