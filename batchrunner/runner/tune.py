"""`batchrun tune`: tries other flags on a job's own rows, within a time budget, and summarizes the trials."""

import asyncio
import contextlib
import hashlib
import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import msgspec
import uvloop
import yaml
from pydantic import TypeAdapter, ValidationError

from batchrunner.core.console import duration
from batchrunner.core.errors import EngineStartError, JobError
from batchrunner.engines.registry import engine_of
from batchrunner.job.engine import ServerEngine
from batchrunner.job.fields import Duration
from batchrunner.job.load import load_job
from batchrunner.job.spec import Job
from batchrunner.output.addresses import store_address
from batchrunner.output.run_dir import TUNE
from batchrunner.output.run_json import fingerprint
from batchrunner.output.task_lock import hold_task
from batchrunner.runner.prepare import PreparedJob, prepare
from batchrunner.runner.trial import TrialRunner
from batchrunner.runner.tuning_sample import write_sample
from batchrunner.sglang.flags import arguments_in, command_line, numbers_in, variables_in
from batchrunner.sglang.model_files import check_model, with_tp
from batchrunner.tuning.flags import FLAGS
from batchrunner.tuning.measurement import TrialResult, TrialSigns
from batchrunner.tuning.memory import Memory
from batchrunner.tuning.search import FlagSetting, Search, TrialRequest, changes, key_of
from batchrunner.tuning.space import Args, Machine, machine_for

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TuningSummary:
    """Result of `batchrun tune`: the fastest flags, and all trials."""

    job: str
    """Path of the job file."""
    sample: str
    """Description of the rows of the trials."""
    spent_s: float
    """Seconds that all trials took, including the starts of their servers. Trials of an interrupted search
    count too."""
    reason: str
    """Reason why the search ended."""
    own_tokens_per_s: float
    """Output tokens per second with the job's own flags: the geometric mean over their trials."""
    best_tokens_per_s: float
    """Output tokens per second with the best flags: the geometric mean over their trials."""
    args: Args
    """Changes to `engine.args`; empty if the job's own flags are the fastest."""
    trials: list[dict[str, Any]] = field(default_factory=list)
    """For each combination of flags that was tried: the flags that differ from the job's, speeds, load
    statistics and verdict."""
    notes: dict[str, str] = field(default_factory=dict)
    """Result of each flag, or the reason why it was not tried."""
    env: dict[str, str] = field(default_factory=dict)
    """Changes to `engine.env`."""
    layout: dict[str, Any] = field(default_factory=dict)
    """Other changes to `engine`: `kind`, `replicas`, and the GPUs of each replica (`tp`)."""
    warnings: list[str] = field(default_factory=list)
    """Effects of the best flags on the answers, one line for each flag that may change answers."""

    def as_dict(self) -> dict[str, Any]:
        """Return the summary as `--json` prints it."""
        return asdict(self)

    def lines(self) -> list[str]:
        """Return the lines for the terminal."""
        head = f"{'output tok/s':>20} {'running':>8} {'KV':>5} {'queue':>6} {'retracted':>10}  flags"
        lines = [f"trials: {self.sample}", head]
        for trial in self.trials:
            lines += _trial_lines(trial)
        lines += ["", *(f"{name}: {note}" for name, note in self.notes.items()), ""]
        lines.append(f"{self.reason}, after {duration(self.spent_s)}")
        engine_changes = dict(self.layout)
        if self.args:
            engine_changes["args"] = self.args
        if self.env:
            engine_changes["env"] = self.env
        if not engine_changes:
            return [*lines, "the job's own flags stay: no other flags were faster by more than the noise"]
        gain = self.best_tokens_per_s / self.own_tokens_per_s
        speeds = f"{self.own_tokens_per_s:,.0f} -> {self.best_tokens_per_s:,.0f} output tok/s"
        lines.append(f"{gain:.2f} x as fast as the job's own flags ({speeds}) with")
        lines += [
            "",
            *yaml.safe_dump({"engine": engine_changes}, sort_keys=False).splitlines(),
            "",
            *self.warnings,
        ]
        return [*lines, f"add this to {self.job}"]


def summarize(search: Search, machine: Machine, source: str, sample: str, spent_s: float) -> TuningSummary:
    """Summarize a search. Raises EngineStartError if not even the job's own flags work."""
    job_setting, best = search.own, search.winner
    if not job_setting.speeds:
        raise EngineStartError(search.reason)
    changed = changes(best.args, job_setting.args)
    # A job file sets the number of replicas, and maybe `tp`, in fields of its own.
    layout: dict[str, Any] = {}
    if best.replicas != machine.replicas:
        layout = {"replicas": best.replicas}
    if machine.says_tp and "tp-size" in changed:
        layout["tp"] = changed.pop("tp-size")
    risky = [name for name in changed if name in FLAGS and FLAGS[name].changes_answers]
    waiting = job_setting.newest.signs.queue
    queue_note = (
        f"not tuned, because the run sets its length; {waiting:.0f} requests with the job's own flags"
    )
    # Speeds are given for as many replicas as fit on the GPUs. The job itself may have fewer.
    own_tokens_per_s = geometric_mean(job_setting.speeds) * machine.replicas / job_setting.replicas
    return TuningSummary(
        job=source,
        sample=sample,
        spent_s=round(spent_s, 1),
        reason=search.reason,
        own_tokens_per_s=round(own_tokens_per_s, 1),
        best_tokens_per_s=round(geometric_mean(best.speeds), 1),
        args=arguments_in(changed),
        env=variables_in(changed),
        layout=layout,
        trials=[
            _trial(setting, job_setting.args) | {"best": setting is best}
            for setting in search.settings.values()
            if setting.results
        ],
        notes={"queue": queue_note, **search.notes},
        warnings=[f"{name}: may change answers: compare some answers before the run" for name in risky],
    )


def _trial(setting: FlagSetting, job_args: Args) -> dict[str, Any]:
    """Return the entry of a combination of flags for `TuningSummary.trials`."""
    return {
        "args": changes(setting.args, job_args),
        "replicas": setting.replicas,
        # Without a complete trial, give the speed of the newest one.
        "tokens_per_s": setting.speeds or [setting.newest.tokens_per_s],
        "ended": setting.newest.ended,
        "verdict": setting.verdict,
        "cost_s": round(sum(result.cost_s for result in setting.results), 1),
        "signs": asdict(setting.newest.signs),
    }


def _trial_lines(trial: dict[str, Any]) -> list[str]:
    """Return the two lines of a trial for the terminal: its table row, and its verdict."""
    signs, speeds = trial["signs"], trial["tokens_per_s"]
    speed = "died" if trial["ended"] == "died" else " ".join(f"{value:,.0f}" for value in speeds)
    running = f"{signs['running']:.0f}" + (f"/{signs['max_running']}" if signs["max_running"] else "")
    flags = command_line(trial["args"]) or "the job's own"
    flags += f", {trial['replicas']} replicas" if trial["replicas"] > 1 else ""
    mark = "  <- best" if trial["best"] else ""
    line = (
        f"{speed:>20} {running:>8} {signs['usage']:>5.2f} {signs['queue']:>6.0f} "
        f"{signs['retractions_per_min']:>6.0f}/min  {flags}{mark}"
    )
    if not trial["verdict"]:
        return [line]
    indent = " " * 54  # the verdict stands below the flags
    return [line, f"{indent}{trial['verdict']}"]


def tune(
    source: str,
    *,
    overrides: Sequence[str],
    budget_s: float,
    allow_fp8: bool = False,
) -> TuningSummary:
    """Find the fastest safe flags for a job on this machine; with `allow_fp8`, try 8-bit formats too.

    Trials are stored in the directory `tune` of `output.path`. The same command resumes from there. Raises
    JobError if the job does not start its own engine, TaskHeldError while another process tunes the same
    output path, and other BatchrunErrors.
    """
    job = load_job(source, overrides=overrides)
    if job.forward is not None:
        raise JobError(
            f"task: {job.task}: only a job with `task: generate` can be tuned",
            hint="use a job with `task: generate`",
        )
    engine = engine_to_tune(job)
    if store_address(job.output.path):
        raise JobError(
            f"output.path {job.output.path}: trials can only be stored on a local disk",
            hint="tune with --set output.path=DIRECTORY",
        )
    check_model(engine.model)
    with contextlib.closing(prepare(job)) as prepared:
        directory = prepared.run_dir.path / TUNE
        with hold_task(prepared.run_dir, directory=directory):
            machine = machine_for(job, engine, allow_fp8=allow_fp8)
            return _search(
                source,
                prepared=prepared,
                engine=engine,
                directory=directory,
                budget_s=budget_s,
                machine=machine,
            )


def _search(
    source: str,
    prepared: PreparedJob,
    engine: ServerEngine,
    directory: Path,
    budget_s: float,
    machine: Machine,
) -> TuningSummary:
    """Try flags within the time budget. Trials that were finished before are not repeated."""
    job = prepared.job
    sample = write_sample(prepared, directory)
    log.info("sample: %s", sample)
    # Trials of an earlier search are reused only if all these facts are the same.
    facts = {
        "rows": fingerprint(job, prepared.dataset.facts(), engine.model),
        "job": [job.order, job.dedupe, job.window, job.tokenize],
        "engine": [engine.args, engine.env, machine.flags.version],
        "machine": [machine.cpu, machine.card, machine.card_gb],
        # The names are part of the key. So a version of batchrunner that records other statistics does not
        # reuse these trials.
        "signs": [sign.name for sign in fields(TrialSigns)],
    }
    # Some environment variables of SGLang are numbers that are tuned like flags.
    job_flags = {**engine.args, **numbers_in(engine.env)}
    history = TrialHistory(
        Memory(directory / "trials.jsonl"), hashlib.sha256(key_of(facts)).hexdigest(), job_flags
    )
    trials = TrialRunner(job, engine, sample, directory)
    search = Search(job_flags, machine)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        spent_s = runner.run(run_search(search, history, trials.run, budget_s))
    return summarize(search, machine, source=source, sample=str(sample), spent_s=spent_s)


def parse_budget(text: str) -> float:
    """Return the seconds of a duration such as "30m". Raises JobError if `text` is not a duration."""
    try:
        seconds: float = TypeAdapter(Duration).validate_python(text)
    except ValidationError as failure:
        problem = failure.errors()[0]["msg"].removeprefix("Value error, ")
        raise JobError(f"--budget {text}: {problem}") from None
    return seconds


def engine_to_tune(job: Job) -> ServerEngine:
    """Return the specification of one replica of the job's engine, which each trial starts.

    Raises JobError if the job does not start its own engine.
    """
    if not isinstance(job.engine, ServerEngine):
        raise JobError(
            f"engine.kind {job.engine.kind}: tuning restarts SGLang, but this job starts no server",
            hint="set `engine.kind: server`, or use `batchrun advise`",
        )
    engine = engine_of(job)
    assert isinstance(engine, ServerEngine)
    return with_tp(engine).model_copy(update={"replicas": 1})


class KeptTrial(msgspec.Struct):
    """A finished trial, as `TrialHistory` stores it."""

    args: Args
    """Flags that differ from the job's own."""
    result: TrialResult


_read_trial = msgspec.json.Decoder(KeptTrial)


class TrialHistory:
    """The finished trials of one job on one machine, from which a search resumes."""

    def __init__(self, memory: Memory, about: str, base: Args) -> None:
        """Read the trials with the digest `about`, which covers rows, job, engine and machine.

        `base` has the job's own flags. Only flags that differ from the job's own are written, so that no
        secret of the job is written.
        """
        self._memory = memory
        self._about = about
        self._base = base
        self._results = defaultdict[bytes, list[TrialResult]](list)
        for content in memory.recall("trial", about):
            # Skip a trial that another version of batchrunner stored in another format.
            with contextlib.suppress(msgspec.MsgspecError):
                trial = _read_trial.decode(content)
                self._results[key_of(trial.args)].append(trial.result)

    def find(self, args: Args, turn: int) -> TrialResult | None:
        """Return the result of a finished trial, or None.

        `turn` counts the trials of the same flags from 0.
        """
        results = self._results[key_of(changes(args, self._base))]
        return results[turn] if turn < len(results) else None

    def add(self, args: Args, result: TrialResult) -> None:
        """Store the result of a trial durably. Raises StorageError."""
        changed = changes(args, self._base)
        self._memory.append("trial", KeptTrial(changed, result), about=self._about)
        self._results[key_of(changed)].append(result)


async def run_search(
    search: Search,
    history: TrialHistory,
    run: Callable[[TrialRequest, int, float], Awaitable[TrialResult]],
    budget_s: float,
) -> float:
    """Run a search for at most `budget_s` seconds; return the seconds spent.

    `run` runs a trial, given its request, its number and its maximum seconds. Results of earlier trials in
    `history` are used again. No trial begins if less time remains than the last complete trial took. A trial
    that still runs at the end is stopped, and its result is dropped.
    """
    steps = search.steps()
    spent_s, cost_of_last_s, number = 0.0, 0.0, 0
    request = next(steps)
    while True:
        result = history.find(request.args, request.turn)
        if result is None:
            remaining_s = budget_s - spent_s
            if remaining_s <= cost_of_last_s:
                search.reason = "the time budget is used up"
                return spent_s
            result = await run(request, number, remaining_s)
            if result.ended == "cut":
                search.reason = "the time budget is used up"
                return spent_s + result.cost_s
            history.add(request.args, result)
        number += 1
        spent_s += result.cost_s
        if result.ended == "measured":  # the trial of a server that died early says nothing about the cost
            cost_of_last_s = result.cost_s
        _log_trial(number, request, result, search)
        try:
            request = steps.send(result)
        except StopIteration:
            return spent_s


def _log_trial(number: int, request: TrialRequest, result: TrialResult, search: Search) -> None:
    flags = command_line(changes(request.args, search.own.args)) or "the job's own flags"
    speed = "" if result.ended == "died" else f"{result.tokens_per_s:,.0f} output tok/s, "
    log.info(
        "trial %d: %s (%s): %s%s, %s", number, flags, request.why, speed, result.why, duration(result.cost_s)
    )
