"""Periods and pauses that follow from how engines and disks behave, in seconds; tests shorten them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Timing:
    """The seconds that the runner waits, by what it waits for. A job's own limits are in `LimitsSpec`."""

    load_poll: float = 0.25
    """Between two polls of the load: `/v1/loads` reads shared memory and bears 2-10 polls a second."""
    status_timeout: float = 2.0
    """For the answer to a status request, such as a poll of the load."""
    silent_scheduler: float = 5.0
    """Without a fresh load sample, after which a scheduler's window is held."""
    worker_list: float = 15.0
    """Between two reads of a gateway's list of workers, which others change."""
    first_retry: float = 0.25
    """Longest pause after the first attempt of a row; it doubles with each further attempt."""
    longest_retry: float = 30.0
    """Longest pause after any attempt of a row."""
    read_retries: tuple[float, ...] = (1.0, 5.0, 20.0)
    """Before each new try to read rows that could not be read: a mount comes back, a store answers."""
    part: float = 30.0
    """From a part's first row until it is written, even if it is not full."""
    launch_poll: float = 0.25
    """Between two looks whether a launched program is ready."""
    launch_word: float = 15.0
    """Between two log lines that say that a program still starts: large models load for minutes."""
    quick_death: float = 120.0
    """Life of a program below which its death is a quick one. The silence of a hang is not life."""
    first_restart: float = 1.0
    """Before the restart after the second quick death in succession; it doubles with each further one."""
    longest_restart: float = 60.0
    """Longest pause before a restart."""
    advise_timeout: float = 5.0
    """For the answers of a server that `advise` looks at."""
    advise_metrics: float = 1.5
    """Between two polls of `/metrics` by `advise`: a long text, whose gauges are seconds old."""
    trial_steady: float = 10.0
    """Steady time for which a trial of `tune` is measured at least: many polls."""
    trial_judged: float = 5.0
    """Steady time, besides one generation, before a trial may count as behind."""


TIMING = Timing()
"""The values in force."""
