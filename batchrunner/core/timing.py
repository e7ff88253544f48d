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
    """If a scheduler has sent no new load sample for this time, its window stays as it is until one comes."""
    model_check: float = 1.0
    """Pause between two checks of an attached server's model, which a proxy may exchange unnoticed, or of a
    gateway's workers."""
    progress: float = 1.0
    """Shortest pause between two calls of a program's `on_progress`."""
    more_rows: float = 0.02
    """If a program's iterator yields no row for this time, the rows so far are sent."""
    iterator_end: float = 1.0
    """Longest wait for a program's iterator, which may block, when its stream is closed."""
    stream_end: float = 1.0
    """Longest wait for the end of a streamed reply after all its rows have ended."""
    bundle_fill: float = 0.015
    """Longest wait of a row for other rows to share its request."""
    first_retry: float = 0.25
    """Longest pause after the first attempt of a row; doubles with each further attempt."""
    longest_retry: float = 30.0
    """Longest pause after any attempt of a row."""
    hook_import: float = 120.0
    """Time limit for the import of a job's Python functions."""
    hook_end: float = 1.0
    """Time by which a Python function may exceed its time limit before its process is killed."""
    silent_copy: float = 60.0
    """If a process that copies the input makes no progress for this time, others no longer wait for it."""
    read_retries: tuple[float, ...] = (1.0, 5.0, 20.0)
    """Pauses between attempts to read rows from a mount or a store that is away."""
    store_connect: float = 10.0
    """Timeout of a connection to an object store."""
    store_request: float = 120.0
    """Timeout of a request to an object store, including the transfer of its data."""
    store_retries: float = 30.0
    """Time for which a request is retried, up to five times, while an object store refuses it for now."""
    log_upload: float = 30.0
    """Shortest pause between two uploads of a run's logs to an object store."""
    stop_start: float = 1.0
    """Time within which a command must begin to end by itself after a first Ctrl-C before any row is sent;
    afterwards its process is ended."""
    stop_at_once: float = 10.0
    """Time within which a command must end once it has nothing to wait for, such as after a second Ctrl-C;
    afterwards its process is ended, whatever its threads do."""
    parts_appear: float = 75.0
    """Longest wait for part files that another host wrote, because NFS may show an old directory for 60 s."""
    other_heartbeat: float = 6.0
    """Time for which the heartbeats of workers on other machines are watched; a live worker writes one every
    5 s."""
    part: float = 30.0
    """Longest time from the first row of a part file until the file is written, full or not, in the first ten
    minutes of a run."""
    launch_poll: float = 0.25
    """Pause between two checks whether a launched program is ready."""
    launch_word: float = 15.0
    """Pause between two log lines about a program that is still starting; large models load for minutes."""
    quick_death: float = 120.0
    """A program that lived for less than this time died a quick death. Time in a hang does not count."""
    first_restart: float = 1.0
    """Pause before a restart after the second quick death in succession; doubles with each further one."""
    longest_restart: float = 60.0
    """Longest pause before a restart."""
    advise_timeout: float = 5.0
    """Timeout of the requests of `advise` to a server."""
    advise_metrics: float = 1.5
    """Pause between two polls of `/metrics` by `advise`. The reply is long, and its gauges lag by seconds."""
    ray_poll: float = 0.5
    """Pause between two checks of the workers of a job on a Ray cluster."""
    adapt: float = 30.0
    """Minimum steady period from which flags are judged during a run."""
    corpus: float = 30.0
    """Shortest pause between two looks at the corpora of a server with n-gram speculation."""
    corpus_load: float = 60.0
    """Timeout of a request that loads a corpus, which takes about 2 s for a million tokens."""
    trial_steady: float = 10.0
    """Minimum steady period that a trial of `tune` measures, so that it has many polls."""
    trial_judged: float = 5.0
    """Minimum steady period before a trial may end as slower than the best. One generation of rows must have
    ended, too."""


TIMING = Timing()
"""The values in use."""
