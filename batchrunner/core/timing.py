"""Periods and pauses in seconds that suit the behaviour of engines and disks; tests shorten them."""

from dataclasses import dataclass


@dataclass(slots=True)
class Timing:
    """Seconds that the runner waits, by purpose. The limits of a job are in `LimitsSpec`."""

    load_poll: float = 0.25
    """Pause between two polls of the load. `/v1/loads` reads shared memory: 2-10 polls a second are fine."""
    background_poll: float = 0.1
    """Pause between two polls during a background run, which has to notice the server's users soon."""
    status_timeout: float = 2.0
    """Timeout of a status request, such as a poll of the load."""
    server_open: float = 10.0
    """Timeout of a request before the first row, such as for the server's model."""
    silent_scheduler: float = 5.0
    """Time without a new load sample after which the window of a scheduler stays as it is."""
    model_check: float = 1.0
    """Pause between two requests for the model of an attached server, which a proxy may change unnoticed, or
    for the workers of a gateway."""
    progress: float = 1.0
    """Shortest pause between two calls of a program's `on_progress`."""
    more_rows: float = 0.02
    """Pause of a program's iterator after which the rows so far are sent without waiting for more."""
    iterator_end: float = 1.0
    """Longest wait for a program's iterator, which may block, when its stream is closed."""
    stream_end: float = 1.0
    """Longest wait for the end of a reply that has all its rows."""
    bundle_fill: float = 0.015
    """Longest wait of a row for other rows to share its request."""
    first_retry: float = 0.25
    """Longest pause after the first attempt of a row; doubles with each further attempt."""
    longest_retry: float = 30.0
    """Longest pause after any attempt of a row."""
    hook_import: float = 120.0
    """Time limit for the import of a job's Python functions."""
    hook_end: float = 1.0
    """Longest wait for a Python function over its time limit, before its process is killed."""
    silent_copy: float = 60.0
    """Time without progress after which a process that makes a copy of the input is not waited for."""
    read_retries: tuple[float, ...] = (1.0, 5.0, 20.0)
    """Pauses between attempts to read rows from a mount or a store that is away."""
    store_connect: float = 10.0
    """Timeout of a connection to an object store."""
    store_request: float = 120.0
    """Timeout of a request to an object store, including the transfer of a part."""
    store_retries: float = 30.0
    """Time in which a request that an object store refuses for now is retried, up to five times."""
    log_upload: float = 30.0
    """Shortest pause between two uploads of a run's logs to an object store."""
    stop_start: float = 1.0
    """Time after a first Ctrl-C, before any row is sent, in which a command must begin to end by itself."""
    stop_at_once: float = 10.0
    """Time in which a command with nothing to wait for must end, such as after a second Ctrl-C; afterwards
    its process is ended, whatever its threads do."""
    parts_appear: float = 75.0
    """Longest wait for parts of another host; NFS may show an old directory for 60 s."""
    other_heartbeat: float = 6.0
    """Time in which a live worker on another machine shows a heartbeat; it writes one every 5 s."""
    part: float = 30.0
    """Longest time from a part's first row until the part is written, full or not."""
    launch_poll: float = 0.25
    """Pause between two checks whether a launched program is ready."""
    launch_word: float = 15.0
    """Pause between two log lines about a program that still starts; large models load for minutes."""
    quick_death: float = 120.0
    """Lifetime of a program below which its death counts as quick. A hang does not count as life."""
    first_restart: float = 1.0
    """Pause before a restart after the second quick death in succession; doubles with each further one."""
    longest_restart: float = 60.0
    """Longest pause before a restart."""
    advise_timeout: float = 5.0
    """Timeout of the requests of `advise` to a server."""
    advise_metrics: float = 1.5
    """Pause between two polls of `/metrics` by `advise`: a long text, whose gauges are seconds old."""
    ray_poll: float = 0.5
    """Pause between two checks of the workers of a job on a Ray cluster."""
    adapt: float = 30.0
    """Shortest steady period from which flags are judged during a run."""
    trial_steady: float = 10.0
    """Shortest steady period that a trial of `tune` measures, many polls long."""
    trial_judged: float = 5.0
    """Steady period, beyond one generation, before a trial may count as slower."""


TIMING = Timing()
"""The values in use."""
