"""Whether a row that the engine refuses for now (429, 502 to 504, 401) is itself the reason. Pure: no clock.

An engine that is away, or has no room, refuses rows whatever they are: that never counts against one. It
counts only where the same route has meanwhile answered something that was sent after the row was refused
last. And a route may refuse rows at random, such as a load balancer with a dead half: so a row is given up
only where it is next to impossible that such a route refused it so often by chance.

Where no other row is there to be answered, a control tells: what was answered last is asked for again.
"""

from dataclasses import dataclass
from typing import Any

import orjson

from batchrunner.core.types import CHAT_PATH, EMBEDDINGS_PATH, Request
from batchrunner.dispatch.queue import PendingRow, Refusals, Tally

BY_CHANCE = 1e-6
"""A row is given up where the probability is lower that it was refused so often by chance."""
FEW_TOKENS = {"max_new_tokens": 8, "temperature": 0}
"""Sampling of a control: a single token may be no text yet, and so no answer."""
_WORD = [{"role": "user", "content": "1"}]
_PROMPTS: dict[str, tuple[str, Any]] = {CHAT_PATH: ("messages", _WORD), EMBEDDINGS_PATH: ("input", "1")}
"""Field of a body and what it has in a control, by endpoint; others have a `prompt`."""


@dataclass(slots=True, eq=False)
class RouteRecord:
    """What a route has answered and refused: first attempts of rows, and controls."""

    answered: int = 0
    refused: int = 0
    newest: float = 0.0
    """When the newest request that it has answered was sent, on the monotonic clock."""
    last: Request | None = None
    """The request that it answered last."""
    has_control: bool = False
    """Whether a control is in flight."""

    def count(self, row: PendingRow, now: float) -> bool:
        """Count a refusal of a row; tell whether the route answers others meanwhile."""
        if row.refusals is None:
            row.refusals = Refusals(row.sent_at)
        known = row.refusals
        answers = self.newest >= known.last
        known.last = now
        tally = known.tallies.get(self)
        if tally is None:  # the route may have failed just now
            known.tallies[self] = Tally(self.answered, self.refused)
            self.refused += 1
        elif answers:
            tally.times += 1
            known.times += 1
        return answers

    def control_for(self, refused: Request) -> Request:
        """Return a cheap request: what was answered last, or else the beginning of a refused one."""
        request = self.last or refused
        prompt: Any = request.prompt
        if request.kind == "body":
            name, word = _PROMPTS.get(prompt.path, ("prompt", "1"))
            prompt = prompt._replace(content=orjson.dumps({name: word, "max_tokens": 8}))
        elif self.last is None:
            prompt = _WORD if request.kind == "messages" else prompt[:1]
            request = request._replace(
                continues=False,
                tools=None,
                media=(),
                items=request.items[:1],
                item_ids=request.item_ids[:1],
            )
        return request._replace(prompt=prompt, sampling=FEW_TOKENS, asks=None)


def is_why(row: PendingRow, max_attempts: int) -> bool:
    """Tell whether a row that was refused is itself the reason."""
    assert row.refusals is not None
    chance = 1.0
    for record, before in row.refusals.tallies.items():
        refused = record.refused - before.refused
        chance *= (refused / (record.answered - before.answered + refused + 1)) ** before.times
    return row.refusals.times >= max_attempts and chance < BY_CHANCE
