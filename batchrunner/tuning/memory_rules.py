"""Rules on free memory at the start, on memory that ran out, and on other deaths. Each rule is pure."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from batchrunner.sglang.flags import Flags, command_line
from batchrunner.sglang.logs.lines import OutOfMemory, Phase
from batchrunner.sglang.logs.reader import FP8
from batchrunner.tuning.flags import FRACTION_STEP, next_setting
from batchrunner.tuning.recover import Death, safer
from batchrunner.tuning.situation import LONGEST_LINE, Finding, Situation


def memory_left(s: Situation, flags: Flags) -> Finding | None:
    """Find that GPU memory is unused, or that the right amount is free."""
    spare_gb, band = s.server.spare_gb, s.server.band
    if spare_gb is None or spare_gb < band.low:
        return None
    reading = f"available_gpu_mem is {spare_gb:.2f} GB when the server is ready"
    evidence = {"available_gpu_gb": spare_gb}
    good = f"{round(band.low, 1):g}-{round(band.high, 1):g} GB"
    if spare_gb <= band.high:
        return Finding(f"{reading}: {good} is good", evidence=evidence, fine=True)
    if s.facts.number("max_total_tokens"):
        return Finding(
            f"{reading}: more than {good}, because --max-total-tokens limits the KV pool",
            {"max-total-tokens": None},
            evidence=evidence,
        )
    return _fraction(
        s,
        flags,
        sign="memory-left",
        reading=f"{reading}: more than {good}, the rest is unused",
        evidence=evidence,
    )


def pool_small(s: Situation, _: Flags) -> Finding | None:
    """Find that the KV pool of a CPU, whose size a flag sets, holds fewer requests than may run."""
    now, most, running = s.server.now("max-total-tokens"), s.max_running, s.server.running
    if not most or running < 1 or not (s.short_of_pool or s.retracts_often):
        return None
    return Finding(
        f"{running:.0f} of at most {most} requests run and others wait: the KV pool of {now:.0f} tokens "
        f"holds no more, at token usage {s.load.median('usage'):.2f}",
        evidence={**s.evidence("kv_bound", "conservative"), "pool_tokens": now, "max_running": most},
    )


def memory_tight(s: Situation, flags: Flags) -> Finding | None:
    """Find that too little GPU memory is free for activations."""
    spare_gb, low = s.server.spare_gb, s.server.band.low
    if spare_gb is None or spare_gb >= low:
        return None
    reading = f"available_gpu_mem is {spare_gb:.2f} GB when the server is ready: under {round(low, 1):g} GB"
    evidence = {"available_gpu_gb": spare_gb}
    return _fraction(s, flags, sign="memory-tight", reading=f"{reading} it may run out", evidence=evidence)


def _fraction(
    s: Situation, flags: Flags, sign: str, reading: str, evidence: dict[str, Any]
) -> Finding | None:
    """Advise a mem-fraction-static that leaves the right amount of the card's memory free.

    Return None if the weights and a useful pool would not fit into the new fraction.
    """
    name, card = "mem-fraction-static", s.facts.card_gb
    now, up = s.server.now(name), sign == "memory-left"
    if now is None or not card:
        how = f"--{name} {'up' if up else 'down'} in steps of {FRACTION_STEP}"
        return Finding(reading, change=how if flags.spelling(name) else "", evidence=evidence)
    args = next_setting(sign, name, s.server, flags)
    if not args:
        return None
    difference = f"{abs(args[name] - now) * card:.1f} GB of {card:.0f}"
    change = f"{command_line(args)} (from {now:g}: {difference} {'more' if up else 'less'} for the KV pool)"
    return Finding(reading, args, change, evidence)


def ran_out(phase: Phase, where: str = "") -> Callable[[Situation, Flags], Finding | None]:
    """Return the rule on memory that ran out in the given phase."""

    def judge(s: Situation, flags: Flags) -> Finding | None:
        beside = "" if phase == "graph" else _narrower(s, flags)
        return _ran_out(s, trouble=s.facts.troubles.get(phase), flags=flags, where=where, beside=beside)

    return judge


def oom_weights(s: Situation, flags: Flags) -> Finding | None:
    """Find that the weights do not fit, or leave no room for a KV pool."""
    if trouble := s.facts.troubles.get("pool"):
        where = "before there was a KV pool: the weights take all that mem-fraction-static allows"
        return _ran_out(
            s,
            trouble=trouble,
            flags=flags,
            where=where,
            beside="" if s.facts.on_cpu else "more GPUs (--tp-size)",
        )
    if trouble := s.facts.troubles.get("load"):
        args = {} if s.facts.on_cpu else flags.setting("tp-size", 2 * s.facts.tp)
        quantised = s.facts.quantised or s.facts.arguments.get("quantization")
        room = command_line(args) or "a machine with more memory"
        ways = room if quantised else f"{room}, or a quantised model"
        finding = _ran_out(s, trouble=trouble, flags=flags, where="while weights were loaded", beside=ways)
        return finding and replace(finding, args=args)
    return None


def killed(s: Situation, flags: Flags) -> Finding | None:
    """Find that a process was killed, as the kernel does when the host's memory runs out."""
    died = s.facts.died
    if died is None or not died.killed:
        return None
    args = safer(Death("killed", died.text), s.facts, flags)
    host = "more memory for it (the machine's, the container's or Slurm's --mem), if `dmesg` says `oom-kill`"
    return Finding(
        f"killed (SIGKILL), as the kernel does when the host's memory runs out: {died.text[:LONGEST_LINE]}",
        args,
        ", or ".join(filter(None, (command_line(args), host))),
        {"line": died.text},
    )


def crashed(s: Situation, _: Flags) -> Finding | None:
    """Find that the server died of an error that no flag is known to cure."""
    died = s.facts.died
    if died is None or died.killed or s.facts.last_trouble:
        return None
    return Finding(
        f"the server died: {died.text[:LONGEST_LINE]}",
        change="look for that error in the log and among SGLang's issues: another release may not have it",
        evidence={"line": died.text},
    )


def _narrower(s: Situation, flags: Flags) -> str:
    """Name number types of fewer than 16 bits, for weights or KV cache, that the card supports.

    The KV pool takes all memory that the weights leave. So smaller numbers free memory only together with a
    lower mem-fraction-static.
    """
    facts, ways = s.facts, []
    if facts.architecture in FP8:
        if facts.kv_in_16_bits:
            ways.append(command_line(flags.setting("kv-cache-dtype", "fp8_e4m3")))
        if facts.in_16_bits:
            ways.append(command_line(flags.setting("quantization", "fp8")))
    elif facts.architecture == "ampere" and facts.in_16_bits:
        ways.append("a model quantised to int8 or AWQ")
    remedies = " or ".join(filter(None, ways))
    return f"{remedies}, with a lower --mem-fraction-static" if remedies else ""


def _ran_out(
    s: Situation, trouble: OutOfMemory | None, flags: Flags, where: str, beside: str
) -> Finding | None:  # fmt: skip
    """Advise the flags that recovery would set, or the remedy `beside`; None if no memory ran out."""
    if trouble is None:
        return None
    text = trouble.text
    args = safer(Death(trouble.phase, text, trouble.running), s.facts, flags)
    ways = [way for way in (command_line(args), beside) if way] or ["a smaller model, or a larger card"]
    return Finding(
        f"out of memory{where and ' '}{where}: {text[:LONGEST_LINE]}",
        args,
        ", or ".join(ways),
        {"running": trouble.running},
    )
