"""Write report.html: one file that shows a run, without outside resources."""

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
from batchrunner.report.html.history import TaskHistory, Timeline, cell_width, history_of, make_timeline
from batchrunner.report.html.results import RunResults, read_results
from batchrunner.report.report import GO_ON, says_next_step, tolerated
from batchrunner.tuning.advise import advise_run
from batchrunner.tuning.signals import Corner

log = logging.getLogger(__name__)

_HERE = Path(__file__).parent


def write_page(run_dir: RunDir) -> Path:
    """Write the page of a run, of all its tasks, beside its report.json; return its path.

    Raises OutputError where there is no run, ResumeError where a part is damaged, StorageError where the
    page cannot be written.
    """
    path, text = run_dir.report_html, make_page(run_dir)
    with writing(path):
        with whole_file(path, run_dir.task) as temporary:
            temporary.write_text(text, encoding="utf-8", errors="replace")  # surrogates in file names
        run_dir.store.publish(path)
    return path


def make_page(run_dir: RunDir) -> str:
    """Return the text of the page; see `write_page`."""
    facts = require_run_json(run_dir)
    tasks = _tasks(run_dir)
    results = read_results(tasks)
    spans = {task: found for task in tasks if (found := attempt_spans(task.events))}
    width_s = cell_width(union_s(span for found in spans.values() for span in found), len(spans))
    histories = [history_of(task.task, read_events(task.events), width_s) for task in spans]
    timeline = make_timeline(histories)
    return _template().render(
        p=_headline(run_dir, facts, results, timeline, histories),
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
        **_own(),
    )


def _headline(
    run_dir: RunDir,
    facts: Mapping[str, Any],
    results: RunResults,
    timeline: Timeline,
    histories: Sequence[TaskHistory],
) -> dict[str, Any]:
    """Return the state and the main figures of a run for the template.

    `facts` is the content of run.json; `state_kind` is the style of the state: good, warn, bad or live.
    """
    total = facts["rows_total"]
    counts = results.counts
    left = max(0, total - counts.done)
    most_failed = facts["job"].get("limits", {}).get("max_failed_rows", LimitsSpec().max_failed_rows)
    kind, state, reason = _state(
        run_dir, histories, left, too_many=counts.failed > tolerated(most_failed, total)
    )
    working_s = timeline.axis.length_s
    tasks, attempts = len(histories), sum(len(history.attempts) for history in histories)
    engine = facts["engine"]
    path = run_dir.store.uri or str(run_dir.path.absolute())
    return {
        "name": path.rpartition("/")[2],
        "path": path,
        "model": engine["model"] if engine["model"] != engine["kind"] else "",
        "engine": engine["kind"] + (f", SGLang {engine['version']}" if engine.get("version") else ""),
        "simulated": bool(engine.get("simulated")),
        "several": tasks > 1,
        "state": state,
        "state_kind": kind,
        "reason": reason,
        "rows_total": total,
        "rows_left": left,
        "working_s": working_s,
        "how_often": counted(attempts, "attempt") + (f" of {tasks} tasks" if tasks > 1 else ""),
        "output_tokens_per_s": counts.output_tokens / working_s if working_s else 0.0,
        "prompt_tokens_per_s": counts.prompt_tokens / working_s if working_s else 0.0,
        "cached_share": counts.cached_tokens / counts.prompt_tokens if counts.prompt_tokens else None,
        "done_share": (total - left) / total if total else 1.0,
        "ok_percent": 100 * counts.ok / total if total else 100.0,
        "failed_percent": 100 * counts.failed / total if total else 0.0,
        "written": time.time(),
    }


def _state(
    run_dir: RunDir, histories: Sequence[TaskHistory], left: int, *, too_many: bool
) -> tuple[str, str, str]:
    """Return the state: its style, a word for it, and a sentence."""
    tasks = [run_dir.of_task(history.task) for history in histories]
    holders = list(filter(None, holders_of([(task, last_sample(task.events)) for task in tasks])))
    if holders:
        who = holders[0] if len(histories) == 1 else f"{len(holders)} of {len(histories)} tasks"
        return "live", "running", f"Running: {who}. The page shows what was on disk when it was written."
    if left:
        newest = (history.attempts[-1] for history in histories)
        last = max(newest, key=lambda attempt: attempt.ended, default=None)
        why = (last and last.reason) or "its log has no end: it was killed, or its machine failed"
        step = "" if says_next_step(why) else f" {GO_ON[0].upper()}{GO_ON[1:]} to go on."
        return "warn", "not finished", f"{why[0].upper()}{why[1:]}.{step}"
    if too_many:
        return "bad", "done, with failed rows", "More rows failed than limits.max_failed_rows tolerates."
    return "good", "done", "All rows have a result."


def _over_time(timeline: Timeline, histories: Sequence[TaskHistory]) -> dict[str, Any]:
    happened = sorted(incident for history in histories for incident in history.incidents)
    charts = load_charts(timeline, histories, happened) if timeline.places else []
    return {
        "charts": charts,
        "retractions": timeline.retractions,
        "happened": [(timeline.axis.place(incident.time), incident) for incident in happened],
        "readout": {
            "places": [round(place, 2) for place in timeline.places],
            "length_s": timeline.axis.length_s or 1.0,
            "charts": {chart.key: [stroke.values for stroke in chart.strokes] for chart in charts},
        },
    }


def _own() -> dict[str, Any]:
    """Return the style and the script of every page; the browser runs no other script."""
    script = _read("page.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return {
        "style": Markup(_read("page.css")),  # noqa: S704 - our own file
        "script": Markup(script),  # noqa: S704
        "script_hash": f"sha256-{digest}",
    }


def _tasks(run_dir: RunDir) -> list[RunDir]:
    """Return the tasks of a run, each once."""
    return [*{task.log_directory: task for task in (run_dir, *run_dir.all_tasks())}.values()]


def _decisions(
    histories: Sequence[TaskHistory], timeline: Timeline, facts: Mapping[str, Any]
) -> list[tuple[str, str]]:
    """Return the runner's decisions in short; of several tasks, those of the last that decided."""
    found = []
    if order := next((history.order for history in reversed(histories) if history.order), None):
        found.append(("Order of the rows", f"{order.get('order')}: {order.get('why')}"))
    if tokens := next((history.tokenize for history in reversed(histories) if history.tokenize), None):
        why = f": {tokens['why']}" if tokens.get("why") else ""
        found.append(("Prompts tokenized by", f"the {tokens.get('where')}{why}"))
    fixed = facts["job"].get("window", "auto")
    widths = [value for value in timeline.total("window") or () if value]
    if fixed != "auto":
        found.append(("Window", f"{fixed}, set by the job"))
    elif widths:
        least, most = min(widths), max(widths)
        found.append(("Window", f"{least:,.0f} to {most:,.0f}"))
    return found


def _load(run_dir: RunDir) -> list[tuple[str, str]]:
    """Return what report.json has, if it exists, on queues, prefixes, shared requests and checks."""
    report = read_json(run_dir.report_json)
    load, sharing = report.get("load") or {}, report.get("sharing") or {}
    found = []
    if load.get("in_band_share") is not None:
        in_band, empty = load["in_band_share"], load["empty_queue_share"]
        found.append(("Queue", f"{in_band:.0%} of the steady time in its band, {empty:.0%} empty"))
    if corners := {n: s for n, s in (load.get("corner_shares") or {}).items() if s and n in set(Corner)}:
        shares = [f"{share:.0%} {Corner(name).words}" for name, share in corners.items()]
        found.append(("Token usage", ", ".join(shares)))
    if background := load.get("background"):
        found.append(("Background", background_line(background)))
    if sharing.get("expected_tokens"):
        cached = sharing["found_tokens"] / sharing["expected_tokens"]
        share = f"{cached:.0%} of what rows share with earlier rows was in the cache"
        found.append(("Shared prefixes", share))
    if (bundles := report.get("bundles") or {}).get("bundles"):
        rows = f"{bundles['rows_per_request']:.1f} rows each on average, {bundles['most_rows']} at most"
        found.append(("Requests", rows))
    if checks := report.get("checks"):
        told = f"{checks['rows_asked_again']:,} rows asked again {checks['asked_again']:,} times"
        cost = f"{checks['output_tokens']:,} output tokens rejected"
        found.append(("Checks", f"{told}, {checks['rows_failed']:,} failed; {cost}"))
    return found


def _flags(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the engine's limits, and the versions of the software."""
    info = facts["engine"]
    limits = ("max_running", "max_total_tokens", "context_length", "prefill_tokens", "card", "log")
    return [
        *((name.replace("_", " "), str(info[name])) for name in limits if info.get(name) is not None),
        *((f"{name} version", str(value)) for name, value in facts["versions"].items() if value),
    ]


@functools.cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_HERE), autoescape=True, undefined=jinja2.StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.filters |= {
        "duration": duration, "moment": _moment, "number": number, "percent": _percent, "visible": _visible,
    }  # fmt: skip
    return environment.get_template("page.html")


def _visible(text: object) -> str:
    """Return a text that shows characters which HTML lacks, or which would reverse the text around them."""
    return "\n".join(map(escaped, str(text).split("\n")))


def _moment(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M}"


def _percent(share: float) -> str:
    return f"{share:.1%}" if 0 < share < 0.1 else f"{share:.0%}"  # noqa: PLR2004


def _read(name: str) -> str:
    return (_HERE / name).read_text(encoding="utf-8")
