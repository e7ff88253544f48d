"""Lines and records of text files, and numbers of lines in messages."""

import io
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from batchrunner.core.files import LONGEST_LINE_BYTES

TOO_LONG = f"is longer than {LONGEST_LINE_BYTES >> 20} MiB"
ITEMS_NAMED = 5
"""Maximum number of lines, or of other items, that a message names."""


class TextRecord(NamedTuple):
    """A record of a text file, such as the object on a line of JSON Lines."""

    line: int
    """Number of its first line, from 1."""
    values: Mapping[str, Any]
    """Values by column; empty if the record cannot be read."""
    problem: str | None
    """Why the record cannot be read; None if it can."""
    size: int
    """Bytes or characters of the record."""


def read_lines(source: io.BufferedReader) -> Iterator[bytes | None]:
    """Yield the lines of a file; None for a line of more than LONGEST_LINE_BYTES."""
    while line := source.readline(LONGEST_LINE_BYTES):
        if len(line) < LONGEST_LINE_BYTES:
            yield line
            continue
        while line and not line.endswith(b"\n"):
            line = source.readline(LONGEST_LINE_BYTES)
        yield None


@dataclass(slots=True)
class LineNumbers:
    """Counts lines of a file for a message, and keeps the numbers of the first few."""

    count: int = 0
    first: list[int] = field(default_factory=list)
    """Numbers of the first ITEMS_NAMED lines."""
    reason: str = ""
    """What is wrong with the first of these lines."""

    def add(self, number: int, reason: str = "") -> None:
        """Count a line; `reason` is what is wrong with it."""
        self.count += 1
        self.reason = self.reason or reason
        if len(self.first) < ITEMS_NAMED:
            self.first.append(number)

    def __str__(self) -> str:
        """Return the numbers in words, such as "lines 1, 5 and 3 more"."""
        word = "line" if self.count == 1 else "lines"
        numbers = ", ".join(map(str, self.first))
        more = self.count - len(self.first)
        return f"{word} {numbers} and {more:,} more" if more else f"{word} {numbers}"
