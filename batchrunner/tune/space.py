"""The flags that tuning tries, in the order of SGLang's tuning guides. Pure.

A flag is tried only where the signs of the best trial show that it can matter; else a note says why not. The
queue comes first in the guides, but is no flag: the runner's own controller holds it.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from batchrunner.advise.load_rules import CLIP, LARGEST_CHUNK
from batchrunner.advise.memory_rules import FLOAT32_BYTES, POOL_SHARE, STEP
from batchrunner.advise.setup_rules import best_backends
from batchrunner.advise.situation import memory_band
from batchrunner.engines.device import cards, free_bytes, on_cpu
from batchrunner.engines.flags import Flags, command_line, installed, name_in
from batchrunner.engines.logs.reader import Architecture, Facts, architecture_of
from batchrunner.engines.logs.series import GUIDES
from batchrunner.engines.model_files import (
    has_experts,
    has_latent_attention,
    kv_bytes,
    read_config,
)
from batchrunner.engines.recovery import (
    LESS_CONSERVATIVE,
    MORE_CONSERVATIVE,
    MOST_CONSERVATIVE,
    NORMAL,
)
from batchrunner.job.engine import ServerEngine
from batchrunner.job.spec import Job
from batchrunner.tune.measurement import TrialSigns


@dataclass(frozen=True, slots=True)
class Machine:
    """What a search may change, and what it has to know of the device."""

    flags: Flags
    cpu: bool = True
    card: str | None = None
    """Name of the GPU, as `nvidia-smi` prints it."""
    card_gb: float = 0.0
    most_pool_tokens: int = 0
    """Tokens of the largest KV pool that a CPU's memory allows; 0 where that is not known."""
    ignores_eos: bool = False
    """Whether the job's outputs have exactly `max_new_tokens`."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """The model's config.json; empty where it is not on this machine."""

    @property
    def architecture(self) -> Architecture | None:
        """The GPU's generation; None where its name is not known."""
        return architecture_of(self.card or "")


def machine_for(job: Job, engine: ServerEngine) -> Machine:
    """Describe this machine; asks the installed SGLang for its flags, which takes about 6 s."""
    cpu = on_cpu(engine.device)
    card = None if cpu else next(iter(cards()), None)
    return Machine(
        flags=installed(engine.python, engine.env),
        cpu=cpu,
        card=card.name if card else None,
        card_gb=card.memory_bytes / (1 << 30) if card else 0.0,
        most_pool_tokens=_pool_tokens(engine) if cpu else 0,
        ignores_eos=job.sampling.ignore_eos is True,
        config=read_config(engine.model, engine.args.get("revision")),
    )


def _pool_tokens(engine: ServerEngine) -> int:
    """Return how many tokens a quarter of the free memory holds; 0 where model or memory are not known."""
    token_bytes = kv_bytes(read_config(engine.model, engine.args.get("revision")), FLOAT32_BYTES)
    return int(free_bytes() / POOL_SHARE / token_bytes) if token_bytes else 0


Args = dict[str, Any]
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
TOKENIZER_WORKERS = 4
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
    band = memory_band(Facts(card_gb=state.machine.card_gb or None, arguments=arguments))
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


def _not_admission(signs: TrialSigns) -> str:
    if not signs.waits:
        return "no request waits at the server: admission is not the limit"
    limit = f"max-running-requests {signs.max_running}"
    return f"#running-req {signs.running:.0f} is at {limit}, which is the limit"


def _host_cache(state: TuningState) -> Candidates:
    signs = state.signs
    if state.machine.cpu:
        return "the pool is in the host's memory already"
    if signs.cached_share < GUIDES.shared or not signs.full:
        return f"{signs.cached_share:.0%} of the prompt tokens are shared, at token usage {signs.usage:.2f}"
    if state.value("enable-hierarchical-cache", False):
        return "on already"
    why = "shared prefixes, and a full pool that drops them"
    return [FlagChange({"enable-hierarchical-cache": True}, why)]


def _tokenizers(state: TuningState) -> Candidates:
    signs = state.signs
    if state.machine.cpu:
        return "a CPU's cores are the model's"
    if signs.waits or signs.at_limit:
        return "the scheduler is fed: requests wait there, or all slots are taken"
    if int(state.value("tokenizer-worker-num", 1)) > 1:
        return "several already"
    why = f"{signs.running:.0f} of {signs.max_running} run and none waits: the scheduler is not fed"
    return [FlagChange({"tokenizer-worker-num": TOKENIZER_WORKERS}, why)]


def _experts(state: TuningState) -> Candidates:
    tp = int(state.value("tp-size", 1))
    if tp < 2 or not has_experts(state.machine.config):  # noqa: PLR2004
        return "no experts on several GPUs"
    if int(state.value("ep-size", 1)) > 1:
        return "on already"
    return [FlagChange({"ep-size": tp}, f"each expert is split over {tp} GPUs")]


def _attention_copies(state: TuningState) -> Candidates:
    tp = int(state.value("tp-size", 1))
    if tp < 2 or not has_latent_attention(state.machine.config):  # noqa: PLR2004
        return "no compressed KV cache on several GPUs"
    if int(state.value("attn-dp-size", 1)) > 1:
        return "on already"
    return [FlagChange({"attn-dp-size": tp}, f"each of {tp} GPUs keeps the same KV cache")]


TUNED_FLAGS = (
    TunedFlag("schedule-conservativeness", _conservativeness, schedules=True),
    TunedFlag("memory", _memory, schedules=True),
    TunedFlag("chunked-prefill-size", _chunk),
    TunedFlag("max-running-requests", _max_running, schedules=True),
    TunedFlag("cuda-graph-max-bs", _graphs),
    TunedFlag("schedule-policy", _policy, schedules=True),
    TunedFlag("attention-backend", _attention),
    TunedFlag("hierarchical-cache", _host_cache),
    TunedFlag("tokenizer-worker-num", _tokenizers),
    TunedFlag("expert-parallelism", _experts),
    TunedFlag("dp-attention", _attention_copies),
)
"""In the guides' order, then what they do not have."""


VARIABLES = frozenset({CLIP})
"""The variables that are tuned."""


def arguments_in(args: Mapping[str, Any]) -> dict[str, Any]:
    """Return what belongs into `engine.args`."""
    return {name: value for name, value in args.items() if name not in VARIABLES}


def variables_in(args: Mapping[str, Any]) -> dict[str, str]:
    """Return what belongs into `engine.env`, whose values are texts."""
    return {name: str(value) for name, value in args.items() if name in VARIABLES}


def numbers_in(env: Mapping[str, str]) -> dict[str, int]:
    """Return the tuned variables that a job sets itself; the server reads each as a number."""
    return {name: int(value) for name, value in env.items() if name in VARIABLES and value.isdecimal()}


def as_typed(args: Mapping[str, Any]) -> str:
    """Write arguments and variables as a person types them."""
    variables = [f"{name}={value}" for name, value in variables_in(args).items()]
    return " ".join([*variables, *([command_line(found)] if (found := arguments_in(args)) else [])])
