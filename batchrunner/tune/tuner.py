"""`batchrun tune`: trials of the job's own rows under other flags, within a time, and what they came to."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import uvloop
from pydantic import TypeAdapter, ValidationError

from batchrunner.advise.situation import command_line
from batchrunner.core.errors import JobError
from batchrunner.engines.device import gpus
from batchrunner.engines.model_files import check_model
from batchrunner.job.load import load_job
from batchrunner.job.spec import Duration, GatewayEngine, InprocessEngine, ServerEngine
from batchrunner.output.resume import fingerprint
from batchrunner.output.task_lock import hold_task
from batchrunner.report.report import duration
from batchrunner.runner.prepare import prepare
from batchrunner.tune.edit import apply_args, own_engine
from batchrunner.tune.history import History
from batchrunner.tune.machine import machine_for
from batchrunner.tune.outcome import Tuned, account
from batchrunner.tune.sample import take
from batchrunner.tune.search import Search, changes, key_of
from batchrunner.tune.space import ALLOWABLE
from batchrunner.tune.trial import Bench

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from batchrunner.job.spec import Job
    from batchrunner.runner.prepare import PreparedJob
    from batchrunner.tune.measure import Result
    from batchrunner.tune.search import Ask
    from batchrunner.tune.space import Args

log = logging.getLogger(__name__)


def tune(
    source: str,
    *,
    overrides: Sequence[str],
    budget_s: float,
    allow: Sequence[str] = (),
    apply: bool = False,
) -> Tuned:
    """Find the fastest safe flags for a job on this machine; with `apply` write them into its file.

    Trials are kept under `output.path`/tune: the same command goes on there. Raises BatchrunError: JobError
    where the engine is not one that the run launches, or not the file's own that `apply` is to write to;
    HeldError while another process is trying flags there.
    """
    unknown = sorted(set(allow) - set(ALLOWABLE))
    if unknown:
        raise JobError(f"--allow {unknown[0]}: give {' or '.join(ALLOWABLE)}, or both with a comma between")
    job = load_job(source, overrides=overrides)
    engine = engine_to_tune(job)
    if apply and own_engine(Path(source)) != job.engine:
        raise JobError(
            f"--apply: --set or BATCHRUN__ENGINE__… change the engine of {source}, which would then say what "
            "was not measured: put that into the file first, or leave --apply out"
        )
    check_model(engine.model)
    prepared = prepare(job)
    directory = prepared.run_dir.path / "tune"
    with hold_task(prepared.run_dir, directory=directory):
        found = _search(source, job, engine, prepared, directory, allow, budget_s)
    if apply and found.args:
        apply_args(Path(source), found.args)
        found = replace(found, applied=True)
    return found


def _search(
    source: str,
    job: Job,
    engine: ServerEngine,
    prepared: PreparedJob,
    directory: Path,
    allow: Sequence[str],
    budget_s: float,
) -> Tuned:
    """Try flags within the time, from what is kept in the directory on."""
    sample = take(prepared, directory)
    log.info("sample: %s", sample)
    machine = machine_for(job, engine, allow, one_of_several=isinstance(job.engine, GatewayEngine))
    facts = {
        "rows": fingerprint(job, prepared.dataset.files, engine.model).as_dict(),
        "job": [job.order, job.dedupe, job.window, job.tokenize, job.queue],
        "engine": [engine.args, engine.env, machine.flags.version],
        "machine": [machine.cpu, machine.cards, machine.card, machine.card_gb],
    }
    history = History(directory / "trials.jsonl", hashlib.sha256(key_of(facts)).hexdigest(), engine.args)
    bench = Bench(job, engine, sample, directory)
    search = Search(engine.args, machine)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        spent_s = runner.run(drive(search, history, bench.run, budget_s))
    return account(search, source, str(sample), spent_s)


def parse_budget(text: str) -> float:
    """Return a duration in seconds; raises JobError."""
    try:
        seconds: float = TypeAdapter(Duration).validate_python(text)
    except ValidationError as failure:
        raise JobError(
            f"--budget {text}: {failure.errors()[0]['msg'].removeprefix('Value error, ')}"
        ) from None
    return seconds


def engine_to_tune(job: Job) -> ServerEngine:
    """Return the engine that trials launch: of a gateway one replica alone.

    Raises JobError for one that the run does not launch.
    """
    match job.engine:
        case ServerEngine():
            return job.engine
        case InprocessEngine(model=model, args=args, device=device):
            return ServerEngine(kind="server", model=model, args=args, device=device)
        case GatewayEngine(model=str(model), tp=tp):
            found = gpus(job.engine.env)
            cards = {"CUDA_VISIBLE_DEVICES": ",".join(found[:tp])} if found else {}
            log.info("a gateway: one replica is tuned alone, for all of them")
            return ServerEngine(
                kind="server", model=model, python=job.engine.python, env={**job.engine.env, **cards},
                args={**job.engine.args, **({"tp-size": tp} if tp > 1 else {})}, device=job.engine.device,
                start_timeout=job.engine.start_timeout,
            )  # fmt: skip
        case _:
            raise JobError(
                f"engine.kind {job.engine.kind}: tuning starts SGLang with other flags, and this job starts "
                "none: use kind server or gateway with a model, or see what `batchrun advise` says"
            )


class Trials(Protocol):
    """Where finished trials are kept."""

    def find(self, args: Args, turn: int) -> Result | None:
        """Return a result that is kept."""

    def add(self, args: Args, result: Result) -> None:
        """Keep one."""


async def drive(
    search: Search,
    history: Trials,
    run: Callable[[Ask, int, float], Awaitable[Result]],
    budget_s: float,
) -> float:
    """Answer a search's questions, from what is kept or by a trial, within the budget; return what was spent.

    No trial begins that would take more than what is left, by the last that was measured, and one is ended
    when nothing is left; what it showed is not kept.
    """
    steps = search.steps()
    spent_s, last_s, number = 0.0, 0.0, 0
    ask = next(steps)
    while True:
        result = history.find(ask.args, ask.turn)
        if result is None:
            left_s = budget_s - spent_s
            if left_s <= last_s:
                search.reason = "the time for tuning is over"
                return spent_s
            result = await run(ask, number, left_s)
            if result.ended == "cut":
                search.reason = "the time for tuning is over"
                return spent_s + result.cost_s
            history.add(ask.args, result)
        number += 1
        spent_s += result.cost_s
        if result.ended == "measured":
            last_s = result.cost_s
        _tell(number, ask, result, search)
        try:
            ask = steps.send(result)
        except StopIteration:
            return spent_s


def _tell(number: int, ask: Ask, result: Result, search: Search) -> None:
    own, *_ = search.settings.values()
    flags = command_line(changes(ask.args, own.args)) or "the job's own flags"
    speed = "" if result.ended == "died" else f"{result.tokens_per_s:,.0f} output tok/s, "
    log.info(
        "trial %d: %s (%s): %s%s, %s", number, flags, ask.why, speed, result.why, duration(result.cost_s)
    )
