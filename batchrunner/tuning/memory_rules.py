"""Rules of advice on free memory, on memory that ran out, and on other deaths. Each is a pure function."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from batchrunner.sglang.flags import Flags, command_line
from batchrunner.sglang.logs.lines import OutOfMemory, Phase
from batchrunner.sglang.logs.reader import FP8
from batchrunner.tuning.flags import FRACTION_STEP, next_setting
from batchrunner.tuning.recover import Death, safer
from batchrunner.tuning.situation import LONGEST_LINE, Finding, Situation


def memory_left(situation: Situation, flags: Flags) -> Finding | None:
    """Detect that GPU memory is unused; or report that the right amount of it is free for activations."""
    spare_gb, band = situation.server.spare_gb, situation.server.band
    if spare_gb is None or spare_gb < band.low:
        return None
    reading = f"available_gpu_mem is {spare_gb:.2f} GB when the server is ready"
    evidence = {"available_gpu_gb": spare_gb}
    good_range = f"{round(band.low, 1):g}-{round(band.high, 1):g} GB"
    if spare_gb <= band.high:
        return Finding(f"{reading}: {good_range} is good", evidence=evidence, fine=True)
    if situation.facts.number("max_total_tokens"):
        return Finding(
            f"{reading}: more than {good_range}, because --max-total-tokens limits the KV pool",
            # The value None removes the flag.
            args={"max-total-tokens": None},
            evidence=evidence,
        )
    observation = f"{reading}: more than the {good_range} that activations need; the rest is unused"
    return _other_fraction(situation, flags, sign="memory-left", observation=observation, evidence=evidence)


def pool_small(situation: Situation, _: Flags) -> Finding | None:
    """Detect that the KV pool of a server on a CPU holds fewer requests than may run.

    Servers on a GPU never get here: `Rule.apply` skips them, because FLAGS offers the rule's flag,
    `--max-total-tokens`, only on a CPU. The advised size of the pool comes from FLAGS too.
    """
    pool_tokens = situation.server.value_of("max-total-tokens")
    most, running = situation.max_running, situation.server.running
    if pool_tokens is None or not most or running < 1:
        return None
    if not situation.short_of_pool and not situation.retracts_often:
        return None
    return Finding(
        f"{running:.0f} of at most {most} requests run and others wait: the KV pool of {pool_tokens:.0f} "
        f"tokens holds no more, at token usage {situation.load.median('usage'):.2f}",
        evidence={
            **situation.evidence("kv_bound", "conservative"),
            "pool_tokens": pool_tokens,
            "max_running": most,
        },
    )


def memory_tight(situation: Situation, flags: Flags) -> Finding | None:
    """Detect that too little GPU memory is free for activations."""
    spare_gb, low = situation.server.spare_gb, situation.server.band.low
    if spare_gb is None or spare_gb >= low:
        return None
    observation = (
        f"available_gpu_mem is {spare_gb:.2f} GB when the server is ready: with less than "
        f"{round(low, 1):g} GB, memory may run out"
    )
    evidence = {"available_gpu_gb": spare_gb}
    return _other_fraction(situation, flags, sign="memory-tight", observation=observation, evidence=evidence)


def _other_fraction(
    situation: Situation, flags: Flags, *, sign: str, observation: str, evidence: dict[str, Any]
) -> Finding | None:
    """Advise a mem-fraction-static that leaves the right amount of the GPU's memory free.

    `sign` is "memory-left" if too much is free now, or "memory-tight" if too little is free. Return None if
    the weights and a useful pool would not fit into the new fraction.
    """
    name, card_gb = "mem-fraction-static", situation.facts.card_gb
    present = situation.server.value_of(name)
    is_raise = sign == "memory-left"
    if present is None or not card_gb:
        # The next value cannot be computed, so only its direction is advised.
        direction = "up" if is_raise else "down"
        change = f"--{name} {direction} in steps of {FRACTION_STEP}" if flags.spelling(name) else ""
        return Finding(observation, change=change, evidence=evidence)
    args = next_setting(sign, name, situation.server, flags)
    if not args:
        return None
    difference_gb = abs(args[name] - present) * card_gb
    difference = f"{difference_gb:.1f} GB {'more' if is_raise else 'less'}"
    change = (
        f"{command_line(args)} instead of {present:g}: {difference} for the KV pool "
        f"(the GPU has {card_gb:.0f} GB)"
    )
    return Finding(observation, args=args, change=change, evidence=evidence)


def ran_out(phase: Phase, where: str = "") -> Callable[[Situation, Flags], Finding | None]:
    """Return the rule for memory that ran out in a phase of the server; `where` names it in words."""

    def judge(situation: Situation, flags: Flags) -> Finding | None:
        """Advise on the memory that ran out in `phase`; None if none ran out."""
        trouble = situation.facts.troubles.get(phase)
        if trouble is None:
            return None
        # The memory of CUDA graphs depends on the captured batch sizes, not on number types. `_ran_out`
        # already advises smaller graphs.
        remedy = "" if phase == "graph" else _narrower_types(situation, flags)
        return _ran_out(situation, trouble=trouble, flags=flags, where=where, remedy=remedy)

    return judge


def oom_weights(situation: Situation, flags: Flags) -> Finding | None:
    """Detect that the weights do not fit, or leave no room for a KV pool."""
    if trouble := situation.facts.troubles.get("pool"):
        where = "before there was a KV pool: the weights take all that mem-fraction-static allows"
        remedy = "" if situation.facts.on_cpu else "more GPUs (--tp-size)"
        return _ran_out(situation, trouble=trouble, flags=flags, where=where, remedy=remedy)
    if trouble := situation.facts.troubles.get("load"):
        args = {} if situation.facts.on_cpu else flags.setting("tp-size", 2 * situation.facts.tp)
        remedy = command_line(args) or "a machine with more memory"
        if not situation.facts.quantised and not situation.facts.arguments.get("quantization"):
            remedy += ", or a quantised model"
        where = "while weights were loaded"
        finding = _ran_out(situation, trouble=trouble, flags=flags, where=where, remedy=remedy)
        # Advise more GPUs or memory instead of the flags that recovery would set.
        return replace(finding, args=args)
    return None


def killed(situation: Situation, flags: Flags) -> Finding | None:
    """Detect that a process was killed, as the kernel does when the host's memory runs out."""
    died = situation.facts.died
    if died is None or not died.killed:
        return None
    args = safer(Death("killed", died.text), situation.facts, flags)
    host = "more host memory (of the machine, the container, or Slurm's --mem), if `dmesg` says `oom-kill`"
    return Finding(
        f"killed (SIGKILL), as the kernel does when the host's memory runs out: {died.text[:LONGEST_LINE]}",
        args=args,
        change=", or ".join(filter(None, (command_line(args), host))),
        evidence={"line": died.text},
    )


def crashed(situation: Situation, _: Flags) -> Finding | None:
    """Detect that the server died of an error that no flag is known to cure."""
    died = situation.facts.died
    # If the process was killed, or memory ran out, other rules judge its death.
    if died is None or died.killed or situation.facts.last_trouble:
        return None
    return Finding(
        f"the server died: {died.text[:LONGEST_LINE]}",
        change="look for this error in the log and in SGLang's issues: another release may not have it",
        evidence={"line": died.text},
    )


def _narrower_types(situation: Situation, flags: Flags) -> str:
    """Name number types below 16 bits, for weights or KV cache, that the GPU supports; empty if none.

    The KV pool takes all memory that the weights leave. So smaller numbers free memory only together with a
    lower mem-fraction-static.
    """
    facts = situation.facts
    types: list[str] = []
    if facts.architecture in FP8:
        if facts.kv_in_16_bits:
            types.append(command_line(flags.setting("kv-cache-dtype", "fp8_e4m3")))
        if facts.in_16_bits:
            types.append(command_line(flags.setting("quantization", "fp8")))
    elif facts.architecture == "ampere" and facts.in_16_bits:
        types.append("a model quantised to int8 or AWQ")
    remedy = " or ".join(filter(None, types))
    return f"{remedy}, with a lower --mem-fraction-static" if remedy else ""


def _ran_out(situation: Situation, *, trouble: OutOfMemory, flags: Flags, where: str, remedy: str) -> Finding:
    """Advise safer flags, or `remedy` as an alternative, after memory ran out; both may be empty.

    `where` says in words when it ran out.
    """
    args = safer(Death(trouble.phase, trouble.text, trouble.running), situation.facts, flags)
    remedies = [text for text in (command_line(args), remedy) if text]
    phase = f" {where}" if where else ""
    return Finding(
        f"out of memory{phase}: {trouble.text[:LONGEST_LINE]}",
        args=args,
        change=", or ".join(remedies) or "a smaller model, or a GPU with more memory",
        evidence={"running": trouble.running},
    )
