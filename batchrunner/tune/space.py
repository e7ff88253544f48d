"""The flags that tuning tries, in the order of SGLang's tuning guides. Pure.

A flag is tried only where the signs of the best trial show that it can matter; else a note says why not. The
queue comes first in the guides, but is no flag: the runner's own controller holds it.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from batchrunner.advise.rules.memory import STEP
from batchrunner.advise.rules.passes import LARGEST_CHUNK
from batchrunner.advise.rules.setup import best_backends
from batchrunner.advise.situation import memory_band
from batchrunner.engines.flags import name_in
from batchrunner.engines.logs.facts import FP8, Facts
from batchrunner.engines.recovery.safer_args import (
    LESS_CONSERVATIVE,
    MORE_CONSERVATIVE,
    MOST_CONSERVATIVE,
    NORMAL,
)
from batchrunner.tune.machine import Machine
from batchrunner.tune.measurement import GUIDES, TrialSigns

Args = dict[str, Any]
QUANTIZATION, TORCH_COMPILE = "quantization", "torch-compile"
ALLOWABLE = (QUANTIZATION, TORCH_COMPILE)
"""Flags that need `--allow`: the first changes answers, the second takes minutes at each launch."""
LEAST_CONSERVATIVE = 0.1
"""Values of `--schedule-conservativeness`: below the guides' value, for a server that admits too few, and the
default of SGLang."""
PASS_IS_FULL = 0.7
"""Mean share of the limit from which it bounds the prefill passes; the last pass of a prompt is short."""
LEAST_SPARE_GB = 1.0
"""Memory of a card in GB that is left alone: a long prompt needs some that no trial may have seen."""
GRAPH_SIZES = (256, 512, 768, 1024)
"""Values of `--cuda-graph-max-bs-decode`, in requests."""
GRAPH_OFF_OFTEN = 0.1
"""Share of the decode passes without a graph from which larger graphs are tried."""
MOST_RAISE = 32
"""Largest factor by which max-running-requests is raised at once."""


@dataclass(frozen=True, slots=True)
class TuningState:
    """The best setting so far, with its signs."""

    args: Args
    signs: TrialSigns
    machine: Machine

    def value(self, name: str, default: Any) -> Any:
        """Return a flag's value, under any of its names; the default where it is unset or null."""
        found = self.args.get(name_in(self.args, name))
        return default if found is None else found


@dataclass(frozen=True, slots=True)
class FlagChange:
    """A change to try."""

    args: Args
    why: str
    is_small: bool = False
    """Whether the step is too small for noisy times to show it: then the scheduler's count of passes decides,
    unless times contradict it."""


Candidates = list[FlagChange] | str
"""Changes, the most promising first; or a text that says why none is tried."""


@dataclass(frozen=True, slots=True)
class TunedFlag:
    """A flag that is tuned, or a few that belong together."""

    name: str
    candidates: Callable[[TuningState], Candidates]
    schedules: bool = False
    """Whether it changes only which rows run when; the scheduler's count of passes shows its effect then."""


def _conservativeness(state: TuningState) -> Candidates:
    signs, value = state.signs, float(state.value("schedule-conservativeness", NORMAL))
    if state.machine.ignores_eos:
        return "with ignore_eos SGLang reserves all of max_new_tokens, whatever its value"
    if signs.at_limit or not signs.waits:
        return _not_admission(signs)
    if signs.retractions_per_min > GUIDES.retractions_per_min and signs.full:
        why = f"{signs.retractions_per_min:.0f} retractions a minute at token usage {signs.usage:.2f}"
        higher = [v for v in (MORE_CONSERVATIVE, round(MOST_CONSERVATIVE, 2)) if v > value]
        candidates = [FlagChange({"schedule-conservativeness": v}, why) for v in higher]
        return candidates or f"{value:g} reserves all of max_new_tokens already"
    if signs.full:
        return f"token usage {signs.usage:.2f}: the pool is full"
    why = f"token usage {signs.usage:.2f} and {signs.queue:.0f} waiting: too few requests are admitted"
    bolder = LESS_CONSERVATIVE if value > LESS_CONSERVATIVE else LEAST_CONSERVATIVE
    lower = [v for v in (bolder, NORMAL) if v < value]
    return [FlagChange({"schedule-conservativeness": v}, why) for v in lower] or f"{value:g} is bold enough"


def _memory(state: TuningState) -> Candidates:
    """Enlarge the pool where requests wait although fewer run than max-running-requests allows."""
    if not state.signs.waits or state.signs.at_limit:
        return _not_admission(state.signs)
    return _pool(state) if state.machine.cpu else _fraction(state)


def _pool(state: TuningState) -> Candidates:
    """Double the CPU's KV pool, up to what memory allows."""
    pool, most = state.signs.pool_tokens, state.machine.most_pool_tokens
    if not pool or not most:
        return "the size of the pool, or of the memory, is not known"
    wanted = min(2 * pool, most)
    if wanted <= pool:
        return f"a quarter of the free memory holds {most} tokens"
    return [FlagChange({"max-total-tokens": wanted}, f"rows wait for the pool of {pool} tokens")]


def _fraction(state: TuningState) -> Candidates:
    """Raise mem-fraction-static to the guides' spare memory at once, then in small steps to the edge.

    A server that dies of a step is a result; the guides' 5 GB are for a card on which nobody tries.
    """
    signs, spare = state.signs, state.signs.spare_gb
    value = state.value("mem-fraction-static", signs.mem_fraction)
    if value is None or spare is None:
        return "the log lacks mem_fraction_static or available_gpu_mem"
    arguments = {"chunked_prefill_size": signs.prefill_limit}
    band = memory_band(Facts(card_gb=state.machine.card_gb or None, arguments=arguments), GUIDES)
    if spare - STEP * state.machine.card_gb < LEAST_SPARE_GB:
        return f"{spare:.1f} GB of the card are left: no more can be taken"
    steps = [STEP]
    if spare > band.high and state.machine.card_gb:
        steps.insert(0, math.floor((spare - band.good) / state.machine.card_gb / STEP) * STEP)
    raised = dict.fromkeys(round(value + step, 2) for step in steps if step > 0 and value + step < 1)
    why = f"rows wait, and {spare:.1f} GB of the card are left"
    candidates = [FlagChange({"mem-fraction-static": v}, why, is_small=True) for v in raised]
    return candidates or f"{value:g} already takes the whole card"


def _chunk(state: TuningState) -> Candidates:
    signs = state.signs
    limit, got = signs.prefill_limit, signs.prefill_per_pass
    if limit is None or got is None:
        return "the log lacks prefill passes or their limit"
    if limit <= 0:
        return "chunked prefill is off"
    if got < PASS_IS_FULL * limit:
        return f"prefill passes have {got:.0f} tokens of {limit}: the limit does not bind"
    larger = min(2 * limit, LARGEST_CHUNK)
    if larger <= limit:
        return f"more than {LARGEST_CHUNK} tokens a pass are not tried"
    return [FlagChange({"chunked-prefill-size": larger}, f"prefill passes have {got:.0f} of {limit} tokens")]


def _max_running(state: TuningState) -> Candidates:
    signs = state.signs
    if not signs.waits:
        return _not_admission(signs)
    if not signs.at_limit or signs.max_running is None:
        return f"#running-req {signs.running:.0f} stays under {signs.max_running or 'its limit'}"
    if signs.full:
        return f"token usage {signs.usage:.2f}: the pool holds no more"
    # rounded up to a power of two: the pool sets the true limit
    fits = max(signs.running, 1) / max(signs.usage, 1 / MOST_RAISE)
    wanted = min(2 ** math.ceil(math.log2(fits)), MOST_RAISE * signs.max_running)
    between = round(math.sqrt(wanted * signs.max_running))
    seen = f"at token usage {signs.usage:.2f} with {signs.queue:.0f} waiting"
    why = f"{signs.max_running} run, the most, {seen}"
    higher = [v for v in (wanted, between) if v > signs.max_running]
    candidates = [FlagChange({"max-running-requests": v}, why) for v in higher]
    return candidates or f"token usage {signs.usage:.2f}: the pool holds {fits:.0f} at once"


def _graphs(state: TuningState) -> Candidates:
    signs, name = state.signs, "cuda-graph-max-bs-decode"
    if state.machine.cpu or signs.graph_off_share is None:
        return "no CUDA graphs here"
    why = f"{signs.graph_off_share:.0%} of the decode passes ran without a graph"
    if signs.graph_off_share < GRAPH_OFF_OFTEN:
        return why
    size = next((size for size in GRAPH_SIZES if size >= signs.running), GRAPH_SIZES[-1])
    if size <= int(state.value(name, 0)):
        return f"graphs up to {size} are captured already"
    candidates = [FlagChange({name: size}, why)]
    fraction = state.value("mem-fraction-static", signs.mem_fraction)
    if fraction is not None:  # graphs take memory
        candidates.append(FlagChange({name: size, "mem-fraction-static": round(fraction - 2 * STEP, 2)}, why))
    return candidates


def _policy(state: TuningState) -> Candidates:
    signs, value = state.signs, state.value("schedule-policy", "fcfs")
    if value != "fcfs":
        return [FlagChange({"schedule-policy": "fcfs"}, "the runner's own order of rows needs it")]
    shared = f"{signs.cached_share:.0%} of the prompt tokens are shared"
    if signs.cached_share < GUIDES.shared:
        return shared
    if signs.queue > GUIDES.lpm_queue:
        return f"{signs.queue:.0f} waiting: above {GUIDES.lpm_queue:.0f} lpm works like fcfs"
    return [FlagChange({"schedule-policy": "lpm"}, shared)]


def _attention(state: TuningState) -> Candidates:
    if state.machine.architecture is None:
        return "this device has no choice of backend"
    backends = best_backends(
        state.machine.architecture, Facts(model=state.signs.model, config=state.machine.config)
    )
    if not backends:
        return f"SGLang chooses the backend for {state.signs.model} itself"
    current = state.value("attention-backend", state.signs.attention_backend)
    return [FlagChange({"attention-backend": v}, f"now it is {current}") for v in backends if v != current]


def _compile(state: TuningState) -> Candidates:
    if TORCH_COMPILE not in state.machine.allowed:
        return "not tried without --allow torch-compile"
    if state.value("enable-torch-compile", False):
        return "on already"
    return [FlagChange({"enable-torch-compile": True}, "allowed")]


def _quantized(state: TuningState) -> Candidates:
    if QUANTIZATION not in state.machine.allowed:
        return "not tried without --allow quantization: it changes answers"
    if state.machine.architecture not in FP8:
        return "no FP8 on this device"
    choices: list[Args] = [{"kv-cache-dtype": "fp8_e4m3"}, {"quantization": "fp8"}]
    new = [args for args in choices if not args.keys() & state.args.keys()]
    return [FlagChange(args, "allowed") for args in new] or "on already"


def _parallel(state: TuningState) -> Candidates:
    """Describe the gain of a gateway, which sends rows to free replicas; `--dp-size` deals them in turn."""
    cards, tp = state.machine.cards, int(state.value("tp-size", 1))
    if state.machine.one_of_several or cards < 2:  # noqa: PLR2004
        return "one replica" if state.machine.one_of_several else "one device"
    if (replicas := cards // tp) < 2:  # noqa: PLR2004
        return f"engine: {{kind: gateway}} with a tp under {tp} is faster, where the weights fit fewer GPUs"
    return f"engine: {{kind: gateway, tp: {tp}}} has {replicas} replicas on {cards} GPUs, each about as fast"


def _not_admission(signs: TrialSigns) -> str:
    if not signs.waits:
        return "no request waits at the server: admission is not the limit"
    limit = f"max-running-requests {signs.max_running}"
    return f"#running-req {signs.running:.0f} is at {limit}, which is the limit"


TUNED_FLAGS = (
    TunedFlag("schedule-conservativeness", _conservativeness, schedules=True),
    TunedFlag("memory", _memory, schedules=True),
    TunedFlag("chunked-prefill-size", _chunk),
    TunedFlag("max-running-requests", _max_running, schedules=True),
    TunedFlag("cuda-graph-max-bs", _graphs),
    TunedFlag("schedule-policy", _policy, schedules=True),
    TunedFlag("attention-backend", _attention),
    TunedFlag("torch-compile", _compile),
    TunedFlag("quantization", _quantized),
    TunedFlag("parallelism", _parallel),
)
"""In the guides' order."""
