"""An engine that is open for several runs."""

import functools
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from batchrunner.core.engine_info import EngineInfo
from batchrunner.core.errors import JobError
from batchrunner.core.loop_thread import LoopThread, LoopWork
from batchrunner.engines.base import Engine
from batchrunner.job.engine import EngineSpec
from batchrunner.job.spec import Job
from batchrunner.job.tasks import GENERATE, TaskName
from batchrunner.report.report import Report
from batchrunner.runner.run import execute
from batchrunner.runner.shared_engine import SharedEngine

T = TypeVar("T")


class OpenEngine:
    """An engine that stays open and serves several runs, one after another or at once; see `open_engine`.

    The engine is used on an event loop of its own, in a thread, so that runs from any thread or event loop
    can share it. `spec` is the section `engine` of the job, and `info` is what the engine reports about
    itself.
    """

    def __init__(
        self,
        loop: LoopThread,
        spec: EngineSpec,
        engine: Engine,
        info: EngineInfo,
        task: TaskName = GENERATE,
    ) -> None:
        self.loop = loop
        """The event loop on which the engine runs."""
        self.spec = spec
        self.shared = SharedEngine(engine, info)
        self.info = info
        self.task = task
        """What the model does (generate, embed, and so on). Jobs with another task are refused."""

    def start(self, work: Callable[..., Coroutine[Any, Any, T]]) -> LoopWork[T]:
        """Call the coroutine function `work` on the engine's event loop, with the open engine as `engine`.

        If the engine closes, `work` is cancelled. Raises BatchrunError if the engine is closed already.
        """
        return self.loop.start(functools.partial(work, engine=self.shared))

    def start_run(self, job: Job, **options: Any) -> LoopWork[Report]:
        """Start a run of a job on this engine; `options` are the options of `execute`.

        Raises JobError for a job of another task than the engine's. The requests of a batch file are not
        checked here, because each names its own task.
        """
        if not job.prompt.is_batch:
            self.refuse_other_task(job.task)
        return self.start(functools.partial(execute, job, **options))

    def refuse_other_task(self, task: TaskName) -> None:
        """Raise JobError if the engine was opened for another task, unless the engine is simulated."""
        if task != self.task and not self.info.simulated:
            raise JobError(
                f"engine: the engine was opened for task {self.task}, but the job's task is {task}",
                hint=f'open the engine with open_engine(…, task="{task}")',
            )
