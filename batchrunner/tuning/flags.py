"""The table of SGLang's flags: when to change each flag, to which values, and at what cost.

A sign is an observation, for example that requests wait although the KV pool has room. Advice names the next
value of a flag if the server shows the flag's sign. `batchrun tune` measures the values. Recovery from a
death takes the values for the sign `oom`, out of memory. An environment variable of the server counts as a
flag.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from batchrunner.sglang.flags import CLIP, STATE_RATIO, Flags, number
from batchrunner.sglang.logs.reader import (
    FP8,
    Architecture,
    Facts,
    prefill_graph_off,
)
from batchrunner.sglang.model_files import kv_bytes
from batchrunner.tuning.ngrams import CORPUS_BUDGET, checking_cost
from batchrunner.tuning.signals import GUIDES

DECODING_SIGNS = frozenset({
    "held", "retracting", "full", "memory-left", "capped", "graph-off", "evicted", "small-prefills",
    "large-pages", "small-model", "wide-numbers",
})  # fmt: skip
"""Names of observations (signs) that only a server with decoding requests can show."""


class MemoryBand(NamedTuple):
    """Minimum, target and maximum of the GPU memory, in GB, that should be free when a server is ready."""

    low: float
    good: float
    high: float


@dataclass(frozen=True, slots=True)
class Server:
    """A server whose flags may change: its facts, from its log and arguments, and its mean load."""

    facts: Facts
    running: float = 0.0
    """Mean number of running requests, or the number just before a death."""
    usage: float = 0.0
    """Mean token usage: the fraction of the KV pool in use."""
    decodes: bool = True
    """Whether the server's requests decode. False for tasks without generated tokens, such as embedding."""
    output_tokens: float = 0.0
    """Mean number of tokens in an output."""
    longest_output: int | None = None
    """99th percentile of the output lengths, in tokens; None if unknown."""
    shared: float | None = None
    """Fraction of the prompt tokens that come from the prefix cache, or could come from it; None if
    unknown."""
    repeated: float = 1.0
    """Mean number of tokens that a decode step would yield with n-gram speculation from earlier outputs."""
    speculates_exactly: bool = True
    """Whether answers keep their distribution with speculation (`ngrams.is_exact`)."""
    most_pool_tokens: float = 0.0
    """Maximum size of the KV pool, in tokens, that the memory of a machine without a GPU allows."""
    media: bool | None = None
    """Whether prompts have images, sounds or videos; None if unknown."""
    raises_running: bool = True
    """Whether `--max-running-requests` may be raised."""
    death_line: str = ""
    """Log line that names the cause of the server's death; empty if the server did not die."""

    def value_of(self, flag: str) -> float | None:
        """Return the present value of a flag, as on the command line (`in_effect`); None if unknown."""
        return in_effect(self.facts, flag)

    @property
    def kv_share(self) -> float:
        """Size of the KV cache in use divided by the size of the weights, on one GPU; 0 if unknown."""
        token_bytes = kv_bytes(self.facts.config, BYTES_OF_16_BITS) or 0
        pool_gb = (self.value_of("max-total-tokens") or 0) * token_bytes / self.facts.tp / 1e9
        return self.usage * pool_gb / self.facts.weights_gb if self.facts.weights_gb else 0.0

    @property
    def ngram_speedup(self) -> float:
        """Predicted output rate with n-gram speculation, divided by the present one."""
        return self.repeated / checking_cost(self.running, self.kv_share)

    @property
    def spare_gb(self) -> float | None:
        """Free GPU memory in GB when the server was ready (`available_gpu_mem` in its log)."""
        return self.facts.ready.gpu_gb if self.facts.ready else None

    @property
    def band(self) -> MemoryBand:
        """Free GPU memory that SGLang's tuning guides advise, scaled to this GPU and this prefill chunk."""
        chunk = self.value_of("chunked-prefill-size") or 0
        scale = min(1.0, (self.facts.card_gb or WHOLE_CARD_GB) / WHOLE_CARD_GB)
        chunk_gb = max(0.0, chunk - USUAL_CHUNK) * CHUNK_GB_A_TOKEN
        return MemoryBand(
            low=scale * GUIDES.memory_low_gb,
            good=scale * GUIDES.memory_good_gb + chunk_gb,
            high=scale * GUIDES.memory_high_gb + chunk_gb,
        )


WHOLE_CARD_GB = 40.0
"""SGLang's tuning guides advise how much GPU memory to leave free. Their figures suit GPUs with at least this
many GB. A smaller GPU runs smaller batches, and needs less free memory."""
USUAL_CHUNK = 8192
"""`--chunked-prefill-size`, in tokens, that SGLang's tuning guides assume. A larger chunk needs more free
memory."""
CHUNK_GB_A_TOKEN = 1.5 / 1024
"""Memory for activations of a prefill chunk, in GB per token. The value is from SGLang's memory_hook.py."""
GRAPH_GB_A_REQUEST = 2 / 1024
"""Memory of a decode graph, in GB per request of its batch. The value is from SGLang's memory_hook.py."""
USUAL_GRAPH_SIZE = 160
"""Assumed largest batch with a CUDA graph, in requests, if the server's log does not report it (SGLang's
tuning guides: "typically 160-256")."""
LEAST_POOL = 0.05
"""Minimum size of a useful KV pool, as a fraction of the GPU's memory."""
DP_ATTENTION_CONSERVATIVENESS = 0.3
"""Factor by which SGLang multiplies `--schedule-conservativeness` if DP attention is on
(parallel_hook.py)."""
_DIVIDED_BY_RANKS = {"chunked-prefill-size", "max-running-requests", "max-mamba-cache-size"}
"""Flags whose values DP attention divides by the number of its ranks. Each rank logs its own share."""
_LOGGED_AS_TOTAL = {"max-running-requests", "max-mamba-cache-size"}
"""Flags of `_DIVIDED_BY_RANKS` that the server's logged arguments give as a total over all ranks."""
_READY_FIELDS = {
    "chunked-prefill-size": "chunked_prefill_size",
    "max-running-requests": "max_running_requests",
    "max-total-tokens": "max_total_num_tokens",
    "context-length": "context_len",
}
"""Flags whose effective value the scheduler logs just before it accepts requests, each with its name in that
log line."""


def in_effect(facts: Facts, flag: str) -> float | None:
    """Return the value of a flag that the server really uses, as on the command line; None if unknown.

    SGLang may choose another value than the command line has. With DP attention, it logs the value of one
    rank, while the flag on the command line has the total of all ranks.
    """
    if flag.startswith("cuda-graph-max-bs"):
        return facts.graph_max_bs
    # The scheduler knows best what it uses. The logged arguments come second.
    rank_value = getattr(facts.ready, _READY_FIELDS.get(flag, ""), None)
    if rank_value is None:
        argument = facts.number(flag.replace("-", "_"))
        if argument is None:
            return None
        if flag in _LOGGED_AS_TOTAL:
            # This argument already is the total of all ranks.
            return int(argument)
        rank_value = argument
    value = on_command_line(facts, flag, rank_value)
    return int(value) if value == int(value) else value


def on_command_line(facts: Facts, flag: str, value: float) -> float:
    """Return the value to write for the flag so that each scheduler gets `value`.

    With DP attention, SGLang divides some flags by the number of ranks, and multiplies another by a factor.
    """
    if facts.attn_dp > 1 and flag in _DIVIDED_BY_RANKS:
        return value * facts.attn_dp
    if facts.attn_dp > 1 and flag == "schedule-conservativeness":
        return round(value / DP_ATTENTION_CONSERVATIVENESS, 2)
    return value


def least_fraction(facts: Facts) -> float:
    """Return the minimum `--mem-fraction-static` for the weights and a useful KV pool; 0 if unknown."""
    weights, card = facts.weights_gb, facts.card_gb
    return weights / card + LEAST_POOL if weights and card else 0.0


DEFAULT_CONSERVATIVENESS = 1.0
"""SGLang's default of `--schedule-conservativeness`."""
LESS_CONSERVATIVE = 0.3
"""`--schedule-conservativeness` that SGLang's tuning guides advise if a scheduler admits too few requests."""
LEAST_CONSERVATIVE = 0.1
"""Lower `--schedule-conservativeness` than SGLang's tuning guides advise; only trials use it."""
MORE_CONSERVATIVE = 1.3
"""`--schedule-conservativeness` that SGLang's tuning guides advise against frequent retractions."""
MOST_CONSERVATIVE = 1 / 0.7
"""`--schedule-conservativeness` at which a scheduler reserves memory for all of `max_new_tokens`. It reserves
the fraction min(0.7 x conservativeness, 1)."""
MOST_CLIP = 4096
"""SGLang's default clip for reserved output: it reserves memory for at most this many tokens of each
output."""
CLEARLY_SHORTER = 0.9
"""The clip for reserved output tokens is lowered only if it falls below this fraction of the present one."""
FEWER_RUNNING = 0.9
"""If the KV pool is too small, `--max-running-requests` falls to this fraction of the running requests."""
MOST_RUNNING = 4096
"""SGLang's largest default of `--max-running-requests`."""
MOST_RAISE = 32
"""Maximum factor by which `--max-running-requests` is raised at once."""
LEAST_RUNNING = 4
"""Minimum `--max-running-requests` that is tried."""
LARGE_CHUNK_FACTOR = 8
"""Factor of the second larger prefill chunk. It is tried because doubling may gain nothing."""
CHUNKS = (4096, 2048)
"""The two steps down of `--chunked-prefill-size`, in tokens, in SGLang's tuning guides."""
LARGEST_CHUNK = 16_384
"""SGLang's largest default of `--chunked-prefill-size`, in tokens."""
FRACTIONS = (0.8, 0.7, 0.6)
"""Steps down of `--mem-fraction-static`: two from SGLang's tuning guides, and one more for a GPU that other
programs use too."""
FRACTION_STEP = 0.01
"""Amount by which SGLang's tuning guides raise `--mem-fraction-static` at a time."""
HIGHEST_FRACTION = 0.95
"""Maximum `--mem-fraction-static` that is computed. Only trials go further, by FRACTION_STEP at a time."""
ROOM_STEP = 0.05
"""If the weights leave no room for a KV pool, `--mem-fraction-static` rises by this step."""
MOST_POOL = 8
"""Maximum factor by which the KV pool of a server on a CPU grows at once."""
LARGER_POOL = 1.1
"""A pool is enlarged only if it grows by at least this factor."""
MOST_STATE_SHARE = 0.9
"""Maximum size of a hybrid model's state pool, as a fraction of the memory of state pool and KV pool."""
STATE_STRATEGY = "mamba-radix-cache-strategy"
LAZY_SLOTS = 4
"""Number of state slots that a request takes with the strategy `extra_buffer_lazy`."""
GRAPH_SIZES = (256, 512, 1024, 2048, 4096)
"""Larger values of `--cuda-graph-max-bs-decode` to try, in requests."""
SMALLER_GRAPH_SIZE = 64
"""Smaller `--cuda-graph-max-bs-decode` to try, in requests, if the present value is unknown."""
LEAST_GRAPH_SIZE = 16
"""Minimum `--cuda-graph-max-bs-decode` to try, in requests. An error message of SGLang proposes it."""
NGRAM = "speculative-algorithm"
"""Flag that turns on n-gram speculation (value NGRAM)."""
CORPUS_FLAG = "speculative-ngram-external-sam-budget"
"""Flag for the number of drafted tokens that come from an external corpus."""
LEAST_SPEEDUP = 1.3
"""N-gram speculation is tried if its predicted output rate is at least this factor higher. The prediction
leaves out the CPU time in which SGLang looks up drafts."""
BYTES_OF_16_BITS = 2
"""Number of bytes of a number in the KV cache of an unquantised model."""
TOKENIZERS = 4
"""`--tokenizer-worker-num` and `--detokenizer-worker-num`, in processes, if one process is too slow."""
MEDIA_LOADERS = 16
"""`--mm-io-worker-num`, in threads: SGLang's value for a model with many images (kimi_k3.py in
multimodal/processors)."""
MEDIA_PROCESSORS = 2
"""`--mm-processor-worker-num`, in threads: SGLang's value for a model with many images (kimi_k3.py in
multimodal/processors)."""
_LANGUAGE_MODEL_ONLY = (
    "DeepseekV4ForCausalLM", "MuseGlimmerForConditionalGeneration", "Cosmos3ForConditionalGeneration",
    "Cosmos3EdgeForConditionalGeneration",
)  # fmt: skip
"""Models that take `--language-model-only` (LANGUAGE_MODEL_ONLY_ARCHITECTURES in server_args.py)."""
_BACKENDS: Mapping[Architecture, tuple[str, str]] = {
    "hopper": ("fa3", "flashinfer"),
    "blackwell": ("trtllm_mha", "flashinfer"),
    "ada": ("flashinfer", "triton"),
    "ampere": ("flashinfer", "triton"),
}
"""For each generation of GPUs, the attention backend that SGLang's tuning guides advise, and one to compare
it with."""
_BACKEND_CHOSEN_BY_SGLANG = (
    "GptOss", "GraniteSWA", "GraniteMoeSWA", "IQuestQ1", "MiMoV2", "EmbeddingGemma", "Gemma4", "Exaone",
    "Inkling", "MiniCPM", "Llama4",
)  # fmt: skip
"""Models for which SGLang chooses the attention backend itself (in its model_config and model_overrides).
Some have attention sinks, for example, which flashinfer does not support."""

NextValues = Callable[[Server], Sequence[Any]]
"""A function that returns the values of a flag to take next, in order; empty if no value remains."""


def _less_conservative(server: Server) -> list[float]:
    """Return lower values of `--schedule-conservativeness`, so that SGLang admits more requests.

    The first is the value of SGLang's tuning guides, or a lower one if the flag is not above it. The second
    is SGLang's default, if the flag is above it.
    """
    name = "schedule-conservativeness"
    present = server.value_of(name) or DEFAULT_CONSERVATIVENESS
    low = on_command_line(server.facts, name, LESS_CONSERVATIVE)
    if present <= low:
        low = on_command_line(server.facts, name, LEAST_CONSERVATIVE)
    return [value for value in (low, DEFAULT_CONSERVATIVENESS) if value < present]


def _more_conservative(server: Server) -> list[float]:
    """Return higher values of `--schedule-conservativeness`, so that SGLang retracts fewer requests."""
    name = "schedule-conservativeness"
    present = server.value_of(name) or DEFAULT_CONSERVATIVENESS
    # The first value is one for the command line: with DP attention, too, it is a small step up. The second
    # is computed from the value that each scheduler must get.
    most = round(on_command_line(server.facts, name, MOST_CONSERVATIVE), 2)
    return [value for value in (MORE_CONSERVATIVE, most) if value > present]


def _lower_clip(server: Server) -> list[int]:
    """Return the longest output as the new clip for reserved output tokens, if it is clearly lower."""
    present = server.value_of(CLIP) or MOST_CLIP
    longest = server.longest_output or MOST_CLIP
    return [longest] if longest < CLEARLY_SHORTER * present else []


def _larger_pool(server: Server) -> list[int]:
    """Return larger sizes of the KV pool in tokens: room for all requests that may run, then twice the size.

    Neither exceeds the memory of the machine.
    """
    present = server.value_of("max-total-tokens") or 0
    if present <= 0:
        return []
    most_running = server.facts.max_running or 0
    # The running requests need the present pool, so all allowed requests need proportionally more.
    size_for_all = present * min(MOST_POOL, most_running / max(server.running, 1))
    sizes = [min(size, server.most_pool_tokens) for size in (size_for_all, 2 * present)]
    return [int(size) for size in dict.fromkeys(sizes) if size >= LARGER_POOL * present]


def _half_pool(server: Server) -> list[int]:
    """Propose half the size of the KV pool in tokens, or nothing if the longest request would not fit."""
    half = int(server.value_of("max-total-tokens") or 0) // 2
    longest_request = server.value_of("context-length") or 1
    return [half] if half >= longest_request else []


def _good_fraction(server: Server) -> list[float]:
    """Return the `--mem-fraction-static` that leaves as much memory free as SGLang's tuning guides advise.

    It also leaves room for the weights and a useful KV pool. The list is empty if this value would move the
    flag in the wrong direction.
    """
    present, spare_gb, card_gb = server.value_of("mem-fraction-static"), server.spare_gb, server.facts.card_gb
    if present is None or spare_gb is None or not card_gb:
        return []
    # Free memory beyond the amount that SGLang's guides advise.
    surplus_gb = spare_gb - server.band.good
    is_raise = surplus_gb > 0
    # Rounded down, so that at least the advised memory stays free. Negative if too little memory is free.
    steps = math.floor(surplus_gb / card_gb / FRACTION_STEP)
    if is_raise:
        # Callers ask for a larger fraction only if far more memory is free than advised, so one step is safe.
        steps = max(1, steps)
    least = math.ceil(least_fraction(server.facts) / FRACTION_STEP) * FRACTION_STEP
    target = round(min(HIGHEST_FRACTION, max(least, present + steps * FRACTION_STEP)), 3)
    # The bounds may have moved the target to the other side of the present value.
    moves_the_right_way = target > present if is_raise else target < present
    return [target] if moves_the_right_way else []


def _higher_fraction(server: Server) -> list[float]:
    """Return two higher values of `--mem-fraction-static`: that of `_good_fraction`, and one small step up.

    They are for trials, in which a server may die. So they need only half of the minimum free memory in
    SGLang's tuning guides (2.5 of 5 GB). Servers on an H200 took 2.0 to 2.5 GB more once they were ready
    (docs/benchmarks.md).
    """
    present, spare_gb = server.value_of("mem-fraction-static"), server.spare_gb
    card_gb = server.facts.card_gb or 0.0
    if present is None or spare_gb is None:
        return []
    spare_after_step_gb = spare_gb - FRACTION_STEP * card_gb
    if spare_after_step_gb < server.band.low / 2:
        return []
    # With less free memory, `_good_fraction` may lower the flag, or take a step up that is too long.
    advised = _good_fraction(server) if spare_gb > server.band.high else []
    # Both values may be the same.
    fractions = dict.fromkeys([*advised, round(present + FRACTION_STEP, 3)])
    return [fraction for fraction in fractions if fraction < 1]


def _lower_fraction(server: Server) -> list[float]:
    """Return the steps down of `--mem-fraction-static` that still leave room for a useful KV pool."""
    present, least = server.value_of("mem-fraction-static"), least_fraction(server.facts)
    lower_fractions = [fraction for fraction in FRACTIONS if present is None or fraction < present]
    return [fraction for fraction in lower_fractions if fraction > least]


def _fraction_for_pool(server: Server) -> list[float]:
    """Return a `--mem-fraction-static` that leaves room for a KV pool.

    It is higher than the present one, and than the minimum that SGLang's error message names.
    """
    # The search begins at FRACTIONS[0] if the present fraction is unknown.
    present = server.value_of("mem-fraction-static") or FRACTIONS[0]
    minimum = re.search(r"above (0\.\d+)", server.death_line)
    too_low = max(present, float(minimum[1])) if minimum else present
    fraction = round(too_low + ROOM_STEP, 3)
    return [fraction] if fraction <= HIGHEST_FRACTION else []


def _larger_chunk(server: Server) -> list[int]:
    """Return two larger prefill chunks, in tokens, of at most LARGEST_CHUNK.

    The first is twice the present chunk, but at least the smallest size of the guides. The second is
    LARGE_CHUNK_FACTOR times the present chunk.
    """
    present = int(server.value_of("chunked-prefill-size") or 0)
    if not 0 < present < LARGEST_CHUNK:
        return []
    chunks = (max(2 * present, CHUNKS[-1]), LARGE_CHUNK_FACTOR * present)
    return [min(chunk, LARGEST_CHUNK) for chunk in chunks]


def _smaller_chunk(server: Server) -> list[int]:
    """Return smaller sizes of the prefill chunk to try, in tokens, the largest first."""
    present = server.value_of("chunked-prefill-size")
    if present is None or present <= 0:
        # The chunk size is unknown, or chunking is off.
        return [*CHUNKS]
    return [chunk for chunk in CHUNKS if chunk < present]


def _more_running(server: Server) -> list[int]:
    """Return higher values of `--max-running-requests`, so that the KV pool becomes the limit.

    The first value is the number of requests that fit in the pool, rounded up to a power of two. The second
    is the geometric mean of the first and the present value. If memory already sets a lower limit than the
    flag, there is no value, because it would have no effect.
    """
    if server.facts.ready and server.facts.ready.memory_caps_running:
        return []
    name = "max-running-requests"
    present = int(server.value_of(name) or 0)
    # The running requests fill the fraction `usage` of the pool, so running / usage requests fit. A lower
    # bound of the usage prevents huge values.
    fitting_on_rank = max(server.running, 1) / max(server.usage, 1 / MOST_RAISE)
    fitting = on_command_line(server.facts, name, fitting_on_rank)
    power_of_two = 2 ** math.ceil(math.log2(fitting))
    target = min(power_of_two, MOST_RAISE * present, max(MOST_RUNNING, present))
    between = round(math.sqrt(target * present))
    return [value for value in (target, between) if value > present > 0]


def _fewer_running(server: Server) -> list[int]:
    """Return three quarters of the requests that ran, or of `--max-running-requests` if that is lower."""
    counts = (int(server.value_of("max-running-requests") or 0), int(_running_on_all_ranks(server)))
    # A count of 0 is unknown.
    present = min((count for count in counts if count), default=0)
    lower = 3 * present // 4
    return [lower] if lower >= LEAST_RUNNING else []


def _running_on_all_ranks(server: Server) -> float:
    """Return the number of running requests on all ranks, which `--max-running-requests` limits."""
    return on_command_line(server.facts, "max-running-requests", server.running)


def _fewer_retracted(server: Server) -> list[int]:
    """Return a lower `--max-running-requests`, if all of `max_new_tokens` is already reserved."""
    fewer = int(FEWER_RUNNING * _running_on_all_ranks(server))
    return [fewer] if fewer and not _more_conservative(server) else []


def _larger_graphs(server: Server) -> list[int]:
    """Return the smallest size of GRAPH_SIZES that covers all running requests, if graphs are enabled."""
    size = next((size for size in GRAPH_SIZES if size >= server.running), GRAPH_SIZES[-1])
    is_larger = size > (server.facts.graph_max_bs or 0)
    return [size] if is_larger and not server.facts.graph_disabled else []


def _smaller_graphs(server: Server) -> list[int]:
    """Return half the largest batch with a CUDA graph, at least LEAST_GRAPH_SIZE, if graphs are enabled."""
    if server.facts.graph_disabled:
        return []
    captured = server.facts.graph_max_bs
    if not captured:
        return [SMALLER_GRAPH_SIZE]
    lower = max(LEAST_GRAPH_SIZE, captured // 2)
    return [lower] if lower < captured else []


def state_slots(server: Server, per_request: int, slot_scale: float = 1.0) -> int:
    """Return the number of state slots at which state pool and KV pool hold equally many requests.

    A running request takes `per_request` slots, each `slot_scale` times as large as a slot is now. The token
    usage of the KV pool may rise to `GUIDES.usage_good`. The memory of both pools together stays the same.
    Return 0 if too little is known.
    """
    pool, share = server.facts.states, server.facts.state_share
    if pool is None or not share or server.running < 1:
        return 0
    # Each share is a fraction of the memory that the two pools have together. SGLang allocates one slot more
    # than it uses, so the share of one slot is taken from what the requests get.
    share_of_slot = slot_scale * share / (pool.slots + 1)
    state_share_of_request = per_request * share_of_slot
    kv_share_of_request = (1 - share) * server.usage / GUIDES.usage_good / server.running
    fitting_in_both = (1 - share_of_slot) / (state_share_of_request + kv_share_of_request)
    # The state pool gets at most the fraction MOST_STATE_SHARE of the memory.
    fitting_in_states = (MOST_STATE_SHARE - share_of_slot) / state_share_of_request
    requests = int(min(fitting_in_both, fitting_in_states, MOST_RUNNING))
    # If `state_args` may not raise the limit of running requests, a larger pool would be of no use.
    allowed = _allowed_running(server)
    if allowed is not None and not server.raises_running:
        requests = min(requests, allowed)
    return requests * per_request


def _allowed_running(server: Server) -> int | None:
    """Return how many requests `--max-running-requests` allows a scheduler; None if the flag is not set."""
    total = server.facts.number("max_running_requests")
    return int(total // server.facts.attn_dp) if total else None


def state_args(
    server: Server, per_request: int, slot_scale: float = 1.0, *, without_cache: bool = False
) -> dict[str, Any]:
    """Return the flags that set the state pool to `state_slots`; empty if too little is known.

    The pool's flag is `--max-mamba-cache-size` if the server's arguments set the number of slots, else
    `--mamba-full-memory-ratio`. If `--max-running-requests` is set, and allows fewer requests than the larger
    pool holds, it is raised too. `without_cache` says that the same change switches the prefix cache off.
    SGLang then takes the number of slots from `--max-running-requests`, if that is set, and ignores the
    ratio. So the pool's flag is `--max-mamba-cache-size` in this case too.
    """
    slots, pool = state_slots(server, per_request, slot_scale), server.facts.states
    if not slots or pool is None:
        return {}
    requests = slots // per_request
    allowed = _allowed_running(server)
    args: dict[str, Any] = {}
    if allowed is not None and requests > max(allowed, pool.most_running):
        args["max-running-requests"] = int(on_command_line(server.facts, "max-running-requests", requests))
    if server.facts.sizes_states or (without_cache and allowed is not None):
        size_flag = "max-mamba-cache-size"
        return {size_flag: int(on_command_line(server.facts, size_flag, slots)), **args}
    # The state pool's share of the memory of both pools grows with the number and the size of its slots.
    # SGLang allocates one slot more than it uses. Half a slot is added to that, so that at least `slots` are
    # left after SGLang has rounded down.
    present_share = server.facts.state_share or 0.0
    new_share = min(MOST_STATE_SHARE, (slots + 1.5) * slot_scale * present_share / (pool.slots + 1))
    # The flag is the memory of the state pool, divided by that of the KV pool.
    ratio = new_share / (1 - new_share)
    return {"mamba-full-memory-ratio": math.ceil(100 * ratio) / 100, **args}


def _state_pool(flag: str, *, grows: bool) -> NextValues:
    """Return a function for the next value of a flag that enlarges (`grows`) or shrinks the state pool."""

    def values(server: Server) -> list[Any]:
        """Return the value for the best number of state slots; empty if the pool would hardly change."""
        pool = server.facts.states
        if pool is None:
            return []
        slots = state_slots(server, pool.per_request)
        # A small change would not be worth a restart. `slots` is 0 if too little is known.
        if grows and slots < LARGER_POOL * pool.slots:
            return []
        if not grows and not 0 < slots * LARGER_POOL <= pool.slots:
            return []
        args = state_args(server, pool.per_request)
        return [args[flag]] if flag in args else []

    return values


def _twice_ratio(server: Server) -> list[float]:
    """Return twice the present ratio of state pool to KV pool; empty if another flag sizes the state pool."""
    if server.facts.sizes_states:
        return []
    doubled = 2 * (server.value_of("mamba-full-memory-ratio") or STATE_RATIO)
    return [doubled] if doubled <= MOST_STATE_SHARE / (1 - MOST_STATE_SHARE) else []


def _twice_slots(server: Server) -> list[int]:
    """Return twice the present number of state slots; empty if the arguments do not set this number."""
    slots = server.value_of("max-mamba-cache-size")
    return [int(2 * slots)] if slots else []


def _lazy_strategy(server: Server) -> list[str]:
    """Return the strategy of a hybrid model's state pool that takes fewer slots per request.

    Like the present strategy, it caches prefixes, and lets SGLang prepare a pass while the previous one runs.
    """
    arguments, pool = server.facts.arguments, server.facts.states
    strategy = arguments.get(STATE_STRATEGY.replace("-", "_"))
    saves_slots = pool is not None and strategy == "extra_buffer" and pool.per_request > LAZY_SLOTS
    # A server that only prefills or only decodes refuses the strategy (mamba_hook.py).
    is_half = arguments.get("disaggregation_mode") not in {None, "null"}
    # Without the prefix cache, a request takes fewer slots still.
    needs_no_cache = bool(_no_prefix_cache(server))
    return ["extra_buffer_lazy"] if saves_slots and not is_half and not needs_no_cache else []


def _no_prefix_cache(server: Server) -> list[bool]:
    """Propose `--disable-radix-cache` if prompts are known to share no prefixes.

    Without the cache, a hybrid model's running requests get the state slots that cached prefixes took. A
    server with one slot per request already runs without the cache, so nothing is proposed.
    """
    if server.shared is None or server.shared >= GUIDES.shared:
        return []
    return [True] if server.facts.states and server.facts.states.per_request != 1 else []


def _states_in_16_bits(server: Server) -> list[str]:
    """Return the 16-bit number type for the states of a hybrid model if they have 32 bits."""
    dtype = (
        server.facts.arguments.get("mamba_ssm_dtype")
        or server.facts.config.get("mamba_ssm_dtype")
        or "float32"
    )
    return ["bfloat16"] if server.facts.states and dtype == "float32" else []


def slots_after(args: Mapping[str, Any], per_request: int) -> int:
    """Return the number of state slots that a request takes after a change of flags."""
    if args.get("disable-radix-cache"):
        return 1
    return LAZY_SLOTS if STATE_STRATEGY in args else per_request


def companions_of(name: str, value: Any, server: Server) -> dict[str, Any]:
    """Return the other flags that must change if the flag `name` changes.

    With n-gram speculation (NGRAM), these flags limit the running requests and set the budget for a corpus.
    If a flag changes the size or number of a hybrid model's states, the size of the state pool follows. If
    the state pool grows, `--max-running-requests` may have to follow.
    """
    if name == NGRAM:
        return _with_ngrams(server)
    pool = server.facts.states
    if pool is None:
        return {}
    if name in {"mamba-full-memory-ratio", "max-mamba-cache-size"}:
        args = state_args(server, pool.per_request)
        return {flag: setting for flag, setting in args.items() if flag == "max-running-requests"}
    if name not in {"disable-radix-cache", STATE_STRATEGY, "mamba-ssm-dtype"}:
        return {}
    per_request = slots_after({name: value}, pool.per_request)
    # With this flag, states have 16 bits instead of 32.
    slot_scale = 0.5 if name == "mamba-ssm-dtype" else 1.0
    # A request takes a single slot only if the prefix cache is off.
    return state_args(server, per_request, slot_scale, without_cache=per_request == 1)


def best_backends(facts: Facts) -> Sequence[str]:
    """Return the attention backend that SGLang's tuning guides advise, and another one to compare it with.

    Empty if SGLang has to choose the backend itself.
    """
    generation = facts.architecture
    sglang_chooses = any(name in (facts.model or "") for name in _BACKEND_CHOSEN_BY_SGLANG)
    if generation is None or facts.is_sparse or sglang_chooses:
        return ()
    if not facts.is_mla or generation == "hopper":
        return _BACKENDS[generation]
    # For a model with latent attention (MLA), SGLang chooses triton on other GPUs.
    return ("trtllm_mla", "flashinfer") if generation == "blackwell" else ()


def _other_backends(server: Server) -> list[str]:
    """Return the attention backends of `best_backends` without the present one."""
    present = server.facts.arguments.get("attention_backend")
    return [backend for backend in best_backends(server.facts) if backend != present]


def _prefill_interval(server: Server) -> list[int]:
    """Return the best number of decode steps between two prefill passes, as a list of one value.

    The list is empty if the flag is set already. A prefill pass is assumed to take as long as a decode step.
    With more steps between passes, there are fewer passes, but a finished request leaves its slot empty for
    longer (half of the interval on average).
    The best number makes both costs equal.
    """
    if server.value_of("prefill-decode-interval"):
        return []
    return [round(math.sqrt(2 * server.output_tokens))]


def _unless_set(flag: str, *, value: Any) -> NextValues:
    """Return a function whose only next value is `value`; empty if the flag has this value already."""
    argument = flag.replace("-", "_")
    return lambda server: [] if server.facts.arguments.get(argument) == value else [value]


def _at_least(flag: str, least: int) -> NextValues:
    """Return a function that raises a number of threads or processes to `least`, if it is lower now."""
    return lambda server: [least] if (server.value_of(flag) or 0) < least else []


def _for_media(flag: str, least: int) -> NextValues:
    """Do the same as `_at_least`, but only for prompts with images, sounds or videos."""
    values = _at_least(flag, least)
    return lambda server: values(server) if server.media else []


def _arrival_order(server: Server) -> list[str]:
    """Propose the `--schedule-policy` that takes requests as they arrive, if another one is set."""
    takes_as_they_arrive = server.facts.arguments.get("schedule_policy") in {None, "fcfs"}
    return [] if takes_as_they_arrive else ["fcfs"]


def _shared_port(server: Server) -> list[bool]:
    """Propose `--enable-http-worker-reuseport` for a server with several tokenizer workers."""
    has_several_workers = (server.value_of("tokenizer-worker-num") or 1) > 1
    is_set = bool(server.facts.arguments.get("enable_http_worker_reuseport"))
    return [True] if has_several_workers and not is_set else []


def _without_encoder(server: Server) -> list[bool]:
    """Propose to leave out the encoder of images, sounds or videos, if the job has no such inputs."""
    is_unused = server.media is False and server.facts.model in _LANGUAGE_MODEL_ONLY
    return [True] if is_unused and not server.facts.arguments.get("language_model_only") else []


def _adaptive_speculation(server: Server) -> list[bool]:
    """Propose `--speculative-adaptive`, if SGLang supports it (see its `adaptive_unsupported_reason`)."""
    arguments = server.facts.arguments
    is_eagle = arguments.get("speculative_algorithm") in {"EAGLE", "EAGLE3"}
    has_one_guess = arguments.get("speculative_eagle_topk") in {None, 1}
    is_supported = is_eagle and has_one_guess and server.facts.attn_dp == 1
    return [True] if is_supported and not arguments.get("speculative_adaptive") else []


def _other_layouts(server: Server) -> list[int]:
    """Return half and twice the number of GPUs per replica, if weights, heads and idle GPUs allow it."""
    facts = server.facts
    # With DP attention, the heads are not divided among all GPUs, so the checks below do not hold.
    if facts.attn_dp != 1:
        return []
    sizes: list[int] = []
    # With half as many GPUs, each holds twice its present share of the weights. This is the fraction of its
    # memory that the second share takes.
    further_weights = (facts.weights_gb or 0) / (facts.card_gb or 1)
    if facts.tp > 1 and least_fraction(facts) + further_weights < HIGHEST_FRACTION:
        sizes.append(facts.tp // 2)
    # A replica of twice the size needs as many idle GPUs as it has now.
    if facts.idle_gpus >= facts.gpus:
        sizes.append(2 * facts.tp)
    # Each GPU gets equally many attention heads. A power of two divides the heads of most models.
    heads = facts.config.get("num_attention_heads")
    if not heads:
        return [size for size in sizes if size.bit_count() == 1]
    return [size for size in sizes if heads % size == 0]


def _ngrams(server: Server) -> list[str]:
    """Propose n-gram speculation (NGRAM) if it should gain clearly, and would not change the answers.

    With NGRAM, SGLang refuses DP attention, and most attention backends with KV pages of several tokens. On
    GPUs of makers other than NVIDIA, it decodes greedily, whatever the temperature. For a mixture of experts
    the gain is unknown, because more checked tokens read more experts. A hybrid model would need a state for
    each checked token (`_handle_max_mamba_cache` in kv_cache_configurator.py).
    """
    facts, arguments = server.facts, server.facts.arguments
    speculates = bool(arguments.get("speculative_algorithm"))
    pages_fit = arguments.get("page_size") in {None, 1} or arguments.get("attention_backend") == "flashinfer"
    is_refused = facts.attn_dp > 1 or not pages_fit
    # An unknown GPU may be one of another maker.
    changes_answers = facts.architecture is None or not server.speculates_exactly
    costs_too_much = facts.is_moe or facts.states is not None
    if speculates or is_refused or changes_answers or costs_too_much:
        return []
    return ["NGRAM"] if server.ngram_speedup >= LEAST_SPEEDUP else []


def takes_corpus(arguments: Mapping[str, Any]) -> bool:
    """Tell whether a server may load a corpus for n-gram speculation.

    `arguments` are the server's, with underscores in their names. With tensor parallelism, each rank loads
    the corpus in a thread of its own. Until all have loaded it, their drafts differ. Nothing in SGLang 0.5.23
    makes them equal, so answers could become wrong.
    """
    return all((number(arguments.get(name)) or 1) == 1 for name in ("tp_size", "pp_size"))


def _with_ngrams(server: Server) -> dict[str, Any]:
    """Return flags to set with NGRAM: a limit of running requests, and a budget for a corpus.

    The limit has room for the requests that run now. Without it, SGLang would run at most 48 requests.
    """
    limit = 2 ** math.ceil(math.log2(max(server.running, 1)))
    # A present limit is not raised.
    present_limit = server.value_of("max-running-requests")
    if present_limit:
        limit = min(limit, int(present_limit))
    args = {"max-running-requests": limit}
    if takes_corpus(server.facts.arguments):
        args[CORPUS_FLAG] = CORPUS_BUDGET
    return args


def _expert_parallelism(server: Server) -> list[int]:
    """Propose the expert parallelism at which each GPU holds whole experts, if they are split now."""
    is_split = server.facts.is_moe and server.facts.tp > 1 and (server.value_of("ep-size") or 1) <= 1
    return [server.facts.tp] if is_split else []


def _dp_attention(server: Server) -> list[int]:
    """Propose the DP attention at which GPUs no longer hold copies of the same KV cache."""
    has_copies = server.facts.is_mla and server.facts.tp > 1 and server.facts.attn_dp <= 1
    return [server.facts.tp] if has_copies else []


class Move(NamedTuple):
    """How to change a flag after one kind of observation (sign)."""

    values: NextValues
    """Returns the values to try, in order; empty if no value remains or too little is known."""
    rule: str
    """The change in words, for the docs: direction and new values."""
    source: str
    """Source of the rule: SGLang itself, or one of its tuning guides. G1 is the newest guide, G2 SGLang's own
    of 2025, G3 the oldest, and G4 is in Chinese."""
    cost: str = ""
    """Cost of the change in words; empty if there is none."""


Need = Literal["a GPU", "a CPU", "FP8"]
"""Hardware that a flag needs."""
NEEDS: Mapping[Need, Callable[[Facts], bool]] = {
    "a GPU": lambda facts: not facts.on_cpu,
    "a CPU": lambda facts: facts.on_cpu,
    "FP8": lambda facts: facts.architecture in FP8 and not facts.on_cpu,
}
"""For each kind of hardware that a flag may need, the test of whether a server has it."""


@dataclass(frozen=True, slots=True)
class Flag:
    """A flag of SGLang, or a variable of its environment."""

    name: str
    moves: Mapping[str, Move]
    """Changes of the flag, keyed by the sign that calls for the change."""
    needs: Need | None = None
    """Hardware that the flag needs; None if the flag works on any server."""
    memory: str = ""
    """Memory that a higher value takes, in words."""
    takes_gb: Callable[[Server, Any], float] = lambda _, __: 0.0
    """Returns the GPU memory, in GB, that the new value takes in addition."""
    schedules: bool = False
    """Whether the flag changes only the order and the batches in which rows are computed."""
    small_steps: bool = False
    """Whether one step of the flag gains less than measured times vary by chance."""
    changes_answers: bool = False
    """Whether the model's answers change with the flag."""

    def fits(self, sign: str, server: Server) -> bool:
        """Return whether a change of this flag may help a server that shows `sign`.

        The server must have the hardware that the flag needs. If its requests do not decode, it cannot show
        the signs in DECODING_SIGNS.
        """
        has_needs = self.needs is None or NEEDS[self.needs](server.facts)
        can_show_sign = server.decodes or sign not in DECODING_SIGNS
        return has_needs and can_show_sign

    def values(self, sign: str, server: Server) -> Sequence[Any]:
        """Return the values to try for a sign, the next one first; empty if the flag does not fit."""
        return self.moves[sign].values(server) if self.fits(sign, server) else ()


FLAGS: Mapping[str, Flag] = {
    flag.name: flag
    for flag in (
        Flag(
            "tp-size",
            moves={
                "layout": Move(
                    _other_layouts,
                    rule="halved or doubled, with replicas to match",
                    source="computed; not tried on a GPU",
                    cost=(
                        "fewer GPUs per replica: its KV pool has less room; more GPUs per replica: they wait "
                        "for each other"
                    ),
                )
            },
            needs="a GPU",
        ),
        Flag(
            "schedule-conservativeness",
            moves={
                "held": Move(
                    _less_conservative,
                    rule="down: 0.3",
                    source="G1-G4",
                    cost="if outputs turn out long, requests are retracted; about one a minute is fine",
                ),
                "retracting": Move(
                    _more_conservative,
                    rule="up: 1.3, then 1.43 (at 1.43 all of `max_new_tokens` is reserved)",
                    source="G1-G4",
                    cost="fewer requests run at first; throughput changes by a few per cent, up or down",
                ),
            },
            schedules=True,
        ),
        Flag(
            CLIP,
            moves={
                "held": Move(
                    _lower_clip,
                    rule="down: a length that 99% of the outputs stay under",
                    source="SGLang",
                    cost="if outputs turn out long, requests are retracted",
                )
            },
            schedules=True,
        ),
        Flag(
            "max-total-tokens",
            moves={
                "full": Move(
                    _larger_pool,
                    rule="up: room for all requests that may run, at most 8 times as large",
                    source="measured",
                    cost="more memory of the machine is in use",
                ),
                "oom": Move(_half_pool, rule="down: halved", source="SGLang", cost="a smaller KV pool"),
            },
            needs="a CPU",
            memory="the KV cache of the additional tokens",
            schedules=True,
        ),
        Flag(
            "mem-fraction-static",
            moves={
                "full": Move(
                    _higher_fraction,
                    rule="up: so that 6.5 GB of GPU memory stay free, then by 0.01",
                    source="G1, G2, G4",
                    cost="memory may run out",
                ),
                "memory-left": Move(
                    _good_fraction,
                    rule="up: so that 6.5 GB of GPU memory stay free",
                    source="G1, G2, G4",
                    cost="memory may run out; if it does, lower the flag by 0.01",
                ),
                "memory-tight": Move(
                    _good_fraction,
                    rule="down: so that 6.5 GB of GPU memory stay free",
                    source="G1, G2, G4",
                    cost="a smaller KV pool",
                ),
                "oom": Move(
                    _lower_fraction, rule="down: 0.8, then 0.7, 0.6", source="G1-G4", cost="a smaller KV pool"
                ),
                "no-pool": Move(
                    _fraction_for_pool,
                    rule="up: by 0.05",
                    source="SGLang",
                    cost="less memory for activations",
                ),
            },
            needs="a GPU",
            memory="1 % of the GPU's memory for each 0.01",
            schedules=True,
            small_steps=True,
        ),
        Flag(
            "chunked-prefill-size",
            moves={
                "chunk-full": Move(
                    _larger_chunk,
                    rule="up: doubled, from 2048 to 16384, with a lower mem-fraction-static",
                    source="G1, measured",
                    cost="1.5 MB of GPU memory per token of the chunk; longer pauses in decoding",
                ),
                "oom": Move(
                    _smaller_chunk,
                    rule="down: 4096, then 2048",
                    source="G1-G4",
                    cost="slower prefill of long prompts",
                ),
            },
            memory="1.5 MB of GPU memory per token",
            takes_gb=lambda server, new: (
                CHUNK_GB_A_TOKEN * (new - (server.value_of("chunked-prefill-size") or 0))
            ),
        ),
        Flag(
            "max-running-requests",
            moves={
                "capped": Move(
                    _more_running,
                    rule="up: the number of requests that the pool holds, rounded up to a power of two",
                    source="G1",
                    cost="each request decodes more slowly",
                ),
                "retracting": Move(
                    _fewer_retracted,
                    rule="down: to 9/10 of the running requests, if all of `max_new_tokens` is reserved",
                    source="G1",
                    cost="fewer requests at once",
                ),
                "oom": Move(
                    _fewer_running,
                    rule="down: 3/4 of the requests that ran",
                    source="G1-G4",
                    cost="fewer requests at once",
                ),
            },
            schedules=True,
        ),
        Flag(
            "cuda-graph-max-bs-decode",
            moves={
                "graph-off": Move(
                    _larger_graphs,
                    rule="up: 256, 512, 1024, 2048 or 4096, with a lower mem-fraction-static",
                    source="G1, G2, G4",
                    cost="about 2 MB of GPU memory per request, and a start that takes seconds longer",
                ),
                "oom": Move(
                    _smaller_graphs,
                    rule="down: halved",
                    source="G1, SGLang",
                    cost="larger batches run without CUDA graphs",
                ),
            },
            needs="a GPU",
            memory="2 MB of GPU memory per request",
            takes_gb=lambda server, new: (
                GRAPH_GB_A_REQUEST * (new - (server.facts.graph_max_bs or USUAL_GRAPH_SIZE))
            ),
        ),
        Flag(
            "cuda-graph-backend-decode",
            moves={
                "graph-off": Move(
                    lambda server: ["full"] if server.facts.graph_disabled else [],
                    rule="set: full, if CUDA graphs for decoding are disabled",
                    source="G1",
                    cost="about 2 MB of GPU memory per request, and a start that takes seconds longer",
                ),
                "oom": Move(
                    lambda server: [] if server.facts.graph_disabled else ["disabled"],
                    rule="set: disabled, if nothing else helps",
                    source="SGLang",
                    cost="slower decode steps",
                ),
            },
            needs="a GPU",
        ),
        Flag(
            "cuda-graph-backend-prefill",
            moves={
                "chunk-full": Move(
                    lambda server: ["breakable"] if prefill_graph_off(server.facts.arguments) else [],
                    rule="set: breakable, if CUDA graphs for prefill are disabled",
                    source="G1",
                    cost="some GPU memory, and a start that takes seconds longer",
                ),
                "oom": Move(
                    lambda server: [] if server.facts.graph_disabled else ["disabled"],
                    rule="set: disabled, if nothing else helps",
                    source="SGLang",
                    cost="slower prefill of long prompts",
                ),
            },
            needs="a GPU",
        ),
        Flag(
            "schedule-policy",
            moves={
                "reordered": Move(
                    _arrival_order,
                    rule="set: fcfs",
                    source="SGLang; not measured",
                ),
                "shared": Move(
                    _unless_set("schedule-policy", value="lpm"),
                    rule="set: lpm, for queues under 128",
                    source="G1-G4",
                    cost="more scheduling work; requests without a cached prefix wait longer",
                ),
            },
            schedules=True,
        ),
        Flag(
            "attention-backend",
            moves={
                "slow-backend": Move(
                    _other_backends,
                    rule=(
                        "set: Hopper `fa3`, Blackwell `trtllm_mha` or `trtllm_mla`, Ampere and "
                        "Ada `flashinfer`"
                    ),
                    source="G1",
                    cost="SGLang or a user may have chosen the present backend for a reason",
                )
            },
            needs="a GPU",
        ),
        Flag(
            "enable-hierarchical-cache",
            moves={
                "evicted": Move(
                    _unless_set("enable-hierarchical-cache", value=True),
                    rule="on",
                    source="G1",
                    cost="host memory of twice the KV pool's size, and transfers between host and GPU",
                )
            },
            needs="a GPU",
        ),
        Flag(
            "tokenizer-worker-num",
            moves={
                "starved": Move(
                    _at_least("tokenizer-worker-num", TOKENIZERS),
                    rule="up: 4",
                    source="SGLang",
                    cost="cores of the machine",
                )
            },
            needs="a GPU",
        ),
        Flag(
            "enable-http-worker-reuseport",
            moves={
                "starved": Move(
                    _shared_port,
                    rule="on: with several tokenizer workers",
                    source="SGLang; not tried on a GPU",
                )
            },
            needs="a GPU",
        ),
        Flag(
            "detokenizer-worker-num",
            moves={
                "starved": Move(
                    _at_least("detokenizer-worker-num", TOKENIZERS),
                    rule="up: 4",
                    source="SGLang; not tried on a GPU",
                    cost="cores of the machine",
                )
            },
            needs="a GPU",
        ),
        Flag(
            "mm-io-worker-num",
            moves={
                "starved": Move(
                    _for_media("mm-io-worker-num", MEDIA_LOADERS),
                    rule="up: 16, if prompts have images, sounds or videos",
                    source="SGLang; not tried on a GPU",
                    cost="cores of the machine",
                )
            },
        ),
        Flag(
            "mm-processor-worker-num",
            moves={
                "starved": Move(
                    _for_media("mm-processor-worker-num", MEDIA_PROCESSORS),
                    rule="up: 2, if prompts have images, sounds or videos",
                    source="SGLang; not tried on a GPU",
                    cost="cores of the machine",
                )
            },
        ),
        Flag(
            "language-model-only",
            moves={
                "no-media": Move(
                    _without_encoder,
                    rule="on: for a job without images, sounds and videos",
                    source="SGLang; not tried on a GPU",
                    cost="the server refuses images, sounds and videos",
                )
            },
            needs="a GPU",
        ),
        Flag(
            "speculative-adaptive",
            moves={
                "speculates": Move(
                    _adaptive_speculation,
                    rule="on, with EAGLE or EAGLE3 and one guess at a time",
                    source="SGLang; not tried on a GPU",
                    cost=(
                        "CUDA graphs for several numbers of guesses: some GPU memory, and a start that takes "
                        "seconds longer"
                    ),
                )
            },
            needs="a GPU",
        ),
        Flag(
            "ep-size",
            moves={
                "split-experts": Move(
                    _expert_parallelism,
                    rule="up: to the value of `--tp-size`",
                    source="G1, G2, G4",
                    cost="some experts, and so some GPUs, get more tokens than others",
                )
            },
            needs="a GPU",
        ),
        Flag(
            "attn-dp-size",
            moves={
                "kv-copies": Move(
                    _dp_attention,
                    rule="up: to the value of `--tp-size` (`--enable-dp-attention`)",
                    source="G1, G2, G4",
                    cost="single answers are slower",
                )
            },
            needs="a GPU",
        ),
        Flag(
            "prefill-decode-interval",
            moves={
                "small-prefills": Move(
                    _prefill_interval,
                    rule="up: √(2 · output tokens)",
                    source="SGLang; not tried on a GPU",
                    cost="the slot of a finished request stays empty for some decode steps",
                )
            },
            schedules=True,
        ),
        Flag(
            "page-size",
            moves={
                "large-pages": Move(
                    _unless_set("page-size", value=1),
                    rule="down: 1",
                    source="measured",
                    cost="some attention kernels are faster with KV pages of several tokens",
                )
            },
        ),
        Flag(
            "mamba-full-memory-ratio",
            moves={
                "states": Move(
                    _state_pool("mamba-full-memory-ratio", grows=True),
                    rule="up: so that state pool and KV pool hold equally many requests",
                    source="SGLang; computed, not tried on a GPU",
                    cost="a smaller KV pool",
                ),
                "full": Move(
                    _state_pool("mamba-full-memory-ratio", grows=False),
                    rule="down: so that state pool and KV pool hold equally many requests",
                    source="SGLang; computed, not tried on a GPU",
                    cost="a smaller state pool",
                ),
                "no-states": Move(
                    _twice_ratio,
                    rule="up: doubled",
                    source="SGLang",
                    cost="a smaller KV pool",
                ),
            },
            schedules=True,
        ),
        Flag(
            "max-mamba-cache-size",
            moves={
                "states": Move(
                    _state_pool("max-mamba-cache-size", grows=True),
                    rule="up, if the flag is set: so that both pools hold equally many requests",
                    source="SGLang; computed, not tried on a GPU",
                    cost="a smaller KV pool",
                ),
                "full": Move(
                    _state_pool("max-mamba-cache-size", grows=False),
                    rule="down, if the flag is set: so that both pools hold equally many requests",
                    source="SGLang; computed, not tried on a GPU",
                    cost="a smaller state pool",
                ),
                "no-states": Move(
                    _twice_slots,
                    rule="up: doubled, if the flag is set",
                    source="SGLang",
                    cost="a smaller KV pool",
                ),
            },
            schedules=True,
        ),
        Flag(
            STATE_STRATEGY,
            moves={
                "states": Move(
                    _lazy_strategy,
                    rule="set: extra_buffer_lazy instead of extra_buffer, 4 states per request instead of 5",
                    source="SGLang; not tried on a GPU",
                )
            },
            schedules=True,
        ),
        Flag(
            "disable-radix-cache",
            moves={
                # The value None removes the flag.
                "cache-off": Move(lambda _: [None], rule="off", source="measured"),
                "states": Move(
                    _no_prefix_cache,
                    rule="on, if prefixes are not shared: 1 state per request instead of 3 to 5",
                    source="SGLang; not tried on a GPU",
                    cost="shared prefixes are computed again for each request",
                ),
            },
            schedules=True,
        ),
        Flag(
            "mamba-ssm-dtype",
            moves={
                "states": Move(
                    _states_in_16_bits,
                    rule="set: bfloat16",
                    source="SGLang's error message; not tried on a GPU",
                    cost="answers change a little",
                )
            },
            needs="a GPU",
            changes_answers=True,
        ),
        Flag(
            "quantization",
            moves={
                "wide-numbers": Move(
                    lambda server: ["fp8"] if server.facts.in_16_bits else [],
                    rule="set: fp8",
                    source="G1, G2, G4",
                    cost="answers change a little",
                )
            },
            needs="FP8",
            changes_answers=True,
        ),
        Flag(
            "kv-cache-dtype",
            moves={
                "wide-numbers": Move(
                    lambda server: ["fp8_e4m3"] if server.facts.kv_in_16_bits else [],
                    rule="set: fp8_e4m3",
                    source="G1",
                    cost="answers change a little",
                )
            },
            needs="FP8",
            changes_answers=True,
        ),
        Flag(
            NGRAM,
            moves={
                "repeated": Move(
                    _ngrams,
                    rule=f"set: NGRAM, with `--max-running-requests` and `--{CORPUS_FLAG}`",
                    source="SGLang; computed, not tried on a GPU",
                    cost=(
                        "each step computes 12 tokens of each request instead of 1, which is slower if few "
                        "drafted tokens are accepted or many requests run"
                    ),
                )
            },
            needs="a GPU",
        ),
        Flag(
            "enable-torch-compile",
            moves={
                "small-model": Move(
                    _unless_set("enable-torch-compile", value=True),
                    rule="on",
                    source="G1, G2, G4",
                    cost="a start that takes minutes longer",
                )
            },
            needs="a GPU",
        ),
    )
}
"""All flags by their names. Flags of SGLang's tuning guides come first, in the order of the guides."""


def next_setting(sign: str, name: str, server: Server, flags: Flags) -> dict[str, Any]:
    """Return the next value of a flag for a sign, as `engine.args`.

    Empty if no value remains, or if the installed SGLang, which has these `flags`, lacks the flag.
    """
    values = FLAGS[name].values(sign, server)
    return flags.setting(name, values[0]) if values else {}


def with_companions(sign: str, name: str, server: Server, flags: Flags) -> dict[str, Any]:
    """Return a flag's next value for a sign, with the flags that must change together with it.

    Empty if no value remains, or if the installed SGLang lacks the flag or the value.
    """
    values = FLAGS[name].values(sign, server)
    args = flags.setting(name, values[0]) if values else {}
    if not args:
        return {}
    for companion, setting in companions_of(name, values[0], server).items():
        args |= flags.setting(companion, setting)
    return args


def with_memory(sign: str, name: str, server: Server, flags: Flags) -> dict[str, Any]:
    """Return a flag's next value, and a lower mem-fraction-static if the value needs more than free memory.

    Empty if no value remains, or if too little memory would remain for the weights and a useful KV pool.
    """
    args = next_setting(sign, name, server, flags)
    # The value may take memory that is free beyond the minimum in SGLang's tuning guides. The KV pool gives
    # the rest.
    missing_gb = sum(FLAGS[name].takes_gb(server, value) for value in args.values())
    if server.spare_gb is not None:
        missing_gb -= max(0.0, server.spare_gb - server.band.low)
    present, card_gb = server.value_of("mem-fraction-static"), server.facts.card_gb
    if server.facts.on_cpu or present is None or not card_gb or missing_gb <= 0:
        return args
    # The fraction falls by whole hundredths, rounded up.
    lower_fraction = round(present - math.ceil(100 * missing_gb / card_gb) / 100, 3)
    if lower_fraction <= least_fraction(server.facts):
        return {}
    return args | flags.setting("mem-fraction-static", lower_fraction)
