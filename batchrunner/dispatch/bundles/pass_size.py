"""The size of a request for rows without decoding: a forward pass's worth of tokens. Pure: no clock."""

from batchrunner.core.types import Request, RequestBody
from batchrunner.dispatch.forward_passes import ForwardPasses

MOST_ROWS = 256
"""Most rows of a list. From 16 on more save little, and the reply with all their vectors comes whole."""
LISTS = 4
"""A list has 1/4 of the rows in flight at most: while one travels, the server has the others."""
CHARACTERS_A_TOKEN = 4


def prompt_tokens(request: Request) -> int:
    """Return the tokens of a row that are computed, a guess where they are texts."""
    if isinstance(request.prompt, RequestBody):
        return len(request.prompt.content) // CHARACTERS_A_TOKEN
    length = len(request.prompt)
    tokens = length if request.kind == "input_ids" else length // CHARACTERS_A_TOKEN
    if not request.items:
        return tokens
    if request.item_ids:  # choices: their prompt is computed once
        return tokens + sum(map(len, request.item_ids))
    return tokens * len(request.items) + sum(map(len, request.items)) // CHARACTERS_A_TOKEN


class PassSize:
    """The size for one route: a list has the tokens of a pass, or a quarter of the rows in flight."""

    def __init__(self, passes: ForwardPasses) -> None:
        self._passes = passes

    @property
    def most_tokens(self) -> int:
        """Prompt tokens that a list holds at most, unless one row has more."""
        return self._passes.tokens

    def rows(self, outstanding: int) -> int:
        """Return the most rows of a list while so many are in flight or wait for theirs; 0 and 1 are one."""
        return min(MOST_ROWS, outstanding // LISTS)

    def taken(self, request: Request) -> None:
        """Count a row that is sent, with the tokens of its prompt."""
        self._passes.sent(prompt_tokens(request))

    def ended(self, now: float) -> None:
        """Do nothing: how fast rows end does not matter."""
