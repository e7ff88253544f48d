"""State of a run at one moment. Displays show it, and the event log has it as the event `sample`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from batchrunner.core.engine_info import SchedulerLoad


class SchedulerSample(msgspec.Struct, kw_only=True):
    """Load of one scheduler, as in `SchedulerLoad`. The client adds the fields from `window` on."""

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
    """Concurrency limit of the scheduler; unset if the job sets the window."""
    corner: str | UnsetType = UNSET
    """Load state of the scheduler, a `Corner`; unset until a state has lasted long enough."""
    output_tokens_per_s: float | UnsetType = UNSET
    """Output tokens a second. This and `retractions` are unset if several schedulers share the route."""
    retractions: int | UnsetType = UNSET
    """Requests that the scheduler retracted during the run."""

    @classmethod
    def of(cls, load: SchedulerLoad) -> SchedulerSample:
        """Return a sample with this load; the client's fields are unset."""
        return cls(**asdict(load))


class RolloutSample(msgspec.Struct, kw_only=True):
    """The rollouts of a run."""

    open: int
    waiting_for_tools: int
    """Open rows that wait for no answer of the engine, because their function is at work."""
    blocked: int
    """Open rows that wait because another row blocks their process."""
    turns: int


class BackgroundSample(msgspec.Struct, kw_only=True):
    """Shares of the engine's time in a background run."""

    our_share: float
    """Fraction of the time that the engine worked for us, 0 to 1; `users_share` is that of its users."""
    users_share: float
    rows_given_back: int
    """Rows that were preempted for the users."""
    tokens_lost: int
    """Output tokens of these rows."""


class RunSample(msgspec.Struct, kw_only=True):
    """The state of a run: its rows, its rates a second, and the load of its engine."""

    rows_total: int
    """Rows of the run; 0 if unknown. This and the next three counts include rows of earlier attempts."""
    rows_done: int
    rows_failed: int
    rows_reused: int
    rows_per_s: float
    time_left_s: float | None
    """Estimated seconds to the end; None while unknown."""
    stopping: bool
    output_tokens_per_s: float
    prompt_tokens_per_s: float
    cached_tokens_per_s: float
    output_tokens: int
    """Output tokens of this attempt; `prompt_tokens` and `cached_tokens` are of this attempt too."""
    prompt_tokens: int
    cached_tokens: int
    window: int
    """Concurrency limit, summed over routes."""
    in_flight: int
    resting: int
    """Rows that wait for a retry."""
    unsent: int
    """Rows that were never sent."""
    retractions: int
    signals: list[SchedulerSample]
    """Newest load sample of each scheduler; empty if the load is unknown."""
    bands: dict[str, tuple[int, int]]
    """Minimum and maximum number of waiting requests in a healthy queue, by scheduler."""
    task: str
    simulated: bool
    rollouts: RolloutSample | UnsetType = UNSET
    background: BackgroundSample | UnsetType = UNSET


class LoggedSample(RunSample, kw_only=True):
    """A `sample` event of the event log."""

    time: float
    """Seconds since the epoch."""
    elapsed_s: float
    """Seconds since the attempt began."""
    event: str = "sample"


read_sample = msgspec.json.Decoder(LoggedSample).decode
_sample_in: Callable[[Mapping[str, Any]], LoggedSample] = functools.partial(
    msgspec.convert, type=LoggedSample
)


def sample_of(event: Mapping[str, Any]) -> LoggedSample | None:
    """Return the load sample in an event; None for another event, and for a damaged sample."""
    if event["event"] != "sample":
        return None
    try:
        sample = _sample_in(event)
    except msgspec.ValidationError:
        return None
    return sample
