"""Immutable records about an engine: properties, load samples, healthy queue, and events such as restarts.

The fields of EngineInfo, TokenizerInfo and SchedulerLoad are keys in run.json, report.json and the event log.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple


@dataclass(frozen=True, slots=True)
class TokenizerInfo:
    """How an engine tokenizes prompts, according to the engine."""

    tokenizer: str
    """Directory or name of the tokenizer."""
    model: str
    """Directory or name of the model."""
    why_server: str | None = None
    """Reason why only the engine can tokenize prompts; None if this process can tokenize them, too."""
    why_server_chat: str | None = None
    """Reason why only the engine can tokenize chat messages or parse answers to them; None if this process
    can do both, too."""
    model_sampling: bool = True
    """Whether the engine reads sampling parameters that a chat request omits from the model's
    generation_config.json."""
    cuts: bool = False
    """Whether the engine truncates a prompt that is too long, instead of refusing it."""
    longest_prompt: int | None = None
    """Exclusive limit of the number of prompt tokens; None if there is no limit."""


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Properties of an open engine, as it reports them; None means unknown."""

    kind: str
    """`engine.kind` of the job."""
    model: str
    """Name or path of the model, as the engine reports it. A run cannot resume with another model."""
    version: str | None = None
    """Version of SGLang."""
    weights: str | None = None
    """Version of the model's weights (`weight_version`); it must not change during a run."""
    max_running: int | None = None
    """Limit of running requests (`max_running_requests`), summed over schedulers."""
    memory_caps_running: bool = False
    """Whether memory limits running requests to fewer than `--max-running-requests`."""
    max_total_tokens: int | None = None
    """Size of the KV pool in tokens, summed over schedulers."""
    context_length: int | None = None
    """Limit of prompt and output tokens of one request together."""
    prefill_tokens: int | None = None
    """Limit of prompt tokens in one forward pass of a scheduler."""
    caches_prefixes: bool = True
    """Whether the engine has a prefix cache, which computes a common prefix once."""
    routes: tuple[str, ...] = ("engine",)
    """Destinations of requests when the engine was opened: the URLs of replicas, or "engine"."""
    tokenizing: TokenizerInfo | None = None
    """How the engine tokenizes prompts."""
    connections: int | None = None
    """Limit of HTTP requests that are open at the same time over all routes; None for no limit."""
    connections_by: str | None = None
    """Where the limit `connections` comes from, in words for messages."""
    takes_images: bool | None = None
    """Whether the model accepts images in prompts."""
    takes_audio: bool | None = None
    """Whether the model accepts audio in prompts."""
    takes_videos: bool | None = None
    """Whether the model accepts videos in prompts."""
    simulated: bool = False
    """Whether the engine is simulated, so that its answers are made up."""
    card: str | None = None
    """GPU model, if the engine runs on this machine and all its GPUs are of one model."""
    gpus: int | None = None
    """Number of GPUs of this machine, if the engine was started here and may use all of them."""
    tp: int | None = None
    """Number of GPUs over which the weights of a replica are split, if the engine was started here."""
    log: str | None = None
    """Path of the engine's log, if it is on this machine."""
    one_by_one: str | None = "the engine accepts only one row in a request"
    """Reason why each row is sent in a separate request; None if a request can hold several rows."""
    only_short_share: str | None = None
    """Reason why only rows with short outputs may share a request; None if all rows may."""
    prefix_rows_alone: bool = False
    """Whether a row that shares a prefix with other rows must be sent in a separate request. A gateway that
    chooses the server by the prompt needs this, because it reads only the first prompt of a request."""
    unsupported: Mapping[str, str] = field(default_factory=dict)
    """Reasons why the engine cannot do a part of a job, by the name of the part, such as `prompt.images`."""
    no_thinking_budget: str | None = None
    """Reason why the engine would ignore a limit of thinking tokens; None if it obeys the limit."""
    yields: bool | None = None
    """Whether the server schedules its users' requests before those of this background run; None if the run
    is not in the background."""
    notes: tuple[str, ...] = ()
    """Lines for the user, logged when the run starts."""


@dataclass(frozen=True, slots=True)
class SchedulerLoad:
    """One reading of the load of one scheduler of SGLang."""

    scheduler: str
    """URL of the replica, with `#dpN` at its end if the replica has several data-parallel ranks."""
    source: Literal["loads", "gateway", "engine", "simulated"]
    """Source of the numbers, such as "loads" for `/v1/loads` of the server."""
    running: int
    """Running requests, SGLang's `#running-req`."""
    queue: int
    """Queued requests, SGLang's `#queue-req`."""
    token_usage: float
    """Fraction of the KV pool in use, 0 to 1, without the evictable part of the prefix cache."""
    used_tokens: int | None = None
    """Tokens of the KV pool in use."""
    max_total_tokens: int | None = None
    """Size of the KV pool in tokens."""
    max_running: int | None = None
    """Limit of running requests."""
    route: str = "engine"
    """Route by which requests reach the scheduler."""
    taken_at: float | None = None
    """Time of the reading by the scheduler's clock. If two polls have the same time, they returned the same
    reading."""
    work: float | None = None
    """Counter that grows with the scheduler's forward passes; None if the engine has no such counter."""
    retracted: int | None = None
    """Requests that were retracted between the scheduler's last two reports; None if unreported."""
    state_usage: float = 0.0
    """Fraction of the pool of recurrent states (Mamba and such) in use, 0 to 1; 0 for a model without such
    states."""

    @property
    def server(self) -> str:
        """URL of the replica, without the data-parallel rank."""
        return self.scheduler.partition("#")[0]

    @property
    def has_work(self) -> bool:
        """Whether requests are running or queued."""
        return self.running + self.queue > 0


class Incident(NamedTuple):
    """An event in the life of a server during a run, for the event log."""

    what: Literal["recalled", "died", "healed", "hangs", "back", "lost", "adapts", "adapted"]
    """Kind of the event. `recalled`: the server was started with the safer flags that an earlier run found.
    `healed`: the server was restarted with safer flags. `adapts`: flag tuning restarts the server with other
    flags. `adapted`: flag tuning measured the effect of these flags."""
    who: str
    """Name of the server in log lines, or its URL."""
    why: str = ""
    facts: Mapping[str, Any] = {}
    """Further values of the event, such as `kind`, and the flags `old` and `new`."""


USUAL_MAX_RUNNING = 256
"""A scheduler whose limit of running requests is at least this gets the default range of healthy queue
lengths (QueueBand). A scheduler with a lower limit gets a smaller range (`QueueBand.scaled`)."""
LEAST_LOW = 8
"""Minimum value of `low`, the lower end of a QueueBand in queued requests, after `scaled`."""


@dataclass(frozen=True, slots=True)
class QueueBand:
    """Range of healthy numbers of queued requests (`#queue-req`) of one scheduler."""

    low: int = 100
    high: int = 2000
    why: str = "SGLang's tuning guide"
    """Where `low` and `high` come from, in words for messages."""

    def scaled(self, max_running: int | None) -> QueueBand:
        """Return the range for a scheduler that runs at most `max_running` requests; None means no limit."""
        if max_running is None or max_running >= USUAL_MAX_RUNNING:
            return self
        share = max_running / USUAL_MAX_RUNNING
        # LEAST_LOW and 4 * low keep the range wide enough that the queue of a small scheduler can stay in it.
        low = min(self.low, max(LEAST_LOW, round(self.low * share)))
        high = min(self.high, max(4 * low, round(self.high * share)))
        return QueueBand(low, high, f"scaled down: the scheduler runs at most {max_running} requests")
