"""Which fields of a job go with its task: each that has no effect is refused by name."""

from __future__ import annotations

from collections.abc import Collection

from pydantic import BaseModel

from batchrunner.core.errors import WrongValueError
from batchrunner.core.media import KIND_OF_FIELD
from batchrunner.job.tasks.pooled import RerankTask
from batchrunner.job.tasks.score import ScoreTask
from batchrunner.job.tasks.table import GENERATE, TASKS, TaskName

OF_DECODING = (
    "sampling", "parse", "check", "on_length", "output.columns", "output.explode", "output.top_logprobs",
)  # fmt: skip
"""Fields about texts that a model writes; of a section, all fields in it."""
OF_CHATS = (
    "prompt.user",
    "prompt.system",
    "prompt.messages",
    "prompt.continue",
    "prompt.chat_template_kwargs",
)
"""Fields of prompts that a chat template makes."""
OF_MEDIA = {f"prompt.{field}": kind.field for field, kind in KIND_OF_FIELD.items()}
"""Fields that bring files, which no task without decoding takes yet, and what they bring."""
KEPT = {"sampling.lora_path"}
"""Fields of these that every task takes."""
CHOICES = "prompt.choices"
DOCUMENTS = "prompt.documents"
_PAIR = "the engine tokenizes query and document as a pair: give prompt.text alone"
_TOGETHER = "give prompt.text: a choice is tokenized together with its prompt"
_NOT_WITH_CHOICES = {
    "output.softmax": "it is about labels: leave it out",
    "prompt.input_ids": _TOGETHER,
    "prompt.python": _TOGETHER,
    "prompt.truncate": "a choice goes on after the end of its prompt: cut the prompts in their template",
}
"""Fields that have no place beside choices, and what to do instead."""
OF_TASKS = sorted({field for kind in TASKS.values() for field in kind.takes})
"""Fields that only tasks without decoding have."""


def given_fields(job: BaseModel) -> list[str]:
    """Return the fields that a job gives, in two levels, such as `sampling.n`."""
    found = []
    for name in _given(job):
        found.append(name)
        section = getattr(job, name)
        if isinstance(section, BaseModel):
            fields = type(section).model_fields
            found += [f"{name}.{fields[key].alias or key}" for key in _given(section)]
    return found


def _given(section: BaseModel) -> list[str]:
    """Return the fields that a section gives and that are not as without them."""
    fields = type(section).model_fields
    return [
        name
        for name in fields
        if name in section.model_fields_set
        and getattr(section, name) != fields[name].get_default(call_default_factory=True)
    ]


def check_task_fields(task: TaskName, given: Collection[str]) -> None:
    """Raise WrongValueError where a field has no effect on the task, or one that it needs is missing."""
    kind = TASKS.get(task)
    for field in given:
        if field in OF_TASKS and (kind is None or field not in kind.takes):
            names = " or ".join(name for name, other in TASKS.items() if field in other.takes)
            raise WrongValueError(
                f"{field}: goes with task: {names}", hint=f"leave it out, or set task (it is {task})"
            )
    if kind is None:
        return
    for field in given:
        if field in OF_CHATS:
            raise WrongValueError(
                f"{field}: task: {task} takes no chat",
                hint="give prompt.text, a template or a column, or prompt.input_ids",
            )
        if field in OF_MEDIA:
            raise WrongValueError(f"{field}: task: {task} takes no {OF_MEDIA[field]}", hint="leave it out")
        if field == "prompt.batch":
            raise WrongValueError(
                f"prompt.batch: the requests of a batch file go as they are, and task is {task}",
                hint=f"leave out the task ({GENERATE})",
            )
        section = field.partition(".")[0]
        has_parts = any(other.startswith(f"{field}.") for other in given)
        if field not in KEPT and not has_parts and (field in OF_DECODING or section in OF_DECODING):
            raise WrongValueError(f"{field}: task: {task} writes no text", hint="leave it out")
    if task in _CHECKS:
        _CHECKS[task](given)


def _check_rerank_fields(given: Collection[str]) -> None:
    """Raise WrongValueError where a job does not say which documents, or its query cannot stand in a pair."""
    if DOCUMENTS not in given:
        raise WrongValueError(
            f"task: rerank: {DOCUMENTS} is missing", hint="name the column with the documents of each query"
        )
    for field in ("prompt.input_ids", "prompt.python", "prompt.truncate", "tokenize"):
        if field in given:
            raise WrongValueError(f"{field}: does not go with {DOCUMENTS}", hint=_PAIR)


def _check_score_fields(given: Collection[str]) -> None:
    """Raise WrongValueError where a job does not say what is scored, or says it twice."""
    if ("labels" in given) == (CHOICES in given):
        both = "got both" if CHOICES in given else "got neither"
        raise WrongValueError(
            f"task: score: takes either labels or {CHOICES} ({both})",
            hint='give one: labels, such as [" yes", " no"], are single tokens',
        )
    if CHOICES not in given:
        return
    for field, hint in _NOT_WITH_CHOICES.items():
        if field in given:
            raise WrongValueError(f"{field}: does not go with {CHOICES}", hint=hint)


_CHECKS = {ScoreTask.name: _check_score_fields, RerankTask.name: _check_rerank_fields}
"""What a task needs besides, by its name."""
