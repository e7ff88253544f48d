"""Charts of a run's load over time: SVG paths and ticks in a frame of 1000 x 100 units, with descriptions.

The browser stretches the frame to the width of the screen. Texts must not be stretched, so they stand outside
the frame, at positions in per cent of its width and height.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import NamedTuple

from batchrunner.report.html.history import RETRACTIONS, IncidentMark, Line, Timeline, WorkerHistory
from batchrunner.tuning.signals import ADMITS_TOO_FEW, GUIDES

WIDTH = 1000.0
"""Width of a chart's frame in SVG units; page.html repeats this number."""
HEIGHT = 100.0
"""Height of a chart's frame in SVG units; page.html repeats this number."""
COLOURS = 8
"""Number of line colours in page.css."""
_UNITS_S = ((86400, "d"), (3600, "h"), (60, "min"))
"""Units of time for labels, longest first, with their lengths in seconds."""
_STEPS_S = (
    *(0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800),
    *(3600, 7200, 3 * 3600, 6 * 3600, 12 * 3600, 86400),
)
"""Distances between two ticks of the time axis that give round labels, in seconds, ascending."""
TICKS = 7
"""Maximum number of ticks of the time axis, not counting the tick at 0."""


class AxisTick(NamedTuple):
    """A tick of an axis, with its label beside the frame."""

    at: float
    """Position in per cent: of the frame's width from the left, or of the frame's height from the top."""
    label: str


class EventMark(NamedTuple):
    """An event, such as the death of a server, that all charts show as a vertical line."""

    at: float
    """Position on the time axis in seconds."""
    kind: str
    """Style of the line: bad, good or plain."""
    label: str


class ValueZone(NamedTuple):
    """A range of values that a chart shades. If both ends are equal, the chart shows a horizontal line."""

    low: float
    high: float
    label: str


class ChartLine(NamedTuple):
    """One line of a chart, ready to be drawn."""

    label: str
    colour: int
    """Index of the colour in page.css."""
    path: str
    """SVG path of the line."""
    values: list[float | None]
    """Value at each of `Timeline.places`, for the readout under the cursor; None without a load sample."""


class ChartZone(NamedTuple):
    """A ValueZone in SVG units, ready to be drawn; `y` is the distance from the frame's top."""

    y: float
    height: float
    label: str


@dataclass(frozen=True, slots=True)
class Chart:
    """One chart over time."""

    key: str
    title: str
    about: str
    """Sentence under the title that explains the values and which of them are good."""
    says: str
    """Summary of the lines in words, for people who cannot see the chart."""
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
    """Return a chart of lines over time; the vertical axis reaches from 0 to at least `top`."""
    # A run of no length would divide by zero.
    length_s = timeline.axis.length_s or 1.0
    values = [value for line in lines.values() for value in line if value is not None]
    # The lower end of a shaded zone must be visible too. A chart with only zeros gets an axis up to 1.
    highest = max([*values, top, *(zone.low for zone in zones)]) or 1.0
    step, axis_end = _scale(highest)
    x_positions = [WIDTH * place / length_s for place in timeline.places]
    strokes = [
        ChartLine(
            label=label,
            colour=index % COLOURS,
            path=_path(x_positions, line, timeline.breaks, axis_end),
            # Short numbers keep the page small.
            values=[value and float(f"{value:.4g}") for value in line],
        )
        for index, (label, line) in enumerate(lines.items())
    ]
    y_values = [number_of_steps * step for number_of_steps in range(round(axis_end / step) + 1)]
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
    """Return ticks at round times for an axis of `length_s` seconds."""
    # A very long run gets ticks at whole days.
    whole_days_s = 86400.0 * math.ceil(length_s / 86400 / TICKS)
    step_s = next((step_s for step_s in _STEPS_S if length_s / step_s <= TICKS), whole_days_s)
    unit_s, unit = next((pair for pair in _UNITS_S if step_s >= pair[0]), (1, "s"))
    ticks = [AxisTick(0.0, "0")]
    for number_of_steps in range(1, int(length_s / step_s) + 1):
        time_s = number_of_steps * step_s
        ticks.append(AxisTick(100 * time_s / length_s, f"{time_s / unit_s:g} {unit}"))
    return ticks


def number(value: float) -> str:
    """Format a number with about three digits and a unit letter: 0.85, 12, 1,500, 12.3k, 31M."""
    # Rounding first turns 999,999 into 1M instead of 1000k.
    rounded = float(f"{value:.3g}")
    for least, size, letter in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if abs(rounded) >= least:
            return f"{rounded / size:.3g}{letter}"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"  # noqa: PLR2004


def _scale(highest: float) -> tuple[float, float]:
    """Return the step between two ticks of a vertical axis, and the value at the end of the axis.

    The step is 1, 2 or 5 times a power of ten, and the axis has at most five steps up to `highest`.
    """
    # Tolerance for rounding errors of floats.
    rounding = 1e-9
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
    """Return a zone in SVG units, clipped at the end of the vertical axis."""
    high = min(zone.high, axis_end)
    return ChartZone(
        y=HEIGHT - HEIGHT * high / axis_end,
        height=HEIGHT * max(0.0, high - zone.low) / axis_end,
        label=zone.label,
    )


def _path(x_positions: Sequence[float], line: Line, breaks: frozenset[int], axis_end: float) -> str:
    """Return the SVG path of a line, interrupted at `breaks` and at missing values."""
    path, has_previous_point = "", False
    for index, (x, value) in enumerate(zip(x_positions, line, strict=True)):
        is_connected = has_previous_point and index not in breaks
        has_previous_point = value is not None
        if value is not None:
            point = f"{x:.1f} {HEIGHT - HEIGHT * value / axis_end:.1f}"
            # The tiny stroke h.01 makes a single point visible as a dot.
            path += f"L{point}" if is_connected else f"M{point}h.01"
    return path


GOOD_USAGE = GUIDES.usage_good
"""Token usage from which the KV pool counts as well used."""
_MARKS = {"died": "bad", "hangs": "bad", "lost": "bad", "back": "good"}
"""Styles of the vertical lines of incidents. Incidents that are not listed have the style plain."""


def load_charts(
    timeline: Timeline, histories: Sequence[WorkerHistory], incidents: Iterable[IncidentMark]
) -> list[Chart]:
    """Return the charts of a run's load. Vertical lines in all charts mark the incidents."""
    draw = partial(draw_lines, timeline, marks=_marks(timeline, incidents))
    total, by_replica = partial(_total, timeline), partial(_by_replica, timeline)
    charts = [
        draw(
            "output", "Output tokens a second", "Tokens of the rows that ended, over the last 30 s.",
            total(("output_tokens_per_s", "output tok/s")),
        ),
        draw(
            "replicas", "Output tokens a second, by replica",
            "Tokens of the rows that ended on each replica. Lines close together mean an even load.",
            by_replica("output_tokens_per_s"),
        ),
        draw(
            "prompt", "Prompt tokens a second", "Tokens from the prefix cache need not be computed.",
            total(("prompt_tokens_per_s", "prompt tok/s"), ("cached_tokens_per_s", "from the prefix cache")),
        ),
        draw(
            "queue", "Waiting requests, #queue-req",
            "In the shaded range, a next request always waits, but too few wait to slow the scheduler down.",
            by_replica("queue", "#queue-req"), zones=_bands(histories),
        ),
        draw(
            "usage", "Token usage",
            f"Fraction of the KV pool in use. Below {GOOD_USAGE} while requests wait, {ADMITS_TOO_FEW}.",
            by_replica("token_usage", "token usage"),
            zones=[ValueZone(GOOD_USAGE, GOOD_USAGE, f"{GOOD_USAGE}")], top=1.0,
        ),
        draw(
            "running", "Running requests, #running-req", "Requests that decode together.",
            by_replica("running", "#running-req"), zones=_most_running(histories),
        ),
        draw(
            "window", "Window and requests in flight",
            "The window is the concurrency limit: the most requests in flight. Unless the job sets it, it is "
            "adjusted to keep the queue short, but not empty.",
            total(("window", "window"), ("in_flight", "in flight")),
        ),
        draw(
            "windows", "Window, by replica", "Each window is adjusted to the queue of its replica.",
            by_replica("window"),
        ),
    ]  # fmt: skip
    if timeline.retractions:
        charts.append(
            draw(
                "retractions", "Retractions so far",
                f"{timeline.retractions:,} in all. A few are fine, but more than one a minute wastes work.",
                by_replica(RETRACTIONS) or total((RETRACTIONS, "retractions")),
            )
        )  # fmt: skip
    return [chart for chart in charts if chart.strokes]


def _marks(timeline: Timeline, incidents: Iterable[IncidentMark]) -> list[EventMark]:
    """Return the vertical lines that all charts show: new starts after a pause, and incidents."""
    axis = timeline.axis
    marks = [EventMark(position, "plain", "a new start after a pause") for position in axis.resumed()]
    for incident in incidents:
        label = f"{incident.what}: {incident.who} {incident.why}"
        marks.append(EventMark(axis.place(incident.time), _MARKS.get(incident.what, "plain"), label))
    return marks


def _total(timeline: Timeline, *named: tuple[str, str]) -> dict[str, Line]:
    """Return by label a line for each pair of gauge and label: the sum of the gauge over all workers."""
    return {label: line for name, label in named if (line := timeline.total(name))}


def _by_replica(timeline: Timeline, name: str, alone: str | None = None) -> dict[str, Line]:
    """Return a line of the gauge `name` for each replica, by label.

    If there is only one replica, its line has the label `alone`. Without this label it has no line, because
    another chart shows the same values as a total.
    """
    lines = timeline.of_schedulers(name)
    if len(lines) > 1:
        return {label.replace("http://", ""): line for label, line in lines.items()}
    if not alone or not lines:
        return {}
    (line,) = lines.values()
    return {alone: line}


def _bands(histories: Sequence[WorkerHistory]) -> list[ValueZone]:
    """Return a zone that covers the healthy queue lengths of all schedulers; empty if none is known."""
    bands = [band for history in histories for band in history.bands.values()]
    if not bands:
        return []
    low, high = min(low for low, _ in bands), max(high for _, high in bands)
    return [ValueZone(low, high, f"healthy: {number(low)} to {number(high)}")]


def _most_running(histories: Sequence[WorkerHistory]) -> list[ValueZone]:
    """Return a horizontal line at the lowest limit of running requests; empty if none is known."""
    limits = [limit for history in histories for limit in history.max_running.values()]
    if not limits:
        return []
    lowest = min(limits)
    return [ValueZone(lowest, lowest, f"at most {lowest:,}")]
