"""The event log of a task, as JSON lines: starts, samples of the engine's load, decisions, the end."""

import contextlib
import re
import time
from collections.abc import Iterable, Iterator
from io import FileIO
from pathlib import Path
from typing import Any

import orjson

from batchrunner.output.event_shapes import is_event
from batchrunner.output.files import writing

TAIL_BYTES = 1 << 20
"""Bytes at the end of a log that are read to find its newest events."""
_HEAD = re.compile(rb'{"time":(\d{1,15}(?:\.\d+)?),"elapsed_s":(\d{1,15}(?:\.\d+)?),"event":"([a-z]+)"')


class EventLog:
    """Appends events. Each has `time` (seconds since the epoch), `elapsed_s` (of the attempt) and `event`.

    Events that come before the log is opened are written after its first event.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: FileIO | None = None
        self._early: list[tuple[str, dict[str, Any]]] = []
        self._began = 0.0
        self._lost = 0

    def open(self) -> None:
        """Open the file for appending and begin to count `elapsed_s`; raises StorageError."""
        with writing(self._path):
            self._file = self._path.open("ab", buffering=0)
        self._began = time.monotonic()

    def write(self, event: str, **values: Any) -> None:
        """Append one event; one that cannot be written is dropped and counted in the next `events_lost`.

        The first event of an attempt is `start`; events from before the log was opened follow it.
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
            line["events_lost"], begin = self._lost, b"\n"  # the event before may lack its end
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


_NO_LOG = (FileNotFoundError, IsADirectoryError)


def read_events(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the events of a log in order; skips lines that a crash has torn. No log means no events."""
    return _events_in(_lines(path))


def _lines(path: Path) -> Iterator[bytes]:
    with contextlib.suppress(*_NO_LOG), path.open("rb") as file:
        yield from file


def attempts_in(path: Path) -> tuple[int, float]:
    """Return the number of attempts in a log, and their wall time together in seconds.

    A killed attempt counts up to its last event. Only the head of each line is parsed, since the log of a
    day has about 100 MB.
    """
    attempts, total, last = 0, 0.0, 0.0
    for line in _lines(path):
        if head := _HEAD.match(line):
            if head[3] == b"start":
                attempts += 1
                total += last
            last = float(head[2])
    return attempts, total + last


def attempt_spans(path: Path) -> list[tuple[float, float]]:
    """Return when each attempt in a log began, and when its last event was, in seconds since the epoch."""
    spans: list[tuple[float, float]] = []
    for line in _lines(path):
        if head := _HEAD.match(line):
            time_s = float(head[1])
            if head[3] == b"start" or not spans:
                spans.append((time_s, time_s))
            spans[-1] = (spans[-1][0], max(spans[-1][1], time_s))
    return spans


def union_s(spans: Iterable[tuple[float, float]]) -> float:
    """Return the seconds that lie in at least one of these spans of time."""
    total, until = 0.0, float("-inf")
    for began, ended in sorted(spans):
        total += max(0.0, ended - max(began, until))
        until = max(until, ended)
    return total


def last_sample(path: Path) -> dict[str, Any] | None:
    """Return the newest `sample` event of a log; None where its end holds none."""
    return next((event for event in _last_events(path) if event["event"] == "sample"), None)


def last_reason(path: Path) -> str | None:
    """Return why the newest attempt of a log ended; None where it goes on or was killed."""
    ends = (event for event in _last_events(path) if event["event"] in {"start", "end"})
    return next((str(event.get("reason") or "") or None for event in ends), None)


def _last_events(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the events in the last TAIL_BYTES of a log, newest first."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - TAIL_BYTES))
            lines = file.read().splitlines()
    except _NO_LOG:
        return iter(())
    return _events_in(reversed(lines))


def _events_in(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    for line in lines:
        try:
            event = orjson.loads(line)
        except orjson.JSONDecodeError:
            continue
        if isinstance(event, dict) and is_event(event):
            yield event
