"""The state of a run at one moment, as displays show it and the event log has it (event `sample`)."""

from __future__ import annotations

from dataclasses import asdict

import msgspec
from msgspec import UNSET, UnsetType

from batchrunner.core.engine_info import SchedulerLoad


class SchedulerSample(msgspec.Struct, kw_only=True):
    """A reading of a scheduler's load, and what the client adds to it. See `SchedulerLoad` for the former."""

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
    window: int | UnsetType = UNSET
    """Concurrency limit of the scheduler; unset where the job sets one for all."""
    corner: str | UnsetType = UNSET
    """Its load state, a `Corner`; unset where no state has lasted long enough."""
    output_tokens_per_s: float | UnsetType = UNSET
    """Output tokens a second; unset where it shares its route with other schedulers, like `retractions`."""
    retractions: int | UnsetType = UNSET
    """Requests that the scheduler retracted during the run."""

    @classmethod
    def of(cls, load: SchedulerLoad) -> SchedulerSample:
        """Return a reading as a sample."""
        return cls(**asdict(load))


class RolloutSample(msgspec.Struct, kw_only=True):
    """The rollouts of a run."""

    open: int
    waiting_for_tools: int
    """Open rows that wait for no answer."""
    blocked: int
    """Open rows that wait since another row blocks their process."""
    turns: int


class BackgroundSample(msgspec.Struct, kw_only=True):
    """Whose the engine was in a background run."""

    our_share: float
    """Share of the engine's time, from 0 to 1, like `users_share`."""
    users_share: float
    rows_given_back: int
    """Rows that were preempted for the users."""
    tokens_lost: int
    """Output tokens of these rows."""


class RunSample(msgspec.Struct, kw_only=True):
    """The state of a run: its rows, its rates a second, and the load of its engine."""

    rows_total: int
    """Rows of the run; 0 where nobody knows it. Rows of earlier starts count, here and below."""
    rows_done: int
    rows_failed: int
    rows_reused: int
    rows_per_s: float
    time_left_s: float | None
    """Seconds to the end; None while nobody can know."""
    stopping: bool
    output_tokens_per_s: float
    prompt_tokens_per_s: float
    cached_tokens_per_s: float
    output_tokens: int
    """Tokens of this start, like `prompt_tokens` and `cached_tokens`."""
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
    """The newest load sample; empty where the load is unknown."""
    bands: dict[str, tuple[int, int]]
    """The fewest and most waiting requests of a healthy queue, by scheduler."""
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
