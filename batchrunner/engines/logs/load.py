"""The load out of a server's log: for releases that tell it nowhere else. Pure: lines in, Signals out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchrunner.core.types import SchedulerLoad
from batchrunner.engines.logs.lines import LoggedBatch, ServerReady, origin_of, record_in

if TYPE_CHECKING:
    from collections.abc import Iterable


class LogLoad:
    """The newest load of each scheduler that a log has told of."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._limits: ServerReady | None = None
        self._newest: dict[str, tuple[LoggedBatch, int]] = {}
        self._told = 0

    def read(self, lines: Iterable[str]) -> None:
        """Take the next lines of the log."""
        for line in lines:
            record = record_in(line)
            if isinstance(record, ServerReady):
                self._limits = record
            elif isinstance(record, LoggedBatch):
                self._told += 1
                self._newest[origin_of(line).dp] = record, self._told

    def signals(self) -> list[SchedulerLoad]:
        """Return the newest load of each scheduler."""
        return [
            SchedulerLoad(
                scheduler=f"{self._url}#dp{rank}" if rank else self._url,
                source="log",
                running=batch.running,
                queue=batch.queue,
                token_usage=batch.usage,
                used_tokens=batch.tokens,
                max_total_tokens=self._limits.max_total_num_tokens if self._limits else None,
                max_running=self._limits.max_running_requests if self._limits else None,
                route=self._url,
                taken_at=told,
                work=told,
            )
            for rank, (batch, told) in sorted(self._newest.items())
        ]
