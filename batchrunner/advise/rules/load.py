"""Rules on queue, token usage, batch size and retractions. Each is pure; the table is in `care.rules`."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from batchrunner.advise.situation import Finding, command_line
from batchrunner.engines.recovery.safer_args import MORE_CONSERVATIVE, MOST_CONSERVATIVE, as_flag, in_effect
from batchrunner.job.queue_band import QueueBand

if TYPE_CHECKING:
    from batchrunner.advise.advice import Certainty
    from batchrunner.advise.situation import ClientActivity, Situation
    from batchrunner.engines.flags import Flags

LESS_CONSERVATIVE = 0.3
"""From the guides."""
FEWER = 0.9
"""Of what runs, where it is too much for the pool: a step."""
TOKENIZERS = 4
"""`--tokenizer-worker-num` where one front process is not enough."""
MOST_RUNNING = 4096
"""SGLang's own largest default of `max_running_requests`."""


def conservativeness(s: Situation) -> float:
    """Return the conservativeness that schedulers have: under DP attention it is not the flag's."""
    told = s.facts.number("schedule_conservativeness")
    return 1.0 if told is None else told


def queue_empty(s: Situation, flags: Flags) -> Finding | None:
    """Find what in the client is too slow."""
    if not s.load.frequent("empty"):
        return None
    band = QueueBand(int(s.limits.queue_low), int(s.limits.queue_deep)).scaled(s.max_running)
    keep = f"keep {band.low}-{band.high} requests waiting"
    if s.client is None:
        change, why = f"send requests faster, more at once: {keep}", "the client is the bottleneck"
    else:
        change, why = _what_in_it(s.client, keep)
    args = {} if change else _more_workers(s, flags)
    left = "while rows were left to send: " if s.client else ""
    return Finding(
        f"#queue-req is 0 {s.often('empty')}: {left}{why}",
        args,
        change or command_line(args) or "`engine: {kind: gateway}`: servers with a front process each",
        s.evidence("empty"),
        "high" if s.client else "medium",
    )


def _more_workers(s: Situation, flags: Flags) -> dict[str, Any]:
    """Give the server's front process workers, if there is one, without them, and the version has them."""
    has_front = s.client is not None and s.client.kind != "inprocess"
    few = (s.facts.number("tokenizer_worker_num") or 1) < TOKENIZERS
    return flags.setting("tokenizer-worker-num", TOKENIZERS) if has_front and few else {}


def _what_in_it(client: ClientActivity, keep: str) -> tuple[str, str]:
    """Return what to change in our own client, and why; no change where it is the server that is slow."""
    if 2 * client.on_way > client.dry:
        remedy = "`tokenize: client`" if client.tokenize == "server" else ""
        return remedy, "requests are under way to the scheduler (the server's front process, or the network)"
    if 2 * client.at_window > client.dry:
        if client.window != "auto":
            return f"`window: auto` instead of {client.window}: {keep}", "the job's window is full"
        if client.connections and client.widest >= 0.9 * client.connections:
            return "raise `ulimit -n`", f"all {client.connections} connections that it allows are in use"
        return "`queue`: a higher band in the job", "the window is full, and its band is too low"
    if 2 * client.resting > client.dry:
        return (
            "find out why the engine refuses rows (report.json: failures, retries)",
            "rows wait for a retry",
        )
    return (
        "give the runner more of the machine: cores for rendering and tokens, input on a faster disk",
        "the window is not full: rows are not read, rendered or made tokens of fast enough",
    )


def queue_deep(s: Situation, _: Flags) -> Finding | None:
    """Find that more waits than the scheduler should look at in each pass."""
    if not s.load.frequent("deep"):
        return None
    how = "send requests evenly, not in bursts" if s.load.frequent("empty") else "send fewer requests at once"
    how = "`window: auto` and `queue: [100, 2000]` in the job" if s.client else how
    return Finding(
        f"#queue-req is above {s.limits.queue_deep:.0f} {s.often('deep')}",
        change=f"{how}: keep {s.limits.queue_low:.0f}-{s.limits.queue_deep:.0f} waiting",
        evidence=s.evidence("deep"),
    )


def conservative(s: Situation, flags: Flags) -> Finding | None:
    """Find that SGLang reserves memory for outputs that do not come."""
    if not s.load.frequent("conservative") or s.retracts_often or s.fills_up:
        return None
    if s.client and s.client.ignore_eos:  # outputs are as long as they may be, and SGLang reserves just that
        return None
    share = s.client.output_share if s.client else None
    args = {}
    if conservativeness(s) > LESS_CONSERVATIVE:
        name = "schedule-conservativeness"
        args = flags.setting(name, as_flag(s.facts, name, LESS_CONSERVATIVE))
    elif share is not None and share >= s.limits.short_output:
        return None
    cause, tighter, certainty = _cause(share, s.client, s.limits.short_output)
    return Finding(
        f"token usage is below {s.limits.usage_good:g} (median {s.load.median('usage'):.2f}) with requests "
        f"waiting {s.often('conservative')}: SGLang takes in too few; {cause}",
        args,
        ", or ".join(filter(None, (command_line(args), tighter))),
        {**s.evidence("conservative"), "output_share_of_max_new_tokens": share},
        certainty,
    )


def _cause(share: float | None, client: ClientActivity | None, short: float) -> tuple[str, str, Certainty]:
    """Return why too few are taken in, what the job can do, and how sure that is."""
    tighter = "a max_new_tokens nearer to real outputs"
    if share is None:
        return "max_new_tokens may be far above real outputs", tighter, "medium"
    cause = f"outputs are {share:.0%} of max_new_tokens on average"
    if share >= short:
        return f"{cause}, which is not why", "", "low"
    longest = client.longest_output if client else None
    known = f" (99% of the outputs have at most {longest} tokens)" if longest else ""
    return cause, tighter + known, "high"


def running_capped(s: Situation, flags: Flags) -> Finding | None:
    """Find that `max_running_requests` limits while the KV pool has room."""
    most = s.max_running or 0
    if not s.load.frequent("capped") or s.fills_up or not 0 < most < MOST_RUNNING:
        return None
    if s.log.median("usage") >= s.limits.usage_good:  # of a hybrid model /v1/loads leaves the states out
        return None
    room = s.limits.usage_good / max(s.load.median("usage"), 0.05)
    target = min(MOST_RUNNING, max(most + 1, math.floor(most * room / 8) * 8))
    return Finding(
        f"as many requests run as may ({most}), others wait, and token usage is {s.load.median('usage'):.2f} "
        f"{s.often('capped')}: the cap limits, not memory",
        flags.setting("max-running-requests", as_flag(s.facts, "max-running-requests", target)),
        evidence={**s.evidence("capped"), "max_running_requests": most},
    )


def retractions(s: Situation, flags: Flags) -> Finding | None:
    """Find that the pool runs over; about once a minute is fine."""
    if not s.retractions:
        return None
    rate = s.retractions_per_min
    seen = f"{s.retractions} retractions, {rate:.1f} a minute, in {s.load.over()}"
    evidence = {**s.evidence("full"), "retractions": s.retractions, "retractions_per_min": round(rate, 2)}
    if rate <= s.limits.retractions_per_min:
        return Finding(f"{seen}: up to about one a minute is fine", evidence=evidence, fine=True)
    if not s.load.enough:  # the reading tells how many there were
        return None
    name = "schedule-conservativeness"
    now, most = in_effect(s.facts, name) or 1.0, as_flag(s.facts, name, MOST_CONSERVATIVE)
    target = round(min(most, max(MORE_CONSERVATIVE, MORE_CONSERVATIVE * now)), 2)
    sign = f"{seen}, with token usage at {s.load.median('usage'):.2f}: requests lose place and work"
    share, again = s.log.recomputed_share, s.log.prefills.retracted_tokens
    if share is not None:
        cost = f"{again:,} tokens are computed again, {share:.0%} of those generated"
        evidence |= {"tokens_computed_again": again, "recomputed_share": round(share, 4)}
        if not s.log.retractions_cost:
            fine = f"{seen}: {cost}, which costs less than fewer at once would"
            return Finding(fine, evidence=evidence, fine=True)
        sign += f": {cost}"
    if target > now:
        return Finding(sign, flags.setting(name, target), evidence=evidence)
    fewer = as_flag(s.facts, "max-running-requests", int(FEWER * s.load.median("running")))
    args = flags.setting("max-running-requests", fewer) if fewer else {}
    return Finding(
        f"{sign}, and --{name} {now:g} reserves all of max_new_tokens already",
        args,
        ", or ".join(filter(None, (command_line(args), "more memory for the KV pool"))),
        evidence,
    )


def latency_high(s: Situation, flags: Flags) -> Finding | None:
    """Find that single answers are slow; no run of ours minds."""
    if s.client is not None or s.facts.on_cpu or not s.load.frequent("slow"):
        return None
    running = s.load.median("running")
    half = as_flag(s.facts, "max-running-requests", max(1, int(running) // 2))
    args = flags.setting("max-running-requests", half)
    return Finding(
        f"more than {s.limits.latency_s:g} s pass between two tokens of a request {s.often('slow')}, "
        f"at {running:.0f} running",
        args,
        f"{command_line(args)}, only if somebody waits for single answers" if args else "",
        s.evidence("slow"),
    )
