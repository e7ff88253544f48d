"""Does anything get lost or doubled, whatever is killed, and whenever?

Rounds of one small job each. A start of the runner is killed with SIGKILL: at a random moment, or just
before, in the middle of or just after a chosen write, fsync, rename, unlink or truncation of a file. Then it
is started again, and killed again, until a start reaches its end. At the end of a round every row must be
there once, with the very output of an undisturbed run. On the way nothing that was durable may vanish, and
what is done again may only have ended in the last second (by default; here `durable` is 0.2 s, to have more
kills a minute).

In half of the rounds several starts join the run (`--join`), and each that is killed is replaced by another.
Those that were killed stay zombies until the end of the round: nobody asks for their exit status. In half of
either, rows are sorted first (`order: prefix`).

In further rounds (`--changes N`) the input changes during a run: its file is replaced, rewritten in place or
truncated, or a file is added. No row of a new content may be in the results, and the exit code must say that
rows are missing.

The engine is simulated, for the number of kills; `--real N` adds rounds with the real SGLang on the CPU and a
tiny random model at temperature 0, every second one behind the real gateway. In each of them the gateway, a
scheduler and the runner are killed, one after the other, each after another part.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import json
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import pyarrow as pa
import pyarrow.parquet as pq

from batchrunner.output.resume import read_done
from batchrunner.output.run_dir import RunDir
from batchrunner.output.writer import ResultWriter
from batchrunner.runner.foreground import run_in_foreground
from benchmarks.measure import save
from tests.support.tiny_model import make_tiny_llama

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from batchrunner.core.types import Outcome

Strike: TypeAlias = "Callable[[subprocess.Popen[bytes]], None]"
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
REAL = "real: "


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
    changes: int = 0
    """Rounds in which the input changed."""
    unnoticed: int = 0
    """Changes after which a start ended with a wrong exit code, or with a row of another content."""
    by_moment: Counter[str] = field(default_factory=Counter)

    def killed(self, moment: str) -> None:
        self.kills += 1
        self.by_moment[moment] += 1

    def of_real_engine(self) -> str:
        """Say who was killed in the rounds with the real engine, and how often."""
        kinds = {name.removeprefix(REAL): n for name, n in self.by_moment.items() if name.startswith(REAL)}
        return ", ".join(f"{kind} {n}" for kind, n in sorted(kinds.items()))


def child(job_file: str, told: str, call: str, moment: str, number: int, *, join: bool) -> None:
    """Run the job as the command does, and die at the chosen call."""
    _tell_of_every_row(told)
    if call in CALLS:
        _die_at(call, moment, number)
    elif call == "count":
        _count_calls(Path(told).with_name("calls.json"))
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


def _die_at(call: str, moment: str, number: int) -> None:
    real: Callable[..., Any] = getattr(os, call)
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

    setattr(os, call, deadly)


def _count_calls(path: Path) -> None:
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
    expected: dict[int, str]
    totals: Totals
    made: random.Random
    calls: dict[str, int]
    """How often an undisturbed start makes each call."""
    durable: set[int] = field(default_factory=set)

    def go(self, kills: int, strike: Strike | None = None) -> None:
        """Kill so many starts, unless one comes to its end before; then let one."""
        job_file = self.folder / "job.yaml"
        job_file.write_text(json.dumps(self.job))
        for _ in range(kills):
            if self._start(job_file, strike):
                break
        else:
            if not self._start(job_file, None, undisturbed=True):
                raise SystemExit(f"an undisturbed start failed: {self.folder}")
        self._judge()

    def _start(
        self,
        job_file: Path,
        strike: Callable[[subprocess.Popen[bytes]], None] | None,
        *,
        undisturbed: bool = False,
    ) -> bool:
        """Start the runner once; tell whether it came to its end."""
        by_time = undisturbed or strike is not None or self.made.random() < 0.3
        command, where = self._command(job_file, at_a_call=not by_time)
        with subprocess.Popen(command, stderr=subprocess.PIPE) as process:
            try:
                if strike is not None and not undisturbed:
                    strike(process)
                elif by_time and not undisturbed:
                    time.sleep(self.made.uniform(0.5, 2.5))
                    process.kill()
                _, errors = process.communicate(timeout=LONGEST_START_S)
            except subprocess.TimeoutExpired:
                process.kill()
                raise SystemExit(f"a start hangs: {where} in {self.folder}") from None
        died_at = time.monotonic()
        if process.returncode == -signal.SIGKILL:
            self.totals.killed(f"{REAL}runner" if strike else where)
            self._look(died_at, process.pid)
            return False
        if process.returncode != 0:
            raise SystemExit(f"exit {process.returncode} in {self.folder}: {errors.decode()[-2000:]}")
        return True

    def _command(self, job_file: Path, *, at_a_call: bool, join: bool = False) -> tuple[list[str], str]:
        """Return a start's command, and where it is to die."""
        call, moment = self.made.choice(sorted(self.calls)), self.made.choice(MOMENTS)
        number = self.made.randint(1, max(1, self.calls[call] // 2))
        if not at_a_call:
            call, moment = "none", "at a random moment"
        command = [sys.executable, "-m", "benchmarks.torture", "--child", str(job_file)]
        command += ["--told", str(self.folder / "told"), "--at", call, moment, str(number)]
        return command + [
            "--join"
        ] * join, f"{'joined: ' * join}{moment if call == 'none' else f'{call} {moment}'}"

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
                    each.process.kill()
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

    def kill_each(self, kinds: Sequence[str], process: subprocess.Popen[bytes]) -> None:
        """Kill one process of each kind, the runner last, each as soon as another part is there."""
        for kind in kinds:
            before, deadline = self._parts(), time.monotonic() + LONGEST_START_S
            while self._parts() == before or (victim := _victim(kind, process.pid)) is None:
                if process.poll() is not None:
                    return
                if time.monotonic() > deadline:
                    process.kill()
                    raise SystemExit(f"no part comes, or no {kind} in {self.folder}")
                time.sleep(0.05)
            time.sleep(self.made.uniform(0.0, 0.5))
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.kill(victim, signal.SIGKILL)
                if kind != "runner":  # whose death is seen at the end of its start
                    self.totals.killed(REAL + kind)

    def _parts(self) -> int:
        return len(list(Path(self.job["output"]["path"]).glob("parts/part-*.parquet")))

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
        rows, outputs = table["row"].to_pylist(), table["output"].to_pylist()
        found = dict(zip(rows, outputs, strict=True))
        self.totals.rows += len(self.expected)
        self.totals.lost += len(self.expected.keys() - found.keys())
        self.totals.doubled += len(rows) - len(found)
        self.totals.different += sum(found.get(row) != output for row, output in self.expected.items())
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
    command = [sys.executable, "-m", "benchmarks.torture", "--child", str(folder / "job.yaml")]
    command += ["--told", str(folder / "told"), "--at", "count", "-", "0"]
    subprocess.run(command, check=True, timeout=LONGEST_START_S)
    table = pq.read_table(folder / "run" / "parts")
    outputs = dict(zip(table["row"].to_pylist(), table["output"].to_pylist(), strict=True))
    return outputs, json.loads((folder / "calls.json").read_text())


def simulated_rounds(scratch: Path, source: Path, kills: int, seed: int, totals: Totals) -> None:
    engine = {"kind": "simulated", "step_s": 0.01, "max_running": 16}
    expected, calls = undisturbed(scratch / "calm", source, engine)
    made, number = random.Random(seed), 0
    while totals.kills < kills:
        folder = scratch / f"round-{number}"
        folder.mkdir()
        job = job_for(folder, source, engine)
        job["output"]["part_rows"] = made.choice((40, 10_000))
        job["order"] = "prefix" if number // 2 % 2 else "input"
        one = Round(folder, job, expected, totals, made, calls)
        one.go_together(kills=12) if number % 2 else one.go(kills=12)
        number += 1
        print(f"round {number}: {totals.kills} kills", file=sys.stderr, flush=True)


def _status(process: subprocess.Popen[bytes]) -> int | None:
    """Return the exit status of a process, None while it runs; one that has ended stays a zombie."""
    found = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if found is None:
        return None
    return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status


def changed_rounds(scratch: Path, rounds: int, seed: int, totals: Totals) -> None:
    """Change the input at a random moment of a run; then put it back, and let a start finish the run."""
    made = random.Random(seed)
    for number in range(rounds):
        folder = scratch / f"changed-{number}"
        source = _texts(folder / "in" / "a.parquet", 0)
        kept, what = source.read_bytes(), ("replaced", "rewritten", "truncated", "added")[number % 4]
        job = job_for(folder, source.parent, {"kind": "simulated", "step_s": 0.005, "max_running": 16})
        job["order"], job["input"]["columns"] = made.choice(("input", "prefix")), ["text"]
        (folder / "job.yaml").write_text(json.dumps(job))
        command = [sys.executable, "-m", "batchrunner", str(folder / "job.yaml"), "-q"]
        command += ["--join"] * made.randint(0, 1)
        with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
            parts = folder / "run" / "parts"
            while process.poll() is None and not list(parts.glob("part-*.parquet")):
                time.sleep(0.02)
            time.sleep(made.uniform(0.0, 0.3))
            runs_on = process.poll() is None
            _change(source, what)
            status = process.wait(LONGEST_START_S)
        wrong = runs_on and status not in {0, 1 if what == "added" else 2}  # 0: it was over before
        if what != "added":
            source.write_bytes(kept)
        last = subprocess.run(command, stderr=subprocess.DEVNULL, timeout=LONGEST_START_S, check=False)
        rows = pq.read_table(parts).select(["row", "text"]).to_pylist()
        right = all(row["text"] == f"row {row['row']}" for row in rows)
        totals.changes += 1
        totals.unnoticed += bool(wrong or not right or last.returncode)
        expected = set(range(2 * ROWS if what == "added" else ROWS))
        totals.rows += len(expected)
        totals.lost += len(expected - {row["row"] for row in rows})
        totals.doubled += len(rows) - len({row["row"] for row in rows})
    print(f"{rounds} rounds with changed input", file=sys.stderr, flush=True)


def _texts(path: Path, first: int) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    texts = [f"row {row}" for row in range(first, first + ROWS)]
    pq.write_table(pa.table({"text": texts}), path, row_group_size=50)
    return path


def _change(source: Path, what: str) -> None:
    other = _texts(source.with_name("other.tmp"), ROWS)
    if what == "replaced":
        other.replace(source)
    elif what == "rewritten":
        source.write_bytes(other.read_bytes())
    elif what == "truncated":
        source.write_bytes(source.read_bytes()[:-100])
    else:
        other.replace(source.with_name("b.parquet"))
    other.unlink(missing_ok=True)


def real_rounds(scratch: Path, source: Path, tokenizer: Path, rounds: int, seed: int, totals: Totals) -> None:
    """Kill the gateway, a scheduler and the runner in the middle of real work."""
    model = str(make_tiny_llama(scratch / "tiny", tokenizer))
    server: dict[str, Any] = {"model": model, "device": "cpu", "args": {"max-running-requests": 16}}
    engines: list[tuple[dict[str, Any], tuple[str, ...]]] = [
        ({"kind": "server", **server}, ("scheduler", "runner")),
        ({"kind": "gateway", "replicas": 2, **server}, ("gateway", "scheduler", "runner")),
    ]
    expected, calls = undisturbed(scratch / "calm-real", source, engines[0][0])
    made = random.Random(seed)
    for number in range(rounds):
        folder = scratch / f"real-{number}"
        folder.mkdir()
        engine, kinds = engines[number % 2]
        one = Round(folder, job_for(folder, source, engine), expected, totals, made, calls)
        one.go(kills=1, strike=partial(one.kill_each, kinds))
        told = f"{totals.kills} kills, with the real engine: {totals.of_real_engine()}"
        print(f"real round {number + 1} of {rounds}: {told}", file=sys.stderr, flush=True)


def _victim(kind: str, pid: int) -> int | None:
    """Return the runner, or a process of this kind that it has started; None while there is none.

    The gateway's threads are those of Rust's tokio.
    """
    if kind == "runner":
        return pid
    for each in _below(pid):
        if "tokio" in _threads_of(each) if kind == "gateway" else b"sglang::scheduler" in _command_of(each):
            return each
    return None


def _below(pid: int) -> list[int]:
    """Return the processes that a process has started, and those that they have."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, task.read_text().split()):
                found += [child, *_below(child)]
    return found


def _command_of(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def _threads_of(pid: int) -> str:
    """Return the names of its threads."""
    names = ""
    for thread in Path(f"/proc/{pid}/task").glob("*/comm"):
        with contextlib.suppress(OSError):
            names += thread.read_text()
    return names


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--real", type=int, default=0, help="rounds with the real engine")
    parser.add_argument("--changes", type=int, default=12, help="rounds in which the input changes")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--tokenizer", type=Path, default=Path("data/smollm2-135m-instruct"))
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--told", help=argparse.SUPPRESS)
    parser.add_argument("--at", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--join", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args.child, args.told, args.at[0], args.at[1], int(args.at[2]), join=args.join)
        return
    totals, began = Totals(), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="torture-") as scratch:
        source = Path(scratch) / "input.parquet"
        ids = list(range(ROWS))
        pq.write_table(pa.table({"id": ids, "text": [f"row {i}" for i in ids]}), source, row_group_size=50)
        simulated_rounds(Path(scratch), source, args.kills, args.seed, totals)
        changed_rounds(Path(scratch), args.changes, args.seed, totals)
        if args.real:
            real_rounds(Path(scratch), source, args.tokenizer, args.real, args.seed, totals)
    line = (
        f"torture: {totals.kills} kills, {totals.rows:,} rows, {totals.lost} lost, {totals.doubled} doubled, "
        f"{totals.different} different, {totals.vanished} durable ones gone, {totals.redone} done again "
        f"({totals.redone_too_late} of them older than {DURABLE_S + LATE_S:g} s), "
        f"{totals.changes} changes of the input, {totals.unnoticed} unnoticed"
    )
    if args.real:
        line += f"; kills with the real engine: {totals.of_real_engine()}"
    figures = {
        "goal_met": not (
            totals.lost
            or totals.doubled
            or totals.different
            or totals.vanished
            or totals.redone_too_late
            or totals.unnoticed
        ),
        "took_s": round(time.monotonic() - began, 1), "real_rounds": args.real, "seed": args.seed,
        "kills_by_moment": dict(totals.by_moment),
    }  # fmt: skip
    save("torture", line, figures, ("batchrunner", "pyarrow"))
    sys.exit(0 if figures["goal_met"] else 1)


if __name__ == "__main__":
    main()
