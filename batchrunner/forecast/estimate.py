"""`batchrun estimate`: reads a job's input, has a sample of its rows answered, tells what the rest takes."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import msgspec
from pyroaring import BitMap64

from batchrunner.core.console import counted
from batchrunner.core.engine_info import EngineInfo, TokenizerInfo
from batchrunner.core.errors import BatchrunError, CannotTokenizeError, JobError, RequestError
from batchrunner.core.types import Completion, Outcome, Request, RequestBody
from batchrunner.dispatch.concurrency.law import BYTES_A_TOKEN, BYTES_AN_ID, UNKNOWN_ENGINE_WINDOW
from batchrunner.dispatch.tokenize import make_encoder
from batchrunner.engines.flags import CLIP, name_in
from batchrunner.engines.model_files import cards_of, model_directory
from batchrunner.engines.registry import launched_model, model_of
from batchrunner.engines.simulation.scheduler import CLIP_TOKENS, SchedulerConfig
from batchrunner.forecast.job_time import Attempt, Interval, JobRow, SendingForecast, Setting, forecast
from batchrunner.input.order import common_length, decide_order, prompt_bytes
from batchrunner.job.engine import ServerEngine
from batchrunner.job.load import load_job
from batchrunner.output.files import write_json
from batchrunner.output.resume import read_done
from batchrunner.output.run_dir import ESTIMATE
from batchrunner.report.report import duration
from batchrunner.runner.control import Control
from batchrunner.runner.open_engine import cancelled_once, open_portal
from batchrunner.runner.prepare import PreparedJob, check_resumes, prepare
from batchrunner.runner.run import execute, open_engine_of

if TYPE_CHECKING:
    from pathlib import Path

    from batchrunner.engines.base import Engine, RowAnswers
    from batchrunner.input.tokenize.encoder import Encoder
    from batchrunner.job.spec import Job

log = logging.getLogger(__name__)

SHARE, FEWEST = 0.02, 30
"""Rows of the sample at most, as a share of all, and at least."""
FIRST_ROWS = 128
"""Rows after which it is first looked whether more are needed."""
NARROW = 0.1
"""Width of the interval of the time, as a share of it, with which the sample is large enough."""
READ_WHOLE, BLOCK_ROWS, READ_SHARE = 50_000, 500, 0.01
"""Rows of an input that is read whole, and of the blocks that are read of a larger one, with their share."""
KEPT_BYTES = 256 << 20
"""Bytes of prompts that are kept to see what they share: of more, the beginnings."""
CLIENT_S = 0.00025
"""Seconds of the client's core that a row takes to send and to store, beside reading and tokenizing it."""
DEFAULT_NEW_TOKENS = 128
"""SGLang's own `max_new_tokens`."""
SCHEDULER_FLAGS = {
    "max-running-requests", "max-total-tokens", "chunked-prefill-size", "max-prefill-tokens",
    "schedule-conservativeness", "prefill-decode-interval",
}  # fmt: skip
"""Flags that only the scheduler reads: what others cost need not be measured again."""


class KeptSample(msgspec.Struct):
    """What the sample told: the content of estimate.json."""

    engine: dict[str, Any]
    """The job's engine without what a forecast may change."""
    config: SchedulerConfig
    schedulers: int
    start_s: float
    """Seconds in which the engine started."""
    overhead_s: float
    """Seconds of a start beside the sending."""
    info: EngineInfo
    attempts: list[Attempt] = []
    row_s: float | None = None
    """Seconds of a row in the run that follows, for the time that is left."""

    @property
    def rows(self) -> set[int]:
        """Rows that were answered."""
        return {attempt.row for attempt in self.attempts}


@dataclass(frozen=True, slots=True)
class Survey:
    """The rows to do, or blocks of them, as read."""

    rows: list[JobRow]
    """In input order; those that cannot be sent are left out."""
    of: int
    """Rows to do, and those of the sample."""
    read: int
    not_sendable: int
    exact: bool
    """Whether prompt tokens were counted by the engine's tokenizer."""
    equal: float
    """Share of the rows that get the answer of an equal row."""
    row_s: float
    """Seconds in which a row was read."""


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
    """Causes of the interval, the largest first."""
    rows_to_do: int
    rows_sampled: int
    rows_read: int
    rows_not_sendable: int
    """Rows of those read that cannot be sent."""
    start_s: float
    """Seconds of `seconds` in which the engine starts."""
    is_range: bool = False
    """Whether no engine was asked: `seconds` says only between what it will be."""

    def as_dict(self) -> dict[str, Any]:
        """Return the result for `--json`."""
        made = {name: getattr(self, name) for name in self.__slots__}
        return cast("dict[str, Any]", _plain(made))

    def lines(self) -> list[str]:
        """Return the result as lines for a person."""
        part = "" if self.rows_read >= self.rows_to_do else f" ({self.rows_read:,} were read)"
        unsent = f"{self.rows_not_sendable:,} cannot be sent"
        sample = f"a sample of {self.rows_sampled:,}" if self.rows_sampled else "no engine was asked"
        lines = [
            f"{counted(self.rows_to_do, 'row')} to do{part}; {unsent}; {sample}",
            f"time: {_told(self.seconds, duration)}, limited by: {self.limited_by}",
            f"GPU-hours: {_told(self.gpu_hours, '{:,.2f}'.format)}",
        ]
        lines += [f"cost: {_told(self.cost, '{:,.2f}'.format)}"] if self.cost else []
        lines += [f"{name} tokens: {_told(each, '{:,.0f}'.format)}" for name, each in self.tokens.items()]
        return [*lines, *sorted(self.why)]  # those of two estimates stand side by side


def _plain(value: Any) -> Any:
    if isinstance(value, Interval):
        return {name: round(each, 4) for name, each in value._asdict().items()}
    return {name: _plain(each) for name, each in value.items()} if isinstance(value, dict) else value


def _told(interval: Interval, form: Any) -> str:
    if interval.low == interval.high:
        return str(form(interval.median))
    return f"{form(interval.median)} (90 %: {form(interval.low)} to {form(interval.high)})"


@dataclass(frozen=True, slots=True)
class SampledAnswers:
    """Notes the answers to a bundle on their way."""

    _engine: SampledEngine
    _answers: RowAnswers
    _requests: Sequence[Request]
    _route: str
    _began: float

    def ended(self, index: int, result: Completion | RequestError) -> None:
        """Pass an answer on; see `RowAnswers.ended`."""
        if isinstance(result, Completion):
            self._engine.note(self._requests[index], result, self._route, self._began)
        self._answers.ended(index, result)

    def discourage(self, why: str) -> None:
        """Pass a word of the engine on; see `RowAnswers.discourage`."""
        self._answers.discourage(why)


@dataclass(eq=False)
class SampledEngine:
    """An engine that notes when which answer came, and what it took."""

    _engine: Engine
    attempts: list[Attempt] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        """Leave all else to the engine."""
        return getattr(self._engine, name)

    async def generate(self, request: Request, route: str) -> Completion:
        """Send a request; see `Engine.generate`."""
        began = time.monotonic()
        completion = await self._engine.generate(request, route)
        self.note(request, completion, route, began)
        return completion

    async def generate_many(self, requests: Sequence[Request], route: str, answers: RowAnswers) -> None:
        """Send several requests; see `Engine.generate_many`."""
        noted = SampledAnswers(self, answers, requests, route, time.monotonic())
        await self._engine.generate_many(requests, route, noted)

    def note(self, request: Request, completion: Completion, route: str, began: float) -> None:
        """Note an answer."""
        prompt = completion.prompt_tokens or round(_tokens(request))
        outputs = tuple(tokens or 1 for tokens in completion.completion_tokens) or (1,)
        self.attempts.append(
            Attempt(
                request.ref.row, began, time.monotonic(), prompt,
                min(completion.cached_tokens or 0, max(prompt - 1, 0)), outputs, *_asked(request), route,
            )
        )  # fmt: skip


def _asked(request: Request) -> tuple[int, bool]:
    if request.task is not None:
        return 1, False
    if isinstance(request.prompt, RequestBody):
        return request.prompt.most_tokens, False
    asked = request.sampling.get("max_new_tokens") or DEFAULT_NEW_TOKENS
    return asked, request.sampling.get("ignore_eos") is True


def _tokens(request: Request) -> float:
    """Return the tokens of a prompt, counted where it is token ids."""
    return len(prompt_bytes(request)) / (BYTES_AN_ID if request.kind == "input_ids" else BYTES_A_TOKEN)


def survey(prepared: PreparedJob, todo: BitMap64, info: EngineInfo) -> Survey:
    """Read the rows to do, or 1 % of many in blocks; raises InputError."""
    began = time.monotonic()
    job, rows = prepared.job, todo
    if len(todo) > READ_WHOLE:
        blocks = max(READ_WHOLE, round(READ_SHARE * len(todo))) // BLOCK_ROWS
        begins = [(len(todo) - BLOCK_ROWS) * at // (blocks - 1) for at in range(blocks)]
        rows = BitMap64().union(*(todo[begin : begin + BLOCK_ROWS] for begin in begins))
    encoder, most = _encoder(job, info, prepared), KEPT_BYTES // max(len(rows), 1)
    order = decide_order(prepared, todo)
    found: list[JobRow] = []
    prompts: list[tuple[int, bytes, int]] = []  # block, beginning, index
    failed = 0
    for batch in prepared.batches(rows):
        made = [item for item in batch if isinstance(item, Request)]
        failed += sum(item.error is not None for item in batch if isinstance(item, Outcome))
        for request, sent in zip(made, encoder.encode(made) if encoder else made, strict=True):
            if isinstance(sent, Outcome):
                failed += 1
                continue
            block = 0 if order.order == "prefix" else rows.rank(request.ref.row) // BLOCK_ROWS
            prompts.append((block, prompt_bytes(sent)[:most], len(found)))
            found.append(JobRow(request.ref.row, _tokens(sent), 0.0, *_asked(request)))
    row_s = (time.monotonic() - began) / len(rows)
    if info.caches_prefixes:
        _share(found, prompts, order.sorted_share if order.order == "prefix" and rows is not todo else None)
    equal = order.sorted_equal if order.order == "prefix" else order.input_equal
    return Survey(
        found, len(todo), len(rows), failed, encoder is not None, equal if prepared.dedupes else 0.0, row_s
    )


def _encoder(job: Job, info: EngineInfo, prepared: PreparedJob) -> Encoder | None:
    """Return what counts tokens as the engine does; None where they can only be guessed."""
    with contextlib.suppress(CannotTokenizeError):
        return make_encoder(job, info, prepared.renderer.kind) if prepared.renderer.kind else None
    return None


def _share(rows: list[JobRow], prompts: list[tuple[int, bytes, int]], expected: float | None) -> None:
    """Set what the cache will have of each prompt: what it shares with one of its block."""
    before, block_before = b"", -1
    for block, prompt, at in sorted(prompts):
        if block == block_before and prompt:
            share = common_length(before, prompt) / len(prompt)
            rows[at] = rows[at]._replace(cached=share * rows[at].prompt)
        before, block_before = prompt, block
    cached = sum(row.cached for row in rows)
    if expected and cached:  # rows that were not read are like those that were
        factor = expected * sum(row.prompt for row in rows) / cached
        rows[:] = [row._replace(cached=min(row.cached * factor, row.prompt - 1)) for row in rows]


def _config(job: Job, info: EngineInfo, schedulers: int) -> SchedulerConfig:
    """Return the flags of a scheduler: the job's, else what the engine says, else SGLang's."""
    args = job.engine.args if isinstance(job.engine, ServerEngine) else {}
    env = job.engine.env if isinstance(job.engine, ServerEngine) else {}

    def flag(name: str, other: float | None) -> Any:
        value = args.get(name_in(args, name))
        return other if value is None else value

    chunk = flag("chunked-prefill-size", info.prefill_tokens or SchedulerConfig(1, 1).chunked_prefill_tokens)
    running = (info.max_running or UNKNOWN_ENGINE_WINDOW * schedulers) // schedulers
    pool = info.max_total_tokens // schedulers if info.max_total_tokens else 1 << 40
    return SchedulerConfig(
        max_running=flag("max-running-requests", running),
        max_total_tokens=flag("max-total-tokens", pool),
        context_tokens=info.context_length,
        chunked_prefill_tokens=chunk if chunk > 0 else None,
        max_prefill_tokens=flag("max-prefill-tokens", SchedulerConfig(1, 1).max_prefill_tokens),
        conservativeness=flag("schedule-conservativeness", 1.0),
        radix_cache=info.caches_prefixes,
        clip_tokens=int(env.get(CLIP, CLIP_TOKENS)),
        decode_interval=flag("prefill-decode-interval", 0),
    )


def _fixed_engine(job: Job) -> dict[str, Any]:
    """Return what of the job's engine must be measured again where it changes."""
    spec = job.engine.model_dump(mode="json", exclude={"replicas", "start_timeout"})
    args = {name: value for name, value in spec.pop("args", {}).items() if name not in SCHEDULER_FLAGS}
    return {**spec, "args": args}


def _calibrated(rows: Sequence[JobRow], attempts: Sequence[Attempt], *, exact: bool) -> list[JobRow]:
    """Return rows with prompt tokens as the engine counted those of the sample."""
    counted_by_engine = {attempt.row: attempt.prompt for attempt in attempts}
    known = [(row.prompt, counted_by_engine[row.row]) for row in rows if row.row in counted_by_engine]
    if exact or len(known) < 2:  # noqa: PLR2004
        return [*rows]
    guess, real = (fmean(values) for values in zip(*known, strict=True))
    spread = sum((a - guess) ** 2 for a, _ in known)
    slope = sum((a - guess) * (b - real) for a, b in known) / spread if spread else 0.0
    tokens = [max(1.0, real + slope * (row.prompt - guess)) for row in rows]
    return [
        row._replace(prompt=new, cached=row.cached * new / max(row.prompt, 1.0))
        for row, new in zip(rows, tokens, strict=True)
    ]


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
    loaded = load_job(job, overrides=overrides)
    if cold is not None:
        with contextlib.closing(prepare(loaded)) as prepared:
            return _cold(prepared, cold, price, (replicas or 1) * workers)
    with contextlib.closing(prepare(loaded)) as prepared, open_portal() as portal:
        asked = Asked(rows, price, replicas, workers)
        found: Estimate = portal.call(lambda: cancelled_once(_estimate(prepared, asked)))
        return found


def _cold(prepared: PreparedJob, card: str, price: float | None, copies: int) -> Estimate:
    """Return the range of what a job takes on so many cards that are not here."""
    from batchrunner.forecast.cold import cold_forecast  # noqa: PLC0415 - seldom asked for

    model = launched_model(prepared.job.engine)
    directory = str(model_directory(model)) if model else ""
    tokenizing = TokenizerInfo(directory, directory)
    todo = prepared.selected() - read_done(prepared.run_dir).rows
    if not todo:
        raise JobError("all rows are done: there is nothing to estimate")
    found = survey(prepared, todo, EngineInfo("cold", model or "", tokenizing=tokenizing))
    if not found.rows:
        raise JobError("no row can be sent: there is nothing to estimate")
    total = round(len(todo) * len(found.rows) / found.read * (1 - found.equal))
    told = cold_forecast(model, card, found.rows, total, copies)
    hours = told.seconds.times(copies / 3600)
    return Estimate(
        told.seconds, hours, None if price is None else hours.times(price), _all_tokens(told),
        round(told.passes), told.limited_by, told.why, len(todo), 0, found.read, found.not_sendable, 0.0,
        is_range=True,
    )  # fmt: skip


def _all_tokens(told: SendingForecast) -> dict[str, Interval]:
    prompt, cached = (Interval(*[tokens] * 3) for tokens in (told.prompt_tokens, told.cached_tokens))
    return {"prompt": prompt, "cached": cached, "output": told.output_tokens}


class Asked(NamedTuple):
    """What is to be told; see `estimate`."""

    rows: int
    price: float | None
    replicas: int | None
    workers: int


async def _estimate(prepared: PreparedJob, asked: Asked) -> Estimate:
    job, run_dir = prepared.job, prepared.run_dir
    check_resumes(prepared, model_of(job.engine))
    selected = prepared.selected()
    todo = selected - read_done(run_dir).rows
    if not todo:
        raise JobError(f"{run_dir.name}: all rows are done: there is nothing to estimate")
    sample = _kept(run_dir.path / ESTIMATE, _fixed_engine(job))
    most = min(asked.rows, max(FEWEST, round(SHARE * len(selected))))
    async with contextlib.AsyncExitStack() as stack:
        engine = None
        if sample is None or len(sample.rows) < most:
            began = time.monotonic()
            engine, info = await open_engine_of(
                job, prepared.model_task, run_dir.log_directory, Control(), stack
            )
            schedulers = max(len(await engine.loads()), len(info.routes))
            kept = sample.attempts if sample else []
            sample = KeptSample(
                _fixed_engine(job), _config(job, info, schedulers), schedulers, time.monotonic() - began, 0.0,
                info, kept,
            )  # fmt: skip
        found = survey(prepared, todo | BitMap64({*sample.rows}), sample.info)
        told = None
        for wanted in sorted({min(FIRST_ROWS, most), most}):
            if engine is not None and len(sample.rows) < wanted:
                await _answer(job, found.rows, wanted, engine, sample)
                write_json(run_dir.path / ESTIMATE, msgspec.to_builtins(sample))
            told = _told_by(prepared, found, sample, asked)
            if told.seconds.high - told.seconds.low <= NARROW * told.seconds.median:
                break
    assert told is not None
    if asked.replicas is None and asked.workers == 1:
        sample.row_s = (told.seconds.median - sample.start_s) / max(told.rows_to_do, 1)
        write_json(run_dir.path / ESTIMATE, msgspec.to_builtins(sample))
    return told


def _kept(path: Path, engine: dict[str, Any]) -> KeptSample | None:
    """Return the sample of an earlier estimate, where it was of the same engine."""
    with contextlib.suppress(OSError, msgspec.MsgspecError):
        sample = msgspec.json.decode(path.read_bytes(), type=KeptSample)
        return sample if sample.engine == engine else None
    return None


async def _answer(job: Job, rows: Sequence[JobRow], wanted: int, engine: Engine, sample: KeptSample) -> None:
    """Have more rows answered, of all prompt lengths and from all over the input; raises BatchrunError.

    Half of them are in flight at once: as in the job, prompts come while others decode.
    """
    ordered = sorted((row.prompt, row.row) for row in rows if row.row not in sample.rows)
    count = min(wanted - len(sample.rows), len(ordered))
    if not count:
        return
    chosen = BitMap64(ordered[int((at + 0.5) * len(ordered) / count)][1] for at in range(count))
    log.info("a sample of %s is answered", counted(count, "row"))
    window = max(1, count // 2)
    window = window if job.window == "auto" else min(job.window, window)
    noted, began = SampledEngine(engine), time.monotonic()
    report = await execute(
        job.model_copy(update={"window": window}), engine=cast("Engine", noted), info=sample.info, only=chosen
    )
    if not noted.attempts:
        why = report.failures[0]["example"] if report.failures else report.reason
        raise BatchrunError(f"no row of the sample was answered: {why}")
    sent_s = max(each.ended for each in noted.attempts) - min(each.began for each in noted.attempts)
    sample.overhead_s = time.monotonic() - began - sent_s
    sample.attempts = [*sample.attempts, *noted.attempts]


def _told_by(prepared: PreparedJob, found: Survey, sample: KeptSample, asked: Asked) -> Estimate:
    """Return what the rows that the sample leaves take."""
    job, info = prepared.job, sample.info
    known = sample.rows
    rows = _calibrated(found.rows, sample.attempts, exact=found.exact)
    left = [row for row in rows if row.row not in known]
    to_do = found.of - len(known)
    total = round((to_do - found.of * (1 - len(rows) / found.read)) * (1 - found.equal))
    args = {"tp-size": info.tp or 1} | (job.engine.args if isinstance(job.engine, ServerEngine) else {})
    each = max(1, int(args.get(name_in(args, "dp-size")) or 1))
    schedulers = asked.replicas * each if asked.replicas else sample.schedulers
    window = None if job.window == "auto" else max(1, job.window // schedulers)
    was = Setting(sample.config, sample.schedulers)
    now = Setting(_config(job, info, sample.schedulers), schedulers, window, asked.workers)
    if left and total > 0:
        told = forecast(sample.attempts, was, now, left, total, found.row_s + CLIENT_S)
    else:
        nothing = Interval(0.0, 0.0, 0.0)
        told = SendingForecast(nothing, nothing, 0.0, 0.0, 0.0, "client", ())
    fixed_s = sample.start_s + sample.overhead_s
    seconds = Interval(*(value + fixed_s for value in told.seconds))
    cards = cards_of(args) * (schedulers / each) * asked.workers
    hours = seconds.times(cards / 3600)
    return Estimate(
        seconds=seconds,
        gpu_hours=hours,
        cost=None if asked.price is None else hours.times(asked.price),
        tokens=_all_tokens(told) | ({"output": Interval(0, 0, 0)} if job.forward is not None else {}),
        passes=round(told.passes),
        limited_by=told.limited_by,
        why=told.why,
        rows_to_do=to_do,
        rows_sampled=len(known),
        rows_read=found.read,
        rows_not_sendable=found.not_sendable,
        start_s=round(sample.start_s, 3),
    )
