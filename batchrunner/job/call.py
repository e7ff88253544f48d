"""The job of a call of the library, from its arguments."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from batchrunner.core.errors import JobError
from batchrunner.job.check import OnLength
from batchrunner.job.engine import EngineSpec
from batchrunner.job.load import load_job
from batchrunner.job.spec import Job, LimitsSpec
from batchrunner.job.tasks.table import TaskName

NO_ITEMS: Mapping[str, Any] = MappingProxyType({})

_FILES = {"images": "columns", "pdf": "column"}
"""Parts of a prompt that name columns with files, and the field that does."""


def job_of_call(
    paths: Sequence[str],
    prompt: str | Mapping[str, Any] | Callable[..., Any],
    parse: object,
    sampling: Mapping[str, Any] | None,
    columns: Sequence[str],
    limits: Mapping[str, Any] | LimitsSpec | None,
    *,
    output: Path,
    engine: EngineSpec,
    answers: Sequence[str] = (),
    explode: bool = False,
    check: Mapping[str, Any] | None = None,
    on_length: OnLength | None = None,
    own_rows: bool = False,
) -> Job:
    """Return the job that reads `paths` and writes into the directory `output`; raises JobError.

    `prompt` is the template of the user message, the `prompt` part of a job, or a function; `parse` is that
    part of a job, or a function; `columns` are carried, `answers` are the job's `output.columns`. With
    `own_rows` the rows are the program's own, whose files of images may be anywhere. No variable of the
    environment changes the job.
    """
    if isinstance(columns, str):
        raise JobError("columns", hint=f"give a list of names, such as [{columns!r}]")
    if isinstance(answers, str):
        raise JobError("answers", hint=f"give a list of columns, such as [{answers!r}]")
    if isinstance(prompt, Mapping) and prompt.get("batch") is not None:
        raise JobError(
            "prompt.batch: no part of a call",
            hint="a batch file is run by `batchrun batch`, or as a job by batchrunner.run",
        )
    if isinstance(limits, LimitsSpec):
        limits = limits.model_dump(exclude_unset=True)
    if not isinstance(prompt, Mapping):
        prompt = {"user": prompt} if isinstance(prompt, str) else {"python": prompt}
    if own_rows:
        prompt = {name: _anywhere(name, part) for name, part in prompt.items()}
    tree = {
        "input": {"path": list(paths), "columns": list(columns)},
        "prompt": prompt,
        "sampling": sampling or {},
        "output": {"path": str(output), "columns": list(answers), "explode": explode},
        "engine": engine.model_dump(exclude_unset=True),
        "limits": limits or {},
        **({} if parse is None else {"parse": parse}),
        **({"check": check} if check else {}),
        **({"on_length": on_length} if on_length else {}),
    }
    return load_job(tree, environ={})


def job_of_task(
    task: TaskName,
    paths: Sequence[str],
    prompt: str | Mapping[str, Any] | Callable[..., Any],
    columns: Sequence[str],
    limits: Mapping[str, Any] | LimitsSpec | None,
    *,
    output: Mapping[str, Any],
    engine: EngineSpec,
    labels: Sequence[str | int] | None = None,
    items: Mapping[str, Any] = NO_ITEMS,
) -> Job:
    """Return the job of a call of `embed` or the like, whose `output` is that part of it; raises JobError.

    `prompt` is the template of a text or the column with it, the `prompt` part of a job, or a function;
    `items` are further parts of it.
    """
    if isinstance(labels, str):
        raise JobError("labels", hint=f"give a list, such as [{labels!r}]")
    if isinstance(columns, str):
        raise JobError("columns", hint=f"give a list of names, such as [{columns!r}]")
    if isinstance(limits, LimitsSpec):
        limits = limits.model_dump(exclude_unset=True)
    if not isinstance(prompt, Mapping):
        prompt = {"text": prompt} if isinstance(prompt, str) else {"python": prompt}
    tree = {
        "task": task,
        "input": {"path": list(paths), "columns": list(columns)},
        "prompt": {**prompt, **items},
        **({} if labels is None else {"labels": list(labels)}),
        "output": output,
        "engine": engine.model_dump(exclude_unset=True),
        "limits": limits or {},
    }
    return load_job(tree, environ={})


def _anywhere(name: str, part: Any) -> Any:
    """Return a part of a prompt so that paths of images may lead anywhere, unless it names a folder."""
    if name not in _FILES or part is None:
        return part
    if isinstance(part, (str, list, tuple)):
        part = {_FILES[name]: part if isinstance(part, str) and name == "pdf" else _list(part)}
    return {"folder": "/", **part} if isinstance(part, Mapping) else part


def _list(names: Any) -> list[Any]:
    return [names] if isinstance(names, str) else list(names)
