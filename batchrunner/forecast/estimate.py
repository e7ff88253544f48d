"""`batchrun estimate`: reads a job's input, has a sample of its rows answered, tells what the rest takes."""

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

from batchrunner.core.console import counted
from batchrunner.core.engine_info import EngineInfo, TokenizerInfo
from batchrunner.core.errors import BatchrunError, CannotTokenizeError, JobError
from batchrunner.core.loop_thread import LoopThread
from batchrunner.core.types import Completion, Outcome, Request, RequestBody
from batchrunner.dispatch.concurrency.law import BYTES_A_TOKEN, UNKNOWN_ENGINE_WINDOW
from batchrunner.dispatch.tokenize import make_encoder
from batchrunner.engines.base import HeardEngine
from batchrunner.engines.flags import CLIP
from batchrunner.engines.http.server_info import limit_of
from batchrunner.engines.model_files import cards_of, model_directory
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
from batchrunner.input.order import decide_order, prompt_bytes
from batchrunner.job.engine import RunningServers
from batchrunner.job.load import load_job
from batchrunner.output.files import write_json
from batchrunner.output.resume import read_done
from batchrunner.output.run_dir import ESTIMATE
from batchrunner.output.task_lock import hold_task
from batchrunner.report.report import duration
from batchrunner.runner.control import Control
from batchrunner.runner.prepare import PreparedJob, check_resumes, prepare
from batchrunner.runner.run import execute, open_engine_of

if TYPE_CHECKING:
    from pathlib import Path

    from batchrunner.engines.base import Engine
    from batchrunner.job.spec import Job

log = logging.getLogger(__name__)

SHARE, FEWEST = 0.02, 30
"""Rows of the sample at most, as a share of all, and at least."""
BLOCKS, BLOCK_ROWS, READ_SHARE = 100, 500, 0.01
"""What is read of an input with more rows than so many blocks have: as many, larger where that is less than
this share."""
CLIENT_S = 0.00025
"""Seconds of the client's core that a row takes to send and to store, beside reading and tokenizing it."""
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
"""Flags that only the scheduler reads: what others cost need not be measured again."""


class KeptSample(msgspec.Struct):
    """What the sample told: the content of estimate.json."""

    engine: str
    """Digest of the job's engine without what a forecast may change: it may have secrets."""
    most: int
    """Rows that it was to have at most."""
    sampled: Setting
    start_s: float
    """Seconds of a start beside the sending."""
    info: EngineInfo
    attempts: list[Attempt]
    refused: int
    """Rows that failed without an answer."""
    row_s: float | None = None
    """Seconds of a row in the run that follows, for the time that is left."""

    @property
    def rows(self) -> BitMap64:
        """Rows that were answered; equal ones share an answer."""
        return BitMap64([attempt.row.row for attempt in self.attempts])


_read_sample = msgspec.json.Decoder(KeptSample)


class Survey(NamedTuple):
    """The rows to do, or blocks of them, as read."""

    rows: list[JobRow]
    """In input order; those that cannot be sent are left out."""
    read: BitMap64
    not_sendable: int
    equal: float
    """Share of the rows that get the answer of an equal row."""
    row_s: float
    """Seconds in which a row was read."""

    def sent_of(self, left: BitMap64, answered: float = 1.0) -> int:
        """Return how many of the rows that are left are sent, of which that share is answered."""
        sendable = sum(row.row in left for row in self.rows) / len(self.read & left)
        return max(1, round(len(left) * sendable * answered * (1 - self.equal)))


@dataclass(frozen=True, slots=True)
class Estimate:
    """What the run that follows takes; each figure is its median with a 90 % interval."""

    seconds: Interval
    """Time of the run, with the start of its engine."""
    gpu_hours: Interval
    cost: Interval | None
    """GPU-hours times the price of one; None without a price."""
    tokens: dict[str, Interval]
    """Tokens of prompts, of these those from the cache, and of outputs."""
    passes: int
    """Forward passes of each scheduler."""
    limited_by: str
    """prefill, decode, pool or client."""
    why: tuple[str, ...]
    """Causes of the interval, the largest first; that rows of the sample failed; that it is only a range."""
    rows_to_do: int
    rows_sampled: int
    """Rows that were answered; 0 where no engine was asked."""
    rows_read: int
    rows_not_sendable: int
    """Rows of those read that cannot be sent."""

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
        lines += [f"{name} tokens: {_shown(each, '{:,.0f}'.format)}" for name, each in self.tokens.items()]
        return [*lines, *sorted(self.why)]  # those of two estimates stand side by side


def _shown(figure: Interval, form: Callable[[float], str]) -> str:
    median, low, high = map(form, (figure.median, figure.low, figure.high))
    return median if low == high else f"{median} (90 %: {low} to {high})"


@dataclass(eq=False)
class SampledEngine(HeardEngine):
    """Notes when which answer came, and what it took."""

    rows: dict[int, JobRow]
    """Rows of the sample, as they were read."""
    attempts: list[Attempt] = field(default_factory=list)

    def heard(self, request: Request, completion: Completion, route: str, began: float) -> None:
        """Note an answer."""
        row = self.rows[request.ref.row]
        prompt, cached = completion.prompt_tokens or row.prompt, completion.cached_tokens or 0
        outputs = tuple(tokens or 1 for tokens in completion.completion_tokens) or (1,)
        row = row._replace(prompt=prompt, cached=cached)
        self.attempts.append(Attempt(row, began, time.monotonic(), outputs, route))


def _row_of(request: Request, sent: Request, cached: float) -> JobRow:
    """Return what is known of a row, of whose prompt that share will be in the cache."""
    tokens = (
        len(sent.prompt) if sent.kind == "input_ids" else max(len(prompt_bytes(sent)) / BYTES_A_TOKEN, 1.0)
    )
    asked = request.sampling.get("max_new_tokens") or DEFAULT_NEW_TOKENS
    if request.task is not None:
        asked = 1
    elif isinstance(request.prompt, RequestBody):
        asked = request.prompt.most_tokens
    fixed = request.sampling.get("ignore_eos") is True
    return JobRow(request.ref.row, tokens, cached * tokens, asked, fixed)


def survey(prepared: PreparedJob, todo: BitMap64, info: EngineInfo, sampled: BitMap64) -> Survey:
    """Read the rows to do, or 1 % of many in blocks, and those of the sample; raises InputError."""
    job, rows = prepared.job, todo
    if len(todo) > BLOCKS * BLOCK_ROWS:
        size = max(BLOCK_ROWS, round(READ_SHARE * len(todo) / BLOCKS))
        begins = ((len(todo) - size) * at // (BLOCKS - 1) for at in range(BLOCKS))
        rows = BitMap64().union(*(todo[begin : begin + size] for begin in begins))
    rows = rows | sampled
    encoder = None
    with contextlib.suppress(CannotTokenizeError):  # then they are guessed
        encoder = make_encoder(job, info, prepared.renderer.kind) if prepared.renderer.kind else None
    shares = replace(prepared, job=job.model_copy(update={"order": "auto"}))  # else they are not looked for
    order = decide_order(shares, todo)
    is_sorted = (order.order if job.order == "auto" else job.order) == "prefix"
    cached = (order.sorted_share if is_sorted else order.input_share) if info.caches_prefixes else 0.0
    found: list[JobRow] = []
    failed, began = 0, time.monotonic()
    for batch in prepared.batches(rows):
        made = [item for item in batch if isinstance(item, Request)]
        failed += sum(item.error is not None for item in batch if isinstance(item, Outcome))
        for request, sent in zip(made, encoder.encode(made) if encoder else made, strict=True):
            if isinstance(sent, Outcome):
                failed += 1
            else:
                found.append(_row_of(request, sent, cached or 0.0))
    row_s = (time.monotonic() - began) / len(rows)
    if not found:
        raise JobError("no row can be sent: there is nothing to estimate (batchrun check says why)")
    equal = order.sorted_equal if is_sorted else order.input_equal
    return Survey(found, rows, failed, equal if prepared.dedupes else 0.0, row_s)


def _config(job: Job, info: EngineInfo, schedulers: int) -> SchedulerConfig:
    """Return the flags of a scheduler: the job's, else what the engine says, else SGLang's."""
    args, env = getattr(job.engine, "args", {}), getattr(job.engine, "env", {})
    known: dict[str, Any] = {
        "max_running": (info.max_running or UNKNOWN_ENGINE_WINDOW * schedulers) // schedulers,
        "max_total_tokens": (info.max_total_tokens or 1 << 40) // schedulers,
        "context_tokens": info.context_length,
        "clip_tokens": int(env.get(CLIP, CLIP_TOKENS)),
        "radix_cache": info.caches_prefixes,
    }
    known |= {name: args[flag] for flag, name in SCHEDULER_FLAGS.items() if args.get(flag) is not None}
    known["chunked_prefill_tokens"] = limit_of(known.get("chunked_prefill_tokens", info.prefill_tokens))
    return SchedulerConfig(**known)


def _measured(job: Job) -> str:
    """Return a digest of what of the job's engine must be measured again where it changes."""
    told = {"replicas": True, "start_timeout": True, "cache_dir": True, "args": {*SCHEDULER_FLAGS}}
    return sha256(job.engine.model_dump_json(exclude=cast("Any", told)).encode()).hexdigest()


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
    """Return what a job takes: its time, GPU-hours, tokens and cost, each with a 90 % interval.

    A sample of at most `rows` of its rows, 2 % of all or 30, is answered by the job's engine; these rows are
    done then, and `run` does not send them again. `price` is that of a GPU-hour. `replicas` and `workers`
    (tasks that join) may be others than the job's: they are not tried. `cold` names a card, such as H100: no
    engine is asked then, and what is told is a range. Raises BatchrunError.
    """
    for name, given, least in (
        ("rows", rows, 2), ("replicas", replicas, 1), ("workers", workers, 1), ("price", price, 0)
    ):  # fmt: skip
        if given is not None and not least <= given < math.inf:
            raise JobError(f"{name} {given}", hint=f"give a number from {least} on")
    loaded = load_job(job, overrides=overrides)
    with contextlib.closing(prepare(loaded)) as prepared, LoopThread() as loop:
        return loop.call(lambda: _estimate(prepared, rows, price, replicas, workers, cold))


async def _estimate(
    prepared: PreparedJob,
    most: int,
    price: float | None,
    replicas: int | None,
    workers: int,
    cold: str | None,
) -> Estimate:
    job, run_dir = prepared.job, prepared.run_dir
    check_resumes(prepared, model_of(job.engine))
    selected, path = prepared.selected(), run_dir.path / ESTIMATE
    most = min(most, max(FEWEST, round(SHARE * len(selected))))
    sample = None if cold is not None else _kept(path, job, most)
    if sample is None and cold is None:
        with hold_task(run_dir):  # no engine starts beside that of a run that goes on
            pass
        if job.output.reuse is not None:  # what the run takes from there is not to do
            await execute(job, only=BitMap64())
    left = selected - read_done(run_dir).rows
    if not left:
        raise JobError(f"{run_dir.name}: all rows are done: there is nothing to estimate")
    named = getattr(job.engine, "replicas", None)
    copies = replicas or (named if isinstance(named, int) else None)
    tasks = 1 if isinstance(job.engine, RunningServers) else workers  # else they share the servers
    tp, sampled = getattr(job.engine, "tp", None), 0
    if cold is not None:
        model = launched_model(job.engine) or ""
        directory = str(model_directory(model))
        tokenizing = TokenizerInfo(directory, directory)
        found = survey(prepared, left, EngineInfo("cold", model, tokenizing=tokenizing), BitMap64())
        copies = (copies or 1) * tasks
        total = found.sent_of(left)
        told = cold_forecast(model, cold, found.rows, total, job.sampling.n, _cards(job, tp), copies)
    else:
        if sample is None:
            sample, found = await _take_sample(prepared, left, most)
            left = selected - read_done(run_dir).rows
        else:
            found = survey(prepared, left, sample.info, sample.rows)
        copies = (copies or len(sample.info.routes)) * tasks
        told = _told(job, found, sample, left, copies, workers)
        if replicas is None and workers == 1:
            sending_s = max(0.0, told.seconds.median - sample.start_s)
            sample.row_s = sending_s / max(len(left), 1)
        write_json(path, msgspec.to_builtins(sample))
        sampled, tp = len(sample.rows), sample.info.tp
    hours = told.seconds.times(_cards(job, tp) * copies / 3600)
    cost = None if price is None else hours.times(price)
    counts = (len(left), sampled, len(found.read), found.not_sendable)
    tokens = told.tokens if job.forward is None else told.tokens | {"output": Interval(0, 0, 0)}
    return Estimate(told.seconds, hours, cost, tokens, told.passes, told.limited_by, told.why, *counts)


def _cards(job: Job, tp: int | None) -> int:
    """Return the cards of a replica; its weights are split over `tp`, where the job's flags do not say."""
    return cards_of({"tp-size": tp or 1} | getattr(job.engine, "args", {}))


def _kept(path: Path, job: Job, most: int) -> KeptSample | None:
    """Return the sample of an earlier estimate, where it was of the same engine, and as large."""
    with contextlib.suppress(OSError, msgspec.MsgspecError):
        kept = _read_sample.decode(path.read_bytes())
        return kept if kept.engine == _measured(job) and kept.most >= most else None
    return None


async def _take_sample(prepared: PreparedJob, left: BitMap64, most: int) -> tuple[KeptSample, Survey]:
    """Have a sample of the rows that are left answered; return it, and all rows. Raises BatchrunError.

    Half of them are in flight at once: as in the job, prompts come while others decode. Where nothing
    decodes, all are: passes as full as those of the job tell what such a pass costs.
    """
    job, run_dir, began = prepared.job, prepared.run_dir, time.monotonic()
    async with contextlib.AsyncExitStack() as stack:
        logs = run_dir.log_directory
        engine, info = await open_engine_of(job, prepared.model_task, logs, Control(), stack)
        schedulers = max(len(await engine.loads()), len(info.routes))
        start_s = time.monotonic() - began
        found = survey(prepared, left, info, BitMap64())
        rows = {row.row: row for row in choose(found.rows, most)}
        chosen = BitMap64(rows)
        log.info("a sample of %s is answered", counted(len(rows), "row"))
        window = max(1, len(rows) // 2) if job.forward is None else len(rows)
        window = window if job.window == "auto" else min(job.window, window)
        noted, began = SampledEngine(engine, rows), time.monotonic()
        smaller = job.model_copy(update={"window": window})
        report = await execute(smaller, engine=cast("Engine", noted), info=info, only=chosen)
        start_s += time.monotonic() - began  # less the sending
    setting = Setting(_config(job, info, schedulers), schedulers)
    sample = KeptSample(_measured(job), most, setting, start_s, info, noted.attempts, 0)
    good = read_done(run_dir, without_failed=True).rows | sample.rows
    sample.refused = len(chosen & read_done(run_dir).rows - good)
    if not sample.rows or (sample.refused and len(sample.rows) == 1):
        why = report.failures[0]["example"] if report.failures else report.reason
        answered = f"{len(sample.rows)} of {counted(len(rows), 'row')} of the sample answered"
        raise BatchrunError(f"{answered}, too few to tell the rest: {why}")
    sample.start_s -= max(each.ended for each in noted.attempts) - min(each.began for each in noted.attempts)
    return sample, found


def _told(job: Job, found: Survey, sample: KeptSample, left: BitMap64, copies: int, workers: int) -> Forecast:
    """Return what the rows that are left take."""
    rows = [row for row in found.rows if row.row in left]
    if not rows:
        none = Interval(0, 0, 0)
        return Forecast(none, tokens_of(found.rows, 0, none), 0, "not known", ("the sample was the job",))
    real = {each.row.row: each.row.prompt for each in sample.attempts}
    guessed = {row.row: row.prompt for row in found.rows if row.row in real}
    factor = sum(real[row] for row in guessed) / sum(guessed.values()) if guessed else 1.0
    rows = [row._replace(prompt=row.prompt * factor, cached=row.cached * factor) for row in rows]
    sampled, info = sample.sampled, sample.info
    schedulers = sampled.schedulers // len(info.routes) * copies
    window = None if job.window == "auto" else max(1, job.window * workers // schedulers)
    setting = Setting(_config(job, info, sampled.schedulers), schedulers, window)
    told = forecast(
        sample.attempts,
        sampled,
        setting,
        rows,
        found.sent_of(left, len(real) / (len(real) + sample.refused)),
        start_s=sample.start_s,
        client_s=(found.row_s + CLIENT_S) / workers,
    )
    failed = f"{sample.refused:,} of {len(real) + sample.refused:,} rows of the sample failed"
    return told._replace(why=(*told.why, failed)) if sample.refused else told
