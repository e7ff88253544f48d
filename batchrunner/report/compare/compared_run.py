"""One run of a comparison: what it was, by run.json and its logs, and what it did."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from batchrunner.advise.from_run import read_run
from batchrunner.advise.situation import Situation
from batchrunner.core.errors import InputError
from batchrunner.engines.logs.thresholds import Thresholds
from batchrunner.output.events import read_events
from batchrunner.output.opened import look_at_run
from batchrunner.output.run_json import may_be_secret, require_run_json
from batchrunner.report.compare.steady_rates import SteadyRates, steady_rates
from batchrunner.report.html.results import RunResults, read_results
from batchrunner.report.html.task_history import TaskHistory, history_of
from batchrunner.report.html.timeline import Timeline, make_timeline

_OWN_TO_A_RUN = {"output.path", "engine.urls", "engine.url"}
"""Fields of a job that differ between any two runs, or name the server only."""
_NO_FLAGS = {
    *("host", "port", "nccl_port", "dist_init_addr", "random_seed", "model_path", "tokenizer_path"),
    *("served_model_name", "log_level", "log_level_http", "grpc_port"),
    *("model_config", "disaggregation_bootstrap_port"),
}
"""Arguments in a server's log that no speed depends on, or that tell what others tell."""
_ENGINE_FACTS = (
    "model",
    "version",
    "card",
    "gpus",
    "max_running",
    "max_total_tokens",
    "context_length",
    "prefill_tokens",
)
_VERSIONS = ("batchrunner", "python")


@dataclass(frozen=True, slots=True)
class ComparedRun:
    """A run as the comparison reads it."""

    path: str
    facts: Mapping[str, Any]
    """Content of run.json."""
    setup: dict[str, Any]
    """What it ran with, by names such as `job.window`, `flag.tp_size`, `engine.card` and `version.python`."""
    figures: dict[str, float | None]
    """What it did, by the names in FIGURES; None where that is not known."""
    steady: SteadyRates
    is_simulated: bool
    starts: int


def read_compared(path: str) -> ComparedRun:
    """Read a run, which may be at work, over or killed.

    Raises OutputError where the path holds no run, InputError where the run has no samples of its load,
    ResumeError where a part is damaged.
    """
    run_dir = look_at_run(path)
    facts = require_run_json(run_dir)
    tasks = [*{task.log_directory: task for task in (run_dir, *run_dir.all_tasks())}.values()]
    histories = [
        found for task in tasks if (found := history_of(task.task, read_events(task.events))).attempts
    ]
    if not any(attempt.cells for found in histories for attempt in found.attempts):
        raise InputError(
            f"{path}: no event log has a sample of this run's load",
            hint="compare runs that have sent rows and still have their events.jsonl",
        )
    situation = read_run(run_dir, Thresholds())
    results, timeline = read_results(tasks), make_timeline(histories)
    figures = _figures(facts, results, timeline, histories, situation)
    return ComparedRun(
        path=path,
        facts=facts,
        setup=_setup(facts, situation),
        figures=figures,
        steady=steady_rates([task.events for task in tasks], figures["latency_p50_s"] or 0.0),
        is_simulated=bool(facts["engine"].get("simulated")),
        starts=sum(len(found.attempts) for found in histories),
    )


def _setup(facts: Mapping[str, Any], situation: Situation) -> dict[str, Any]:
    engine, server = facts["engine"], situation.facts
    found = {f"job.{name}": value for name, value in _flat(facts["job"]) if name not in _OWN_TO_A_RUN}
    flags = {name: value for name, value in server.arguments.items() if name not in _NO_FLAGS}
    found |= {f"flag.{name}": value for name, value in _flat(flags) if not may_be_secret(name)}
    found |= {f"engine.{name}": engine.get(name) for name in _ENGINE_FACTS}
    found["engine.card"] = engine.get("card") or server.card
    return found | {f"version.{name}": facts["versions"].get(name) for name in _VERSIONS}


def _flat(part: Mapping[str, Any], above: str = "") -> list[tuple[str, Any]]:
    """Return the values of a nested mapping by dotted names."""
    found: list[tuple[str, Any]] = []
    for name, value in part.items():
        found += (
            _flat(value, f"{above}{name}.") if isinstance(value, dict) and value else [(above + name, value)]
        )
    return found


def _figures(
    facts: Mapping[str, Any],
    results: RunResults,
    timeline: Timeline,
    histories: list[TaskHistory],
    situation: Situation,
) -> dict[str, float | None]:
    counts, load, length_s = results.counts, situation.load, timeline.axis.length_s
    latency = next((found for found in results.histograms if found.title == "Latency"), None)
    happened = Counter(incident.what for found in histories for incident in found.incidents)

    def rate(count: int) -> float | None:
        return count / length_s if length_s else None

    sampled = load.counted > 0
    return {
        "rows_total": facts["rows_total"],
        "rows_ok": counts.ok,
        "rows_failed": counts.failed,
        "rows_cut": counts.cut,
        "working_s": length_s,
        "rows_per_s": rate(counts.done),
        "output_tokens_per_s": rate(counts.output_tokens),
        "prompt_tokens_per_s": rate(counts.prompt_tokens),
        "output_tokens": counts.output_tokens,
        "prompt_tokens": counts.prompt_tokens,
        "cached_share": counts.cached_tokens / counts.prompt_tokens if counts.prompt_tokens else None,
        "retractions": timeline.retractions,
        "retries": counts.retries,
        "engine_failures": happened["died"] + happened["hangs"],
        "median_running": load.median("running") if sampled else None,
        "median_queue": load.median("queue") if sampled else None,
        "empty_queue_share": load.share("empty") if sampled else None,
        "median_token_usage": load.median("usage") if sampled else None,
        "latency_p50_s": latency.p50 if latency else None,
        "latency_p90_s": latency.p90 if latency else None,
        "latency_p99_s": latency.p99 if latency else None,
    }
