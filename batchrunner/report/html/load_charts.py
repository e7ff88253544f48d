"""The charts of a run's load, and what is good in each."""

from collections.abc import Callable, Sequence
from functools import partial

from batchrunner.engines.logs.series import Thresholds
from batchrunner.report.html.charts import Chart, EventMark, ValueZone, draw_lines, number
from batchrunner.report.html.task_history import RETRACTIONS, IncidentMark, TaskHistory
from batchrunner.report.html.timeline import Line, Timeline

GOOD_USAGE = Thresholds().usage_good
_BAD, _GOOD = {"died", "hangs", "lost", "out"}, {"back", "in"}


def load_charts(
    timeline: Timeline, histories: Sequence[TaskHistory], happened: Sequence[IncidentMark]
) -> list[Chart]:
    """Return the charts of a run's load, with its incidents; charts without a line are left out."""
    draw = partial(draw_lines, timeline, marks=_marks(timeline, happened))
    charts = [*_throughput(timeline, draw), *_queues(timeline, histories, draw)]
    if timeline.retractions:
        charts.append(
            draw(
                "retractions", "Retractions a minute",
                f"{timeline.retractions:,} in total. A few are fine; more than one a minute wastes work.",
                _by_replica(timeline, RETRACTIONS) or _total(timeline, (RETRACTIONS, "retractions a minute")),
                zones=[ValueZone(1, 1, "one a minute")],
            )
        )  # fmt: skip
    return [chart for chart in charts if chart.strokes]


def _throughput(timeline: Timeline, draw: Callable[..., Chart]) -> list[Chart]:
    return [
        draw(
            "output", "Output tokens a second", "Tokens of the rows that ended, over the last 30 s.",
            _total(timeline, ("output_tokens_per_s", "output tok/s")),
        ),
        draw(
            "replicas", "Output tokens a second, by replica",
            "As above; lines close together mean an even load.", _by_replica(timeline, "output_tokens_per_s"),
        ),
        draw(
            "prompt", "Prompt tokens a second", "Tokens that the cache holds need not be computed.",
            _total(
                timeline, ("prompt_tokens_per_s", "prompt tok/s"), ("cached_tokens_per_s", "of these cached")
            ),
        ),
    ]  # fmt: skip


def _queues(timeline: Timeline, histories: Sequence[TaskHistory], draw: Callable[..., Chart]) -> list[Chart]:
    return [
        draw(
            "queue", "Waiting requests, #queue-req",
            "In the band, the engine always has a next request, and the scheduler is not slowed down.",
            _labelled(timeline, "queue", "#queue-req"), zones=_bands(histories),
        ),
        draw(
            "usage", "Token usage",
            f"Used share of the KV pool. Below {GOOD_USAGE} while requests wait, the server admits too few.",
            _labelled(timeline, "token_usage", "token usage"),
            zones=[ValueZone(GOOD_USAGE, GOOD_USAGE, f"{GOOD_USAGE}")], top=1.0,
        ),
        draw(
            "running", "Running requests, #running-req", "Requests that decode together.",
            _labelled(timeline, "running", "#running-req"), zones=_most_running(histories),
        ),
        draw(
            "window", "Window and requests in flight",
            "At most a window of requests is in flight; it follows the queue.",
            _total(timeline, ("window", "window"), ("in_flight", "in flight")),
        ),
        draw(
            "windows", "Window, by replica", "Each follows its own replica's queue.",
            _by_replica(timeline, "window"),
        ),
    ]  # fmt: skip


def _marks(timeline: Timeline, happened: Sequence[IncidentMark]) -> list[EventMark]:
    axis = timeline.axis
    marks = [EventMark(at, "plain", "started again") for at in axis.resumed()]
    for incident in happened:
        kind = "bad" if incident.what in _BAD else "good" if incident.what in _GOOD else "plain"
        label = f"{incident.what}: {incident.who} {incident.why}"
        marks.append(EventMark(axis.place(incident.time), kind, label))
    return marks


def _total(timeline: Timeline, *named: tuple[str, str]) -> dict[str, Line]:
    """Return the sums over all tasks of some gauges, by their labels."""
    return {label: timeline.totals[name] for name, label in named if name in timeline.totals}


def _by_replica(timeline: Timeline, name: str) -> dict[str, Line]:
    """Return a line for each replica where there are several; a single replica's line is the total."""
    return _labelled(timeline, name, "") if len(timeline.schedulers.get(name, ())) > 1 else {}


def _labelled(timeline: Timeline, name: str, alone: str) -> dict[str, Line]:
    """Return the schedulers' lines; the line of a single scheduler is named after its value, `alone`."""
    lines = timeline.of_schedulers(name)
    if len(lines) == 1 and len(timeline.schedulers[name]) == 1:
        return dict(zip([alone], lines.values(), strict=True))
    return {label.replace("http://", ""): line for label, line in lines.items()}


def _bands(histories: Sequence[TaskHistory]) -> list[ValueZone]:
    bands = [band for history in histories for band in history.bands.values()]
    if not bands:
        return []
    low, high = min(low for low, _ in bands), max(high for _, high in bands)
    return [ValueZone(low, high, f"healthy: {number(low)} to {number(high)}")]


def _most_running(histories: Sequence[TaskHistory]) -> list[ValueZone]:
    most = {most for history in histories for most in history.max_running.values()}
    return [ValueZone(value, value, f"at most {value:,}") for value in sorted(most)[:1]]
