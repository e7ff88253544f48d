"""Immutable records of an engine: what it is, its load and healthy queue, and what happens to it.

The fields of EngineInfo, TokenizerInfo and SchedulerLoad are keys in run.json, report.json and the event log.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple


@dataclass(frozen=True, slots=True)
class TokenizerInfo:
    """How an engine tokenizes prompts, from what it reports."""

    tokenizer: str
    """Directory or name of the tokenizer."""
    model: str
    """Directory or name of the model."""
    own: str | None = None
    """Reason why only the engine can tokenize prompts; None if there is none."""
    own_chat: str | None = None
    """Reason why only the engine can tokenize messages, or handle their answers; None if there is none."""
    model_sampling: bool = True
    """Whether generation_config.json sets sampling parameters that a request with messages omits."""
    cuts: bool = False
    """Whether the engine truncates a prompt that is too long instead of refusing it."""
    longest_prompt: int | None = None
    """Tokens that a prompt must stay below; None for no such limit."""


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Properties of an open engine, as it reports them; None means unknown."""

    kind: str
    """`engine.kind` of the job."""
    model: str
    """Identity of the model as the engine names it; a run cannot be resumed with another one."""
    version: str | None = None
    """Version of SGLang."""
    weights: str | None = None
    """Version of the model's weights (`weight_version`), which an attached server keeps during a run."""
    max_running: int | None = None
    """Most requests that decode at once (`max_running_requests`), summed over schedulers."""
    memory_caps_running: bool = False
    """Whether memory allows fewer running requests than `--max-running-requests` asks for."""
    max_total_tokens: int | None = None
    """Size of the KV pool in tokens, summed over schedulers."""
    context_length: int | None = None
    """Most tokens of prompt and output together."""
    prefill_tokens: int | None = None
    """Most prompt tokens that one scheduler computes in one forward pass."""
    caches_prefixes: bool = True
    """Whether the engine has a prefix cache, which computes a common prefix of prompts once."""
    routes: tuple[str, ...] = ("engine",)
    """Destinations of requests at the start: the URLs of replicas, or "engine"."""
    tokenizing: TokenizerInfo | None = None
    """How the engine tokenizes prompts."""
    connections: int | None = None
    """Most requests that can be open at once, over all routes; None for no limit."""
    connections_by: str | None = None
    """The limit that `connections` comes from, in words."""
    takes_images: bool | None = None
    """Whether the model takes images in prompts."""
    takes_audio: bool | None = None
    """Whether the model takes audio in prompts."""
    takes_videos: bool | None = None
    """Whether the model takes videos in prompts."""
    simulated: bool = False
    """Whether the answers are made up."""
    card: str | None = None
    """Name of the GPU model, where the engine runs on this machine and all its GPUs are of one model."""
    gpus: int | None = None
    """GPUs of this machine, where the engine was started here and may use all of them."""
    tp: int | None = None
    """GPUs that the weights of a replica are split over, where the engine was started here."""
    log: str | None = None
    """Path of the engine's log, where this machine has it."""
    one_by_one: str | None = "the engine takes one row in a request"
    """Reason why each row is a request of its own; None where a request can hold several."""
    yields: bool | None = None
    """Whether the server lets the requests of others go before ours; None where ours are not in the
    background."""
    notes: tuple[str, ...] = ()
    """Lines for the user, logged when the run begins."""


@dataclass(frozen=True, slots=True)
class SchedulerLoad:
    """The load of one scheduler at one moment."""

    scheduler: str
    """URL of the replica, with `#dpN` where it has several data-parallel ranks."""
    source: Literal["loads", "engine", "simulated"]
    """Where the numbers were read."""
    running: int
    """Requests that decode, SGLang's `#running-req`."""
    queue: int
    """Requests that wait, SGLang's `#queue-req`."""
    token_usage: float
    """Fraction of the KV pool in use, 0 to 1, without the evictable part of the prefix cache."""
    used_tokens: int | None = None
    """Tokens of the KV pool in use."""
    max_total_tokens: int | None = None
    """Size of the KV pool in tokens."""
    max_running: int | None = None
    """Most requests that decode at once."""
    route: str = "engine"
    """Route that leads to the scheduler."""
    taken_at: float | None = None
    """Time of the reading by the scheduler's clock; two polls may return the same reading."""
    work: float | None = None
    """Counter that grows with the scheduler's forward passes; None where it has none."""
    retracted: int | None = None
    """Requests that it retracted lately: since its report before the last. None where it does not say."""

    @property
    def server(self) -> str:
        """URL of the replica, without the data-parallel rank."""
        return self.scheduler.partition("#")[0]

    @property
    def has_work(self) -> bool:
        """Whether requests run or wait."""
        return self.running + self.queue > 0


class Incident(NamedTuple):
    """An event in the life of an engine's server during a run, for the event log."""

    what: Literal["recalled", "died", "healed", "hangs", "back", "lost", "adapts", "adapted"]
    """`healed`: restarted with safer arguments; `recalled`: begins with those of an earlier run; `adapts`:
    restarted with other flags; `adapted`: what these gained."""
    who: str
    """Name of the server in log lines, or its URL."""
    why: str = ""
    facts: Mapping[str, Any] = {}
    """Further values of the event, such as `kind`, `old` and `new` (arguments)."""


USUAL_MAX_RUNNING = 256
"""Requests that a scheduler runs at once, from which the band applies as it is; below, it is scaled down."""
LEAST_LOW = 8
"""The lower end is not scaled below this many requests."""


@dataclass(frozen=True, slots=True)
class QueueBand:
    """Healthy `#queue-req` of one scheduler, in requests."""

    low: int = 100
    high: int = 2000
    why: str = "the guide's"

    def scaled(self, max_running: int | None) -> QueueBand:
        """Return the band for a scheduler that runs at most `max_running` requests at once."""
        if max_running is None or max_running >= USUAL_MAX_RUNNING:
            return self
        share = max_running / USUAL_MAX_RUNNING
        low = min(self.low, max(LEAST_LOW, round(self.low * share)))
        high = min(self.high, max(4 * low, round(self.high * share)))
        return QueueBand(low, high, f"scaled down: the scheduler runs {max_running} at once")
