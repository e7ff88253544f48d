"""Tasks without decoding (embed, score, rerank, reward, classify): their requests and their result columns.

Scores come from SGLang's native endpoints `/generate` and `/encode`. Their reply has a result for each
prompt, in order, each with a `meta_info`. The scheduler handles each prompt as a request, so prompts share
prefixes through its cache. `/v1/score` of SGLang 0.5.23 does the same internally (no new token,
`token_ids_logprob`). It is not used, because its reply lacks each prompt's computed and cached tokens, and
the version of the weights.

Vectors come from `/v1/embeddings`, which takes the same prompts as `/encode`: a text, token ids, or a list of
either. It writes a vector as Base64 of 32-bit numbers, 5.3 bytes per number. `/encode` converts each number
to a Python float and writes 18 to 22 bytes. But `/v1/embeddings` reports only the total of the prompt tokens.
Those of a single row are known only if its prompt is token ids, or if the row was sent alone.
"""

from __future__ import annotations

import math
import re
import struct
from array import array
from base64 import b64decode, b64encode
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from random import Random
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

import msgspec

from batchrunner.core.errors import AttemptFailedError, RequestError, RowRefusedError
from batchrunner.core.server_replies import (
    LOWEST,
    MOST_TOKENS,
    FinishReason,
    TokenCount,
    Word,
    decode_reply,
    raise_abort,
)
from batchrunner.core.types import (
    CHAT_PATH,
    CLASSIFY_PATH,
    COMPLETIONS_PATH,
    EMBEDDINGS_PATH,
    RERANK_PATH,
    RESPONSES_PATH,
    SCORE_PATH,
    ColumnKind,
    Completion,
    ForwardTask,
    Request,
)

SCORES, SCORE, LABEL = "scores", "score", "label"
PER_TOKEN, PER_BYTE = "scores_per_token", "scores_per_byte"
A_SCORE = "a score of the answer"
"""Subject of error messages about scores, such as `a score of the answer is not a number`."""
WITHOUT_TOKENS = {"max_new_tokens": 0}
"""Sampling parameters with which `/generate` only prefills the prompt and generates no tokens."""

TokenScore = tuple[float | None, int, Any]
"""Log probability (null if it is NaN), token id, and the token's text if it was requested."""


class NativeMeta(msgspec.Struct):
    """Field `meta_info` of a prompt's result, in a reply of `/generate` or `/encode`."""

    finish_reason: FinishReason | Word | None = None
    prompt_tokens: TokenCount | None = None
    cached_tokens: TokenCount | None = None
    weight_version: Any = None
    output_token_ids_logprobs: list[list[TokenScore] | None] | None = None
    input_token_logprobs: list[TokenScore] | None = None


class NativeResult(msgspec.Struct):
    """Result of one prompt, in a reply of `/generate` or `/encode`."""

    meta_info: NativeMeta
    embedding: list[float | None] | float | None = None


_read_results = msgspec.json.Decoder(NativeResult | list[NativeResult])
_KINDS: dict[str, ColumnKind] = {SCORE: "float64", LABEL: "string"}
"""Types of the columns with one value per row. Any other column has a list of numbers."""


Score: TypeAlias = float | None
"""Score of a text. None if the model returned NaN; minus infinity is the logarithm of probability 0."""


def _scores(numbers: Sequence[float | None], subject: str) -> list[Score]:
    """Return the scores of a row. If all are NaN, raise AttemptFailedError with a message about `subject`."""
    if all(number is None for number in numbers):
        raise AttemptFailedError(f"{subject} is not a number")
    # In a decoded reply, LOWEST stands for minus infinity, which JSON cannot express.
    return [-math.inf if number == LOWEST else number for number in numbers]


def _probabilities(scores: Sequence[Score], subject: str) -> list[float]:
    """Return the softmax of the scores of a row.

    Raises AttemptFailedError, about `subject`, if a score is NaN, or if all are minus infinity.
    """
    numbers = [score for score in scores if score is not None]
    if len(numbers) < len(scores) or max(numbers) == -math.inf:
        raise AttemptFailedError(f"output.softmax: {subject} is not a number")
    return softmax(numbers)


def _total(counts: Sequence[int | None]) -> int | None:
    """Return the sum of token counts, at most MOST_TOKENS; None if the server left out a count."""
    if None in counts:
        return None
    return min(sum(count or 0 for count in counts), MOST_TOKENS)


def _with_adapters(requests: Sequence[Request], body: dict[str, Any]) -> dict[str, Any]:
    """Add the prompts' LoRA adapters, if any, to a body; `requests` has the request of each prompt."""
    adapters = [request.lora_path for request in requests]
    return {**body, "lora_path": adapters} if any(adapters) else body


def softmax(logits: Sequence[float]) -> list[float]:
    """Convert logits or log probabilities to probabilities with the sum 1."""
    # Subtracting the largest logit does not change the result, and keeps exp() from overflowing.
    largest = max(logits)
    weights = [math.exp(logit - largest) for logit in logits]
    total = sum(weights)
    return [weight / total for weight in weights]


@dataclass(frozen=True, slots=True)
class NativeTask(ForwardTask):
    """A task whose scores come from SGLang's native endpoints, `/encode` or `/generate`."""

    path: ClassVar[str] = "/encode"
    architectures: ClassVar[str] = "SequenceClassification|Reward|Classification"

    @property
    def columns(self) -> tuple[tuple[str, ColumnKind], ...]:
        """Names and types of the result columns."""
        return tuple((name, _KINDS.get(name, ("list", "float64"))) for name in self.meanings)

    def bodies(self, requests: Sequence[Request]) -> list[dict[str, Any]]:
        """Return a single request body, in a list, with the prompts of all rows."""
        name = "input_ids" if requests[0].kind == "input_ids" else "text"
        return [_with_adapters(requests, {name: [request.prompt for request in requests]})]

    def answers(
        self, requests: Sequence[Request], replies: Sequence[bytes]
    ) -> list[Completion | RequestError]:
        """Return the result columns of each row, or the error of a row without usable scores.

        `replies` are the replies to `bodies(requests)`. Raises AttemptFailedError if the number of results is
        not the number of prompts.
        """
        results: list[NativeResult] = []
        for reply in replies:
            parsed = decode_reply(_read_results, reply)
            # SGLang answers a single prompt with a result instead of a list.
            results += parsed if isinstance(parsed, list) else [parsed]
        # A row with choices or documents has a prompt for each of them, any other row a single prompt.
        prompts_by_row = [max(1, len(request.items)) for request in requests]
        prompts = sum(prompts_by_row)
        if len(results) != prompts:
            raise AttemptFailedError(f"the server returned {len(results)} results for {prompts} prompts")
        return [
            self._answer(request, row_results)
            for request, row_results in zip(requests, self._by_row(results, prompts_by_row), strict=True)
        ]

    def _by_row(
        self, results: Sequence[NativeResult], prompts_by_row: Sequence[int]
    ) -> list[list[NativeResult]]:
        """Group the results of all prompts by row; `prompts_by_row` has the number of prompts of each row."""
        remaining = iter(results)
        return [list(islice(remaining, prompts)) for prompts in prompts_by_row]

    def _answer(self, request: Request, results: Sequence[NativeResult]) -> Completion | RequestError:
        """Return the answer of a row from the results of its prompts, or the row's error."""
        try:
            for result in results:
                raise_abort(result.meta_info.finish_reason)
            columns = self._columns_of(request, results)
        except RequestError as failure:
            return failure
        metas = [result.meta_info for result in results]
        version = metas[0].weight_version  # All prompts of a row are sent to the same server.
        # The model generates no text, so there are no texts, finish reasons and output tokens.
        return Completion(
            texts=[],
            finish_reasons=[],
            completion_tokens=[],
            prompt_tokens=_total([meta.prompt_tokens for meta in metas]),
            cached_tokens=_total([meta.cached_tokens for meta in metas]),
            weights=version if isinstance(version, str) else None,
            columns={name: [value] for name, value in columns.items()},
        )

    def _columns_of(self, request: Request, results: Sequence[NativeResult]) -> dict[str, Any]:  # noqa: ARG002
        """Return the result columns of a row from the results of its prompts.

        Raises RequestError if a result is unusable.
        """
        numbers = []
        for result in results:
            embedding = result.embedding
            numbers.append(embedding if isinstance(embedding, list) else [embedding])
        return self._values(numbers)

    def _values(self, numbers_by_prompt: Sequence[list[float | None]]) -> dict[str, Any]:
        """Return the result columns of a row; the argument has the model's numbers for each of its prompts.

        Raises RequestError if the numbers are unusable.
        """
        numbers = [self._only_number(numbers_of_prompt) for numbers_of_prompt in numbers_by_prompt]
        return {SCORES: _scores(numbers, A_SCORE)}

    def _only_number(self, numbers: Sequence[float | None]) -> float | None:
        """Return the only number of a prompt; raise RowRefusedError if the model returned several."""
        if len(numbers) != 1:
            raise RowRefusedError(
                f"the model returned {len(numbers)} numbers, but the task `{self.name}` needs exactly one"
            )
        return numbers[0]


@dataclass(frozen=True, slots=True)
class ScoreTask(NativeTask):
    """Task `score` with `labels`: the probability of each label as the next token after a prompt."""

    labels: tuple[str | int, ...] = ()
    softmax: bool = False
    """Whether the probabilities are normalized over the labels, so that their sum is 1."""
    label_ids: tuple[int, ...] = ()
    """Token ids of the labels, set once they have been tokenized."""

    name = "score"
    path = "/generate"
    by_generation = True
    architectures = ""
    takes = ("labels", "output.softmax", "prompt.choices")
    meanings = {
        SCORES: "Probability of each label, in the order of `labels`.",
    }

    def bodies(self, requests: Sequence[Request]) -> list[dict[str, Any]]:
        """Return a single request body, in a list, with the prompts of all rows and the labels' token ids."""
        (prompts,) = NativeTask.bodies(self, requests)
        logprob_request = {
            "sampling_params": WITHOUT_TOKENS,
            "return_logprob": True,
            "logprob_start_len": -1,
            "token_ids_logprob": [list(self.label_ids) for _ in requests],
        }
        return [{**prompts, **logprob_request}]

    def _columns_of(self, request: Request, results: Sequence[NativeResult]) -> dict[str, Any]:  # noqa: ARG002
        """Return the probabilities of the labels; raise AttemptFailedError if one is missing."""
        # No token is generated, so the only position is the one right after the prompt.
        scores_by_position = results[0].meta_info.output_token_ids_logprobs
        next_token_scores = scores_by_position[0] if scores_by_position else None
        logprob_of = {token_id: logprob for logprob, token_id, _ in next_token_scores or ()}
        if not logprob_of.keys() >= {*self.label_ids}:
            raise AttemptFailedError("the answer lacks the probability of a label")
        subject = "the probability of a label"
        logprobs = _scores([logprob_of[token_id] for token_id in self.label_ids], subject)
        if self.softmax:
            return {SCORES: _probabilities(logprobs, subject)}
        return {SCORES: [None if logprob is None else math.exp(logprob) for logprob in logprobs]}


@dataclass(frozen=True, slots=True)
class ChoiceTask(ScoreTask):
    """Task `score` with `prompt.choices`: the likelihood of each choice as the continuation of a prompt."""

    meanings = {
        SCORES: "Logarithm of each choice's probability, the sum over its tokens.",
        PER_TOKEN: "`scores`, each divided by the number of tokens of the choice.",
        PER_BYTE: "`scores`, each divided by the number of bytes of the choice in UTF-8.",
    }

    def bodies(self, requests: Sequence[Request]) -> list[dict[str, Any]]:
        """Return a request body with the first choice of each row, and one with all other choices, if any.

        The second body is sent after the reply to the first, so that its choices find the prompt in the
        prefix cache. In a single body, the prompt would be computed again for each choice.
        """
        first_choices = [(request, request.item_ids[0]) for request in requests]
        other_choices = [(request, ids) for request in requests for ids in request.item_ids[1:]]
        bodies = [_body_of(first_choices)]
        if other_choices:
            bodies.append(_body_of(other_choices))
        return bodies

    def _by_row(
        self, results: Sequence[NativeResult], prompts_by_row: Sequence[int]
    ) -> list[list[NativeResult]]:
        """Group the results by row.

        First come the results for the first choice of each row, then those for the other choices, row by row.
        """
        rows = len(prompts_by_row)
        other_choices = iter(results[rows:])
        by_row = []
        for first_choice, prompts in zip(results[:rows], prompts_by_row, strict=True):
            by_row.append([first_choice, *islice(other_choices, prompts - 1)])
        return by_row

    def _columns_of(self, request: Request, results: Sequence[NativeResult]) -> dict[str, Any]:
        """Return the scores of the choices; raise AttemptFailedError if one is missing."""
        likelihoods = [
            _log_likelihood(ids, result) for ids, result in zip(request.item_ids, results, strict=True)
        ]
        scores = _scores(likelihoods, "the log likelihood of a choice")
        token_counts = [len(ids) for ids in request.item_ids]
        byte_counts = [len(item.encode("utf-8", "surrogatepass")) for item in request.items]
        return {
            SCORES: scores,
            PER_TOKEN: _divided(scores, token_counts),
            PER_BYTE: _divided(scores, byte_counts),
        }


def _log_likelihood(choice_ids: list[int], result: NativeResult) -> float | None:
    """Return the sum of the log probabilities of a choice's tokens; None if one of them is NaN.

    Raises AttemptFailedError if the log probability of a token is missing.
    """
    # The choice follows the prompt, so its tokens are the last tokens of the input.
    input_scores = result.meta_info.input_token_logprobs or []
    choice_scores = input_scores[-len(choice_ids) :]
    if [token_id for _, token_id, _ in choice_scores] != choice_ids:
        raise AttemptFailedError("the answer lacks log probabilities of a choice's tokens")
    logprobs = [logprob for logprob, _, _ in choice_scores if logprob is not None]
    if len(logprobs) < len(choice_ids):
        return None
    # LOWEST is a finite stand-in for minus infinity, so a sum that contains it must be LOWEST too.
    return LOWEST if LOWEST in logprobs else math.fsum(logprobs)


def _divided(scores: Sequence[Score], counts: Sequence[int]) -> list[Score]:
    """Divide the score of each choice by its number of tokens or bytes."""
    return [None if score is None else score / count for score, count in zip(scores, counts, strict=True)]


def _body_of(choices: Sequence[tuple[Request, list[int]]]) -> dict[str, Any]:
    """Return a body with a prompt for each choice: a pair of its row's request and its token ids."""
    body = {
        "input_ids": [[*request.prompt, *ids] for request, ids in choices],
        "sampling_params": WITHOUT_TOKENS,
        "return_logprob": True,
        # The log probability of a token is computed one position before it, so this begins at the prompt's
        # last token.
        "logprob_start_len": [len(request.prompt) - 1 for request, _ in choices],
    }
    return _with_adapters([request for request, _ in choices], body)


@dataclass(frozen=True, slots=True)
class RerankTask(NativeTask):
    """Task `rerank`: the relevance of each document to a query, by a cross-encoder."""

    name = "rerank"
    takes = ("prompt.documents",)
    architectures = "ForSequenceClassification"
    meanings = {
        SCORES: "Relevance of each document, in the order of the documents: the output of the model's head.",
    }

    def bodies(self, requests: Sequence[Request]) -> list[dict[str, Any]]:
        """Return a single request body, in a list, with a pair of query and document for each document."""
        pairs = [(request, document) for request in requests for document in request.items]
        texts = [[request.prompt, document] for request, document in pairs]
        body = {"text": texts, "is_cross_encoder_request": True}
        return [_with_adapters([request for request, _ in pairs], body)]


@dataclass(frozen=True, slots=True)
class RewardTask(NativeTask):
    """Task `reward`: the reward of a text, by a reward model."""

    name = "reward"
    meanings = {
        SCORE: "Reward: the output of the model's head.",
    }

    def _values(self, numbers_by_prompt: Sequence[list[float | None]]) -> dict[str, Any]:
        """Return the reward, the only number of the only prompt."""
        (score,) = _scores([self._only_number(numbers_by_prompt[0])], A_SCORE)
        return {SCORE: score}


@dataclass(frozen=True, slots=True)
class ClassifyTask(NativeTask):
    """Task `classify`: a score for each class of a text, by a classification model."""

    softmax: bool = False
    """Whether the column `scores` has probabilities instead of the model's scores."""
    names: tuple[str, ...] = ()
    """Names of the classes, from `id2label` in the model's config.json.

    Without a name, class 0 is called LABEL_0 and so on, as in transformers.
    """

    name = "classify"
    takes = ("output.softmax",)
    meanings = {
        SCORES: "Score of each class, in the order of `id2label`; with `output.softmax` its probability.",
        LABEL: "Name of the class with the highest score, by `id2label`.",
    }

    def _values(self, numbers_by_prompt: Sequence[list[float | None]]) -> dict[str, Any]:
        """Return the scores of all classes (the numbers of the only prompt), and the best class."""
        scores = _scores(numbers_by_prompt[0], A_SCORE)
        best = scores.index(max(score for score in scores if score is not None))
        label = self.names[best] if best < len(self.names) else f"LABEL_{best}"
        if self.softmax:
            return {SCORES: _probabilities(scores, A_SCORE), LABEL: label}
        return {SCORES: scores, LABEL: label}


CPU_ROWS = 256
"""Maximum number of running requests of an embedding or scoring server on a CPU."""
_ENCODER = re.compile("bert", re.IGNORECASE)
"""Matches class names of encoder models: BERT, RoBERTa, ModernBERT, …"""
_DECODER = re.compile("ForCausalLM|Classification|Reward")
"""Matches class names of decoder models, whose head generates text or computes scores."""


def pooling_args(config: Mapping[str, Any], *, cpu: bool) -> dict[str, Any]:
    """Return SGLang's server arguments for an embedding or scoring model; `config` is its config.json.

    In an encoder, tokens attend to later tokens. So its results are wrong if a prompt is computed in chunks,
    or if a part of it comes from the prefix cache. A model of unknown kind counts as an encoder: if this is
    wrong, the model is only slower.
    """
    args: dict[str, Any] = {"is-embedding": True}
    architectures = " ".join(map(str, config.get("architectures") or ()))
    is_encoder = _ENCODER.search(architectures) is not None or _DECODER.search(architectures) is None
    if is_encoder:
        args |= {"disable-radix-cache": True, "chunked-prefill-size": -1}
    if cpu:
        # SGLang's default memory fraction would leave no memory for the KV cache. None means the model's own
        # context length, which is short.
        args |= {"mem-fraction-static": 0.3, "context-length": None, "max-running-requests": CPU_ROWS}
    return args


EMBEDDING = "embedding"
MODEL = "default"
"""Model name in embedding requests. SGLang accepts this name for any model that it serves."""
Dtype: TypeAlias = Literal["float32", "float16"]
"""Type of a vector's numbers in the results."""
NUMBER_BYTES: dict[Dtype, int] = {"float32": 4, "float16": 2}
"""Size in bytes of a number of each type."""
NORM_TOLERANCE = 1e-6
"""Maximum difference from 1 of the norm of a normalized vector.

Vectors have only 32-bit numbers, so a smaller tolerance would be useless.
"""


class EmbeddingItem(msgspec.Struct):
    """Vector in a reply of `/v1/embeddings`: Base64 of little-endian 32-bit numbers, or a list of numbers."""

    embedding: msgspec.Raw
    """JSON of the vector. It is decoded later, so that a bad vector fails only its own row."""
    index: TokenCount | None = None
    """Position of the vector's prompt in the request; None means 0."""


class EmbeddingUsage(msgspec.Struct):
    """Field `usage` in a reply of `/v1/embeddings`: the number of tokens of all rows together."""

    prompt_tokens: TokenCount | None = None


class EmbeddingReply(msgspec.Struct):
    """Reply of `/v1/embeddings`."""

    data: Annotated[list[EmbeddingItem], msgspec.Meta(min_length=1)]
    usage: EmbeddingUsage = msgspec.field(default_factory=EmbeddingUsage)


_read_vectors = msgspec.json.Decoder(EmbeddingReply)
_read_vector = msgspec.json.Decoder(str | list[float | None])


@dataclass(frozen=True, slots=True)
class EmbedTask(ForwardTask):
    """Task `embed`: the vector of each prompt."""

    dtype: Dtype = "float32"
    normalize: bool = False
    """Whether each vector is divided by its L2 norm."""
    dimensions: int | None = None
    """Number of dimensions of a vector, for a model that supports several; None for the model's default."""

    name = "embed"
    path = "/v1/embeddings"
    takes = ("output.dtype", "output.normalize", "output.dimensions")
    meanings = {
        EMBEDDING: "Vector of the prompt.",
    }

    @property
    def columns(self) -> tuple[tuple[str, ColumnKind], ...]:
        """Name and type of the only result column, the vector."""
        return ((EMBEDDING, ("list", self.dtype)),)

    def bodies(self, requests: Sequence[Request]) -> list[dict[str, Any]]:
        """Return a single request body, in a list, with the prompts of all rows.

        A single prompt is sent by itself, several prompts as a list.
        """
        prompts = [request.prompt for request in requests]
        adapters = [request.lora_path for request in requests]
        body: dict[str, Any] = {"model": MODEL, "encoding_format": "base64"}
        body["input"] = prompts if len(prompts) > 1 else prompts[0]
        if self.dimensions is not None:
            body["dimensions"] = self.dimensions
        if any(adapters):
            body["lora_path"] = adapters if len(adapters) > 1 else adapters[0]
        return [body]

    def answers(
        self, requests: Sequence[Request], replies: Sequence[bytes]
    ) -> list[Completion | RequestError]:
        """Return the vector of each row as bytes of `dtype`, or the error of a row without a usable vector.

        Raises AttemptFailedError if the reply does not have exactly one vector for each row.
        """
        parsed = decode_reply(_read_vectors, replies[0])
        # A server may leave out an index of 0.
        items = sorted(parsed.data, key=lambda item: item.index or 0)
        if [item.index or 0 for item in items] != list(range(len(requests))):
            raise AttemptFailedError(
                f"the server did not return exactly one vector for each of {len(requests)} rows "
                f"(got {len(items)} vectors)"
            )
        tokens = _tokens_of(requests, parsed.usage.prompt_tokens)
        return [self._answer(item, count) for item, count in zip(items, tokens, strict=True)]

    def _answer(self, item: EmbeddingItem, prompt_tokens: int | None) -> Completion | RequestError:
        """Return the answer of a row with its vector, or the error of an unusable vector."""
        try:
            vector = self.stored(_numbers(item))
        except RequestError as failure:
            return failure
        # The model generates no text, so there are no texts, finish reasons and output tokens.
        return Completion(
            texts=[],
            finish_reasons=[],
            completion_tokens=[],
            prompt_tokens=prompt_tokens,
            cached_tokens=None,
            columns={EMBEDDING: [vector]},
        )

    def stored(self, vector: array[float]) -> bytes:
        """Return a vector as bytes of `dtype`, normalized if `normalize` is set.

        Raises RowRefusedError for an unusable vector.
        """
        if not vector:
            raise RowRefusedError("the vector is empty")
        if not any(vector):
            raise RowRefusedError("all numbers of the vector are zero")
        # Checking the sum is enough: a sum of finite 32-bit numbers cannot overflow in 64 bits.
        if not math.isfinite(sum(vector)):
            raise RowRefusedError("the vector has numbers that are NaN or infinite")
        if self.dimensions is not None and len(vector) != self.dimensions:
            raise RowRefusedError(
                f"the vector has {len(vector)} numbers, but output.dimensions is {self.dimensions}"
            )
        if self.normalize:
            norm = math.hypot(*vector)
            # A vector that is already normalized keeps the exact numbers of the engine.
            if abs(norm - 1) > NORM_TOLERANCE:
                vector = array("f", [number / norm for number in vector])
        if self.dtype == "float32":
            return vector.tobytes()
        try:
            return struct.pack(f"<{len(vector)}e", *vector)
        except (OverflowError, struct.error):
            raise RowRefusedError(
                "the vector has numbers that are too large for output.dtype: float16"
            ) from None


class VectorLength:
    """Learns the length of a model's vectors, and refuses vectors of another length.

    The expected length is the most frequent one so far. It is final once two rows have vectors of this
    length.
    """

    def __init__(self) -> None:
        self._length: int | None = None
        self._rows_by_length: defaultdict[int, set[int]] = defaultdict(set)
        """Rows by the length of their vectors, until the expected length is final."""

    def refuse_other_lengths(
        self, requests: Sequence[Request], results: Sequence[Completion | RequestError]
    ) -> list[Completion | RequestError]:
        """Return the results, with an AttemptFailedError in place of each vector of unexpected length.

        The expected length is the most frequent one so far, including the vectors of this call.
        """
        task = requests[0].task
        # With `output.dimensions`, `EmbedTask.stored` has already checked the length.
        if not isinstance(task, EmbedTask) or task.dimensions is not None:
            return [*results]
        lengths: list[int | None] = []
        for result in results:
            length = None
            if isinstance(result, Completion):
                length = _length_of(result.columns[EMBEDDING][0], task.dtype)
            lengths.append(length)
        self._learn(requests, lengths)
        checked: list[Completion | RequestError] = []
        for result, length in zip(results, lengths, strict=True):
            if length is None or length == self._length:
                checked.append(result)
            else:
                message = f"the vector has {length} numbers, but earlier vectors have {self._length}"
                checked.append(AttemptFailedError(message))
        return checked

    def _learn(self, requests: Sequence[Request], lengths: Sequence[int | None]) -> None:
        """Set the expected length to the most frequent one so far, unless it is final already.

        `lengths` has the length of each request's vector; None for a request without one.
        """
        for request, length in zip(requests, lengths, strict=True):
            if length is not None and not self._is_confirmed:
                self._rows_by_length[length].add(request.ref.row)
        if self._rows_by_length and not self._is_confirmed:
            self._length = max(self._rows_by_length, key=lambda length: len(self._rows_by_length[length]))

    @property
    def _is_confirmed(self) -> bool:
        """Whether the expected length is final, because the vectors of two rows have it."""
        return self._length is not None and len(self._rows_by_length[self._length]) > 1


def _length_of(vector: bytes, dtype: Dtype) -> int:
    """Return the number of dimensions of a vector that is stored as bytes of `dtype`."""
    return len(vector) // NUMBER_BYTES[dtype]


def numbers_of(vector: bytes, dtype: str) -> list[float]:
    """Return the numbers of a vector that is stored as bytes of `dtype`."""
    return [number for (number,) in struct.iter_unpack("<f" if dtype == "float32" else "<e", vector)]


def reply_of(vectors: Sequence[bytes], prompt_tokens: int, model: str, *, as_text: bool) -> bytes:
    """Return the JSON of a reply of `/v1/embeddings`.

    `vectors` are bytes of 32-bit numbers. With `as_text`, the reply has them as Base64, otherwise as lists of
    numbers.
    """
    data = [
        {
            "object": "embedding",
            "index": index,
            "embedding": b64encode(vector).decode() if as_text else numbers_of(vector, "float32"),
        }
        for index, vector in enumerate(vectors)
    ]
    usage = {"prompt_tokens": prompt_tokens, "total_tokens": prompt_tokens}
    return msgspec.json.encode({"object": "list", "data": data, "model": model, "usage": usage})


def check_embeddings(reply: bytes, rows: int | None) -> int | None:
    """Check a reply of `/v1/embeddings`; return its number of prompt tokens, or None if it is missing.

    `rows` is the number of prompts; None if unknown. Raises RequestError if a vector is missing or unusable,
    or if the reply is not one of `/v1/embeddings`.
    """
    parsed = decode_reply(_read_vectors, reply)
    if rows is not None and len(parsed.data) != rows:
        raise AttemptFailedError(f"the server returned {len(parsed.data)} vectors for {rows} inputs")
    task = EmbedTask()
    lengths = {_length_of(task.stored(_numbers(item)), task.dtype) for item in parsed.data}
    if len(lengths) > 1:
        raise AttemptFailedError(
            f"the server returned vectors of different lengths ({min(lengths)} and {max(lengths)})"
        )
    return parsed.usage.prompt_tokens


def _numbers(item: EmbeddingItem) -> array[float]:
    """Return a vector as 32-bit numbers; raise AttemptFailedError if it cannot be decoded.

    If a number exceeds the range of 32-bit floats, the result is infinity alone, which `EmbedTask.stored`
    refuses.
    """
    try:
        vector = decode_reply(_read_vector, bytes(item.embedding))
        if isinstance(vector, str):
            return array("f", b64decode(vector, validate=True))
        # A null stands for NaN, which JSON cannot express.
        return array("f", [math.nan if number is None else number for number in vector])
    except OverflowError:
        return array("f", [math.inf])
    except (RequestError, ValueError):
        raise AttemptFailedError(
            "the vector is neither a list of numbers nor 32-bit floats in Base64"
        ) from None


def _tokens_of(requests: Sequence[Request], total: int | None) -> list[int | None]:
    """Return the number of tokens of each prompt; None if it is unknown.

    The server reports only the `total` of all prompts. For token ids, the lengths are known, unless their sum
    differs from the total: then the server has truncated some of the prompts.
    """
    if len(requests) == 1:
        return [total]
    unknown: list[int | None] = [None] * len(requests)
    if any(request.kind != "input_ids" for request in requests):
        return unknown
    lengths = [len(request.prompt) for request in requests]
    return [*lengths] if sum(lengths) == total else unknown


TaskName: TypeAlias = Literal["generate", "embed", "score", "rerank", "reward", "classify"]
"""Values of the job field `task`."""
GENERATE: TaskName = "generate"
EMBED: TaskName = "embed"
TASKS: dict[str, type[ForwardTask]] = {
    task.name: task for task in (EmbedTask, ScoreTask, RerankTask, RewardTask, ClassifyTask)
}
"""The tasks without decoding, by the value of the job field `task`."""
TASK_OF_ENDPOINT: dict[str, TaskName] = {
    CHAT_PATH: GENERATE,
    COMPLETIONS_PATH: GENERATE,
    RESPONSES_PATH: GENERATE,
    SCORE_PATH: GENERATE,
    EMBEDDINGS_PATH: EMBED,
    CLASSIFY_PATH: "classify",
    RERANK_PATH: "rerank",
}
"""Task that a model must support for each endpoint that a batch file may name.

`/v1/score` needs a generative model.
"""

_CLASSES = 3
"""Number of classes of a classification model in the simulated engine."""


def made_up_columns(task: ForwardTask, request: Request, seed: int, size: int) -> dict[str, list[Any]]:
    """Return invented values of a task's result columns, for a row of the simulated engine.

    Equal seeds give equal values. A vector has `size` numbers, unless the task has `dimensions`.
    """
    random = Random(seed)  # noqa: S311 - no secret
    if isinstance(task, EmbedTask):
        vector = array("f", [2 * random.random() - 1 for _ in range(task.dimensions or size)])
        return {EMBEDDING: [task.stored(vector)]}
    labels = task.labels if isinstance(task, ScoreTask) else ()
    # The task has a score for each choice or document, for each label, or for each class.
    count = len(request.items) or len(labels) or _CLASSES
    numbers = softmax([random.random() for _ in range(count)])
    if isinstance(task, ChoiceTask):
        numbers = [math.log(number) for number in numbers]
    label = f"LABEL_{numbers.index(max(numbers))}"
    columns: dict[str, list[Any]] = {}
    for name, kind in task.columns:
        if kind == "string":
            columns[name] = [label]
        elif kind == "float64":
            columns[name] = [numbers[0]]
        else:
            columns[name] = [numbers]
    return columns
