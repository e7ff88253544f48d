"""Trials of `batchrun tune`: a server with some flags answers a sample of rows until its speed is clear."""

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
from batchrunner.tuning.ngrams import MOST_ANSWERS, words_a_step
from batchrunner.tuning.recover import EndedServer, read_server
from batchrunner.tuning.search import TrialRequest

LOG_INTERVAL = 10
"""`--decode-log-interval` of the servers of trials: a server logs every 10th decode pass. That costs almost
nothing and gives the number of passes to within 10."""
FEWEST_DECODES = 5
"""Minimum number of logged decode passes for a mean."""
STORED_ARGUMENTS = frozenset(name.replace("-", "_") for name in FLAGS) | {
    "cuda_graph_config", "disable_cuda_graph", "dp_size", "enable_dp_attention",
    "enable_piecewise_cuda_graph", "pp_size",
}  # fmt: skip
"""Names of the server arguments that are stored with the result of a trial. Other arguments may be secret."""

Passes = Sequence[tuple[str, LoggedBatch]]
"""Logged forward passes, each with the data-parallel rank of its scheduler."""


def server_facts(lines: Iterable[str], args: Mapping[str, Any]) -> Facts:
    """Return the facts about a server's setup that are stored with a trial.

    They come from its log before the first forward pass, or else from its arguments `args`.
    """
    lines_of_start = takewhile(lambda line: not isinstance(record_in(clean(line)), LoggedBatch), lines)
    facts, _ = read_server(EndedServer([*lines_of_start], args))
    return Facts(
        arguments={name: value for name, value in facts.arguments.items() if name in STORED_ARGUMENTS},
        ready=facts.ready,
        states=facts.states,
        weights_gb=facts.weights_gb,
        quantised=facts.quantised,
        model=facts.model,
    )


def logged_passes(lines: Iterable[str]) -> list[tuple[str, LoggedBatch]]:
    """Return the forward passes in lines of a server's log, each with the rank of its scheduler."""
    records = ((origin_of(line).dp, record_in(line)) for line in map(clean, lines))
    return [(rank, record) for rank, record in records if isinstance(record, LoggedBatch)]


def signs_of_passes(passes: Passes, tokens: float) -> dict[str, Any]:
    """Return statistics of logged passes, as fields of TrialSigns.

    `tokens` is the number of output tokens of these passes. `running` and `usage` are means over the logged
    decode passes. Readings of the load would not do, because they also come during prefills, when fewer
    requests run.
    """
    decodes = [batch for _, batch in passes if batch.decode]
    prefill_tokens = [batch.new_tokens for _, batch in passes if not batch.decode]
    uses_graph = [batch.graph for batch in decodes if batch.graph is not None]
    prefills = len(prefill_tokens)
    # The server logs every prefill pass, but only every LOG_INTERVAL-th decode pass.
    decode_passes = LOG_INTERVAL * len(decodes)
    figures: dict[str, Any] = {}
    if len(decodes) >= FEWEST_DECODES:
        # Each scheduler (rank) logs its own requests, and `running` counts those of all ranks.
        ranks = len({rank for rank, _ in passes})
        figures["running"] = round(ranks * fmean(batch.running for batch in decodes), 1)
        figures["usage"] = round(fmean(batch.usage for batch in decodes), 3)
    return figures | {
        "tokens_per_pass": round(tokens / (decode_passes + prefills), 3) if passes else None,
        "prefill_per_pass": round(fmean(prefill_tokens), 1) if prefills else None,
        "decodes_per_prefill": round(decode_passes / prefills, 2) if prefills else None,
        "graph_off_share": round(uses_graph.count(False) / len(uses_graph), 3) if uses_graph else None,
    }


def output_tokens(passes: Passes) -> float:
    """Return the number of output tokens that logged passes generated.

    The answered rows would not do for a short span, because a busy client counts them late. A prefill pass
    generates the first token of each of its requests, a decode pass the next ones of each running request.
    """
    decoded = sum(batch.running * batch.accepted for _, batch in passes if batch.decode)
    return LOG_INTERVAL * decoded + sum(batch.new_seqs for _, batch in passes)


def output_rate(passes: Passes) -> float | None:
    """Return output tokens per second by the scheduler's clock; None if the log has too few decode passes.

    A count of finished rows would be less exact, because many rows are half done when the measurement begins
    and ends. Each log line of a decode pass has the tokens/s since the line before it, prefills included. The
    number of running requests tells how many tokens these are.
    """
    decodes_by_rank = defaultdict[str, list[LoggedBatch]](list)
    for rank, batch in passes:
        if batch.decode:
            decodes_by_rank[rank].append(batch)
    rates: list[float] = []
    lines = 0
    for batches in decodes_by_rank.values():
        tokens = seconds = 0.0
        # The first line is left out, because its rate covers the time before the measurement.
        for before, after in pairwise(batches):
            if after.throughput:
                # Each line stands for the same number of passes, so the tokens of one pass are enough.
                tokens_of_pass = (before.running + after.running) / 2 * after.accepted
                tokens += tokens_of_pass
                seconds += tokens_of_pass / after.throughput
                lines += 1
        rates.append(tokens / seconds if seconds else 0.0)
    return round(sum(rates), 2) if lines >= FEWEST_DECODES else None


@dataclass(frozen=True, slots=True)
class TrialRunner:
    """Runs trials: starts a server with other flags, and sends a sample of the job's rows to it.

    Logs and results of trials lie below `directory`.
    """

    job: Job
    engine: ServerEngine
    sample: TuningSample
    directory: Path

    async def run(self, request: TrialRequest, number: int, within_s: float) -> TrialResult:
        """Launch the server, send the sample and return the result, in little more than `within_s` seconds.

        A server that does not start gives a result too. Raises BatchrunError if the job is wrong.
        """
        start = time.monotonic()
        result = await self._run(request, self.directory / f"{number:03d}", within_s)
        return replace(result, cost_s=round(time.monotonic() - start, 1))

    async def _run(self, request: TrialRequest, directory: Path, within_s: float) -> TrialResult:
        """Run a trial in a directory of its own; return the result without its cost."""
        start = time.monotonic()
        # Passes in the log of an earlier trial would count.
        shutil.rmtree(directory, ignore_errors=True)
        args = {**arguments_in(request.args), "decode-log-interval": LOG_INTERVAL}
        env = {**self.engine.env, **variables_in(request.args)}
        start_s = min(self.engine.start_timeout, within_s)
        # If the server dies, the trial must end, so the server is not restarted.
        spec = self.engine.model_copy(
            update={"args": args, "env": env, "start_timeout": start_s, "heal": False}
        )
        engine = await make_engine(spec, log_dir=directory, limits=self.job.limits)
        try:
            info = await engine.open()
            remaining_s = within_s - (time.monotonic() - start)
            return await self._measure(
                engine, info, request=request, out=directory / "run", remaining_s=remaining_s
            )
        except EngineStartError as failure:
            # If the time was up during the start, the flags are not to blame.
            is_time_up = time.monotonic() - start >= within_s
            return TrialResult("cut" if is_time_up else "died", why=str(failure), cost_s=0.0)
        finally:
            await engine.close()
            shutil.rmtree(directory / "run", ignore_errors=True)

    async def _measure(
        self, engine: Engine, info: EngineInfo, *, request: TrialRequest, out: Path, remaining_s: float
    ) -> TrialResult:
        """Send the sample to an open engine until its speed is known, for at most `remaining_s` seconds.

        `out` is the output path of the run that sends the sample.
        """
        control = Control()
        meter = MeasuringEngine(
            engine,
            watch=TrialWatch(request.incumbent),
            control=control,
            within_s=remaining_s,
            log_path=Path(info.log) if info.log else None,
            args=request.args,
        )
        try:
            # The meter has all methods of an engine, most of them by `__getattr__`.
            shared_engine = SharedEngine(cast("Engine", meter), info)
            report = await execute(self._job_of_sample(out), engine=shared_engine, control=control)
            failed_share = report.rows_failed / max(report.rows_failed + report.rows_ok, 1)
            if report.failures and not report.rows_ok:
                meter.stop(("measured", f"all rows failed, for example: {report.failures[0]['example']}"))
            # The meter stops the run once the speed is known. Any other stop is an error.
            if report.exit_code == EXIT_STOPPED and meter.end is None:
                raise BatchrunError(f"the sample could not be sent: {report.reason}")
        except EngineLostError as failure:
            meter.stop(("died", str(failure)))
            failed_share = 0.0
        return replace(meter.result(info), failed_share=round(failed_share, 4))

    def _job_of_sample(self, out: Path) -> Job:
        """Return the job with the sample as its input, and `out` as its output path."""
        return self.job.model_copy(
            update={
                "input": InputSpec(path=str(self.sample.path)),
                "output": self.job.output.model_copy(update={"path": str(out), "reuse": None}),
                "engine": self.engine,
                # Nobody needs the answers, so parsing them would only take time.
                "parse": None,
                "limits": self.job.limits.model_copy(update={"deadline": None}),
                "order": "input" if self.job.order == "input" else "auto",
                # Each row is sent once, so no answer is rejected.
                "accept": AcceptSpec.model_validate({"json": False}),
                "on_length": "keep",
                # An endless answer is stopped as usual, but not rejected.
                "on_repetition": "stop" if self.job.on_repetition == "fail" else self.job.on_repetition,
            }
        )


@dataclass(eq=False)
class MeasuringEngine(ObservedEngine):
    """An engine that forwards requests, measures the answers, and stops the run once the speed is known."""

    watch: TrialWatch
    control: Control
    within_s: float
    """Maximum seconds of the trial, counted from the creation of this object."""
    log_path: Path | None
    args: Mapping[str, Any]
    """Flags of the trial."""
    end: End | None = None
    """Why the trial was stopped. None while it runs, or if all its rows are done."""
    _log_bytes: int | None = None
    """Size of the log in bytes when the trial was stopped; None if it was not stopped."""
    _answers: list[str] = field(default_factory=list)
    """Texts of the first answers, at least MOST_ANSWERS if there are as many."""
    _created_at: float = field(default_factory=time.monotonic)
    _ended_at: float = field(default_factory=time.monotonic)
    """Time at which the trial was stopped, or of the last answer so far."""

    def observe(self, request: Request, completion: Completion, route: str, sent_at: float) -> None:  # noqa: ARG002
        """Count the tokens of an answer."""
        self._ended_at = time.monotonic()
        prompt, cached = completion.prompt_tokens or 0, completion.cached_tokens or 0
        # A completion without a reported number counts as one token.
        tokens = sum(count or 1 for count in completion.completion_tokens)
        self.watch.row_ended(prompt, cached, tokens, completion.retractions)
        if len(self._answers) < MOST_ANSWERS:
            self._answers += completion.texts

    async def loads(self) -> Sequence[SchedulerLoad]:
        """Return the engine's load, and record it for the measurement."""
        loads = await self._engine.loads()
        now = time.monotonic()
        if self.first_sent_at is not None:
            end = self.watch.record_load(now - self.first_sent_at, loads, self._log_size())
            if end is not None:
                self.stop(end)
        if now - self._created_at > self.within_s:
            self.stop(("cut", "the time budget is used up"))
        return loads

    def preempt(self, route: str, kept: int) -> None:
        """Cancel (preempt) rows on the real engine; see `Engine.preempt`."""
        self._engine.preempt(route, kept)

    def incidents(self) -> list[Incident]:
        """Return the incidents of the server. Stop the trial if the server has died or hangs."""
        incidents = self._engine.incidents()
        for incident in incidents:
            if incident.what in {"died", "hangs", "lost"}:
                self.stop(("died", incident.why or incident.what))
        return incidents

    async def close(self) -> None:
        """Do nothing, because the caller that opened the engine closes it."""

    def result(self, info: EngineInfo) -> TrialResult:
        """Return the result of a trial that has ended.

        Limits that are not in the log are taken from `info`.
        """
        ended, why = self.end or ("measured", "all rows of the sample")
        duration_s = 0.0 if self.first_sent_at is None else self._ended_at - self.first_sent_at
        # `TrialRunner.run` adds the cost once the server has shut down.
        result = self.watch.result(ended, why, duration_s, cost_s=0.0)
        log = self.log_path.read_bytes() if self.log_path else b""
        at_end = TrialProgress(
            duration_s, tokens=self.watch.tokens, rows=self.watch.rows, log_bytes=self._log_bytes or len(log)
        )
        # Only the steady part of the trial counts: the log between these two moments.
        begin, until = self.watch.measured_span(at_end)
        passes = logged_passes(_lines(log[begin.log_bytes : until.log_bytes]))
        # With `--enable-mixed-chunk`, prefill passes decode too, and the log does not count their tokens. So
        # the tokens of the answers are counted, and the log gives no rate.
        prefills_decode = bool(self.args.get(name_in(self.args, "enable-mixed-chunk")))
        if prefills_decode:
            tokens: float = until.tokens - begin.tokens
            rate = None
        else:
            tokens = output_tokens(passes)
            rate = output_rate(passes)
        signs_of_log = signs_of_passes(passes, tokens)
        signs = replace(result.signs, **signs_of_log, repeated=round(words_a_step(self._answers), 2))
        facts = server_facts(_lines(log), self.args)
        limits = ServerReady(
            max_total_num_tokens=signs.pool_tokens,
            chunked_prefill_size=info.prefill_tokens,
            max_running_requests=signs.max_running,
        )
        return replace(
            result,
            # Without a rate in the log, the rate of the answers counts.
            tokens_per_s=rate or result.tokens_per_s,
            signs=signs,
            facts=replace(facts, ready=facts.ready or limits),
        )

    def stop(self, end: End) -> None:
        """Stop the trial. Only the first call counts."""
        if self.end is not None:
            return
        self.end = end
        self._ended_at = time.monotonic()
        self._log_bytes = self._log_size()
        _, why = end
        self.control.stop(why)

    def _log_size(self) -> int:
        """Return the size of the server's log in bytes."""
        return self.log_path.stat().st_size if self.log_path else 0


def _lines(log: bytes) -> list[str]:
    return log.decode(errors="replace").splitlines()
