"""Are vectors lost, doubled or mixed up where runs are killed? And does their memory stay flat?

Two runs with `task: embed` on the simulated engine, of 384 numbers a row. The starts of the first come one
after the other; three starts share the second (`--join`), with a tenth of the rows. Each start is killed with
SIGKILL as soon as a share of the parts is written, and replaced by another one. Every twentieth row equals
the one before (`dedupe`). Every five hundredth prompt is longer than the engine takes: its row fails, and is
done by `--retry-failed` on an engine that takes it. Then the parts are merged. In the merged file each row
must be there once, in order, with the very vector that its text has.

Memory is the peak of resident memory (VmHWM) of each process, read ten times a second.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from batchrunner.core.types import Request, RowRef
from batchrunner.engines.simulated import answer
from batchrunner.job.tasks import EMBEDDING, EmbedTask
from benchmarks.measure import save

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

NUMBERS = 384
ROW_GROUP = 50_000
PART_ROWS = 10_000
TOGETHER = 3
JOINED_SHARE = 10
"""The second run has a tenth of the rows."""
EQUAL_EVERY, LONG_EVERY = 20, 500
CONTEXT_TOKENS, LARGE_CONTEXT_TOKENS = 512, 65_536
LONG_TEXT = "word " * 4000
POLL_S = 0.1


def text_of(row: int) -> str:
    """Return the text of a row."""
    if row % EQUAL_EVERY == EQUAL_EVERY - 1:
        return text_of(row - 1)
    return f"text {row} {LONG_TEXT if row % LONG_EVERY == LONG_EVERY // 2 else ''}"


def write_input(path: Path, rows: int) -> None:
    """Write the texts, a row group at a time."""
    schema = pa.schema([("text", pa.string())])
    with pq.ParquetWriter(path, schema) as writer:
        for start in range(0, rows, ROW_GROUP):
            texts = [text_of(row) for row in range(start, min(rows, start + ROW_GROUP))]
            writer.write_table(pa.table({"text": texts}, schema=schema))


@dataclass
class Peaks:
    """The most resident memory of processes, in MiB."""

    of: dict[str, float] = field(default_factory=dict)

    def look(self, kind: str, pid: int) -> None:
        """Read that of a process, unless it has ended."""
        with contextlib.suppress(OSError, StopIteration):
            status = Path(f"/proc/{pid}/status").read_text()
            line = next(line for line in status.splitlines() if line.startswith("VmHWM"))
            self.of[kind] = max(self.of.get(kind, 0.0), round(int(line.split()[1]) / 1024, 1))


class VectorRun:
    """One run: its job, its starts, and what came out."""

    def __init__(self, folder: Path, rows: int, dtype: str, made: random.Random) -> None:
        self._folder = folder
        self._rows = rows
        self._made = made
        self.peaks = Peaks()
        self.kills = 0
        self.took_s: dict[str, float] = {}
        folder.mkdir()
        write_input(folder / "input.parquet", rows)
        self._job: dict[str, Any] = {
            "task": "embed",
            "input": {"path": str(folder / "input.parquet")},
            "prompt": {"text": "text"},
            "output": {"path": str(folder / "run"), "dtype": dtype, "part_rows": PART_ROWS},
            "engine": {"kind": "simulated", "step_s": 0, "context_length": CONTEXT_TOKENS},
            "limits": {"max_failed_rows": rows},
        }
        self._dtype = dtype
        (folder / "job.yaml").write_text(json.dumps(self._job))

    def go(self, kills: int, *, starts: int) -> None:
        """Kill so many starts, of which several share the rows, then let all rows be done."""
        options = ["--join"] * (starts > 1)
        with self._timed("rows"):
            targets = [round(self._parts_at_end * (n + 1) / (kills + 1)) for n in range(kills)]
            running = [self._start(*options) for _ in range(starts)]
            while any(process.poll() is None for process in running):
                time.sleep(POLL_S)
                for process in running:
                    self.peaks.look("run", process.pid)
                if targets and self._parts() >= targets[0]:
                    targets.pop(0)
                    time.sleep(self._made.uniform(0, 0.5))
                    running.append(self._replace(running.pop(self._made.randrange(starts)), options))
            self._finish(*options)
        failed = self._failed()
        with self._timed("retried rows"):
            self._finish(*options, "--retry-failed", "--set", f"engine.context_length={LARGE_CONTEXT_TOKENS}")
        wanted = sum(text_of(row).endswith(LONG_TEXT) for row in range(self._rows))
        if failed != wanted or self._failed():
            raise SystemExit(f"{failed} rows failed, then {self._failed()} (wanted {wanted}, then 0)")
        with self._timed("merge"):
            self._wait("merge", self._spawn("merge", str(self._folder / "run")))

    def judge(self) -> dict[str, int]:
        """Return how many rows of the merged file are lost, doubled, out of order, or have another vector."""
        with self._timed("comparison"):
            counts = {"lost": 0, "doubled": 0, "out of order": 0, "different": 0}
            seen, last = np.zeros(self._rows, dtype=np.int32), -1
            for rows, vectors in self._results():
                np.add.at(seen, rows, 1)
                counts["out of order"] += int((np.diff(rows, prepend=last) != 1).sum())
                last = int(rows[-1])
                for row, vector in zip(rows.tolist(), vectors, strict=True):
                    counts["different"] += vector.tobytes() != self._vector_of(row)
            counts["lost"], counts["doubled"] = int((seen == 0).sum()), int((seen > 1).sum())
        return counts

    def clear(self) -> None:
        """Delete all files."""
        shutil.rmtree(self._folder)

    @property
    def _merged(self) -> Path:
        return self._folder / "run" / "merged"

    @property
    def _parts_at_end(self) -> int:
        return max(1, self._rows // PART_ROWS)

    def _parts(self) -> int:
        return len(list((self._folder / "run" / "parts").glob("*.parquet")))

    def _failed(self) -> int:
        parts = sorted((self._folder / "run" / "parts").glob("*.parquet"))
        columns = (pq.read_table(part, columns=["error"]).column("error") for part in parts)
        return sum(len(column) - column.null_count for column in columns)

    def _results(self) -> Iterator[tuple[Any, Any]]:
        """Yield the rows of the merged files and their vectors, in batches; a row without has one of NaN."""
        for file in sorted(self._merged.glob("*.parquet")):
            for batch in pq.ParquetFile(file).iter_batches(columns=["row", EMBEDDING], batch_size=8192):
                vectors = batch.column(EMBEDDING)
                numbers = np.full((len(batch), NUMBERS), np.nan, dtype=self._dtype)
                there = vectors.is_valid().to_numpy(zero_copy_only=False)
                numbers[there] = vectors.drop_null().flatten().to_numpy().reshape(-1, NUMBERS)
                yield batch.column("row").to_numpy(), numbers

    def _vector_of(self, row: int) -> bytes:
        task = EmbedTask(dtype="float16" if self._dtype == "float16" else "float32")
        request = Request(RowRef(row, None, 0), "text", text_of(row), {}, task=task)
        vector: bytes = answer(request, LARGE_CONTEXT_TOKENS, NUMBERS).columns[EMBEDDING][0]
        return vector

    def _replace(self, process: subprocess.Popen[bytes], options: Sequence[str]) -> subprocess.Popen[bytes]:
        self.peaks.look("run", process.pid)
        process.kill()
        self.kills += process.wait() < 0
        return self._start(*options)

    def _start(self, *options: str) -> subprocess.Popen[bytes]:
        return self._spawn(str(self._folder / "job.yaml"), "-q", *options)

    def _finish(self, *options: str) -> None:
        self._wait("run", self._start(*options))

    def _wait(self, kind: str, process: subprocess.Popen[bytes]) -> None:
        while process.poll() is None:
            self.peaks.look(kind, process.pid)
            time.sleep(POLL_S)
        if process.returncode:
            raise SystemExit(f"exit {process.returncode} of {process.args!r}")

    @staticmethod
    def _spawn(*arguments: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "batchrunner", *arguments]
        return subprocess.Popen(command, stdout=subprocess.DEVNULL)

    @contextlib.contextmanager
    def _timed(self, what: str) -> Iterator[None]:
        began = time.monotonic()
        yield
        self.took_s[what] = round(time.monotonic() - began, 1)
        print(f"{self._folder.name}: {what} took {self.took_s[what]} s", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=50_000)
    parser.add_argument("--kills", type=int, default=4, help="of each run")
    parser.add_argument("--dtype", choices=["float32", "float16"], default="float32")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="for the files; they are deleted at the end")
    args = parser.parse_args()
    made, began = random.Random(args.seed), time.monotonic()
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="torture-vectors-", dir=args.folder) as scratch:
        for name, rows, starts in (("alone", args.rows, 1), ("joined", args.rows // JOINED_SHARE, TOGETHER)):
            run = VectorRun(Path(scratch) / name, rows, args.dtype, made)
            run.go(args.kills, starts=starts)
            found[name] = {"rows": rows, "kills": run.kills, **run.judge()}
            found[name] |= {"took_s": run.took_s, "peak_mib": run.peaks.of}
            run.clear()
    wrong = {
        what: sum(run[what] for run in found.values())
        for what in ("lost", "doubled", "out of order", "different")
    }
    rows = sum(run["rows"] for run in found.values())
    peaks = {kind: max(run["peak_mib"][kind] for run in found.values()) for kind in ("run", "merge")}
    kills = sum(run["kills"] for run in found.values())
    line = (
        f"torture_vectors: {kills} kills, {rows:,} vectors of {NUMBERS} "
        f"numbers ({args.dtype}), {', '.join(f'{count} {what}' for what, count in wrong.items())}; "
        f"peak memory {peaks['run']:.0f} MiB of a run, {peaks['merge']:.0f} MiB of merge"
    )
    figures = {
        "goal_met": not any(wrong.values()),
        "took_s": round(time.monotonic() - began, 1),
        "seed": args.seed,
        "dtype": args.dtype,
        "peak_mib": peaks,
        "runs": found,
    }
    save("torture_vectors", line, figures, ("batchrunner", "pyarrow"))
    sys.exit(0 if figures["goal_met"] else 1)


if __name__ == "__main__":
    main()
