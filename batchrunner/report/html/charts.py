"""Draw lines and histograms as SVG paths, ticks and a sentence, in a frame of 1000 x 100 units.

The frame is stretched to the width of the screen. Texts stand beside it, placed by per cent of its width and
height, so that they are not stretched.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import partial
from typing import NamedTuple

from batchrunner.core.console import counted
from batchrunner.engines.logs.series import GUIDES
from batchrunner.report.html.history import RETRACTIONS, GridValue, IncidentMark, Line, TaskHistory, Timeline

WIDTH, HEIGHT = 1000.0, 100.0
COLOURS = 8
"""Number of line colours in the page's style."""
_STEPS_S = (
    *(0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800),
    *(3600, 7200, 3 * 3600, 6 * 3600, 12 * 3600, 86400),
)
TICKS = 7
"""Ticks of the time axis at most."""


class AxisTick(NamedTuple):
    """A tick with its label beside the frame."""

    at: float
    """Position in per cent: of the frame's width from the left, or of its height from the top."""
    label: str


class EventMark(NamedTuple):
    """An event that all charts show as a vertical line."""

    at: float
    """Position on the time axis in seconds."""
    kind: str
    """Style of the line: bad, good or plain."""
    label: str


class ValueZone(NamedTuple):
    """A range of values that is shaded; a horizontal line where both ends are equal."""

    low: float
    high: float
    label: str


class ChartLine(NamedTuple):
    """One line of a chart, as drawn."""

    label: str
    colour: int
    path: str
    range_path: str
    """Path of the area between lowest and highest values; empty where they are equal everywhere."""
    values: list[float | None]
    """Value at each point of the grid, for the readout."""


class ChartZone(NamedTuple):
    """A zone as drawn; `y` is measured from the frame's top."""

    y: float
    height: float
    label: str


@dataclass(frozen=True, slots=True)
class Chart:
    """One chart over time."""

    key: str
    title: str
    about: str
    """What is shown, and what is good, in a sentence."""
    says: str
    """Description for people who cannot see the chart."""
    strokes: list[ChartLine]
    shades: list[ChartZone]
    marks: list[tuple[float, EventMark]]
    """Events with their horizontal position in the frame."""
    y_ticks: list[AxisTick]
    x_ticks: list[AxisTick]


class ChartBar(NamedTuple):
    """A bar of a histogram, in units of its frame."""

    x: float
    y: float
    width: float
    height: float
    says: str


@dataclass(frozen=True, slots=True)
class Histogram:
    """A histogram as drawn: numbers of rows by ranges of a value."""

    title: str
    unit: str
    says: str
    bars: list[ChartBar]
    y_ticks: list[AxisTick]
    x_ticks: list[AxisTick]


@dataclass(frozen=True, slots=True)
class BinnedValues:
    """Values of rows, binned: bin `i` begins at `i * step`; the last bin has all larger values too."""

    title: str
    unit: str
    step: float
    bins: list[int]
    mean: float
    p50: float
    p90: float
    p99: float
    largest: float
    whole: bool = False
    """Whether values are whole numbers."""


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
    """Draw lines over time; the vertical axis goes from 0 to at least `top`."""
    length_s = timeline.axis.length_s or 1.0
    highest = max((value.high for line in lines.values() for value in line if value), default=0.0)
    step, most = _scale(max(highest, top, *(zone.low for zone in zones), 0.0) or 1.0)
    xs = [WIDTH * place / length_s for place in timeline.places]
    strokes = [
        ChartLine(
            label,
            number % COLOURS,
            _path(xs, line, timeline.breaks, most),
            _area(xs, line, timeline.breaks, most),
            [value and float(f"{value.mean:.4g}") for value in line],
        )
        for number, (label, line) in enumerate(lines.items())
    ]
    return Chart(
        key, title, about, "; ".join(_description(label, line) for label, line in lines.items()),
        strokes,
        [_shade(zone, most) for zone in zones],
        [(WIDTH * mark.at / length_s, mark) for mark in marks],
        _rising(step, most),
        time_ticks(length_s),
    )  # fmt: skip


def draw_counts(counts: BinnedValues) -> Histogram:
    """Draw a histogram."""
    end = counts.step * len(counts.bins)
    step, top = _scale(max(counts.bins))
    tick_step = max(round_step(end, TICKS), float(counts.whole))
    percent = {"half": counts.p50, "90 %": counts.p90, "99 %": counts.p99, "all": counts.largest}
    at_most = ", ".join(f"{share} at most {number(value)}" for share, value in percent.items())
    ticks = [tick_step * at for at in range(int(end / tick_step) + 1)]
    return Histogram(
        counts.title,
        counts.unit,
        f"{at_most}; mean {number(counts.mean)}\N{NO-BREAK SPACE}{counts.unit}",
        [_bar(counts, at, rows, top) for at, rows in enumerate(counts.bins) if rows],
        _rising(step, top),
        [AxisTick(100 * value / end, number(value)) for value in ticks],
    )


def time_ticks(length_s: float) -> list[AxisTick]:
    """Return round times on an axis of `length_s` seconds."""
    step = next((step for step in _STEPS_S if length_s / step <= TICKS), None)
    if step is None:
        step = 86400 * math.ceil(length_s / 86400 / TICKS)
    return [AxisTick(100 * at * step / length_s, clock(at * step)) for at in range(int(length_s / step) + 1)]


def clock(seconds: float) -> str:
    """Write a time on the axis in short: 0, 20 s, 1 min 40, 1 h 30, 2 d 6 h."""
    if seconds < 60:  # noqa: PLR2004
        return f"{seconds:.2g} s" if seconds else "0"
    for size, unit, part_size, part in ((86400, "d", 3600, " h"), (3600, "h", 60, ""), (60, "min", 1, "")):
        if seconds >= size:
            whole, rest = divmod(round(seconds / part_size), size // part_size)
            return f"{whole} {unit} {rest:02}{part}" if rest else f"{whole} {unit}"
    raise AssertionError


def number(value: float) -> str:
    """Write a number with about three digits and a unit letter: 0.85, 12, 1,500, 12.3k, 31M."""
    for least, size, letter in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if abs(value) >= least:
            return f"{_three(value / size)}{letter}"
    return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else _three(value)  # noqa: PLR2004


def round_step(span: float, most: int) -> float:
    """Return a round step (1, 2 or 5 times a power of ten) that covers a span in at most `most` steps."""
    rough = max(span, 1e-12) / most
    power = 10.0 ** math.floor(math.log10(rough))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * (1 - 1e-9))


def _three(value: float) -> str:
    if abs(value) >= 100:  # noqa: PLR2004
        return f"{value:.0f}"
    if abs(value) >= 10:  # noqa: PLR2004
        return f"{value:.1f}".removesuffix(".0")
    return f"{Decimal(f'{value:.2g}'):f}"  # 0.00002, and not 2e-05


def _scale(highest: float) -> tuple[float, float]:
    """Return a round step and the end of a vertical axis with at most five steps."""
    step = round_step(highest, 5)
    return step, step * math.ceil(highest / step - 1e-9)


def _rising(step: float, top: float) -> list[AxisTick]:
    return [AxisTick(100 - 100 * at * step / top, number(at * step)) for at in range(round(top / step) + 1)]


def _bar(counts: BinnedValues, at: int, rows: int, top: float) -> ChartBar:
    width, height = WIDTH / len(counts.bins), HEIGHT * rows / top
    says = f"{_range(counts, at)} {counts.unit}: {counted(rows, 'row')}"
    return ChartBar(at * width, HEIGHT - height, width, height, says)


def _range(counts: BinnedValues, at: int) -> str:
    low, high = at * counts.step, (at + 1) * counts.step
    if at == len(counts.bins) - 1 and counts.largest >= high:
        return f"{number(low)} and more"
    return f"{number(low)} to {number(high - 1 if counts.whole else high)}"


def _description(label: str, line: Line) -> str:
    means = [value.mean for value in line if value]
    if not means:
        return f"{label}: no values"
    return (
        f"{label}: lowest {number(min(means))}, mean {number(sum(means) / len(means))}, "
        f"highest {number(max(means))}"
    )


def _shade(zone: ValueZone, most: float) -> ChartZone:
    high = min(zone.high, most)
    return ChartZone(HEIGHT - HEIGHT * high / most, HEIGHT * max(0.0, high - zone.low) / most, zone.label)


def _runs(xs: Sequence[float], line: Line, breaks: frozenset[int]) -> Iterator[list[tuple[float, GridValue]]]:
    """Yield the unbroken pieces of a line."""
    run: list[tuple[float, GridValue]] = []
    for at, (x, value) in enumerate(zip(xs, line, strict=True)):
        if run and (value is None or at in breaks):
            yield run
            run = []
        if value is not None:
            run.append((x, value))
    if run:
        yield run


def _path(xs: Sequence[float], line: Line, breaks: frozenset[int], most: float) -> str:
    return "".join(
        _points([(x, value.mean) for x, value in run], most) + ("h.01" if len(run) == 1 else "")
        for run in _runs(xs, line, breaks)
    )


def _area(xs: Sequence[float], line: Line, breaks: frozenset[int], most: float) -> str:
    if all(value is None or value.low == value.high for value in line):
        return ""
    return "".join(
        _points([(x, v.high) for x, v in run] + [(x, v.low) for x, v in reversed(run)], most) + "Z"
        for run in _runs(xs, line, breaks)
    )


def _points(points: Iterable[tuple[float, float]], most: float) -> str:
    return "M" + "L".join(f"{x:.1f} {HEIGHT - HEIGHT * y / most:.1f}" for x, y in points)


GOOD_USAGE = GUIDES.usage_good
_BAD, _GOOD = {"died", "hangs", "lost"}, {"back"}


def load_charts(
    timeline: Timeline, histories: Sequence[TaskHistory], happened: Sequence[IncidentMark]
) -> list[Chart]:
    """Return the charts of a run's load, with its incidents; charts without a line are left out."""
    draw = partial(draw_lines, timeline, marks=_marks(timeline, happened))
    charts = [*_throughput(timeline, draw), *_queues(timeline, histories, draw)]
    if timeline.retractions:
        charts.append(
            draw(
                "retractions", "Retractions so far",
                f"{timeline.retractions:,} in all. A few are fine; more than one a minute wastes work.",
                _by_replica(timeline, RETRACTIONS) or _total(timeline, (RETRACTIONS, "retractions")),
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
