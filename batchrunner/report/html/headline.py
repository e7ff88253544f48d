"""The top of a run's page: its state and its main figures."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from batchrunner.job.spec import LimitsSpec
from batchrunner.output.events import last_sample
from batchrunner.output.run_dir import MAIN_TASK, RunDir
from batchrunner.output.task_holder import holder_of
from batchrunner.report.html.results import RunResults
from batchrunner.report.html.task_history import TaskHistory
from batchrunner.report.html.timeline import Timeline
from batchrunner.report.report import tolerated


def make_headline(
    run_dir: RunDir,
    facts: Mapping[str, Any],
    results: RunResults,
    timeline: Timeline,
    histories: Sequence[TaskHistory],
) -> dict[str, Any]:
    """Return the state and the main figures of a run, or of one of its tasks, for the template.

    `facts` is the content of run.json; `state_kind` is the style of the state: good, warn, bad or live.
    """
    total = facts["rows_total"] if run_dir.task == MAIN_TASK else histories[0].rows_total if histories else 0
    counts = results.counts
    left = max(0, total - counts.done)
    most_failed = facts["job"].get("limits", {}).get("max_failed_rows", LimitsSpec().max_failed_rows)
    kind, state, reason = _state(
        run_dir, histories, left, too_many=counts.failed > tolerated(most_failed, total)
    )
    working_s = timeline.axis.length_s
    attempts = sum(len(history.attempts) for history in histories)
    whose = "" if run_dir.task == MAIN_TASK else f", task {run_dir.task}"
    engine = facts["engine"]
    return {
        "name": run_dir.path.absolute().name + whose,
        "path": str(run_dir.path.absolute()),
        "model": engine["model"] if engine["model"] != engine["kind"] else "",
        "engine": engine["kind"] + (f", SGLang {engine['version']}" if engine.get("version") else ""),
        "simulated": bool(engine.get("simulated")),
        "several": len(histories) > 1,
        "state": state,
        "state_kind": kind,
        "reason": reason,
        "rows_total": total,
        "rows_left": left,
        "working_s": working_s,
        "how_often": _how_often(attempts, len(histories)),
        "output_tokens_per_s": counts.output_tokens / working_s if working_s else 0.0,
        "prompt_tokens_per_s": counts.prompt_tokens / working_s if working_s else 0.0,
        "cached_share": counts.cached_tokens / counts.prompt_tokens if counts.prompt_tokens else None,
        "done_share": (total - left) / total if total else 1.0,
        "ok_percent": 100 * counts.ok / total if total else 100.0,
        "failed_percent": 100 * counts.failed / total if total else 0.0,
        "written": time.time(),
    }


def _how_often(attempts: int, tasks: int) -> str:
    text = "1 attempt" if attempts == 1 else f"{attempts} attempts"
    return f"{text} of {tasks} tasks" if tasks > 1 else text


def _state(
    run_dir: RunDir, histories: Sequence[TaskHistory], left: int, *, too_many: bool
) -> tuple[str, str, str]:
    """Return the state: its style, a word for it, and a sentence."""
    tasks = [RunDir(run_dir.path, history.task) for history in histories]
    holders = [who for task in tasks if (who := holder_of(task, last_sample(task.events)))]
    if holders:
        who = holders[0] if len(histories) == 1 else f"{len(holders)} of {len(histories)} tasks"
        return "live", "running", f"Running: {who}. The page shows what was on disk when it was written."
    if left:
        newest = (history.attempts[-1] for history in histories)
        last = max(newest, key=lambda attempt: attempt.ended, default=None)
        why = (last and last.reason) or "its log has no end: it was killed, or its machine failed"
        return "warn", "not finished", f"{why[0].upper()}{why[1:]}. Run the same command again to go on."
    if too_many:
        return "bad", "done, with failed rows", "More rows failed than limits.max_failed_rows tolerates."
    return "good", "done", "All rows have a result."
