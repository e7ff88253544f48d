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
from typing import Any

import msgspec

from batchrunner.core.errors import AttemptFailedError, RequestError
from batchrunner.core.hooks.functions import ColumnKind
from batchrunner.core.types import Completion, ForwardTask, Request
from batchrunner.job.tasks.native import (
    NativeMeta,
    NativeResult,
    TokenScore,
    abort_of,
    adapters_of,
    completion_with,
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
