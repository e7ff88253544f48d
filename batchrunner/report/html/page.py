"""The page of a run, report.html: one file without external resources."""

import base64
import functools
import hashlib
import logging
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jinja2
import yaml
from markupsafe import Markup

from batchrunner.core.console import background_line, counted, duration, escaped
from batchrunner.core.files import read_json
from batchrunner.job.spec import LimitsSpec
from batchrunner.output.events import attempt_spans, last_sample, read_events, union_s
from batchrunner.output.files import whole_file, writing
from batchrunner.output.liveness import holders_of
from batchrunner.output.run_dir import RunDir
from batchrunner.output.run_json import require_run_json
from batchrunner.report.html.charts import load_charts, number
from batchrunner.report.html.history import Timeline, WorkerHistory, cell_width, history_of, make_timeline
from batchrunner.report.html.results import RunResults, read_results
from batchrunner.report.report import GO_ON, says_next_step
from batchrunner.report.verdict import tolerated
from batchrunner.tuning.advise import advise_run
from batchrunner.tuning.signals import Corner

log = logging.getLogger(__name__)

_HERE = Path(__file__).parent


def write_page(run_dir: RunDir) -> Path:
    """Write the page of a run, of all its workers, beside its report.json; return its path.

    Raises OutputError where there is no run, ResumeError where a part is damaged, StorageError where the
    page cannot be written.
    """
    path, text = run_dir.report_html, make_page(run_dir)
    with writing(path):
        with whole_file(path, run_dir.task) as temporary:
            temporary.write_text(text, encoding="utf-8", errors="replace")  # file names may have surrogates
        run_dir.store.publish(path)
    return path


def make_page(run_dir: RunDir) -> str:
    """Return the text of the page; see `write_page`."""
    facts = require_run_json(run_dir)
    tasks = _tasks(run_dir)
    results = read_results(tasks)
    spans = {task: task_spans for task in tasks if (task_spans := attempt_spans(task.events))}
    length_s = union_s(span for task_spans in spans.values() for span in task_spans)
    width_s = cell_width(length_s, len(spans))
    histories = [history_of(task.task, read_events(task.events), width_s) for task in spans]
    timeline = make_timeline(histories)
    return _template().render(
        p=_headline(run_dir, facts, results=results, timeline=timeline, histories=histories),
        r=results,
        judged=advise_run(run_dir.path),
        decisions=[*_decisions(histories, timeline, facts), *_load(run_dir)],
        flags=_flags(facts),
        job=yaml.safe_dump(facts["job"], sort_keys=False, allow_unicode=True),
        **_over_time(timeline, histories),
        starts=sorted(
            ((history.task, attempt) for history in histories for attempt in history.attempts),
            key=lambda start: start[1].began,
        ),
        **_style_and_script(),
    )


def _headline(
    run_dir: RunDir,
    facts: Mapping[str, Any],
    *,
    results: RunResults,
    timeline: Timeline,
    histories: Sequence[WorkerHistory],
) -> dict[str, Any]:
    """Return the state and the main figures of a run for the template.

    `facts` is the content of run.json; `state_kind` is the style of the state: good, warn, bad or live.
    """
    total = facts["rows_total"]
    counts = results.counts
    remaining = max(0, total - counts.done)
    most_failed = facts["job"].get("limits", {}).get("max_failed_rows", LimitsSpec().max_failed_rows)
    kind, state, reason = _state(
        run_dir, histories, remaining, too_many=counts.failed > tolerated(most_failed, total)
    )
    working_s = timeline.axis.length_s
    workers, attempts = len(histories), sum(len(history.attempts) for history in histories)
    engine = facts["engine"]
    path = run_dir.store.uri or str(run_dir.path.absolute())
    return {
        "name": path.rpartition("/")[2],
        "path": path,
        "model": engine["model"] if engine["model"] != engine["kind"] else "",
        "engine": engine["kind"] + (f", SGLang {engine['version']}" if engine.get("version") else ""),
        "simulated": bool(engine.get("simulated")),
        "several": workers > 1,
        "state": state,
        "state_kind": kind,
        "reason": reason,
        "rows_total": total,
        "rows_left": remaining,
        "working_s": working_s,
        "how_often": counted(attempts, "attempt") + (f" of {workers} workers" if workers > 1 else ""),
        "output_tokens_per_s": counts.output_tokens / working_s if working_s else 0.0,
        "prompt_tokens_per_s": counts.prompt_tokens / working_s if working_s else 0.0,
        "cached_share": counts.cached_tokens / counts.prompt_tokens if counts.prompt_tokens else None,
        "done_share": (total - remaining) / total if total else 1.0,
        "ok_percent": 100 * counts.ok / total if total else 100.0,
        "failed_percent": 100 * counts.failed / total if total else 0.0,
        "written": time.time(),
    }


def _state(
    run_dir: RunDir, histories: Sequence[WorkerHistory], remaining: int, *, too_many: bool
) -> tuple[str, str, str]:
    """Return the style of a run's state, a word for the state, and a sentence about it."""
    tasks = [run_dir.of_task(history.task) for history in histories]
    holders = list(filter(None, holders_of([(task, last_sample(task.events)) for task in tasks])))
    if holders:
        running = holders[0] if len(histories) == 1 else f"{len(holders)} of {len(histories)} workers"
        return "live", "running", f"Running: {running}. The page shows what was on disk when it was written."
    if remaining:
        last_attempts = (history.attempts[-1] for history in histories)
        last = max(last_attempts, key=lambda attempt: attempt.ended, default=None)
        why = (last and last.reason) or "its log has no end: it was killed, or its machine failed"
        step = "" if says_next_step(why) else f" {GO_ON[0].upper()}{GO_ON[1:]} to go on."
        return "warn", "not finished", f"{why[0].upper()}{why[1:]}.{step}"
    if too_many:
        return "bad", "done, with failed rows", "More rows failed than limits.max_failed_rows tolerates."
    return "good", "done", "All rows have a result."


def _over_time(timeline: Timeline, histories: Sequence[WorkerHistory]) -> dict[str, Any]:
    incidents = sorted(incident for history in histories for incident in history.incidents)
    charts = load_charts(timeline, histories, incidents) if timeline.places else []
    return {
        "charts": charts,
        "retractions": timeline.retractions,
        "incidents": [(timeline.axis.place(incident.time), incident) for incident in incidents],
        "readout": {
            "places": [round(place, 2) for place in timeline.places],
            "length_s": timeline.axis.length_s or 1.0,
            "charts": {chart.key: [stroke.values for stroke in chart.strokes] for chart in charts},
        },
    }


def _style_and_script() -> dict[str, Any]:
    """Return the style and the script of a page, and the hash without which the browser runs no script."""
    script = _read("page.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return {
        "style": Markup(_read("page.css")),  # noqa: S704 - our own file
        "script": Markup(script),  # noqa: S704
        "script_hash": f"sha256-{digest}",
    }


def _tasks(run_dir: RunDir) -> list[RunDir]:
    """Return all workers of a run, among them the one of `run_dir`, each once."""
    return [*{task.log_directory: task for task in (run_dir, *run_dir.all_tasks())}.values()]


def _decisions(
    histories: Sequence[WorkerHistory], timeline: Timeline, facts: Mapping[str, Any]
) -> list[tuple[str, str]]:
    """Return the runner's decisions, each as a name and a text. Of several workers the last one counts."""
    decisions = []
    if order := next((history.order for history in reversed(histories) if history.order), None):
        decisions.append(("Order of the rows", f"{order.get('order')}: {order.get('why')}"))
    if tokenize := next((history.tokenize for history in reversed(histories) if history.tokenize), None):
        why = f": {tokenize['why']}" if tokenize.get("why") else ""
        decisions.append(("Prompts tokenized by", f"the {tokenize.get('where')}{why}"))
    fixed_window = facts["job"].get("window", "auto")
    windows = [value for value in timeline.total("window") or () if value]
    if fixed_window != "auto":
        decisions.append(("Window", f"{fixed_window}, set by the job"))
    elif windows:
        decisions.append(("Window", f"{min(windows):,.0f} to {max(windows):,.0f}"))
    return decisions


def _load(run_dir: RunDir) -> list[tuple[str, str]]:
    """Return queue, token usage, shared prefixes, bundles and checks of report.json as pairs of texts."""
    report = read_json(run_dir.report_json)
    load, sharing = report.get("load") or {}, report.get("sharing") or {}
    facts = []
    if load.get("in_band_share") is not None:
        in_band, empty = load["in_band_share"], load["empty_queue_share"]
        facts.append(("Queue", f"{in_band:.0%} of the steady time in its band, {empty:.0%} empty"))
    corner_shares = (load.get("corner_shares") or {}).items()
    shares = [
        f"{share:.0%} {Corner(name).words}" for name, share in corner_shares if share and name in set(Corner)
    ]
    if shares:
        facts.append(("Token usage", ", ".join(shares)))
    if background := load.get("background"):
        facts.append(("Background", background_line(background)))
    if sharing.get("expected_tokens"):
        hit_rate = sharing["found_tokens"] / sharing["expected_tokens"]
        text = f"{hit_rate:.0%} of what rows share with earlier rows was in the cache"
        facts.append(("Shared prefixes", text))
    if (bundles := report.get("bundles") or {}).get("bundles"):
        text = f"{bundles['rows_per_request']:.1f} rows each on average, {bundles['most_rows']} at most"
        facts.append(("Requests", text))
    if checks := report.get("checks"):
        repeats = f"{checks['rows_asked_again']:,} rows asked again {checks['asked_again']:,} times"
        cost = f"{checks['output_tokens']:,} output tokens rejected"
        facts.append(("Checks", f"{repeats}, {checks['rows_failed']:,} failed; {cost}"))
    return facts


def _flags(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the engine's limits and the versions of the software as pairs of texts."""
    info = facts["engine"]
    limits = ("max_running", "max_total_tokens", "context_length", "prefill_tokens", "card", "log")
    pairs = [(name.replace("_", " "), str(info[name])) for name in limits if info.get(name) is not None]
    versions = facts["versions"].items()
    pairs += [(f"{software} version", str(version)) for software, version in versions if version]
    return pairs


@functools.cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_HERE), autoescape=True, undefined=jinja2.StrictUndefined,
        trim_blocks=True, lstrip_blocks=True, finalize=_visible,
    )  # fmt: skip
    environment.filters |= {
        "duration": duration, "moment": _moment, "number": number, "percent": _percent,
    }  # fmt: skip
    return environment.get_template("page.html")


def _visible(value: object) -> object:
    """Escape characters in a text that HTML lacks, or that would reverse the text around them."""
    if isinstance(value, Markup) or not isinstance(value, str):
        return value
    return "\n".join(map(escaped, value.split("\n")))


def _moment(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M}"


def _percent(share: float) -> str:
    return f"{share:.1%}" if 0 < share < 0.1 else f"{share:.0%}"  # noqa: PLR2004


def _read(name: str) -> str:
    return (_HERE / name).read_text(encoding="utf-8")
