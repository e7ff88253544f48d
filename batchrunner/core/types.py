"""Immutable records of rows that pass between folders, such as Request and Outcome.

A record that exists once for every row is a named tuple, because creating a frozen dataclass takes four times
as long.
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
"""Form of a prompt, named like the key of the job's `prompt`; `body` is a whole request of a batch file."""
BYTES_PER_TOKEN = 4
"""Average number of bytes of text per token, by which the tokens of a prompt are estimated."""
LEFT_OUT = "left_out"
"""Finish reason of a row that `prompt.python` left out; no engine reports it."""
FinishReason = str
"""SGLang's finish reason: "stop", "length" or "abort"; or REPETITION in `job.output`, which is ours."""
PROMPT, PARSE, CHECK, ROLLOUT = "prompt.python", "parse", "accept.python", "prompt.rollout"
"""Places of a job's Python functions: they make the prompt of a row, the columns of an answer, a judgement of
an answer, or the rows of a multi-turn rollout."""
MEDIA = "prompt"
"""Place of this package's function that prepares the files of a row; it runs as a job's functions do."""
ColumnKind: TypeAlias = str | tuple[str, Any]
"""Type of a column: the name of a plain type, ("list", kind), or ("struct", ((name, kind), …))."""
NO_COLUMNS: Mapping[str, list[Any]] = MappingProxyType({})


class RowRef(NamedTuple):
    """Origin of a row: its ordinal in the input, and its carried columns."""

    row: int
    """Ordinal in the input, counted from 0 over all files."""
    carried: pa.RecordBatch
    """Batch with the columns that are copied to the output."""
    position: int
    """Index of the row in `carried`."""
    digests: list[bytes | None] | None = None
    """Digests of the requests of the rows in `carried`, filled in as rows are rendered; None if unused."""


class RequestBody(NamedTuple):
    """The body of a whole request, as a batch file has it."""

    path: str
    """Endpoint of the request, such as /v1/chat/completions."""
    content: bytes
    """A JSON object without `model`, `stream` and `stream_options`."""
    model: str | None
    """Model that the request names."""
    most_tokens: int
    """Limit of output tokens; an estimate where the request has no limit."""
    most_thinking: int | None = None
    """Limit of thinking tokens; None where the request has none."""


class AskedColumns(NamedTuple):
    """Result columns that a request asks for, beyond those of every result."""

    names: frozenset[str]
    """Keys of ANSWER_COLUMNS in `job.output`."""
    top_logprobs: int
    """Number of likeliest tokens for each position."""
    of_tokens: bool
    """Whether the answer must include token ids or probabilities."""
    only_reasoning: bool = False
    """Whether reasoning is the only such column, as in most chats."""


class Tools(NamedTuple):
    """Tools that the model may call in a chat."""

    tools: list[Any] | None
    """In OpenAI's form: `{"type": "function", "function": {"name": …}}`; None if messages include them."""
    choice: Any = None
    """`tool_choice` of the chat endpoint; None for its default."""
    by_row: bool = False
    """Whether rows may have different tools."""


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
    """Whether the last message, of the assistant, is the beginning of the answer."""
    asks: AskedColumns | None = None
    """Columns that the answer must have besides its text; None for none."""
    row: Mapping[str, Any] | None = None
    """Values of the row that the checks of its answer use; None for none."""
    task: ForwardTask | None = None
    """Task of the model; None for generating text."""
    tools: Tools | None = None
    """Tools of a chat; None for none."""
    media: tuple[PromptFile, ...] = ()
    """Images, audio and videos of the prompt. A part `{"type": "image", "image": n}` of a message refers to
    file n."""
    items: tuple[str, ...] = ()
    """Texts that the task combines with the prompt: choices or documents."""
    item_ids: tuple[list[int], ...] = ()
    """Token ids of the choices as continuations of the prompt; empty where they are not tokenized here."""
    stops_repetition: bool = False
    """Whether its answer is stopped once it repeats itself without end."""

    @property
    def shown(self) -> Any:
        """The prompt for a person, with the label of each file in place of its index."""
        if not self.media or not isinstance(self.prompt, list):
            return self.prompt
        return [with_labels(message, self.media) for message in self.prompt]

    @property
    def media_bytes(self) -> int:
        """Bytes of its files in memory."""
        return sum(file.size for file in self.media) if self.media else 0


class Completion(NamedTuple):
    """The engine's answer to one request; the lists have one entry for each of `sampling.n` completions."""

    texts: list[str]
    finish_reasons: list[FinishReason | None]
    completion_tokens: list[int | None]
    prompt_tokens: int | None
    cached_tokens: int | None
    retractions: int = 0
    """Times that the scheduler preempted the request because the KV pool was full."""
    weights: str | None = None
    """Version of the weights (`weight_version`); None where the engine does not report it."""
    thinking_cut: bool = False
    """Whether the thinking of a completion took all of `max_thinking_tokens`."""
    columns: Mapping[str, list[Any]] = NO_COLUMNS
    """Values of further columns by name: one for each completion, or a single one about the prompt."""

    @property
    def output_tokens(self) -> int:
        """Output tokens of all completions; unreported ones count as 0."""
        tokens = self.completion_tokens
        return (tokens[0] or 0) if len(tokens) == 1 else sum(filter(None, tokens))


class Outcome(NamedTuple):
    """Final result of a row: a completion, an error, or both where the answer made the row fail."""

    ref: RowRef
    completion: Completion | None
    error: str | None
    latency_s: float | None
    """Seconds from sending the last attempt to the end of its answer; None where nothing was sent."""
    attempts: int
    """Attempts that were sent; 0 for a row that was refused here or got the answer of an equal row."""

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

    A subclass in `batchrunner.job.tasks` holds everything that differs between tasks. Its instance has the
    values of the task's fields in the job; each request refers to it.
    """

    name: ClassVar[str]
    """`task` of a job."""
    path: ClassVar[str]
    """Endpoint of SGLang for one row or a list of rows."""
    architectures: ClassVar[str] = ""
    """Pattern that the names of suitable architectures contain; empty for all."""
    by_generation: ClassVar[bool] = False
    """Whether it needs a generating model (a server without `--is-embedding`)."""
    takes: ClassVar[tuple[str, ...]] = ()
    """Job fields that only this task accepts, as dotted names; the subclass has a field for the last part of
    each."""
    meanings: ClassVar[Mapping[str, str]]
    """Its result columns, with their meanings."""

    @property
    @abstractmethod
    def columns(self) -> tuple[tuple[str, ColumnKind], ...]:
        """Its result columns with their types, in order."""

    @abstractmethod
    def bodies(self, requests: Sequence[Request]) -> list[dict[str, Any]]:
        """Return the bodies for `path`, which are sent one after the other.

        Several requests have either all texts, or all token ids.
        """

    @abstractmethod
    def answers(
        self, requests: Sequence[Request], replies: Sequence[bytes]
    ) -> list[Completion | RequestError]:
        """Read the replies to `bodies`; return the answer or the error of each request.

        Each value in `Completion.columns` is a list with one element. Raises AttemptFailedError, or
        an error of msgspec, for an invalid reply.
        """


@dataclass(frozen=True, slots=True)
class Lease:
    """Rows that are leased to one worker."""

    number: int
    turn: int
    """Number of workers that held the lease before."""
    rows: BitMap64
    """Ordinals of the rows."""
    positions: range | None
    """Positions of the rows in sending order; None where they are in input order."""
    copy: Path | None = None
    """The sorted copy, with the rows in sending order; None for the input itself."""


CHAT_PATH, COMPLETIONS_PATH, RESPONSES_PATH = "/v1/chat/completions", "/v1/completions", "/v1/responses"
EMBEDDINGS_PATH, SCORE_PATH = "/v1/embeddings", "/v1/score"
RERANK_PATH, CLASSIFY_PATH = "/v1/rerank", "/v1/classify"


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
