"""The labels of `task: score` → token ids, made by the engine's tokenizer before the first row is sent."""

import dataclasses

from batchrunner.core.engine_info import EngineInfo
from batchrunner.core.errors import CannotTokenizeError, JobError, RowRefusedError
from batchrunner.core.types import Outcome, Request
from batchrunner.dispatch.tokenize import RowTokenizer, engine_tokens
from batchrunner.engines.base import Engine
from batchrunner.engines.model_files import vocabulary_of
from batchrunner.job.scores import ScoreTask


class LabelTokenizer:
    """Gives requests the token ids of their labels, and has their prompts tokenised."""

    def __init__(self, task: ScoreTask, tokenizer: RowTokenizer, engine: Engine, info: EngineInfo) -> None:
        """Take the `task` of all requests, and what tokenises prompts."""
        self._task = task
        self._tokenizer = tokenizer
        self._engine = engine
        self._info = info
        self._known = info.simulated  # an invented model has no tokens

    async def tokenize(self, requests: list[Request]) -> list[Request | Outcome]:
        """Return the requests as they are sent; the first call may raise JobError and CannotTokenizeError."""
        if not self._known and requests:
            ids = [await self._id_of(label, requests[0]) for label in self._task.labels]
            self._check(ids)
            self._task = dataclasses.replace(self._task, label_ids=tuple(ids))
            self._known = True
        done = await self._tokenizer.tokenize(requests)
        return [item if isinstance(item, Outcome) else item._replace(task=self._task) for item in done]

    async def _id_of(self, label: str | int, request: Request) -> int:
        if isinstance(label, int):
            return label
        asked = request._replace(kind="text", prompt=label, task=None)
        try:
            found = await engine_tokens(self._engine, asked, special=False)
        except CannotTokenizeError as why:
            raise CannotTokenizeError(f"labels: {why}", hint="give the token ids of the labels") from None
        if isinstance(found, RowRefusedError):
            raise JobError(f"labels: the engine's tokenizer refuses {label!r}: {found}")
        if len(found) != 1:
            raise JobError(
                f"labels: {label!r} is {len(found)} tokens of the model ({', '.join(map(str, found))})",
                hint="a label is a single token: take another text, its token id, or prompt.choices",
            )
        return found[0]

    def _check(self, ids: list[int]) -> None:
        """Raise JobError for ids that stand twice, or that the model does not have."""
        vocabulary = vocabulary_of(self._info.model)
        for place, number in enumerate(ids):
            label = self._task.labels[place]
            if number in ids[:place]:
                other = self._task.labels[ids.index(number)]
                raise JobError(f"labels: {other!r} and {label!r} are the same token, {number}")
            if vocabulary is not None and number >= vocabulary:
                raise JobError(f"labels: {label!r}: the model has the tokens 0 to {vocabulary - 1}")
