"""A picture of a run over time, out of its event log: queue, running, token usage, window, output rate."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from batchrunner.errors import JobError, OutputError
from batchrunner.events import read_events
from batchrunner.storage import RunDir

if TYPE_CHECKING:
    from pathlib import Path

MOST_POINTS = 2000
"""When a log has more samples, every second one is left out, and again."""


@dataclass(slots=True)
class _Story:
    """The samples of a run's last start, thinned out so that their number does not grow with the run."""

    samples: list[dict[str, Any]] = field(default_factory=list)
    _every: int = 1
    _seen: int = 0

    def add(self, sample: dict[str, Any]) -> None:
        if self._seen % self._every == 0:
            self.samples.append(sample)
        self._seen += 1
        if len(self.samples) > MOST_POINTS:
            self.samples = self.samples[::2]
            self._every *= 2


def draw(run: str | Path) -> list[Path]:
    """Draw the last start of a run, or of each of its tasks, into `run.png` beside its events.

    Raises OutputError where there is nothing to draw, JobError where matplotlib is not installed.
    """
    tasks = {task.own: task for task in (RunDir(run), *RunDir(run).all_tasks())}
    stories = {own: _read_story(task) for own, task in tasks.items()}
    drawn = [
        _draw(story.samples, own / "run.png") for own, story in stories.items() if len(story.samples) > 1
    ]
    if not drawn:
        raise OutputError(f"{run}: no samples to draw in {RunDir(run).events.name}")
    return drawn


def _read_story(run_dir: RunDir) -> _Story:
    story = _Story()
    for event in read_events(run_dir.events):
        if event["event"] == "start":
            story = _Story()
        elif event["event"] == "sample":
            story.add(event)
    return story


def _draw(samples: list[dict[str, Any]], path: Path) -> Path:
    try:
        import matplotlib as mpl  # noqa: PLC0415 - an extra, and heavy
    except ImportError:
        raise JobError("matplotlib is not installed: pip install 'batchrunner[plot]'") from None
    mpl.use("Agg")
    import matplotlib.pyplot as plt  # noqa: PLC0415

    figure, (queue, usage, window, rate) = plt.subplots(
        4, 1, sharex=True, figsize=(9, 8), layout="constrained"
    )
    times = [sample["elapsed_s"] for sample in samples]
    for number, name in enumerate(_schedulers(samples)):
        label = f" {number}" if number or len(_schedulers(samples)) > 1 else ""
        loads = [_load(sample, name) for sample in samples]
        queue.plot(times, [load.get("queue") for load in loads], color="C0", label=f"#queue-req{label}")
        queue.plot(times, [load.get("running") for load in loads], color="C1", label=f"#running-req{label}")
        usage.plot(
            times, [load.get("token_usage") for load in loads], color="C2", label=f"token usage{label}"
        )
    low, high = next(iter(samples[-1].get("bands", {}).values()), (0, 0))
    if high:
        queue.axhspan(low, high, color="C0", alpha=0.1, label=f"healthy #queue-req {low}-{high}")
        queue.set_ylim(0, 1.1 * max([low, *_all(samples, "queue"), *_all(samples, "running")]))
    usage.set_ylim(0, 1.05)
    window.step(times, [sample["window"] for sample in samples], where="post", color="C3", label="window")
    window.plot(times, [sample["in_flight"] for sample in samples], color="C4", label="in flight")
    window.set_ylim(bottom=0)
    rate.plot(times, [sample["output_tokens_per_s"] for sample in samples], color="C5", label="output tok/s")
    rate.set_ylim(bottom=0)
    rate.set_xlabel("seconds")
    for axes in (queue, usage, window, rate):
        if axes.get_legend_handles_labels()[0]:  # an engine that tells no load leaves two of them empty
            axes.legend(loc="upper right", fontsize="small", ncols=3)
        axes.grid(visible=True, alpha=0.3)
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path


def _schedulers(samples: list[dict[str, Any]]) -> list[str]:
    return sorted({signal["scheduler"] for sample in samples for signal in sample["signals"]})


def _load(sample: dict[str, Any], scheduler: str) -> dict[str, Any]:
    return next((signal for signal in sample["signals"] if signal["scheduler"] == scheduler), {})


def _all(samples: list[dict[str, Any]], name: str) -> list[float]:
    return [signal[name] for sample in samples for signal in sample["signals"]]
