"""The run's story as JSON lines: starts, samples of the engine's load, decisions, the end."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import orjson

from batchrunner.storage import writing

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

TAIL_BYTES = 1 << 20


class EventLog:
    """Appends events; each has `time` (seconds since the epoch), `elapsed_s` (of this start) and `event`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with writing(path):
            self._file = path.open("ab", buffering=0)
        self._began = time.monotonic()

    def write(self, event: str, **values: Any) -> None:
        """Write one event; raises StorageError."""
        elapsed_s = round(time.monotonic() - self._began, 3)
        line = {"time": round(time.time(), 3), "elapsed_s": elapsed_s, "event": event, **values}
        with writing(self._path):
            self._file.write(orjson.dumps(line, default=str) + b"\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_events(path: Path) -> Iterator[dict[str, Any]]:
    """Yield a log's events in order; a line torn by a crash is left out."""
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return
    with file:
        for line in file:
            try:
                event = orjson.loads(line)
            except orjson.JSONDecodeError:
                continue
            if isinstance(event, dict) and "event" in event:
                yield event


def earlier_wall_s(path: Path) -> tuple[int, float]:
    """Return how many starts a log tells of, and their wall time together in seconds.

    A start that was killed counts up to its last event.
    """
    starts, total, last = 0, 0.0, 0.0
    for event in read_events(path):
        if event["event"] == "start":
            starts += 1
            total += last
            last = 0.0
        last = max(last, float(event.get("elapsed_s", 0.0)))
    return starts, total + last


def last_sample(path: Path) -> dict[str, Any] | None:
    """Return the newest sample of a log, read from its end."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - TAIL_BYTES))
            lines = file.read().splitlines()
    except FileNotFoundError:
        return None
    for line in reversed(lines):
        try:
            event = orjson.loads(line)
        except orjson.JSONDecodeError:
            continue
        if isinstance(event, dict) and event.get("event") == "sample":
            return event
    return None
