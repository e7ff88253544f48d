"""The event log of a task, in JSON Lines: starts, load samples, decisions, the end.

docs/reference/events.md lists all events. A run in an object store uploads its complete logs now and then.
"""

import contextlib
import functools
import logging
import re
import time
from collections.abc import Iterable, Iterator
from io import FileIO
from pathlib import Path
from typing import Any

import msgspec
import orjson

from batchrunner.core.processes import repeating
from batchrunner.core.timing import TIMING
from batchrunner.output.files import json_line, writing
from batchrunner.output.run_dir import RunDir
from batchrunner.output.samples import LoggedSample, read_sample

log = logging.getLogger(__name__)

TAIL_BYTES = 1 << 20
"""Number of bytes at the end of a log that are searched for its newest events."""
UPLOADED_PER_S = 256 << 10
"""Maximum mean rate of the uploads of a log, in bytes per second. A log of 100 MB is uploaded every seven
minutes."""
_HEAD = re.compile(rb'{"time":(\d+(?:\.\d+)?),"elapsed_s":[\d.]+,"event":"([a-z]+)"')
_NO_LOG = (FileNotFoundError, IsADirectoryError)


class EventLog:
    """Appends events. Each has `time` (seconds since the epoch), `elapsed_s` (since `open`) and `event`.

    Events from before `open` are held back. They are written right after `start`, the first event after
    `open`.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: FileIO | None = None
        self._early: list[tuple[str, dict[str, Any]]] = []
        self._began = 0.0
        self._lost = 0

    def open(self) -> None:
        """Open the file for appending, and start `elapsed_s` at 0; raises StorageError."""
        with writing(self._path):
            self._file = self._path.open("ab", buffering=0)
        self._began = time.monotonic()

    def write(self, event: str, **values: Any) -> None:
        """Append an event.

        An event that cannot be written is dropped. The next event that is written counts it in `events_lost`.
        """
        if self._file is None:
            self._early.append((event, values))
            return
        self._append(self._file, event, values)
        for early_event, early_values in self._early:
            self._append(self._file, early_event, early_values)
        self._early = []

    def _append(self, file: FileIO, event: str, values: dict[str, Any]) -> None:
        line: dict[str, Any] = {
            "time": round(time.time(), 3),
            "elapsed_s": round(time.monotonic() - self._began, 3),
            "event": event,
            **values,
        }
        begin = b""
        if self._lost:
            line["events_lost"], begin = self._lost, b"\n"  # end the line that the lost event may have begun
        frame = begin + json_line(line, default=str)
        try:
            self._lost = 0 if file.write(frame) == len(frame) else self._lost + 1
        except OSError:
            self._lost += 1

    def close(self) -> None:
        """Close the file; later events are dropped."""
        if self._file is not None:
            self._file.close()
            self._file = None


def read_events(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the events of a log in order, without lines that a crash has torn; none for a missing log."""
    return _events_in(_lines(path))


def _lines(path: Path) -> Iterator[bytes]:
    with contextlib.suppress(*_NO_LOG), path.open("rb") as file:
        yield from file


def attempt_spans(path: Path) -> list[tuple[float, float]]:
    """Return the times of the first and the last event of each attempt, in seconds since the epoch.

    Only the head of each line is parsed, because the log of a day has about 100 MB.
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
    total_s, covered_until = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total_s += max(0.0, end - max(begin, covered_until))
        covered_until = max(covered_until, end)
    return total_s


def last_sample(path: Path) -> LoggedSample | None:
    """Return the newest `sample` event of a log; None if the last TAIL_BYTES hold none."""
    for line in _last_lines(path):
        head = _HEAD.match(line)
        if head and head[2] == b"sample":
            with contextlib.suppress(msgspec.DecodeError):  # a crash has torn the line
                return read_sample(line)
    return None


def last_reason(path: Path) -> str | None:
    """Return why the newest attempt of a log ended; None if it runs or was killed."""
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
    """Upload the event log and the engine logs of a task during the block and at its end.

    A failure is only logged, because rows matter more. A run on a file system uploads nothing.
    """
    if run_dir.store.objects is None:
        yield
        return
    uploads: dict[Path, tuple[int, float]] = {}  # size and time of the last upload
    upload = functools.partial(_upload_logs, run_dir, uploads)
    try:
        with repeating(upload, TIMING.log_upload, thread="logs"):
            yield
    finally:
        upload(at_end=True)


def _upload_logs(run_dir: RunDir, uploads: dict[Path, tuple[int, float]], *, at_end: bool = False) -> None:
    """Upload the logs that have grown, long ones less often."""
    for path in (run_dir.events, *sorted(run_dir.log_directory.glob("*.log"))):
        with contextlib.suppress(FileNotFoundError):
            size, now = path.stat().st_size, time.monotonic()
            last_size, last_at = uploads.get(path, (0, float("-inf")))
            if size != last_size and (at_end or now - last_at >= size / UPLOADED_PER_S):
                try:
                    run_dir.store.publish(path)
                    uploads[path] = size, now
                except OSError as failure:
                    log.warning("%s: was not uploaded: %s", path.name, failure)
