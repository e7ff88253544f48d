"""The frozen records that pass between stages: Request, Completion, Outcome, EngineInfo, Signals.

Those of which each row has its own are named tuples: a frozen dataclass takes four times as long to make.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

    import pyarrow as pa
    from pyroaring import BitMap64

PromptKind = Literal["messages", "text", "input_ids"]
FinishReason = str  # SGLang's own word: "stop", "length", "abort"


@dataclass(frozen=True, slots=True)
class InputFile:
    """A Parquet file of the input."""

    path: str
    first_row: int
    """Ordinal of its first row in the input."""
    row_groups: tuple[int, ...]
    """Number of rows of each row group."""
    partitions: dict[str, str | None]
    """Values of the columns in its path, Hive style (`year=2024/`)."""
    digest: str
    """Hash by which a resumed run recognises the file."""

    @property
    def rows(self) -> int:
        """Rows in the file."""
        return sum(self.row_groups)


class RowRef(NamedTuple):
    """Where a row came from: its ordinal in the input and its place in a batch of carried columns."""

    row: int
    carried: pa.RecordBatch
    position: int


class Request(NamedTuple):
    """One row, ready to be sent; `sampling` has SGLang's `/generate` names."""

    ref: RowRef
    kind: PromptKind
    prompt: Any
    """A list of `{"role", "content"}`, a text, or a list of token ids, as `kind` says."""
    sampling: dict[str, Any]
    lora_path: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    affinity: str | None = None
    """Where a gateway chooses: requests with the same one should go to the same replica."""


class Completion(NamedTuple):
    """What the engine answered to one request; the lists have one entry a sample (`n`)."""

    texts: list[str]
    finish_reasons: list[FinishReason | None]
    completion_tokens: list[int | None]
    prompt_tokens: int | None
    cached_tokens: int | None
    retractions: int = 0
    """How often the scheduler took the row back because the KV pool was full."""


class Outcome(NamedTuple):
    """The end of a row: a completion or an error, never both."""

    ref: RowRef
    completion: Completion | None
    error: str | None
    latency_s: float | None
    """Of the last try, from sending to the whole answer; None where nothing was sent."""
    attempts: int


@dataclass(frozen=True, slots=True)
class TokenizerInfo:
    """What an engine says of how it makes tokens of prompts."""

    tokenizer: str
    """Its tokenizer's directory or name."""
    model: str
    own: str | None = None
    """Why only the engine can make tokens of prompts."""
    own_chat: str | None = None
    """The same of messages; also what it does to their answers, and only to theirs."""
    model_sampling: bool = True
    """Whether messages are sampled as the model's generation_config.json says, where the request does not."""
    template: str | None = None
    """The chat template's name, of several."""
    cuts: bool = False
    """Whether the engine cuts a prompt that is too long, instead of refusing it."""
    longest_prompt: int | None = None
    """A prompt must have fewer tokens."""
    absent: bool = False
    """Whether the engine has no tokenizer: it takes and gives ids."""


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What an open engine says of itself."""

    kind: str
    model: str
    """The model's identity as the engine names it: resuming with another one is refused."""
    version: str | None = None
    max_running: int | None = None
    """Requests that one scheduler runs at most (`max_running_requests`), summed over schedulers."""
    max_total_tokens: int | None = None
    """KV pool in tokens, summed over schedulers."""
    context_length: int | None = None
    prefill_tokens: int | None = None
    """Tokens of prompts that one scheduler computes in one pass at most."""
    caches_prefixes: bool = True
    """Whether what prompts have in common at their beginning is computed once."""
    keeps_together: bool = False
    """Whether somebody behind the route chooses the scheduler, by the requests' `affinity`."""
    routes: tuple[str, ...] = ("engine",)
    """Where requests can be sent: a replica's URL, a gateway, or the one engine that there is."""
    tokenizing: TokenizerInfo | None = None
    connections: int | None = None
    """Requests that the transport can hold open at once, over all routes; None for no such limit."""
    simulated: bool = False
    card: str | None = None
    """The GPU by its maker's name, where the engine was started here and all are alike."""
    gpus: int | None = None
    """GPUs that the server could take, where it was started here and took them by itself."""
    log: str | None = None
    """Path of the engine's log, where we have it."""
    notes: tuple[str, ...] = ()
    """What the user should read in the log at the start, a line each."""


@dataclass(frozen=True, slots=True)
class SchedulerLoad:
    """One reading of one scheduler's load."""

    scheduler: str
    """The replica's URL, with `#dpN` where it has several DP ranks."""
    source: Literal["loads", "metrics", "log", "engine", "simulated"]
    running: int
    """`#running-req`."""
    queue: int
    """`#queue-req`."""
    token_usage: float
    """Share of the KV pool in use, 0-1, evictable cache left out."""
    used_tokens: int | None = None
    max_total_tokens: int | None = None
    max_running: int | None = None
    route: str = "engine"
    """The route that leads to it."""
    taken_at: float | None = None
    """When the scheduler wrote it down, by its own clock: two polls may bring the same reading."""
    work: float | None = None
    """Grows with the forward passes that the scheduler has made; None where it does not count them."""

    @property
    def server(self) -> str:
        """The replica's URL, or what stands for it."""
        return self.scheduler.partition("#")[0]

    @property
    def has_work(self) -> bool:
        """Whether the scheduler has requests."""
        return self.running + self.queue > 0


class Incident(NamedTuple):
    """What befell an engine's server in mid-run, for the event log."""

    what: Literal["recalled", "died", "healed", "hangs", "back", "lost", "out", "in"]
    """`healed`: safer arguments; `recalled`: from an earlier run; `out` and `in`: of a gateway's list."""
    who: str
    """The server, as log lines call it, or its URL."""
    why: str = ""
    facts: Mapping[str, Any] = {}
    """What else the event has: `kind`, `old` and `new` arguments."""


@dataclass(frozen=True, slots=True)
class Lease:
    """Rows that one task is to do."""

    number: int
    turn: int
    """Number of tasks that held the lease before."""
    rows: BitMap64
    """Ordinals of the rows."""
    places: range | None
    """Where the rows stand in the order of sending; None for somewhere in the input."""
