"""A row between the reader and its outcome: its request, its place in the order, its attempts so far."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import msgspec

from batchrunner.core.types import Completion, Outcome, Request, RowRef
from batchrunner.output.counts import Rejected


class AnswerHistory(msgspec.Struct):
    """The answers of a row whose answers are checked."""

    first: Request
    """Its first request, as it was sent."""
    rejected: list[Rejected] = []
    """Answers that were not good."""
    continued: int = 0
    """Answers that were cut, and whose rest was asked for."""
    begun: Completion | None = None
    """The answer so far, of which the rest was asked for."""
    last: Completion | None = None
    """The last answer, which the row keeps if it fails."""

    @property
    def asks(self) -> int:
        """Times that the row was asked, without tries that had no answer."""
        return 1 + len(self.rejected) + self.continued


class PendingRow(msgspec.Struct, eq=False):
    """A row that was read and has not ended; a `msgspec.Struct`, which is made faster than a dataclass.

    A row *follows* another one, its `leader`, where both begin with the same bytes: the engine computes the
    shared prefix with the leader, and the follower finds it in the prefix cache.
    """

    request: Request
    prefix: bytes = b""
    """The prompt as bytes (`input.prefixes.prefix_of`); dropped once no later row is compared with it."""
    prompt_bytes: int = 0
    """Length of `prefix`: where the prompt has images, it has bytes for their tokens."""
    template: int = 0
    """CRC-32 of the prompt's first 256 bytes: rows with the same template or system prompt share it."""
    duplicates: list[RowRef] = []
    """Rows with the same request, which get this row's answer."""

    leader: PendingRow | None = None
    shared_bytes: int = 0
    """Length of the prefix that the row shares with its leader."""
    followers: list[PendingRow] = []
    new_tokens: float = 0.0
    """Prompt tokens (estimated) that the engine computes if the shared prefix is cached."""
    sent_clock: float = 0.0
    """Sum of `new_tokens` over all rows sent so far, this one included."""
    longest_output: float = 0.0
    """Expected output tokens of the row or of its longest follower; 0 where lengths do not matter."""
    group: PendingRow | None = None
    """First row of the prefix group, whose route the row prefers; None if any route will do."""

    route: str | None = None
    """Route of the last attempt."""
    sent_at: float = 0.0
    """Time of the last attempt, in seconds of the monotonic clock."""
    prefix_ready_at: float = float("inf")
    """Time from which on the row's prompt is known to be computed, in seconds of the same clock."""
    attempts: int = 0
    failures: int = 0
    """Attempts that ended with an error which may be the row's own fault."""
    deaths: int = 0
    """Engine deaths during its attempts."""
    unencoded: Request | None = None
    """The request before it was tokenised, where it may be asked for again in other words."""
    answers: AnswerHistory | None = None
    """Its answers, where they are checked."""

    @property
    def memory_bytes(self) -> int:
        """Bytes of the prompt and its images in memory."""
        return self.prompt_bytes + self.request.media_bytes

    @property
    def affinity(self) -> str:
        """Key by which a gateway chooses a replica: the group's; after a failed attempt one of its own."""
        if self.attempts > 1:
            return f"{self.request.ref.row}.{self.attempts}"
        return str((self.group or self).request.ref.row)


class RowSource(Protocol):
    """Where the rows of an attempt come from: files, leases, or a program."""

    @property
    def total(self) -> int:
        """Number of rows, those that earlier attempts ended included; with leases an estimate."""

    @property
    def unread(self) -> int:
        """Number of rows still to be read; with leases an estimate."""

    @property
    def is_shared(self) -> bool:
        """Whether other tasks could do these rows, now or later."""

    def batches(self) -> Iterator[list[Request | Outcome]]:
        """Read and render rows, a bounded batch at a time; blocks.

        A row that cannot be rendered comes as an Outcome with its error. An empty batch asks to send what was
        read so far: the next batch may take a while.
        """

    def stop(self) -> None:
        """Read no more rows: `batches` ends soon, also while it waits."""


class ResultSink(Protocol):
    """Where the outcomes of rows go: to the disk, or to a program."""

    async def put(self, outcome: Outcome) -> None:
        """Count and store an outcome; waits while the disk or the program is behind. Raises StorageError."""
