"""A picture of a run over time, out of its event log: queue, running, token usage, window, output rate."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from batchrunner.errors import JobError, OutputError
from batchrunner.htmlreport.story import read_story
from batchrunner.htmlreport.timeline import make_timeline
from batchrunner.storage import RunDir

if TYPE_CHECKING:
    from pathlib import Path

    from batchrunner.htmlreport.story import Story
    from batchrunner.htmlreport.timeline import Line, Timeline


def draw(run: str | Path) -> list[Path]:
    """Draw a run, or each of its tasks, into `run.png` beside its events.

    Raises OutputError where there is nothing to draw, JobError where matplotlib is not installed.
    """
    tasks = {task.own: task for task in (RunDir(run), *RunDir(run).all_tasks())}
    stories = {own: read_story(task.task, task.events) for own, task in tasks.items()}
    drawn = [
        _draw(story, timeline, own / "run.png")
        for own, story in stories.items()
        if len((timeline := make_timeline([story])).places) > 1
    ]
    if not drawn:
        raise OutputError(f"{run}: no samples to draw in {RunDir(run).events.name}")
    return drawn


def _draw(story: Story, timeline: Timeline, path: Path) -> Path:
    try:
        import matplotlib as mpl  # noqa: PLC0415 - an extra, and heavy
    except ImportError:
        raise JobError("matplotlib is not installed: pip install 'batchrunner[plot]'") from None
    mpl.use("Agg")
    import matplotlib.pyplot as plt  # noqa: PLC0415

    figure, (queue, usage, window, rate) = plt.subplots(
        4, 1, sharex=True, figsize=(9, 8), layout="constrained"
    )
    times = timeline.places
    for measure, axes, colour, name in (
        ("queue", queue, "C0", "#queue-req"),
        ("running", queue, "C1", "#running-req"),
        ("token_usage", usage, "C2", "token usage"),
    ):
        lines = timeline.of_schedulers(measure)
        for number, line in enumerate(lines.values()):
            label = f"{name} {number}" if len(lines) > 1 else name
            axes.plot(times, _means(line), color=colour, label=label)
    low, high = next(iter(story.bands.values()), (0, 0))
    if high:
        queue.axhspan(low, high, color="C0", alpha=0.1, label=f"healthy #queue-req {low}-{high}")
        loads = [*timeline.of_schedulers("queue").values(), *timeline.of_schedulers("running").values()]
        queue.set_ylim(0, 1.1 * max([low, *(value.high for line in loads for value in line if value)]))
    usage.set_ylim(0, 1.05)
    window.step(times, _means(timeline.totals["window"]), where="post", color="C3", label="window")
    window.plot(times, _means(timeline.totals["in_flight"]), color="C4", label="in flight")
    window.set_ylim(bottom=0)
    rate.plot(times, _means(timeline.totals["output_tokens_per_s"]), color="C5", label="output tok/s")
    rate.set_ylim(bottom=0)
    rate.set_xlabel("seconds")
    for axes in (queue, usage, window, rate):
        if axes.get_legend_handles_labels()[0]:  # an engine that tells no load leaves two of them empty
            axes.legend(loc="upper right", fontsize="small", ncols=3)
        axes.grid(visible=True, alpha=0.3)
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path


def _means(line: Line) -> list[float]:
    return [value.mean if value else math.nan for value in line]
