"""Reads lines and records of text files such as CSV and JSON Lines, and formats line numbers for messages."""

import io
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from batchrunner.core.files import LONGEST_LINE_BYTES

TOO_LONG = f"is longer than {LONGEST_LINE_BYTES >> 20} MiB"
"""Problem of a line that is too long to be read."""
ITEMS_NAMED = 5
"""Maximum number of lines, or of custom_ids, in a message."""


class TextRecord(NamedTuple):
    """Record of a text file, such as the object on a line of JSON Lines."""

    line: int
    """Number of the record's first line, counted from 1."""
    values: Mapping[str, Any]
    """Values by column; empty if the record cannot be read."""
    problem: str | None
    """Reason why the record cannot be read; None if it can."""
    size: int
    """Approximate size of the record, in bytes or characters."""


def read_lines(source: io.BufferedReader) -> Iterator[bytes | None]:
    """Yield the lines of a file, with None for a line of LONGEST_LINE_BYTES or more."""
    while line := source.readline(LONGEST_LINE_BYTES):
        if len(line) < LONGEST_LINE_BYTES:
            yield line
            continue
        while line and not line.endswith(b"\n"):
            line = source.readline(LONGEST_LINE_BYTES)
        yield None


@dataclass(slots=True)
class LineNumbers:
    """Count of the bad or repeated lines in a file, with the first of them, for a message."""

    count: int = 0
    first: list[int] = field(default_factory=list)
    """Numbers of the first lines, at most ITEMS_NAMED."""
    reason: str = ""
    """What is wrong with the first bad line."""

    def add(self, number: int, reason: str = "") -> None:
        """Add the line with this number; `reason` says what is wrong with it, if anything."""
        self.count += 1
        self.reason = self.reason or reason
        if len(self.first) < ITEMS_NAMED:
            self.first.append(number)

    def __str__(self) -> str:
        """Return the numbers in words, such as "lines 1, 5 and 3 more"."""
        noun = "line" if self.count == 1 else "lines"
        numbers = ", ".join(map(str, self.first))
        unnamed = self.count - len(self.first)
        return f"{noun} {numbers} and {unnamed:,} more" if unnamed else f"{noun} {numbers}"
