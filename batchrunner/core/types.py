"""Immutable records about rows that pass between folders, such as Request and Outcome.

Records of which every row has one are named tuples: creating a frozen dataclass takes four times as long.
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
"""Kind of a prompt, named like the key of the job's `prompt`. `body` is a whole request of a batch file."""
BYTES_PER_TOKEN = 4
"""Average bytes of text per token, for estimates of a prompt's tokens."""
LEFT_OUT = "left_out"
"""Finish reason of a row that `prompt.python` left out. No engine reports it."""
FinishReason = str
"""Why an output ended: SGLang's "stop", "length" or "abort", or batchrunner's REPETITION."""
RepeatedText = Literal["prose", "any"]
"""Text whose endless repetition ends an answer."""
PROMPT = "prompt.python"
"""Job field of the Python function that makes the prompt of a row."""
PARSE = "parse"
"""Job field of the Python function that turns an answer into result columns."""
CHECK = "accept.python"
"""Job field of the Python function that accepts or rejects an answer."""
ROLLOUT = "prompt.rollout"
"""Job field of the Python function that runs a multi-turn rollout for a row."""
MEDIA = "prompt"
"""Name, in place of a job field, of this package's own function that reads images and other files.

Like a job's Python functions, it runs in a worker process.
"""
ColumnKind: TypeAlias = str | tuple[str, Any]
"""Type of a column: the name of a plain type, ("list", kind), or ("struct", ((name, kind), …))."""
NO_COLUMNS: Mapping[str, list[Any]] = MappingProxyType({})
"""`Completion.columns` of an answer without further columns."""


class RowRef(NamedTuple):
    """Reference to an input row: its number, and its columns that are copied to the output."""

    row: int
    """Number of the row in the input, counted from 0 over all files."""
    carried: pa.RecordBatch
    """Batch of rows, with the columns that are copied to the output."""
    position: int
    """Index of the row in `carried`."""
    digests: list[bytes | None] | None = None
    """Digests of the requests of all rows in `carried`, filled in as the rows are rendered.

    It is None if the run needs no digests.
    """


class RequestBody(NamedTuple):
    """The body and the endpoint of a request on a line of a batch file."""

    path: str
    """Endpoint of the request, such as /v1/chat/completions."""
    content: bytes
    """JSON object without `model`, `stream` and `stream_options`."""
    model: str | None
    most_tokens: int
    """Limit of output tokens; an estimate if the request has none."""
    most_thinking: int | None = None
    """Limit of thinking tokens; None if the request has none."""


class AskedColumns(NamedTuple):
    """Additional result columns that a request asks for."""

    names: frozenset[str]
    """Names of the columns: keys of ANSWER_COLUMNS in `job.output`."""
    top_logprobs: int
    """Number of most likely tokens to return for each position."""
    of_tokens: bool
    """Whether the answer must include token ids or log probabilities."""
    only_reasoning: bool = False
    """Whether `reasoning` is the only column in `names`, as in most chats."""


class Tools(NamedTuple):
    """Tools that the model may call in a chat."""

    tools: list[Any] | None
    """Tools in OpenAI's format, `{"type": "function", "function": {"name": …}}`.

    None means that they are in the prompt's messages.
    """
    choice: Any = None
    """`tool_choice` of the chat endpoint; None for its default."""
    by_row: bool = False
    """Whether rows may have different tools."""


class Request(NamedTuple):
    """The request of one row, rendered from the job's templates."""

    ref: RowRef
    kind: PromptKind
    prompt: Any
    """Depends on `kind`: a list of `{"role", "content"}`, a text, a list of token ids, or a RequestBody."""
    sampling: dict[str, Any]
    """Sampling parameters, named as for SGLang's `/generate`."""
    lora_path: str | None = None
    """Name of a LoRA adapter; None for the model without an adapter."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables of the chat template, such as `enable_thinking`."""
    continues: bool = False
    """Whether the answer continues the prompt's last message, an assistant message."""
    asks: AskedColumns | None = None
    """Additional columns that the answer must have; None if it needs only the text."""
    row: Mapping[str, Any] | None = None
    """Values of the input row, for the checks of the answer; None if the checks do not use it."""
    task: ForwardTask | None = None
    """Task of the model; None for generating text."""
    tools: Tools | None = None
    """Tools that the model may call in a chat; None without tools."""
    media: tuple[PromptFile, ...] = ()
    """Images, audio and videos of the prompt.

    A message part `{"type": "image", "image": n}` refers to file n.
    """
    items: tuple[str, ...] = ()
    """Choices to score, or documents to rerank; they are combined with the prompt."""
    item_ids: tuple[list[int], ...] = ()
    """Token ids of the choices after the prompt; empty if this process does not tokenize them."""
    stops_repetition: RepeatedText | None = None
    """Text whose endless repetition ends the answer; None if every answer goes on."""

    @property
    def shown(self) -> Any:
        """The prompt to show to a person, with the label of each file in place of its index."""
        if not self.media or not isinstance(self.prompt, list):
            return self.prompt
        return [with_labels(message, self.media) for message in self.prompt]

    @property
    def media_bytes(self) -> int:
        """Number of bytes that the files of the prompt take in memory."""
        return sum(file.size for file in self.media) if self.media else 0


class Completion(NamedTuple):
    """The engine's answer to one request. Each list has one entry for each of `sampling.n` completions."""

    texts: list[str]
    finish_reasons: list[FinishReason | None]
    completion_tokens: list[int | None]
    prompt_tokens: int | None
    cached_tokens: int | None
    retractions: int = 0
    """How many times the scheduler retracted the request because the KV pool was full."""
    weights: str | None = None
    """Version of the model's weights (`weight_version`); None if the engine reports none."""
    thinking_cut: bool = False
    """Whether the thinking of any completion took all of `max_thinking_tokens`."""
    columns: Mapping[str, list[Any]] = NO_COLUMNS
    """Further result columns, by name. A list has one value for each completion, or one about the prompt."""

    @property
    def output_tokens(self) -> int:
        """Number of output tokens of all completions; an unreported number counts as 0."""
        tokens = self.completion_tokens
        return (tokens[0] or 0) if len(tokens) == 1 else sum(filter(None, tokens))


class Outcome(NamedTuple):
    """Final result of a row: a completion, an error, or both if the answer made the row fail."""

    ref: RowRef
    completion: Completion | None
    error: str | None
    latency_s: float | None
    """Seconds from the start of the last attempt to the end of its answer; None if the row was not sent."""
    attempts: int
    """Number of attempts that were sent to the engine.

    It is 0 if the row was refused before sending, or got the answer of an equal row.
    """

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
    """A task that a model does in one forward pass, without decoding, such as an embedding.

    A subclass in `batchrunner.job.tasks` has everything that differs between tasks. An instance has the
    options of the task in a job, and is shared by all requests.
    """

    name: ClassVar[str]
    """Name of the task: the value of `task` in a job."""
    path: ClassVar[str]
    """Path of SGLang's endpoint, which takes one row or a list of rows."""
    architectures: ClassVar[str] = ""
    """Pattern of the names of suitable model architectures; empty if all are suitable."""
    by_generation: ClassVar[bool] = False
    """Whether the task needs a generative model (a server without `--is-embedding`)."""
    takes: ClassVar[tuple[str, ...]] = ()
    """Job fields that only this task has, such as `output.dtype`.

    If the subclass has a field with the last part of the name, such as `dtype`, it gets the value.
    """
    meanings: ClassVar[Mapping[str, str]]
    """Meanings of the task's result columns, by name."""

    @property
    @abstractmethod
    def columns(self) -> tuple[tuple[str, ColumnKind], ...]:
        """Names and types of the task's result columns, in order."""

    @abstractmethod
    def bodies(self, requests: Sequence[Request]) -> list[dict[str, Any]]:
        """Return the request bodies (JSON) that ask for the answers; they are sent one after the other.

        The prompts of the requests are either all texts, or all token ids.
        """

    @abstractmethod
    def answers(
        self, requests: Sequence[Request], replies: Sequence[bytes]
    ) -> list[Completion | RequestError]:
        """Return the answer to each request, or its error, from the replies to `bodies`.

        Each value in `Completion.columns` is a list with one element. Raises AttemptFailedError, or an error
        of msgspec, for an invalid reply.
        """


@dataclass(frozen=True, slots=True)
class Lease:
    """Rows that one worker of a run has reserved, so that no other worker sends them."""

    number: int
    turn: int
    """How many workers had reserved these rows before this worker."""
    rows: BitMap64
    """Numbers of the rows in the input."""
    positions: range | None
    """Positions of the rows in sending order; None if rows are sent in input order."""
    copy: Path | None = None
    """Path of the copy of the input in sending order; None if rows are read from the input."""


CHAT_PATH, COMPLETIONS_PATH, RESPONSES_PATH = "/v1/chat/completions", "/v1/completions", "/v1/responses"
EMBEDDINGS_PATH, SCORE_PATH = "/v1/embeddings", "/v1/score"
RERANK_PATH, CLASSIFY_PATH = "/v1/rerank", "/v1/classify"


def rows_to_text(rows: BitMap64) -> str:
    """Return a set of row numbers as base-85 text for a JSON file.

    The text takes a few bytes for each range of consecutive rows, and 2.5 bytes for each single row.
    """
    rows = rows.copy()  # `run_optimize` works in place, and must not change the caller's set.
    rows.run_optimize()
    return base64.b85encode(rows.serialize()).decode()


def rows_from_text(text: str) -> BitMap64:
    """Return the set of row numbers that `rows_to_text` encoded."""
    return BitMap64.deserialize(base64.b85decode(text))


def rows_of_column(rows: pa.ChunkedArray) -> BitMap64:
    """Return the set of row numbers in a column of whole numbers without nulls.

    The numbers are copied from Arrow's memory, because Python integers would take five times as much memory.
    """
    numbers = array("Q")
    # Empty chunks may have no buffer, so they are skipped.
    for chunk in filter(len, rows.cast("uint64").chunks):
        # The first buffer marks nulls, the second has the numbers, eight bytes each.
        numbers.frombytes(chunk.buffers()[1].slice(8 * chunk.offset, 8 * len(chunk)))
    return BitMap64(numbers)
