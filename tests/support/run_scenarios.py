"""Scenarios of a run: starts with any options that are killed, stopped or put to sleep at any moment.

A scenario is one job, on an input that grows and is corrected, and a sequence of starts. Each start is a
process of its own, and may be on another machine. It is struck by a signal at a chosen system call: SIGKILL,
SIGTERM, or SIGSTOP while another start goes on. The server is real enough to count what reaches it.

After each start the parts hold no row twice, and each answer is one to what the input says now. Whatever was
durable stays so, unless a start was to discard it. At the end a start without options does all rows, a second
one sends none, and `--retry-failed` sends those that failed.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from batchrunner.core.errors import EXIT_WRONG
from batchrunner.output.resume import read_done
from batchrunner.output.run_dir import RunDir, open_run
from tests.support.fake_sglang import Behaviour, FakeSGLang, Sent
from tests.support.server_thread import PATIENCE_S
from tests.support.store_server import StoreBucket

CALLS = ("fsync", "pwrite", "replace", "rename", "link", "unlink", "open", "mkdir", "rmdir")
"""System calls at which a start may be struck."""
LATEST_CALL = 60
"""A start is struck at one of so many calls of a kind, sooner rather than later."""
FILE_ROWS, MOST_FILES = 30, 3
GONE_AFTER_S = 1.0
"""Silence after which a start takes one on another machine for dead."""
REFUSALS = (
    "the input file",  # it changed, or another one stands in its place
    "the input has",
    "was started with --join",
    "--fresh would discard",
    "can only grow",
    "--retry-failed: other workers",
    "is writing this run",
    "took this task over",
    "has results but no run.json",
    "nothing to estimate",
)
"""What a start may be refused with, exit code 2, on what a scenario has made of the run."""
ROLLOUT = """
async def ask(row, generate):
    first = await generate(row["text"])
    second = await generate(row["text"] + " again")
    return {"texts": [first.text, second.text]}
"""


@dataclass(frozen=True)
class Strike:
    """What happens to a start, and when."""

    signal: signal.Signals
    call: str
    number: int


def struck_command(
    arguments: list[str], stderr: str, machine: str, strike: Strike | None, environ: dict[str, str]
) -> None:
    """Run the command in this new process as on a machine of this name."""
    file = os.open(stderr, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(file, 2)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.environ.update(environ)
    import sys  # noqa: PLC0415 - after the descriptors

    from batchrunner.cli import main  # noqa: PLC0415
    from batchrunner.core.timing import TIMING  # noqa: PLC0415
    from batchrunner.output import task_lock  # noqa: PLC0415
    from tests.support.other_machine import be_another_machine  # noqa: PLC0415

    be_another_machine(machine)
    task_lock.TaskLock.beat_s = 0.2
    TIMING.part, TIMING.first_retry, TIMING.parts_appear, TIMING.silent_copy = 0.3, 0.01, 0.3, 1.0
    if strike is not None:
        _strike_at(strike)
    sys.argv = ["batchrun", *arguments]
    main()


def _strike_at(strike: Strike) -> None:
    real: Callable[..., Any] = getattr(os, strike.call)
    calls = 0

    def struck(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == strike.number:
            os.kill(os.getpid(), strike.signal)
        return real(*args, **options)

    setattr(os, strike.call, struck)


@dataclass
class Start:
    """A start of the job."""

    process: BaseProcess
    changes: list[str]
    """Its options, and what its job has beside that of other starts."""
    strike: Strike | None
    stderr: Path

    @property
    def is_asleep(self) -> bool:
        """Whether it was stopped by SIGSTOP, and has not ended."""
        with contextlib.suppress(OSError, IndexError):
            return Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
        return False

    def __str__(self) -> str:
        """Say what was started, what struck it, and how it ended."""
        at = self.strike and f" {self.strike.signal.name} at {self.strike.call} {self.strike.number}"
        return f"start {' '.join(self.changes)}{at or ''} -> {self.process.exitcode}"


@dataclass
class Scenario:
    """One job, from its first start to its end."""

    directory: Path
    seed: int
    server: FakeSGLang
    bucket: StoreBucket | None = None
    """Where the run lies; None for a directory."""
    history: list[str] = field(default_factory=list)
    """What was done, for who reads of a failure."""

    def __post_init__(self) -> None:
        """Choose what the job is."""
        self._random = random.Random(self.seed)
        choose = self._random.choice
        self._texts: dict[str, list[str]] = {}
        self._ill: set[int] = set()  # rows that the server refuses
        self._ever_ill: set[int] = set()
        self._durable: set[int] = set()
        self._limit: int | None = None
        self._versions: dict[str, list[list[str]]] = {}  # all that each file has said, the newest last
        self._number = 0
        self._joins = choose((True, False))
        self._task = choose(("plain", "plain", "n", "accept", "rollout", "batch file"))
        self._format = "jsonl" if self._task == "batch file" else choose(("parquet", "jsonl"))
        self._reuses = self._task not in {"rollout", "batch file"} and choose((True, False))
        self._mixes = choose((True, False, False))  # starts with --join among those without
        self._source = self.directory / "in"
        self._source.mkdir()
        self._published = self.directory / "results.jsonl"  # of a batch file
        self._run = str(self.directory / "run")
        if self._task == "batch file":
            self._run = f"{self._published}.run"
        elif self.bucket is not None:
            self._run = f"{self.bucket.uri}/run"
        (self.directory / "scenario_functions.py").write_text(ROLLOUT)
        self._order = choose(("input", "prefix"))
        self._part_rows = choose((10, 10_000))
        self.server.script = self._answer
        self.server.delay_s = 0.002

    def _happens(self, chance: float) -> bool:
        return self._random.random() < chance

    # The world

    def _answer(self, sent: Sent) -> Behaviour:
        return "too long" if sent.row in self._ill else "answer"

    def _add_file(self) -> None:
        first = sum(map(len, self._texts.values()))
        name = f"{chr(ord('a') + len(self._texts))}.{self._format}"
        self._texts[name] = [f"row {row} v0 of a scenario" for row in range(first, first + FILE_ROWS)]
        self._versions[name] = [self._texts[name]]
        self._write_file(name)
        ill = set(self._random.sample(range(first, first + FILE_ROWS), 3))
        self._ill |= ill
        self._ever_ill |= ill
        self.history.append(f"file {name}")

    def _write_file(self, name: str) -> None:
        path, texts = self._source / name, self._texts[name]
        new = path.with_suffix(".new")
        if self._format == "parquet":
            pq.write_table(pa.table({"text": texts}), new, row_group_size=10)
        else:
            new.write_text("".join(f"{json.dumps(self._line(text))}\n" for text in texts))
        new.replace(path)

    def _line(self, text: str) -> dict[str, Any]:
        if self._task != "batch file":
            return {"text": text}
        body = {"model": "fake/model", "messages": [{"role": "user", "content": text}]}
        return {"custom_id": text, "method": "POST", "url": "/v1/chat/completions", "body": body}

    def _correct(self) -> None:
        name = [*self._texts][-1]
        self._texts[name] = [
            re.sub(r"v\d+", f"v{self._number}", text) if row % 3 else text
            for row, text in enumerate(self._texts[name])
        ]
        self._versions[name].append(self._texts[name])
        self._write_file(name)
        self.history.append(f"corrected {name}")

    def _put_back(self, said: str) -> bool:
        """Give a file another of its contents, if a start was refused because it changed; tell whether."""
        changed = re.search(r"the input file \S*?([^/\s]+) changed", said)
        if changed is None:
            return False
        name = changed[1]
        versions = self._versions[name]
        versions.insert(0, versions.pop())
        self._texts[name] = versions[-1]
        self._write_file(name)
        self.history.append(f"another content of {name}")
        return True

    def _job(self, *, reuses: bool, limit: int | None, output: str) -> Path:
        job: dict[str, Any] = {
            "input": {"path": f"{self._source}/*.{self._format}", "columns": ["text"]},
            "prompt": {"text": "text"},
            "sampling": {"max_new_tokens": 24, "temperature": 0},
            "output": {"path": output, "part_rows": self._part_rows, "durable": 0.05},
            "engine": {"kind": "attach", "urls": [self.server.url]},
            "order": self._order,
            "limits": {"max_failed_rows": 10_000, "disk_wait": 20},
        }
        if self._task == "n":
            job["sampling"] |= {"n": 2, "temperature": 1}
        elif self._task == "accept":
            job["accept"] = {"regex": "(?s).+"}
        elif self._task == "rollout":
            job["prompt"] = {"rollout": "scenario_functions:ask"}
            job["python_path"] = [str(self.directory)]
        if limit is not None:
            job["input"]["limit"] = limit
        if reuses:
            job["output"]["reuse"] = str(self.directory / "earlier")
        self._number += 1
        path = self.directory / f"job-{self._number}.yaml"
        path.write_text(json.dumps(job))
        return path

    # Starts

    def _start(self, *options: str, strike: Strike | None = None, machine: str = "here", **job: Any) -> Start:
        job = {"reuses": False, "limit": self._limit, "output": self._run, **job}
        file = self._job(**job)
        stderr = self.directory / f"stderr-{self._number}"
        arguments = [str(file), "-q", *options]
        if options[:1] == ("estimate",):
            arguments = ["estimate", str(file)]
        elif self._task == "batch file":
            requests, results = str(self._source / "a.jsonl"), str(self._published)
            arguments = ["batch", requests, "-o", results, "--engine", str(file), "-q", *options]
        environ = {
            name: value
            for name, value in os.environ.items()
            if name.startswith(("AWS_", "XDG_", "BATCHRUNNER_", "PYTHONPATH"))
        }
        environ["BATCHRUNNER_TEST_GONE_AFTER_S"] = str(GONE_AFTER_S)
        process = _FORKS.Process(
            target=struck_command, args=(arguments, str(stderr), machine, strike, environ), daemon=False
        )
        process.start()
        changes = [f"{name}={value}" for name, value in job.items() if value]
        return Start(process, [*options, *changes], strike, stderr)

    def _wait(self, start: Start) -> int:
        """Wait for the end of a start, or until it sleeps (-SIGSTOP); check how it ended."""
        deadline = time.monotonic() + PATIENCE_S
        while start.process.is_alive() and not start.is_asleep:
            assert time.monotonic() < deadline, f"{start} hangs"
            start.process.join(0.02)
        if start.is_asleep:
            return -signal.SIGSTOP
        code = start.process.exitcode
        assert code is not None
        self.history.append(str(start))
        said = start.stderr.read_text()
        assert "Traceback" not in said, said
        assert code in {0, 1, 2, 130, 143, -signal.SIGKILL, -signal.SIGTERM}, f"{code}: {said}"
        if code == EXIT_WRONG:
            assert any(refusal in said for refusal in REFUSALS), said
        self.history[-1] += (
            f" ({said.strip().splitlines()[-1]})" if code == EXIT_WRONG and said.strip() else ""
        )
        return code

    def _random_strike(self) -> Strike | None:
        kind = self._random.choice((signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP, None))
        if kind is None:
            return None
        number = int(LATEST_CALL ** self._random.random())
        return Strike(kind, self._random.choice(CALLS), number)

    def _random_options(self) -> list[str]:
        options = []
        for option, chance in (("--fresh", 0.25), ("--retry-failed", 0.25), ("--background", 0.15)):
            if self._happens(chance) and not (option == "--background" and self._task == "n"):
                options.append(option)
        is_refused = "--fresh" in options and self._happens(0.8)
        if (self._joins or (self._mixes and self._happens(0.5))) and not is_refused:
            options.append("--join")
        return options

    def play(self) -> None:
        """Play the whole scenario; raises AssertionError where a row is lost, doubled or out of date."""
        self._add_file()
        if self._reuses:
            ill, self._ill = self._ill, set()
            assert self._wait(self._start(output=str(self.directory / "earlier"))) == 0
            self._ill = ill
        for _ in range(self._random.randint(2, 5)):
            self._change_world()
            self._step()
        self._finish()

    def _change_world(self) -> None:
        change = self._random.choice(("file", "correct", "well", "limit", None, None, None))
        if change == "file" and len(self._texts) < MOST_FILES and self._task != "batch file":
            self._add_file()
        elif change == "correct":
            self._correct()
        elif change == "well":
            self._ill = set()
            self.history.append("all rows are well")
        elif change == "limit":
            self._limit = None if self._limit is not None else FILE_ROWS // 2
            self.history.append(f"limit {self._limit}")

    def _step(self) -> None:
        """Start once, or several times at once; others go on where one is put to sleep."""
        if self._happens(0.1) and self._task != "batch file":
            self._wait_awake(self._start("estimate", strike=self._random_strike()))
        together = 3 if self._joins and self._happens(0.3) else 1
        starts, keeps = [], True
        for number in range(together):
            options = self._random_options()
            keeps &= not {"--fresh", "--retry-failed"}.intersection(options)
            reuses = self._reuses and self._happens(0.5)
            starts.append(
                self._start(
                    *options, strike=self._random_strike(), machine=f"machine-{number}", reuses=reuses
                )
            )
        codes = [self._wait(start) for start in starts]
        if -signal.SIGSTOP in codes:
            options = self._random_options()
            keeps &= not {"--fresh", "--retry-failed"}.intersection(options)
            other = self._start(*options, machine="another")
            codes.append(self._wait(other))
        for start in starts:
            if start.is_asleep:
                os.kill(int(start.process.pid or 0), signal.SIGCONT)
                codes.append(self._wait_awake(start))
        said = "".join(start.stderr.read_text() for start in starts)
        if self._happens(0.8):
            self._put_back(said)
        if "can only grow" in said:
            self._limit = None
        self._check(keeps=keeps, is_complete=False)

    def _wait_awake(self, start: Start) -> int:
        code = self._wait(start)
        if code == -signal.SIGSTOP:
            os.kill(int(start.process.pid or 0), signal.SIGCONT)
            code = self._wait(start)
        return code

    # What must hold

    def _results(self) -> list[dict[str, Any]]:
        run_dir = self._look()
        rows = []
        for part in run_dir.all_parts():
            rows += pq.read_table(part).to_pylist()
        return rows

    def _check_published(self) -> None:
        """The results of a batch file have a line for each of its lines."""
        if self._task == "batch file":
            lines = self._published.read_text().splitlines()
            assert [json.loads(line)["custom_id"] for line in lines] == self._texts["a.jsonl"]

    def _look(self) -> RunDir:
        run_dir = open_run(self._run)
        run_dir.bring_results()
        return run_dir

    def _check(self, *, keeps: bool, is_complete: bool) -> None:
        texts = [text for file in self._texts.values() for text in file]
        rows = self._results()
        ordinals = [row["row"] for row in rows]
        assert len(ordinals) == len({*ordinals}), f"rows twice: {sorted(ordinals)}"
        durable = {row for task in self._look().all_tasks() for row in read_done(task).rows}
        if keeps:
            assert durable >= self._durable, f"durable rows are gone: {self._durable - durable}"
        # What is half discarded may go with the next start, whatever that is asked for.
        self._durable = set() if self._look().is_being_discarded() else durable
        if not is_complete:
            return
        assert {*ordinals} == {*range(len(texts))}, f"lost: {sorted({*range(len(texts))} - {*ordinals})}"
        for row in rows:
            if row["error"] is not None:
                assert row["row"] in self._ever_ill, row
                continue
            assert row["custom_id" if self._task == "batch file" else "text"] == texts[row["row"]], row
            answers = row["output"] if self._task == "n" else [str(row["output"])]
            for answer in answers:
                assert f"to {texts[row['row']]}" in answer, row

    def _end_with(self, *options: str) -> Start:
        """Start without options until the end; `--join` where the run asks for it."""
        self._limit = None
        for _ in range(20):
            join = ["--join"] if self._joins else []
            start = self._start(*options, *join)
            code = self._wait(start)
            said = start.stderr.read_text()
            if code == 0:
                return start
            if "was started with --join" in said:
                self._joins = True
            elif code == EXIT_WRONG:
                assert self._put_back(said), said
            else:
                assert "run the same command again" in said or "took" in said, f"{code}: {said}"
        raise AssertionError("it does not end")

    def _finish(self) -> None:
        self._end_with()
        self._check(keeps=True, is_complete=True)
        self.server.forget()
        self._end_with()
        assert self.server.sent == [], "a finished run sends rows"
        failed = {row["row"] for row in self._results() if row["error"] is not None}
        self._ill = set()
        self._end_with("--retry-failed")
        assert {sent.row for sent in self.server.sent} == failed
        self._ever_ill = set()
        self._check(keeps=False, is_complete=True)
        self._check_published()


_FORKS = get_context("forkserver")
_FORKS.set_forkserver_preload(
    ["batchrunner.cli", "batchrunner.runner.foreground", "pyarrow.parquet", "duckdb"]
)


@contextlib.contextmanager
def telling(scenario: Scenario) -> Iterator[None]:
    """Add what was done to the failure of a scenario."""
    try:
        yield
    except BaseException as failure:
        failure.add_note(f"seed {scenario.seed}:\n  " + "\n  ".join(scenario.history))
        raise
