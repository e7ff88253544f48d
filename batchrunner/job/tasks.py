"""The tasks without decoding: the requests that they send, and how replies become columns.

Scores come from SGLang's native endpoints `/generate` and `/encode`. Each prompt has a result with its own
`meta_info`; several prompts have a list of results, in order. The scheduler handles each prompt as a request,
so prefixes are shared through its cache. `/v1/score` of SGLang 0.5.23 does the same internally (no new token,
`token_ids_logprob`), but its reply lacks the computed and cached tokens of each prompt and the version of the
weights.

Vectors come from `/v1/embeddings`, which takes a text, token ids, or a list of either, as `/encode` does.
`/v1/embeddings` writes a vector as Base64 of its 32-bit numbers, 5.3 bytes a number; `/encode` writes 18 to
22 bytes a number, each by way of a Python float. `/v1/embeddings` reports the prompt tokens of all rows
together. Those of a single row are known only if its prompt is token ids, or if it was sent alone.
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
WITHOUT_TOKENS = {"max_new_tokens": 0}
"""Sampling parameters with which `/generate` ends a prompt after its prefill."""

TokenScore = tuple[float | None, int, Any]
"""Log probability (null if it is NaN), token id, and the token's text if it was requested."""


class NativeMeta(msgspec.Struct):
    """The `meta_info` of a result."""

    finish_reason: FinishReason | Word | None = None
    prompt_tokens: TokenCount | None = None
    cached_tokens: TokenCount | None = None
    weight_version: Any = None
    output_token_ids_logprobs: list[list[TokenScore] | None] | None = None
    input_token_logprobs: list[TokenScore] | None = None


class NativeResult(msgspec.Struct):
    """The result of one prompt."""

    meta_info: NativeMeta
    embedding: list[float | None] | float | None = None


_read_results = msgspec.json.Decoder(NativeResult | list[NativeResult])
_KINDS: dict[str, ColumnKind] = {SCORE: "float64", LABEL: "string"}
"""Types of the columns that are not a list of numbers."""


Score: TypeAlias = float | None
"""A score: None if the model returned NaN; minus infinity is the logarithm of zero."""


def _scores(numbers: Sequence[float | None], what: str) -> list[Score]:
    """Return the scores of a row; raises AttemptFailedError if all of them are NaN."""
    if all(number is None for number in numbers):
        raise AttemptFailedError(f"{what} is not a number")
    return [-math.inf if number == LOWEST else number for number in numbers]


def _probabilities(numbers: Sequence[Score], what: str) -> list[float]:
    """Return the softmax of the scores of a row; raises AttemptFailedError if one of them is NaN."""
    scores = [number for number in numbers if number is not None]
    if len(scores) < len(numbers) or max(scores) == -math.inf:
        raise AttemptFailedError(f"output.softmax: {what} is not a number")
    return softmax(scores)


def _total(counts: Sequence[int | None]) -> int | None:
    numbers = [count for count in counts if count is not None]
    return min(sum(numbers), MOST_TOKENS) if len(numbers) == len(counts) else None


def _with_adapters(requests: Sequence[Request], body: dict[str, Any]) -> dict[str, Any]:
    """Return a body with the LoRA adapters of its prompts; `requests` has the request of each prompt."""
    adapters = [request.lora_path for request in requests]
    return {**body, "lora_path": adapters} if any(adapters) else body


def softmax(numbers: Sequence[float]) -> list[float]:
    """Return probabilities, whose sum is 1, for logits or log probabilities."""
    most = max(numbers)
    weights = [math.exp(number - most) for number in numbers]
    total = sum(weights)
    return [weight / total for weight in weights]


@dataclass(frozen=True, slots=True)
class NativeTask(ForwardTask):
    """A task whose model has a head that makes numbers of each prompt."""

    path: ClassVar[str] = "/encode"
    architectures: ClassVar[str] = "SequenceClassification|Reward|Classification"

    @property
    def columns(self) -> tuple[tuple[str, ColumnKind], ...]:
        """The columns of `meanings`: lists of numbers, numbers, or names of classes."""
        return tuple((name, _KINDS.get(name, ("list", "float64"))) for name in self.meanings)

    def bodies(self, requests: Sequence[Request]) -> list[dict[str, Any]]:
        """Return one body: a list of prompts."""
        name = "input_ids" if requests[0].kind == "input_ids" else "text"
        return [_with_adapters(requests, {name: [request.prompt for request in requests]})]

    def answers(
        self, requests: Sequence[Request], replies: Sequence[bytes]
    ) -> list[Completion | RequestError]:
        """Return the numbers of each row, or the error of a row without usable numbers."""
        parsed = [decode_reply(_read_results, reply) for reply in replies]
        results: list[NativeResult] = []
        for one_or_more in parsed:
            results += one_or_more if isinstance(one_or_more, list) else [one_or_more]
        counts = [max(1, len(request.items)) for request in requests]
        if len(results) != sum(counts):
            raise AttemptFailedError(f"the server returned {len(results)} results for {sum(counts)} prompts")
        return [
            self._answer(request, row_results)
            for request, row_results in zip(requests, self._by_row(results, counts), strict=True)
        ]

    def _by_row(self, results: Sequence[NativeResult], counts: Sequence[int]) -> list[list[NativeResult]]:
        """Divide the results by row; `counts` has the number of prompts of each row."""
        remaining = iter(results)
        return [list(islice(remaining, count)) for count in counts]

    def _answer(self, request: Request, results: Sequence[NativeResult]) -> Completion | RequestError:
        """Return the answer of a row, with the tokens of all its prompts."""
        try:
            for result in results:
                raise_abort(result.meta_info.finish_reason)
            columns = self._columns_of(request, results)
        except RequestError as failure:
            return failure
        metas = [result.meta_info for result in results]
        version = metas[0].weight_version
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
        """Return the columns of a row from the results of its prompts; raises RequestError."""
        numbers = []
        for result in results:
            embedding = result.embedding
            numbers.append(embedding if isinstance(embedding, list) else [embedding])
        return self._values(numbers)

    def _values(self, numbers_by_prompt: Sequence[list[float | None]]) -> dict[str, Any]:
        """Return the columns of a row from the numbers of each of its prompts; raises RequestError."""
        numbers = [self._only_number(numbers_of_prompt) for numbers_of_prompt in numbers_by_prompt]
        return {SCORES: _scores(numbers, A_SCORE)}

    def _only_number(self, numbers: Sequence[float | None]) -> float | None:
        """Return the only number of a prompt; raises RowRefusedError if the model returned several."""
        if len(numbers) != 1:
            raise RowRefusedError(
                f"the model returned {len(numbers)} numbers, but task: {self.name} needs exactly one"
            )
        return numbers[0]


@dataclass(frozen=True, slots=True)
class ScoreTask(NativeTask):
    """Probability of each label as the next token after a prompt, by `/generate`."""

    labels: tuple[str | int, ...] = ()
    softmax: bool = False
    """Whether probabilities are normalized over the labels."""
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
        """Return one body: a list of prompts, with the same token ids for each."""
        (prompts,) = NativeTask.bodies(self, requests)
        logprob_request = {
            "sampling_params": WITHOUT_TOKENS,
            "return_logprob": True,
            "logprob_start_len": -1,
            "token_ids_logprob": [list(self.label_ids) for _ in requests],
        }
        return [{**prompts, **logprob_request}]

    def _columns_of(self, request: Request, results: Sequence[NativeResult]) -> dict[str, Any]:  # noqa: ARG002
        scores_by_position = results[0].meta_info.output_token_ids_logprobs
        next_token_scores = scores_by_position[0] if scores_by_position else None
        logprob_of = {token_id: logprob for logprob, token_id, _ in next_token_scores or ()}
        if not logprob_of.keys() >= {*self.label_ids}:
            raise AttemptFailedError("the answer lacks the probability of a label")
        what = "the probability of a label"
        logprobs = _scores([logprob_of[token_id] for token_id in self.label_ids], what)
        if self.softmax:
            return {SCORES: _probabilities(logprobs, what)}
        return {SCORES: [None if logprob is None else math.exp(logprob) for logprob in logprobs]}


@dataclass(frozen=True, slots=True)
class ChoiceTask(ScoreTask):
    """Likelihood of each choice as the continuation of a prompt."""

    meanings = {
        SCORES: "Logarithm of each choice's probability, the sum over its tokens.",
        PER_TOKEN: "`scores`, each divided by the number of tokens of the choice.",
        PER_BYTE: "`scores`, each divided by the number of bytes of the choice in UTF-8.",
    }

    def bodies(self, requests: Sequence[Request]) -> list[dict[str, Any]]:
        """Return a body with the first choice of each row, and one with the other choices, if any.

        The other choices find their prompt in the cache. In a single body each would compute it.
        """
        first_choices = [(request, request.item_ids[0]) for request in requests]
        other_choices = [(request, ids) for request in requests for ids in request.item_ids[1:]]
        bodies = [_body_of(first_choices)]
        if other_choices:
            bodies.append(_body_of(other_choices))
        return bodies

    def _by_row(self, results: Sequence[NativeResult], counts: Sequence[int]) -> list[list[NativeResult]]:
        """Divide the results by row, in the order of `bodies`: all first choices, then the other ones."""
        rows = len(counts)
        other_choices = iter(results[rows:])
        by_row = []
        for first_choice, count in zip(results[:rows], counts, strict=True):
            by_row.append([first_choice, *islice(other_choices, count - 1)])
        return by_row

    def _columns_of(self, request: Request, results: Sequence[NativeResult]) -> dict[str, Any]:
        totals = [_log_likelihood(ids, result) for ids, result in zip(request.item_ids, results, strict=True)]
        sums = _scores(totals, "the log likelihood of a choice")
        tokens = [len(ids) for ids in request.item_ids]
        sizes = [len(item.encode("utf-8", "surrogatepass")) for item in request.items]
        return {
            SCORES: sums,
            PER_TOKEN: _divided(sums, tokens),
            PER_BYTE: _divided(sums, sizes),
        }


def _log_likelihood(choice_ids: list[int], result: NativeResult) -> float | None:
    """Return the sum of the log probabilities of a choice's tokens; None if one of them is NaN."""
    prompt_scores = result.meta_info.input_token_logprobs or []
    choice_scores = prompt_scores[-len(choice_ids) :]
    if [token_id for _, token_id, _ in choice_scores] != choice_ids:
        raise AttemptFailedError("the answer lacks log probabilities of a choice's tokens")
    logprobs = [logprob for logprob, _, _ in choice_scores if logprob is not None]
    if len(logprobs) < len(choice_ids):
        return None
    return LOWEST if LOWEST in logprobs else math.fsum(logprobs)


def _divided(sums: Sequence[Score], counts: Sequence[int]) -> list[Score]:
    return [None if total is None else total / count for total, count in zip(sums, counts, strict=True)]


def _body_of(pairs: Sequence[tuple[Request, list[int]]]) -> dict[str, Any]:
    """Return a body with these choices of requests."""
    body = {
        "input_ids": [[*request.prompt, *ids] for request, ids in pairs],
        "sampling_params": WITHOUT_TOKENS,
        "return_logprob": True,
        # the log probability of a token is computed at the token before it
        "logprob_start_len": [len(request.prompt) - 1 for request, _ in pairs],
    }
    return _with_adapters([request for request, _ in pairs], body)


@dataclass(frozen=True, slots=True)
class RerankTask(NativeTask):
    """Relevance of each document to a query, by a cross-encoder."""

    name = "rerank"
    takes = ("prompt.documents",)
    architectures = "ForSequenceClassification"
    meanings = {
        SCORES: "Relevance of each document, in their order, as the model's head gives it.",
    }

    def bodies(self, requests: Sequence[Request]) -> list[dict[str, Any]]:
        """Return one body: a pair of query and document for each document."""
        pairs = [(request, document) for request in requests for document in request.items]
        texts = [[request.prompt, document] for request, document in pairs]
        body = {"text": texts, "is_cross_encoder_request": True}
        return [_with_adapters([request for request, _ in pairs], body)]


@dataclass(frozen=True, slots=True)
class RewardTask(NativeTask):
    """Reward of a text, by a reward model."""

    name = "reward"
    meanings = {
        SCORE: "Reward, as the model's head gives it.",
    }

    def _values(self, numbers_by_prompt: Sequence[list[float | None]]) -> dict[str, Any]:
        (score,) = _scores([self._only_number(numbers_by_prompt[0])], A_SCORE)
        return {SCORE: score}


@dataclass(frozen=True, slots=True)
class ClassifyTask(NativeTask):
    """Classes of a text, by a classification model."""

    softmax: bool = False
    """Whether the scores are probabilities."""
    names: tuple[str, ...] = ()
    """Names of the classes. Without them classes are called as in transformers, such as LABEL_0."""

    name = "classify"
    takes = ("output.softmax",)
    meanings = {
        SCORES: "Score of each class, in the order of `id2label`; with `output.softmax` its probability.",
        LABEL: "Name of the class with the highest score, by `id2label`.",
    }

    def _values(self, numbers_by_prompt: Sequence[list[float | None]]) -> dict[str, Any]:
        scores = _scores(numbers_by_prompt[0], A_SCORE)
        best = scores.index(max(score for score in scores if score is not None))
        label = self.names[best] if best < len(self.names) else f"LABEL_{best}"
        if self.softmax:
            return {SCORES: _probabilities(scores, A_SCORE), LABEL: label}
        return {SCORES: scores, LABEL: label}


CPU_ROWS = 256
"""Maximum number of rows in a forward pass on a CPU."""
_ENCODER = re.compile("bert", re.IGNORECASE)
"""Pattern in the names of encoders: BERT, RoBERTa, ModernBERT, …"""
_DECODER = re.compile("ForCausalLM|Classification|Reward")
"""Matches the class names of decoder models, with a head that generates text or one that scores."""


def pooling_args(config: Mapping[str, Any], *, cpu: bool) -> dict[str, Any]:
    """Return server arguments for a model with this config.json.

    An encoder, whose tokens attend to later ones, must compute prompts whole and uncached: in chunks its
    numbers are wrong. A model that is not known to be a decoder counts as an encoder; a mistake only makes it
    slower.
    """
    args: dict[str, Any] = {"is-embedding": True}
    names = " ".join(map(str, config.get("architectures") or ()))
    if _ENCODER.search(names) is not None or _DECODER.search(names) is None:
        args |= {"disable-radix-cache": True, "chunked-prefill-size": -1}
    if cpu:  # SGLang's own default leaves no memory for the cache; and these models have short contexts
        args |= {"mem-fraction-static": 0.3, "context-length": None, "max-running-requests": CPU_ROWS}
    return args


EMBEDDING = "embedding"
MODEL = "default"
"""Name under which SGLang serves any model."""
Dtype: TypeAlias = Literal["float32", "float16"]
"""Type of the numbers of a vector."""
NUMBER_BYTES: dict[Dtype, int] = {"float32": 4, "float16": 2}
UNIT = 1e-6
"""Precision of 32-bit numbers: a vector whose length differs from 1 by less is not normalized."""


class EmbeddingItem(msgspec.Struct):
    """A vector of a reply: Base64 of little-endian 32-bit numbers, or a list of numbers."""

    embedding: msgspec.Raw
    """Each vector is decoded on its own, so that one bad vector does not spoil the others."""
    index: TokenCount | None = None


class EmbeddingUsage(msgspec.Struct):
    """Tokens of all rows together."""

    prompt_tokens: TokenCount | None = None


class EmbeddingReply(msgspec.Struct):
    """A reply of `/v1/embeddings`."""

    data: Annotated[list[EmbeddingItem], msgspec.Meta(min_length=1)]
    usage: EmbeddingUsage = msgspec.field(default_factory=EmbeddingUsage)


_read_vectors = msgspec.json.Decoder(EmbeddingReply)
_read_vector = msgspec.json.Decoder(str | list[float | None])


@dataclass(frozen=True, slots=True)
class EmbedTask(ForwardTask):
    """Vector of each prompt."""

    dtype: Dtype = "float32"
    normalize: bool = False
    """Whether each vector is divided by its length."""
    dimensions: int | None = None
    """Length of the vectors of a model that supports several lengths; None for its default."""

    name = "embed"
    path = "/v1/embeddings"
    takes = ("output.dtype", "output.normalize", "output.dimensions")
    meanings = {
        EMBEDDING: "Vector of the prompt.",
    }

    @property
    def columns(self) -> tuple[tuple[str, ColumnKind], ...]:
        """The only column, which has the vector."""
        return ((EMBEDDING, ("list", self.dtype)),)

    def bodies(self, requests: Sequence[Request]) -> list[dict[str, Any]]:
        """Return one body: a single prompt, or a list of them."""
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
        """Return the vectors as bytes of `dtype`, or the error of a row without a usable vector."""
        parsed = decode_reply(_read_vectors, replies[0])
        items = sorted(parsed.data, key=lambda item: item.index or 0)
        if [item.index or 0 for item in items] != list(range(len(requests))):
            raise AttemptFailedError(
                f"the server returned {len(items)} vectors for {len(requests)} rows, "
                "or did not number them from 0"
            )
        tokens = _tokens_of(requests, parsed.usage.prompt_tokens)
        return [self._answer(item, count) for item, count in zip(items, tokens, strict=True)]

    def _answer(self, item: EmbeddingItem, prompt_tokens: int | None) -> Completion | RequestError:
        try:
            vector = self.stored(_numbers(item))
        except RequestError as failure:
            return failure
        return Completion(
            texts=[],
            finish_reasons=[],
            completion_tokens=[],
            prompt_tokens=prompt_tokens,
            cached_tokens=None,
            columns={EMBEDDING: [vector]},
        )

    def stored(self, vector: array[float]) -> bytes:
        """Return a vector as bytes of `dtype`; raises RowRefusedError for an unusable vector."""
        if not vector:
            raise RowRefusedError("the vector is empty")
        if not any(vector):
            raise RowRefusedError("the vector is zero")
        if not math.isfinite(sum(vector)):  # a sum of 32-bit numbers does not overflow in 64 bits
            raise RowRefusedError("the vector has numbers that are NaN or infinite")
        if self.dimensions is not None and len(vector) != self.dimensions:
            raise RowRefusedError(
                f"the vector has {len(vector)} numbers, but output.dimensions is {self.dimensions}"
            )
        if self.normalize:
            norm = math.hypot(*vector)
            if abs(norm - 1) > UNIT:
                vector = array("f", [number / norm for number in vector])
        if self.dtype == "float32":
            return vector.tobytes()
        try:
            return struct.pack(f"<{len(vector)}e", *vector)
        except (OverflowError, struct.error):
            raise RowRefusedError("output.dtype: the vector has numbers too large for float16") from None


class VectorLength:
    """Length of a model's vectors, taken from the first row until two rows agree on a length."""

    def __init__(self) -> None:
        """Begin without a known length."""
        self._numbers: int | None = None
        self._rows: defaultdict[int, set[int]] = defaultdict(set)
        """Rows by the lengths of their vectors, until two have the same."""

    def refuse_other_lengths(
        self, requests: Sequence[Request], results: Sequence[Completion | RequestError]
    ) -> list[Completion | RequestError]:
        """Return the results, with an AttemptFailedError in place of each vector of another length."""
        task = requests[0].task
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
            if length in {None, self._numbers}:
                checked.append(result)
            else:
                message = f"the vector has {length} numbers, but earlier vectors have {self._numbers}"
                checked.append(AttemptFailedError(message))
        return checked

    def _learn(self, requests: Sequence[Request], lengths: Sequence[int | None]) -> None:
        """Take the most frequent length so far for the model's, unless two rows have agreed on one."""
        for request, length in zip(requests, lengths, strict=True):
            if length is not None and not self._is_sure:
                self._rows[length].add(request.ref.row)
        if self._rows and not self._is_sure:
            self._numbers = max(self._rows, key=lambda length: len(self._rows[length]))

    @property
    def _is_sure(self) -> bool:
        return self._numbers is not None and len(self._rows[self._numbers]) > 1


def _length_of(vector: bytes, dtype: Dtype) -> int:
    """Return the number of numbers in a vector that is stored as bytes of `dtype`."""
    return len(vector) // NUMBER_BYTES[dtype]


def numbers_of(vector: bytes, dtype: str) -> list[float]:
    """Return the numbers of a vector that is stored as bytes of `dtype`."""
    return [number for (number,) in struct.iter_unpack("<f" if dtype == "float32" else "<e", vector)]


def reply_of(vectors: Sequence[bytes], prompt_tokens: int, model: str, *, as_text: bool) -> bytes:
    """Return a reply of `/v1/embeddings` with vectors of 32-bit numbers, in Base64 or as numbers."""
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
    """Check a reply of `/v1/embeddings` to `rows` prompts (None: unknown); return their tokens, if reported.

    Raises RequestError for missing or unusable vectors, and for another kind of reply.
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
    """Return the numbers of a vector; raises RequestError if it has none."""
    try:
        vector = decode_reply(_read_vector, bytes(item.embedding))
        if isinstance(vector, str):
            return array("f", b64decode(vector, validate=True))
        return array("f", [math.nan if number is None else number for number in vector])
    except OverflowError:
        return array("f", [math.inf])
    except (RequestError, ValueError):
        raise AttemptFailedError(
            "the vector is neither a list of numbers nor 32-bit floats in Base64"
        ) from None


def _tokens_of(requests: Sequence[Request], total: int | None) -> list[int | None]:
    """Return the number of tokens of each prompt; None where it is unknown.

    The server reports only the `total`. If it differs from the lengths of the prompts, the server has
    truncated some of them.
    """
    if len(requests) == 1:
        return [total]
    unknown: list[int | None] = [None] * len(requests)
    if any(request.kind != "input_ids" for request in requests):
        return unknown
    lengths = [len(request.prompt) for request in requests]
    return [*lengths] if sum(lengths) == total else unknown


TaskName: TypeAlias = Literal["generate", "embed", "score", "rerank", "reward", "classify"]
"""`task` of a job."""
GENERATE: TaskName = "generate"
EMBED: TaskName = "embed"
TASKS: dict[str, type[ForwardTask]] = {
    kind.name: kind for kind in (EmbedTask, ScoreTask, RerankTask, RewardTask, ClassifyTask)
}
"""The tasks without decoding."""
TASK_OF_ENDPOINT: dict[str, TaskName] = {
    CHAT_PATH: GENERATE,
    COMPLETIONS_PATH: GENERATE,
    RESPONSES_PATH: GENERATE,
    SCORE_PATH: GENERATE,
    EMBEDDINGS_PATH: EMBED,
    CLASSIFY_PATH: "classify",
    RERANK_PATH: "rerank",
}
"""Endpoints that the lines of a batch file may name, with the task of the model that answers there. A
generating model makes the scores of `/v1/score`."""

_CLASSES = 3
"""Number of classes of the simulated engine's model."""


def made_up_columns(task: ForwardTask, request: Request, seed: int, size: int) -> dict[str, list[Any]]:
    """Return invented values of a task's columns for the simulated engine; equal seeds give equal values.

    Vectors have `size` numbers, unless the task has `dimensions`.
    """
    random = Random(seed)  # noqa: S311 - no secret
    if isinstance(task, EmbedTask):
        vector = array("f", [2 * random.random() - 1 for _ in range(task.dimensions or size)])
        return {EMBEDDING: [task.stored(vector)]}
    labels = task.labels if isinstance(task, ScoreTask) else ()
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
