"""Immutable records of rows that pass between the folders of the package, such as Request and Outcome.

Records of which every row has one are named tuples: a frozen dataclass takes four times as long to create.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, TypeAlias

from pyroaring import BitMap64

from batchrunner.core.errors import RequestError
from batchrunner.core.media import PromptFile, with_labels

if TYPE_CHECKING:
    import pyarrow as pa
import base64
from array import array

PromptKind = Literal["messages", "text", "input_ids", "body"]
"""Form of a prompt, named as the key of the job's `prompt`; `body` is a whole request of a batch file."""
BYTES_PER_TOKEN = 4
"""Bytes of text per token, on average: what a prompt is estimated by until its tokens are known."""
LEFT_OUT = "left_out"
"""The finish reason of a row that `prompt.python` left out; no engine has it."""
FinishReason = str
"""SGLang's finish reason: "stop", "length" or "abort"."""
ColumnKind: TypeAlias = str | tuple[str, Any]
"""Type of a column: the name of a plain type, ("list", kind), or ("struct", ((name, kind), …))."""
NO_COLUMNS: Mapping[str, list[Any]] = MappingProxyType({})


class RowRef(NamedTuple):
    """A row's origin: its ordinal in the input, and its carried columns."""

    row: int
    """Ordinal in the input, counted from 0 over all files."""
    carried: pa.RecordBatch
    """Batch with the columns that are copied to the output."""
    position: int
    """Index of the row in `carried`."""
    digests: list[bytes | None] | None = None
    """Digests of the requests of the rows in `carried`, as they become known; None where nobody asks."""


class RequestBody(NamedTuple):
    """The body of a whole request, as a batch file has it."""

    path: str
    """Endpoint that it is for, such as /v1/chat/completions."""
    content: bytes
    """A JSON object without `model`, `stream` and `stream_options`."""
    model: str | None
    """Name of the model that the request asks for."""
    most_tokens: int
    """Most tokens of an output; where the request has no limit, those that are expected."""


class AskedColumns(NamedTuple):
    """Columns of the results that an answer is asked for, beyond those of every result."""

    names: frozenset[str]
    """Keys of ANSWER_COLUMNS in `job.output`."""
    top_logprobs: int
    """Likeliest tokens for each position."""
    of_tokens: bool
    """Whether the answer must have token ids or probabilities."""
    only_reasoning: bool = False
    """Whether reasoning is all, as in most chats."""


class Tools(NamedTuple):
    """Tools that the model may call in a chat."""

    tools: list[Any] | None
    """In OpenAI's form: `{"type": "function", "function": {"name": …}}`; None where messages have them."""
    choice: Any = None
    """`tool_choice` of the chat endpoint; None for its default."""
    by_row: bool = False
    """Whether other rows may have other tools."""


class Request(NamedTuple):
    """One rendered row."""

    ref: RowRef
    kind: PromptKind
    prompt: Any
    """By `kind`: a list of `{"role", "content"}`, a text, a list of token ids, or a RequestBody."""
    sampling: dict[str, Any]
    """Sampling parameters, named as for SGLang's `/generate`."""
    lora_path: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    continues: bool = False
    """Whether a last message of the assistant is the beginning of the answer, which goes on from there."""
    asks: AskedColumns | None = None
    """What the answer is asked for besides its text; None for nothing."""
    row: Mapping[str, Any] | None = None
    """Values of the row by which its answer is checked; None where there are none."""
    task: ForwardTask | None = None
    """What the model is asked to do with the prompt; None for generating text."""
    tools: Tools | None = None
    """Tools of a chat; None where it has none."""
    media: tuple[PromptFile, ...] = ()
    """Images, audio and videos of the prompt: a part such as `{"type": "image", "image": n}` of a content
    stands for number n."""
    items: tuple[str, ...] = ()
    """Texts that the task is done with, each together with the prompt: choices or documents."""
    item_ids: tuple[list[int], ...] = ()
    """Token ids of the choices, each as it goes on after the prompt; empty where there are none."""

    @property
    def shown(self) -> Any:
        """The prompt as a person reads it: parts for files say where these come from."""
        if not self.media or not isinstance(self.prompt, list):
            return self.prompt
        return [with_labels(message, self.media) for message in self.prompt]

    @property
    def media_bytes(self) -> int:
        """Bytes that its files take in memory."""
        return sum(file.size for file in self.media) if self.media else 0


class Completion(NamedTuple):
    """The engine's answer to one request; the lists have one entry for each sample (`sampling.n`)."""

    texts: list[str]
    finish_reasons: list[FinishReason | None]
    completion_tokens: list[int | None]
    prompt_tokens: int | None
    cached_tokens: int | None
    retractions: int = 0
    """Times that the scheduler preempted the request because the KV pool was full."""
    weights: str | None = None
    """Version of the weights that made the answer (`weight_version`); None where the engine does not tell."""
    columns: Mapping[str, list[Any]] = NO_COLUMNS
    """Values of further columns by name: one for each sample, or one for all where they are of the prompt."""

    @property
    def output_tokens(self) -> int:
        """Output tokens of all samples; those that the engine did not tell count as 0."""
        tokens = self.completion_tokens
        return (tokens[0] or 0) if len(tokens) == 1 else sum(filter(None, tokens))


class Outcome(NamedTuple):
    """The final result of a row: a completion or an error, or both where the answer is why the row failed."""

    ref: RowRef
    completion: Completion | None
    error: str | None
    latency_s: float | None
    """Seconds from sending the last try to its whole answer; None where nothing was sent."""
    attempts: int
    """Tries that were sent; 0 for a row that was refused here or has the answer of an equal row."""

    @classmethod
    def unsent(cls, ref: RowRef, error: str | None) -> Outcome:
        """Return the outcome of a row that was not sent; `error` is None if `prompt.python` left it out."""
        return cls(ref, completion=None, error=error, latency_s=None, attempts=0)

    @property
    def is_left_out(self) -> bool:
        """Whether `prompt.python` left the row out: it has neither an answer nor an error."""
        return self.completion is None and self.error is None


@dataclass(frozen=True, slots=True)
class ForwardTask(ABC):
    """A task that a model does in one forward pass, without decoding, such as an embedding. Pure.

    A subclass says all that differs from other tasks; they are in `batchrunner.job.tasks`. Its
    instance has the values of the job's fields that it takes, and goes along with each request.
    """

    name: ClassVar[str]
    """`task` of a job."""
    path: ClassVar[str]
    """Endpoint of SGLang that takes one row, or a list of rows."""
    architectures: ClassVar[str] = ""
    """Pattern in the names of the architectures that can do it; empty for all."""
    by_generation: ClassVar[bool] = False
    """Whether it needs a model that generates text (a server without `--is-embedding`)."""
    takes: ClassVar[tuple[str, ...]] = ()
    """Fields of a job that this task has and generating lacks: the arguments of the subclass, by their last
    part."""
    meanings: ClassVar[Mapping[str, str]]
    """Its columns of the results, with their meanings."""

    @property
    @abstractmethod
    def columns(self) -> tuple[tuple[str, ColumnKind], ...]:
        """Its columns of the results, with their types, in order."""

    @abstractmethod
    def bodies(self, requests: Sequence[Request]) -> list[dict[str, Any]]:
        """Return the bodies for `path`, each of which is sent when the one before is answered.

        Several requests are all of texts, or all of token ids.
        """

    @abstractmethod
    def answers(
        self, requests: Sequence[Request], replies: Sequence[bytes]
    ) -> list[Completion | RequestError]:
        """Read the replies to `bodies`; return the answer to each request, or why that one has none.

        The values of `columns` stand under their names in `Completion.columns`, each in a list of one. Raises
        AttemptFailedError, or what msgspec raises, where a reply is not one.
        """


@dataclass(frozen=True, slots=True)
class Lease:
    """Rows that one task is to do."""

    number: int
    turn: int
    """Number of tasks that held the lease before."""
    rows: BitMap64
    """Ordinals of the rows."""
    positions: range | None
    """Where the rows stand in the order of sending; None for somewhere in the input."""
    copy: Path | None = None
    """The sorted copy that has the rows in the order of sending; None for the input itself."""


CHAT_PATH, COMPLETIONS_PATH = "/v1/chat/completions", "/v1/completions"
EMBEDDINGS_PATH = "/v1/embeddings"
BATCH_PATHS = (CHAT_PATH, COMPLETIONS_PATH, EMBEDDINGS_PATH)
"""Endpoints that the lines of a batch file may be for."""


def rows_to_text(rows: BitMap64) -> str:
    """Return rows as base-85 text for a JSON file: a few bytes per consecutive range, 2.5 per single row."""
    rows = rows.copy()
    rows.run_optimize()
    return base64.b85encode(rows.serialize()).decode()


def rows_from_text(text: str) -> BitMap64:
    """Return the rows that `rows_to_text` encoded."""
    return BitMap64.deserialize(base64.b85decode(text))


def rows_of_column(rows: pa.ChunkedArray) -> BitMap64:
    """Return the rows in a column of whole numbers without nulls.

    The numbers are copied from Arrow's memory; as Python integers they would take five times as much.
    """
    numbers = array("Q")
    for chunk in filter(len, rows.cast("uint64").chunks):
        numbers.frombytes(chunk.buffers()[1].slice(8 * chunk.offset, 8 * len(chunk)))
    return BitMap64(numbers)
