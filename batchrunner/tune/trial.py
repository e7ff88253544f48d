"""One trial: launch a server with some flags and send it the sample, until enough is known."""

import shutil
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from batchrunner.core.engine_info import EngineInfo, Incident, SchedulerLoad
from batchrunner.core.errors import (
    EXIT_STOPPED,
    BatchrunError,
    EngineLostError,
    EngineStartError,
    RequestError,
)
from batchrunner.core.types import Completion, Request
from batchrunner.engines.base import Engine, RowAnswers
from batchrunner.engines.flags import arguments_in, name_in, variables_in
from batchrunner.engines.logs.lines import LoggedBatch, ServerReady, clean, origin_of, record_in
from batchrunner.engines.logs.reader import LogReader
from batchrunner.engines.registry import make_engine
from batchrunner.engines.simulation.replica import PassWork, RowLengths
from batchrunner.job.engine import ServerEngine
from batchrunner.job.spec import AcceptSpec, InputSpec, Job
from batchrunner.runner.control import Control
from batchrunner.runner.run import execute
from batchrunner.tune.measurement import End, PassSpan, TrialProgress, TrialResult, TrialWatch
from batchrunner.tune.sample import TuningSample
from batchrunner.tune.search import TrialRequest

LOG_INTERVAL = 10
"""`decode-log-interval` of trials, in passes: they are counted to within 10, at almost no cost."""
FEWEST_DECODES = 5
"""Log lines of decode passes that a mean needs at least."""
MOST_SPANS = 40
"""Stretches of passes of a trial that are kept."""

Passes = Sequence[tuple[str, LoggedBatch]]
"""Lines of the log that tell of passes, each with the rank of its scheduler."""


def signs_at_start(lines: Iterable[str]) -> dict[str, Any]:
    """Return the server's setup, from the log up to its first pass, as fields of TrialSigns."""
    reader = LogReader()
    for line in lines:
        reader.take(line)
        if reader.series.counted or reader.series.prefills.passes:
            break
    facts, ready = reader.facts, reader.facts.ready or ServerReady()
    return {
        "mem_fraction": facts.number("mem_fraction_static"),
        "attention_backend": facts.arguments.get("attention_backend"),
        "model": facts.model,
        "prefill_limit": ready.chunked_prefill_size,
        "spare_gb": ready.gpu_gb,
    }


def logged_passes(lines: Iterable[str]) -> list[tuple[str, LoggedBatch]]:
    """Return what a stretch of the log says of its passes, each with the rank of its scheduler."""
    records = ((origin_of(line).dp, record_in(line)) for line in map(clean, lines))
    return [(rank, record) for rank, record in records if isinstance(record, LoggedBatch)]


def signs_of_passes(passes: Passes, tokens: int) -> dict[str, Any]:
    """Return figures of these passes, as fields of TrialSigns.

    `tokens` are the output tokens of that stretch. `running` and `usage` are means over decode passes: polls
    see prefills too, during which fewer requests run.
    """
    decodes = [batch for _, batch in passes if batch.decode]
    prefilled = [batch.new_tokens for _, batch in passes if not batch.decode]
    graphs = [batch.graph for batch in decodes if batch.graph is not None]
    count = LOG_INTERVAL * len(decodes) + len(prefilled)
    found: dict[str, Any] = {}
    if len(decodes) >= FEWEST_DECODES:
        ranks = len({rank for rank, _ in passes})
        found["running"] = round(ranks * fmean(batch.running for batch in decodes), 1)
        found["usage"] = round(fmean(batch.usage for batch in decodes), 3)
    return found | {
        "tokens_per_pass": round(tokens / count, 3) if count else None,
        "prefill_per_pass": round(fmean(prefilled), 1) if prefilled else None,
        "graph_off_share": round(graphs.count(False) / len(graphs), 3) if graphs else None,
    }


def output_rate(passes: Passes) -> float | None:
    """Return output tokens a second by the scheduler's clock; None where the log has few decode passes.

    Counting the rows that end would be later and less exact, as many rows are half done at either end of the
    stretch. Each line has the rate since the line before, prefills included.
    """
    by_rank = defaultdict[str, list[tuple[str, LoggedBatch]]](list)
    for rank, batch in passes:
        by_rank[rank].append((rank, batch))
    spans = [spans_of(own) for own in by_rank.values()]
    decodes = sum(batch.decode for _, batch in passes) - len(spans)  # the first lines' are of the time before
    if decodes < FEWEST_DECODES:
        return None
    rates = (
        sum(span.work.tokens for span in own) / sum(span.seconds for span in own) for own in spans if own
    )
    return round(sum(rates), 2)


def spans_of(passes: Passes) -> tuple[PassSpan, ...]:
    """Return the work and the seconds of the passes between lines of decode passes.

    Empty where several schedulers share the log: their passes take turns on no common clock.
    """
    if len({rank for rank, _ in passes}) != 1:
        return ()
    spans: list[PassSpan] = []
    before: LoggedBatch | None = None
    prefills: list[LoggedBatch] = []
    for _, batch in passes:
        if not batch.decode:
            prefills.append(batch)
            continue
        if before is not None and batch.throughput:
            spans.append(_span(before, batch, prefills))
        before, prefills = batch, []
    together = len(spans) // MOST_SPANS + 1
    return tuple(_joined(spans[at : at + together]) for at in range(0, len(spans), together))


def _span(before: LoggedBatch, after: LoggedBatch, prefills: list[LoggedBatch]) -> PassSpan:
    """Return the stretch between two lines; a throughput leaves out the first token of each output."""
    samples = LOG_INTERVAL * (before.running + after.running) / 2
    tokens = samples * after.accepted
    kv_tokens = LOG_INTERVAL * ((before.tokens or 0) + (after.tokens or 0)) / 2
    work = PassWork(
        LOG_INTERVAL + len(prefills),
        samples + sum(batch.new_seqs for batch in prefills),
        kv_tokens,
        sum(batch.new_tokens for batch in prefills),
        len(prefills),
        tokens,
    )
    return PassSpan(work, tokens / (after.throughput or 1.0))


def _joined(spans: list[PassSpan]) -> PassSpan:
    total = PassWork(*map(sum, zip(*(span.work for span in spans), strict=True)))
    return PassSpan(total, round(sum(span.seconds for span in spans), 4))


DEFAULT_MAX_NEW_TOKENS = 128
"""SGLang's own default."""


@dataclass(frozen=True, slots=True)
class TrialRunner:
    """Runs trials of a job's sample in a directory of its own."""

    job: Job
    engine: ServerEngine
    sample: TuningSample
    directory: Path

    async def run(self, request: TrialRequest, number: int, within_s: float) -> TrialResult:
        """Launch the server, send the sample and return the result, in little more than `within_s` seconds.

        A server that does not start is a result too. Raises BatchrunError where the job is wrong.
        """
        began = time.monotonic()
        result = await self._run(request, self.directory / f"{number:03d}", within_s)
        return replace(result, cost_s=round(time.monotonic() - began, 1))  # with the shutdown of the server

    async def _run(self, request: TrialRequest, place: Path, within_s: float) -> TrialResult:
        began = time.monotonic()
        shutil.rmtree(place, ignore_errors=True)  # an old log would be appended to, and counted
        args = {**arguments_in(request.args), "decode-log-interval": LOG_INTERVAL}  # passes are counted by it
        env = {**self.engine.env, **variables_in(request.args)}
        start_s = min(self.engine.start_timeout, within_s)
        spec = self.engine.model_copy(
            update={"args": args, "env": env, "start_timeout": start_s, "heal": False}
        )
        engine = make_engine(spec, log_dir=place, limits=self.job.limits)
        try:
            info = await engine.open()
            left_s = within_s - (time.monotonic() - began)
            return await self._measure(engine, info, request, place / "run", left_s)
        except EngineStartError as failure:
            cut = time.monotonic() - began >= within_s
            return TrialResult("cut" if cut else "died", str(failure), 0.0)
        finally:
            await engine.close()
            shutil.rmtree(place / "run", ignore_errors=True)

    async def _measure(
        self, engine: Engine, info: EngineInfo, request: TrialRequest, out: Path, left_s: float
    ) -> TrialResult:
        control = Control()
        meter = MeasuringEngine(
            engine, TrialWatch(request.incumbent), control, left_s, Path(info.log) if info.log else None,
            bool(request.args.get(name_in(request.args, "enable-mixed-chunk"))),
        )  # fmt: skip
        try:
            report = await execute(self._job_into(out), engine=meter, info=info, control=control)
            failed = report.rows_failed / max(report.rows_failed + report.rows_ok, 1)
            if report.exit_code == EXIT_STOPPED and meter.end is None:
                raise BatchrunError(f"the sample could not be sent: {report.reason}")
            if report.failures and not report.rows_ok:
                meter.stop(("measured", f"all rows failed, such as with: {report.failures[0]['example']}"))
        except EngineLostError as failure:
            meter.stop(("died", str(failure)))
            failed = 0.0
        result = meter.result()
        signs = replace(result.signs, prefill_limit=result.signs.prefill_limit or info.prefill_tokens)
        return replace(result, signs=signs, failed_share=round(failed, 4))

    def _job_into(self, out: Path) -> Job:
        """Return the job with the sample as its input, whose blocks are in the order of sending."""
        return self.job.model_copy(
            update={
                "input": InputSpec(path=str(self.sample.path)),
                "output": self.job.output.model_copy(update={"path": str(out), "reuse": None}),
                "engine": self.engine,
                "parse": None,  # what becomes of an answer does not matter here
                "limits": self.job.limits.model_copy(update={"deadline": None}),
                "order": "input" if self.job.order == "input" else "auto",
                "accept": AcceptSpec.model_validate({"json": False}),  # each row is asked once
                "on_length": "keep",
            }
        )


@dataclass(frozen=True, slots=True)
class CountedAnswers:
    """Counts the answers to a bundle on their way."""

    _counter: "MeasuringEngine"
    _answers: RowAnswers
    _requests: Sequence[Request]

    def ended(self, index: int, result: Completion | RequestError) -> None:
        """Pass an answer on; see `RowAnswers.ended`."""
        if isinstance(result, Completion):
            self._counter.ended(result, self._requests[index])
        self._answers.ended(index, result)

    def discourage(self, why: str) -> None:
        """Pass a word of the engine on; see `RowAnswers.discourage`."""
        self._answers.discourage(why)


@dataclass(eq=False)
class MeasuringEngine:
    """An engine that measures the requests it passes on, and stops the run when enough is known."""

    _engine: Engine
    _watch: TrialWatch
    _control: Control
    _within_s: float
    _log_path: Path | None
    _mixes: bool
    """Whether prefill passes decode too, and the log counts none of what they decode."""
    end: End | None = None
    """How the trial ended, and why; None while it runs, and after all rows of the sample."""
    _began: float | None = None
    _log_bytes: int | None = None
    """Size of the log in bytes at the end of the trial."""

    def __post_init__(self) -> None:
        """Begin the trial now."""
        self._opened = self._last = time.monotonic()

    async def open(self) -> EngineInfo:
        """Return the engine's facts again; never called, since the engine is open."""
        return await self._engine.open()

    async def generate(self, request: Request, route: str) -> Completion:
        """Send a request and count its answer; see `Engine.generate`."""
        self._began = self._began or time.monotonic()
        completion = await self._engine.generate(request, route)
        self.ended(completion, request)
        return completion

    async def generate_many(self, requests: Sequence[Request], route: str, answers: RowAnswers) -> None:
        """Send several requests and count their answers; see `Engine.generate_many`."""
        self._began = self._began or time.monotonic()
        await self._engine.generate_many(requests, route, CountedAnswers(self, answers, requests))

    def ended(self, completion: Completion, request: Request) -> None:
        """Count an answer."""
        self._last = time.monotonic()
        prompt = completion.prompt_tokens or 0
        row = RowLengths(
            prompt,
            min(completion.cached_tokens or 0, max(prompt - 1, 0)),
            sum(tokens or 1 for tokens in completion.completion_tokens),
            request.sampling.get("max_new_tokens", DEFAULT_MAX_NEW_TOKENS),
            request.sampling.get("ignore_eos") is True,
        )
        self._watch.row_ended(row, completion.retractions)

    async def tokens_of(self, request: Request, *, special: bool = True) -> list[int] | None:
        """Ask the engine; see `Engine.tokens_of`."""
        return await self._engine.tokens_of(request, special=special)

    async def loads(self) -> Sequence[SchedulerLoad]:
        """Return the load, and record it."""
        loads = await self._engine.loads()
        now = time.monotonic()
        if self._began is not None:
            self.stop(self._watch.record_load(now - self._began, loads, self._log_size()))
        if now - self._opened > self._within_s:
            self.stop(("cut", "the time for tuning was over"))
        return loads

    def incidents(self) -> list[Incident]:
        """Return the server's incidents; a death ends the trial."""
        found = self._engine.incidents()
        for incident in found:
            if incident.what in {"died", "hangs", "lost"}:
                self.stop(("died", incident.why or incident.what))
        return found

    async def close(self) -> None:
        """Do nothing: the caller who opened the engine closes it."""

    def result(self) -> TrialResult:
        """Return the result of the trial, at its end."""
        ended, why = self.end or ("measured", "all rows of the sample")
        at_s = self._last - (self._began or self._last)
        result = self._watch.result(ended, why, at_s, 0.0)
        log = self._log_path.read_bytes() if self._log_path else b""
        begin, until = self._watch.measured_span(
            TrialProgress(at_s, self._watch.tokens, self._watch.rows, self._log_bytes or len(log))
        )
        counted = logged_passes(_lines(log[begin.log_bytes : until.log_bytes]))
        work = signs_at_start(_lines(log)) | signs_of_passes(counted, until.tokens - begin.tokens)
        rate = None if self._mixes else output_rate(counted)
        return replace(
            result,
            tokens_per_s=rate or result.tokens_per_s,
            signs=replace(result.signs, **work),
            spans=() if self._mixes else spans_of(counted),
        )

    def stop(self, end: End | None) -> None:
        """End the trial where a reason is given; the first reason counts."""
        if end is not None and self.end is None:
            self.end, self._last, self._log_bytes = end, time.monotonic(), self._log_size()
            self._control.stop(end[1])

    def _log_size(self) -> int:
        return self._log_path.stat().st_size if self._log_path else 0


def _lines(log: bytes) -> list[str]:
    return log.decode(errors="replace").splitlines()
