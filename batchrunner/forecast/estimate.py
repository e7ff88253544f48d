"""`batchrun estimate`: time, cost and tokens of a job, from the answers to a sample of its rows."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from hashlib import sha256
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import msgspec
from pyroaring import BitMap64

from batchrunner.core.console import counted, duration
from batchrunner.core.engine_info import EngineInfo, TokenizerInfo
from batchrunner.core.errors import BatchrunError, CannotTokenizeError, JobError
from batchrunner.core.loop_thread import LoopThread
from batchrunner.core.types import BYTES_PER_TOKEN, Completion, Outcome, Request, RequestBody
from batchrunner.dispatch.concurrency.law import UNKNOWN_ENGINE_WINDOW
from batchrunner.dispatch.tokenize import make_encoder
from batchrunner.engines.base import ObservedEngine
from batchrunner.engines.http.server_info import limit_of
from batchrunner.engines.registry import launched_model, model_of
from batchrunner.engines.simulation.scheduler import CLIP_TOKENS, SchedulerConfig
from batchrunner.forecast.cold import cold_forecast
from batchrunner.forecast.job_time import (
    Attempt,
    Forecast,
    Interval,
    JobRow,
    Setting,
    choose,
    forecast,
    tokens_of,
)
from batchrunner.input.order_sample import decide_order
from batchrunner.input.prompt_bytes import prompt_bytes
from batchrunner.input.spread import spread_blocks
from batchrunner.job.engine import RunningServers
from batchrunner.job.load import load_job
from batchrunner.output.files import write_json
from batchrunner.output.resume import read_done
from batchrunner.output.run_dir import ESTIMATE, RunDir
from batchrunner.output.task_lock import hold_task
from batchrunner.runner.control import Control
from batchrunner.runner.plan import RunState, StartOptions, plan_run
from batchrunner.runner.prepare import PreparedJob, check_resumes, prepare
from batchrunner.runner.run import execute
from batchrunner.runner.shared_engine import SharedEngine, open_engine_of
from batchrunner.sglang.flags import CLIP
from batchrunner.sglang.model_files import cards_of, model_directory

if TYPE_CHECKING:
    from pathlib import Path

    from batchrunner.engines.base import Engine
    from batchrunner.job.spec import Job

log = logging.getLogger(__name__)

SHARE, FEWEST = 0.02, 30
"""The sample has at most the fraction SHARE of all rows, or FEWEST rows if that is more."""
BLOCKS, BLOCK_ROWS, READ_SHARE = 100, 500, 0.01
"""If an input has more than BLOCKS * BLOCK_ROWS rows, only BLOCKS blocks of it are read. A block has
BLOCK_ROWS rows, or more if all blocks together would otherwise have less than the fraction READ_SHARE of the
input."""
CLIENT_S = 0.00025
"""CPU seconds that the client needs to send a row and store its answer, besides reading and tokenizing."""
DEFAULT_NEW_TOKENS = 128
"""SGLang's own `max_new_tokens`."""
SCHEDULER_FLAGS = {
    "max-running-requests": "max_running",
    "max-total-tokens": "max_total_tokens",
    "chunked-prefill-size": "chunked_prefill_tokens",
    "max-prefill-tokens": "max_prefill_tokens",
    "schedule-conservativeness": "conservativeness",
    "prefill-decode-interval": "decode_interval",
}
"""Flags that only the scheduler reads, with the fields of SchedulerConfig that simulate them. After a change
of these flags, an estimate needs no new sample."""


class KeptSample(msgspec.Struct):
    """Answers to the sample: the content of estimate.json."""

    engine: str
    """Digest of the job's `engine`, without the fields that a forecast may change. It hides secrets."""
    most: int
    """Maximum number of rows that was set for the sample."""
    sampled: Setting
    start_s: float
    """Seconds of a run before and after the sending of rows, such as for the start of the engine."""
    info: EngineInfo
    attempts: list[Attempt]
    refused: int
    """Rows that failed without an answer."""
    row_s: float | None = None
    """Estimated seconds per row of the run that follows, from which that run shows its remaining time."""

    @property
    def rows(self) -> BitMap64:
        """Rows that were answered; equal ones share an answer."""
        return BitMap64([attempt.row.row for attempt in self.attempts])


_read_sample = msgspec.json.Decoder(KeptSample)


class Survey(NamedTuple):
    """What was read of the rows to do: all of these rows, or blocks of them."""

    rows: list[JobRow]
    """Rows that can be sent, in input order."""
    read: BitMap64
    not_sendable: int
    equal: float
    """Share of the rows that get the answer of an equal row."""
    row_s: float
    """Mean seconds for reading, rendering and tokenizing a row."""

    def sent_of(self, pending: BitMap64, answered: float = 1.0) -> int:
        """Return how many of the pending rows are sent; `answered` is the share that gets an answer."""
        sendable = sum(row.row in pending for row in self.rows) / len(self.read & pending)
        return max(1, round(len(pending) * sendable * answered * (1 - self.equal)))


@dataclass(frozen=True, slots=True)
class Estimate:
    """Time, cost and tokens of the run that follows; each figure is a median with a 90 % interval."""

    seconds: Interval
    """Time of the run, with the start of its engine."""
    gpu_hours: Interval
    cost: Interval | None
    """`gpu_hours` times the price of a GPU-hour; None if no price was given."""
    tokens: dict[str, Interval]
    """Prompt tokens (`prompt`), those of them that come from the cache (`cached`), and output tokens
    (`output`)."""
    passes: int
    """Forward passes of each scheduler."""
    limited_by: str
    """What limits the run: prefill, decode, pool, client, or "not known"."""
    why: tuple[str, ...]
    """Causes of the interval's width, the largest first. Also tells if rows of the sample failed, or if the
    result is only a range."""
    rows_to_do: int
    rows_sampled: int
    """Answered rows of the sample; 0 for an estimate without an engine."""
    rows_read: int
    rows_not_sendable: int
    """Rows that were read and cannot be sent."""

    def as_dict(self) -> dict[str, Any]:
        """Return the result for `--json`."""
        return asdict(self)

    def lines(self) -> list[str]:
        """Return the result as lines for a person."""
        rows = f"{counted(self.rows_to_do, 'row')} to do after a sample of {self.rows_sampled:,}"
        lines = [
            f"{rows}; of {self.rows_read:,} that were read {self.rows_not_sendable:,} cannot be sent",
            f"time: {_shown(self.seconds, duration)}, limited by: {self.limited_by}",
            f"GPU-hours: {_shown(self.gpu_hours, '{:,.2f}'.format)}",
        ]
        lines += [f"cost: {_shown(self.cost, '{:,.2f}'.format)}"] if self.cost else []
        lines += [f"{name} tokens: {_shown(count, '{:,.0f}'.format)}" for name, count in self.tokens.items()]
        return [*lines, *sorted(self.why)]  # so that two estimates are easy to compare


def _shown(figure: Interval, form: Callable[[float], str]) -> str:
    median, low, high = map(form, (figure.median, figure.low, figure.high))
    return median if low == high else f"{median} (90 %: {low} to {high})"


@dataclass(eq=False)
class SampledEngine(ObservedEngine):
    """Records the time and the tokens of each answer to the sample."""

    rows: dict[int, JobRow]
    """Rows of the sample as the survey read them, by ordinal."""
    attempts: list[Attempt] = field(default_factory=list)

    def observe(self, request: Request, completion: Completion, route: str, began: float) -> None:
        """Record an answer."""
        row = self.rows[request.ref.row]
        prompt, cached = completion.prompt_tokens or row.prompt, completion.cached_tokens or 0
        outputs = tuple(tokens or 1 for tokens in completion.completion_tokens) or (1,)
        row = row._replace(prompt=prompt, cached=cached)
        self.attempts.append(
            Attempt(row=row, began=began, ended=time.monotonic(), outputs=outputs, route=route)
        )


def _row_of(request: Request, sent: Request, cached: float) -> JobRow:
    """Describe a row, tokenized as `sent`; `cached` is the share of its prompt that the cache will have."""
    tokens = (
        len(sent.prompt) if sent.kind == "input_ids" else max(len(prompt_bytes(sent)) / BYTES_PER_TOKEN, 1.0)
    )
    most_tokens = request.sampling.get("max_new_tokens") or DEFAULT_NEW_TOKENS
    if request.task is not None:
        most_tokens = 1
    elif isinstance(request.prompt, RequestBody):
        most_tokens = request.prompt.most_tokens
    return JobRow(
        row=request.ref.row,
        prompt=tokens,
        cached=cached * tokens,
        asked=most_tokens,
        fixed=request.sampling.get("ignore_eos") is True,
    )


def survey(prepared: PreparedJob, todo: BitMap64, info: EngineInfo, sampled: BitMap64) -> Survey:
    """Read the rows to do, or only blocks of many rows, and the rows `sampled`; raises InputError."""
    job = prepared.job
    rows = _blocks_of(todo) | sampled
    encoder = None
    if prepared.renderer.kind is not None:
        with contextlib.suppress(CannotTokenizeError):  # then the number of tokens is guessed
            encoder = make_encoder(job, info, prepared.renderer.kind)
    # With another `order`, `decide_order` would not look for common prefixes.
    with_auto_order = replace(prepared, job=job.model_copy(update={"order": "auto"}))
    decision = decide_order(with_auto_order, todo)
    order = decision.order if job.order == "auto" else job.order
    cached_share, equal_share = decision.input_share, decision.input_equal
    if order == "prefix":
        cached_share, equal_share = decision.sorted_share, decision.sorted_equal
    if cached_share is None or not info.caches_prefixes:
        cached_share = 0.0
    sendable: list[JobRow] = []
    not_sendable = 0
    began = time.monotonic()
    for batch in prepared.batches(rows):
        requests = [item for item in batch if isinstance(item, Request)]
        not_sendable += sum(item.error is not None for item in batch if isinstance(item, Outcome))
        encoded = encoder.encode(requests) if encoder else requests
        for request, tokens in zip(requests, encoded, strict=True):
            if isinstance(tokens, Outcome):
                not_sendable += 1
            else:
                sendable.append(_row_of(request, tokens, cached_share))
    row_s = (time.monotonic() - began) / len(rows)
    if not sendable:
        raise JobError("no row can be sent: there is nothing to estimate (batchrun check says why)")
    return Survey(
        rows=sendable,
        read=rows,
        not_sendable=not_sendable,
        equal=equal_share if prepared.dedupes else 0.0,
        row_s=row_s,
    )


def _blocks_of(rows: BitMap64) -> BitMap64:
    """Return all rows, or, of many rows, only those in evenly spread blocks."""
    if len(rows) <= BLOCKS * BLOCK_ROWS:
        return rows
    size = max(BLOCK_ROWS, round(READ_SHARE * len(rows) / BLOCKS))
    blocks = spread_blocks(len(rows), blocks=BLOCKS, size=size)
    return BitMap64().union(*(rows[block.start : block.stop] for block in blocks))


def _config(job: Job, info: EngineInfo, schedulers: int) -> SchedulerConfig:
    """Return the flags of a scheduler: the job's, else the engine's reported ones, else SGLang's defaults."""
    args, env = getattr(job.engine, "args", {}), getattr(job.engine, "env", {})
    flags: dict[str, Any] = {
        "max_running": (info.max_running or UNKNOWN_ENGINE_WINDOW * schedulers) // schedulers,
        "max_total_tokens": (info.max_total_tokens or 1 << 40) // schedulers,
        "context_tokens": info.context_length,
        "clip_tokens": int(env.get(CLIP, CLIP_TOKENS)),
        "radix_cache": info.caches_prefixes,
    }
    flags |= {name: args[flag] for flag, name in SCHEDULER_FLAGS.items() if args.get(flag) is not None}
    if info.memory_caps_running and info.max_running:  # by its KV pool, or the state pool of a hybrid model
        flags["max_running"] = min(flags["max_running"], info.max_running // schedulers)
    flags["chunked_prefill_tokens"] = limit_of(flags.get("chunked_prefill_tokens", info.prefill_tokens))
    return SchedulerConfig(**flags)


def _measured(job: Job) -> str:
    """Return a digest of the fields of the job's engine whose change needs a new sample."""
    forecast_alone = {"replicas": True, "start_timeout": True, "cache_dir": True, "args": {*SCHEDULER_FLAGS}}
    return sha256(job.engine.model_dump_json(exclude=cast("Any", forecast_alone)).encode()).hexdigest()


def estimate(
    job: Job | Mapping[str, Any] | str | Path,
    *,
    overrides: Sequence[str] = (),
    rows: int = 500,
    price: float | None = None,
    replicas: int | None = None,
    workers: int = 1,
    cold: str | None = None,
) -> Estimate:
    """Estimate a job: its time, GPU-hours, tokens and cost, each with a 90 % interval.

    The job's engine answers a sample: 2 % of all rows, but at least 30 and at most `rows`. `run` does not
    send these rows again. `price` is the price of a GPU-hour. `replicas`, and `workers` of a joined run, may
    differ from the job's, because the estimate does not start them. If `cold` names a card, such as H100, no
    engine is asked, and the result is a range from data sheets. Raises BatchrunError.
    """
    options = (("rows", rows, 2), ("replicas", replicas, 1), ("workers", workers, 1), ("price", price, 0))
    for name, value, least in options:
        if value is not None and not least <= value < math.inf:
            raise JobError(f"{name} {value}", hint=f"give a number of at least {least}")
    loaded = load_job(job, overrides=overrides)
    request = _EstimateRequest(rows=rows, price=price, replicas=replicas, workers=workers, cold=cold)
    with contextlib.closing(prepare(loaded)) as prepared, LoopThread() as loop:
        return loop.call(lambda: _estimate(prepared, request))


@dataclass(frozen=True, slots=True, kw_only=True)
class _EstimateRequest:
    """The options of an estimate; see `estimate`."""

    rows: int
    price: float | None
    replicas: int | None
    workers: int
    cold: str | None


class _Basis(NamedTuple):
    """A forecast, and what it was made from."""

    forecast: Forecast
    survey: Survey
    pending: BitMap64
    """Rows that the run will send."""
    copies: int
    """Replicas of all workers together."""
    tp: int | None
    """Cards of a replica, unless the job's flags say it."""
    rows_sampled: int = 0


async def _estimate(prepared: PreparedJob, request: _EstimateRequest) -> Estimate:
    job = prepared.job
    check_resumes(prepared, model_of(job.engine))
    if request.cold is not None:
        basis = _from_data_sheet(prepared, request, request.cold)
    else:
        basis = await _from_sample(prepared, request)
    result = basis.forecast
    gpu_hours = result.seconds.times(_cards(job, basis.tp) * basis.copies / 3600)
    tokens = result.tokens
    if job.forward is not None:  # a task without decoding
        tokens = {**tokens, "output": Interval(0, 0, 0)}
    return Estimate(
        seconds=result.seconds,
        gpu_hours=gpu_hours,
        cost=None if request.price is None else gpu_hours.times(request.price),
        tokens=tokens,
        passes=result.passes,
        limited_by=result.limited_by,
        why=result.why,
        rows_to_do=len(basis.pending),
        rows_sampled=basis.rows_sampled,
        rows_read=len(basis.survey.read),
        rows_not_sendable=basis.survey.not_sendable,
    )


def _from_data_sheet(prepared: PreparedJob, request: _EstimateRequest, card: str) -> _Basis:
    """Forecast the pending rows by the data sheet of a card."""
    job = prepared.job
    pending = _pending_or_raise(prepared.selected(), prepared.run_dir)
    tp = getattr(job.engine, "tp", None)
    copies = _copies(job, request, default=1)
    model = launched_model(job.engine) or ""
    directory = str(model_directory(model))
    info = EngineInfo("cold", model, tokenizing=TokenizerInfo(directory, directory))
    surveyed = survey(prepared, pending, info, BitMap64())
    result = cold_forecast(
        model,
        card,
        surveyed.rows,
        total=surveyed.sent_of(pending),
        samples=job.sampling.n,
        cards=_cards(job, tp),
        copies=copies,
    )
    return _Basis(forecast=result, survey=surveyed, pending=pending, copies=copies, tp=tp)


async def _from_sample(prepared: PreparedJob, request: _EstimateRequest) -> _Basis:
    """Forecast the pending rows from a sample: that of an earlier estimate, or else a new one.

    The sample is stored for later estimates.
    """
    job, run_dir, selected = prepared.job, prepared.run_dir, prepared.selected()
    path = run_dir.path / ESTIMATE
    most = min(request.rows, max(FEWEST, round(SHARE * len(selected))))
    sample = _kept_sample(path, job, most)
    if sample is not None:
        pending = _pending_or_raise(selected, run_dir)
        surveyed = survey(prepared, pending, sample.info, sample.rows)
    else:
        with hold_task(run_dir):  # raises if a run is active: no second engine may start
            pass
        if job.output.reuse is not None:  # rows that get an earlier run's answer take no time
            await execute(job, sample=BitMap64())
        pending = _pending_or_raise(selected, run_dir)
        sample, surveyed = await _take_sample(prepared, pending, most)
        pending = _pending(selected, run_dir)
    copies = _copies(job, request, default=len(sample.info.routes))
    result = _forecast(job, surveyed, sample, pending=pending, copies=copies, workers=request.workers)
    is_for_the_job = request.replicas is None and request.workers == 1
    if is_for_the_job:
        sending_s = max(0.0, result.seconds.median - sample.start_s)
        sample.row_s = sending_s / max(len(pending), 1)
    write_json(path, msgspec.to_builtins(sample))
    return _Basis(
        forecast=result,
        survey=surveyed,
        pending=pending,
        copies=copies,
        tp=sample.info.tp,
        rows_sampled=len(sample.rows),
    )


def _copies(job: Job, request: _EstimateRequest, *, default: int) -> int:
    """Return the replicas of all workers together; `default` is for a job that does not say how many."""
    replicas = request.replicas or getattr(job.engine, "replicas", None)
    if not isinstance(replicas, int):
        replicas = default
    workers = 1 if isinstance(job.engine, RunningServers) else request.workers  # running servers are shared
    return replicas * workers


def _pending(selected: BitMap64, run_dir: RunDir) -> BitMap64:
    """Return the rows that a start without options would send."""
    return plan_run(StartOptions(), RunState.of(selected, read_done(run_dir))).rows


def _pending_or_raise(selected: BitMap64, run_dir: RunDir) -> BitMap64:
    """Return the rows that a start without options would send; raises JobError if there are none."""
    pending = _pending(selected, run_dir)
    if not pending:
        raise JobError(f"{run_dir.name}: all rows are done: there is nothing to estimate")
    return pending


def _cards(job: Job, tp: int | None) -> int:
    """Return the number of cards of a replica: as the job's flags say, or else `tp`."""
    return cards_of({"tp-size": tp or 1} | getattr(job.engine, "args", {}))


def _kept_sample(path: Path, job: Job, most: int) -> KeptSample | None:
    """Return an earlier estimate's sample if it has the same engine and a limit of at least `most`."""
    with contextlib.suppress(OSError, msgspec.MsgspecError):
        sample = _read_sample.decode(path.read_bytes())
        return sample if sample.engine == _measured(job) and sample.most >= most else None
    return None


async def _take_sample(prepared: PreparedJob, pending: BitMap64, most: int) -> tuple[KeptSample, Survey]:
    """Let the engine answer a sample of the pending rows; return it, and the survey. Raises BatchrunError.

    At most half of the sample is in flight at once, so that prompts arrive while other rows decode, as in the
    job. If the task does not decode, the whole sample is in flight at once, so that its passes are as full as
    the job's.
    """
    job, run_dir, began = prepared.job, prepared.run_dir, time.monotonic()
    async with contextlib.AsyncExitStack() as stack:
        logs = run_dir.log_directory
        opened = await open_engine_of(
            job, prepared.model_task, log_directory=logs, control=Control(), stack=stack
        )
        engine, info = opened.engine, opened.info
        schedulers = max(len(await engine.loads()), len(info.routes))
        start_s = time.monotonic() - began
        surveyed = survey(prepared, pending, info, BitMap64())
        rows = {row.row: row for row in choose(surveyed.rows, most)}
        ordinals = BitMap64(rows)
        log.info("sending a sample of %s", counted(len(rows), "row"))
        window = max(1, len(rows) // 2) if job.forward is None else len(rows)
        window = window if job.window == "auto" else min(job.window, window)
        recorder, began = SampledEngine(engine, rows), time.monotonic()
        report = await execute(
            job.model_copy(update={"window": window}),
            engine=SharedEngine(cast("Engine", recorder), info),
            sample=ordinals,
        )
        start_s += time.monotonic() - began  # the time of sending is subtracted below
    attempts = recorder.attempts
    sample = KeptSample(
        engine=_measured(job),
        most=most,
        sampled=Setting(_config(job, info, schedulers), schedulers),
        start_s=start_s,
        info=info,
        attempts=attempts,
        refused=0,
    )
    sample.refused = len((ordinals & read_done(run_dir).failed) - sample.rows)
    if not sample.rows or (sample.refused and len(sample.rows) == 1):
        why = report.failures[0]["example"] if report.failures else report.reason
        answered = f"{len(sample.rows)} of {counted(len(rows), 'row')} of the sample answered"
        raise BatchrunError(f"{answered}, too few to estimate the rest: {why}")
    sample.start_s -= max(attempt.ended for attempt in attempts) - min(attempt.began for attempt in attempts)
    return sample, surveyed


def _forecast(
    job: Job, surveyed: Survey, sample: KeptSample, *, pending: BitMap64, copies: int, workers: int
) -> Forecast:
    """Forecast the pending rows from the sample, on `copies` of the engine and with `workers` clients."""
    rows = [row for row in surveyed.rows if row.row in pending]
    if not rows:
        none = Interval(0, 0, 0)
        return Forecast(
            seconds=none,
            tokens=tokens_of(surveyed.rows, 0, none),
            passes=0,
            limited_by="not known",
            why=("the sample had all remaining rows",),
        )
    counted_prompts = {attempt.row.row: attempt.row.prompt for attempt in sample.attempts}
    guessed_prompts = {row.row: row.prompt for row in surveyed.rows if row.row in counted_prompts}
    factor = 1.0
    if guessed_prompts:
        factor = sum(counted_prompts[row] for row in guessed_prompts) / sum(guessed_prompts.values())
    rows = [row._replace(prompt=row.prompt * factor, cached=row.cached * factor) for row in rows]
    sampled, info = sample.sampled, sample.info
    schedulers = sampled.schedulers // len(info.routes) * copies
    window = None if job.window == "auto" else max(1, job.window * workers // schedulers)
    rows_of_sample = len(counted_prompts) + sample.refused
    result = forecast(
        sample.attempts,
        sampled,
        Setting(_config(job, info, sampled.schedulers), schedulers, window),
        rows,
        total=surveyed.sent_of(pending, len(counted_prompts) / rows_of_sample),
        start_s=sample.start_s,
        client_s=(surveyed.row_s + CLIENT_S) / workers,
    )
    if not sample.refused:
        return result
    failed = f"{sample.refused:,} of {rows_of_sample:,} rows of the sample failed"
    return result._replace(why=(*result.why, failed))
