"""The load out of a server's log, for SGLang releases that report it nowhere else."""

from collections.abc import Iterable
from pathlib import Path

from batchrunner.core.types import SchedulerLoad
from batchrunner.engines.logs.lines import origin_of, record_in
from batchrunner.engines.logs.records import LoggedBatch, ServerReady

BLOCK_BYTES = 4 << 20
"""Most bytes of a log that one poll reads."""


class LogLoad:
    """The newest load of each scheduler in the lines of a log. Pure: lines in, loads out."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._limits: ServerReady | None = None
        self._newest: dict[str, tuple[LoggedBatch, int]] = {}
        self._batches = 0

    def read(self, lines: Iterable[str]) -> None:
        """Take the next lines of the log."""
        for line in lines:
            record = record_in(line)
            if isinstance(record, ServerReady):
                self._limits = record
            elif isinstance(record, LoggedBatch):
                self._batches += 1
                self._newest[origin_of(line).dp] = record, self._batches

    def loads(self) -> list[SchedulerLoad]:
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
                taken_at=number,
                work=number,
            )
            for rank, (batch, number) in sorted(self._newest.items())
        ]


class LogFollower:
    """Reads what is added to a log from now on."""

    def __init__(self, url: str, path: Path) -> None:
        self._path = path
        self._read_bytes = path.stat().st_size if path.exists() else 0
        self._load = LogLoad(url)

    def poll(self) -> list[SchedulerLoad]:
        """Read the whole lines that were added; return the newest load of each scheduler."""
        with self._path.open("rb") as log:
            log.seek(self._read_bytes)
            block = log.read(BLOCK_BYTES)
        whole = block[: block.rfind(b"\n") + 1]
        self._read_bytes += len(whole)
        self._load.read(whole.decode(errors="replace").splitlines())
        return self._load.loads()
