"""Immutable records about an engine: properties, load samples, healthy queue lengths, and events.

The fields of EngineInfo, TokenizerInfo and SchedulerLoad are keys in run.json, report.json and the event log.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple


@dataclass(frozen=True, slots=True)
class TokenizerInfo:
    """How an engine tokenizes prompts, as it reports itself."""

    tokenizer: str
    """Directory or name of the tokenizer."""
    model: str
    """Directory or name of the model."""
    why_server: str | None = None
    """Reason why only the engine can tokenize prompts; None if this process can do so too."""
    why_server_chat: str | None = None
    """Reason why only the engine can tokenize chats or parse answers to them.

    None if this process can too.
    """
    model_sampling: bool = True
    """Whether a chat gets missing sampling parameters from the model's generation_config.json."""
    cuts: bool = False
    """Whether the engine truncates a prompt that is too long instead of refusing it."""
    longest_prompt: int | None = None
    """A prompt must have fewer tokens than this; None for no limit."""


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Properties of an open engine, as it reports them; None means unknown."""

    kind: str
    """`engine.kind` of the job."""
    model: str
    """Name or path of the model. A run cannot be resumed with another model."""
    version: str | None = None
    """Version of SGLang."""
    weights: str | None = None
    """Version of the model's weights (`weight_version`). It must not change during a run."""
    max_running: int | None = None
    """Maximum number of running requests (`max_running_requests`), summed over schedulers."""
    memory_caps_running: bool = False
    """Whether memory limits running requests to fewer than `--max-running-requests`."""
    max_total_tokens: int | None = None
    """Size of the KV pool in tokens, summed over schedulers."""
    context_length: int | None = None
    """Maximum number of tokens of a request, prompt and output together."""
    prefill_tokens: int | None = None
    """Maximum number of prompt tokens in one forward pass of a scheduler."""
    caches_prefixes: bool = True
    """Whether the engine has a prefix cache, which computes a common prefix once."""
    routes: tuple[str, ...] = ("engine",)
    """Destinations of requests when the engine was opened: the URLs of replicas, or "engine"."""
    tokenizing: TokenizerInfo | None = None
    """How the engine tokenizes prompts."""
    connections: int | None = None
    """Maximum number of HTTP requests in flight, over all replicas; None for no limit."""
    connections_by: str | None = None
    """Where the limit `connections` comes from, in words for messages."""
    takes_images: bool | None = None
    takes_audio: bool | None = None
    takes_videos: bool | None = None
    simulated: bool = False
    """Whether the engine is simulated, so that its answers are made up."""
    card: str | None = None
    """GPU model, if the engine runs on this machine and all its GPUs are of one model."""
    gpus: int | None = None
    """Number of GPUs of this machine, if the engine was started here and may use all of them."""
    tp: int | None = None
    """Number of GPUs over which a replica's weights are split, if the engine was started here."""
    log: str | None = None
    """Path of the engine's log, if it is on this machine."""
    one_by_one: str | None = "the engine accepts only one row in a request"
    """Reason why each row needs a request of its own; None if a request can have several rows."""
    only_short_share: str | None = None
    """Reason why only rows with short outputs may share a request; None if all rows may."""
    prefix_rows_alone: bool = False
    """Whether a row that shares a prefix with others needs a request of its own.

    A gateway that chooses the server by the prompt requires this, because it only reads a request's first
    prompt.
    """
    unsupported: Mapping[str, str] = field(default_factory=dict)
    """Reasons why the engine cannot do a part of a job, by the name of the part, such as `sampling.n`, or by
    the path of an endpoint."""
    unsupported_in_chats: Mapping[str, str] = field(default_factory=dict)
    """Reasons why the engine cannot do a part of a job in chats."""
    unsupported_elsewhere: Mapping[str, str] = field(default_factory=dict)
    """Reasons why the engine cannot do a part of a job in prompts that are no chats."""
    chat_limits: Mapping[str, int] = field(default_factory=dict)
    """Largest values that the engine accepts in chats, by the part of the job, such as `sampling.n`."""
    no_thinking_budget: str | None = None
    """Reason why the engine would ignore a limit of thinking tokens; None if it obeys the limit."""
    yields: bool | None = None
    """Whether the server schedules other users' requests before those of this run.

    It is None if the run is not a background run.
    """
    notes: tuple[str, ...] = ()
    """Lines for the user, logged when the run starts."""


@dataclass(frozen=True, slots=True)
class SchedulerLoad:
    """One reading of the load of one SGLang scheduler."""

    scheduler: str
    """URL of the replica; with several data-parallel ranks, followed by `#dpN`."""
    source: Literal["loads", "gateway", "engine", "simulated"]
    """Where the numbers come from, such as "loads" for `/v1/loads` of the server."""
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
    """Maximum number of running requests."""
    route: str = "engine"
    """URL to which requests for this scheduler are sent; "engine" if the engine runs in this process."""
    taken_at: float | None = None
    """Time of the reading by the scheduler's clock. An unchanged time means that the reading is not new."""
    work: float | None = None
    """Counter that grows with the scheduler's forward passes; None if the engine has none."""
    retracted: int | None = None
    """Requests that were retracted between the scheduler's last two reports; None if unreported."""
    state_usage: float = 0.0
    """Fraction of the pool of recurrent states in use, 0 to 1.

    0 for a model without them (such as Mamba's).
    """

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
    """Kind of the event.

    `recalled`: the server was started with the safer flags that an earlier run found. `healed`: it was
    restarted with safer flags. `adapts`: flag tuning restarts it with other flags. `adapted`: flag tuning has
    measured these flags.
    """
    who: str
    """Name of the server in log lines, or its URL."""
    why: str = ""
    facts: Mapping[str, Any] = {}
    """Further values of the event, such as `kind`, and the flags `old` and `new`."""


USUAL_MAX_RUNNING = 256
"""Limit of running requests at which a scheduler has the default range of healthy queue lengths.

For a lower limit, the range is smaller (`QueueBand.scaled`).
"""
LEAST_LOW = 8
"""Minimum of `low`, the lower end of a scaled range of healthy queue lengths, in requests."""


@dataclass(frozen=True, slots=True)
class QueueBand:
    """Range of healthy queue lengths (`#queue-req`, queued requests) of one scheduler."""

    low: int = 100
    high: int = 2000
    why: str = "SGLang's tuning guide"
    """Where `low` and `high` come from, in words for messages."""

    def scaled(self, max_running: int | None) -> QueueBand:
        """Return the range for a scheduler that runs at most `max_running` requests; None means no limit."""
        if max_running is None or max_running >= USUAL_MAX_RUNNING:
            return self
        share = max_running / USUAL_MAX_RUNNING
        # The minimum keeps the range wide enough for the queue of a small scheduler to stay in it.
        low = min(self.low, max(LEAST_LOW, round(self.low * share)))
        high = min(self.high, max(4 * low, round(self.high * share)))
        return QueueBand(low, high, f"scaled down: the scheduler runs at most {max_running} requests")
