"""Tally → report: the sums over this start and those before it, and the verdict with its exit code."""

from __future__ import annotations

import platform
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from batchrunner.checkpoint import read_run_json
from batchrunner.events import earlier_wall_s
from batchrunner.report import EXIT_DONE, EXIT_FAILED_ROWS, Report, tolerated
from batchrunner.shard import Joint
from batchrunner.tally import Tally

if TYPE_CHECKING:
    from batchrunner.begin import Start
    from batchrunner.checkpoint import Done
    from batchrunner.job import Job
    from batchrunner.prepare import Prepared
    from batchrunner.records import EngineInfo


def make_report(prepared: Prepared, done: Done, total: int, tally: Tally) -> Report:
    """Sum up the rows; what ended the run, its times and its engine are still to be filled in."""
    failures = done.failures.merged(tally.failures)
    return Report(
        path=str(prepared.run_dir.path),
        exit_code=EXIT_DONE,
        reason="",
        rows_total=total,
        rows_ok=len(done.rows) - done.failed + tally.ok,
        rows_failed=done.failed + tally.failed,
        rows_resumed=len(done.rows),
        wall_s=0.0,
        wall_s_all_starts=0.0,
        starts=1,
        output_tokens=tally.output_tokens,
        output_tokens_all_starts=done.output_tokens + tally.output_tokens,
        output_tokens_per_s=0.0,
        rows_per_s=0.0,
        prompt_tokens=tally.prompt_tokens,
        cached_tokens=tally.cached_tokens,
        retries=tally.retries,
        finish_reasons=dict(tally.finish_reasons),
        failures=failures.summary(),
    )


def verdict_of_done(report: Report, job: Job) -> tuple[int, str]:
    """Return exit code and reason of a run without rows left."""
    if report.rows_failed > tolerated(job.limits.max_failed_rows, report.rows_total):
        return EXIT_FAILED_ROWS, "done, but more rows failed than limits.max_failed_rows tolerates"
    return EXIT_DONE, "done"


def finished_before(prepared: Prepared, start: Start) -> Report:
    """Make the report of a start that found nothing to do."""
    report = make_report(prepared, start.done, start.source.total, Tally())
    exit_code, reason = verdict_of_done(report, prepared.job)
    if report.rows_left:
        reason = "nothing is free: other tasks do the rest"
    starts, wall_s = earlier_wall_s(prepared.run_dir.events)
    old = read_run_json(prepared.run_dir) or {}
    engine = old.get("engine", {})
    report = replace(
        report, exit_code=exit_code, reason=reason, starts=starts, wall_s_all_starts=round(wall_s, 3),
        engine=engine, simulated=bool(engine.get("simulated")), versions=old.get("versions", {}),
    )  # fmt: skip
    has_none = not prepared.run_dir.report_json.exists()  # that of the last start says more than these zeros
    if has_none and not isinstance(prepared.part, Joint):
        report.save(prepared.run_dir.report_json)
    return report


def versions(info: EngineInfo) -> dict[str, str | None]:
    """Return what a result was made with."""
    found: dict[str, str | None] = {"python": platform.python_version(), "engine": info.version}
    for name in ("batchrunner", "pyarrow", "aiohttp"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:  # run from a source tree
            found[name] = None
    return found
