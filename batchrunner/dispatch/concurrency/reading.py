"""What a controller gets to know of its scheduler at one moment. Pure."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Reading:
    """One sample of a scheduler: its gauges, and what the client knows at the same moment."""

    running: int
    queue: int
    in_flight: int
    """This run's requests at the scheduler."""
    rate: float
    """Rows that end at the scheduler, per second."""
    burst: float = 0.0
    """Rows that ended in the fullest recent tenth of a second."""
    usage: float = 0.0
    """Token usage, the share of the KV pool in use."""
    max_running: int | None = None
    """Most requests that the scheduler runs at once; None where it does not say."""
    decodes: bool = True
    """Whether rows are answered by decoding; else a forward pass ends them, and token usage says nothing."""
    fits: float | None = None
    """Rows that the KV pool holds on average; None before enough of them have ended."""
