"""The summary of a tuning: a table of its trials, and the `engine.args` to use."""

from dataclasses import asdict, dataclass, field
from statistics import geometric_mean
from typing import Any

import yaml

from batchrunner.core.errors import EngineStartError
from batchrunner.report.report import duration
from batchrunner.tune.search import FlagSetting, Search, changes
from batchrunner.tune.space import Args
from batchrunner.tune.variables import arguments_in, as_typed, variables_in


@dataclass(frozen=True, slots=True)
class TuningSummary:
    """The outcome of a tuning."""

    job: str
    """Path of the job file."""
    sample: str
    """The rows of the trials, in words."""
    spent_s: float
    """Seconds spent on trials with their launches, those of earlier attempts included."""
    reason: str
    """Why the search ended."""
    own_tokens_per_s: float
    """Output tokens per second with the job's own flags, the geometric mean of their trials."""
    best_tokens_per_s: float
    """The same with the best flags."""
    args: Args
    """Changes to `engine.args`; empty where the job's own flags are the fastest."""
    trials: list[dict[str, Any]] = field(default_factory=list)
    """For each setting that was tried: flags that differ from the job's, speeds, signs, verdict."""
    notes: dict[str, str] = field(default_factory=dict)
    """For each flag: what came of it, or why it was not tried."""
    applied: bool = False
    """Whether the changes were written into the job file."""
    env: dict[str, str] = field(default_factory=dict)
    """Changes to `engine.env`."""

    @property
    def _block(self) -> dict[str, Args]:
        """What belongs under `engine`."""
        return {name: found for name, found in (("args", self.args), ("env", self.env)) if found}

    @property
    def _changes(self) -> Args:
        """The changes as trials name them."""
        return {**self.args, **{name: int(value) for name, value in self.env.items()}}

    def as_dict(self) -> dict[str, Any]:
        """Return the summary as `--json` prints it."""
        return asdict(self)

    def lines(self) -> list[str]:
        """Return the lines for the terminal."""
        head = f"{'output tok/s':>20} {'running':>8} {'KV':>5} {'queue':>6} {'retracted':>10}  flags"
        lines = [f"trials: {self.sample}", head]
        for trial in self.trials:
            lines += _trial_lines(trial, is_best=trial["args"] == self._changes)
        lines += ["", *(f"{name}: {note}" for name, note in self.notes.items())]
        lines.append(f"\n{self.reason}, after {duration(self.spent_s)}")
        if not self._changes:
            return [*lines, "the job's own flags are the fastest that were found"]
        gain = self.best_tokens_per_s / self.own_tokens_per_s
        speeds = f"{self.own_tokens_per_s:,.0f} -> {self.best_tokens_per_s:,.0f} output tok/s"
        lines.append(f"{gain:.2f} x as fast as the job's own flags ({speeds}) with")
        lines += ["", *yaml.safe_dump({"engine": self._block}, sort_keys=False).splitlines(), ""]
        unchanged = f"{self.job} is unchanged: --apply writes this into it"
        return [*lines, f"written into {self.job}" if self.applied else unchanged]


def summarize(search: Search, source: str, sample: str, spent_s: float) -> TuningSummary:
    """Summarize a search; raises EngineStartError where not even the job's own flags work."""
    own, *_ = search.settings.values()
    if not own.speeds:
        raise EngineStartError(search.reason)
    best = changes(search.best.args, own.args)
    held, waiting = "held by the runner's own controller", own.newest.signs.queue
    return TuningSummary(
        job=source,
        sample=sample,
        spent_s=round(spent_s, 1),
        reason=search.reason,
        own_tokens_per_s=round(geometric_mean(own.speeds), 1),
        best_tokens_per_s=round(geometric_mean(search.best.speeds), 1),
        args=arguments_in(best),
        env=variables_in(best),
        trials=[_trial(setting, own.args) for setting in search.settings.values() if setting.results],
        notes={"queue": f"{held}; {waiting:.0f} requests waited with the job's own flags", **search.notes},
    )


def _trial(setting: FlagSetting, own: Args) -> dict[str, Any]:
    return {
        "args": changes(setting.args, own),
        "tokens_per_s": setting.speeds or [setting.newest.tokens_per_s],
        "ended": setting.newest.ended,
        "verdict": setting.verdict,
        "cost_s": round(sum(result.cost_s for result in setting.results), 1),
        "signs": asdict(setting.newest.signs),
    }


def _trial_lines(trial: dict[str, Any], *, is_best: bool) -> list[str]:
    signs, speeds = trial["signs"], trial["tokens_per_s"]
    speed = "died" if trial["ended"] == "died" else " ".join(f"{value:,.0f}" for value in speeds)
    limited = f"{signs['running']:.0f}" + (f"/{signs['max_running']}" if signs["max_running"] else "")
    flags = as_typed(trial["args"]) or "the job's own"
    line = (
        f"{speed:>20} {limited:>8} {signs['usage']:>5.2f} {signs['queue']:>6.0f} "
        f"{signs['retractions_per_min']:>6.0f}/min  {flags}{'  <- best' if is_best else ''}"
    )
    return [line, *([f"{'':>54}{trial['verdict']}"] if trial["verdict"] else [])]
