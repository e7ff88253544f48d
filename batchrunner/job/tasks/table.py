"""All tasks, by the names that a job gives them."""

from typing import Literal, TypeAlias

from batchrunner.core.types import ForwardTask
from batchrunner.job.tasks.embed import EmbedTask

TaskName: TypeAlias = Literal["generate", "embed"]
"""`task` of a job."""
GENERATE: TaskName = "generate"
TASKS: dict[str, type[ForwardTask]] = {kind.name: kind for kind in (EmbedTask,)}
"""The tasks without decoding."""


def last_part(field: str) -> str:
    """Return the name under which a task takes a field of a job: `dtype` for `output.dtype`."""
    return field.rpartition(".")[2]
