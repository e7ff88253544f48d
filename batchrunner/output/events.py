"""The event log of a task, as JSON lines: starts, samples of the engine's load, decisions, the end.

docs/reference/events.md has all events. A run in an object store publishes its logs whole, again and again.
"""

import contextlib
import logging
import re
import threading
import time
from collections.abc import Iterable, Iterator
from io import FileIO
from pathlib import Path
from typing import Any

import msgspec
import orjson

from batchrunner.core.timing import TIMING
from batchrunner.output.files import json_line, writing
from batchrunner.output.run_dir import RunDir
from batchrunner.output.samples import LoggedSample, read_sample

log = logging.getLogger(__name__)

TAIL_BYTES = 1 << 20
"""Bytes at the end of a log that are read to find its newest events."""
UPLOADED_PER_S = 256 << 10
"""Most bytes of a log that are published a second: one of 100 MB is published every seven minutes."""
_HEAD = re.compile(rb'{"time":(\d+(?:\.\d+)?),"elapsed_s":[\d.]+,"event":"([a-z]+)"')
_NO_LOG = (FileNotFoundError, IsADirectoryError)


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
        frame = begin + json_line(line, default=str)
        try:
            self._lost = 0 if file.write(frame) == len(frame) else self._lost + 1
        except OSError:
            self._lost += 1

    def close(self) -> None:
        """Close the file; later events are not written."""
        if self._file is not None:
            self._file.close()
            self._file = None


def read_events(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the events of a log in order; skips lines that a crash has torn. No log means no events."""
    return _events_in(_lines(path))


def _lines(path: Path) -> Iterator[bytes]:
    with contextlib.suppress(*_NO_LOG), path.open("rb") as file:
        yield from file


def attempt_spans(path: Path) -> list[tuple[float, float]]:
    """Return when each attempt in a log began, and when its last event was, in seconds since the epoch.

    Only the head of each line is parsed, since the log of a day has about 100 MB.
    """
    spans: list[tuple[float, float]] = []
    for line in _lines(path):
        if head := _HEAD.match(line):
            time_s = float(head[1])
            if head[2] == b"start" or not spans:
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


def last_sample(path: Path) -> LoggedSample | None:
    """Return the newest `sample` event of a log; None where its end holds none."""
    for line in _last_lines(path):
        head = _HEAD.match(line)
        if head and head[2] == b"sample":
            with contextlib.suppress(msgspec.DecodeError):  # a crash has torn the line
                return read_sample(line)
    return None


def last_reason(path: Path) -> str | None:
    """Return why the newest attempt of a log ended; None where it goes on or was killed."""
    ends = (event for event in _last_events(path) if event["event"] in {"start", "end"})
    return next((event.get("reason") or None for event in ends), None)


def _last_events(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the events in the last TAIL_BYTES of a log, newest first."""
    return _events_in(_last_lines(path))


def _last_lines(path: Path) -> Iterator[bytes]:
    """Yield the lines in the last TAIL_BYTES of a log, newest first."""
    lines: list[bytes] = []
    with contextlib.suppress(*_NO_LOG), path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - TAIL_BYTES))
        lines = file.read().splitlines()
    return reversed(lines)


def _events_in(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    for line in lines:
        with contextlib.suppress(orjson.JSONDecodeError):
            event = orjson.loads(line)
            if isinstance(event, dict) and event.keys() >= {"event", "time"}:
                yield event


@contextlib.contextmanager
def uploading_logs(run_dir: RunDir) -> Iterator[None]:
    """Publish the event log and the engines' logs of a task during the block, and at its end.

    A failure is logged: the rows are what matters. On a local file system nothing is done.
    """
    if run_dir.store.objects is None:
        yield
        return
    published: dict[Path, tuple[int, float]] = {}  # size, and when
    ended = threading.Event()

    def keep_publishing() -> None:
        while not ended.wait(TIMING.log_upload):
            _publish_logs(run_dir, published)

    thread = threading.Thread(target=keep_publishing, name="logs", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        _publish_logs(run_dir, published, at_end=True)


def _publish_logs(run_dir: RunDir, published: dict[Path, tuple[int, float]], *, at_end: bool = False) -> None:
    """Publish the logs that have grown, a long one not each time."""
    for path in (run_dir.events, *sorted(run_dir.log_directory.glob("*.log"))):
        with contextlib.suppress(FileNotFoundError):
            size, now = path.stat().st_size, time.monotonic()
            before, at = published.get(path, (0, float("-inf")))
            if size != before and (at_end or now - at >= size / UPLOADED_PER_S):
                try:
                    run_dir.store.publish(path)
                    published[path] = size, now
                except OSError as failure:
                    log.warning("%s: was not uploaded: %s", path.name, failure)
