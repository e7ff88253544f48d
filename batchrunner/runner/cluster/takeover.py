"""Takes over from tasks that died: recovers their results and frees their leases."""

import logging

from batchrunner.core.errors import TaskHeldError, TaskLockLostError
from batchrunner.output.events import EventLog
from batchrunner.output.holding import hold_task
from batchrunner.output.parts import recover
from batchrunner.output.resume import read_done
from batchrunner.output.task_holder import LivenessMonitor
from batchrunner.output.watching import watch
from batchrunner.runner.cluster.leases import Leases
from batchrunner.runner.prepared_job import PreparedJob

log = logging.getLogger(__name__)


class Takeover:
    """Watches the tasks that hold leases, and takes over from those that have died."""

    def __init__(self, prepared: PreparedJob, leases: Leases, events: EventLog) -> None:
        """Watch the other tasks of this task's run."""
        self._prepared = prepared
        self._run_dir = prepared.run_dir
        self._leases = leases
        self._events = events
        self._watches: dict[str, LivenessMonitor] = {}
        self._lives: dict[str, bool | None] = {}

    def poll(self) -> None:
        """Find out who holds leases, and whether they live."""
        holders = set(self._leases.held().values()) - {self._run_dir.task}
        self._watches = {task: self._watches.get(task) or self._watch(task) for task in sorted(holders)}
        self._lives = {task: watch.poll() for task, watch in self._watches.items()}

    @property
    def living(self) -> int:
        """Number of other tasks that held leases at the last poll and were not known to be dead."""
        return sum(lives is not False for lives in self._lives.values())

    def is_dead(self, task: str) -> bool:
        """Tell whether a task is known to be dead; one that was never watched is looked at now."""
        watch = self._watches.get(task) or self._watch(task)
        return watch.poll() is False

    def settle(self) -> bool | None:
        """Take over from the tasks that were dead at the last poll.

        Returns True if rows are free now, None if it is not known yet of some task whether it lives, else
        False. Raises OSError, or OutputError if a dead task's results cannot be written.
        """
        dead = [task for task, lives in self._lives.items() if lives is False]
        taken = [task for task in dead if self._take_over(task)]
        if taken:
            return True
        return None if dead or None in self._lives.values() else False

    def _watch(self, task: str) -> LivenessMonitor:
        return watch(self._run_dir.of_task(task))

    def _take_over(self, task: str) -> bool:
        dead = self._run_dir.of_task(task)
        try:
            with hold_task(dead, _at_once, dead_owner=self._watches[task].owner_content) as lock:
                recover(dead, lock, self._prepared.results_schema)
                self._leases.refresh()  # it may have ended its leases, or another task took over
                # an attempt without --join may have done rows since the plan, see `join`
                done = read_done(dead).rows | read_done(dead.of_task()).rows
                left = [(lease, lease.rows - done) for lease in self._leases.held_by(task)]
                lock.verify()
                for lease, rows in left:
                    self._leases.end(lease, rows)
        except (TaskHeldError, TaskLockLostError):  # another task takes over
            return False
        dead.store.discard_copy(task)
        if left:
            rows_left = sum(len(rows) for _, rows in left)
            log.warning("took over from %s, which died: %d rows were left", task, rows_left)
            numbers = [lease.number for lease, _ in left]
            self._events.write("takeover", task=task, leases=numbers, rows_left=rows_left)
        return True


def _at_once(_: float) -> None:
    """Refuse to wait for another task that takes over: the next poll will tell."""
    raise TaskHeldError("not waited for")
