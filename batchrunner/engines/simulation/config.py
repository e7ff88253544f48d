"""The flags of a simulated SGLang server that its scheduler depends on."""

from dataclasses import dataclass
from typing import Literal

INITIAL_RATIO = 0.7
"""`SGLANG_INIT_NEW_TOKEN_RATIO`: the share of `max_new_tokens` that outputs are expected to take at first."""
MINIMAL_RATIO_FACTOR = 0.14
"""`SGLANG_MIN_NEW_TOKEN_RATIO_FACTOR`: the lowest expected share, as a fraction of the first."""
DECAY_STEPS = 600
"""`SGLANG_NEW_TOKEN_RATIO_DECAY_STEPS`: decode steps from the first share to the lowest."""
CLIP_TOKENS = 4096
"""`SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION`: most output tokens that the scheduler expects of a request."""


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Server flags; the defaults are SGLang's on an 80 GB card."""

    max_running: int
    """`--max-running-requests`."""
    max_total_tokens: int
    """`--max-total-tokens`: the KV pool."""
    context_tokens: int | None = None
    """`--context-length`; None: the pool is the only limit."""
    chunked_prefill_tokens: int | None = 8192
    """`--chunked-prefill-size`; None: prompts are never cut."""
    max_prefill_tokens: int = 16_384
    """`--max-prefill-tokens`."""
    policy: Literal["fcfs", "lpm"] = "fcfs"
    """`--schedule-policy`."""
    conservativeness: float = 1.0
    """`--schedule-conservativeness`."""
    radix_cache: bool = True
    """False: `--disable-radix-cache`."""
    clip_tokens: int = CLIP_TOKENS
    """`SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION`, an environment variable."""
    decode_interval: int = 0
    """`--prefill-decode-interval`: decode passes between two prefill passes; 0: prefill goes first."""
    decode_interval_samples: int = 0
    """`--prefill-decode-interval-min-bs`: with fewer running samples prefill goes first all the same."""
    mixed_chunk: bool = False
    """`--enable-mixed-chunk`: running samples decode in the prefill passes too. Needs chunks."""

    @property
    def mixes(self) -> bool:
        """Whether prefill passes decode too."""
        return self.mixed_chunk and self.chunked_prefill_tokens is not None

    @property
    def initial_ratio(self) -> float:
        """The new-token ratio of an idle scheduler."""
        return min(INITIAL_RATIO * self.conservativeness, 1.0)

    @property
    def minimal_ratio(self) -> float:
        """The new-token ratio after many steps without a retraction."""
        return min(self.initial_ratio * MINIMAL_RATIO_FACTOR, 1.0)

    @property
    def ratio_decay(self) -> float:
        """How much the new-token ratio falls with each decode step."""
        return (self.initial_ratio - self.minimal_ratio) / DECAY_STEPS
