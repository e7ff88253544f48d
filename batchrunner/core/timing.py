"""Timeouts and pauses in seconds, suited to engines and disks; tests shorten them."""

from dataclasses import dataclass


@dataclass(slots=True)
class Timing:
    """Timeouts and pauses of the runner in seconds. The time limits of a job are in `LimitsSpec`."""

    load_poll: float = 0.25
    """Pause between two polls of the load.

    `/v1/loads` reads shared memory, so 2-10 polls a second are fine.
    """
    background_poll: float = 0.1
    """Pause between two polls of the load in a background run, which must notice other users soon."""
    status_timeout: float = 2.0
    """Timeout of a status request, such as a poll of the load."""
    server_open: float = 10.0
    """Timeout of a request before the first row, such as the one for the server's model."""
    silent_scheduler: float = 5.0
    """Maximum age of a scheduler's load sample. With an older one, the concurrency limit does not change."""
    model_check: float = 1.0
    """Pause between two checks of an attached server's model, and of a gateway's workers.

    A proxy may switch to another server without notice.
    """
    progress: float = 1.0
    """Minimum pause between two calls of a program's `on_progress`."""
    more_rows: float = 0.02
    """Maximum wait for the next row of a program's iterator. After it, the rows so far are sent."""
    iterator_end: float = 1.0
    """Maximum wait, after a stream was closed, for the end of the program's iterator, which may block."""
    stream_end: float = 1.0
    """Maximum wait for the end of a streamed reply after all its rows have ended."""
    bundle_fill: float = 0.015
    """Maximum wait of a row for other rows that can share its request."""
    first_retry: float = 0.25
    """Maximum pause after the first failed attempt at a row. It doubles with each further attempt."""
    longest_retry: float = 30.0
    """Maximum pause after any failed attempt at a row."""
    hook_import: float = 120.0
    """Time limit for the import of a job's Python functions."""
    hook_end: float = 1.0
    """How much longer than its time limit a Python function may run before its process is killed."""
    silent_copy: float = 60.0
    """Maximum time without progress of a process that copies the input. Then others no longer wait for it."""
    read_retries: tuple[float, ...] = (1.0, 5.0, 20.0)
    """Pauses between attempts to read rows from a network mount or an object store that is unavailable."""
    store_connect: float = 10.0
    """Timeout of a connection to an object store."""
    store_request: float = 120.0
    """Timeout of a request to an object store, including the transfer of its data."""
    store_retries: float = 30.0
    """Maximum time for which a request is retried, up to five times, while an object store is unavailable."""
    log_upload: float = 30.0
    """Minimum pause between two uploads of a run's logs to an object store."""
    stop_start: float = 1.0
    """Time for a command to begin to stop after a Ctrl-C before the first row. Then its process is ended."""
    stop_at_once: float = 10.0
    """Time for a command to end if it waits for no rows, for example after a second Ctrl-C.

    A process that takes longer is ended, whatever its threads do.
    """
    parts_appear: float = 75.0
    """Maximum wait for result files that another host has written. NFS may show an old directory for 60 s."""
    other_heartbeat: float = 6.0
    """Time for which heartbeats of workers on other machines are watched.

    A live worker writes one every 5 s.
    """
    part: float = 30.0
    """Maximum age of a part file's first row when the file is written, in the first ten minutes of a run.

    A part file is a Parquet file of results; it is written earlier if it is full.
    """
    launch_poll: float = 0.25
    """Pause between two checks whether a launched program is ready."""
    launch_word: float = 15.0
    """Pause between two log lines about a launched program that is still starting.

    Large models take minutes.
    """
    quick_death: float = 120.0
    """Maximum lifetime of a launched program whose death counts as quick. Time in a hang does not count."""
    first_restart: float = 1.0
    """Pause before the restart after a second quick death in succession. It doubles with each further one."""
    longest_restart: float = 60.0
    """Maximum pause before a restart of a launched program."""
    advise_timeout: float = 5.0
    """Timeout of the requests that `batchrun advise` sends to a server."""
    advise_metrics: float = 1.5
    """Pause between two polls of `/metrics` by `batchrun advise`.

    The reply is long, and its gauges lag by seconds.
    """
    ray_poll: float = 0.5
    """Pause between two checks of the workers of a job on a Ray cluster."""
    adapt: float = 30.0
    """Minimum length of the steady period from which flag tuning judges SGLang's flags during a run."""
    corpus: float = 30.0
    """Minimum pause between two checks of the corpora that the servers use for n-gram speculation."""
    corpus_load: float = 60.0
    """Timeout of a request that loads a corpus. A corpus of a million tokens takes about 2 s."""
    trial_steady: float = 10.0
    """Minimum length of the steady period that a trial of `batchrun tune` measures.

    It is long enough for many polls.
    """
    trial_judged: float = 5.0
    """Minimum length of a trial's steady period before the trial may end early as slower than the best."""


TIMING = Timing()
"""The timeouts and pauses in use."""
