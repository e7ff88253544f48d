"""Tasks of a run in this process, runs of which some rows are done, and what a run has on disk."""

import dataclasses
import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyroaring import BitMap64

import batchrunner
from batchrunner.core.errors import TaskLockLostError
from batchrunner.dispatch.attempt import FEW_TOKENS
from batchrunner.job.load import load_job
from batchrunner.output.counts import RowCounts
from batchrunner.output.events import EventLog
from batchrunner.output.holder import this_process
from batchrunner.output.parts import Journal, read_journal, write_part
from batchrunner.output.run_dir import SEGMENT
from batchrunner.output.task_lock import FileTaskLock
from batchrunner.runner.control import Control
from batchrunner.runner.join import join
from batchrunner.runner.plan import StartOptions
from batchrunner.runner.prepare import prepare
from tests.conftest import (
    ROOT,
    Started,
    batchrun,
    eventually,
    job_of,
    results_of,
    started_python,
)
from tests.support.fake_sglang import Behaviour, FakeSGLang, Sent


def is_control(sent: Sent) -> bool:
    """Tell whether a request only finds out whether the engine answers, while it refuses rows."""
    return bool(sent.body.get("sampling_params", {}).get("max_new_tokens") == FEW_TOKENS["max_new_tokens"])


def rows_sent(server: FakeSGLang) -> list[int]:
    return sorted(sent.row for sent in server.sent if not is_control(sent))


def held_from(row: int) -> Callable[[Sent], Behaviour]:
    return lambda sent: "hold" if sent.row >= row else "answer"


def some_done(directory: Path, server: FakeSGLang, **changes: Any) -> dict[str, Any]:
    """Do the first 4 of 10 rows of a job; return the whole job."""
    job = job_of(directory, server, **changes)
    batchrunner.run(job, overrides=["input.limit=4"])
    server.forget()
    return job


def rows_once(job: dict[str, Any], rows: int) -> None:
    """Every row of the input is there, once, and went well."""
    results = results_of(job)
    assert [row["row"] for row in results] == list(range(rows))
    assert {row["error"] for row in results} <= {None}


def failed_rows(job: dict[str, Any]) -> list[int]:
    """Return the ordinals of the rows that failed."""
    return [row["row"] for row in results_of(job) if row["error"] is not None]


def status_of(run: str | Path) -> dict[str, Any]:
    result = batchrun("status", run, "--json")
    found: dict[str, Any] = json.loads(result.stdout) if result.exit_code == 0 else {}
    return found


def until_stored(run: Path, rows: int) -> None:
    """Wait until so many rows of a run are on disk."""
    eventually(lambda: status_of(run).get("rows_on_disk") == rows)


def until_turns_stored(run: Path, turns: int) -> None:
    """Wait until so many answers of unfinished rollouts are on disk."""

    def stored() -> int:
        segments = run.glob(f"tasks/*/{SEGMENT}*")
        return sum(table.num_rows for segment in segments for table in read_journal(segment))

    eventually(lambda: stored() == turns)


def machine(name: str, *arguments: object, **environ: str) -> AbstractContextManager[Started]:
    """Run the command on another machine, of this name, which shares no disk with others."""
    return started_python(ROOT / "tests" / "support" / "other_machine.py", name, *arguments, **environ)


class Task:
    """One task of a run in this process, that does its rows when it is told to."""

    def __init__(self, job: dict[str, Any], name: str) -> None:
        self.prepared = prepare(load_job(job), f"join-host-{name}")
        self.run_dir = self.prepared.run_dir
        self.run_dir.task_directory.mkdir(parents=True)
        self.lock = FileTaskLock(self.run_dir.task_directory)
        self.lock.acquire()
        self.counts = RowCounts()
        events = EventLog(self.run_dir.events)
        sleeper = Control()
        self.rows, _, _ = join(
            self.prepared,
            StartOptions(join=True),
            sleeper,
            lock=self.lock,
            counts=self.counts,
            events=events,
        )
        self._batches = self.rows.batches()
        self._parts = 0
        self.read: list[int] = []

    def work(self, batches: int, *, last: bool = False) -> None:
        """Read some batches and write their rows to a part; those of the `last` work to a journal."""
        items: list[int] = []
        for batch in islice(self._batches, batches):
            items += [item.ref.row for item in batch]
            self.counts.ok += len(batch)
        if items:
            self.run_dir.parts.mkdir(exist_ok=True)
            table = pa.table(
                {
                    "row": items,
                    "error": pa.nulls(len(items), pa.string()),
                    "attempts": [1] * len(items),
                    "finish_reason": ["stop"] * len(items),
                    "prompt_tokens": items,
                    "cached_tokens": items,
                    "completion_tokens": items,
                }
            )
            if last:
                journal = Journal(self.run_dir.journal(self._parts, self.lock.token))
                journal.append(table)
                journal.close()
            else:
                write_part(self.run_dir, self._parts, [table], self.lock)
                self._parts += 1
                self.rows.committed(BitMap64(items))

    def take_first(self) -> bool:
        """Take the first lease."""
        return self.rows.take_first(lambda _: None)

    def end(self) -> None:
        """End as a task that was told to stop."""
        self.rows.give_back()
        self.lock.release()

    def come_back(self) -> None:
        """Go on where it was stopped, as one that was taken for dead and is not."""
        with pytest.raises(TaskLockLostError):
            self.lock.verify()
        self.rows.give_back()

    def die(self) -> None:
        """End as one that was killed: its name stays, of a process that is no more."""
        self.work(1, last=True)
        self.lock.release()
        FileTaskLock(
            self.run_dir.task_directory, dataclasses.replace(this_process(), started="long ago")
        ).acquire()
