"""One trial: launch a server with some flags and send it the sample, until enough is known."""

import re
import shutil
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise, takewhile
from pathlib import Path
from statistics import fmean
from typing import Any, cast

from batchrunner.core.engine_info import EngineInfo, Incident, SchedulerLoad
from batchrunner.core.errors import (
    EXIT_STOPPED,
    BatchrunError,
    EngineLostError,
    EngineStartError,
)
from batchrunner.core.types import Completion, Request
from batchrunner.engines.base import Engine, ObservedEngine
from batchrunner.engines.registry import make_engine
from batchrunner.job.engine import ServerEngine
from batchrunner.job.spec import AcceptSpec, InputSpec, Job
from batchrunner.runner.control import Control
from batchrunner.runner.run import execute
from batchrunner.runner.shared_engine import SharedEngine
from batchrunner.runner.tuning_sample import TuningSample
from batchrunner.sglang.flags import arguments_in, name_in, variables_in
from batchrunner.sglang.logs.lines import LoggedBatch, ServerReady, clean, origin_of, record_in
from batchrunner.sglang.logs.reader import Facts
from batchrunner.tuning.flags import FLAGS
from batchrunner.tuning.measurement import End, TrialProgress, TrialResult, TrialWatch
from batchrunner.tuning.recover import EndedServer, read_server
from batchrunner.tuning.search import TrialRequest

LOG_INTERVAL = 10
"""`decode-log-interval` of trials, in passes: they are counted to within 10, at almost no cost."""
FEWEST_DECODES = 5
"""Log lines of decode passes that a mean needs at least."""
SETUP = frozenset(name.replace("-", "_") for name in FLAGS) | {
    "cuda_graph_config", "disable_cuda_graph", "dp_size", "enable_dp_attention",
    "enable_piecewise_cuda_graph", "pp_size",
}  # fmt: skip
"""Arguments of the server that are kept of a trial; among the others are secrets."""

Passes = Sequence[tuple[str, LoggedBatch]]
"""Lines of the log that tell of passes, each with the rank of its scheduler."""


def server_facts(lines: Iterable[str], args: Mapping[str, Any]) -> Facts:
    """Return the server's setup: by the log up to its first pass, else by the arguments that it was given."""
    before = takewhile(lambda line: not isinstance(record_in(clean(line)), LoggedBatch), lines)
    facts, _ = read_server(EndedServer([*before], args))
    return Facts(
        arguments={name: value for name, value in facts.arguments.items() if name in SETUP},
        ready=facts.ready, weights_gb=facts.weights_gb, quantised=facts.quantised, model=facts.model,
    )  # fmt: skip


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
    steps = LOG_INTERVAL * len(decodes)
    found: dict[str, Any] = {}
    if len(decodes) >= FEWEST_DECODES:
        ranks = len({rank for rank, _ in passes})
        found["running"] = round(ranks * fmean(batch.running for batch in decodes), 1)
        found["usage"] = round(fmean(batch.usage for batch in decodes), 3)
    return found | {
        "tokens_per_pass": round(tokens / (steps + len(prefilled)), 3) if passes else None,
        "prefill_per_pass": round(fmean(prefilled), 1) if prefilled else None,
        "decodes_per_prefill": round(steps / len(prefilled), 2) if prefilled else None,
        "graph_off_share": round(graphs.count(False) / len(graphs), 3) if graphs else None,
    }


def output_rate(passes: Passes) -> float | None:
    """Return output tokens a second by the scheduler's clock; None where the log has few decode passes.

    Counting the rows that end would be later and less exact, as many rows are half done at either end of the
    stretch. Each line has the rate since the line before, prefills included.
    """
    by_rank = defaultdict[str, list[LoggedBatch]](list)
    for rank, batch in passes:
        if batch.decode:
            by_rank[rank].append(batch)
    rates, lines = [], 0
    for batches in by_rank.values():
        tokens = seconds = 0.0
        for before, after in pairwise(batches):  # the first line's rate is of the time before
            if after.throughput:
                added = (before.running + after.running) / 2 * after.accepted
                tokens, seconds, lines = tokens + added, seconds + added / after.throughput, lines + 1
        rates.append(tokens / seconds if seconds else 0.0)
    return round(sum(rates), 2) if lines >= FEWEST_DECODES else None


MOST_ANSWERS, MOST_WORDS = 400, 1000
"""Answers of a trial that are replayed, and words of each."""
CONTEXTS = (8, 4, 3, 2, 1)
"""Words before a place by which what followed them before is found, the longest first."""
DRAFT = 11
"""Most words that a decode step tries: SGLang's default of `--speculative-num-draft-tokens`, less its own."""
WORD = re.compile(r"\s?\w+|\s?[^\w\s]|\s")
"""About a token: a space belongs to the word after it."""


def words_a_step(answers: Iterable[str]) -> float:
    """Return the words that a decode step would bring with SGLang's n-gram speculation; 1 without a hit.

    It proposes what followed the last words when they were last put out, in any answer. Prompts are not
    among what it knows (0.5.23, ngram_worker), but for their last words.
    """
    followed: dict[tuple[str, ...], str] = {}
    put_out = steps = 0
    for answer in answers:
        words = WORD.findall(answer)[:MOST_WORDS]
        put_out += len(words)
        at = 0
        while at < len(words):
            steps += 1
            begin = at
            while at < min(len(words), begin + DRAFT) and words[at] == _expected(followed, words, at):
                at += 1
            at += 1  # the word that a step brings without a hit too
            for place in range(begin, min(at, len(words))):
                followed |= dict.fromkeys(_contexts(words, place), words[place])
    return put_out / steps if steps else 1.0


def _contexts(words: Sequence[str], place: int) -> list[tuple[str, ...]]:
    return [tuple(words[place - size : place]) for size in CONTEXTS if size <= place]


def _expected(followed: Mapping[tuple[str, ...], str], words: Sequence[str], place: int) -> str | None:
    return next((followed[found] for found in _contexts(words, place) if found in followed), None)


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
            request.args,
        )  # fmt: skip
        try:
            report = await execute(
                self._job_into(out), engine=SharedEngine(cast("Engine", meter), info), control=control
            )
            failed = report.rows_failed / max(report.rows_failed + report.rows_ok, 1)
            if report.failures and not report.rows_ok:
                meter.stop(("measured", f"all rows failed, such as with: {report.failures[0]['example']}"))
            if report.exit_code == EXIT_STOPPED and meter.end is None:
                raise BatchrunError(f"the sample could not be sent: {report.reason}")
        except EngineLostError as failure:
            meter.stop(("died", str(failure)))
            failed = 0.0
        return replace(meter.result(info), failed_share=round(failed, 4))

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


@dataclass(eq=False)
class MeasuringEngine(ObservedEngine):
    """An engine that measures the requests it passes on, and stops the run when enough is known."""

    _watch: TrialWatch
    _control: Control
    _within_s: float
    _log_path: Path | None
    _args: Mapping[str, Any]
    """Flags of the trial."""
    end: End | None = None
    """How the trial ended, and why; None while it runs, and after all rows of the sample."""
    _log_bytes: int | None = None
    """Size of the log in bytes at the end of the trial."""
    _answers: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Begin the trial now."""
        self._opened = self._last = time.monotonic()

    def observe(self, request: Request, completion: Completion, route: str, sent_at: float) -> None:  # noqa: ARG002
        """Count an answer."""
        self._last = time.monotonic()
        prompt, cached = completion.prompt_tokens or 0, completion.cached_tokens or 0
        tokens = sum(count or 1 for count in completion.completion_tokens)
        self._watch.row_ended(prompt, cached, tokens, completion.retractions)
        if len(self._answers) < MOST_ANSWERS:
            self._answers += completion.texts

    async def loads(self) -> Sequence[SchedulerLoad]:
        """Return the load, and record it."""
        loads = await self._engine.loads()
        now = time.monotonic()
        if self.first_sent_at is not None:
            self.stop(self._watch.record_load(now - self.first_sent_at, loads, self._log_size()))
        if now - self._opened > self._within_s:
            self.stop(("cut", "the time for tuning was over"))
        return loads

    def give_back(self, route: str, kept: int) -> None:
        """Give rows back; see `Engine.give_back`."""
        self._engine.give_back(route, kept)

    def incidents(self) -> list[Incident]:
        """Return the server's incidents; a death ends the trial."""
        found = self._engine.incidents()
        for incident in found:
            if incident.what in {"died", "hangs", "lost"}:
                self.stop(("died", incident.why or incident.what))
        return found

    async def close(self) -> None:
        """Do nothing: the caller who opened the engine closes it."""

    def result(self, info: EngineInfo) -> TrialResult:
        """Return the result of the trial, at its end; `info` has the limits that the log lacks."""
        ended, why = self.end or ("measured", "all rows of the sample")
        at_s = self._last - (self.first_sent_at or self._last)
        result = self._watch.result(ended, why, at_s, 0.0)
        log = self._log_path.read_bytes() if self._log_path else b""
        begin, until = self._watch.measured_span(
            TrialProgress(at_s, self._watch.tokens, self._watch.rows, self._log_bytes or len(log))
        )
        counted = logged_passes(_lines(log[begin.log_bytes : until.log_bytes]))
        work = signs_of_passes(counted, until.tokens - begin.tokens)
        signs = replace(result.signs, **work, repeated=round(words_a_step(self._answers), 2))
        facts = server_facts(_lines(log), self._args)
        limits = ServerReady(signs.pool_tokens, info.prefill_tokens, signs.max_running)
        # with mixed chunks prefill passes decode too, and the log counts none of what they decode
        mixes = bool(self._args.get(name_in(self._args, "enable-mixed-chunk")))
        rate = None if mixes else output_rate(counted)
        return replace(
            result, tokens_per_s=rate or result.tokens_per_s, signs=signs,
            facts=replace(facts, ready=facts.ready or limits),
        )  # fmt: skip

    def stop(self, end: End | None) -> None:
        """End the trial where a reason is given; the first reason counts."""
        if end is not None and self.end is None:
            self.end, self._last, self._log_bytes = end, time.monotonic(), self._log_size()
            self._control.stop(end[1])

    def _log_size(self) -> int:
        return self._log_path.stat().st_size if self._log_path else 0


def _lines(log: bytes) -> list[str]:
    return log.decode(errors="replace").splitlines()
