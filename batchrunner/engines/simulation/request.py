"""What a simulated scheduler is given: the flags of its server, and requests as numbers of tokens."""

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, Literal

from batchrunner.engines.simulation.radix import CacheNode

State = Literal["new", "waiting", "chunked", "running", "finished", "aborted", "dropped"]


@dataclass(slots=True, eq=False)
class SimulatedRequest:
    """One sample on its way through a scheduler; submit it once."""

    prompt_tokens: int
    output_tokens: int
    """Output tokens after which it stops by itself; `max_new_tokens` may cut it earlier."""
    max_new_tokens: int | None = None
    """Tokens that the request asks for and admission reserves; None: exactly the output."""
    ignore_eos: bool = False
    """Whether the scheduler expects all of `max_new_tokens`, whatever its ratio."""
    prefix: tuple[tuple[Hashable, int], ...] = ()
    """The beginning of the prompt that others share, as (name, tokens), for instance
    (("system", 120), ("document 7", 400)). The rest of the prompt is the sample's own."""
    payload: Any = None
    """The caller's own data; the scheduler does not read it."""

    state: State = field(default="new", init=False)
    outputs: int = field(default=0, init=False)
    """Tokens generated when it was last prefilled, retracted or ended."""
    cached_tokens: int = field(default=0, init=False)
    """Prompt tokens found in the cache at its first prefill, as the server reports them."""
    retractions: int = field(default=0, init=False)
    prefilled: bool = field(default=False, init=False)
    """Whether it was admitted at least once."""

    # State that Scheduler and RunningBatch keep.
    asked_tokens: int = field(default=0, init=False)
    """`max_new_tokens`, cut to what the context and the pool can hold."""
    target_tokens: int = field(default=0, init=False)
    """Output tokens with which it ends."""
    path: tuple[tuple[Hashable, int], ...] = field(default=(), init=False)
    """Prefix and own part of the prompt, named for the radix cache."""
    node: CacheNode | None = field(default=None, init=False)
    """The cache node that it holds a lock on."""
    protected_tokens: int = field(default=0, init=False)
    """Tokens from the start of its context that the cache owns."""
    filled_tokens: int = field(default=0, init=False)
    """Tokens of its context that are computed so far, while it is prefilled in chunks."""
    dropping: bool = field(default=False, init=False)
    """Whether it was dropped while it decoded; it leaves with the next pass."""
    outputs_base: int = field(default=0, init=False)
    context_base: int = field(default=0, init=False)
    clipped: bool = field(default=False, init=False)
    end_serial: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        if self.prompt_tokens < 1 or self.output_tokens < 0:
            raise ValueError("a sample has a prompt of at least one token and no negative output")
        if self.prefix_tokens > self.prompt_tokens:
            raise ValueError("the shared prefix is longer than the prompt")

    @property
    def fill_tokens(self) -> int:
        """Context tokens to prefill: the prompt, and the outputs from before a retraction."""
        return self.prompt_tokens + self.outputs

    @property
    def prefix_tokens(self) -> int:
        """Tokens of the prompt that are shared with others."""
        return sum(tokens for _, tokens in self.prefix)

    @property
    def over(self) -> bool:
        """Whether it has left the scheduler."""
        return self.state in {"finished", "aborted", "dropped"}


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
