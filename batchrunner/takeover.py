"""Tasks of a run that died: what they left is tidied up, and their leases are free again."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from batchrunner.checkpoint import read_done
from batchrunner.claim import ClaimLostError, Watch, claimed
from batchrunner.errors import OutputError
from batchrunner.sink import tidy
from batchrunner.storage import RunDir, writing

if TYPE_CHECKING:
    from collections.abc import Callable

    from batchrunner.leases import Leases

log = logging.getLogger(__name__)


class Takeover:
    """Watches the tasks that hold leases, and takes over from those that have died."""

    def __init__(self, run_dir: RunDir, leases: Leases, tell: Callable[..., None]) -> None:
        """`run_dir` is ours; `tell` takes an event's name and values."""
        self._run_dir = run_dir
        self._leases = leases
        self._tell = tell
        self._watches: dict[str, Watch] = {}
        self.living = 0
        """Other tasks that hold leases and live, as far as could be told at the last look."""

    def look(self) -> list[tuple[str, Watch, bool | None]]:
        """Tell of each other holder whether it lives (None: unknown yet); the earlier begun, the sooner."""
        holders = set(self._leases.held().values()) - {self._run_dir.task}
        found = []
        for task in sorted(holders):
            watch = self._watches.setdefault(task, Watch(RunDir(self._run_dir.path, task).task_directory))
            found.append((task, watch, watch.look()))
        self.living = sum(lives is not False for _, _, lives in found)
        return found

    def settle(self) -> bool | None:
        """Take over from the dead. True: some were; None: of others it is not known yet; False: neither."""
        found = self.look()
        taken = [self._take_over(task, watch) for task, watch, lives in found if lives is False]
        if any(taken):
            return True
        return None if taken or any(lives is None for _, _, lives in found) else False

    def _take_over(self, task: str, watch: Watch) -> bool:
        dead = RunDir(self._run_dir.path, task)
        try:
            with claimed(dead, of_the_dead=watch.named) as claim, writing(dead.parts):
                tidy(dead, claim)
                self._leases.refresh()  # its end may have come between, or somebody else
                theirs = [number for number, holder in self._leases.held().items() if holder == task]
                done = read_done(dead).rows
                left = {number: self._leases.rows_of(number) - done for number in theirs}
                for number, rows in left.items():
                    self._leases.end(number, rows)
        except (OutputError, ClaimLostError):  # somebody else is at it
            return False
        if theirs:
            rows_left = sum(map(len, left.values()))
            log.warning("took over from %s, which died: %d rows were left", task, rows_left)
            self._tell("takeover", task=task, leases=theirs, rows_left=rows_left)
        return True
