"""Rules on the KV pool's pages and on the prefix cache in it. Each is pure."""

from batchrunner.advise.rules import gains
from batchrunner.advise.rules.rule import Finding
from batchrunner.advise.situation import Situation
from batchrunner.engines.flags import Flags

KEEPS_ORDER = frozenset({"fcfs", "lpm"})
"""Values of `--schedule-policy` that take requests as they come, or by the prefix that the cache holds."""
OUT_OF_REACH = 0.1
"""Share of the prompt tokens that a cache could have served and did not, from which its order is bad."""
PAGED = ("mla", "mha", "dsa", "nsa")
"""Parts of the names of attention backends that need pages of several tokens."""
LOST_IN_PAGES = 0.15
"""Share of a request's place in the pool that its last page leaves empty, from which pages are too large."""


def cache_off(s: Situation, flags: Flags) -> Finding | None:
    """Find that the prefix cache is switched off although prompts share prefixes."""
    shared = s.client.possible_share if s.client else None
    if not s.facts.arguments.get("disable_radix_cache") or shared is None or shared < s.limits.shared:
        return None
    if "disable-radix-cache" not in flags.names:
        return None
    return Finding(
        f"the prefix cache is off, and {shared:.0%} of the prompt tokens could come from it",
        {"disable-radix-cache": None},
        evidence={"possible_share": round(shared, 4), "computed_tokens": s.log.prefills.new_tokens},
        gain=gains.fewer_tokens(s.pass_times, shared),
        fewer=gains.fewer_tokens(s.pass_counts, shared),
    )


def order_of_server(s: Situation, flags: Flags) -> Finding | None:
    """Find that the server takes rows in an order of its own, which finds fewer prefixes in the cache."""
    policy, prefills = s.facts.arguments.get("schedule_policy"), s.log.prefills
    shared = s.client.possible_share if s.client else None
    if policy is None or policy in KEEPS_ORDER or shared is None:
        return None
    cached = prefills.cached_share
    if shared - cached < OUT_OF_REACH or s.facts.arguments.get("disable_radix_cache"):
        return None
    return Finding(
        f"{cached:.0%} of the prompt tokens were in the cache, where {shared:.0%} could be: "
        f"--schedule-policy {policy} takes the rows in another order than they are sent in",
        flags.setting("schedule-policy", "fcfs"),
        evidence={"cached_share": round(cached, 4), "possible_share": round(shared, 4), "policy": policy},
        gain=gains.fewer_tokens(s.pass_times, 1 - (1 - shared) / (1 - cached)),
    )


def pages_large(s: Situation, flags: Flags) -> Finding | None:
    """Find that requests are short beside a page: each leaves a part of its last page empty."""
    page, prefills = int(s.facts.number("page_size") or 1), s.log.prefills
    backend = str(s.facts.arguments.get("attention_backend"))
    if page < 2 or any(name in backend for name in PAGED) or not prefills.prompts:  # noqa: PLR2004
        return None
    if not s.short_of_pool:
        return None
    tokens = prefills.mean_prompt + (s.client.mean_output or 0.0 if s.client else 0.0)
    lost = page / 2 / (tokens + page / 2)
    if lost < LOST_IN_PAGES:
        return None
    running = s.load.median("running")
    then = min(s.max_running or running, running / (1 - lost))
    return Finding(
        f"requests of {tokens:.0f} tokens lie in pages of {page}: a last page is half empty, {lost:.0%} of "
        f"the KV pool, and {running:.0f} of at most {s.max_running} requests run",
        flags.setting("page-size", 1),
        evidence={
            **s.evidence("conservative", "kv_bound"),
            "page_tokens": page,
            "lost_share": round(lost, 4),
        },
        gain=gains.more_running(s.pass_times, running, then),
        fewer=gains.more_running(s.pass_counts, running, then),
    )
