"""Make a report from row counts: sums over this attempt and earlier ones, and the exit code."""

import platform
from dataclasses import replace
from pathlib import Path

from batchrunner.core.console import installed_version
from batchrunner.core.engine_info import EngineInfo
from batchrunner.core.errors import EXIT_DONE, EXIT_FAILED_ROWS, EXIT_STOPPED
from batchrunner.job.spec import LimitsSpec
from batchrunner.job.tasks import GENERATE
from batchrunner.output.counts import RowCounts
from batchrunner.output.events import attempt_spans, attempts_in, union_s
from batchrunner.output.opened import look_at_run
from batchrunner.output.resume import DoneRows, done_by_all
from batchrunner.output.run_dir import MAIN_TASK, RunDir
from batchrunner.output.run_json import require_run_json
from batchrunner.report.report import Report, tolerated


def make_report(run_dir: RunDir, done: DoneRows, total: int, tally: RowCounts) -> Report:
    """Sum up the rows of earlier attempts, `done`, and of this one, `tally`; the caller fills in the rest."""
    earlier = done.counts
    return Report(
        path=run_dir.name,
        rows_total=total,
        rows_ok=done.ok + tally.ok,
        rows_failed=earlier.failed + tally.failed,
        rows_cut=earlier.cut + tally.cut,
        rows_resumed=len(done.rows),
        output_tokens=tally.output_tokens,
        output_tokens_all_starts=earlier.output_tokens + tally.output_tokens,
        prompt_tokens=tally.prompt_tokens,
        cached_tokens=tally.cached_tokens,
        rows_deduplicated=earlier.duplicates + tally.duplicates,
        rows_left_out=earlier.left_out + tally.left_out,
        retries=tally.retries,
        finish_reasons=dict(tally.finish_reasons),
        failures=(earlier.failures + tally.failures).summary(),
        checks=(earlier.checks + tally.checks).as_dict(),
    )


def verdict_of_done(report: Report, max_failed_rows: float) -> tuple[int, str]:
    """Return the exit code and the reason of a run without rows left."""
    if report.rows_failed > tolerated(max_failed_rows, report.rows_total):
        return EXIT_FAILED_ROWS, "done, but more rows failed than limits.max_failed_rows tolerates"
    return EXIT_DONE, "done"


def report_of_all(run: str | Path | RunDir) -> Report:
    """Make the report of a whole run from its files; for a run of several tasks, write it as report.json.

    Its time is that in which a task was at work, without the pauses between attempts. Raises OutputError
    where the path holds no run, ResumeError where a part is damaged, StorageError.
    """
    run_dir = look_at_run(run)
    facts = require_run_json(run_dir)
    tasks = run_dir.all_tasks()
    wall_s = union_s(span for task in tasks for span in attempt_spans(task.events))
    done = done_by_all(run_dir)
    report = make_report(run_dir, done, facts["rows_total"], RowCounts())
    limit = facts["job"].get("limits", {}).get("max_failed_rows", LimitsSpec().max_failed_rows)
    exit_code, reason = verdict_of_done(report, limit)
    if report.rows_left:
        exit_code, reason = EXIT_STOPPED, "not finished"
    report = replace(
        report,
        exit_code=exit_code, reason=reason, rows_resumed=0,
        wall_s=round(wall_s, 3), wall_s_all_starts=round(wall_s, 3),
        starts=sum(attempts_in(task.events)[0] for task in tasks),
        prompt_tokens=done.counts.prompt_tokens, cached_tokens=done.counts.cached_tokens,
        retries=done.counts.retries, finish_reasons=dict(done.counts.finish_reasons),
        output_tokens=report.output_tokens_all_starts,
        output_tokens_per_s=round(report.output_tokens_all_starts / wall_s, 1) if wall_s else 0.0,
        rows_per_s=round(report.rows_resumed / wall_s, 2) if wall_s else 0.0,
        task=facts["job"].get("task", GENERATE),
        engine=facts["engine"], simulated=bool(facts["engine"].get("simulated")), versions=facts["versions"],
    )  # fmt: skip
    if any(task.task != MAIN_TASK for task in tasks):
        report.save(run_dir)
    return report


def versions(info: EngineInfo) -> dict[str, str | None]:
    """Return the versions that a result was made with."""
    found: dict[str, str | None] = {"python": platform.python_version(), "engine": info.version}
    for name in ("batchrunner", "pyarrow", "aiohttp"):
        found[name] = installed_version(name)
    return found
