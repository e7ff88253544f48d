"""Charts over time as SVG paths and ticks, with a description, in a frame of 1000 x 100 units.

The frame is stretched to the width of the screen. Texts are placed beside it by per cent of its width and
height, so that they are not stretched.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import NamedTuple

from batchrunner.report.html.history import RETRACTIONS, IncidentMark, Line, Timeline, WorkerHistory
from batchrunner.tuning.signals import ADMITS_TOO_FEW, GUIDES

WIDTH, HEIGHT = 1000.0, 100.0
COLOURS = 8
"""Number of line colours in page.css."""
_UNITS_S = ((86400, "d"), (3600, "h"), (60, "min"))
_STEPS_S = (
    *(0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800),
    *(3600, 7200, 3 * 3600, 6 * 3600, 12 * 3600, 86400),
)
TICKS = 7
"""Maximum number of ticks of the time axis, not counting that at 0."""


class AxisTick(NamedTuple):
    """A tick with its label beside the frame."""

    at: float
    """Position in per cent of the frame's width from the left, or of its height from the top."""
    label: str


class EventMark(NamedTuple):
    """An event that all charts show as a vertical line."""

    at: float
    """Position on the time axis in seconds."""
    kind: str
    """Style of the line: bad, good or plain."""
    label: str


class ValueZone(NamedTuple):
    """A shaded range of values; a horizontal line if both ends are equal."""

    low: float
    high: float
    label: str


class ChartLine(NamedTuple):
    """One line of a chart, as drawn."""

    label: str
    colour: int
    path: str
    values: list[float | None]
    """Value at each point of the grid, for the readout under the cursor."""


class ChartZone(NamedTuple):
    """A ValueZone as drawn; `y` is the distance from the frame's top."""

    y: float
    height: float
    label: str


@dataclass(frozen=True, slots=True)
class Chart:
    """One chart over time."""

    key: str
    title: str
    about: str
    """A sentence on what the chart shows and which values are good."""
    says: str
    """Description for people who cannot see the chart."""
    strokes: list[ChartLine]
    shades: list[ChartZone]
    marks: list[tuple[float, EventMark]]
    """Events with their horizontal position in the frame."""
    y_ticks: list[AxisTick]
    x_ticks: list[AxisTick]


def draw_lines(
    timeline: Timeline,
    key: str,
    title: str,
    about: str,
    lines: dict[str, Line],
    *,
    zones: Sequence[ValueZone] = (),
    marks: Sequence[EventMark] = (),
    top: float = 0.0,
) -> Chart:
    """Draw lines over time; the vertical axis reaches from 0 to at least `top`."""
    length_s = timeline.axis.length_s or 1.0
    values = [value for line in lines.values() for value in line if value is not None]
    step, axis_end = _scale(max([*values, top, *(zone.low for zone in zones)]) or 1.0)
    xs = [WIDTH * place / length_s for place in timeline.places]
    strokes = [
        ChartLine(
            label=label,
            colour=index % COLOURS,
            path=_path(xs, line, timeline.breaks, axis_end),
            values=[value and float(f"{value:.4g}") for value in line],
        )
        for index, (label, line) in enumerate(lines.items())
    ]
    y_values = [at * step for at in range(round(axis_end / step) + 1)]
    return Chart(
        key=key,
        title=title,
        about=about,
        says="; ".join(_description(label, line) for label, line in lines.items()),
        strokes=strokes,
        shades=[_shade(zone, axis_end) for zone in zones],
        marks=[(WIDTH * mark.at / length_s, mark) for mark in marks],
        y_ticks=[AxisTick(100 - 100 * value / axis_end, number(value)) for value in y_values],
        x_ticks=time_ticks(length_s),
    )


def time_ticks(length_s: float) -> list[AxisTick]:
    """Return round times on an axis of `length_s` seconds."""
    whole_days_s = 86400.0 * math.ceil(length_s / 86400 / TICKS)
    step_s = next((step_s for step_s in _STEPS_S if length_s / step_s <= TICKS), whole_days_s)
    unit_s, unit = next((pair for pair in _UNITS_S if step_s >= pair[0]), (1, "s"))
    ticks = [AxisTick(0.0, "0")]
    for at in range(1, int(length_s / step_s) + 1):
        time_s = at * step_s
        ticks.append(AxisTick(100 * time_s / length_s, f"{time_s / unit_s:g} {unit}"))
    return ticks


def number(value: float) -> str:
    """Format a number with about three digits and a unit letter: 0.85, 12, 1,500, 12.3k, 31M."""
    rounded = float(f"{value:.3g}")
    for least, size, letter in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if abs(rounded) >= least:
            return f"{rounded / size:.3g}{letter}"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"  # noqa: PLR2004


def _scale(highest: float) -> tuple[float, float]:
    """Return the step of an axis (1, 2 or 5 times a power of ten) and its end, after at most five steps."""
    rounding = 1e-9  # tolerance for the rounding of floats
    least_step = highest / 5
    power = 10.0 ** math.floor(math.log10(least_step))
    round_steps = [power, 2 * power, 5 * power, 10 * power]
    step = next(step for step in round_steps if step >= least_step * (1 - rounding))
    count = math.ceil(highest / step - rounding)
    return step, step * count


def _description(label: str, line: Line) -> str:
    values = [value for value in line if value is not None]
    low, mean, high = map(number, (min(values), fmean(values), max(values)))
    return f"{label}: lowest {low}, mean {mean}, highest {high}"


def _shade(zone: ValueZone, axis_end: float) -> ChartZone:
    high = min(zone.high, axis_end)
    return ChartZone(
        y=HEIGHT - HEIGHT * high / axis_end,
        height=HEIGHT * max(0.0, high - zone.low) / axis_end,
        label=zone.label,
    )


def _path(xs: Sequence[float], line: Line, breaks: frozenset[int], axis_end: float) -> str:
    """Return the path of a line in its unbroken pieces; a piece of one point becomes a dot."""
    path, is_drawing = "", False
    for at, (x, value) in enumerate(zip(xs, line, strict=True)):
        continues = is_drawing and at not in breaks
        is_drawing = value is not None
        if value is not None:
            point = f"{x:.1f} {HEIGHT - HEIGHT * value / axis_end:.1f}"
            path += f"L{point}" if continues else f"M{point}h.01"
    return path


GOOD_USAGE = GUIDES.usage_good
_MARKS = {"died": "bad", "hangs": "bad", "lost": "bad", "back": "good"}
"""Styles of incidents; all others are plain."""


def load_charts(
    timeline: Timeline, histories: Sequence[WorkerHistory], incidents: Iterable[IncidentMark]
) -> list[Chart]:
    """Return the charts of a run's load with its incidents, without charts that have no line."""
    draw = partial(draw_lines, timeline, marks=_marks(timeline, incidents))
    total, by_replica = partial(_total, timeline), partial(_by_replica, timeline)
    charts = [
        draw(
            "output", "Output tokens a second", "Tokens of the rows that ended, over the last 30 s.",
            total(("output_tokens_per_s", "output tok/s")),
        ),
        draw(
            "replicas", "Output tokens a second, by replica",
            "As above; lines close together mean an even load.", by_replica("output_tokens_per_s"),
        ),
        draw(
            "prompt", "Prompt tokens a second", "Tokens that the cache holds need not be computed.",
            total(("prompt_tokens_per_s", "prompt tok/s"), ("cached_tokens_per_s", "of these cached")),
        ),
        draw(
            "queue", "Waiting requests, #queue-req",
            "In the band, the engine always has a next request, and the scheduler is not slowed down.",
            by_replica("queue", "#queue-req"), zones=_bands(histories),
        ),
        draw(
            "usage", "Token usage",
            f"Used share of the KV pool. Below {GOOD_USAGE} while requests wait, {ADMITS_TOO_FEW}.",
            by_replica("token_usage", "token usage"),
            zones=[ValueZone(GOOD_USAGE, GOOD_USAGE, f"{GOOD_USAGE}")], top=1.0,
        ),
        draw(
            "running", "Running requests, #running-req", "Requests that decode together.",
            by_replica("running", "#running-req"), zones=_most_running(histories),
        ),
        draw(
            "window", "Window and requests in flight",
            "At most a window of requests is in flight; it follows the queue.",
            total(("window", "window"), ("in_flight", "in flight")),
        ),
        draw("windows", "Window, by replica", "Each follows its own replica's queue.", by_replica("window")),
    ]  # fmt: skip
    if timeline.retractions:
        charts.append(
            draw(
                "retractions", "Retractions so far",
                f"{timeline.retractions:,} in all. A few are fine; more than one a minute wastes work.",
                by_replica(RETRACTIONS) or total((RETRACTIONS, "retractions")),
            )
        )  # fmt: skip
    return [chart for chart in charts if chart.strokes]


def _marks(timeline: Timeline, incidents: Iterable[IncidentMark]) -> list[EventMark]:
    axis = timeline.axis
    marks = [EventMark(at, "plain", "started again") for at in axis.resumed()]
    for incident in incidents:
        label = f"{incident.what}: {incident.who} {incident.why}"
        marks.append(EventMark(axis.place(incident.time), _MARKS.get(incident.what, "plain"), label))
    return marks


def _total(timeline: Timeline, *named: tuple[str, str]) -> dict[str, Line]:
    """Return the sums of gauges over all workers, by label."""
    return {label: line for name, label in named if (line := timeline.total(name))}


def _by_replica(timeline: Timeline, name: str, alone: str | None = None) -> dict[str, Line]:
    """Return a line for each replica.

    The line of a single replica has the label `alone`. Without this label a single replica has no line.
    """
    lines = timeline.of_schedulers(name)
    if len(lines) > 1:
        return {label.replace("http://", ""): line for label, line in lines.items()}
    if not (alone and lines):
        return {}
    (line,) = lines.values()
    return {alone: line}


def _bands(histories: Sequence[WorkerHistory]) -> list[ValueZone]:
    bands = [band for history in histories for band in history.bands.values()]
    if not bands:
        return []
    low, high = min(low for low, _ in bands), max(high for _, high in bands)
    return [ValueZone(low, high, f"healthy: {number(low)} to {number(high)}")]


def _most_running(histories: Sequence[WorkerHistory]) -> list[ValueZone]:
    most = {most for history in histories for most in history.max_running.values()}
    return [ValueZone(value, value, f"at most {value:,}") for value in sorted(most)[:1]]
