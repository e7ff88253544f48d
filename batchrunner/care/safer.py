"""A death → the arguments that ask for less of what was wanting, by the tuning guides. Pure.

The guides' order: out of memory in prefill, smaller chunks; in decode, fewer running; at graph capture,
smaller graphs; anywhere, a smaller share of the card for the pool, which is also what is left when a step has
no smaller one. On a CPU the pool is what a server's memory grows with, and its size is a number of tokens.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from batchrunner.care.death import NAMES

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from batchrunner.care.death import Death, Kind
    from batchrunner.care.effective import Effective

CHUNKS = (4096, 2048)
"""`--chunked-prefill-size`, tokens: the guides' two steps."""
FRACTIONS = (0.8, 0.7, 0.6)
"""`--mem-fraction-static`: the guides' two steps, and one more for cards that others use too."""
LARGEST_FRACTION, FRACTION_STEP = 0.95, 0.05
"""When the weights leave no room for a pool, more of the card is given to both, up to this much."""
LEAST_GRAPH = 16
"""The largest batch of a graph, at least: what SGLang itself proposes when a capture fails."""
LEAST_RUNNING = 4
FREQUENT = 1.0
"""Retractions a minute: the guides call more than about one frequent."""
CALM = 1.3
"""`--schedule-conservativeness` for frequent retractions, by the guides."""


@dataclass(frozen=True, slots=True)
class Change:
    """Arguments for the next start."""

    args: Mapping[str, float]
    """As `engine.args` has them."""
    why: str
    """In a few words."""
    before: Mapping[str, float | None]
    """What was in effect; None where that is not known."""

    def along_with(self, other: Change) -> Change:
        """Return both, for the reason of this one."""
        return Change({**other.args, **self.args}, self.why, {**other.before, **self.before})

    def __str__(self) -> str:
        """Return what a person reads: `chunked-prefill-size 8192 -> 4096`, or the new value alone."""
        known = {name: f"{old} -> " for name, old in self.before.items() if old is not None}
        return ", ".join(f"{name} {known.get(name, '')}{new}" for name, new in self.args.items())


Step = tuple[str, float | None, float]
"""A flag by its newest name, its value, and a safer one."""


def safer(death: Death, now: Effective, spelling: Callable[[str], str | None]) -> Change | None:
    """Return what is to be changed after a death; None where less of nothing would help, or nothing is left.

    `spelling` says how the installed version calls a flag, or that it has none.
    """
    for rule in _RULES.get(death.kind, ()):
        step = rule(now, death.why)
        name = spelling(step[0]) if step else None
        if step and name:
            return Change({name: step[2]}, NAMES[death.kind], {name: step[1]})
    return None


def calmer(now: Effective) -> Change | None:
    """Return what is to be changed at a next start because rows were retracted too often.

    Never a reason for a restart of its own: that costs the load time and the whole cache, which is more
    than retractions cost; one that comes anyway, and the next run, take the change along.
    """
    often = (now.retractions_a_minute or 0.0) > FREQUENT
    if not often or (now.conservativeness or 1.0) >= CALM:
        return None
    name = "schedule-conservativeness"
    why = f"{now.retractions_a_minute:.1f} retractions a minute"
    return Change({name: CALM}, why, {name: now.conservativeness})


def _smaller_chunks(now: Effective, _why: str) -> Step | None:
    old = now.chunked_prefill
    new = next((size for size in CHUNKS if old is None or old <= 0 or old > size), None)
    return None if new is None else ("chunked-prefill-size", old, new)


def _fewer_running(now: Effective, _why: str) -> Step | None:
    most = min((n for n in (now.max_running, now.running) if n), default=0)
    return ("max-running-requests", now.max_running, most // 2) if most // 2 >= LEAST_RUNNING else None


def _smaller_graphs(now: Effective, _why: str) -> Step | None:
    old = now.graph_batch or 0
    return ("cuda-graph-max-bs", old, max(LEAST_GRAPH, old // 4)) if old > LEAST_GRAPH else None


def _smaller_pool(now: Effective, _why: str) -> Step | None:
    if now.cpu:
        new = (now.max_tokens or 0) // 2
        return ("max-total-tokens", now.max_tokens, new) if new >= (now.context or 1) else None
    old = now.mem_fraction
    new_share = next((share for share in FRACTIONS if old is None or old > share), None)
    return None if new_share is None else ("mem-fraction-static", old, new_share)


def _larger_share(now: Effective, why: str) -> Step | None:
    """Give weights and pool more of the card: what SGLang says is the least, or a step."""
    old = now.mem_fraction
    if old is None:
        return None
    told = re.search(r"above (0\.\d+)", why)
    new = round(max(old + FRACTION_STEP, float(told[1]) + FRACTION_STEP if told else 0.0), 3)
    return ("mem-fraction-static", old, new) if new <= LARGEST_FRACTION else None


def _smaller_pool_on_cpu(now: Effective, why: str) -> Step | None:
    return _smaller_pool(now, why) if now.cpu else None  # a GPU's pool is not in the machine's memory


def _fewer_running_on_cpu(now: Effective, why: str) -> Step | None:
    return _fewer_running(now, why) if now.cpu else None


_RULES: Mapping[Kind, tuple[Callable[[Effective, str], Step | None], ...]] = {
    "oom_prefill": (_smaller_chunks, _smaller_pool),
    "oom_decode": (_fewer_running, _smaller_pool),
    "oom_requests": (_fewer_running,),
    "oom_graph": (_smaller_graphs, _smaller_pool),
    "oom_general": (_smaller_pool, _fewer_running),
    "no_pool": (_larger_share,),
    "killed_by_kernel": (_smaller_pool_on_cpu, _fewer_running_on_cpu),
}
