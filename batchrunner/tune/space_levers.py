"""Flags that pay under a rare sign only: on a GPU, for a kind of model, or with thousands of requests. Pure.

Each is worth a trial where its sign is seen, and none where it is not: what they bring differs from model to
model. Those that change the schedule are in joint.py instead, where the forecast ranks them.
"""

from batchrunner.engines.model_kinds import has_experts, has_latent_attention
from batchrunner.tune.measurement import GUIDES
from batchrunner.tune.space import Args, Candidates, FlagChange, TunedFlag, TuningState

MANY_IN_FLIGHT = 2000
"""Requests at the server from which its front process spends its time on garbage collection."""
RARE_COLLECTIONS = [20_000, 50, 50]
"""Thresholds of Python's garbage collector that leave most of the time to requests."""
TOKENIZER_WORKERS = 4
SMALL_PREFILL_TOKENS = 1024
"""Mean prompt tokens of a prefill pass up to which launching its kernels takes longer than computing them."""
PAGES = (16, 64)
"""Values of `--page-size`, in tokens."""
PAGED_BACKENDS = frozenset({"fa3", "trtllm_mha", "flashinfer"})


def _prefill_graph(state: TuningState) -> Candidates:
    tokens = state.signs.prefill_per_pass
    if state.machine.cpu or tokens is None:
        return "no CUDA graphs here" if state.machine.cpu else "the log lacks prefill passes"
    why = f"prefill passes have {tokens:.0f} tokens"
    if tokens > SMALL_PREFILL_TOKENS:
        return f"{why}: computing takes longer than launching"
    current = state.value("cuda-graph-backend-prefill", None)
    backends = [name for name in ("breakable", "full") if name != current]
    return [FlagChange({"cuda-graph-backend-prefill": name}, why) for name in backends]


def _page_size(state: TuningState) -> Candidates:
    if state.machine.cpu or state.signs.attention_backend not in PAGED_BACKENDS:
        return "not of this backend"
    if state.signs.cached_share >= GUIDES.shared:
        return f"{state.signs.cached_share:.0%} of the prompt tokens are shared: pages find fewer of them"
    current = int(state.value("page-size", 1))
    return [
        FlagChange({"page-size": v}, "nothing is shared that pages could miss") for v in PAGES if v > current
    ]


def _host_cache(state: TuningState) -> Candidates:
    signs = state.signs
    if state.machine.cpu:
        return "the pool is in the host's memory already"
    if signs.cached_share < GUIDES.shared or not signs.full:
        return f"{signs.cached_share:.0%} of the prompt tokens are shared, at token usage {signs.usage:.2f}"
    return _switched(state, "enable-hierarchical-cache", "shared prefixes, and a full pool that drops them")


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


def _collections(state: TuningState) -> Candidates:
    in_flight = state.signs.running + state.signs.queue
    if in_flight < MANY_IN_FLIGHT or state.value("gc-threshold", None):
        return f"{in_flight:.0f} requests in flight: garbage collection has little to look at"
    return [FlagChange({"gc-threshold": RARE_COLLECTIONS}, f"{in_flight:.0f} requests in flight")]


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


def _switched(state: TuningState, name: str, why: str) -> Candidates:
    args: Args = {name: True}
    return "on already" if state.value(name, False) else [FlagChange(args, why)]


LEVERS = (
    TunedFlag("cuda-graph-backend-prefill", _prefill_graph),
    TunedFlag("page-size", _page_size),
    TunedFlag("hierarchical-cache", _host_cache),
    TunedFlag("tokenizer-worker-num", _tokenizers),
    TunedFlag("gc-threshold", _collections),
    TunedFlag("expert-parallelism", _experts),
    TunedFlag("dp-attention", _attention_copies),
)
"""Tried after the flags of the tuning guides."""
