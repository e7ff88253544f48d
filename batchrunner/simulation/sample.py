"""One request as the simulated scheduler sees it: token counts, no tokens."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Hashable

    from batchrunner.simulation.radix import Node

State = Literal["new", "waiting", "chunked", "running", "finished", "aborted", "dropped"]


@dataclass(slots=True, eq=False)
class SimulatedRequest:
    """One output on its way through a scheduler; submit it once."""

    prompt_tokens: int
    output_tokens: int
    """After how many it stops of itself; `max_new_tokens` may cut it earlier."""
    max_new_tokens: int | None = None
    """What the request asks for, and what admission reserves for; None: exactly the output."""
    ignore_eos: bool = False
    """The scheduler then expects all of `max_new_tokens`, whatever its ratio."""
    prefix: tuple[tuple[Hashable, int], ...] = ()
    """What the prompt shares with others: (name, tokens) from its start on, for instance
    (("system", 120), ("document 7", 400)). The rest of the prompt is the sample's own."""
    payload: Any = None
    """Whatever the caller wants to find again on a finished sample."""

    state: State = field(default="new", init=False)
    outputs: int = field(default=0, init=False)
    """Tokens put out when it was last prefilled, retracted or ended."""
    cached_tokens: int = field(default=0, init=False)
    """Prompt tokens found in the cache at its first prefill, as the server reports them."""
    retractions: int = field(default=0, init=False)
    prefilled: bool = field(default=False, init=False)
    """It was admitted at least once."""

    # What the scheduler keeps of it; see Scheduler and RunningBatch.
    asked_tokens: int = field(default=0, init=False)
    """`max_new_tokens`, cut to what the context and the pool can hold."""
    target_tokens: int = field(default=0, init=False)
    """Outputs with which it ends."""
    path: tuple[tuple[Hashable, int], ...] = field(default=(), init=False)
    """Prefix and own part of the prompt, named for the radix cache."""
    node: Node | None = field(default=None, init=False)
    """The cache node that it holds a lock on."""
    protected_tokens: int = field(default=0, init=False)
    """Tokens of its context that the cache owns, from the start on."""
    filled_tokens: int = field(default=0, init=False)
    """Tokens of its context that are computed, while it is prefilled in chunks."""
    dropping: bool = field(default=False, init=False)
    """It was dropped while it decoded and leaves with the next pass."""
    outputs_base: int = field(default=0, init=False)
    context_base: int = field(default=0, init=False)
    clipped: bool = field(default=False, init=False)
    end_serial: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        if self.prompt_tokens < 1 or self.output_tokens < 0:
            raise ValueError("a sample has a prompt of at least one token and no negative output")
        if sum(tokens for _, tokens in self.prefix) > self.prompt_tokens:
            raise ValueError("the shared prefix is longer than the prompt")

    @property
    def fill_tokens(self) -> int:
        """Context to be prefilled: the prompt, and what a retracted one has put out already."""
        return self.prompt_tokens + self.outputs

    @property
    def over(self) -> bool:
        """Whether it left the scheduler."""
        return self.state in {"finished", "aborted", "dropped"}
