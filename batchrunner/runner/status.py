"""State of a run, read from its files. The run may have ended, or be running in other processes."""

import contextlib
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from pyroaring import BitMap64

from batchrunner.core.console import counted, duration, tell
from batchrunner.core.errors import BatchrunError
from batchrunner.job.output import REPETITION
from batchrunner.output.counts import Failures
from batchrunner.output.events import last_end, last_sample
from batchrunner.output.liveness import holders_of, is_recent, starting_of
from batchrunner.output.resume import DoneRows, read_done
from batchrunner.output.run_dir import MAIN_TASK, RunDir, look_at_run
from batchrunner.output.run_json import holds_run, read_run_json, require_run_json
from batchrunner.output.samples import LoggedSample
from batchrunner.report.report import cause_lines
from batchrunner.report.verdict import GO_ON
from batchrunner.runner.leases import Leases
from batchrunner.runner.progress import LINE_EVERY_S, sample_line

MOST_NAMED = 8
"""Maximum number of ended workers that are shown one by one. If there are more, only their sums are shown."""

COST_SHARE = 0.1
"""Maximum fraction of the time that is spent on reading the run's files for the progress line."""


class LeaseCounts(msgspec.Struct, kw_only=True):
    """Numbers of the leases (groups of rows that one worker does) of a shared run."""

    total: int
    free: int
    """Number of leases with unfinished rows that no worker holds."""
    done: int
    held: dict[str, int]
    """Number of leases that each worker holds."""


class TaskStatus(msgspec.Struct, kw_only=True):
    """The state of one worker of a run. docs/reference/json-output.md has the meaning of each field."""

    task: str
    running: str | None
    rows_on_disk: int
    rows_failed: int
    rows_cut: int
    output_tokens: int
    starting: dict[str, Any] | None
    last_sample: LoggedSample | None


class RunStatus(msgspec.Struct, kw_only=True):
    """The state of a run. docs/reference/json-output.md has the meaning of each field."""

    path: str
    running: str | None
    model: str | None
    simulated: bool
    rows_total: int | None
    rows_on_disk: int
    rows_failed: int
    rows_cut: int
    outputs_repeating: int
    rows_reused: int
    failures: list[dict[str, object]]
    reason: str | None
    next_step: str
    output_tokens: int
    finished: bool
    rows_per_s: float
    time_left_s: float | None
    leases: LeaseCounts | None
    tasks: list[TaskStatus]

    def as_dict(self) -> dict[str, Any]:
        """Return the state for `--json`."""
        state: dict[str, Any] = msgspec.to_builtins(self)
        return state


def status(run: str | Path | RunDir, *, watch: bool = True) -> RunStatus:
    """Return the state of a run. Raises OutputError if the path holds no run.

    Before the first worker has sent rows, the model is None. The number of rows is None then too, unless
    workers share the run and have a plan. `watch` is as in `holders_of`.
    """
    run_dir = look_at_run(run)
    # A run that has just begun may lack run.json. Any other path without run.json is an error.
    facts = read_run_json(run_dir) if holds_run(run_dir.path) else require_run_json(run_dir)
    run_dirs = run_dir.all_tasks()
    stored = [read_done(task) for task in run_dirs]
    samples = [last_sample(task.events) for task in run_dirs]
    holders = holders_of(list(zip(run_dirs, samples, strict=True)), watch=watch)
    tasks = [
        _task(run_dir=worker, done=done, sample=sample, holder=holder)
        for worker, done, sample, holder in zip(run_dirs, stored, samples, holders, strict=True)
    ]
    leases = Leases(run_dir.leases)
    leases.refresh()
    current_samples = [task.last_sample for task in tasks if task.last_sample]
    # A row that two workers did counts once.
    on_disk = len(BitMap64().union(*(done.rows for done in stored)))
    running = [task.running for task in tasks if task.running]
    total = leases.plan.rows_total if leases.plan else None
    if facts:
        total = facts["rows_total"]
    end = {} if running else last_end(run_dir.events)
    return RunStatus(
        path=run_dir.name,
        running=", ".join(running) or None,
        model=facts["engine"]["model"] if facts else None,
        simulated=bool(facts and facts["engine"]["simulated"]),
        rows_total=total,
        rows_on_disk=on_disk,
        rows_failed=sum(task.rows_failed for task in tasks),
        rows_cut=sum(task.rows_cut for task in tasks),
        outputs_repeating=sum(done.counts.finish_reasons[REPETITION] for done in stored),
        rows_reused=sum(done.counts.reused for done in stored),
        failures=sum((done.counts.failures for done in stored), start=Failures()).summary(),
        reason=end.get("reason") or None,
        next_step=end.get("next_step", GO_ON),
        output_tokens=sum(task.output_tokens for task in tasks),
        finished=facts is not None and not running and on_disk >= facts["rows_total"],
        rows_per_s=sum(sample.rows_per_s for sample in current_samples),
        time_left_s=None if total is None else time_left_s(tasks, missing=total - on_disk),
        leases=_count(leases) if leases.plan else None,
        tasks=tasks,
    )


def time_left_s(tasks: Sequence[TaskStatus], *, missing: int) -> float | None:
    """Return the predicted seconds to the end of a run; None while unknown.

    `missing` is the number of rows that are in no part file. Some of them are finished already: a part file
    is written up to 30 minutes after its first row.
    """
    rows_per_s = 0.0
    for task in tasks:
        sample = task.last_sample
        if sample is not None:
            missing -= max(0, sample.rows_done - task.rows_on_disk)
            # Each worker's remaining time implies a number of rows per second. The sum is the speed of the
            # run.
            if sample.time_left_s:
                rows_per_s += (sample.rows_total - sample.rows_done) / sample.time_left_s
    return max(0, missing) / rows_per_s if rows_per_s else None


def _count(leases: Leases) -> LeaseCounts:
    """Count the free, held and finished leases (parts of the rows)."""
    free, held = len(leases.free()), leases.held()
    return LeaseCounts(
        total=len(leases),
        free=free,
        done=len(leases) - free - len(held),
        held=dict(Counter(held.values())),
    )


def _task(run_dir: RunDir, done: DoneRows, sample: LoggedSample | None, holder: str | None) -> TaskStatus:
    """Return the state of one worker; `holder` is its process, None if it does not run."""
    counts = done.counts
    return TaskStatus(
        task=run_dir.task,
        running=holder,
        rows_on_disk=len(done),
        rows_failed=counts.failed,
        rows_cut=counts.cut,
        output_tokens=counts.output_tokens,
        starting=starting_of(run_dir) if holder else None,
        last_sample=sample if holder and sample and is_recent(sample) else None,
    )


def status_lines(state: RunStatus) -> list[str]:
    """Return the state of a run as lines for a person."""
    lines = [f"{state.path}: {state.model or 'no row was sent yet'}", _counts_line(state)]
    lines += cause_lines(state.failures, "failed")
    leases = state.leases
    if leases:
        held = sum(leases.held.values())
        lines.append(f"{leases.total:,} leases: {leases.done:,} done, {held:,} held, {leases.free:,} free")
    lines += _worker_lines(state)
    if len(state.tasks) > 1 and state.time_left_s is not None:
        lines.append(f"together: {state.rows_per_s:,.1f} rows/s, {duration(state.time_left_s)} left")
    if not state.running:
        lines.append("finished" if state.finished else _how_to_go_on(state))
    return lines


def _counts_line(state: RunStatus) -> str:
    """Return the counts of rows and output tokens as a line."""
    total, on_disk = state.rows_total, state.rows_on_disk
    reused = f"{state.rows_reused:,} reused, " if state.rows_reused else ""
    cut = f"{state.rows_cut:,} truncated at max_new_tokens, " if state.rows_cut else ""
    if state.outputs_repeating:
        cut += f"{state.outputs_repeating:,} stopped because they repeated themselves, "
    tokens = state.output_tokens
    # Rows without output tokens come from a task that generates no text.
    decoded = f", {cut}{tokens:,} output tokens" if tokens or not on_disk else ""
    stored = f"{on_disk:,} rows on disk"
    if total is not None:
        done_share = on_disk / total if total else 1.0
        stored = f"{on_disk:,} of {total:,} rows on disk ({done_share:.1%})"
    return f"{stored}, {reused}{state.rows_failed:,} failed{decoded}"


def _worker_lines(state: RunStatus) -> list[str]:
    """Return lines about the workers.

    If many workers have ended, one line has the sums over all of them.
    """
    lines: list[str] = []
    held = state.leases.held if state.leases else {}
    ended = [task for task in state.tasks if not task.running and task.task != MAIN_TASK]
    if len(ended) > MOST_NAMED:
        rows, failed = sum(task.rows_on_disk for task in ended), sum(task.rows_failed for task in ended)
        lines.append(f"{len(ended)} workers that ended: {counted(rows, 'row')} on disk, {failed:,} failed")
    for task in state.tasks:
        if task.running or len(ended) <= MOST_NAMED:
            lines += _task_lines(task, held.get(task.task, 0))
    return lines


def _how_to_go_on(state: RunStatus) -> str:
    """Return a line that says why a run stopped, if known, and what to do next."""
    if not state.next_step:
        return f"not running: {state.reason}"
    return f"not running{f' ({state.reason})' if state.reason else ''}: {state.next_step}"


def _task_lines(task: TaskStatus, held: int) -> list[str]:
    """Return lines about one worker, which holds `held` leases."""
    lines = []
    if task.task != MAIN_TASK:
        leases = f", holds {held} leases" if held else ""
        lines.append(f"{task.task}: {task.rows_on_disk:,} rows on disk, {task.rows_failed:,} failed{leases}")
    if task.running:
        lines.append(f"running: {task.running}")
        if starting := task.starting:
            step = "preparing the input" if starting["what"] == "input" else "engine starting"
            return [*lines, f"{step}, {starting['since_s']:.0f} s"]
        if sample := task.last_sample:
            age_s = max(0.0, time.time() - sample.time)
            lines.append(f"{age_s:.0f} s ago: {sample_line(sample)}")
    return lines


def show_progress(path: str, workers: int) -> float:
    """Print a progress line from the files of a run; return the monotonic time of the next line.

    `workers` is the number of workers that run.
    """
    started_at = time.monotonic()
    with contextlib.suppress(BatchrunError):  # no run yet before the first worker starts
        # The heartbeats of workers are not watched, because the caller knows which workers live.
        state = status(path, watch=False)
        if state.rows_total is not None:
            line = (
                f"{time.strftime('%H:%M:%S')} {state.rows_on_disk:,}/{state.rows_total:,} rows, "
                f"{state.rows_per_s:,.1f} rows/s, {counted(workers, 'worker')}, "
                f"{state.rows_failed:,} failed"
            )
            if state.time_left_s is not None:
                line += f", {duration(state.time_left_s)} left"
            tell(line)
    now = time.monotonic()
    return now + max(LINE_EVERY_S, (now - started_at) / COST_SHARE)
