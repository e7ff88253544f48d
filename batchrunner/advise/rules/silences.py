"""Which advice silences which other advice."""

_TAKES_MEMORY = ("running-low", "long-prompts", "prefill-full", "cuda-graph")
_LOAD_RULES = (
    *_TAKES_MEMORY, "conservative", "running-capped", "retractions", "memory-left", "memory-tight",
    "latency-high", "pool-small", "pages-large",
)  # fmt: skip
_CARD_RULES = (*_LOAD_RULES, "tensor-parallel", "torch-compile")
SILENCES: dict[str, tuple[str, ...]] = {
    "oom-weights": ("oom-graph", "oom-prefill", "oom-decode", "oom-general", *_CARD_RULES),
    "oom-graph": ("oom-general", *_CARD_RULES),
    "oom-prefill": ("oom-general", *_CARD_RULES),
    "oom-decode": ("oom-general", *_CARD_RULES),
    "oom-general": _CARD_RULES,
    "killed": (*_LOAD_RULES, "host-cache"),
    "pages-large": ("pool-small", "conservative", "running-low"),
    "pool-small": ("conservative", "running-low"),
    "prefill-seldom": ("conservative", "running-low", "pool-small", "pages-large"),
    "queue-deep": ("queue-empty",),
    "retractions": (*_TAKES_MEMORY, "running-capped", "latency-high"),
    "running-capped": ("latency-high", "conservative", "mixed-chunk"),
    "memory-tight": _TAKES_MEMORY,
    "cuda-graph": ("long-prompts", "running-low", "prefill-full"),
    "long-prompts": ("memory-left", "prefill-full"),
    "running-low": ("memory-left", "prefill-full"),
    "prefill-full": ("memory-left", "small-prefills", "mixed-chunk"),
    "small-prefills": ("mixed-chunk",),
    "cache-off": ("order-of-server", "shared-prefixes", "host-cache"),
    "order-of-server": ("shared-prefixes", "host-cache"),
    "tensor-parallel": ("expert-parallel", "dp-attention"),
    "dp-attention": ("data-parallel",),
}
"""Advice that silences other advice, which would undo it or set the same flag differently. After an
out-of-memory error nothing may take more memory; unused memory goes to the advice that needs it; one thing is
changed at a time. Earlier entries count first: advice that is silenced silences none."""
