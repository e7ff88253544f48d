"""The settings that a server really has, and how often it retracted, out of its log. Pure.

What was asked for is not what a server does: most limits are chosen by SGLang, from the card and the model.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

LEAST_SPAN_S = 300.0
"""A rate of retractions is told of a log's end that is at least so long."""
_TELLS = ("server_args=", "max_total_num_tokens=")
_NAME = re.compile(r"\b([a-z][a-z0-9_]+)(?:': |=)")
_GRAPHS = re.compile(r"'decode': \{[^}]*'max_bs': (\d+)|\bcuda_graph_max_bs'?[:=] ?(\d+)")
_CAPTURED = re.compile(r"Capture cuda graph bs \[[\d, ]*?(\d+)\]")
_RUNNING = re.compile(r"Decode batch\b.*#running-req: (\d+)")
_RETRACTION = re.compile(r"#retracted_reqs:? ?\d")
_OTHER_RANK = re.compile(r"^\[[^\]]*\bTP[1-9]")  # ranks of one scheduler all say the same
_TIME = re.compile(r"^\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)")


@dataclass(frozen=True, slots=True)
class Effective:
    """What was in effect in one life of a server; None for what its log did not tell."""

    cpu: bool = False
    chunked_prefill: int | None = None
    """`--chunked-prefill-size`, tokens; ≤ 0 is switched off."""
    max_running: int | None = None
    """`--max-running-requests`."""
    running: int | None = None
    """The most that ran at once towards the end."""
    max_tokens: int | None = None
    """The KV pool, tokens."""
    context: int | None = None
    """The longest row, tokens."""
    mem_fraction: float | None = None
    """`--mem-fraction-static`."""
    graph_batch: int | None = None
    """The largest batch of a decode graph."""
    conservativeness: float | None = None
    """`--schedule-conservativeness`."""
    retractions_a_minute: float | None = None
    """Towards the end; None where that is shorter than LEAST_SPAN_S."""


def effective(lines: Sequence[str], args: Mapping[str, Any], *, cpu: bool) -> Effective:
    """Read the beginning and the end of a log; `args` are those that the server was started with."""
    told = " ".join(line for line in lines if any(mark in line for mark in _TELLS))

    def number(name: str) -> float | None:
        found = re.findall(rf"\b{name}(?:': |=)(-?[\d.]+\d|-?\d)", told)
        return float(found[-1]) if found else _number(args.get(name.replace("_", "-")))

    def whole(*names: str) -> int | None:
        return next((int(value) for name in names if (value := number(name)) is not None), None)

    running = [int(found[1]) for line in lines if (found := _RUNNING.search(line))]
    return Effective(
        cpu=cpu,
        chunked_prefill=whole("chunked_prefill_size"),
        max_running=whole("max_running_requests"),
        running=max(running, default=None),
        max_tokens=whole("max_total_num_tokens", "max_total_tokens"),
        context=whole("context_len", "context_length"),
        mem_fraction=number("mem_fraction_static"),
        graph_batch=_graph_batch(lines, told),
        conservativeness=number("schedule_conservativeness"),
        retractions_a_minute=_retractions_a_minute(lines),
    )


def arguments_told(lines: Iterable[str]) -> frozenset[str]:
    """Return the names of all arguments of a server, as its log's `server_args=` has them; empty without."""
    told = next((line for line in lines if "server_args=" in line), "")
    return frozenset(_NAME.findall(told.partition("server_args=")[2]))


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _graph_batch(lines: Iterable[str], told: str) -> int | None:
    """Return the largest batch of a decode graph: what was captured counts, else what was to be."""
    captured = [int(found[1]) for line in lines if (found := _CAPTURED.search(line))]
    planned = [int(new or old) for new, old in _GRAPHS.findall(told)]
    return next(iter([*captured[-1:], *planned[-1:]]), None)


def _retractions_a_minute(lines: Sequence[str]) -> float | None:
    """Count the lines of retractions over the time that the log's end spans."""
    times = [datetime.fromisoformat(found[1]) for line in lines if (found := _TIME.match(line))]
    span_s = (times[-1] - times[0]).total_seconds() if times else 0.0
    if span_s < LEAST_SPAN_S:
        return None
    count = sum(bool(_RETRACTION.search(line)) and not _OTHER_RANK.match(line) for line in lines)
    return 60 * count / span_s
