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

SHARE = 0.02
"""Maximum size of the sample, as a fraction of all rows. FEWEST rows are always allowed."""
FEWEST = 30
"""Minimum size of the sample in rows, even if it exceeds the fraction SHARE of all rows."""
BLOCKS = 100
"""Of a large input (more than BLOCKS * BLOCK_ROWS rows), only this number of evenly spread blocks is read."""
BLOCK_ROWS = 500
"""Minimum number of rows in a block."""
READ_SHARE = 0.01
"""Of a very large input, at least this fraction of the rows is read, in larger blocks."""
CLIENT_S = 0.00025
"""CPU seconds that the client needs to send a row and store its answer, besides reading and tokenizing."""
DEFAULT_NEW_TOKENS = 128
"""SGLang's default of `max_new_tokens`."""
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
    """The answers to a sample, with the facts that a later estimate needs: the content of estimate.json."""

    engine: str
    """Digest of the job's `engine`, without the fields that a forecast may change. A digest stores no
    secrets."""
    most: int
    """Maximum number of rows of the sample."""
    sampled: Setting
    """Schedulers that answered the sample."""
    start_s: float
    """Seconds of a run in which no rows are sent, such as the start of the engine."""
    info: EngineInfo
    """Properties of the engine that answered the sample."""
    attempts: list[Attempt]
    """Answers to the rows of the sample."""
    refused: int
    """Number of rows of the sample that failed without an answer."""
    row_s: float | None = None
    """Estimated seconds per row of the run that follows. The run shows its remaining time from it."""

    @property
    def rows(self) -> BitMap64:
        """Rows of the sample that were sent and answered.

        Duplicates of these rows are not included.
        """
        return BitMap64([attempt.row.row for attempt in self.attempts])


_read_sample = msgspec.json.Decoder(KeptSample)


class Survey(NamedTuple):
    """Lengths of the rows that are still to be sent. If there are many, only blocks of them were read."""

    rows: list[JobRow]
    """Rows that were read and can be sent, in input order."""
    read: BitMap64
    """All rows that were read."""
    not_sendable: int
    """Number of rows that were read and cannot be sent."""
    equal: float
    """Fraction of the rows that are not sent, because they get the answer of an equal row."""
    row_s: float
    """Mean number of seconds for reading a row, building its prompt and tokenizing it."""

    def answered_of(self, pending: BitMap64, answered: float = 1.0) -> int:
        """Return how many of the pending rows the engine will answer.

        `answered` is the fraction of the sent rows that get an answer.
        """
        # The fraction of sendable rows is that of the pending rows that were read.
        sendable_share = sum(row.row in pending for row in self.rows) / len(self.read & pending)
        different_share = 1 - self.equal  # Of equal rows, only one is sent.
        return max(1, round(len(pending) * sendable_share * answered * different_share))


@dataclass(frozen=True, slots=True)
class Estimate:
    """Estimated time, cost and tokens of a run. Each figure is a median with a 90 % interval."""

    seconds: Interval
    """Time of the run in seconds, including the start of the engine."""
    gpu_hours: Interval
    """GPU-hours of all replicas."""
    cost: Interval | None
    """`gpu_hours` times the price of a GPU-hour; None if no price was given."""
    tokens: dict[str, Interval]
    """Prompt tokens (`prompt`), the prompt tokens that come from the prefix cache (`cached`), and output
    tokens (`output`)."""
    passes: int
    """Forward passes of each scheduler."""
    limited_by: str
    """Bottleneck of the run: "prefill", "decode", "pool" (the KV pool), "client", or "not known"."""
    why: tuple[str, ...]
    """Why the intervals are wide: the causes, the largest first. Further texts say if rows of the sample
    failed, or if the result is only a rough range."""
    rows_to_do: int
    """Number of rows that the run will send."""
    rows_sampled: int
    """Number of answered rows of the sample; 0 for an estimate without an engine."""
    rows_read: int
    """Number of rows that were read for the estimate."""
    rows_not_sendable: int
    """Number of rows that were read and cannot be sent."""

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON object that `batchrun estimate --json` prints."""
        return asdict(self)

    def lines(self) -> list[str]:
        """Return the lines that `batchrun estimate` prints."""
        rows = f"{counted(self.rows_to_do, 'row')} to do after a sample of {self.rows_sampled:,}"
        lines = [
            f"{rows}; {self.rows_not_sendable:,} of {counted(self.rows_read, 'row')} read cannot be sent",
            f"time: {_shown(self.seconds, duration)}, limited by: {self.limited_by}",
            f"GPU-hours: {_shown(self.gpu_hours, '{:,.2f}'.format)}",
        ]
        if self.cost:
            lines.append(f"cost: {_shown(self.cost, '{:,.2f}'.format)}")
        lines += [f"{name} tokens: {_shown(count, '{:,.0f}'.format)}" for name, count in self.tokens.items()]
        # A fixed order makes two estimates easy to compare.
        return [*lines, *sorted(self.why)]


def _shown(figure: Interval, to_text: Callable[[float], str]) -> str:
    """Return a figure with its interval as text; `to_text` formats each number."""
    median, low, high = map(to_text, (figure.median, figure.low, figure.high))
    return median if low == high else f"{median} (90 %: {low} to {high})"


@dataclass(eq=False)
class SampledEngine(ObservedEngine):
    """An engine that records the time and the tokens of each answer to the sample."""

    rows: dict[int, JobRow]
    """Rows of the sample, by their number in the input, with the lengths that were read before."""
    attempts: list[Attempt] = field(default_factory=list)
    """Answers so far."""

    def observe(self, request: Request, completion: Completion, route: str, began: float) -> None:
        """Record an answer; `began` is the monotonic time at which the request was sent."""
        row = self.rows[request.ref.row]
        # Token counts that the engine does not report come from the survey, or are the minimum.
        prompt, cached = completion.prompt_tokens or row.prompt, completion.cached_tokens or 0
        outputs = tuple(tokens or 1 for tokens in completion.completion_tokens) or (1,)
        row = row._replace(prompt=prompt, cached=cached)
        self.attempts.append(
            Attempt(row=row, began=began, ended=time.monotonic(), outputs=outputs, route=route)
        )


def _row_of(request: Request, encoded: Request, cached: float) -> JobRow:
    """Return the lengths of a row.

    `encoded` is the request after tokenization. `cached` is the fraction of the prompt that the prefix cache
    will have.
    """
    if encoded.kind == "input_ids":
        tokens = float(len(encoded.prompt))
    else:  # without a tokenizer, the tokens are estimated
        tokens = max(len(prompt_bytes(encoded)) / BYTES_PER_TOKEN, 1.0)
    if request.task is not None:
        most_tokens = 1
    elif isinstance(request.prompt, RequestBody):
        most_tokens = request.prompt.most_tokens
    else:
        most_tokens = request.sampling.get("max_new_tokens") or DEFAULT_NEW_TOKENS
    return JobRow(
        row=request.ref.row,
        prompt=tokens,
        cached=cached * tokens,
        asked=most_tokens,
        fixed=request.sampling.get("ignore_eos") is True,
    )


def survey(prepared: PreparedJob, todo: BitMap64, info: EngineInfo, sampled: BitMap64) -> Survey:
    """Read the lengths of the rows `todo`, or of blocks of them if they are many; raises InputError.

    The rows of an earlier sample, `sampled`, are always read.
    """
    job = prepared.job
    rows = _blocks_of(todo) | sampled
    encoder = None
    if prepared.renderer.kind is not None:
        # Without the tokenizer, `_row_of` estimates the numbers of tokens.
        with contextlib.suppress(CannotTokenizeError):
            encoder = make_encoder(job, info, prepared.renderer.kind)

    # The fractions of cached tokens and of equal rows depend on the order in which rows are sent.
    # `decide_order` looks for common prefixes only if the job's `order` is "auto".
    with_auto_order = replace(prepared, job=job.model_copy(update={"order": "auto"}))
    decision = decide_order(with_auto_order, todo)
    order = decision.order if job.order == "auto" else job.order
    if order == "prefix":
        cached_share, equal_share = decision.sorted_share, decision.sorted_equal
    else:
        cached_share, equal_share = decision.input_share, decision.input_equal
    if cached_share is None or not info.caches_prefixes:
        cached_share = 0.0

    sendable: list[JobRow] = []
    not_sendable = 0
    began = time.monotonic()
    for batch in prepared.batches(rows):
        requests = [item for item in batch if isinstance(item, Request)]
        not_sendable += sum(item.error is not None for item in batch if isinstance(item, Outcome))
        encoded = encoder.encode(requests) if encoder else requests
        for request, encoded_request in zip(requests, encoded, strict=True):
            if isinstance(encoded_request, Outcome):  # for example, the prompt is too long
                not_sendable += 1
            else:
                sendable.append(_row_of(request, encoded_request, cached_share))
    row_s = (time.monotonic() - began) / len(rows)  # seconds to read, render and tokenize a row
    if not sendable:
        raise JobError(
            "no row can be sent, so there is nothing to estimate",
            hint="`batchrun check JOB` shows the reason",
        )
    return Survey(
        rows=sendable,
        read=rows,
        not_sendable=not_sendable,
        equal=equal_share if prepared.dedupes else 0.0,
        row_s=row_s,
    )


def _blocks_of(rows: BitMap64) -> BitMap64:
    """Return all rows or, if there are many, the rows in evenly spread blocks."""
    if len(rows) <= BLOCKS * BLOCK_ROWS:
        return rows
    size = max(BLOCK_ROWS, round(READ_SHARE * len(rows) / BLOCKS))
    blocks = spread_blocks(len(rows), blocks=BLOCKS, size=size)
    return BitMap64().union(*(rows[block.start : block.stop] for block in blocks))


def _config(job: Job, info: EngineInfo, schedulers: int) -> SchedulerConfig:
    """Return the flags of one of `schedulers` schedulers, for the simulation.

    A flag of the job takes precedence over a limit that the engine reports. Otherwise SGLang's default holds.
    """
    args, env = getattr(job.engine, "args", {}), getattr(job.engine, "env", {})
    flags: dict[str, Any] = {
        "max_running": (info.max_running or UNKNOWN_ENGINE_WINDOW * schedulers) // schedulers,
        "max_total_tokens": (info.max_total_tokens or 1 << 40) // schedulers,  # 1 << 40 means no limit.
        "context_tokens": info.context_length,
        "clip_tokens": int(env.get(CLIP, CLIP_TOKENS)),
        "radix_cache": info.caches_prefixes,
    }
    flags |= {name: args[flag] for flag, name in SCHEDULER_FLAGS.items() if args.get(flag) is not None}
    # If memory limits the running requests, the flag has no effect.
    if info.memory_caps_running and info.max_running:
        flags["max_running"] = min(flags["max_running"], info.max_running // schedulers)
    flags["chunked_prefill_tokens"] = limit_of(flags.get("chunked_prefill_tokens", info.prefill_tokens))
    return SchedulerConfig(**flags)


def _digest_of_engine(job: Job) -> str:
    """Return a digest of those fields of the job's engine whose change requires a new sample."""
    # A change of these fields needs no new sample, because it is simulated.
    simulated = {"replicas": True, "start_timeout": True, "cache_dir": True, "args": {*SCHEDULER_FLAGS}}
    return sha256(job.engine.model_dump_json(exclude=cast("Any", simulated)).encode()).hexdigest()


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
    """Estimate time, GPU-hours, tokens and cost of a job, each with a 90 % interval.

    The job's engine answers a sample: 2 % of all rows, but at least 30 and at most `rows`. `run` does not
    send these rows again. `price` is the price of a GPU-hour. `replicas`, and `workers` of a joined run, may
    differ from those of the job, because the estimate does not start them. If `cold` names a GPU, such as
    H100, no engine is asked, and the result is a range from data sheets. Raises BatchrunError.
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
    """The options of a call of `estimate`."""

    rows: int
    price: float | None
    replicas: int | None
    workers: int
    cold: str | None


class _Basis(NamedTuple):
    """A forecast of a run, with the facts from which it was computed."""

    forecast: Forecast
    survey: Survey
    pending: BitMap64
    """Rows that the run will send."""
    copies: int
    """Number of replicas of all workers together."""
    tp: int | None
    """Number of GPUs of a replica if the job's flags do not set it; None if unknown."""
    rows_sampled: int = 0
    """Number of answered rows of the sample; 0 for a forecast from data sheets."""


async def _estimate(prepared: PreparedJob, request: _EstimateRequest) -> Estimate:
    """Return the estimate of a job, from a sample or from data sheets."""
    job = prepared.job
    check_resumes(prepared, model_of(job.engine))
    if request.cold is not None:
        basis = _from_data_sheet(prepared, request, request.cold)
    else:
        basis = await _from_sample(prepared, request)
    result = basis.forecast
    gpu_hours = result.seconds.times(_cards(job, basis.tp) * basis.copies / 3600)
    tokens = result.tokens
    # A task without decoding has no output tokens, but the simulation counts one per row.
    if job.forward is not None:
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
    """Forecast the pending rows from the data sheet of the GPU `card`."""
    job = prepared.job
    pending = _pending_or_raise(prepared.selected(), prepared.run_dir)
    tp = getattr(job.engine, "tp", None)
    copies = _copies(job, request, default=1)
    model = launched_model(job.engine) or ""
    directory = str(model_directory(model))
    # No engine is open. The survey needs only the tokenizer.
    info = EngineInfo("cold", model, tokenizing=TokenizerInfo(directory, directory))
    surveyed = survey(prepared, pending, info, BitMap64())
    result = cold_forecast(
        model,
        card,
        surveyed.rows,
        total=surveyed.answered_of(pending),
        samples=job.sampling.n,
        cards=_cards(job, tp),
        copies=copies,
    )
    return _Basis(forecast=result, survey=surveyed, pending=pending, copies=copies, tp=tp)


async def _from_sample(prepared: PreparedJob, request: _EstimateRequest) -> _Basis:
    """Forecast the pending rows from the sample of an earlier estimate, or else from a new sample.

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
        # Raises an error if the job is already running, because no second engine may start.
        with hold_task(run_dir):
            pass
        if job.output.reuse is not None:
            # Rows that get another run's answers take no time. A run with an empty sample sends nothing, but
            # finds such rows.
            await execute(job, sample=BitMap64())
        pending = _pending_or_raise(selected, run_dir)
        sample, surveyed = await _take_sample(prepared, pending, most)
        pending = _pending(selected, run_dir)
    copies = _copies(job, request, default=len(sample.info.routes))
    result = _forecast(job, surveyed, sample, pending=pending, copies=copies, workers=request.workers)
    is_for_the_job = request.replicas is None and request.workers == 1
    # The estimated time per row is stored only if the estimate is for the job's own workers and replicas.
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
    """Return the number of replicas of all workers together.

    `default` is the number of a worker's replicas if neither the request nor the job gives a number.
    """
    replicas = request.replicas or getattr(job.engine, "replicas", None)
    if not isinstance(replicas, int):
        replicas = default
    # Workers do not start their own replicas of servers that are already running.
    if isinstance(job.engine, RunningServers):
        return replicas
    return replicas * request.workers


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
    """Return the number of GPUs of a replica according to the job's flags, or else `tp`."""
    return cards_of({"tp-size": tp or 1} | getattr(job.engine, "args", {}))


def _kept_sample(path: Path, job: Job, most: int) -> KeptSample | None:
    """Return the sample of an earlier estimate from the file `path`; None if it cannot be used.

    It must have been answered by the same engine, with a limit of at least `most` rows.
    """
    try:
        sample = _read_sample.decode(path.read_bytes())
    except (OSError, msgspec.MsgspecError):
        return None
    return sample if sample.engine == _digest_of_engine(job) and sample.most >= most else None


async def _take_sample(prepared: PreparedJob, pending: BitMap64, most: int) -> tuple[KeptSample, Survey]:
    """Have the engine answer a sample of at most `most` pending rows; return the sample and the survey.

    At most half of the sample is in flight at once, so that prompts arrive while other rows decode, as in the
    job. In a task without decoding, the whole sample is in flight, so that passes are as full as in the job.
    Raises BatchrunError.
    """
    job, run_dir, opening_began = prepared.job, prepared.run_dir, time.monotonic()
    async with contextlib.AsyncExitStack() as stack:
        logs = run_dir.log_directory
        opened = await open_engine_of(
            job, prepared.model_task, log_directory=logs, control=Control(), stack=stack
        )
        engine, info = opened.engine, opened.info
        schedulers = max(len(await engine.loads()), len(info.routes))
        opening_s = time.monotonic() - opening_began
        surveyed = survey(prepared, pending, info, BitMap64())
        rows = {row.row: row for row in choose(surveyed.rows, most)}
        ordinals = BitMap64(rows)
        log.info("sending a sample of %s", counted(len(rows), "row"))
        window = max(1, len(rows) // 2) if job.forward is None else len(rows)
        if job.window != "auto":
            window = min(job.window, window)
        recorder, run_began = SampledEngine(engine, rows), time.monotonic()
        report = await execute(
            job.model_copy(update={"window": window}),
            engine=SharedEngine(cast("Engine", recorder), info),
            sample=ordinals,
        )
        run_s = time.monotonic() - run_began
    attempts = recorder.attempts
    answered = BitMap64([attempt.row.row for attempt in attempts])
    # Rows with an answer may have failed later, for example in the job's checks. They were not refused.
    refused = len((ordinals & read_done(run_dir).failed) - answered)
    # If other rows failed, a single answer says nothing about how much outputs vary.
    if not answered or (refused and len(answered) == 1):
        reason = report.failures[0]["example"] if report.failures else report.reason
        raise BatchrunError(
            f"only {len(answered)} of {counted(len(rows), 'row')} of the sample got an answer, too few to "
            f"estimate the other rows: {reason}"
        )
    sending_s = max(attempt.ended for attempt in attempts) - min(attempt.began for attempt in attempts)
    sample = KeptSample(
        engine=_digest_of_engine(job),
        most=most,
        sampled=Setting(_config(job, info, schedulers), schedulers),
        start_s=opening_s + run_s - sending_s,
        info=info,
        attempts=attempts,
        refused=refused,
    )
    return sample, surveyed


def _forecast(
    job: Job, surveyed: Survey, sample: KeptSample, *, pending: BitMap64, copies: int, workers: int
) -> Forecast:
    """Forecast the pending rows from the sample, on `copies` replicas and with `workers` clients."""
    rows = [row for row in surveyed.rows if row.row in pending]
    if not rows:
        zero = Interval(0, 0, 0)
        return Forecast(
            seconds=zero,
            tokens=tokens_of(surveyed.rows, 0, zero),
            passes=0,
            limited_by="not known",
            why=("the sample had all remaining rows",),
        )
    # The survey may have estimated the prompt tokens. Scale them so that their sum over the sample is the sum
    # that the engine reported.
    reported_prompts = {attempt.row.row: attempt.row.prompt for attempt in sample.attempts}
    surveyed_prompts = {row.row: row.prompt for row in surveyed.rows if row.row in reported_prompts}
    factor = 1.0
    if surveyed_prompts:
        factor = sum(reported_prompts[row] for row in surveyed_prompts) / sum(surveyed_prompts.values())
    rows = [row._replace(prompt=row.prompt * factor, cached=row.cached * factor) for row in rows]
    sampled, info = sample.sampled, sample.info
    schedulers_of_replica = sampled.schedulers // len(info.routes)
    schedulers = schedulers_of_replica * copies
    # The job's `window` is the limit of one worker, over all schedulers.
    window = None if job.window == "auto" else max(1, job.window * workers // schedulers)
    rows_of_sample = len(reported_prompts) + sample.refused
    # The engine is assumed to refuse the same fraction of the pending rows as of the sample.
    answered_share = len(reported_prompts) / rows_of_sample
    result = forecast(
        sample.attempts,
        sampled,
        Setting(_config(job, info, sampled.schedulers), schedulers=schedulers, window=window),
        rows,
        total=surveyed.answered_of(pending, answered=answered_share),
        start_s=sample.start_s,
        client_s=(surveyed.row_s + CLIENT_S) / workers,
    )
    if not sample.refused:
        return result
    failed = f"{sample.refused:,} of {rows_of_sample:,} rows of the sample failed"
    return result._replace(why=(*result.why, failed))
