"""Periods and pauses that follow from how engines and disks behave, in seconds; tests shorten them."""

from dataclasses import dataclass

from batchrunner.core.errors import AttemptFailedError, EngineBusyError, RequestError


@dataclass(slots=True)
class Timing:
    """The seconds that the runner waits, by what it waits for. A job's own limits are in `LimitsSpec`."""

    load_poll: float = 0.25
    """Pause between two polls of the load; `/v1/loads` reads shared memory, 2-10 polls a second are fine."""
    background_poll: float = 0.1
    """Pause between two polls of an engine that serves others first."""
    status_timeout: float = 2.0
    """Longest wait for the answer to a status request, such as a poll of the load."""
    server_open: float = 10.0
    """Longest wait for the answer to what a server is asked before rows are sent, such as its model."""
    silent_scheduler: float = 5.0
    """Time without a fresh load sample after which a scheduler's window is held."""
    model_check: float = 1.0
    """Pause between two questions to an attached server for its model, which a proxy may change unseen, and
    to a gateway for its workers."""
    progress: float = 1.0
    """Shortest pause between two calls of a program's `on_progress`."""
    more_rows: float = 0.02
    """Pause of a program's iterator after which the rows that it gave are sent without waiting for others."""
    iterator_end: float = 1.0
    """Longest wait for a program's iterator to end, when its stream is closed; it may block."""
    stream_end: float = 1.0
    """Longest wait for the end of an answer that has all its rows."""
    bundle_fill: float = 0.015
    """Longest wait of a row for others that share its request."""
    first_retry: float = 0.25
    """Longest pause after the first attempt of a row; it doubles with each further attempt."""
    longest_retry: float = 30.0
    """Longest pause after any attempt of a row."""
    hook_import: float = 120.0
    """Longest time in which the modules of a job's Python functions are imported."""
    hook_end: float = 1.0
    """Longest wait for a Python function to end that was told to, before its process is killed."""
    silent_copy: float = 60.0
    """Time without progress after which a process that makes a copy of the input is not waited for."""
    read_retries: tuple[float, ...] = (1.0, 5.0, 20.0)
    """Pauses before each new try to read rows, for a mount to come back or a store to answer."""
    store_connect: float = 10.0
    """Longest wait for a connection to an object store."""
    store_request: float = 120.0
    """Longest time of one request to an object store, the transfer of a part included."""
    store_retries: float = 30.0
    """Time in which a request that an object store refuses for now is sent again, up to five times."""
    log_upload: float = 30.0
    """Shortest pause between two uploads of a run's logs to an object store."""
    stop_start: float = 1.0
    """Longest time from a first Ctrl-C, before any row is sent, until a command begins to end by itself."""
    stop_at_once: float = 10.0
    """Longest time in which a command ends by itself that has nothing to wait for, such as after a second
    Ctrl-C; then its process is ended, whatever its threads do."""
    parts_appear: float = 75.0
    """Longest wait for parts that another host has written; NFS may show an old directory for 60 s."""
    other_heartbeat: float = 6.0
    """Time in which a task on another machine shows a heartbeat, if it runs; it has one every 5 s."""
    part: float = 30.0
    """Time from a part's first row until it is written, even if it is not full."""
    launch_poll: float = 0.25
    """Pause between two checks whether a launched program is ready."""
    launch_word: float = 15.0
    """Pause between two log lines about a program that is still starting; large models load for minutes."""
    quick_death: float = 120.0
    """Lifetime of a program below which its death counts as quick. The time of a hang is not counted."""
    first_restart: float = 1.0
    """Pause before a restart after the second quick death in succession; doubles with each further one."""
    longest_restart: float = 60.0
    """Longest pause before a restart."""
    advise_timeout: float = 5.0
    """Longest wait for the answers of a server that `advise` examines."""
    advise_metrics: float = 1.5
    """Pause between two polls of `/metrics` by `advise`, a long text whose gauges are seconds old."""
    ray_poll: float = 0.5
    """Pause between two looks at the workers of a job on a Ray cluster."""
    adapt: float = 30.0
    """Shortest steady work by which the flags of servers are judged while a run goes on."""
    trial_steady: float = 10.0
    """Shortest steady time for which a trial of `tune` is measured, many polls long."""
    trial_judged: float = 5.0
    """Steady time, in addition to one generation, before a trial may count as slower."""


TIMING = Timing()
"""The values in force."""


def pause_before_retry(
    error: RequestError, *, tries: int, failures: int, max_attempts: int, jitter: float
) -> float | None:
    """Return the seconds until the next try; None means that the row has failed for good.

    `tries` counts all tries of the row, including this one. `failures` counts the tries that failed possibly
    because of the row; a busy engine is not counted. `jitter` is uniform in
    [0, 1).

    The pause doubles with each try and is then drawn from its upper half ("equal jitter" in Amazon's
    *Exponential backoff and jitter*, 2015), so that rows refused together do not return together. A server's
    Retry-After is a lower bound, but at most the longest pause, so that a server that recovers early is used.
    """
    if not isinstance(error, (AttemptFailedError, EngineBusyError)):
        return None
    if isinstance(error, AttemptFailedError) and failures >= max_attempts:
        return None
    ceiling = min(TIMING.longest_retry, TIMING.first_retry * 2.0 ** min(tries - 1, 10))
    pause = ceiling * (0.5 + 0.5 * jitter)
    if isinstance(error, EngineBusyError) and error.retry_after_s is not None:
        pause = max(pause, min(error.retry_after_s, TIMING.longest_retry))
    return pause
