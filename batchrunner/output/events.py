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
    from io import FileIO
    from pathlib import Path

TAIL_BYTES = 1 << 20
_HEAD = re.compile(rb'{"time":[0-9.]+,"elapsed_s":([0-9.]+),"event":"([a-z]+)"')


class EventLog:
    """Appends events; each has `time` (seconds since the epoch), `elapsed_s` (of this attempt) and `event`.

    Events that are written before the log is opened are kept, and written when it is.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: FileIO | None = None
        self._early: list[tuple[str, dict[str, Any]]] = []
        self._began = 0.0
        self._lost = 0

    def open(self) -> None:
        """Open the file and begin to count `elapsed_s`; raises StorageError."""
        with writing(self._path):
            self._file = self._path.open("ab", buffering=0)
        self._began = time.monotonic()

    def write(self, event: str, **values: Any) -> None:
        """Write one event; if the disk takes none, the next one that it takes says how many are missing.

        The attempt's first event is `start`; early events follow it.
        """
        if self._file is None:
            self._early.append((event, values))
            return
        self._append(self._file, event, values)
        early, self._early = self._early, []
        for name, known in early:
            self._append(self._file, name, known)

    def _append(self, file: FileIO, event: str, values: dict[str, Any]) -> None:
        line: dict[str, Any] = {
            "time": round(time.time(), 3),
            "elapsed_s": round(time.monotonic() - self._began, 3),
            "event": event,
            **values,
        }
        begin = b""
        if self._lost:
            line["events_lost"], begin = self._lost, b"\n"  # the last one may have been cut short
        frame = begin + orjson.dumps(line, default=str) + b"\n"
        try:
            self._lost = 0 if file.write(frame) == len(frame) else self._lost + 1
        except OSError:
            self._lost += 1

    def close(self) -> None:
        """Close the file; later events are not written."""
        if self._file is not None:
            self._file.close()
            self._file = None


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
