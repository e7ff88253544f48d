"""Decides how long a prompt may be, and truncates one that is too long. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from batchrunner.core.errors import RowRefusedError

Truncation = Literal["head", "tail", "middle"]
"""The part of a prompt that is cut off, from `prompt.truncate`."""
Offsets = list[tuple[int, int]]
"""Start and end of each token in a text, in characters."""
Token = TypeVar("Token")


@dataclass(frozen=True, slots=True)
class TokenBudget:
    """The engine's limits, in tokens; None where it reports none."""

    context: int | None
    """Most tokens of prompt and output together."""
    longest_prompt: int | None = None
    """Tokens that a prompt must stay below."""

    def check(self, tokens: int) -> None:
        """Raise RowRefusedError, with SGLang's text, for a prompt that leaves no tokens for an output."""
        if self.context is not None and tokens >= self.context:
            raise RowRefusedError(
                f"The input ({tokens} tokens) is longer than the model's context length "
                f"({self.context} tokens)."
            )

    def prompt_limit(self, sampling: Mapping[str, Any]) -> int:
        """Return the most tokens of a prompt that leave `max_new_tokens` to the output; may be 0 or less."""
        assert self.context is not None
        limit = self.context - int(sampling.get("max_new_tokens") or 1)
        return limit if self.longest_prompt is None else min(limit, self.longest_prompt - 1)


def truncate_tokens(tokens: Sequence[Token], keep: int, truncation: Truncation) -> list[Token]:
    """Return `keep` of the tokens, with the others cut off at the head, the tail or the middle."""
    begin = {"head": 0, "tail": keep, "middle": keep // 2}[truncation]
    return [*tokens[:begin], *tokens[len(tokens) - (keep - begin) :]] if keep < len(tokens) else [*tokens]


def truncate_text(text: str, offsets: Offsets, keep: int, truncation: Truncation) -> str:
    """Return the text of about `keep` of its tokens, in whole characters; `offsets` are those of the text."""
    begin = {"head": 0, "tail": keep, "middle": keep // 2}[truncation]
    first = text[: offsets[begin - 1][1]] if begin else ""
    return first + (text[offsets[len(offsets) - (keep - begin)][0] :] if begin < keep else "")
