"""The run's story as JSON lines: starts, samples of the engine's load, decisions, the end."""

from __future__ import annotations

import contextlib
import re
import time
from typing import TYPE_CHECKING, Any

import orjson

from batchrunner.output.run_dir import writing

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

TAIL_BYTES = 1 << 20
_HEAD = re.compile(rb'{"time":[0-9.]+,"elapsed_s":([0-9.]+),"event":"([a-z]+)"')


class EventLog:
    """Appends events; each has `time` (seconds since the epoch), `elapsed_s` (of this start) and `event`."""

    def __init__(self, path: Path) -> None:
        with writing(path):
            self._file = path.open("ab", buffering=0)
        self._began = time.monotonic()
        self._lost = 0

    def write(self, event: str, **values: Any) -> None:
        """Write one event; where the disk takes none, the next that it takes tells how many are missing."""
        elapsed_s = round(time.monotonic() - self._began, 3)
        line: dict[str, Any] = {
            "time": round(time.time(), 3),
            "elapsed_s": elapsed_s,
            "event": event,
            **values,
        }
        start = b""
        if self._lost:
            line["events_lost"], start = self._lost, b"\n"  # the last one may have been cut short
        frame = start + orjson.dumps(line, default=str) + b"\n"
        try:
            self._lost = 0 if self._file.write(frame) == len(frame) else self._lost + 1
        except OSError:
            self._lost += 1

    def close(self) -> None:
        """Close the file."""
        self._file.close()


_NONE = (FileNotFoundError, IsADirectoryError)


def read_events(path: Path) -> Iterator[dict[str, Any]]:
    """Return a log's events in order; a line torn by a crash is left out."""
    return _events_in(_lines(path))


def _lines(path: Path) -> Iterator[bytes]:
    with contextlib.suppress(*_NONE), path.open("rb") as file:
        yield from file


def earlier_wall_s(path: Path) -> tuple[int, float]:
    """Return how many starts a log tells of, and their wall time together in seconds.

    A start that was killed counts up to its last event. Of each line only the head is looked at: a day's
    log has a hundred megabytes.
    """
    starts, total, last = 0, 0.0, 0.0
    for line in _lines(path):
        if head := _HEAD.match(line):
            if head[2] == b"start":
                starts += 1
                total += last
            last = float(head[1])
    return starts, total + last


def span(path: Path) -> tuple[float, float] | None:
    """Return when a log's first and last events were written (seconds since the epoch); None without any."""
    first, last = next(read_events(path), None), next(_last_events(path), None)
    return (first["time"], last["time"]) if first and last else None


def last_sample(path: Path) -> dict[str, Any] | None:
    """Return the newest sample of a log."""
    return next((event for event in _last_events(path) if event["event"] == "sample"), None)


def _last_events(path: Path) -> Iterator[dict[str, Any]]:
    """Return the events at the end of a log, newest first."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - TAIL_BYTES))
            lines = file.read().splitlines()
    except _NONE:
        return iter(())
    return _events_in(reversed(lines))


def _events_in(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    for line in lines:
        try:
            event = orjson.loads(line)
        except orjson.JSONDecodeError:
            continue
        if isinstance(event, dict) and "event" in event:
            yield event
