"""Rules on memory: what is left at the start, and where it ran out. Each is pure."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from batchrunner.care.situation import Finding, command_line

if TYPE_CHECKING:
    from batchrunner.care.facts import Trouble
    from batchrunner.care.flags import Flags
    from batchrunner.care.situation import Situation
    from batchrunner.engines.batchlines import Phase

HIGHEST_FRACTION = 0.95
STEP = 0.01
"""The guides' step of `--mem-fraction-static`."""
CHUNKS = (4096, 2048)
FRACTIONS = (0.8, 0.7)
"""What the guides go down to."""


def memory_left(s: Situation, flags: Flags) -> Finding | None:
    """Find GPU memory that lies idle, or that it is as it should be."""
    left = s.facts.ready.gpu_gb if s.facts.ready else None
    if left is None or left < s.limits.memory_low_gb:
        return None
    seen = f"available_gpu_mem is {left:.2f} GB when the server is ready"
    evidence = {"available_gpu_gb": left, "card_gb": s.facts.card_gb}
    good = f"{s.limits.memory_low_gb:g}-{s.limits.memory_high_gb:g} GB"
    if left <= s.limits.memory_high_gb:
        return Finding(f"{seen}: {good} is good", evidence=evidence, fine=True)
    if s.facts.number("max_total_tokens"):
        return Finding(
            f"{seen}: more than {good}, because --max-total-tokens limits the KV pool",
            {"max-total-tokens": None},
            evidence=evidence,
        )
    return _fraction(s, flags, f"{seen}: more than {good}, the rest lies idle", left, evidence)


def memory_tight(s: Situation, flags: Flags) -> Finding | None:
    """Find that too little GPU memory is left for activations."""
    left = s.facts.ready.gpu_gb if s.facts.ready else None
    if left is None or left >= s.limits.memory_low_gb:
        return None
    seen = f"available_gpu_mem is {left:.2f} GB when the server is ready: under {s.limits.memory_low_gb:g} GB"
    return _fraction(
        s, flags, f"{seen} it may run out", left, {"available_gpu_gb": left, "card_gb": s.facts.card_gb}
    )


def _fraction(s: Situation, flags: Flags, sign: str, left: float, evidence: dict[str, Any]) -> Finding:
    """Move mem-fraction-static so that the good amount is left; by how much, the card's memory says."""
    now, more = s.facts.number("mem_fraction_static"), left - s.limits.memory_good_gb
    up = more > 0
    if not flags.spelling("mem-fraction-static"):
        return Finding(sign)
    if now is None or not s.facts.card_gb:
        way = "up" if up else "down"
        return Finding(sign, change=f"--mem-fraction-static {way} in steps of {STEP}", evidence=evidence)
    steps = (
        max(1, math.floor(more / s.facts.card_gb / STEP)) if up else math.floor(more / s.facts.card_gb / STEP)
    )
    target = min(HIGHEST_FRACTION, round(now + steps * STEP, 3))
    args = flags.setting("mem-fraction-static", target)
    moved = f"{abs(target - now) * s.facts.card_gb:.1f} GB of {s.facts.card_gb:.0f}"
    what = f"{command_line(args)} (from {now:g}: {moved} {'more' if up else 'less'} for the KV pool)"
    return Finding(sign, args, what, evidence)


def oom_prefill(s: Situation, flags: Flags) -> Finding | None:
    """Find that a prefill pass ran out of memory."""
    if not (trouble := _last(s, "prefill")):
        return None
    now = s.facts.ready.chunked_prefill_size if s.facts.ready else None
    lower = next((chunk for chunk in CHUNKS if now is None or now <= 0 or chunk < now), None)
    args = flags.setting("chunked-prefill-size", lower) if lower else lower_fraction(s, flags)
    return _ran_out(s, trouble, "in prefill", args, {"chunked_prefill_size": now})


def oom_decode(s: Situation, flags: Flags) -> Finding | None:
    """Find that decoding ran out of memory."""
    trouble = _last(s, "decode") or _last(s, "requests")
    if not trouble:
        return None
    most = s.max_running
    base = min(trouble.running or most or 0, most or trouble.running)
    args = flags.setting("max-running-requests", max(1, 3 * base // 4)) if base else {}
    change = "" if args else "--max-running-requests lower than what ran"
    return _ran_out(s, trouble, f"in decoding, at {trouble.running} running", args, {}, change)


def oom_graph(s: Situation, flags: Flags) -> Finding | None:
    """Find that capturing CUDA graphs ran out of memory."""
    if not (trouble := _last(s, "graph")):
        return None
    captured = s.facts.graph_max_bs
    args = flags.setting("cuda-graph-max-bs-decode", max(8, captured // 2) if captured else 64)
    return _ran_out(s, trouble, "while CUDA graphs were captured", args | lower_fraction(s, flags), {})


def oom_weights(s: Situation, flags: Flags) -> Finding | None:
    """Find that the weights, or the weights and any KV pool at all, do not fit."""
    if trouble := _last(s, "pool"):
        now = s.facts.number("mem_fraction_static")
        args = flags.setting("mem-fraction-static", min(HIGHEST_FRACTION, round((now or 0.8) + 0.05, 3)))
        where = "before there was a KV pool: the weights take what mem-fraction-static allows"
        return _ran_out(s, trouble, where, args, {}, f"{command_line(args)}, or more GPUs (--tp-size)")
    if trouble := _last(s, "load"):
        args = flags.setting("tp-size", 2 * s.facts.tp)
        return _ran_out(
            s, trouble, "while weights were loaded", args, {}, f"{command_line(args)}, or --quantization fp8"
        )
    return None


def oom_general(s: Situation, flags: Flags) -> Finding | None:
    """Find that memory ran out, and it is not known where."""
    trouble = _last(s, "general")
    return _ran_out(s, trouble, "", lower_fraction(s, flags), {}) if trouble else None


def lower_fraction(s: Situation, flags: Flags) -> dict[str, Any]:
    """Return the guides' next lower mem-fraction-static; below theirs, a tenth less."""
    now = s.facts.number("mem_fraction_static")
    lower = next((step for step in FRACTIONS if now is None or step < now), None)
    return flags.setting("mem-fraction-static", lower or round((now or 0.7) - 0.1, 3))


def _last(s: Situation, phase: Phase) -> Trouble | None:
    return next((trouble for trouble in reversed(s.facts.troubles) if trouble.phase == phase), None)


def _ran_out(
    s: Situation, trouble: Trouble, where: str, args: dict[str, Any], known: dict[str, Any], change: str = ""
) -> Finding:
    times = sum(other.phase == trouble.phase for other in s.facts.troubles)
    text = trouble.what.text
    return Finding(
        f"out of memory{where and ' '}{where}: {text if len(text) < 160 else text[:160] + '…'}",  # noqa: PLR2004
        args,
        change,
        {**known, "times": times, "running": trouble.running},
    )
