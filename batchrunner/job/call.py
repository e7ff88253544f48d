"""The job of a call of the library, or of `batchrun batch`, from its arguments."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import pyarrow as pa
import pyarrow.types as pt

from batchrunner.core.errors import InputError, JobError
from batchrunner.core.media import KIND_OF_FIELD, PDF_FIELD
from batchrunner.job.engine import EngineSpec
from batchrunner.job.fields import user_path
from batchrunner.job.load import load_job, parse_engine, read_job_file
from batchrunner.job.spec import Job, LimitsSpec, OnLength
from batchrunner.job.tasks import GENERATE, TASKS, TaskName, last_part

log = logging.getLogger(__name__)

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


KEPT = {"engine", "limits", "order", "window", "queue", "dedupe", "bundle", "storage"}
"""Parts of a base job that hold for a batch file; of `output` those of OUTPUT_KEPT do."""
CUSTOM_ID = "custom_id"
"""The column that the results name their requests by."""
OUTPUT_KEPT = {"part_rows", "durable"}


def job_of_batch(
    requests: str,
    run: str,
    *,
    model: str | None,
    urls: Sequence[str],
    base: str | None,
    lenient: bool,
    overrides: Sequence[str],
) -> Job:
    """Return the job that sends the lines of the file `requests`; its run directory is `run`.

    The engine is a server for a `model`, the servers at `urls`, or that of the job file `base`, whose limits,
    order and window hold too. A line that is no request keeps the run from beginning unless `lenient`. By
    default any number of lines may fail. Raises JobError.
    """
    given = [name for name, value in (("--model", model), ("--url", urls), ("--job", base)) if value]
    if len(given) != 1:
        got = " and ".join(given) or "none of --model, --url and --job"
        raise JobError(f"engine: got {got}", hint="give one of --model, --url and --job")
    tree: dict[str, Any] = {} if base is None else _base(base)
    if base is None:
        engine = parse_engine(model or list(urls))
        tree["engine"] = engine.model_dump(exclude_unset=True)
    output, limits = (_mapping(tree, name) for name in ("output", "limits"))
    tree |= {
        "input": {"path": requests, "columns": [CUSTOM_ID]},
        "prompt": {"batch": "lenient" if lenient else "strict"},
        "output": {**output, "path": run},
        "limits": {"max_failed_rows": 1.0, "abort_failed_share": 1.0, **limits},
    }
    job = load_job(tree, overrides=overrides, name=_named(base) if base else "batch")
    _refuse_other_files(job, requests, run)
    return job


def _refuse_other_files(job: Job, requests: str, run: str) -> None:
    """Raise JobError for a job whose results could not be published, since it is not about these files."""
    source = job.input
    as_given = {
        "input.path": source.path == user_path(requests),
        "output.path": job.output.path == user_path(run),
        "prompt": job.prompt.batch is not None,
        "input.columns": CUSTOM_ID in source.columns,
        "input.rename": CUSTOM_ID not in source.rename,
    }
    for name, holds in as_given.items():
        if not holds:
            raise JobError(f"{name}: the command sets it itself", hint="leave it out of --set")


def _named(path: str) -> str:
    return "standard input" if path == "-" else path


def _base(path: str) -> dict[str, Any]:
    """Return the parts of a job file that hold for a batch file; unknown ones too, which are refused."""
    tree = read_job_file(path)
    output = _mapping(tree, "output")
    left_out = [name for name in tree if name in Job.model_fields and name not in {*KEPT, "output"}]
    if left_out:
        said = ", ".join(left_out)
        log.info("%s: %s are left out: each line of the batch file has its own", _named(path), said)
    kept = {name: value for name, value in tree.items() if name not in left_out}
    return {**kept, "output": {name: value for name, value in output.items() if name in OUTPUT_KEPT}}


def _mapping(tree: dict[str, Any], name: str) -> dict[str, Any]:
    part = tree.get(name)
    if part is not None and not isinstance(part, dict):
        raise JobError(f"{name}: should be a mapping (got {part!r})", hint="write keys below it")
    return part or {}
