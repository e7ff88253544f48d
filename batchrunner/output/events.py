"""The event log of a task (a worker's share of a run), in JSON Lines.

It has the starts, the load samples, the decisions and the ends. docs/reference/events.md lists all events. A
run in an object store uploads its logs again as they grow.
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
"""Number of bytes at the end of an event log that are searched for the newest events."""
UPLOADED_PER_S = 256 << 10
"""Maximum mean rate of the uploads of a log, in bytes per second.

Each upload sends the whole log, so a log of 100 MB is uploaded about every 6.5 minutes.
"""
_HEAD = re.compile(rb'{"time":(\d+(?:\.\d+)?),"elapsed_s":[\d.]+,"event":"([a-z]+)"')
_NO_LOG = (FileNotFoundError, IsADirectoryError)


class EventLog:
    """Appends events. Each has `time` (seconds since the Unix epoch), `elapsed_s` (since `open`) and `event`.

    Events before `open` are held back. They are written right after `start`, the first event after `open`.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: FileIO | None = None
        self._early: list[tuple[str, dict[str, Any]]] = []
        self._began = 0.0
        self._lost = 0

    def open(self) -> None:
        """Open the file for appending, and start `elapsed_s` at 0.

        Raises StorageError if the file cannot be opened.
        """
        with writing(self._path):
            self._file = self._path.open("ab", buffering=0)
        self._began = time.monotonic()

    def write(self, event: str, **values: Any) -> None:
        """Append an event. Before `open`, the event is held back.

        It is then written after the first event that follows `open`. An event that cannot be written is
        dropped. The next one that can be written has the number of dropped events in `events_lost`.
        """
        if self._file is None:  # `open` has not been called yet.
            self._early.append((event, values))
            return
        self._append(self._file, event, values)
        # `start` is the first event after `open`. The events that were held back follow it.
        for early_event, early_values in self._early:
            self._append(self._file, early_event, early_values)
        self._early = []

    def _append(self, file: FileIO, event: str, values: dict[str, Any]) -> None:
        """Write an event as a line, or count it as lost."""
        line: dict[str, Any] = {
            "time": round(time.time(), 3),
            "elapsed_s": round(time.monotonic() - self._began, 3),
            "event": event,
            **values,
        }
        line_break = b""
        if self._lost:
            line["events_lost"] = self._lost
            # The lost event may have left an incomplete line, so this one begins on a new line.
            line_break = b"\n"
        content = line_break + json_line(line, default=str)
        try:
            is_written = file.write(content) == len(content)
        except OSError:
            is_written = False
        self._lost = 0 if is_written else self._lost + 1

    def close(self) -> None:
        """Close the file; later events are dropped."""
        if self._file is not None:
            self._file.close()
            self._file = None


def read_events(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the events of a log in order, without incomplete lines; nothing if the log is missing."""
    return _events_in(_lines(path))


def _lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of a log; nothing if the log is missing."""
    with contextlib.suppress(*_NO_LOG), path.open("rb") as file:
        yield from file


def attempt_spans(path: Path) -> list[tuple[float, float]]:
    """Return the times of the first and the last event of each attempt, in seconds since the Unix epoch.

    Only the start of each line is parsed, because the log of a day has about 100 MB.
    """
    spans: list[tuple[float, float]] = []
    for line in _lines(path):
        if head := _HEAD.match(line):
            time_s = float(head[1])
            # If a crash has damaged the line with `start`, the first line counts instead.
            if head[2] == b"start" or not spans:
                spans.append((time_s, time_s))
            spans[-1] = (spans[-1][0], max(spans[-1][1], time_s))
    return spans


def union_s(spans: Iterable[tuple[float, float]]) -> float:
    """Return the total seconds that the time spans cover, with overlaps counted once."""
    total_s, covered_until = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total_s += max(0.0, end - max(begin, covered_until))
        covered_until = max(covered_until, end)
    return total_s


def last_sample(path: Path) -> LoggedSample | None:
    """Return the newest `sample` event of a log; None if there is none in the last TAIL_BYTES."""
    for line in _last_lines(path):
        head = _HEAD.match(line)
        if head and head[2] == b"sample":
            # If a crash has left this line incomplete, try an older one.
            with contextlib.suppress(msgspec.DecodeError):
                return read_sample(line)
    return None


def last_end(path: Path) -> dict[str, Any]:
    """Return the `end` event of a log's newest attempt; empty if the attempt is running or was killed."""
    ends = (event for event in _last_events(path) if event["event"] in {"start", "end"})
    newest = next(ends, {})
    return newest if newest.get("event") == "end" else {}


def _last_events(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the events in the last TAIL_BYTES of a log, newest first."""
    return _events_in(_last_lines(path))


def _last_lines(path: Path) -> Iterator[bytes]:
    """Yield the lines in the last TAIL_BYTES of a log, newest first. The oldest may lack its beginning."""
    lines: list[bytes] = []
    with contextlib.suppress(*_NO_LOG), path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - TAIL_BYTES))
        lines = file.read().splitlines()
    return reversed(lines)


def _events_in(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """Yield the events in lines of a log; skip lines that a crash left incomplete."""
    for line in lines:
        with contextlib.suppress(orjson.JSONDecodeError):
            event = orjson.loads(line)
            if isinstance(event, dict) and event.keys() >= {"event", "time"}:
                yield event


@contextlib.contextmanager
def uploading_logs(run_dir: RunDir) -> Iterator[None]:
    """Upload this worker's event log and engine logs, during the block and at its end.

    A failed upload only logs a warning, because a missing log must not end the run. A run on a file system
    uploads nothing.
    """
    if run_dir.store.objects is None:
        yield
        return
    # For each log, its size in bytes at the last upload, and the time of that upload on the monotonic clock.
    uploads: dict[Path, tuple[int, float]] = {}
    upload = functools.partial(_upload_logs, run_dir, uploads)
    try:
        with repeating(upload, TIMING.log_upload, thread="logs"):
            yield
    finally:
        upload(at_end=True)


def _upload_logs(run_dir: RunDir, uploads: dict[Path, tuple[int, float]], *, at_end: bool = False) -> None:
    """Upload the logs that have changed since their last upload.

    Each upload sends a whole log, so larger logs are uploaded less often: at most UPLOADED_PER_S bytes per
    second on average. With `at_end`, this rate is not limited. `uploads` has the size and the time of each
    log's last upload, and is updated.
    """
    for path in (run_dir.events, *sorted(run_dir.log_directory.glob("*.log"))):
        with contextlib.suppress(FileNotFoundError):
            size, now = path.stat().st_size, time.monotonic()
            uploaded_size, uploaded_at = uploads.get(path, (0, float("-inf")))
            is_due = at_end or now - uploaded_at >= size / UPLOADED_PER_S
            if size != uploaded_size and is_due:
                try:
                    run_dir.store.publish(path)
                    uploads[path] = size, now
                except OSError as failure:
                    log.warning("%s: was not uploaded: %s", path.name, failure)
