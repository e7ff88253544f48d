"""Where memory ran out → arguments that need less of it, by SGLang's tuning guides. Pure.

In prefill: smaller chunks. In decode: fewer running requests. At graph capture: smaller graphs. Anywhere, and
when such a step has no smaller value left: a smaller fraction of the card for the KV pool. Where the place is
not known and that does not help: smaller chunks, then fewer running requests. On a CPU the server's memory
grows with the pool, whose size is a number of tokens. Advice proposes these arguments, and a launched engine
that died gets them.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

from batchrunner.engines.flags import Flags
from batchrunner.engines.logs.facts import Facts, prefill_graph_off
from batchrunner.engines.logs.lines import Phase
from batchrunner.engines.recovery.diagnosis import Death, Kind

CHUNKS = (4096, 2048)
"""`--chunked-prefill-size` in tokens: the guides' two steps."""
FRACTIONS = (0.8, 0.7, 0.6)
"""`--mem-fraction-static`: the guides' two steps, and one more for a card that other programs use too."""
HIGHEST_FRACTION, FRACTION_STEP = 0.95, 0.05
"""If the weights leave no room for a pool, `--mem-fraction-static` rises by the step, up to the highest."""
GRAPH, LEAST_GRAPH = 64, 16
"""Largest batch of a graph where it is not known, and the least that is tried: SGLang itself proposes 16."""
LEAST_RUNNING = 4
"""Least `--max-running-requests` that is tried."""
CONSERVATIVENESS = "schedule-conservativeness"
LESS_CONSERVATIVE, NORMAL = 0.3, 1.0
"""`--schedule-conservativeness` by the guides, where SGLang admits too few requests, and its default."""
MORE_CONSERVATIVE = 1.3
"""`--schedule-conservativeness` against frequent retractions."""
MOST_CONSERVATIVE = 1 / 0.7
"""`--schedule-conservativeness` from which a scheduler reserves all of `max_new_tokens`: the fraction that it
reserves is min(0.7 x conservativeness, 1)."""
LEAST_POOL = 0.05
"""Fraction of a card that a useful KV pool needs at least."""
DP_ATTENTION_CONSERVATIVENESS = 0.3
"""Factor by which SGLang multiplies `--schedule-conservativeness` with DP attention (parallel_hook.py)."""
_DIVIDED = {"chunked-prefill-size", "max-running-requests"}
"""Flags whose values DP attention divides by the number of its ranks, each of which logs its own part."""
_AT_READY = {
    "chunked-prefill-size": "chunked_prefill_size",
    "max-running-requests": "max_running_requests",
    "max-total-tokens": "max_total_num_tokens",
    "context-length": "context_len",
}
"""Flags whose value in effect the scheduler logs before it takes requests, and its name there."""

Step = Callable[[Facts, Flags, Death], dict[str, Any]]


def safer(death: Death, facts: Facts, flags: Flags) -> dict[str, Any]:
    """Return the arguments to change, as `engine.args` has them; empty where none would help."""
    steps = _STEPS.get(death.kind, ())
    if death.kind == "killed" and not facts.on_cpu:  # a GPU's pool is not in the machine's memory
        return {}
    return next((args for step in steps if (args := step(facts, flags, death))), {})


def in_effect(facts: Facts, flag: str) -> float | None:
    """Return a flag's value in effect, as it would be given; None where it is not known."""
    if flag.startswith("cuda-graph-max-bs"):
        return facts.graph_max_bs
    at_ready = getattr(facts.ready, _AT_READY.get(flag, ""), None)
    value = facts.number(flag.replace("-", "_")) if at_ready is None else at_ready
    if value is None or (at_ready is None and flag == "max-running-requests"):  # logged as it was given
        return None if value is None else int(value)
    value = as_flag(facts, flag, value)
    return int(value) if value == int(value) else value


def as_flag(facts: Facts, flag: str, value: float) -> float:
    """Return the flag's value with which one scheduler gets `value`."""
    if facts.attn_dp > 1 and flag in _DIVIDED:
        return value * facts.attn_dp
    if facts.attn_dp > 1 and flag == "schedule-conservativeness":
        return round(value / DP_ATTENTION_CONSERVATIVENESS, 2)
    return value


def least_fraction(facts: Facts) -> float:
    """Return the `--mem-fraction-static` that the weights and a useful pool take; 0 where it is not known."""
    weights, card = facts.weights_gb, facts.card_gb
    return weights / card + LEAST_POOL if weights and card else 0.0


def _smaller_chunks(facts: Facts, flags: Flags, _: Death) -> dict[str, Any]:
    now = in_effect(facts, "chunked-prefill-size")
    lower = next((chunk for chunk in CHUNKS if now is None or now <= 0 or chunk < now), None)
    return flags.setting("chunked-prefill-size", lower) if lower else {}


def _fewer_running(facts: Facts, flags: Flags, death: Death) -> dict[str, Any]:
    most = int(in_effect(facts, "max-running-requests") or 0)
    ran = int(as_flag(facts, "max-running-requests", death.running))
    lower = 3 * min(ran or most, most or ran) // 4
    return flags.setting("max-running-requests", lower) if lower >= LEAST_RUNNING else {}


def _smaller_graphs(facts: Facts, flags: Flags, death: Death) -> dict[str, Any]:
    """Make the graphs smaller, and the pool too: a capture that fails again costs minutes."""
    captured = facts.graph_max_bs or 2 * GRAPH
    lower = max(LEAST_GRAPH, captured // 2)
    off = facts.graph_disabled or lower >= captured
    smaller = {} if off else flags.setting("cuda-graph-max-bs-decode", lower)
    return smaller | _smaller_pool(facts, flags, death)  # prefill may have graphs too


def _no_graphs(facts: Facts, flags: Flags, _: Death) -> dict[str, Any]:
    if facts.graph_disabled:
        return {}
    off = flags.setting("cuda-graph-backend-decode", "disabled")
    return off or flags.setting("disable-cuda-graph", value=True)


def _no_prefill_graphs(facts: Facts, flags: Flags, _: Death) -> dict[str, Any]:
    if prefill_graph_off(facts.arguments):
        return {}
    off = flags.setting("cuda-graph-backend-prefill", "disabled")
    return off or flags.setting("disable-piecewise-cuda-graph", value=True)


def _smaller_pool(facts: Facts, flags: Flags, _: Death) -> dict[str, Any]:
    if facts.on_cpu:
        lower = int(in_effect(facts, "max-total-tokens") or 0) // 2
        least = in_effect(facts, "context-length") or 1
        return flags.setting("max-total-tokens", lower) if lower >= least else {}
    now, least = facts.number("mem_fraction_static"), least_fraction(facts)
    share = next((share for share in FRACTIONS if now is None or share < now), 0.0)
    return flags.setting("mem-fraction-static", share) if share > least else {}


def _larger_share(facts: Facts, flags: Flags, death: Death) -> dict[str, Any]:
    """Raise the fraction of the card for weights and pool, above the least that SGLang names."""
    now = facts.number("mem_fraction_static") or FRACTIONS[0]
    least = re.search(r"above (0\.\d+)", death.why)
    share = round(max(now, float(least[1]) if least else 0.0) + FRACTION_STEP, 3)
    return flags.setting("mem-fraction-static", share) if share <= HIGHEST_FRACTION else {}


_STEPS: Mapping[Phase | Kind, tuple[Step, ...]] = {
    "prefill": (_smaller_chunks, _smaller_pool),
    "decode": (_fewer_running, _smaller_pool),
    "requests": (_fewer_running,),
    "graph": (_smaller_graphs, _no_graphs),
    "prefill-graph": (_smaller_pool, _no_prefill_graphs),
    "pool": (_larger_share,),
    "general": (_smaller_pool, _smaller_chunks, _fewer_running),
    "killed": (_smaller_pool, _fewer_running),
}
