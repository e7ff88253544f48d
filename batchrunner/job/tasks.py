"""All tasks, by the names that a job gives them."""

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

from batchrunner.core.types import ForwardTask
from batchrunner.job.embed import EmbedTask
from batchrunner.job.scores import ChoiceTask, ClassifyTask, RerankTask, RewardTask, ScoreTask

TaskName: TypeAlias = Literal["generate", "embed", "score", "rerank", "reward", "classify"]
"""`task` of a job."""
GENERATE: TaskName = "generate"
EMBED: TaskName = "embed"
TASKS: dict[str, type[ForwardTask]] = {
    kind.name: kind for kind in (EmbedTask, ScoreTask, RerankTask, RewardTask, ClassifyTask)
}
"""The tasks without decoding."""


def task_of(name: TaskName, fields: Mapping[str, Any]) -> ForwardTask | None:
    """Return the task with the values of a job's fields; None for generating."""
    if name == ScoreTask.name and fields["choices"] is not None:
        return ChoiceTask.of(fields)
    kind = TASKS.get(name)
    return None if kind is None else kind.of(fields)


def goes_past_gateways(task: TaskName) -> bool:
    """Tell whether rows of a task go to servers, and never through a gateway."""
    kind = TASKS.get(task)
    return kind is not None and kind.past_gateways


def last_part(field: str) -> str:
    """Return the name under which a task takes a field of a job: `dtype` for `output.dtype`."""
    return field.rpartition(".")[2]
