"""Which tokenizer a prompt goes to: a job's prompts are of one kind, or of any where Python makes them."""

from typing import Protocol

from batchrunner.core.types import EngineInfo, Outcome, PromptKind, Request
from batchrunner.dispatch.tokenize import PromptTokenizer
from batchrunner.engines.base import Engine
from batchrunner.job.spec import Job
from batchrunner.output.events import EventLog


class RowTokenizer(Protocol):
    """Tokenises prompts, or leaves that to the engine."""

    async def tokenize(self, requests: list[Request]) -> list[Request | Outcome]:
        """Return the requests with token ids, or as they are; see `PromptTokenizer.tokenize`."""


class TokenizerByKind:
    """Has a tokenizer for each kind of prompt that comes."""

    def __init__(self, job: Job, engine: Engine, info: EngineInfo, events: EventLog) -> None:
        """Keep what a tokenizer is made of."""
        self._job = job
        self._engine = engine
        self._info = info
        self._events = events
        self._tokenizers: dict[PromptKind, PromptTokenizer] = {}

    async def tokenize(self, requests: list[Request]) -> list[Request | Outcome]:
        """Tokenise each request by its kind; the first one of a kind may raise CannotTokenizeError."""
        found: list[Request | Outcome] = [*requests]
        for kind in {request.kind for request in requests}:
            places = [at for at, request in enumerate(requests) if request.kind == kind]
            done = await self._of_kind(kind).tokenize([requests[at] for at in places])
            for at, request in zip(places, done, strict=True):
                found[at] = request
        return found

    def _of_kind(self, kind: PromptKind) -> PromptTokenizer:
        if kind not in self._tokenizers:
            made = PromptTokenizer(self._job, kind, self._engine, self._info, self._events)
            self._tokenizers[kind] = made
        return self._tokenizers[kind]


def make_tokenizer(
    job: Job, kind: PromptKind | None, engine: Engine, info: EngineInfo, events: EventLog
) -> RowTokenizer:
    """Return what tokenises prompts of a kind, or of any; raises CannotTokenizeError as PromptTokenizer."""
    if kind is None:
        return TokenizerByKind(job, engine, info, events)
    return PromptTokenizer(job, kind, engine, info, events)
