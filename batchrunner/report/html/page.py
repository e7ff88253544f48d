"""Writes the page of a run, report.html: collects what it shows, and fills the template page.html."""

import functools
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
from batchrunner.output.events import attempt_spans, last_sample, read_events, union_s
from batchrunner.output.files import whole_file, writing
from batchrunner.output.liveness import holders_of
from batchrunner.output.run_dir import RunDir
from batchrunner.output.run_json import require_run_json
from batchrunner.report.html.charts import load_charts, number
from batchrunner.report.html.history import Timeline, WorkerHistory, cell_width, history_of, make_timeline
from batchrunner.report.html.results import RunResults, read_results
from batchrunner.report.html.style import page_style, source_hash
from batchrunner.report.verdict import GO_ON, max_failed_rows_of, too_many_failed
from batchrunner.tuning.advise import advise_run
from batchrunner.tuning.signals import Corner

log = logging.getLogger(__name__)

_HERE = Path(__file__).parent


def write_page(run_dir: RunDir) -> Path:
    """Write the page of a run beside report.json; return the path of the page.

    The page covers all workers of the run. Raises OutputError if there is no run, ResumeError for a damaged
    result file, and StorageError if the page cannot be written.
    """
    path, text = run_dir.report_html, make_page(run_dir)
    with writing(path):
        with whole_file(path, run_dir.task) as temporary:
            # File names that are not UTF-8 contain surrogates, which cannot be encoded.
            temporary.write_text(text, encoding="utf-8", errors="replace")
        run_dir.store.publish(path)
    return path


def make_page(run_dir: RunDir) -> str:
    """Return the HTML text of the page of a run. Raises the errors of `write_page`."""
    facts = require_run_json(run_dir)
    workers = _workers(run_dir)
    results = read_results(workers)
    # A worker without events has no place on the time axis.
    spans = {worker: attempts for worker in workers if (attempts := attempt_spans(worker.events))}
    length_s = union_s(span for attempts in spans.values() for span in attempts)
    width_s = cell_width(length_s, len(spans))
    histories = [history_of(worker.task, read_events(worker.events), width_s) for worker in spans]
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
    """Return the state and the main figures of a run, for the template.

    `facts` is the content of run.json. `state_kind` in the result is the style of the state in page.css:
    good, warn, bad or live.
    """
    total = facts["rows_total"]
    counts = results.counts
    remaining = max(0, total - counts.done)
    failed_rows = too_many_failed(counts.failed, rows_total=total, max_failed_rows=max_failed_rows_of(facts))
    state_kind, state, reason = _state(run_dir, histories, remaining=remaining, failed_rows=failed_rows)
    working_s = timeline.axis.length_s
    attempts = counted(sum(len(history.attempts) for history in histories), "attempt")
    if len(histories) > 1:
        attempts += f" of {len(histories)} workers"
    engine = facts["engine"]
    engine_name = engine["kind"]
    if engine.get("version"):
        engine_name += f", SGLang {engine['version']}"
    # An engine without a model, such as the simulated one, reports its kind in place of a model.
    model = "" if engine["model"] == engine["kind"] else engine["model"]
    path = run_dir.store.uri or str(run_dir.path.absolute())
    return {
        "name": path.rpartition("/")[2],
        "path": path,
        "model": model,
        "engine": engine_name,
        "simulated": bool(engine.get("simulated")),
        "several": len(histories) > 1,
        "state": state,
        "state_kind": state_kind,
        "reason": reason,
        "rows_total": total,
        "rows_left": remaining,
        "working_s": working_s,
        "attempts": attempts,
        "output_tokens_per_s": counts.output_tokens / working_s if working_s else 0.0,
        "prompt_tokens_per_s": counts.prompt_tokens / working_s if working_s else 0.0,
        "cached_share": counts.cached_tokens / counts.prompt_tokens if counts.prompt_tokens else None,
        "done_share": (total - remaining) / total if total else 1.0,
        "ok_percent": 100 * counts.ok / total if total else 100.0,
        "failed_percent": 100 * counts.failed / total if total else 0.0,
        "written": time.time(),
    }


def _state(
    run_dir: RunDir, histories: Sequence[WorkerHistory], *, remaining: int, failed_rows: str | None
) -> tuple[str, str, str]:
    """Return the style of a run's state, a word for the state, and a sentence about the state.

    `remaining` is the number of rows without a result. `failed_rows` is the result of `too_many_failed`.
    """
    workers = [run_dir.of_task(history.task) for history in histories]
    holders = list(filter(None, holders_of([(worker, last_sample(worker.events)) for worker in workers])))
    if holders:
        running = holders[0] if len(histories) == 1 else f"{len(holders)} of {len(histories)} workers"
        return "live", "running", f"Running: {running}. The page shows what was on disk when it was written."
    if remaining:
        last_attempts = (history.attempts[-1] for history in histories)
        last_attempt = max(last_attempts, key=lambda attempt: attempt.ended, default=None)
        reason = last_attempt.reason if last_attempt else None
        if not reason:
            reason = "the run's log has no end, because the run was killed or its machine failed"
        next_step = last_attempt.next_step if last_attempt else GO_ON
        step = f" {next_step[0].upper()}{next_step[1:]}." if next_step else ""
        return "warn", "not finished", f"{reason[0].upper()}{reason[1:]}.{step}"
    if failed_rows:
        return "bad", "done, with failed rows", f"{failed_rows}."
    return "good", "done", "All rows have a result."


def _over_time(timeline: Timeline, histories: Sequence[WorkerHistory]) -> dict[str, Any]:
    """Return the charts and incidents of the page, and the values that page.js shows under the cursor."""
    incidents = sorted(incident for history in histories for incident in history.incidents)
    charts = load_charts(timeline, histories, incidents) if timeline.places else []
    return {
        "charts": charts,
        "retractions": timeline.retractions,
        "incidents": [(timeline.axis.place(incident.time), incident) for incident in incidents],
        "readout": {
            # Times at which the charts have values, in seconds.
            "places": [round(place, 2) for place in timeline.places],
            # page.js divides by this length.
            "length_s": timeline.axis.length_s or 1.0,
            "charts": {chart.key: [line.values for line in chart.strokes] for chart in charts},
        },
    }


def _style_and_script() -> dict[str, Any]:
    """Return the style and the script of the page, and the script's hash for the content security policy."""
    script = (_HERE / "page.js").read_text(encoding="utf-8")
    return {
        "style": Markup(page_style()),  # noqa: S704 - our own file
        "script": Markup(script),  # noqa: S704
        "script_hash": source_hash(script),
    }


def _workers(run_dir: RunDir) -> list[RunDir]:
    """Return the directories of all workers of a run, including that of `run_dir`, each once."""
    return [*{worker.log_directory: worker for worker in (run_dir, *run_dir.all_tasks())}.values()]


def _decisions(
    histories: Sequence[WorkerHistory], timeline: Timeline, facts: Mapping[str, Any]
) -> list[tuple[str, str]]:
    """Return what the runner decided (order, tokenization, concurrency limit), as pairs of name and text.

    With several workers, the decision of the last worker is shown.
    """
    decisions = []
    # The last worker with such an event counts.
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
    """Return facts about the load from report.json, as pairs of a name and a text."""
    report = read_json(run_dir.report_json)
    load, sharing = report.get("load") or {}, report.get("sharing") or {}
    facts = []
    if load.get("in_band_share") is not None:
        in_band, empty = load["in_band_share"], load["empty_queue_share"]
        queue = f"in the healthy range for {in_band:.0%} of the steady time, empty for {empty:.0%}"
        facts.append(("Queue", queue))
    # A report of another version may name states of the load that this version does not know.
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
        text = f"{hit_rate:.0%} of the tokens that rows share with earlier rows were in the prefix cache"
        facts.append(("Shared prefixes", text))
    if (bundles := report.get("bundles") or {}).get("bundles"):
        text = f"{bundles['rows_per_request']:.1f} rows each on average, {bundles['most_rows']} at most"
        facts.append(("Requests", text))
    if checks := report.get("checks"):
        retries = f"{checks['asked_again']:,} retries of {checks['rows_asked_again']:,} rows"
        cost = f"{checks['output_tokens']:,} output tokens rejected"
        facts.append(("Checks", f"{retries}, {checks['rows_failed']:,} failed; {cost}"))
    return facts


def _flags(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the engine's limits and the software versions, as pairs of a name and a text.

    `facts` is the content of run.json.
    """
    info = facts["engine"]
    limits = ("max_running", "max_total_tokens", "context_length", "prefill_tokens", "card", "log")
    pairs = [(name.replace("_", " "), str(info[name])) for name in limits if info.get(name) is not None]
    versions = facts["versions"].items()
    pairs += [(f"{software} version", str(version)) for software, version in versions if version]
    return pairs


@functools.cache
def _template() -> jinja2.Template:
    """Return the template page.html with the filters that it uses."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_HERE), autoescape=True, undefined=jinja2.StrictUndefined,
        trim_blocks=True, lstrip_blocks=True, finalize=_visible,
    )  # fmt: skip
    environment.filters |= {
        "duration": duration, "moment": _moment, "number": number, "percent": _percent,
    }  # fmt: skip
    return environment.get_template("page.html")


def _visible(value: object) -> object:
    """Return a value for the template, with control characters escaped if it is a text.

    HTML does not allow control characters, and marks of text direction would reverse the text around them.
    """
    if isinstance(value, Markup) or not isinstance(value, str):
        return value
    return "\n".join(map(escaped, value.split("\n")))


def _moment(seconds: float) -> str:
    """Format a time, in seconds since the epoch, as date, hour and minute in UTC."""
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M}"


def _percent(share: float) -> str:
    """Format a fraction as per cent, with one decimal below 10 %."""
    return f"{share:.1%}" if 0 < share < 0.1 else f"{share:.0%}"  # noqa: PLR2004
