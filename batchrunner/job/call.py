"""The job of a call of the library, from its arguments."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import pyarrow as pa
import pyarrow.types as pt

from batchrunner.core.errors import InputError, JobError
from batchrunner.core.media import KIND_OF_FIELD, PDF_FIELD
from batchrunner.job.check import OnLength
from batchrunner.job.engine import EngineSpec
from batchrunner.job.load import load_job
from batchrunner.job.spec import Job, LimitsSpec
from batchrunner.job.tasks.table import GENERATE, TASKS, TaskName, last_part

Prompt: TypeAlias = str | Mapping[str, Any] | Callable[..., Any]
"""A template, the `prompt` part of a job, or a function that makes the prompt of a row."""

_FILES = {field: "column" if field == PDF_FIELD else "columns" for field in KIND_OF_FIELD}
"""Parts of a prompt that name columns with files, and the field that does."""
_INDEX = "__index_level_"
"""Beginning of the name of a column that pandas makes of an index."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LibraryCall(ABC):
    """A call of the library, without its rows; the fields are its arguments."""

    engine: EngineSpec
    prompt: Prompt | None
    columns: Sequence[str]
    limits: Mapping[str, Any] | LimitsSpec | None

    def job(self, schema: pa.Schema, paths: Sequence[str], output: Path) -> Job:
        """Return the job that reads `paths`, with these columns, and writes into the directory `output`.

        No variable of the environment changes it. Raises JobError, and InputError where there is no prompt.
        """
        prompt = default_prompt(schema) if self.prompt is None else self.prompt
        if isinstance(self.columns, str):
            raise JobError("columns", hint=f"give a list of names, such as [{self.columns!r}]")
        limits = self.limits
        if isinstance(limits, LimitsSpec):
            limits = limits.model_dump(exclude_unset=True)
        tree = {
            "input": {"path": list(paths), "columns": list(self.columns)},
            "engine": self.engine.model_dump(exclude_unset=True),
            "limits": limits or {},
            **self._parts(prompt, str(output)),
        }
        return load_job(tree, environ={})

    @abstractmethod
    def _parts(self, prompt: Prompt, output: str) -> dict[str, Any]:
        """Return the other parts of the job; raises JobError."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateCall(LibraryCall):
    """A call of `generate` or `stream`; a text as `prompt` is the template of the user message.

    With `own_rows` the rows are the program's own, whose files of images, audio and videos may be anywhere.
    """

    parse: object
    sampling: Mapping[str, Any] | None
    answers: Sequence[str]
    explode: bool
    check: Mapping[str, Any] | None
    on_length: OnLength | None
    own_rows: bool

    def _parts(self, prompt: Prompt, output: str) -> dict[str, Any]:
        if isinstance(self.answers, str):
            raise JobError("answers", hint=f"give a list of columns, such as [{self.answers!r}]")
        if isinstance(prompt, Mapping) and prompt.get("batch") is not None:
            raise JobError(
                "prompt.batch: no part of a call",
                hint="a batch file is run by `batchrun batch`, or as a job by batchrunner.run",
            )
        if not isinstance(prompt, Mapping):
            prompt = {"user": prompt} if isinstance(prompt, str) else {"python": prompt}
        if self.own_rows:
            prompt = {name: _anywhere(name, part) for name, part in prompt.items()}
        return {
            "prompt": prompt,
            "sampling": self.sampling or {},
            "output": {"path": output, "columns": list(self.answers), "explode": self.explode},
            **({} if self.parse is None else {"parse": self.parse}),
            **({"check": self.check} if self.check else {}),
            **({"on_length": self.on_length} if self.on_length else {}),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskCall(LibraryCall):
    """A call of `embed` or the like; a text as `prompt` is the template of a text, or the column with it.

    `items` are further parts of the job's prompt, such as the documents; `fields` those of its output.
    """

    task: TaskName
    items: Mapping[str, Any] = field(default_factory=dict)
    fields: Mapping[str, Any] = field(default_factory=dict)
    labels: Sequence[str | int] | None = None
    more: Mapping[str, Any] = field(default_factory=dict)
    """Further parts of the job, which the task may refuse."""

    def _parts(self, prompt: Prompt, output: str) -> dict[str, Any]:
        if isinstance(self.labels, str):
            raise JobError("labels", hint=f"give a list, such as [{self.labels!r}]")
        if not isinstance(prompt, Mapping):
            prompt = {"text": prompt} if isinstance(prompt, str) else {"python": prompt}
        return {
            "task": self.task,
            "prompt": {**prompt, **self.items},
            **({} if self.labels is None else {"labels": list(self.labels)}),
            "output": {"path": output, **self.fields},
            **self.more,
        }


def task_call(
    task: TaskName,
    options: Mapping[str, Any] | None,
    *,
    engine: EngineSpec,
    prompt: Prompt | None,
    columns: Sequence[str],
    limits: Mapping[str, Any] | LimitsSpec | None,
    fields: Mapping[str, Any],
    more: Mapping[str, Any],
) -> TaskCall:
    """Return the call of a task by the arguments that only tasks have, its `options`; raises JobError.

    `fields` are others of the job's output, and `more` further parts of the job.
    """
    kind = TASKS.get(task)
    if task == GENERATE:
        raise JobError("task_options: they go with a task without decoding", hint="name the task")
    if kind is None:
        raise JobError(f"task {task!r}", hint=f"give one of {', '.join((GENERATE, *TASKS))}")
    given = dict(options or {})
    places = {last_part(name): name for name in kind.takes}
    for name in given:
        if name not in places:
            raise JobError(
                f"task_options: {name!r} is none of task: {task}",
                hint=f"it takes {', '.join(places) or 'none'}",
            )
    of_output = {name: value for name, value in given.items() if places[name].startswith("output.")}
    of_prompt = {name: value for name, value in given.items() if places[name].startswith("prompt.")}
    return TaskCall(
        task=task,
        engine=engine,
        prompt=prompt,
        columns=columns,
        limits=limits,
        items=of_prompt,
        fields={**of_output, **fields},
        labels=given.get("labels"),
        more=more,
    )


def default_prompt(schema: pa.Schema) -> str:
    """Return the template of the only text column; raises InputError where there is none, or more."""
    names = [column.name for column in schema if _is_text(column.type) and not column.name.startswith(_INDEX)]
    if len(names) != 1:
        columns = ", ".join(f"{column.name} ({column.type})" for column in schema)
        raise InputError(
            "prompt",
            hint=f"give one, since the rows have {len(names)} text columns and not 1 "
            f"(columns: {columns or 'none'})",
        )
    name = names[0].replace("\\", "\\\\").replace('"', '\\"')
    return f'{{{{ row["{name}"] }}}}'


def _is_text(kind: pa.DataType) -> bool:
    if pt.is_dictionary(kind):
        kind = kind.value_type
    return bool(pt.is_string(kind) or pt.is_large_string(kind) or pt.is_string_view(kind))


def _anywhere(name: str, part: Any) -> Any:
    """Return a part of a prompt so that paths of files may lead anywhere, unless it names a folder."""
    if name not in _FILES or part is None:
        return part
    if isinstance(part, (str, list, tuple)):
        part = {_FILES[name]: part if isinstance(part, str) and name == PDF_FIELD else _list(part)}
    return {"folder": "/", **part} if isinstance(part, Mapping) else part


def _list(names: Any) -> list[Any]:
    return [names] if isinstance(names, str) else list(names)
