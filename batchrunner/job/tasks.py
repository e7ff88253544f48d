"""The tasks without decoding, by their names, and the task `embed`: a vector by `/v1/embeddings`.

That endpoint and `/encode` of SGLang 0.5.23 both take a text, token ids, or a list of either. This one
writes a vector as Base64 of its 32-bit numbers, 5.3 bytes a number; `/encode` writes 18 to 22 bytes a number,
each by way of a Python float. It tells the prompt tokens of all rows together: those of a row are known where
its prompt is token ids, or where it is alone.
"""

from __future__ import annotations

import binascii
import math
import struct
from array import array
from base64 import b64decode, b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Annotated, Any, Literal, TypeAlias

import msgspec

from batchrunner.core.errors import AttemptFailedError, RequestError, RowRefusedError
from batchrunner.core.types import ColumnKind, Completion, ForwardTask, Request
from batchrunner.job.scores import (
    ChoiceTask,
    ClassifyTask,
    RerankTask,
    RewardTask,
    ScoreTask,
    TokenCount,
    softmax,
)

EMBEDDING = "embedding"
MODEL = "default"
"""Name by which SGLang serves its model, whatever that is called."""
Dtype: TypeAlias = Literal["float32", "float16"]
"""Type of the numbers of a vector."""
UNIT = 1e-6
"""A vector whose length differs from 1 by less is left as it is: that is the precision of 32-bit numbers."""


class EmbeddingItem(msgspec.Struct):
    """A vector of a reply: Base64 of little-endian 32-bit numbers, or a list of numbers."""

    embedding: str | list[float | None]
    index: TokenCount | None = None


class EmbeddingUsage(msgspec.Struct):
    """The tokens of all rows."""

    prompt_tokens: TokenCount | None = None


class EmbeddingReply(msgspec.Struct):
    """A reply of `/v1/embeddings`."""

    data: Annotated[list[EmbeddingItem], msgspec.Meta(min_length=1)]
    usage: EmbeddingUsage = msgspec.field(default_factory=EmbeddingUsage)


_read = msgspec.json.Decoder(EmbeddingReply)


@dataclass(frozen=True, slots=True)
class EmbedTask(ForwardTask):
    """Makes a vector of each prompt."""

    dtype: Dtype = "float32"
    normalize: bool = False
    """Whether each vector is divided by its length."""
    dimensions: int | None = None
    """Length of the vectors, for a model that makes them of several lengths; None for its own."""

    name = "embed"
    path = "/v1/embeddings"
    takes = ("output.dtype", "output.normalize", "output.dimensions")
    meanings = {
        EMBEDDING: "The vector of the prompt; null if the row failed.",
    }

    @property
    def columns(self) -> tuple[tuple[str, ColumnKind], ...]:
        """The vector."""
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
        """Return the vectors as bytes of `dtype`; a row whose vector has no use has an error."""
        found: EmbeddingReply = _read.decode(replies[0])
        items = sorted(found.data, key=lambda item: item.index or 0)
        if [item.index or 0 for item in items] != list(range(len(requests))):
            raise AttemptFailedError(
                f"{len(items)} vectors came for {len(requests)} rows, or they are not numbered from 0 on"
            )
        tokens = _tokens_of(requests, found.usage.prompt_tokens)
        return [self._answer(item, count) for item, count in zip(items, tokens, strict=True)]

    def _answer(self, item: EmbeddingItem, prompt_tokens: int | None) -> Completion | RequestError:
        try:
            vector = self.stored(_numbers(item))
        except RequestError as failure:
            return failure
        return Completion([], [], [], prompt_tokens, None, columns={EMBEDDING: [vector]})

    def stored(self, vector: array[float]) -> bytes:
        """Return a vector as the results have it; raises RowRefusedError for one without use."""
        if not vector:
            raise RowRefusedError("the vector is empty")
        if not math.isfinite(sum(vector)):  # a sum of 32-bit numbers does not overflow in 64 bits
            raise RowRefusedError("the vector has numbers that are NaN or infinite")
        if self.dimensions is not None and len(vector) != self.dimensions:
            raise RowRefusedError(
                f"the vector has {len(vector)} numbers, and output.dimensions is {self.dimensions}"
            )
        if self.normalize:
            norm = math.hypot(*vector)
            if not norm:
                raise RowRefusedError("output.normalize: the vector is zero")
            if abs(norm - 1) > UNIT:
                vector = array("f", [number / norm for number in vector])
        if self.dtype == "float32":
            return vector.tobytes()
        try:
            return struct.pack(f"<{len(vector)}e", *vector)
        except (OverflowError, struct.error):
            raise RowRefusedError("output.dtype: the vector has numbers too large for float16") from None


def numbers_of(vector: bytes, dtype: str) -> list[float]:
    """Return the numbers of a vector that stands as the results have it."""
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
    """Check a reply of `/v1/embeddings` to so many prompts (None: not known); return their tokens, if told.

    Raises RequestError where vectors are missing or have no use, or what msgspec raises where it is no reply.
    """
    found: EmbeddingReply = _read.decode(reply)
    if rows is not None and len(found.data) != rows:
        raise AttemptFailedError(f"{len(found.data)} vectors came for {rows} inputs")
    task = EmbedTask()
    for item in found.data:
        task.stored(_numbers(item))
    return found.usage.prompt_tokens


def _numbers(item: EmbeddingItem) -> array[float]:
    """Return the numbers of a vector; raises RequestError where they are none."""
    found = item.embedding
    try:
        if isinstance(found, str):
            return array("f", b64decode(found, validate=True))
        return array("f", [math.nan if number is None else number for number in found])
    except OverflowError:
        return array("f", [math.inf])
    except (binascii.Error, ValueError):
        raise AttemptFailedError("the vector is no Base64 of 32-bit numbers") from None


def _tokens_of(requests: Sequence[Request], total: int | None) -> list[int | None]:
    """Return the tokens of each prompt; a server that cut some of them tells only the `total`."""
    if len(requests) == 1:
        return [total]
    counts = [len(request.prompt) if request.kind == "input_ids" else None for request in requests]
    return [*counts] if None not in counts and sum(filter(None, counts)) == total else [None] * len(requests)


TaskName: TypeAlias = Literal["generate", "embed", "score", "rerank", "reward", "classify"]
"""`task` of a job."""
GENERATE: TaskName = "generate"
EMBED: TaskName = "embed"
TASKS: dict[str, type[ForwardTask]] = {
    kind.name: kind for kind in (EmbedTask, ScoreTask, RerankTask, RewardTask, ClassifyTask)
}
"""The tasks without decoding."""
PASSED_ON = {GENERATE, EMBED}
"""Tasks whose rows go through a gateway; it lacks the endpoints of the others, which go to the servers."""


_CLASSES = 3
"""Classes of the model of the simulated engine."""


def made_up_columns(task: ForwardTask, request: Request, seed: int, size: int) -> dict[str, list[Any]]:
    """Return invented values of a task's columns, the same for the same seed, for the simulated engine.

    Vectors have `size` numbers, unless the task says how many.
    """
    random = Random(seed)  # noqa: S311 - no secret
    if isinstance(task, EmbedTask):
        vector = array("f", [2 * random.random() - 1 for _ in range(task.dimensions or size)])
        return {EMBEDDING: [task.stored(vector)]}
    labels = task.labels if isinstance(task, ScoreTask) else ()
    count = len(request.items) or len(labels) or _CLASSES
    is_whole = isinstance(task, (ScoreTask, ClassifyTask)) and task.softmax
    rest = 0 if is_whole else 1  # of labels that nobody asks for
    shares = softmax([random.random() for _ in range(count + rest)])[:count]
    numbers = [math.log(share) for share in shares] if isinstance(task, ChoiceTask) else shares
    values = {"float64": numbers[0], "string": f"LABEL_{numbers.index(max(numbers))}"}
    return {name: [values.get(str(kind), numbers)] for name, kind in task.columns}
