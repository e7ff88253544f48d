"""What a run in this or another process is at: read from its files only."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from batchrunner.checkpoint import read_done, read_run_json
from batchrunner.claim import Claim
from batchrunner.errors import OutputError
from batchrunner.events import last_sample
from batchrunner.progress import load_line
from batchrunner.report import duration
from batchrunner.storage import RunDir

if TYPE_CHECKING:
    from pathlib import Path


def status(run: str | Path) -> dict[str, Any]:
    """Return the state of a run; raises OutputError where the path holds none."""
    run_dir = RunDir(run)
    facts = read_run_json(run_dir)
    if facts is None:
        raise OutputError(f"{run}: not a run's output path (no run.json)")
    done = read_done(run_dir)
    sample = last_sample(run_dir.events)
    claim = Claim(run_dir.task_directory)
    holder = None if claim.is_held() is False else str(claim.holder())
    return {
        "path": str(run_dir.path),
        "running": holder,
        "model": facts["engine"]["model"],
        "simulated": facts["engine"]["simulated"],
        "rows_total": facts["rows_total"],
        "rows_on_disk": len(done.rows),
        "rows_failed": done.failed,
        "output_tokens": done.output_tokens,
        "last_sample": sample if holder else None,
        "finished": not holder and len(done.rows) >= facts["rows_total"],
    }


def status_lines(state: dict[str, Any]) -> list[str]:
    """Return a state as a person reads it."""
    total, on_disk = state["rows_total"], state["rows_on_disk"]
    share = on_disk / total if total else 1.0
    simulated = " [simulated]" if state["simulated"] else ""
    lines = [
        f"{state['path']}: {state['model']}{simulated}",
        (
            f"{on_disk} of {total} rows on disk ({share:.1%}), {state['rows_failed']} failed, "
            f"{state['output_tokens']:,} output tokens"
        ),
    ]
    sample = state["last_sample"]
    if state["running"]:
        lines.append(f"running: {state['running']}")
        if sample:
            lines.append(_sample_line(sample))
    else:
        lines.append("finished" if state["finished"] else "not running: run the same command again to go on")
    return lines


def _sample_line(sample: dict[str, Any]) -> str:
    signals = sample["signals"]
    load = load_line(
        [(s["scheduler"], s["running"], s["queue"], s["token_usage"]) for s in signals],
        sample["bands"],
        sample["retractions"],
    )
    rate, left = sample["rows_per_s"], sample["rows_total"] - sample["rows_done"]
    return (
        f"{max(0.0, time.time() - sample['time']):.0f} s ago: {sample['rows_done']} rows ended, "
        f"{rate:.1f} rows/s, "
        f"{sample['output_tokens_per_s']:,.0f} output tok/s, {load}, "
        f"{sample['in_flight']}/{sample['window']} in flight, "
        f"{duration(left / rate) if rate else '?'} left"
    )
