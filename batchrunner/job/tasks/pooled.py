"""The tasks `rerank`, `reward` and `classify`: numbers that a model's head makes of a text, by `/encode`.

`/v1/rerank` of SGLang 0.5.23 takes one query a request and sorts its documents; `/v1/classify` takes no lists
of token ids and tells its softmax only; `/classify` does what `/encode` does. So all three use `/encode`,
which takes lists of texts, of token ids, and for a cross-encoder of pairs, and tells the tokens of each.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import msgspec

from batchrunner.core.errors import AttemptFailedError, RequestError, RowRefusedError
from batchrunner.core.hooks.functions import ColumnKind
from batchrunner.core.types import Completion, ForwardTask, Request
from batchrunner.job.tasks.native import (
    NativeMeta,
    NativeResult,
    abort_of,
    adapters_of,
    completion_with,
    prompts_of,
    results_in,
)
from batchrunner.job.tasks.pooling_args import pooling_args
from batchrunner.job.tasks.score import SCORES, made_up_weights, softmax

SCORE, LABEL = "score", "label"
_CLASSES = 3
"""Classes of the simulated engine."""


@dataclass(frozen=True, slots=True)
class PooledTask(ForwardTask):
    """Reads numbers that a model with a head for them makes of each prompt."""

    path: ClassVar[str] = "/encode"
    past_gateways: ClassVar[bool] = True
    architectures: ClassVar[str] = "SequenceClassification|Reward|Classification"
    wrong_model: ClassVar[str] = "generates text and has no head for scores"

    @property
    def columns(self) -> tuple[tuple[str, ColumnKind], ...]:
        """A list of numbers."""
        return ((SCORES, ("list", "float64")),)

    @classmethod
    def server_args(cls, config: Mapping[str, Any], *, cpu: bool) -> dict[str, Any]:
        """Return the arguments of a server that pools."""
        return pooling_args(config, cpu=cpu)

    def body(self, requests: Sequence[Request]) -> dict[str, Any]:
        """Return the body: a list of prompts."""
        return {**prompts_of(requests), **adapters_of(requests)}

    def answers(self, requests: Sequence[Request], reply: bytes) -> list[Completion | RequestError]:
        """Return the numbers of each row; a row with one that is no number has an error."""
        counts = [max(1, len(request.items)) for request in requests]
        results = iter(results_in(reply, sum(counts)))
        return [self._row([next(results) for _ in range(count)]) for count in counts]

    def made_up_reply(
        self,
        request: Request,
        seed: int,
        prompt_tokens: int,
        size: int,  # noqa: ARG002 - that of a vector
    ) -> bytes:
        """Return numbers from 0 to 1."""
        return msgspec.json.encode(
            [
                NativeResult(NativeMeta(None, prompt_tokens, 0), embedding=self._made_up(seed + place))
                for place in range(max(1, len(request.items)))
            ]
        )

    def _made_up(self, seed: int) -> list[float | None]:
        return [*made_up_weights(seed, _CLASSES)]

    def _row(self, results: Sequence[NativeResult]) -> Completion | RequestError:
        if (abort := abort_of(results)) is not None:
            return abort
        found: list[list[float]] = []
        for result in results:
            given = result.embedding
            numbers = given if isinstance(given, list) else [given]
            known = [number for number in numbers if number is not None and math.isfinite(number)]
            if not numbers or len(known) < len(numbers):
                return AttemptFailedError("a score of the answer is not a number")
            found.append(known)
        try:
            return completion_with(results, self._values(found))
        except RequestError as failure:
            return failure

    def _values(self, found: Sequence[list[float]]) -> dict[str, Any]:
        """Return the columns of a row from the numbers of each of its prompts; raises RequestError."""
        return {SCORES: found[0]}


@dataclass(frozen=True, slots=True)
class RerankTask(PooledTask):
    """Tells how relevant each document is to a query, by a cross-encoder."""

    name = "rerank"
    takes = ("prompt.documents",)
    architectures = "ForSequenceClassification"
    meanings = {
        SCORES: "The relevance of each document to the query, in their order, as the model's head gives it; "
        "null if the row failed.",
    }

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> ForwardTask:  # noqa: ARG003 - the documents are those of a row
        """Return the task."""
        return cls()

    def body(self, requests: Sequence[Request]) -> dict[str, Any]:
        """Return the body: a pair of query and document for each document."""
        return {
            "text": [[request.prompt, item] for request in requests for item in request.items],
            "is_cross_encoder_request": True,
            **adapters_of(requests),
        }

    def _made_up(self, seed: int) -> list[float | None]:
        return [made_up_weights(seed, 2)[0]]

    def _values(self, found: Sequence[list[float]]) -> dict[str, Any]:
        return {SCORES: [_only(numbers, self.name) for numbers in found]}


@dataclass(frozen=True, slots=True)
class RewardTask(PooledTask):
    """Tells the reward of a text, by a reward model."""

    name = "reward"
    meanings = {
        SCORE: "The reward of the prompt, as the model's head gives it; null if the row failed.",
    }

    @property
    def columns(self) -> tuple[tuple[str, ColumnKind], ...]:
        """One number."""
        return ((SCORE, "float64"),)

    def _made_up(self, seed: int) -> list[float | None]:
        return [made_up_weights(seed, 2)[0]]

    def _values(self, found: Sequence[list[float]]) -> dict[str, Any]:
        return {SCORE: _only(found[0], self.name)}


@dataclass(frozen=True, slots=True)
class ClassifyTask(PooledTask):
    """Tells the classes of a text, by a classification model."""

    softmax: bool = False
    """Whether the scores are probabilities."""
    names: tuple[str, ...] = ()
    """Names of the classes; those of transformers, such as LABEL_0, where they are not known."""

    name = "classify"
    takes = ("output.softmax",)
    meanings = {
        SCORES: "The score of each class, in the order of the model's `id2label`, as its head gives it; with "
        "`output.softmax` its probability. Null if the row failed.",
        LABEL: "The name of the class with the highest score, by the model's `id2label`; null if the row "
        "failed.",
    }

    @property
    def columns(self) -> tuple[tuple[str, ColumnKind], ...]:
        """The numbers of all classes, and the highest one."""
        return ((SCORES, ("list", "float64")), (LABEL, "string"))

    def _values(self, found: Sequence[list[float]]) -> dict[str, Any]:
        (numbers,) = found
        best = numbers.index(max(numbers))
        if self.softmax:
            numbers = softmax(numbers)
        name = self.names[best] if best < len(self.names) else f"LABEL_{best}"
        return {SCORES: numbers, LABEL: name}


def _only(numbers: Sequence[float], task: str) -> float:
    """Return the one number of a prompt; raises RowRefusedError where the model makes several."""
    if len(numbers) != 1:
        raise RowRefusedError(f"the model gives {len(numbers)} numbers, and task: {task} takes a single one")
    return numbers[0]
