"""The finished trials, one JSON line each, from which the same command resumes."""

from collections import defaultdict
from dataclasses import asdict
from pathlib import Path

import msgspec
import orjson

from batchrunner.output.files import writing
from batchrunner.tune.measurement import TrialResult
from batchrunner.tune.search import changes, key_of
from batchrunner.tune.space import Args


class TrialHistory:
    """The finished trials of one job on one machine."""

    def __init__(self, path: Path, about: str, base: Args) -> None:
        """Read the trials with the digest `about`, which covers rows, job, engine and machine.

        `base` are the job's own flags. Only flags that differ from them are written, so no secret of the
        job is. Raises StorageError.
        """
        self._path = path
        self._about = about
        self._base = base
        self._found: defaultdict[bytes, list[TrialResult]] = defaultdict(list)
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            lines = path.read_bytes().splitlines() if path.exists() else []
        for line in lines:
            self._read_line(line)

    def find(self, args: Args, turn: int) -> TrialResult | None:
        """Return the result of a finished trial; `turn` counts the trials of the same flags from 0."""
        found = self._found[self._key(args)]
        return found[turn] if turn < len(found) else None

    def add(self, args: Args, result: TrialResult) -> None:
        """Write a result; raises StorageError."""
        own = changes(args, self._base)
        record = {"about": self._about, "args": own, "result": asdict(result)}
        with writing(self._path), self._path.open("ab") as file:
            file.write(b"\n" * self._is_torn() + orjson.dumps(record, default=str) + b"\n")
        self._found[key_of(own)].append(result)

    def _key(self, args: Args) -> bytes:
        return key_of(changes(args, self._base))

    def _read_line(self, line: bytes) -> None:
        try:
            record = orjson.loads(line)
            if record["about"] == self._about:
                result = msgspec.convert(record["result"], TrialResult)
                self._found[key_of(record["args"])].append(result)
        except (orjson.JSONDecodeError, msgspec.ValidationError, KeyError, TypeError):
            return  # cut short by a crash

    def _is_torn(self) -> bool:
        """Tell whether the last line was cut short."""
        if not self._path.exists() or not self._path.stat().st_size:
            return False
        with self._path.open("rb") as file:
            file.seek(-1, 2)
            return file.read() != b"\n"
