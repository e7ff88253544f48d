"""Rules on forward passes: prefill chunks, long prompts, CUDA graphs. Each is pure."""

import math
from typing import Any

from batchrunner.advise.rules import gains
from batchrunner.advise.rules.load import conservativeness
from batchrunner.advise.rules.rule import Finding
from batchrunner.advise.situation import CHUNK_GB_A_TOKEN, Situation, memory_band
from batchrunner.engines.flags import Flags
from batchrunner.engines.logs.facts import prefill_graph_off
from batchrunner.engines.logs.pass_times import PassTimes
from batchrunner.engines.recovery.safer_args import LESS_CONSERVATIVE, in_effect, least_fraction

LARGEST_CHUNK = 16_384
"""Largest default of SGLang's `--chunked-prefill-size`, in tokens."""
GRAPH_GB_A_REQUEST = 2 / 1024
"""Memory of a decode graph, in GB a request (SGLang's memory_hook)."""
USUAL_CAPTURED = 160
"""Largest batch with a graph, in requests, where the log lacks it; the guides: "typically 160-256"."""
MOST_CHUNKS = 8
"""Most times by which one advice makes a chunk larger."""
WORTH_DOUBLING = 1.03
"""Further gain for which a chunk is doubled once more."""
SURELY_LARGE = 4096
"""Chunk in tokens from which a pass's fixed cost is small on any card: without an estimate it is left."""
SMALL_PASS = 0.25
"""Share of a chunk up to which prefill passes are small."""
WORTH_FEWER = 1.5
"""Factor by which fewer decode steps between prefill passes have to be the best."""
IDLE = 0.1
"""Half of those steps, as a share of an output: from here on the empty places matter."""
FEWER_PASSES = 1.25
"""Least factor by which passes have to become fewer, where only their number is known and not their times."""
ROOM = 2
"""A mixed chunk has to have room for this many times the running requests: the server fails without any."""
LARGE_TP = 4
"""Tensor parallelism from which larger graphs pay (the guides)."""


def running_low(s: Situation, flags: Flags) -> Finding | None:
    """Find that prefill admits requests no faster than others end."""
    if not s.load.frequent("far_below") or s.fills_up or conservativeness(s) > LESS_CONSERVATIVE:
        return None
    prefills = s.log.prefills
    if prefills.passes < s.limits.samples or prefills.filled < s.limits.frequent * prefills.passes:
        return None
    return Finding(
        f"{s.load.median('running'):.0f} of at most {s.max_running} requests run, others wait and "
        f"memory is left {s.often('far_below')}: they end as fast as full prefill passes admit new ones",
        larger_chunk(s, flags),
        evidence=s.evidence("far_below"),
    )


def prefill_full(s: Situation, flags: Flags) -> Finding | None:
    """Find that full prefill passes are many and short: their fixed cost is paid too often."""
    prefills = s.log.prefills
    share = prefills.filled_waiting / max(1, prefills.passes)
    if prefills.passes < s.limits.samples or share < s.limits.frequent:
        return None
    if s.facts.passes_limited_by:
        return _pass_limit(s, flags, s.facts.passes_limited_by, share)
    chunk = int(in_effect(s.facts, "chunked-prefill-size") or 0)
    times = s.pass_times
    gain = gains.larger_chunk(times, 2)
    factor = _chunks_worth(times if gain else s.pass_counts, chunk)
    gain = gains.larger_chunk(times, factor)
    if (chunk >= SURELY_LARGE) if gain is None else gain < gains.WORTH:
        return None
    return Finding(
        f"{share:.0%} of {prefills.passes} prefill passes take a whole chunk ({chunk} tokens) and requests "
        "still wait",
        larger_chunk(s, flags, factor),
        evidence={"passes": prefills.passes, "full_waiting_share": round(share, 4), "chunk_tokens": chunk},
        certainty=None if times and times.pass_known else "low",
        gain=gain,
        fewer=gains.larger_chunk(s.pass_counts, factor),
    )


def _chunks_worth(times: PassTimes | None, chunk: int) -> int:
    """Return the factor by which a chunk is made larger: until doubling it once more gains little."""
    gain, factor = gains.larger_chunk(times, 2), 2
    while gain and factor < MOST_CHUNKS and chunk * factor < LARGEST_CHUNK:
        more = gains.larger_chunk(times, 2 * factor)
        if not more or more < WORTH_DOUBLING * gain:
            break
        gain, factor = more, 2 * factor
    return factor


def _pass_limit(s: Situation, flags: Flags, name: str, share: float) -> Finding | None:
    """Advise to lift a limit on a prefill pass that is smaller than its chunk."""
    gain = gains.larger_chunk(s.pass_times, MOST_CHUNKS)
    if name not in flags.names or (gain is not None and gain < gains.WORTH):
        return None
    now = s.facts.number(name.replace("-", "_"))
    return Finding(
        f"{share:.0%} of {s.log.prefills.passes} prefill passes take all that --{name} {now:g} allows, and "
        "requests still wait",
        {name: None},
        evidence={"passes": s.log.prefills.passes, "full_waiting_share": round(share, 4)},
        gain=gain,
        fewer=gains.larger_chunk(s.pass_counts, MOST_CHUNKS),
    )


def prefill_seldom(s: Situation, flags: Flags) -> Finding | None:
    """Find that places stand empty for long: prefill passes have to wait for too many decode steps."""
    name = "prefill-decode-interval"
    now, most = s.facts.number("prefill_decode_interval") or 0, s.max_running
    if not now or not most or not s.load.frequent("conservative"):
        return None
    prefills, times = s.log.prefills, s.pass_times
    decoded = times.total.decoded / max(1, prefills.prompts) if times else 0.0
    outputs = (s.client.mean_output if s.client else None) or decoded
    best = gains.best_interval(times, outputs) or 0
    if not outputs or best * WORTH_FEWER >= now or now / 2 < IDLE * outputs:
        return None
    running = s.load.median("running")
    useful = best if best >= gains.LEAST_INTERVAL else 0
    then = most * (1 - min(0.5, useful / 2 / outputs))
    return Finding(
        f"{running:.0f} of at most {most} requests run and others wait {s.often('conservative')}: places "
        f"stand empty for up to {now:.0f} decode steps, and an output has {outputs:.0f} tokens",
        flags.setting(name, useful) if useful else {name: None},
        evidence={**s.evidence("conservative"), "mean_output_tokens": round(outputs, 1)},
        gain=gains.more_running(times, running, then),
        fewer=gains.more_running(s.pass_counts, running, then),
    )


def mixed_chunk(s: Situation, flags: Flags) -> Finding | None:
    """Find that decoding stops for many prefill passes, in which it could go on."""
    name, prefills = "enable-mixed-chunk", s.log.prefills
    if name not in flags.names or s.facts.arguments.get("enable_mixed_chunk") or not s.log.enough:
        return None
    if prefills.passes < s.limits.samples or s.load.frequent("empty"):
        return None
    running, counts = s.load.median("running"), s.pass_counts
    if counts is None or (s.facts.chunk or 0) < ROOM * running:
        return None
    fewer = gains.mixed(counts)
    if fewer < FEWER_PASSES:
        return None
    share = counts.total.passes / counts.total.seconds
    return Finding(
        f"{share:.0%} of the passes are prefill passes, during which {running:.0f} requests do not decode",
        flags.setting(name, value=True),
        evidence={"passes": prefills.passes, "prefill_share": round(share, 4)},
        fewer=fewer,
    )


def small_prefills(s: Situation, flags: Flags) -> Finding | None:
    """Find that decoding stops again and again for prefill passes of a few tokens."""
    name = "prefill-decode-interval"
    prefills, chunk = s.log.prefills, s.facts.chunk or 0
    if name not in flags.names or s.facts.number("prefill_decode_interval") or not s.log.enough:
        return None
    if s.facts.arguments.get("enable_mixed_chunk"):  # requests decode during prefill passes
        return None
    mean = prefills.new_tokens / max(1, prefills.passes)
    if prefills.passes < s.limits.samples or mean > SMALL_PASS * chunk or s.load.frequent("empty"):
        return None
    times = s.pass_times
    timed = times is not None and times.pass_known
    times = times if timed else s.pass_counts
    outputs = times.total.decoded / max(1, prefills.prompts) if times else 0.0
    found = gains.decode_interval(times, outputs)
    if times is None or found is None or found[1] < (gains.WORTH if timed else FEWER_PASSES):
        return None
    steps, gain = found
    a_pass = times.total.steps / times.total.passes
    return Finding(
        f"a prefill pass of {mean:.0f} tokens on average follows every {a_pass:.1f} decode steps: places are "
        "filled one by one, and each pass costs its fixed time",
        flags.setting(name, steps),
        evidence={
            "passes": prefills.passes,
            "mean_new_tokens": round(mean, 1),
            "decode_steps_a_pass": round(a_pass, 2),
            "pass_s": round(times.pass_s, 6) if timed else None,
        },
        gain=gain if timed else None,
        fewer=gain,
    )


def long_prompts(s: Situation, flags: Flags) -> Finding | None:
    """Find that one or two prompts fill a prefill pass."""
    prefills = s.log.prefills
    share = prefills.few_long / max(1, prefills.passes)
    if prefills.passes < s.limits.samples or share < s.limits.frequent:
        return None
    tokens = max(prefills.mean_prompt, prefills.mean_streak)
    if tokens < s.limits.long_prompt:
        return None
    args = larger_chunk(s, flags)
    if prefill_graph_off(s.facts.arguments) and not s.facts.on_cpu:
        args |= flags.setting("cuda-graph-backend-prefill", "breakable")
    return Finding(
        f"one or two prompts fill the pass in {share:.0%} of {prefills.passes} prefill passes "
        f"({tokens:,.0f} tokens, one pass after the other): long prompts dominate",
        args,
        evidence={
            "passes": prefills.passes,
            "few_long_share": round(share, 4),
            "mean_prompt_tokens": round(prefills.mean_prompt),
            "mean_streak_tokens": round(prefills.mean_streak),
        },
    )


def cuda_graph(s: Situation, flags: Flags) -> Finding | None:
    """Find that decoding runs without CUDA graphs at batch sizes at which graphs matter."""
    large = s.facts.tp >= LARGE_TP
    sign = "no_graph_tp" if large else "no_graph"
    if s.facts.on_cpu or not s.log.frequent(sign):
        return None
    running, captured = s.log.median("running"), s.facts.graph_max_bs
    target = int(s.limits.graph_batch_tp if large else s.limits.graph_batch)
    if s.facts.graph_disabled:
        args, why = _graph_on(s, flags), "the server's arguments switch them off"
    elif running <= target and not (captured and captured >= target):
        pool = smaller_pool(s, flags, GRAPH_GB_A_REQUEST * (target - (captured or USUAL_CAPTURED)))
        if pool is None:
            return None
        args = flags.setting("cuda-graph-max-bs-decode", target) | pool
        why = f"they are captured up to {captured or 'about 160-256'}"
    else:
        return None
    share = s.log.share(sign)
    return Finding(
        f"cuda graph: False in {share:.0%} of {s.log.over()}, at {running:.0f} running: {why}",
        args,
        evidence={**s.evidence(), "no_graph_share": round(share, 4), "captured": captured},
        certainty="high" if s.facts.graph_disabled else None,
    )


def _graph_on(s: Situation, flags: Flags) -> dict[str, Any]:
    if s.facts.arguments.get("disable_cuda_graph") or not flags.spelling("cuda-graph-backend-decode"):
        return {"disable-cuda-graph": None}
    return flags.setting("cuda-graph-backend-decode", "full")


def larger_chunk(s: Situation, flags: Flags, factor: int = 2) -> dict[str, Any]:
    """Return flags for a chunk so many times as large, with a smaller pool where it needs its memory."""
    chunk = int(in_effect(s.facts, "chunked-prefill-size") or 0)
    larger = min(factor * chunk, LARGEST_CHUNK)
    pool = smaller_pool(s, flags, (larger - chunk) * CHUNK_GB_A_TOKEN)
    if not 0 < chunk < larger or pool is None:
        return {}
    args = flags.setting("chunked-prefill-size", larger)
    return args | pool if args else {}


def smaller_pool(s: Situation, flags: Flags, gb: float) -> dict[str, Any] | None:
    """Return the mem-fraction-static that frees `gb` more; empty where that much is free already.

    None where too little would be left for weights and a useful pool.
    """
    now, left = s.facts.number("mem_fraction_static"), s.facts.ready.gpu_gb if s.facts.ready else None
    wanting = gb - max(0.0, left - memory_band(s.facts, s.limits).low) if left else gb
    if s.facts.on_cpu or now is None or not s.facts.card_gb or wanting <= 0:
        return {}
    target = round(now - math.ceil(100 * wanting / s.facts.card_gb) / 100, 3)
    return flags.setting("mem-fraction-static", target) if target > least_fraction(s.facts) else None
