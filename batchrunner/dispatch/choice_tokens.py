"""The choices of `task: score` → token ids, each tokenised together with its prompt."""

import asyncio
from collections.abc import Iterator, Sequence

from batchrunner.core.engine_info import EngineInfo
from batchrunner.core.errors import CannotTokenizeError, RowRefusedError
from batchrunner.core.types import Outcome, Request
from batchrunner.dispatch.tokenize import RowTokenizer, engine_tokens
from batchrunner.engines.base import Engine

SLICE_CHARACTERS = 4 << 20
"""Characters of prompts with choices that are tokenised together."""
ASKED_AT_ONCE = 16
"""Texts whose tokens the engine is asked for at the same time, where it alone can tell them."""
SIMULATED_TOKEN = 4
"""Characters of a token of the simulated engine."""


class ChoiceTokenizer:
    """Gives requests the token ids of their prompts and choices."""

    def __init__(self, tokenizer: RowTokenizer, engine: Engine, info: EngineInfo) -> None:
        """Take what tokenises prompts, and the engine to ask where that leaves them to it."""
        self._tokenizer = tokenizer
        self._engine = engine
        self._simulated = info.simulated
        self._asking = asyncio.Semaphore(ASKED_AT_ONCE)

    async def tokenize(self, requests: list[Request]) -> list[Request | Outcome]:
        """Return the requests as they are sent; the first call may raise CannotTokenizeError."""
        if self._simulated:
            return [_simulated(request) for request in requests]
        found: list[Request | Outcome] = []
        for some in _slices(requests):
            texts = [
                request._replace(prompt=request.prompt + item, items=())
                for request in some
                for item in ("", *request.items)
            ]
            done = iter(await asyncio.gather(*map(self._ids, await self._tokenizer.tokenize(texts))))
            for request in some:
                ids = [next(done) for _ in ("", *request.items)]
                found.append(_parted(request, ids))
        return found

    async def _ids(self, item: Request | Outcome) -> list[int] | str:
        """Return the token ids of a text, or why it has none."""
        if isinstance(item, Outcome):
            return item.error or ""
        if item.kind == "input_ids":
            return list(item.prompt)
        if not item.prompt:
            return "the prompt is empty"
        async with self._asking:
            try:
                found = await engine_tokens(self._engine, item)
            except CannotTokenizeError as why:
                raise CannotTokenizeError(
                    f"prompt.choices: {why}", hint="put the model's tokenizer where the engine has it"
                ) from None
        return str(found) if isinstance(found, RowRefusedError) else found


def _parted(request: Request, found: Sequence[list[int] | str]) -> Request | Outcome:
    """Return a request with its prompt as the tokens that all choices begin with, and the rest of each.

    A token in which the end of the prompt and the beginning of a choice have become one belongs to the
    choice; so that choices can be compared, the others then begin there too.
    """
    known = [ids for ids in found if not isinstance(ids, str)]
    if len(known) < len(found):
        error = next(ids for ids in found if isinstance(ids, str))
        return Outcome(request.ref, None, error, None, 0)
    tokens = 0
    for column in zip(*known, strict=False):
        if len(set(column)) > 1:
            break
        tokens += 1
    prompt, choices = known[0][:tokens], tuple(ids[tokens:] for ids in known[1:])
    if not prompt:
        return Outcome(request.ref, None, "prompt.choices: the prompt has no token before them", None, 0)
    if not all(choices):
        empty = request.items[choices.index([])]
        error = f"prompt.choices: {empty!r} adds no token to the prompt"
        return Outcome(request.ref, None, error, None, 0)
    return request._replace(kind="input_ids", prompt=prompt, item_ids=choices)


def _simulated(request: Request) -> Request:
    return request._replace(
        item_ids=tuple([0] * (len(item) // SIMULATED_TOKEN + 1) for item in request.items)
    )


def _slices(requests: Sequence[Request]) -> Iterator[list[Request]]:
    """Cut requests into lists of about SLICE_CHARACTERS, one at least."""
    some: list[Request] = []
    size = 0
    for request in requests:
        length = len(request.prompt) * (1 + len(request.items))
        if some and size + length > SLICE_CHARACTERS:
            yield some
            some, size = [], 0
        some.append(request)
        size += length
    if some:
        yield some
