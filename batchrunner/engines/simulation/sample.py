"""One request as the simulated scheduler sees it: numbers of tokens, no text."""

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
