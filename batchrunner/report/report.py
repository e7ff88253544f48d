"""The report of a run, which becomes report.json and the lines at its end."""

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
from batchrunner.job.spec import LimitsSpec
from batchrunner.job.tasks import GENERATE
from batchrunner.output.counts import RowCounts
from batchrunner.output.events import attempt_spans, union_s
from batchrunner.output.files import write_json, writing
from batchrunner.output.resume import DoneRows, done_by_all
from batchrunner.output.run_dir import MAIN_TASK, RunDir, look_at_run
from batchrunner.output.run_json import require_run_json
from batchrunner.report.verdict import RunEnd, RunVerdict, verdict_of

GO_ON = "run the same command again"
"""Hint after a run that has not finished."""
CAUSES_SHOWN = 5
"""Maximum number of causes of failed rows on the screen, the most frequent first; report.json has all."""


@dataclass(frozen=True, slots=True, repr=False)
class Report:
    """What a run did.

    Counts of rows cover all starts. Times, tokens, `retries` and `finish_reasons` cover this start only,
    except in fields named *_all_starts.
    """

    path: str
    """Output path of the run."""
    exit_code: int = EXIT_DONE
    """Exit code of the command."""
    reason: str = ""
    """Why the run ended."""
    rows_total: int = 0
    """Rows that the job selects."""
    rows_ok: int = 0
    """Rows that succeeded."""
    rows_failed: int = 0
    """Rows that have an `error`."""
    rows_cut: int = 0
    """Rows of `rows_ok` with an output truncated at `max_new_tokens`."""
    rows_thinking_cut: int = 0
    """Rows of `rows_ok` whose thinking took all of `max_thinking_tokens`."""
    rows_resumed: int = 0
    """Rows that were done before this start."""
    rows_of_others: int = 0
    """Further rows of the run, which this worker does not hold. Other workers may hold them, and some may be
    done."""
    wall_s: float = 0.0
    """Seconds from the engine being ready to the last row."""
    wall_s_all_starts: float = 0.0
    """The same, summed over all starts."""
    starts: int = 1
    """Number of starts, this one included."""
    output_tokens: int = 0
    """Generated tokens of the rows that ended, rejected answers included."""
    output_tokens_all_starts: int = 0
    """The same, summed over all starts."""
    output_tokens_per_s: float = 0.0
    """`output_tokens` divided by `wall_s`."""
    rows_per_s: float = 0.0
    """Number of rows that ended in this start, divided by `wall_s`."""
    task: str = GENERATE
    """`task` of the job."""
    prompt_tokens: int = 0
    """Prompt tokens of the rows that ended. Repeated attempts of a row do not count again."""
    cached_tokens: int = 0
    """Prefix cache hits among `prompt_tokens`."""
    rows_deduplicated: int = 0
    """Rows with the answer of an equal row. They add no tokens."""
    rows_reused: int = 0
    """Rows with an answer of another run (`output.reuse`). They add no tokens."""
    rows_left_out: int = 0
    """Rows of `rows_ok` that `prompt.python` left out."""
    retries: int = 0
    """Number of repeated attempts."""
    finish_reasons: dict[str, int] = field(default_factory=dict)
    """Number of outputs with each `finish_reason`."""
    failures: list[dict[str, Any]] = field(default_factory=list)
    """Failed rows by cause, most frequent first: see below."""
    engine: dict[str, Any] = field(default_factory=dict)
    """Properties that the engine reports."""
    window: int | None = None
    """Concurrency limit at the end, summed over all replicas; null if there is none."""
    load: dict[str, Any] = field(default_factory=dict)
    """The engine's load: see below."""
    incidents: list[dict[str, Any]] = field(default_factory=list)
    """The engine's incidents, in order: see below."""
    sharing: dict[str, Any] = field(default_factory=dict)
    """Shared prefixes: see below."""
    rollouts: dict[str, int] = field(default_factory=dict)
    """Rows of `prompt.rollout` that are `open`, `waiting_for_tools` or `blocked` by another row of their
    process, and the number of answered `turns`; empty without rollouts."""
    bundles: dict[str, Any] = field(default_factory=dict)
    """`requests`, mean `rows_per_request`, `bundles` (requests with several rows), `most_rows` of a bundle,
    and `rows_resent` because a bundle did not answer them."""
    checks: dict[str, Any] = field(default_factory=dict)
    """Rejected answers of all starts, if any: `rows_asked_again`, repeated requests (`asked_again`),
    `rows_mended`, `rows_failed`, rejected `output_tokens`, `prompt_tokens` of repeated requests, `causes`."""
    simulated: bool = False
    """Whether the answers are made up."""
    versions: dict[str, str | None] = field(default_factory=dict)
    """Versions of Python, engine, batchrunner, pyarrow and aiohttp; null if unknown."""

    def __repr__(self) -> str:
        """Return the outcome in a line; `as_dict` has all fields."""
        names = ("path", "exit_code", "reason", "rows_total", "rows_ok", "rows_failed", "rows_left")
        return f"Report({', '.join(f'{name}={getattr(self, name)!r}' for name in names)})"

    @property
    def rows_left(self) -> int:
        """Rows without a result, which a later start or another worker will do."""
        return self.rows_total - self.rows_ok - self.rows_failed + self.rows_of_others

    @property
    def results(self) -> str:
        """Path of the directory with the results."""
        return f"{self.path}/parts"

    def as_dict(self) -> dict[str, Any]:
        """Return the content of report.json."""
        return {**asdict(self), "rows_left": self.rows_left}

    def lines(self) -> list[str]:
        """Return the lines at the end of a run."""
        lines = [self._outcome()]
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
            lines.append(f"{rows} given the answer of an equal row (dedupe: false sends all)")
        if self.rows_reused:
            lines.append(f"{counted(self.rows_reused, 'row')} given an answer of another run")
        if background := self.load.get("background"):
            lines.append(background_line(background))
        lines += self._engine_lines()
        lines += self._check_lines()
        truncated = self.finish_reasons.get("length", 0)
        if truncated > self.rows_cut:  # rows have several outputs
            lines.append(f"{counted(truncated, 'output')} truncated at max_new_tokens (finish_reason length)")
        if self.rows_thinking_cut:
            rows = counted(self.rows_thinking_cut, "row")
            lines.append(
                f"{rows} ok, but the thinking used all of max_thinking_tokens: raise it, "
                "or set on_length: longer"
            )
        lines += cause_lines(self.failures, "failed")
        if self.wall_s:
            run = shlex.quote(self.path)
            advice = "" if self.simulated else f", batchrun advise {run} judges its flags"
            lines.append(f"batchrun report {run} shows the run{advice}")
        lines.append(f"results: {self.results}")
        return lines

    def _outcome(self) -> str:
        """Return the first line: why the run ended, and how many rows are done, failed and left."""
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
        parts = [ok, f"{self.rows_failed:,} failed"]
        if self.rows_resumed:
            parts.append(f"{self.rows_resumed:,} were done before")
        if self.rows_left:
            hint = "" if says_next_step(self.reason) else f": {GO_ON}"
            if self.exit_code in {EXIT_DONE, EXIT_FAILED_ROWS}:
                hint = " to other workers"
            parts.append(f"{self.rows_left:,} left{hint}")
        return f"{self.reason}: {', '.join(parts)}"

    def _check_lines(self) -> list[str]:
        """Describe the rejected answers and their cost."""
        if not self.checks:
            return []
        checks, times = self.checks, counted(self.checks["asked_again"], "time")
        summary = (
            f"{counted(checks['rows_asked_again'], 'row')} asked again {times}: "
            f"{checks['rows_mended']:,} then had a good answer, {checks['rows_failed']:,} failed; "
            f"{checks['output_tokens']:,} of the output tokens were rejected"
        )
        return [summary, *cause_lines(checks["causes"], "answers rejected", "time")]

    def _tokens(self) -> str:
        """Describe the tokens: output tokens, or input tokens of a task without decoding, if reported."""
        if self.task == GENERATE:
            return f", {self.output_tokens_per_s:,.0f} output tokens/s ({self.output_tokens:,} in all)"
        if not self.prompt_tokens:
            return ""
        rate = self.prompt_tokens / max(self.wall_s, 0.001)
        return f", {rate:,.0f} input tokens/s ({self.prompt_tokens:,} in all)"

    def _engine_lines(self) -> list[str]:
        """Describe the engine's failures, and the arguments that changed after them."""
        failures = sum(incident["what"] in {"died", "hangs"} for incident in self.incidents)
        lines = [f"the engine died or hung {counted(failures, 'time')}"] if failures else []
        for incident in self.incidents:
            if incident["what"] == "healed":
                new = ", ".join(f"{name} {value}" for name, value in incident["new"].items())
                lines.append(f"{incident['who']} was restarted with {new}: {incident['why'][:150]}")
        return lines


def save_report(run_dir: RunDir, report: Mapping[str, Any]) -> None:
    """Write report.json here, then publish it, which may fail; raises StorageError."""
    write_json(run_dir.report_json, report)
    with writing(run_dir.report_json):
        run_dir.store.publish(run_dir.report_json)


def says_next_step(reason: str) -> bool:
    """Tell whether the reason of a run's end already names the next step, so that no hint is needed."""
    return any(step in reason for step in ("--fresh", "--retry-failed", "again"))


def cause_lines(groups: Sequence[Mapping[str, Any]], what: str, unit: str = "row") -> list[str]:
    """Return a line for each of the most frequent causes, with its count and an example.

    `groups` come from `Failures.summary`. Each line begins with `what`; `unit` names what is counted.
    """
    lines = [
        f"{what}: {counted(group['rows'], unit)}: {group['example']} (row {group['example_row']})"
        for group in groups[:CAUSES_SHOWN]
    ]
    if rest := groups[CAUSES_SHOWN:]:
        more = counted(sum(group["rows"] for group in rest), unit)
        lines.append(f"{what}: {more}: other reasons, {len(rest)} in all")
    return lines


def make_report(run_dir: RunDir, done: DoneRows, total: int, tally: RowCounts) -> Report:
    """Report the rows of earlier attempts (`done`) and of this one (`tally`); the caller adds the rest."""
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
    """Make the report of a whole run from its files; write report.json of a run with several workers.

    `wall_s` is the time during which at least one worker ran, without pauses between attempts. Raises
    OutputError where the path holds no run, ResumeError where a part is damaged, StorageError.
    """
    run_dir = look_at_run(run)
    facts = require_run_json(run_dir)
    tasks = run_dir.all_tasks()
    spans = [span for task in tasks for span in attempt_spans(task.events)]
    wall_s = union_s(spans)
    done = done_by_all(run_dir)
    counts = replace(done.counts, ok=len(done.answered))  # a row in two parts counts once
    report = make_report(run_dir, DoneRows(), facts["rows_total"], counts)
    limit = facts["job"].get("limits", {}).get("max_failed_rows", LimitsSpec().max_failed_rows)
    end = RunEnd(
        rows_total=report.rows_total,
        rows_failed=report.rows_failed,
        max_failed_rows=limit,
        rows_left=report.rows_left,
        stop=RunVerdict(EXIT_STOPPED, "not finished"),
    )
    exit_code, reason = verdict_of(end)
    report = replace(
        report,
        exit_code=exit_code, reason=reason,
        wall_s=round(wall_s, 3), wall_s_all_starts=round(wall_s, 3),
        starts=len(spans),
        output_tokens_per_s=round(report.output_tokens / wall_s, 1) if wall_s else 0.0,
        rows_per_s=round(len(done.rows) / wall_s, 2) if wall_s else 0.0,
        task=facts["job"].get("task", GENERATE),
        engine=facts["engine"], simulated=bool(facts["engine"].get("simulated")), versions=facts["versions"],
    )  # fmt: skip
    if any(task.task != MAIN_TASK for task in tasks):
        save_report(run_dir, report.as_dict())
    return report


def versions(info: EngineInfo) -> dict[str, str | None]:
    """Return the versions of the software that made a result."""
    return {
        "python": platform.python_version(),
        "engine": info.version,
        **{name: installed_version(name) for name in ("batchrunner", "pyarrow", "aiohttp")},
    }
