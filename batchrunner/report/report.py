"""The report of a run: the content of report.json, and the lines that are printed when the run ends."""

import platform
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from batchrunner.core.console import background_line, counted, duration, installed_version
from batchrunner.core.engine_info import EngineInfo
from batchrunner.core.errors import EXIT_DONE, EXIT_FAILED_ROWS, EXIT_STOPPED
from batchrunner.job.output import REPETITION
from batchrunner.job.tasks import GENERATE
from batchrunner.output.counts import RowCounts
from batchrunner.output.events import attempt_spans, union_s
from batchrunner.output.files import write_json, writing
from batchrunner.output.resume import DoneRows, done_by_all
from batchrunner.output.run_dir import MAIN_TASK, RunDir, look_at_run
from batchrunner.output.run_json import require_run_json
from batchrunner.report.verdict import GO_ON, RunEnd, RunVerdict, max_failed_rows_of, verdict_of

CAUSES_SHOWN = 5
"""Maximum number of causes of failed rows that are printed, the most frequent first. report.json has all."""


@dataclass(frozen=True, slots=True, repr=False)
class Report:
    """The result of a run in numbers.

    Counts of rows cover all starts of the run. Times, tokens, `retries` and `finish_reasons` cover this start
    only, except in fields named *_all_starts. docs/reference/json-output.md lists the keys inside fields.
    """

    path: str
    """Output path of the run."""
    exit_code: int = EXIT_DONE
    """Exit code of the command."""
    reason: str = ""
    """Reason why the run ended."""
    next_step: str = GO_ON
    """What to do if rows remain; empty if `reason` says it."""
    rows_total: int = 0
    """Number of rows that the job selects."""
    rows_ok: int = 0
    """Number of rows that succeeded."""
    rows_failed: int = 0
    """Number of rows that have an `error`."""
    rows_cut: int = 0
    """Number of rows in `rows_ok` with an output truncated at `max_new_tokens`."""
    rows_thinking_cut: int = 0
    """Number of rows in `rows_ok` whose thinking took all of `max_thinking_tokens`."""
    rows_resumed: int = 0
    """Number of rows that were done before this start."""
    rows_of_others: int = 0
    """Number of rows of the run that this worker has not taken. Other workers may have taken or finished
    them."""
    wall_s: float = 0.0
    """Seconds from the time when the engine is ready to the end of the last row."""
    wall_s_all_starts: float = 0.0
    """`wall_s` summed over all starts."""
    starts: int = 1
    """Number of starts, this one included."""
    output_tokens: int = 0
    """Number of generated tokens of the rows that ended, rejected answers included."""
    output_tokens_all_starts: int = 0
    """`output_tokens` summed over all starts."""
    output_tokens_per_s: float = 0.0
    """`output_tokens` divided by `wall_s`."""
    rows_per_s: float = 0.0
    """Number of rows that ended in this start, divided by `wall_s`."""
    task: str = GENERATE
    """`task` of the job."""
    prompt_tokens: int = 0
    """Number of prompt tokens of the rows that ended. Repeated attempts at a row do not count again."""
    cached_tokens: int = 0
    """Number of `prompt_tokens` that were in the engine's prefix cache."""
    rows_deduplicated: int = 0
    """Number of rows that got the answer of an equal row. They add no tokens."""
    rows_reused: int = 0
    """Number of rows that got an answer of another run (`output.reuse`). They add no tokens."""
    rows_left_out: int = 0
    """Number of rows in `rows_ok` that `prompt.python` left out."""
    retries: int = 0
    """Number of repeated attempts at rows."""
    finish_reasons: dict[str, int] = field(default_factory=dict)
    """Number of outputs with each `finish_reason`."""
    failures: list[dict[str, Any]] = field(default_factory=list)
    """Failed rows by cause, the most frequent cause first."""
    engine: dict[str, Any] = field(default_factory=dict)
    """Properties that the engine reports."""
    window: int | None = None
    """Concurrency limit at the end, summed over all replicas; null if there is none."""
    load: dict[str, Any] = field(default_factory=dict)
    """Load of the engine during the run."""
    incidents: list[dict[str, Any]] = field(default_factory=list)
    """Deaths, hangs and restarts of servers, in order."""
    sharing: dict[str, Any] = field(default_factory=dict)
    """Prefixes that rows share, and their cache hits."""
    rollouts: dict[str, int] = field(default_factory=dict)
    """Numbers of multi-turn rollouts that are `open`, `waiting_for_tools` or `blocked` by another row of
    their process, and number of answered `turns`. Empty for a job without `prompt.rollout`."""
    bundles: dict[str, Any] = field(default_factory=dict)
    """Number of `requests`, mean `rows_per_request`, number of `bundles` (requests with several rows),
    `most_rows` of a bundle, and `rows_resent` because their bundle ended without an answer for them."""
    checks: dict[str, Any] = field(default_factory=dict)
    """Rejected answers of all starts: number of retried rows (`rows_asked_again`) and of retries
    (`asked_again`), `rows_mended` by a retry, `rows_failed`, rejected `output_tokens`, `prompt_tokens` of
    retries, and `causes`. Empty if no answer was rejected."""
    simulated: bool = False
    """Whether the engine is simulated, so that the answers are made up."""
    versions: dict[str, str | None] = field(default_factory=dict)
    """Versions of Python, engine, batchrunner, pyarrow and aiohttp; null if unknown."""

    def __repr__(self) -> str:
        """Return the main fields in one line; `as_dict` has all fields."""
        names = ("path", "exit_code", "reason", "rows_total", "rows_ok", "rows_failed", "rows_left")
        return f"Report({', '.join(f'{name}={getattr(self, name)!r}' for name in names)})"

    @property
    def rows_left(self) -> int:
        """Number of rows without a result, which a later start or another worker will send."""
        return self.rows_total - self.rows_ok - self.rows_failed + self.rows_of_others

    @property
    def results(self) -> str:
        """Path of the directory with the results."""
        return f"{self.path}/parts"

    def as_dict(self) -> dict[str, Any]:
        """Return the content of report.json."""
        return {**asdict(self), "rows_left": self.rows_left}

    def lines(self) -> list[str]:
        """Return the lines that are printed when the run ends."""
        lines = [self._outcome()]
        # A start that finished no row has no meaningful speed.
        if self.wall_s and self.rows_ok + self.rows_failed > self.rows_resumed:
            lines.append(
                f"{duration(self.wall_s)}, {self.rows_per_s:,.1f} rows/s{self._tokens()}"
                + (" [simulated: these numbers mean nothing]" if self.simulated else "")
            )
        if self.cached_tokens and self.prompt_tokens:
            share = self.cached_tokens / self.prompt_tokens
            lines.append(f"{share:.0%} of {self.prompt_tokens:,} prompt tokens were in the engine's cache")
        if self.rows_deduplicated:
            rows = counted(self.rows_deduplicated, "row")
            lines.append(f"{rows} got the answer of an equal row (dedupe: false sends all rows)")
        if self.rows_reused:
            lines.append(f"{counted(self.rows_reused, 'row')} got an answer of another run")
        if background := self.load.get("background"):
            lines.append(background_line(background))
        lines += self._engine_lines()
        lines += self._check_lines()
        truncated = self.finish_reasons.get("length", 0)
        # Rows with several outputs may have more truncated outputs. The first line counts only rows.
        if truncated > self.rows_cut:
            outputs = counted(truncated, "output")
            lines.append(f"{outputs} truncated at max_new_tokens (finish_reason length)")
        if REPETITION in self.finish_reasons:
            lines.append(
                f"outputs that repeat themselves end at the first repeat (finish_reason {REPETITION}); "
                "on_repetition: keep lets them go on"
            )
        if self.rows_thinking_cut:
            rows = counted(self.rows_thinking_cut, "row")
            lines.append(
                f"{rows} ok, but the thinking used all of max_thinking_tokens: raise this limit, "
                "or set on_length: longer"
            )
        lines += cause_lines(self.failures, "failed")
        if self.wall_s:  # 0 if this start had nothing to send: then there is nothing new to show
            run = shlex.quote(self.path)
            advice = "" if self.simulated else f", batchrun advise {run} judges SGLang's flags"
            lines.append(f"batchrun report {run} shows the run{advice}")
        lines.append(f"results: {self.results}")
        return lines

    def _outcome(self) -> str:
        """Return the first line: why the run ended, and the numbers of rows by state."""
        details = []
        if self.rows_cut:
            details.append(f"{self.rows_cut:,} truncated at max_new_tokens")
        if stopped := self.finish_reasons.get(REPETITION, 0):
            details.append(f"{stopped:,} stopped because they repeated themselves")
        if self.rows_left_out:
            details.append(f"{self.rows_left_out:,} left out by prompt.python")
        ok = f"{self.rows_ok:,} of {counted(self.rows_total, 'row')} ok"
        if details:
            ok += f" ({', '.join(details)})"
        counts = [ok, f"{self.rows_failed:,} failed"]
        if self.rows_resumed:
            counts.append(f"{self.rows_resumed:,} were done before")
        if self.rows_left:
            # With these exit codes, this worker has sent all rows that it could take.
            if self.exit_code in {EXIT_DONE, EXIT_FAILED_ROWS}:
                hint = " to other workers"
            else:
                hint = f": {self.next_step}" if self.next_step else ""
            counts.append(f"{self.rows_left:,} left{hint}")
        return f"{self.reason}: {', '.join(counts)}"

    def _check_lines(self) -> list[str]:
        """Return lines about rejected answers, and what the retries cost."""
        if not self.checks:
            return []
        checks = self.checks
        number = checks["asked_again"]
        retries = f"{number:,} {'retry' if number == 1 else 'retries'}"
        summary = (
            f"{retries} of {counted(checks['rows_asked_again'], 'row')} after a rejected answer: "
            f"{checks['rows_mended']:,} then had a good answer, {checks['rows_failed']:,} failed; "
            f"{checks['output_tokens']:,} of the output tokens were rejected"
        )
        return [summary, *cause_lines(checks["causes"], "answers rejected", unit="time")]

    def _tokens(self) -> str:
        """Return the part of a report line about output tokens, or about input tokens for other tasks."""
        if self.task == GENERATE:
            return f", {self.output_tokens_per_s:,.0f} output tokens/s ({self.output_tokens:,} in all)"
        if not self.prompt_tokens:
            return ""
        # A run of no measurable length must not divide by zero.
        rate = self.prompt_tokens / max(self.wall_s, 0.001)
        return f", {rate:,.0f} input tokens/s ({self.prompt_tokens:,} in all)"

    def _engine_lines(self) -> list[str]:
        """Return lines about deaths and hangs of servers, and about flags that were changed after them."""
        failures = sum(incident["what"] in {"died", "hangs"} for incident in self.incidents)
        lines = [f"the engine died or hung {counted(failures, 'time')}"] if failures else []
        for incident in self.incidents:
            # An incident "healed" records a restart with changed flags.
            if incident["what"] == "healed":
                new_flags = ", ".join(f"{name} {value}" for name, value in incident["new"].items())
                lines.append(f"{incident['who']} was restarted with {new_flags}: {incident['why'][:150]}")
        return lines


def save_report(run_dir: RunDir, report: Mapping[str, Any]) -> None:
    """Write report.json on this machine and, if the run is in an object store, there. Raises StorageError."""
    write_json(run_dir.report_json, report)
    with writing(run_dir.report_json):
        run_dir.store.publish(run_dir.report_json)


def cause_lines(groups: Sequence[Mapping[str, Any]], what: str, unit: str = "row") -> list[str]:
    """Return a line for each of the most frequent causes of failed rows, with its count and an example.

    `groups` come from `Failures.summary`. Each line begins with `what`. `unit` is the noun of the counts.
    """
    lines = [
        f"{what}: {counted(group['rows'], unit)}: {group['example']} (row {group['example_row']})"
        for group in groups[:CAUSES_SHOWN]
    ]
    if rest := groups[CAUSES_SHOWN:]:
        total = counted(sum(group["rows"] for group in rest), unit)
        lines.append(f"{what}: {total}: {counted(len(rest), 'other reason')}")
    return lines


def make_report(run_dir: RunDir, done: DoneRows, total: int, tally: RowCounts) -> Report:
    """Return a report with the counts of rows from earlier starts (`done`) and from this one (`tally`).

    `total` is the number of rows of the run. The caller sets the other fields.
    """
    earlier = done.counts
    return Report(
        path=run_dir.name,
        rows_total=total,
        rows_ok=len(done.answered) + tally.ok,
        rows_failed=earlier.failed + tally.failed,
        rows_cut=earlier.cut + tally.cut,
        rows_thinking_cut=earlier.thinking_cut + tally.thinking_cut,
        rows_resumed=len(done),
        output_tokens=tally.output_tokens,
        output_tokens_all_starts=earlier.output_tokens + tally.output_tokens,
        prompt_tokens=tally.prompt_tokens,
        cached_tokens=tally.cached_tokens,
        rows_deduplicated=earlier.duplicates + tally.duplicates,
        rows_reused=earlier.reused + tally.reused,
        rows_left_out=earlier.left_out + tally.left_out,
        retries=tally.retries,
        finish_reasons=dict(tally.finish_reasons),
        failures=(earlier.failures + tally.failures).summary(),
        checks=(earlier.checks + tally.checks).as_dict(),
    )


def report_of_all(run: str | Path | RunDir) -> Report:
    """Return the report of a whole run from its files; write report.json if the run has several workers.

    `wall_s` is the time during which at least one worker ran, without the pauses between starts. Raises
    OutputError if the path holds no run, ResumeError for a damaged result file, and StorageError.
    """
    run_dir = look_at_run(run)
    facts = require_run_json(run_dir)
    workers = run_dir.all_tasks()
    spans = [span for worker in workers for span in attempt_spans(worker.events)]
    wall_s = union_s(spans)
    done = done_by_all(run_dir)
    # A row that is in two result files counts once.
    counts = replace(done.counts, ok=len(done.answered))
    # All starts together are reported as one, with no row done before it.
    report = make_report(run_dir, DoneRows(), facts["rows_total"], counts)
    end = RunEnd(
        rows_total=report.rows_total,
        rows_failed=report.rows_failed,
        max_failed_rows=max_failed_rows_of(facts),
        rows_left=report.rows_left,
        stop=RunVerdict(EXIT_STOPPED, "not finished"),
    )
    exit_code, reason, next_step = verdict_of(end)
    report = replace(
        report,
        exit_code=exit_code, reason=reason, next_step=next_step,
        wall_s=round(wall_s, 3), wall_s_all_starts=round(wall_s, 3),
        starts=len(spans),
        output_tokens_per_s=round(report.output_tokens / wall_s, 1) if wall_s else 0.0,
        rows_per_s=round(len(done.rows) / wall_s, 2) if wall_s else 0.0,
        task=facts["job"].get("task", GENERATE),
        engine=facts["engine"], simulated=bool(facts["engine"].get("simulated")), versions=facts["versions"],
    )  # fmt: skip
    # A run of a single worker has a report.json already, which that worker wrote with more facts.
    if any(worker.task != MAIN_TASK for worker in workers):
        save_report(run_dir, report.as_dict())
    return report


def versions(info: EngineInfo) -> dict[str, str | None]:
    """Return the versions of the software that produces the results; None if unknown."""
    return {
        "python": platform.python_version(),
        "engine": info.version,
        **{name: installed_version(name) for name in ("batchrunner", "pyarrow", "aiohttp")},
    }
