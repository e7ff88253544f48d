"""Samples: the state of a run at one moment, for displays and as `sample` events in the event log."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from batchrunner.core.engine_info import SchedulerLoad


class SchedulerSample(msgspec.Struct, kw_only=True):
    """Load of one scheduler (a data-parallel rank of a server).

    The fields before `window` are those of `SchedulerLoad`.
    """

    scheduler: str
    running: int
    queue: int
    token_usage: float
    source: str = ""
    used_tokens: int | None = None
    max_total_tokens: int | None = None
    max_running: int | None = None
    route: str = ""
    taken_at: float | None = None
    work: float | None = None
    retracted: int | None = None
    state_usage: float = 0.0
    window: int | UnsetType = UNSET
    """Maximum number of requests in flight to the scheduler; unset if the job sets the concurrency limit."""
    corner: str | UnsetType = UNSET
    """Load state of the scheduler, a value of `Corner`; unset until a state has lasted for 5 s."""
    output_tokens_per_s: float | UnsetType = UNSET
    """Output tokens per second; unset if several schedulers share the server's URL."""
    retractions: int | UnsetType = UNSET
    """Number of requests that the scheduler retracted during the run.

    Unset if several share the server's URL.
    """

    @classmethod
    def of(cls, load: SchedulerLoad) -> SchedulerSample:
        """Return a sample with the fields of a load; the fields from `window` on are unset."""
        return cls(**asdict(load))


class RolloutSample(msgspec.Struct, kw_only=True):
    """State of a run's multi-turn rollouts."""

    open: int
    """Number of rows whose rollout function has begun and not ended."""
    waiting_for_tools: int
    """Number of unfinished rows that run their own code, such as a tool, without a request in flight."""
    blocked: int
    """Number of unfinished rows that cannot continue because another row's function blocks their process."""
    turns: int
    """Number of answers that the rollouts have received."""


class BackgroundSample(msgspec.Struct, kw_only=True):
    """How a background run and the engine's other users share the engine's time."""

    our_share: float
    """Fraction of its time, from 0 to 1, that the engine worked for this run."""
    users_share: float
    """Fraction of its time, from 0 to 1, that the engine worked for other users."""
    rows_given_back: int
    """Number of rows that were preempted so that requests of other users could run."""
    tokens_lost: int
    """Output tokens of preempted rows, which must be generated again."""


class RunSample(msgspec.Struct, kw_only=True):
    """State of a run: its rows, its rates per second, and the load of its engine."""

    rows_total: int
    """Number of rows of the run, including those that earlier attempts finished; 0 if unknown."""
    rows_done: int
    """Number of finished rows, including those of earlier attempts."""
    rows_failed: int
    """Number of finished rows that ended with an error."""
    rows_reused: int
    """Number of finished rows that reuse the answer of another run."""
    rows_per_s: float
    time_left_s: float | None
    """Estimated seconds until the run ends; None if unknown."""
    stopping: bool
    output_tokens_per_s: float
    prompt_tokens_per_s: float
    cached_tokens_per_s: float
    output_tokens: int
    """Output tokens generated in this attempt."""
    prompt_tokens: int
    """Prompt tokens in this attempt."""
    cached_tokens: int
    """Prompt tokens in this attempt that came from the prefix cache."""
    tokens: int = 0
    """Prompt and output tokens of all finished rows, including those of earlier attempts."""
    window: int
    """Maximum number of requests in flight, over all replicas."""
    in_flight: int
    resting: int
    """Number of rows that wait for a retry after a failed attempt."""
    unsent: int
    """Number of rows that were never sent."""
    retractions: int
    signals: list[SchedulerSample]
    """Newest load sample of each scheduler; empty if the load is unknown."""
    bands: dict[str, tuple[int, int]]
    """Healthy number of queued requests (minimum and maximum) of each scheduler."""
    task: str
    simulated: bool
    rollouts: RolloutSample | UnsetType = UNSET
    background: BackgroundSample | UnsetType = UNSET


class LoggedSample(RunSample, kw_only=True):
    """A `sample` event in the event log."""

    time: float
    """Seconds since the Unix epoch."""
    elapsed_s: float
    event: str = "sample"


read_sample = msgspec.json.Decoder(LoggedSample).decode
_sample_in: Callable[[Mapping[str, Any]], LoggedSample] = functools.partial(
    msgspec.convert, type=LoggedSample
)


def sample_of(event: Mapping[str, Any]) -> LoggedSample | None:
    """Return the sample in an event; None if the event is not a sample, or if the sample is damaged."""
    if event["event"] != "sample":
        return None
    try:
        return _sample_in(event)
    except msgspec.ValidationError:
        return None
