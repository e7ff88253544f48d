"""Which flags are tried, in the guides' order, and when: each by the signs of the best trial so far. Pure.

A flag is tried only where the signs say that it can matter, and the table tells why it was not. The queue
comes first in the guides and is no flag: the runner's own controller holds it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from batchrunner.advise.rules.load import LESS_CONSERVATIVE
from batchrunner.advise.rules.memory import STEP
from batchrunner.advise.rules.passes import LARGEST_CHUNK
from batchrunner.advise.rules.setup import best_backends
from batchrunner.advise.situation import memory_band
from batchrunner.engines.flags import Flags, name_in
from batchrunner.engines.logs.facts import FP8, Facts, architecture_of
from batchrunner.engines.recovery.safer_args import MORE_CONSERVATIVE, MOST_CONSERVATIVE
from batchrunner.tune.measure import GUIDES

if TYPE_CHECKING:
    from collections.abc import Callable

    from batchrunner.engines.logs.facts import Architecture
    from batchrunner.tune.measure import Signs

Args = dict[str, Any]
QUANTIZATION, TORCH_COMPILE = "quantization", "torch-compile"
ALLOWABLE = (QUANTIZATION, TORCH_COMPILE)
"""What is tried only with leave: the first changes answers, the second takes minutes at each start."""
LEAST_CONSERVATIVE, NORMAL = 0.1, 1.0
"""Schedule-conservativeness: bolder than the guides' value for a server that is too careful, and SGLang's
default."""
PASS_IS_FULL = 0.7
"""Mean share of the limit from which prefill passes are held to it (the last of a prompt is short)."""
GRAPH_SIZES = (256, 512, 768, 1024)
GRAPH_OFF_OFTEN = 0.1
MOST_RAISE = 32
"""Of max-running-requests, at once."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What there is to tune on."""

    flags: Flags
    cpu: bool = True
    cards: int = 0
    card: str | None = None
    """The GPU by its maker's name."""
    card_gb: float = 0.0
    most_pool_tokens: int = 0
    """On a CPU: the KV pool that memory allows; 0 where that is not known."""
    ignores_eos: bool = False
    """The job's outputs have exactly max_new_tokens."""
    allowed: frozenset[str] = frozenset()
    one_of_several: bool = False
    """A replica of a gateway: how many there are is the gateway's business."""

    @property
    def architecture(self) -> Architecture | None:
        """The card's generation, where its name is known."""
        return architecture_of(self.card or "")


@dataclass(frozen=True, slots=True)
class Now:
    """The best setting so far."""

    args: Args
    signs: Signs
    machine: Machine

    def value(self, name: str, default: Any) -> Any:
        """Return what a flag is set to, under any of its names; the default of one that is null."""
        found = self.args.get(name_in(self.args, name))
        return default if found is None else found


@dataclass(frozen=True, slots=True)
class Move:
    """A change to try."""

    args: Args
    why: str
    is_small: bool = False
    """Too small a step for times to show: the scheduler's count of passes decides, if they do not deny it."""


Moves = list[Move] | str
"""Changes, best first; or why none is tried."""


@dataclass(frozen=True, slots=True)
class Knob:
    """One flag, or a few that go together."""

    name: str
    moves: Callable[[Now], Moves]
    schedules: bool = False
    """It only changes which rows run when: the scheduler's own count of passes tells as much as the time."""


def _conservativeness(now: Now) -> Moves:
    signs, value = now.signs, float(now.value("schedule-conservativeness", NORMAL))
    if now.machine.ignores_eos:
        return "with ignore_eos SGLang reserves all of max_new_tokens whatever it is"
    if signs.at_limit or not signs.waits:
        return _not_admission(signs)
    if signs.retractions_per_min > GUIDES.retractions_per_min and signs.full:
        why = f"{signs.retractions_per_min:.0f} retractions a minute at token usage {signs.usage:.2f}"
        higher = [v for v in (MORE_CONSERVATIVE, round(MOST_CONSERVATIVE, 2)) if v > value]
        moves = [Move({"schedule-conservativeness": v}, why) for v in higher]
        return moves or f"{value:g} reserves all of max_new_tokens already"
    if signs.full:
        return f"token usage {signs.usage:.2f}: the pool is filled"
    why = f"token usage {signs.usage:.2f} and {signs.queue:.0f} waiting: it is too careful"
    bolder = LESS_CONSERVATIVE if value > LESS_CONSERVATIVE else LEAST_CONSERVATIVE
    lower = [v for v in (bolder, NORMAL) if v < value]
    return [Move({"schedule-conservativeness": v}, why) for v in lower] or f"{value:g} is bold enough"


def _memory(now: Now) -> Moves:
    """Where rows wait and fewer run than may, it is the pool that they wait for, full or held back."""
    if not now.signs.waits or now.signs.at_limit:
        return _not_admission(now.signs)
    return _pool(now) if now.machine.cpu else _fraction(now)


def _pool(now: Now) -> Moves:
    """Double the CPU's pool, which stands in for a card's memory."""
    pool, most = now.signs.pool_tokens, now.machine.most_pool_tokens
    if not pool or not most:
        return "how large the pool is, or could be, is not known"
    wanted = min(2 * pool, most)
    if wanted <= pool:
        return f"a quarter of the free memory holds {most} tokens"
    return [Move({"max-total-tokens": wanted}, f"rows wait for the pool of {pool} tokens")]


def _fraction(now: Now) -> Moves:
    """Raise it to the guides' spare memory at once, then step by step to the edge."""
    signs, spare = now.signs, now.signs.spare_gb
    value = now.value("mem-fraction-static", signs.mem_fraction)
    if value is None or spare is None:
        return "the log tells neither mem_fraction_static nor available_gpu_mem"
    arguments = {"chunked_prefill_size": signs.prefill_limit}
    band = memory_band(Facts(card_gb=now.machine.card_gb or None, arguments=arguments), GUIDES)
    if spare < band.low:
        return f"{spare:.1f} GB are left of the card: the edge"
    steps = [STEP]
    if spare > band.high and now.machine.card_gb:
        steps.insert(0, math.floor((spare - band.good) / now.machine.card_gb / STEP) * STEP)
    raised = dict.fromkeys(round(value + step, 2) for step in steps if step > 0 and value + step < 1)
    why = f"rows wait, and {spare:.1f} GB of the card are left"
    moves = [Move({"mem-fraction-static": v}, why, is_small=True) for v in raised]
    return moves or f"{value:g} is all of the card"


def _chunk(now: Now) -> Moves:
    signs = now.signs
    limit, got = signs.prefill_limit, signs.prefill_per_pass
    if limit is None or got is None:
        return "the log tells no prefill passes, or not their limit"
    if limit <= 0:
        return "chunked prefill is off"
    if got < PASS_IS_FULL * limit:
        return f"prefill passes have {got:.0f} tokens of {limit}: the limit does not bind"
    larger = min(2 * limit, LARGEST_CHUNK)
    if larger <= limit:
        return f"more than {LARGEST_CHUNK} tokens a pass are not tried"
    return [Move({"chunked-prefill-size": larger}, f"prefill passes have {got:.0f} of {limit} tokens")]


def _max_running(now: Now) -> Moves:
    signs = now.signs
    if not signs.waits:
        return _not_admission(signs)
    if not signs.at_limit or signs.max_running is None:
        return f"#running-req {signs.running:.0f} stays under {signs.max_running or 'its limit'}"
    if signs.full:
        return f"token usage {signs.usage:.2f}: the pool holds no more"
    # rounded up to a power of two: the pool limits by itself
    fits = max(signs.running, 1) / max(signs.usage, 1 / MOST_RAISE)
    wanted = min(2 ** math.ceil(math.log2(fits)), MOST_RAISE * signs.max_running)
    between = round(math.sqrt(wanted * signs.max_running))
    why = f"all of {signs.max_running} run at token usage {signs.usage:.2f} with {signs.queue:.0f} waiting"
    moves = [Move({"max-running-requests": v}, why) for v in (wanted, between) if v > signs.max_running]
    return moves or f"token usage {signs.usage:.2f}: the pool holds {fits:.0f} at once"


def _graphs(now: Now) -> Moves:
    signs, name = now.signs, "cuda-graph-max-bs-decode"
    if now.machine.cpu or signs.graph_off_share is None:
        return "no CUDA graphs here"
    why = f"{signs.graph_off_share:.0%} of the decode passes ran without a graph"
    if signs.graph_off_share < GRAPH_OFF_OFTEN:
        return why
    size = next((size for size in GRAPH_SIZES if size >= signs.running), GRAPH_SIZES[-1])
    if size <= int(now.value(name, 0)):
        return f"graphs up to {size} are captured already"
    moves = [Move({name: size}, why)]
    fraction = now.value("mem-fraction-static", signs.mem_fraction)
    if fraction is not None:  # graphs take memory of their own
        moves.append(Move({name: size, "mem-fraction-static": round(fraction - 2 * STEP, 2)}, why))
    return moves


def _policy(now: Now) -> Moves:
    signs, value = now.signs, now.value("schedule-policy", "fcfs")
    if value != "fcfs":
        return [Move({"schedule-policy": "fcfs"}, "the runner's own order is made for it")]
    shared = f"{signs.cached_share:.0%} of the prompt tokens are shared"
    if signs.cached_share < GUIDES.shared:
        return shared
    if signs.queue > GUIDES.lpm_queue:
        return f"{signs.queue:.0f} waiting: with more than {GUIDES.lpm_queue:.0f} lpm is fcfs"
    return [Move({"schedule-policy": "lpm"}, shared)]


def _attention(now: Now) -> Moves:
    if now.machine.architecture is None:
        return "no choice of backend for this device"
    backends = best_backends(now.machine.architecture, Facts(model=now.signs.model))
    if not backends:
        return f"SGLang chooses it for {now.signs.model}"
    current = now.value("attention-backend", now.signs.attention_backend)
    return [Move({"attention-backend": v}, f"it is {current}") for v in backends if v != current]


def _compile(now: Now) -> Moves:
    if TORCH_COMPILE not in now.machine.allowed:
        return "not tried without --allow torch-compile"
    if now.value("enable-torch-compile", False):
        return "on already"
    return [Move({"enable-torch-compile": True}, "allowed")]


def _quantized(now: Now) -> Moves:
    if QUANTIZATION not in now.machine.allowed:
        return "not tried without --allow quantization: it changes answers"
    if now.machine.architecture not in FP8:
        return "no FP8 on this device"
    choices: list[Args] = [{"kv-cache-dtype": "fp8_e4m3"}, {"quantization": "fp8"}]
    return [Move(args, "allowed") for args in choices if not args.keys() & now.args.keys()] or "on already"


def _parallel(now: Now) -> Moves:
    """Tell what a gateway would bring: it sends rows where there is room, `--dp-size` deals them in turn."""
    cards, tp = now.machine.cards, int(now.value("tp-size", 1))
    if now.machine.one_of_several or cards < 2:  # noqa: PLR2004
        return "one replica" if now.machine.one_of_several else "one device"
    if (replicas := cards // tp) < 2:  # noqa: PLR2004
        return f"engine: {{kind: gateway}} with a tp under {tp} is faster, where the weights fit so few GPUs"
    return f"engine: {{kind: gateway, tp: {tp}}} has {replicas} replicas on {cards} GPUs, each about as fast"


def _not_admission(signs: Signs) -> str:
    if not signs.waits:
        return "nothing waits at the server: admission does not limit"
    return f"#running-req {signs.running:.0f} is at max-running-requests {signs.max_running}: that limits"


KNOBS = (
    Knob("schedule-conservativeness", _conservativeness, schedules=True),
    Knob("memory", _memory, schedules=True),
    Knob("chunked-prefill-size", _chunk),
    Knob("max-running-requests", _max_running, schedules=True),
    Knob("cuda-graph-max-bs", _graphs),
    Knob("schedule-policy", _policy, schedules=True),
    Knob("attention-backend", _attention),
    Knob("torch-compile", _compile),
    Knob("quantization", _quantized),
    Knob("parallelism", _parallel),
)
"""In the guides' order."""
