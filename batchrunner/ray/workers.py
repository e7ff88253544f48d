"""The workers of a job on a Ray cluster: started where there is room, replaced when they die."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from batchrunner.core.errors import EXIT_WRONG, BatchrunError
from batchrunner.job.spec import Job
from batchrunner.ray.job_worker import JobWorker
from batchrunner.ray.shared_path import SharedPath
from batchrunner.report.report import Report

log = logging.getLogger(__name__)

MOST_DEATHS = 5
"""Deaths of workers, since a row was done, after which no worker is started any more."""


@dataclass(frozen=True, slots=True)
class WorkerNeeds:
    """What Ray keeps free for a worker."""

    cpus: float
    gpus: int

    @property
    def bundle(self) -> dict[str, float]:
        """The same, as a bundle of a placement group."""
        return {"CPU": self.cpus, **({"GPU": float(self.gpus)} if self.gpus else {})}


class Workers:
    """So many workers, each in a placement group of its own: those that find no room wait for nodes."""

    def __init__(self, job: Job, shared: SharedPath, needs: WorkerNeeds, *, quiet: bool) -> None:
        self._arguments: Callable[[Any], Any] = lambda actor: actor.run.remote(job, shared, quiet=quiet)
        self._needs = needs
        self._actors: dict[Any, tuple[Any, PlacementGroup]] = {}  # by the reference of what they return
        self._deaths = 0
        self._stopping = False
        self.error: BatchrunError | None = None
        """What ended the last worker that could not go on."""
        self.last: Report | None = None
        """What the last worker that ended returned."""

    def __len__(self) -> int:
        """Return how many workers there are, those that wait for room included."""
        return len(self._actors)

    @property
    def placed(self) -> int:
        """Workers that have found room."""
        return sum(_is_placed(group) for _, group in self._actors.values())

    def start(self) -> None:
        """Add a worker."""
        group = placement_group([self._needs.bundle], strategy="PACK")
        self._start_in(group)

    def progressed(self) -> None:
        """Count deaths anew: rows were done since the last one."""
        self._deaths = 0

    def wait(self, timeout_s: float) -> None:
        """Wait for the end of a worker, for a time; replace it if it died."""
        ended, _ = ray.wait(list(self._actors), timeout=timeout_s)
        for reference in ended:
            actor, group = self._actors.pop(reference)
            try:
                self.last = ray.get(reference)
            except RayTaskError as failure:
                self._failed(failure.cause)
            except RayError as failure:  # the actor, its process or its node is gone, or out of reach
                ray.kill(actor)
                self._died(failure, group)
                continue
            remove_placement_group(group)

    def stop(self, reason: str, exit_code: int) -> None:
        """Let the rows in flight end, and start no worker any more; those that wait for room are ended."""
        self._stopping = True
        for reference, (actor, group) in list(self._actors.items()):
            if _is_placed(group):
                actor.stop.remote(reason, exit_code)
            else:
                del self._actors[reference]
                _end(actor, group)

    def close(self) -> None:
        """End all workers at once."""
        for actor, group in self._actors.values():
            _end(actor, group)
        self._actors.clear()

    def _start_in(self, group: PlacementGroup) -> None:
        strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0)
        actor_class = ray.remote(
            num_cpus=self._needs.cpus, num_gpus=self._needs.gpus, scheduling_strategy=strategy, max_restarts=0
        )(JobWorker)
        actor = actor_class.remote()
        self._actors[self._arguments(actor)] = actor, group

    def _failed(self, cause: Any) -> None:
        if self._stopping:  # it was told to end
            return
        if not isinstance(cause, BatchrunError):
            cause = BatchrunError(f"a worker failed: {type(cause).__name__}: {_first_line(cause)}")
        if self._actors and cause.exit_code != EXIT_WRONG:  # else it is what the command ends with
            log.warning("a worker ended: %s", cause)
        if self.error is None or cause.exit_code > self.error.exit_code:
            self.error = cause  # a wrong job before an engine that was lost

    def _died(self, failure: RayError, group: PlacementGroup) -> None:
        """Start another worker, which Ray places on another node where that of the group is gone."""
        self._deaths += 1
        if not self._stopping and self._deaths <= MOST_DEATHS:
            log.warning("a worker died, another one takes its place: %s", _reason(failure))
            self._start_in(group)
            return
        remove_placement_group(group)
        if not self._stopping and self.error is None:
            self.error = BatchrunError(
                f"{self._deaths} workers died one after the other: {_reason(failure)}",
                hint="look at their logs (`ray logs`), and run the same command again: it resumes",
                mark=";",
            )


def _is_placed(group: PlacementGroup) -> bool:
    return bool(placement_group_table(group).get("state") == "CREATED")


def _end(actor: Any, group: PlacementGroup) -> None:
    ray.kill(actor)
    remove_placement_group(group)


def _first_line(failure: Any) -> str:
    return " ".join(str(failure).split())[:200]


def _reason(failure: RayError) -> str:
    """Return what Ray says of a death, without the lines of the actor's IDs, which begin with a tab."""
    return _first_line("\n".join(line for line in str(failure).splitlines() if not line.startswith("\t")))
