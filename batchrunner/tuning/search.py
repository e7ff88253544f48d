"""The search of `batchrun tune`: first all promising changes of flags at once, then one flag at a time.

The search does no I/O: it yields requests for trials and receives their results. Equal results lead to equal
requests, so a search can resume from stored results.

A challenger is the best setting with one change. It races against the best setting: both are measured in
turn, until their speeds differ clearly.
"""

import math
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Literal, NamedTuple

import orjson

from batchrunner.core.console import counted
from batchrunner.sglang.flags import command_line, name_in
from batchrunner.tuning.flags import FLAGS, Flag
from batchrunner.tuning.measurement import LEAST_GAIN, Incumbent, TrialResult, TrialSigns
from batchrunner.tuning.space import TUNED_FLAGS, Args, FlagChange, Machine, candidates, together

ASSUMED_NOISE = 0.05
"""Assumed standard deviation of a trial's log speed before any repetition. It is about 5 % on a shared
machine of two cores, and about 1 % on a machine without other users."""
ASSUMED_FREEDOM = 4
"""Weight of ASSUMED_NOISE, in degrees of freedom: it counts like four repeated trials."""
MOST_TURNS = 3
"""Maximum number of trials of each setting in a comparison of two."""
SAME_WORK = 0.01
"""Two trials did the same work if their passes and batches differ by at most this fraction."""
_T95 = (2.132, 2.015, 1.943, 1.895, 1.860, 1.833, 1.812, 1.796, 1.782, 1.771, 1.761)
"""Student's 95 % quantiles for 4, 5, … 14 degrees of freedom. For more than 14, the last one is used, to be
on the safe side."""

RaceVerdict = Literal["faster", "no faster", "again"]
"""Result of a comparison of two settings. `again` means that further trials are needed."""


class Noise(NamedTuple):
    """Random variation of trials with equal flags."""

    deviation: float
    """Standard deviation of one trial's log speed."""
    freedom: int
    """Degrees of freedom of the deviation."""


def compare(
    challenger: Sequence[float],
    best: Sequence[float],
    noise: Noise,
    *,
    more_per_pass: bool = False,
    least_gain: float = LEAST_GAIN,
) -> tuple[RaceVerdict, str]:
    """Compare a challenger with the best setting: return the verdict, and the speed ratio as text.

    `challenger` and `best` are the speeds of the trials. The text has the confidence interval of the ratio.
    The verdict is "again" while the difference is unclear. After MOST_TURNS trials of each setting, an
    unproved challenger is "no faster".

    `more_per_pass` says that the challenger also generated more output per forward pass, a count without
    noise. Then a mean gain above `least_gain` is enough, and each setting gets at most two trials.
    """
    # Logarithms turn ratios of speeds into differences. The interval is that of Student's t-test.
    gain = fmean(map(math.log, challenger)) - fmean(map(math.log, best))
    standard_error = noise.deviation * math.sqrt(1 / len(challenger) + 1 / len(best))
    half_width = _quantile(noise.freedom) * standard_error
    low, high = gain - half_width, gain + half_width
    text = f"{math.exp(gain):.3f} [{math.exp(low):.3f}, {math.exp(high):.3f}] x the best speed"
    if low > 0:
        return "faster", text
    if more_per_pass and gain > least_gain:
        return "faster", f"{text}, and more output tokens per pass"
    # A mean gain below `least_gain` counts as noise, and ends the comparison. Only a challenger with more
    # output per pass gets another trial.
    if high < 0 or (gain < least_gain and not more_per_pass):
        return "no faster", text
    turns = min(len(challenger), len(best))
    if turns >= MOST_TURNS or (more_per_pass and turns > 1):
        return "no faster", f"{text}: no real difference in {counted(turns, 'turn')}"
    return "again", text


def trial_noise(speeds_by_setting: Iterable[Sequence[float]]) -> Noise:
    """Estimate the noise from the speeds of each setting's trials.

    The deviation is pooled over all settings and ASSUMED_NOISE, which counts as ASSUMED_FREEDOM degrees of
    freedom. A setting with only one trial adds nothing.
    """
    squares, freedom = ASSUMED_FREEDOM * ASSUMED_NOISE**2, ASSUMED_FREEDOM
    for speeds in speeds_by_setting:
        logs = [math.log(speed) for speed in speeds]
        mean = fmean(logs)
        squares += sum((value - mean) ** 2 for value in logs)
        freedom += len(logs) - 1
    return Noise(math.sqrt(squares / freedom), freedom)


def margin_to_stop(noise: Noise) -> float:
    """Return the fraction by which a trial may fall behind the best before it is stopped.

    It is three times the noise of a difference of two trials. It is at least a fifth, because the rows so far
    are a less exact measure than a whole trial, and at most a half.
    """
    return min(0.5, max(0.2, 3 * math.sqrt(2) * noise.deviation))


def same_work(challenger: TrialSigns, best: TrialSigns) -> bool:
    """Tell whether two trials had the same passes and batches; False if the passes are unknown."""
    tokens_per_pass = _relative_difference(challenger.tokens_per_pass, best.tokens_per_pass)
    if tokens_per_pass is None:
        return False
    running = _relative_difference(challenger.running, best.running) or 0.0
    cached_share = challenger.cached_share - best.cached_share
    return all(abs(difference) <= SAME_WORK for difference in (tokens_per_pass, running, cached_share))


def more_per_pass(challenger: TrialSigns, best: TrialSigns) -> bool:
    """Tell whether the challenger generated more tokens per forward pass; False if that is unknown."""
    difference = _relative_difference(challenger.tokens_per_pass, best.tokens_per_pass)
    return difference is not None and difference > SAME_WORK


def _relative_difference(challenger: float | None, best: float | None) -> float | None:
    """Return the relative difference between the challenger's value and the best's; None if unknown."""
    return challenger / best - 1 if challenger is not None and best else None


def _quantile(freedom: int) -> float:
    """Return Student's 95 % quantile for these degrees of freedom."""
    # ASSUMED_FREEDOM is the minimum, so _T95 begins with its quantile.
    return _T95[min(freedom - ASSUMED_FREEDOM, len(_T95) - 1)]


FAILED_MORE = 0.01
"""A setting is safe if its fraction of failed rows exceeds that of the best one by at most this. It is not 0,
because trials do not answer the same rows."""
MOST_MISSES = 2
"""After this many changes of a flag without a gain, one after the other, the search goes on with the next
flag."""
TOGETHER = Flag("together", {})
"""Stands for all promising flags at once, except those that need a GPU."""


@dataclass(slots=True)
class FlagSetting:
    """A set of flags with the results of its trials."""

    args: Args
    replicas: int
    """Number of replicas with these flags that fit on the GPUs. A trial measures one of them."""
    results: list[TrialResult] = field(default_factory=list)
    """Results of the trials, the oldest first."""
    verdict: str = ""
    """Result of the comparison with the best setting, in words; empty until it has ended."""

    @property
    def speeds(self) -> list[float]:
        """Output tokens per second of all replicas, one value for each trial that was measured to its end."""
        return [self.replicas * result.tokens_per_s for result in self.results if result.is_speed]

    @property
    def newest(self) -> TrialResult:
        """The result of the last trial."""
        return self.results[-1]


@dataclass(frozen=True, slots=True)
class TrialRequest:
    """A trial that the search asks for."""

    args: Args
    why: str
    turn: int
    """Number of earlier trials of the same flags with the same values."""
    incumbent: Incumbent | None = None


class Search:
    """A search for faster flags; `best` is the best setting so far."""

    def __init__(self, args: Args, machine: Machine, tuned_flags: Sequence[Flag] = TUNED_FLAGS) -> None:
        """`args` has the job's own flags, which are tried first."""
        self.own = FlagSetting(args, machine.replicas_of(args))
        """The setting of the job's own flags."""
        self.best = self.own
        """The best setting so far."""
        self.settings = {key_of(args): self.own}
        """All settings that were tried, by their keys."""
        self.notes: dict[str, str] = {}
        """Result of each flag, or the reason why it was not tried."""
        self.reason = ""
        """Reason why the search ended, in words."""
        self._machine = machine
        self._tuned_flags = tuned_flags
        self._changed: set[str] = set()
        """Names of the flags of which a change was tried."""

    def steps(self) -> Generator[TrialRequest, TrialResult, None]:
        """Yield requests and receive results until no change of a flag is faster."""
        yield from self._run_trial(self.own, "the job's own flags")
        if not self.own.newest.is_speed:
            self.reason = f"the job's own flags cannot be measured: {self.own.newest.why}"
            return
        improved = True
        while improved:
            improved = False
            for tuned_flag in (TOGETHER, *self._tuned_flags):
                improved |= yield from self._tune(tuned_flag)
        self.reason = "no change of a flag is faster"
        # Each change was compared only with the setting before it. So the last one is compared with the job's
        # own flags too.
        while self._beats_own() == "again":
            less_tried = min(self.best, self.own, key=lambda setting: len(setting.results))
            yield from self._run_trial(less_tried, "the best and the job's own flags, in turn")

    @property
    def winner(self) -> FlagSetting:
        """The best setting if it has proved faster than the job's own flags, otherwise these flags."""
        return self.best if self._beats_own() == "faster" else self.own

    def _beats_own(self) -> RaceVerdict:
        """Tell whether the best setting is faster than the job's own flags, by all trials of both."""
        if self.best is self.own:
            return "no faster"
        # If the job's own flags failed in their last trial, the best flags win.
        if not self.own.newest.is_speed:
            return "faster"
        has_fuller_passes = _only_schedules(changes(self.best.args, self.own.args)) and more_per_pass(
            self.best.newest.signs, self.own.newest.signs
        )
        verdict, _ = compare(
            self.best.speeds, self.own.speeds, self._noise(), more_per_pass=has_fuller_passes
        )
        return verdict

    def _tune(self, tuned_flag: Flag) -> Generator[TrialRequest, TrialResult, bool]:
        """Try changes of a flag until several bring no gain; return whether the best setting changed."""
        improved = False
        misses = 0
        while misses < MOST_MISSES and (change := self._next_change(tuned_flag)) is not None:
            won = yield from self._try_change(change, tuned_flag)
            if won:
                improved = True
                misses = 0
            else:
                misses += 1
        return improved

    def _try_change(self, change: FlagChange, tuned_flag: Flag) -> Generator[TrialRequest, TrialResult, bool]:
        """Try the best flags with one change; return whether that is faster."""
        args = self._with_change(change)
        challenger = self.settings[key_of(args)] = FlagSetting(args, self._machine.replicas_of(args))
        # The race may replace the best setting.
        changed_flags = command_line(changes(challenger.args, self.best.args))
        won = yield from self._race(challenger, change, tuned_flag)
        self._changed.add(tuned_flag.name)
        self.notes[tuned_flag.name] = f"{changed_flags}: {challenger.verdict}"
        return won

    def _next_change(self, tuned_flag: Flag) -> FlagChange | None:
        """Return the next untried change of one flag, or of all at once (TOGETHER); None if none is left."""
        if tuned_flag is not TOGETHER:
            return self._untried(tuned_flag)
        all_flags = [flag for flag in self._tuned_flags if flag.needs in {None, "a CPU"}]
        all_changes = [change for flag in all_flags if (change := self._untried(flag))]
        combined = together(all_changes)
        if combined is None or key_of(self._with_change(combined)) in self.settings:
            return None
        return combined

    def _untried(self, tuned_flag: Flag) -> FlagChange | None:
        """Return the next untried change of a flag. If there is none, note why and return None."""
        flag_changes = candidates(tuned_flag, self.best.newest, self._machine)
        if isinstance(flag_changes, str):
            if tuned_flag.name not in self._changed:
                self.notes[tuned_flag.name] = flag_changes
            return None
        for change in flag_changes:
            if missing := self._missing(change):
                self.notes[tuned_flag.name] = f"this version has no {missing}"
            elif key_of(self._with_change(change)) not in self.settings:
                return change
        return None

    def _with_change(self, change: FlagChange) -> Args:
        """Return the best flags with a change.

        A flag that the best flags have keeps its spelling. A new flag is spelled for this version of SGLang.
        """
        args = dict(self.best.args)
        for name, value in change.args.items():
            present_name = name_in(args, name)
            if present_name in args:
                args[present_name] = value
            else:
                args |= self._machine.flags.setting(name, value)
        return args

    def _missing(self, change: FlagChange) -> str:
        """Return the first flag of a change that this version of SGLang lacks; empty if it has all."""
        for name, value in change.args.items():
            if not self._machine.flags.setting(name, value):
                return command_line({name: value})
        return ""

    def _race(
        self, challenger: FlagSetting, change: FlagChange, tuned_flag: Flag
    ) -> Generator[TrialRequest, TrialResult, bool]:
        """Run trials of a challenger and of the best setting in turn; return whether the challenger won."""
        # Of the best setting's earlier trials, only the last one takes part in the race.
        skipped = len(self.best.speeds) - 1
        yield from self._run_trial(challenger, change.why, self._incumbent(challenger))
        while True:
            best_speeds = self.best.speeds[skipped:]
            verdict = self._verdict(challenger, change, tuned_flag, best_speeds)
            if verdict is not None:
                break
            # The setting with fewer trials in this race runs next; on a tie, the best one.
            if len(best_speeds) <= len(challenger.speeds):
                yield from self._run_trial(self.best, "the best again, in turn")
            else:
                yield from self._run_trial(challenger, "again, in turn", self._incumbent(challenger))
        won, challenger.verdict = verdict
        if won:
            self.best = challenger
        return won

    def _run_trial(
        self, setting: FlagSetting, why: str, incumbent: Incumbent | None = None
    ) -> Generator[TrialRequest, TrialResult, None]:
        """Request a trial of a setting, and add its result to the setting.

        If there is an `incumbent`, the trial ends early if it falls behind that.
        """
        result = yield TrialRequest(setting.args, why=why, turn=len(setting.results), incumbent=incumbent)
        setting.results.append(result)

    def _incumbent(self, challenger: FlagSetting) -> Incumbent:
        """Return the speed that one replica of the challenger must exceed to become the best."""
        tokens_per_s = self.best.replicas * self.best.newest.tokens_per_s / challenger.replicas
        return Incumbent(tokens_per_s, margin=margin_to_stop(self._noise()))

    def _noise(self) -> Noise:
        """Return the noise of all trials so far."""
        return trial_noise(setting.speeds for setting in self.settings.values() if setting.speeds)

    def _verdict(
        self, challenger: FlagSetting, change: FlagChange, tuned_flag: Flag, best_speeds: Sequence[float]
    ) -> tuple[bool, str] | None:
        """Return whether the challenger is better than the best setting, and why; None while undecided.

        `best_speeds` are the best setting's speeds in this race.
        """
        newest, best = challenger.newest, self.best.newest
        # These cases are clear without a comparison of speeds.
        if newest.ended == "died":
            return False, f"unsafe: {newest.why}"
        if newest.ended == "behind" or not newest.tokens_per_s:
            return False, f"slower: {newest.why}"
        if newest.failed_share > best.failed_share + FAILED_MORE:
            failed = f"{newest.failed_share:.1%} of the rows failed, with the best {best.failed_share:.1%}"
            return False, f"unsafe: {failed}"
        if not best.is_speed:
            return True, f"safer: the best flags failed when they were tried again: {best.why}"
        only_schedules = _only_schedules(change.args)
        if only_schedules and same_work(newest.signs, best.signs):
            return False, "no faster: passes and batches are the same as with the best"
        # The gain of a small step is less than the noise of a measurement. So if the challenger generates
        # more tokens per pass, `compare` accepts it even if it seems slower by up to LEAST_GAIN.
        least_gain = -LEAST_GAIN if tuned_flag.small_steps else LEAST_GAIN
        verdict, text = compare(
            challenger.speeds,
            best_speeds,
            self._noise(),
            more_per_pass=only_schedules and more_per_pass(newest.signs, best.signs),
            least_gain=least_gain,
        )
        is_decided = verdict != "again"
        return (verdict == "faster", f"{verdict}: {text}") if is_decided else None


def _only_schedules(args: Args) -> bool:
    """Tell whether flags only change the scheduling of rows. Then more output per pass means more speed."""
    return all(name in FLAGS and FLAGS[name].schedules for name in args)


def key_of(args: Args) -> bytes:
    """Return the same key for equal settings."""
    return orjson.dumps(args, option=orjson.OPT_SORT_KEYS, default=str)


def changes(args: Args, base: Args) -> Args:
    """Return the flags whose values differ from those in `base`, or that `base` lacks."""
    # None is a value, so the default is another object.
    return {name: value for name, value in args.items() if base.get(name, ...) != value}
