"""Which trial comes next, and why: a walk over the flags that keeps the best setting. Pure.

The search asks for trials and is sent their results; the same results bring the same questions, so a search
goes on where it was when it is sent what was kept.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import orjson

from batchrunner.advise.situation import command_line
from batchrunner.engines.flags import name_in
from batchrunner.tune.measure import Rival
from batchrunner.tune.race import WORTH, compare, margin_of, more_a_pass, same_work, spread_of
from batchrunner.tune.space import KNOBS, Now

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from batchrunner.tune.measure import Result
    from batchrunner.tune.space import Args, Knob, Machine, Move

FAILED_MORE = 0.01
"""Of the rows, that may fail beyond what fails anyway: trials end with different rows."""


@dataclass(slots=True)
class FlagSetting:
    """Flags, and what their trials showed."""

    args: Args
    results: list[Result] = field(default_factory=list)
    verdict: str = ""

    @property
    def speeds(self) -> list[float]:
        """Output tokens a second of each trial that was measured and had any."""
        return [result.tokens_per_s for result in self.results if result.is_speed]

    @property
    def newest(self) -> Result:
        """Its last trial."""
        return self.results[-1]


@dataclass(frozen=True, slots=True)
class Ask:
    """A trial that is wanted."""

    args: Args
    why: str
    turn: int
    """Counts the trials of these flags, from 0."""
    rival: Rival | None = None


class Search:
    """The search; `best` is always the best setting that is known."""

    def __init__(self, args: Args, machine: Machine, knobs: Sequence[Knob] = KNOBS) -> None:
        """`args` are the job's own flags, which are tried first."""
        self.best = FlagSetting(args)
        self.settings = {key_of(args): self.best}
        self.notes: dict[str, str] = {}
        """Of each flag: why it was left alone, or what came of it."""
        self.reason = ""
        """Why it ended."""
        self._machine = machine
        self._knobs = knobs
        self._moved: set[str] = set()

    def steps(self) -> Generator[Ask, Result, None]:
        """Ask for trials, be sent their results, until no flag brings more."""
        yield from self._try(self.best, "the job's own flags", None)
        if not self.best.newest.is_speed:
            self.reason = f"the job's own flags cannot be measured: {self.best.newest.why}"
            return
        moved = True
        while moved:
            moved = False
            for knob in self._knobs:
                moved |= yield from self._turn(knob)
        self.reason = "no flag brings more"

    def _turn(self, knob: Knob) -> Generator[Ask, Result, bool]:
        """Move one flag for as long as that wins."""
        moved = False
        while (move := self._next_move(knob)) is not None:
            setting = FlagSetting(self._moved_to(move))
            self.settings[key_of(setting.args)] = setting
            tried = command_line(changes(setting.args, self.best.args))
            won = yield from self._race(setting, move, knob)
            moved |= won
            self._moved.add(knob.name)
            self.notes[knob.name] = f"{tried}: {setting.verdict}"
        return moved

    def _next_move(self, knob: Knob) -> Move | None:
        moves = knob.moves(Now(self.best.args, self.best.newest.signs, self._machine))
        if isinstance(moves, str):
            if knob.name not in self._moved:
                self.notes[knob.name] = moves
            return None
        for move in moves:
            if self._missing(move):
                self.notes[knob.name] = f"this version has no {self._missing(move)}"
            elif key_of(self._moved_to(move)) not in self.settings:
                return move
        return None

    def _moved_to(self, move: Move) -> Args:
        """Return the best's flags with a change, under the names that the job, or else the version, has."""
        args = dict(self.best.args)
        for name, value in move.args.items():
            own = name_in(args, name)
            args |= {own: value} if own in args else self._machine.flags.setting(name, value)
        return args

    def _missing(self, move: Move) -> str:
        """Return what of a change this version lacks, as on its command line; empty where it has all."""
        flags = self._machine.flags
        return next((command_line({n: v}) for n, v in move.args.items() if not flags.setting(n, v)), "")

    def _race(self, setting: FlagSetting, move: Move, knob: Knob) -> Generator[Ask, Result, bool]:
        """Try a setting, then the best and it in turns until it is plain which is faster."""
        before = len(self.best.speeds) - 1  # its last trial is the first of its turns
        yield from self._try(setting, move.why, self._rival())
        while (verdict := self._verdict(setting, move, knob, self.best.speeds[before:])) is None:
            if len(self.best.speeds) - before <= len(setting.speeds):
                yield from self._try(self.best, "the best again, in turn", None)
            else:
                yield from self._try(setting, "again, in turn", self._rival())
        won, setting.verdict = verdict
        if won:
            self.best = setting
        return won

    def _try(self, setting: FlagSetting, why: str, rival: Rival | None) -> Generator[Ask, Result, None]:
        setting.results.append((yield Ask(setting.args, why, len(setting.results), rival)))

    def _rival(self) -> Rival:
        return Rival(self.best.newest.curve, margin_of(self._spread()))

    def _spread(self) -> tuple[float, int]:
        return spread_of(setting.speeds for setting in self.settings.values() if setting.speeds)

    def _verdict(
        self, setting: FlagSetting, move: Move, knob: Knob, theirs: Sequence[float]
    ) -> tuple[bool, str] | None:
        """Say whether a challenger is better, and why; None while that is open."""
        newest, best = setting.newest, self.best.newest
        if newest.ended == "died":
            return False, f"unsafe: {newest.why}"
        if newest.ended == "behind" or not newest.tokens_per_s:
            return False, f"slower: {newest.why}"
        if newest.failed_share > best.failed_share + FAILED_MORE:
            return (
                False,
                f"unsafe: {newest.failed_share:.1%} of the rows failed, {best.failed_share:.1%} before",
            )
        if not best.is_speed:
            return True, f"safer: what was best failed when it was tried again: {best.why}"
        if knob.schedules and same_work(newest.signs, best.signs):
            return False, "no faster: the same passes and batches as the best"
        fuller = knob.schedules and more_a_pass(newest.signs, best.signs)
        worth = -WORTH if move.is_small else WORTH
        verdict, text = compare(setting.speeds, theirs, self._spread(), more_a_pass=fuller, worth=worth)
        return None if verdict == "again" else (verdict == "faster", f"{verdict}: {text}")


def key_of(args: Args) -> bytes:
    """Return what two equal settings have in common."""
    return orjson.dumps(args, option=orjson.OPT_SORT_KEYS, default=str)


def changes(args: Args, base: Args) -> Args:
    """Return what of some flags differs from others."""
    return {name: value for name, value in args.items() if base.get(name, ...) != value}
