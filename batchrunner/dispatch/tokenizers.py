"""Which tokenizer a prompt goes to: a job's prompts are of one kind, or of any where Python makes them."""

import dataclasses

from batchrunner.core.engine_info import EngineInfo
from batchrunner.core.types import Outcome, PromptKind, Request
from batchrunner.dispatch.choice_tokens import ChoiceTokenizer
from batchrunner.dispatch.label_tokens import LabelTokenizer
from batchrunner.dispatch.tokenize import PromptTokenizer, RowTokenizer
from batchrunner.engines.base import Engine
from batchrunner.engines.model_files import class_names
from batchrunner.job.scores import ChoiceTask, ClassifyTask, RerankTask, ScoreTask
from batchrunner.job.spec import Job
from batchrunner.output.events import EventLog


class AsTheyAre:
    """Leaves prompts to the engine."""

    async def tokenize(self, requests: list[Request]) -> list[Request | Outcome]:
        """Return the requests."""
        return [*requests]


class NamedClasses:
    """Gives requests the names of the model's classes, and has their prompts tokenised."""

    def __init__(self, task: ClassifyTask, tokenizer: RowTokenizer) -> None:
        """Take the `task` with the names."""
        self._task = task
        self._tokenizer = tokenizer

    async def tokenize(self, requests: list[Request]) -> list[Request | Outcome]:
        """Return the requests as they are sent; the first call may raise CannotTokenizeError."""
        done = await self._tokenizer.tokenize(requests)
        return [item if isinstance(item, Outcome) else item._replace(task=self._task) for item in done]


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
    task = job.forward
    if isinstance(task, RerankTask):  # query and document are tokenised as a pair
        return AsTheyAre()
    found: RowTokenizer
    if kind is None:
        found = TokenizerByKind(job, engine, info, events)
    else:
        found = PromptTokenizer(job, kind, engine, info, events)
    if isinstance(task, ClassifyTask):
        return NamedClasses(dataclasses.replace(task, names=class_names(info.model)), found)
    if isinstance(task, ChoiceTask):
        return ChoiceTokenizer(found, engine, info)
    return LabelTokenizer(task, found, engine, info) if isinstance(task, ScoreTask) else found
