"""`batchrun compare`: what differs between runs of one job, and what that did, in columns."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from batchrunner.core.errors import InputError
from batchrunner.output.run_json import different_work
from batchrunner.report.compare.compared_run import ComparedRun, read_compared
from batchrunner.report.compare.intervals import RatioInterval, ratio_interval
from batchrunner.report.report import duration

WIDEST = 34
"""Characters of a value that are shown; `--json` has it whole."""
KINDS = ("job", "flag", "engine", "version")
"""Beginnings of the names of what a run ran with, in the order of the lines."""
UNSET, UNKNOWN = "unset", "?"


def _count(value: float) -> str:
    return f"{value:,.0f}"


def _tenths(value: float) -> str:
    return f"{value:,.1f}"


def _share(value: float) -> str:
    return f"{value:.1%}"


def _hundredths(value: float) -> str:
    return f"{value:.2f}"


@dataclass(frozen=True, slots=True)
class Figure:
    """A line of the table, and a key of `--json`."""

    label: str
    meaning: str
    write: Callable[[float], str]
    with_ratio: bool = True
    """Whether the line shows the ratio to the first run."""


FIGURES = {
    "rows_total": Figure("rows", "Rows that the job selects", _count, with_ratio=False),
    "rows_ok": Figure("rows ok", "Rows that succeeded", _count, with_ratio=False),
    "rows_failed": Figure("rows failed", "Rows that have an `error`", _count, with_ratio=False),
    "rows_cut": Figure(
        "rows cut", "Rows of which an output was cut at `max_new_tokens`", _count, with_ratio=False
    ),
    "working_s": Figure("time at work", "Seconds in which a task was at work", duration),
    "rows_per_s": Figure("rows/s", "Rows that ended, by `working_s`", _tenths),
    "output_tokens_per_s": Figure("output tokens/s", "Generated tokens by `working_s`", _tenths),
    "prompt_tokens_per_s": Figure("input tokens/s", "Prompt tokens by `working_s`", _tenths),
    "output_tokens": Figure("output tokens", "Generated tokens", _count),
    "prompt_tokens": Figure("input tokens", "Prompt tokens", _count),
    "cached_share": Figure(
        "input tokens from the cache", "Share of prompt tokens in the prefix cache", _share, with_ratio=False
    ),
    "retractions": Figure("retractions", "Retractions of all starts", _count, with_ratio=False),
    "retries": Figure("retries", "Tries that were repeated", _count, with_ratio=False),
    "engine_failures": Figure(
        "engine died or hung", "Times that a server died or hung", _count, with_ratio=False
    ),
    "median_running": Figure("#running-req, median", "Median of running requests of a scheduler", _count),
    "median_queue": Figure(
        "#queue-req, median", "Median of waiting requests of a scheduler", _count, with_ratio=False
    ),
    "empty_queue_share": Figure(
        "samples with an empty queue", "Share of samples with an empty queue", _share, with_ratio=False
    ),
    "median_token_usage": Figure(
        "token usage, median", "Median fraction of the KV pool in use", _hundredths, with_ratio=False
    ),
    "latency_p50_s": Figure(
        "latency, median (s)", "Median seconds from sending a row to its answer", _hundredths
    ),
    "latency_p90_s": Figure("latency, 90 % (s)", "90th percentile of the same", _hundredths),
    "latency_p99_s": Figure("latency, 99 % (s)", "99th percentile of the same", _hundredths),
}
"""What a run did, in the order of the lines."""
STEADY = {
    "rows_per_s": "rows/s, steady",
    "output_tokens_per_s": "output tokens/s, steady",
    "prompt_tokens_per_s": "input tokens/s, steady",
}
"""Rates that also have a line for steady time, with an interval of their ratio."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Runs of one job; the others are compared with the first."""

    runs: tuple[ComparedRun, ...]

    @property
    def changed(self) -> dict[str, list[Any]]:
        """What differs between the runs, by name: the value of each run, None where it has none."""
        found = dict.fromkeys(name for run in self.runs for name in run.setup)
        names = sorted(found, key=lambda name: KINDS.index(name.partition(".")[0]))
        values = {name: [run.setup.get(name) for run in self.runs] for name in names}
        return {
            name: each
            for name, each in values.items()
            if any(value != each[0] for value in each) and values.get(_field_of(name)) != each
        }

    @property
    def notes(self) -> list[str]:
        """What to know before one believes the figures."""
        found = []
        if any(run.is_simulated for run in self.runs):
            found.append("simulated: the figures say nothing of a real engine")
        for run in self.runs:
            left = int((run.figures["rows_total"] or 0) - _done(run))
            if left > 0:
                found.append(f"{run.path}: {left:,} rows are not done yet")
        if len({run.figures["rows_total"] for run in self.runs}) > 1:
            found.append("the runs have different numbers of rows: compare rates, not totals")
        if any(name.startswith("job.sampling.") for name in self.changed):
            found.append("the sampling differs, so outputs differ: compare tokens/s, not rows/s")
        for run in self.runs:
            if run.starts > 1:
                found.append(f"{run.path}: {run.starts} starts; what it ran with is that of the last")
            if not run.steady.by_stretch:
                found.append(
                    f"{run.path}: {run.steady.length_s:.0f} s of steady time are too few for an interval"
                )
        return found

    def interval(self, run: ComparedRun, rate: str) -> RatioInterval | None:
        """Return the ratio of a run's steady rate to the first run's, with its 95 % confidence interval."""
        mine, base = (one.steady.by_stretch.get(rate, []) for one in (run, self.runs[0]))
        return ratio_interval(mine, base)

    def as_dict(self) -> dict[str, Any]:
        """Return the comparison as `--json` prints it."""
        return {
            "changed": self.changed,
            "runs": [
                {
                    "path": run.path,
                    "figures": run.figures,
                    "ratios": {name: _ratio(run, self.runs[0], name) for name in FIGURES},
                    "steady_s": round(run.steady.length_s, 1),
                    "steady": {
                        name: {
                            "mean": run.steady.mean(name),
                            "ratio": found.ratio if found else None,
                            "interval": [found.low, found.high] if found else None,
                        }
                        for name in STEADY
                        for found in [self.interval(run, name)]
                    },
                }
                for run in self.runs
            ],
            "notes": self.notes,
        }

    def lines(self) -> list[str]:
        """Return the comparison as a table for a person."""
        changed = [[_name(name), *map(_brief, values)] for name, values in self.changed.items()]
        done = [["what it did", *(["" for _ in self.runs])], *self._figure_rows(), *self._steady_rows()]
        rows = [["what differs", *(_brief(run.path) for run in self.runs)]]
        rows += changed or [["nothing that run.json or a log tells", *("" for _ in self.runs)]]
        return [
            *_table([*rows, [""] * (1 + len(self.runs)), *done]),
            *(f"note: {note}" for note in self.notes),
        ]

    def _figure_rows(self) -> list[list[str]]:
        first = self.runs[0]
        rows = []
        for name, figure in FIGURES.items():
            cells = [figure.label]
            for run in self.runs:
                value, ratio = run.figures[name], _ratio(run, first, name)
                text = UNKNOWN if value is None else figure.write(value)
                shows = figure.with_ratio and run is not first and ratio is not None
                cells.append(f"{text} ({ratio:.2f} x)" if shows else text)
            rows.append(cells)
        return rows

    def _steady_rows(self) -> list[list[str]]:
        rows = []
        for name, label in STEADY.items():
            cells = [label]
            for run in self.runs:
                mean, found = run.steady.mean(name), self.interval(run, name)
                text = UNKNOWN if mean is None else _tenths(mean)
                shows = found is not None and run is not self.runs[0]
                cells.append(
                    f"{text} ({found.ratio:.2f} x, {found.low:.2f}-{found.high:.2f})"
                    if found and shows
                    else text
                )
            rows.append(cells)
        return rows if any(cell != UNKNOWN for cells in rows for cell in cells[1:]) else []


def compare_runs(paths: Sequence[str]) -> Comparison:
    """Compare runs with the first of them.

    Raises InputError for less than two runs, for runs of different jobs (another input, filter or prompt) and
    for one without samples; OutputError where a path holds no run.
    """
    if len(paths) < 2:  # noqa: PLR2004
        raise InputError(
            "compare: one run is no comparison", hint="give the output paths of two or more runs"
        )
    runs = tuple(map(read_compared, paths))
    for run in runs[1:]:
        difference = different_work(runs[0].facts["fingerprint"], run.facts["fingerprint"])
        if difference is not None:
            raise InputError(
                f"{run.path}: not the same work as {runs[0].path}: {difference}",
                hint="compare runs of the same input and prompt",
                mark=";",
            )
    return Comparison(runs)


def _done(run: ComparedRun) -> float:
    return (run.figures["rows_ok"] or 0) + (run.figures["rows_failed"] or 0)


def _ratio(run: ComparedRun, first: ComparedRun, name: str) -> float | None:
    mine, base = run.figures[name], first.figures[name]
    return mine / base if mine is not None and base else None


def _name(name: str) -> str:
    """Return a name as a person knows it: a field of the job, a flag of the server, or a fact."""
    kind, _, rest = name.partition(".")
    return {"job": rest, "flag": f"--{rest.replace('_', '-')}", "version": f"{rest} version"}.get(
        kind, f"{rest.replace('_', ' ')} of the engine"
    )


def _field_of(name: str) -> str:
    """Return the name of the job's field that gives the server a flag: what both tell is told once."""
    kind, _, flag = name.partition(".")
    return f"job.engine.args.{flag.replace('_', '-')}" if kind == "flag" else ""


def _brief(value: Any) -> str:
    text = UNSET if value is None else value if isinstance(value, str) else json.dumps(value, default=str)
    text = " ".join(text.split())
    return text if len(text) <= WIDEST else f"{text[: WIDEST - 1]}…"


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
