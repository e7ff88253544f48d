"""The task `score` with `prompt.choices`: the log likelihood of each choice after its prompt, by `/generate`.

Prompt and choice go as one prompt of token ids, for which SGLang tells the log probabilities of the tokens
from `logprob_start_len` on; what stands before may come from its prefix cache. The first choice of a row is
sent before the others, so that these find the prompt in the cache and compute their own tokens only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from batchrunner.core.errors import AttemptFailedError, RequestError
from batchrunner.core.hooks.functions import ColumnKind
from batchrunner.core.types import Completion, Request
from batchrunner.job.tasks.native import (
    NativeMeta,
    NativeResult,
    TokenScore,
    abort_of,
    completion_with,
)
from batchrunner.job.tasks.score import SCORES, WITHOUT_TOKENS, ScoreTask, made_up_weights

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
