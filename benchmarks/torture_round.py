"""One round of torture: a job whose starts are killed until one reaches its end, and what is left of it."""

import atexit
import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from batchrunner.core.types import Outcome
from batchrunner.output.resume import read_done
from batchrunner.output.run_dir import RunDir
from batchrunner.output.writer import ResultWriter
from batchrunner.runner.foreground import run_in_foreground

CALLS = ("fsync", "pwrite", "replace", "rename", "link", "unlink", "open", "ftruncate", "mkdir", "rmdir")
MOMENTS = ("before", "torn", "after")
ROWS = 300
TOGETHER = 3
"""Starts that join a run at the same time."""
DURABLE_S = 0.2
LATE_S = 0.8
"""More than `durable`, by what a busy machine's fsync and scheduling take."""
LONGEST_START_S = 900.0
"""A start that takes longer hangs: two replicas that were killed start again on two busy cores."""


@dataclass
class Totals:
    """What happened in all rounds."""

    kills: int = 0
    rows: int = 0
    lost: int = 0
    doubled: int = 0
    different: int = 0
    redone: int = 0
    redone_too_late: int = 0
    vanished: int = 0
    shared: int = 0
    """Rounds in which rows shared requests."""
    checked: int = 0
    """Rounds in which answers are checked, and rows asked again."""
    miscounted: int = 0
    """Rows whose results have another number of attempts than they needed."""
    swaps: int = 0
    """Rounds in which another model came to the server's address."""
    changes: int = 0
    """Rounds in which the input changed."""
    unnoticed: int = 0
    """Changes after which a start ended with a wrong exit code, or with a row of another content."""
    by_moment: Counter[str] = field(default_factory=Counter)

    def judge(self, expected: Mapping[int, str | None], found: Sequence[tuple[int, str | None]]) -> None:
        """Count the rows that are lost, doubled or different, of those in the parts of a run."""
        rows = dict(found).keys()
        self.rows += len(expected)
        self.lost += len(expected.keys() - rows)
        self.doubled += len(found) - len(rows)
        self.different += sum(output != expected.get(row) for row, output in found)

    def killed(self, moment: str) -> None:
        self.kills += 1
        self.by_moment[moment] += 1


def child(job_file: str, told: str, call: str, moment: str, number: int, *, join: bool) -> None:
    """Run the job as the command does, and die at the chosen call."""
    _tell_of_every_row(told)
    if call in CALLS:
        die_at(os, call, moment, number)
    elif call == "count":
        count_calls(Path(told).with_name("calls.json"))
    report = run_in_foreground(
        job_file, [], fresh=False, retry_failed=False, join=join, quiet=True, as_json=False
    )
    sys.exit(report.exit_code)


def _tell_of_every_row(told: str) -> None:
    file = os.open(told, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    put = ResultWriter.put

    async def tell_and_put(self: ResultWriter, outcome: Outcome) -> None:
        os.write(file, b"%d %f %d\n" % (outcome.ref.row, time.monotonic(), os.getpid()))
        await put(self, outcome)

    ResultWriter.put = tell_and_put  # type: ignore[method-assign]


def child_of(module: str, **how: Any) -> list[str]:
    """Return the command of a start, which calls the module's `child`."""
    return [sys.executable, "-m", f"benchmarks.{module}", "--child", json.dumps(how)]


def die_at(module: Any, call: str, moment: str, number: int) -> None:
    """Let this process die at a call of a module's function, the so manieth."""
    real: Callable[..., Any] = getattr(module, call)
    seen = 0

    def deadly(*args: Any, **options: Any) -> Any:
        nonlocal seen
        seen += 1
        if seen < number:
            return real(*args, **options)
        if moment == "torn" and call == "pwrite":
            descriptor, content, offset = args
            real(descriptor, bytes(content)[: len(content) // 2], offset)
        elif moment != "before":
            real(*args, **options)
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError

    setattr(module, call, deadly)


def count_calls(path: Path) -> None:
    counts: Counter[str] = Counter()

    def counted(call: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def counting(*args: Any, **options: Any) -> Any:
            counts[call] += 1
            return real(*args, **options)

        return counting

    for call in CALLS:
        setattr(os, call, counted(call, getattr(os, call)))
    atexit.register(lambda: path.write_text(json.dumps(counts)))


@dataclass(frozen=True)
class _Joined:
    """A start that joined the run."""

    process: subprocess.Popen[bytes]
    where: str
    dies_at: float


@dataclass
class Round:
    """One job, from its first start to its end."""

    folder: Path
    job: dict[str, Any]
    expected: Mapping[int, str | None]
    totals: Totals
    made: random.Random
    calls: dict[str, int]
    """How often an undisturbed start makes each call."""
    durable: set[int] = field(default_factory=set)
    attempts: Mapping[int, int] = field(default_factory=dict)
    """The attempts that rows must have needed, where that is known."""

    def go(self, kills: int) -> None:
        """Kill so many starts, unless one comes to its end before; then let one."""
        job_file = self.folder / "job.yaml"
        job_file.write_text(json.dumps(self.job))
        for _ in range(kills):
            if self._start(job_file):
                break
        else:
            if not self._start(job_file, undisturbed=True):
                raise SystemExit(f"an undisturbed start failed: {self.folder}")
        self._judge()

    def _start(self, job_file: Path, *, undisturbed: bool = False) -> bool:
        """Start the runner once; tell whether it came to its end."""
        by_time = undisturbed or self.made.random() < 0.3
        command, where = self._command(job_file, at_a_call=not by_time)
        # no pipe: an engine that the runner has launched would hold it open for seconds after a kill
        said = self.folder / "stderr"
        with said.open("wb") as file, subprocess.Popen(command, stderr=file) as process:
            try:
                if by_time and not undisturbed:
                    time.sleep(self.made.uniform(0.5, 2.5))
                    process.kill()
                process.wait(timeout=LONGEST_START_S)
                died_at = time.monotonic()
            except subprocess.TimeoutExpired:
                process.kill()
                raise SystemExit(f"a start hangs: {where} in {self.folder}") from None
        if process.returncode == -signal.SIGKILL:
            self.totals.killed(where)
            self._look(died_at, process.pid)
            return False
        if process.returncode != 0:
            raise SystemExit(f"exit {process.returncode} in {self.folder}: {said.read_text()[-2000:]}")
        return True

    def _command(self, job_file: Path, *, at_a_call: bool, join: bool = False) -> tuple[list[str], str]:
        """Return a start's command, and where it is to die."""
        call, moment = self.made.choice(sorted(self.calls)), self.made.choice(MOMENTS)
        number = self.made.randint(1, max(1, self.calls[call] // 2))
        if not at_a_call:
            call, moment = "none", "at a random moment"
        command = child_of(
            "torture", job_file=str(job_file), told=str(self.folder / "told"), call=call, moment=moment,
            number=number, join=join,
        )  # fmt: skip
        return command, f"{'joined: ' * join}{moment if call == 'none' else f'{call} {moment}'}"

    def go_together(self, kills: int) -> None:
        """Let several starts join the run; kill so many of them, and let another one come for each."""
        job_file = self.folder / "job.yaml"
        job_file.write_text(json.dumps(self.job))
        running = [self._spawn(job_file, kill=True) for _ in range(TOGETHER)]
        zombies: list[_Joined] = []
        while running:
            time.sleep(0.05)
            cut_off = time.monotonic()
            statuses = {each.process.pid: _status(each.process) for each in running}
            for each in [each for each in running if statuses[each.process.pid] is not None]:
                running.remove(each)
                zombies.append(each)
                status = statuses[each.process.pid]
                if status not in {0, 1, -signal.SIGKILL}:  # 1: others died, and their rows are left
                    raise SystemExit(f"exit {status} in {self.folder}")
                kills -= self._note_death(each, cut_off) if status == -signal.SIGKILL else 0
                if status:
                    running.append(self._spawn(job_file, kill=kills > 0))
            for each in running:
                if time.monotonic() > each.dies_at:
                    os.kill(each.process.pid, signal.SIGKILL)  # its own `kill` asks for its exit status
        last = self._spawn(job_file, kill=False).process.wait(LONGEST_START_S)  # what the last dead have left
        if last:
            raise SystemExit(f"exit {last} in {self.folder}")
        for each in zombies:
            each.process.wait()
        self._judge()

    def _note_death(self, joined: _Joined, cut_off: float) -> int:
        """Count a start that was killed, and look at what it left; return 1."""
        self.totals.killed(joined.where)
        self._look(cut_off, joined.process.pid)
        return 1

    def _spawn(self, job_file: Path, *, kill: bool) -> _Joined:
        by_time = not kill or self.made.random() < 0.3
        command, where = self._command(job_file, at_a_call=not by_time, join=True)
        dies_at = time.monotonic() + self.made.uniform(0.7, 3.0) if by_time and kill else math.inf
        return _Joined(subprocess.Popen(command), where, dies_at)

    def _look(self, died_at: float, pid: int) -> None:
        """See that what was durable still is, and that all that ended more than a moment ago is."""
        tasks = RunDir(self.job["output"]["path"]).all_tasks()
        durable = {row for task in tasks for row in read_done(task).rows}
        self.totals.vanished += len(self.durable - durable)
        self.durable = durable
        ended = {int(row): float(at) for row, at, of in self._told() if int(of) == pid}
        late = [row for row, at in ended.items() if row not in durable and died_at - at > DURABLE_S + LATE_S]
        self.totals.redone_too_late += len(late)

    def _told(self) -> list[list[bytes]]:
        path = self.folder / "told"
        return [line.split() for line in path.read_bytes().splitlines()] if path.exists() else []

    def _judge(self) -> None:
        table = pq.read_table(Path(self.job["output"]["path"]) / "parts")
        rows = table["row"].to_pylist()
        needed = dict(zip(rows, table["attempts"].to_pylist(), strict=True))
        self.totals.judge(self.expected, list(zip(rows, table["output"].to_pylist(), strict=True)))
        self.totals.miscounted += sum(needed.get(row) != tries for row, tries in self.attempts.items())
        told = self._told()
        self.totals.redone += len(told) - len({row for row, *_ in told})


def job_for(folder: Path, source: Path, engine: dict[str, Any]) -> dict[str, Any]:
    return {
        "input": {"path": str(source), "columns": ["id"]},
        "prompt": {"text": "text"},
        "sampling": {"max_new_tokens": 24, "temperature": 0},
        "output": {"path": str(folder / "run"), "part_rows": 40, "durable": DURABLE_S},
        "engine": engine,
    }


def undisturbed(folder: Path, source: Path, engine: dict[str, Any]) -> tuple[dict[int, str], dict[str, int]]:
    """Return the output of each row of a run that nobody disturbs, and how often it makes each call."""
    folder.mkdir()
    job = job_for(folder, source, engine)
    (folder / "job.yaml").write_text(json.dumps(job))
    command = child_of(
        "torture", job_file=str(folder / "job.yaml"), told=str(folder / "told"), call="count", moment="-",
        number=0, join=False,
    )  # fmt: skip
    subprocess.run(command, check=True, timeout=LONGEST_START_S)
    table = pq.read_table(folder / "run" / "parts")
    outputs = dict(zip(table["row"].to_pylist(), table["output"].to_pylist(), strict=True))
    return outputs, json.loads((folder / "calls.json").read_text())


def _status(process: subprocess.Popen[bytes]) -> int | None:
    """Return the exit status of a process, None while it runs; one that has ended stays a zombie."""
    found = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if found is None:
        return None
    return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status
