"""The task `score` with `labels`: the probabilities of tokens after a prompt, by `/generate`.

`/v1/score` of SGLang 0.5.23 does the same inside (no new token, `token_ids_logprob`), but its reply lacks the
tokens of each prompt, computed and cached, and the version of the weights. Prompts of a list are requests of
their own for the scheduler: prefixes are shared through its cache, as with texts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, ClassVar

import msgspec

from batchrunner.core.errors import AttemptFailedError, RequestError, RowRefusedError
from batchrunner.core.types import ColumnKind, Completion, ForwardTask, Request
from batchrunner.job.native import (
    NativeMeta,
    NativeResult,
    TokenScore,
    abort_of,
    adapters_of,
    completion_with,
    pooling_args,
    prompts_of,
    results_in,
)

SCORES = "scores"
WITHOUT_TOKENS = {"max_new_tokens": 0}
"""Sampling parameters with which `/generate` ends a prompt after its prefill."""


@dataclass(frozen=True, slots=True)
class ScoreTask(ForwardTask):
    """Tells how probable each label is as the next token after a prompt."""

    labels: tuple[str | int, ...] = ()
    softmax: bool = False
    """Whether the probabilities are those among the labels."""
    label_ids: tuple[int, ...] = ()
    """Token ids of the labels, once they are known."""

    name = "score"
    path = "/generate"
    by_generation = True
    past_gateways = True
    wrong_model = "gives no probabilities of tokens"
    takes = ("labels", "output.softmax", "prompt.choices")
    meanings = {
        SCORES: "The probability of each label after the prompt, in the order of `labels`; null if the row "
        "failed.",
    }

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> ForwardTask:
        """Return the task for labels."""
        return cls(tuple(fields["labels"] or ()), fields["softmax"])

    @property
    def columns(self) -> tuple[tuple[str, ColumnKind], ...]:
        """A list of numbers."""
        return ((SCORES, ("list", "float64")),)

    @classmethod
    def server_args(cls, config: Mapping[str, Any], *, cpu: bool) -> dict[str, Any]:  # noqa: ARG003 - for others
        """Return no arguments: a server that generates texts can do it."""
        return {}

    def body(self, requests: Sequence[Request]) -> dict[str, Any]:
        """Return the body: a list of prompts, for each of which the same tokens are asked for."""
        return {
            **prompts_of(requests),
            "sampling_params": WITHOUT_TOKENS,
            "return_logprob": True,
            "logprob_start_len": -1,
            "token_ids_logprob": [list(self.label_ids) for _ in requests],
            **adapters_of(requests),
        }

    def answers(self, requests: Sequence[Request], reply: bytes) -> list[Completion | RequestError]:
        """Return the probabilities of each row; a row with one that is no number has an error."""
        return [self._answer(result) for result in results_in(reply, len(requests))]

    def made_up_reply(
        self,
        request: Request,  # noqa: ARG002 - for tasks whose answer depends on it
        seed: int,
        prompt_tokens: int,
        size: int,  # noqa: ARG002 - that of a vector
    ) -> bytes:
        """Return probabilities whose sum is below 1."""
        known = self.label_ids or range(len(self.labels))
        weights = made_up_weights(seed, len(self.labels) + 1)
        scores: list[TokenScore] = [
            (math.log(weight), number, None) for number, weight in zip(known, weights, strict=False)
        ]
        meta = NativeMeta(None, prompt_tokens, 0, output_token_ids_logprobs=[scores])
        return msgspec.json.encode(NativeResult(meta))

    def _answer(self, result: NativeResult) -> Completion | RequestError:
        if (abort := abort_of([result])) is not None:
            return abort
        told = result.meta_info.output_token_ids_logprobs
        if not told or not told[0]:
            return AttemptFailedError("the answer has no probabilities of the labels")
        by_id = {number: logprob for logprob, number, _ in told[0]}
        asked = self.label_ids or range(len(self.labels))
        if any(number not in by_id for number in asked):
            return AttemptFailedError("the answer lacks the probability of a label")
        logprobs = [by_id[number] for number in asked]
        known = [logprob for logprob in logprobs if logprob is not None and math.isfinite(logprob)]
        if len(known) < len(logprobs):
            return AttemptFailedError("the probability of a label is not a number")
        return completion_with([result], {SCORES: _probabilities(known, among=self.softmax)})


def _probabilities(logprobs: Sequence[float], *, among: bool) -> list[float]:
    """Return probabilities, those `among` the given ones if asked for: then their sum is 1."""
    return softmax(logprobs) if among else [math.exp(logprob) for logprob in logprobs]


def softmax(numbers: Sequence[float]) -> list[float]:
    """Return probabilities, whose sum is 1, of logits or of logarithms of weights."""
    most = max(numbers)
    weights = [math.exp(number - most) for number in numbers]
    total = sum(weights)
    return [weight / total for weight in weights]


def made_up_weights(seed: int, count: int) -> list[float]:
    """Return positive numbers whose sum is 1, the same for the same seed."""
    random = Random(seed)  # noqa: S311 - no secret
    numbers = [random.random() + 1e-6 for _ in range(count)]
    total = sum(numbers)
    return [number / total for number in numbers]


PER_TOKEN, PER_BYTE = "scores_per_token", "scores_per_byte"

_read = msgspec.json.Decoder(list[list[NativeResult]])


@dataclass(frozen=True, slots=True)
class ChoiceTask(ScoreTask):
    """Tells how likely each choice is to go on after a prompt."""

    meanings = {
        SCORES: "The logarithm of the probability of each choice after the prompt: the sum of those of its "
        "tokens.",
        PER_TOKEN: "The same, divided by the number of the choice's tokens.",
        PER_BYTE: "The same, divided by the number of the choice's bytes in UTF-8.",
    }

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> ChoiceTask:  # noqa: ARG003 - the choices are those of a row
        """Return the task."""
        return cls()

    @property
    def columns(self) -> tuple[tuple[str, ColumnKind], ...]:
        """A list of numbers each."""
        return tuple((name, ("list", "float64")) for name in self.meanings)

    def steps(self, requests: Sequence[Request]) -> list[dict[str, Any]]:
        """Return a body with the first choice of each row, and one with all others if there are any."""
        firsts = [(request, request.item_ids[0]) for request in requests]
        others = [(request, ids) for request in requests for ids in request.item_ids[1:]]
        return [_body_of(some) for some in (firsts, others) if some]

    def body(self, requests: Sequence[Request]) -> dict[str, Any]:
        """Return a body with all choices, which would compute their prompt as often."""
        return _body_of([(request, ids) for request in requests for ids in request.item_ids])

    def whole(self, replies: Sequence[bytes]) -> bytes:
        """Return the replies as a list of them."""
        return b"[" + b",".join(replies) + b"]"

    def answers(self, requests: Sequence[Request], reply: bytes) -> list[Completion | RequestError]:
        """Return the log likelihoods of each row; a row with one that is no number has an error."""
        firsts, *more = _read.decode(reply)
        others = iter(more[0] if more else ())
        if len(firsts) + (len(more[0]) if more else 0) != sum(len(request.item_ids) for request in requests):
            raise AttemptFailedError("there are not as many results as choices")
        return [
            self._row(request, [first, *(next(others) for _ in request.item_ids[1:])])
            for request, first in zip(requests, firsts, strict=True)
        ]

    def made_up_reply(
        self,
        request: Request,
        seed: int,
        prompt_tokens: int,
        size: int,  # noqa: ARG002 - that of a vector
    ) -> bytes:
        """Return a probability for each token of each choice."""
        results = []
        for place, ids in enumerate(request.item_ids):
            weights = made_up_weights(seed + place, len(ids) + 1)
            told: list[TokenScore] = [
                (math.log(weight), number, None) for number, weight in zip(ids, weights, strict=False)
            ]
            meta = NativeMeta(None, prompt_tokens + len(ids), 0, input_token_logprobs=told)
            results.append(NativeResult(meta))
        return msgspec.json.encode([results[:1], results[1:]])

    def _row(self, request: Request, results: Sequence[NativeResult]) -> Completion | RequestError:
        if (abort := abort_of(results)) is not None:
            return abort
        sums = []
        for ids, result in zip(request.item_ids, results, strict=True):
            told = (result.meta_info.input_token_logprobs or [])[-len(ids) :]
            if [number for _, number, _ in told] != ids:
                return AttemptFailedError("the answer lacks log probabilities of a choice's tokens")
            known = [logprob for logprob, _, _ in told if logprob is not None]
            total = math.fsum(known)
            if len(known) < len(ids) or not math.isfinite(total):
                return AttemptFailedError("the log likelihood of a choice is not a number")
            sums.append(total)
        tokens = [len(ids) for ids in request.item_ids]
        sizes = [len(item.encode("utf-8", "surrogatepass")) for item in request.items]
        columns = {
            SCORES: sums,
            PER_TOKEN: [total / count for total, count in zip(sums, tokens, strict=True)],
            PER_BYTE: [total / size for total, size in zip(sums, sizes, strict=True)],
        }
        return completion_with(results, columns)


def _body_of(pairs: Sequence[tuple[Request, list[int]]]) -> dict[str, Any]:
    """Return a body with these choices of requests."""
    adapters = [request.lora_path for request, _ in pairs]
    return {
        "input_ids": [[*request.prompt, *ids] for request, ids in pairs],
        "sampling_params": WITHOUT_TOKENS,
        "return_logprob": True,
        # the log probability of a token is computed at the one before it
        "logprob_start_len": [len(request.prompt) - 1 for request, _ in pairs],
        **({"lora_path": adapters} if any(adapters) else {}),
    }


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
