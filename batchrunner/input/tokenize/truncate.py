"""How long a prompt may be, and what is cut off one that is too long: pure, in tokens and offsets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from batchrunner.core.errors import RowRefusedError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Cut = Literal["head", "tail", "middle"]
Offsets = list[tuple[int, int]]
"""Where each token of a text begins and ends in it, in characters."""
Kept = TypeVar("Kept")


@dataclass(frozen=True, slots=True)
class TokenBudget:
    """The engine's limits, in tokens; None where it tells none."""

    context: int | None
    """Prompt and output together."""
    longest_prompt: int | None = None
    """A prompt must be shorter than this."""

    def check(self, tokens: int) -> None:
        """Raise RowRefusedError, in SGLang's words, for a prompt that leaves no room for an output."""
        if self.context is not None and tokens >= self.context:
            raise RowRefusedError(
                f"The input ({tokens} tokens) is longer than the model's context length "
                f"({self.context} tokens)."
            )

    def for_prompt(self, sampling: Mapping[str, Any]) -> int:
        """Return how long a prompt may be, at most, that has its whole output before it; 0 or less: none."""
        assert self.context is not None
        room = self.context - int(sampling.get("max_new_tokens") or 1)
        return room if self.longest_prompt is None else min(room, self.longest_prompt - 1)


def cut_tokens(tokens: Sequence[Kept], keep: int, cut: Cut) -> list[Kept]:
    """Return `keep` of the tokens, without those that are cut off the head, the tail or the middle."""
    begin = {"head": 0, "tail": keep, "middle": keep // 2}[cut]
    return [*tokens[:begin], *tokens[len(tokens) - (keep - begin) :]] if keep < len(tokens) else [*tokens]


def cut_text(text: str, offsets: Offsets, keep: int, cut: Cut) -> str:
    """Return the text of about `keep` of its tokens: characters are never torn."""
    begin = {"head": 0, "tail": keep, "middle": keep // 2}[cut]
    first = text[: offsets[begin - 1][1]] if begin else ""
    return first + (text[offsets[len(offsets) - (keep - begin)][0] :] if begin < keep else "")
