"""The job of a call of the library, or of `batchrun batch`, from its arguments."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, TypedDict

import pyarrow as pa

from batchrunner.core.errors import InputError, JobError
from batchrunner.core.media import KIND_OF_FIELD
from batchrunner.job.arrow_types import is_text, type_name
from batchrunner.job.engine import EngineSpec
from batchrunner.job.load import load_job, read_job_file
from batchrunner.job.prompt import BatchPrompts, media_part
from batchrunner.job.spec import Job, LimitsSpec, OnLength
from batchrunner.job.tasks import GENERATE, TASKS, TaskName

Prompt: TypeAlias = str | Mapping[str, Any] | Callable[..., Any]
"""A template, the `prompt` part of a job, or a function that makes the prompt of a row."""

_INDEX = "__index_level_"
"""Beginning of the name of a column that pandas makes of an index."""


class CallOptions(TypedDict, total=False):
    """Arguments of `generate` that `stream` and a stage of Ray Data have too, and the task."""

    prompt: Prompt | None
    rollout: str | Callable[..., Any] | None
    parse: str | Callable[..., Any] | None
    sampling: Mapping[str, Any] | None
    answers: Sequence[str]
    accept: Mapping[str, Any] | None
    on_length: OnLength | None
    limits: Mapping[str, Any] | LimitsSpec | None
    task: TaskName
    task_options: Mapping[str, Any] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LibraryCall:
    """A call of the library, without its rows; the fields are its arguments."""

    engine: EngineSpec
    prompt: Prompt | None = None
    """A text is the template of the user message; of a task without decoding that of the text, or its column.
    None for the only text column."""
    columns: Sequence[str] = ()
    limits: Mapping[str, Any] | LimitsSpec | None = None
    task: TaskName = GENERATE
    task_options: Mapping[str, Any] | None = None
    """The fields that the task has and generating lacks, by the last parts of their names: `dtype`."""
    rollout: str | Callable[..., Any] | None = None
    parse: str | Callable[..., Any] | None = None
    sampling: Mapping[str, Any] | None = None
    answers: Sequence[str] = ()
    accept: Mapping[str, Any] | None = None
    on_length: OnLength | None = None
    own_rows: bool = False
    """Whether rows are the program's own, whose files of images, audio and videos may be anywhere."""

    def job(self, schema: pa.Schema, paths: Sequence[str], output: Path) -> Job:
        """Return the job that reads `paths`, with these columns, and writes into the directory `output`.

        Raises JobError, and InputError where there is no prompt.
        """
        prompt = self.prompt
        if prompt is None:
            prompt = default_prompt(schema) if self.rollout is None else {}
        if not isinstance(prompt, Mapping):
            template = "user" if self.task == GENERATE else "text"
            prompt = {template if isinstance(prompt, str) else "python": prompt}
        if self.own_rows:
            prompt = {name: _anywhere(name, part) for name, part in prompt.items()}
        tree: dict[str, Any] = {
            "task": self.task,
            "input": {"path": list(paths), "columns": self.columns},
            "prompt": dict(prompt),
            "sampling": self.sampling or {},
            "parse": self.parse,
            "accept": self.accept or {},
            "on_length": self.on_length,
            "output": {"path": str(output), "columns": self.answers},
            "engine": self.engine,
            "limits": self.limits or {},
        }
        fields = TASKS[self.task].takes if self.task in TASKS else ()
        places = {place.rpartition(".")[2]: place for place in fields}
        for name, value in (self.task_options or {}).items():
            if name not in places:
                raise JobError(
                    f"task_options: {name!r} with task: {self.task}",
                    hint=f"it takes {', '.join(places) or 'none'}",
                )
            section, _, key = places[name].rpartition(".")
            (tree[section] if section else tree)[key] = value
        return load_job(tree, rollout=self.rollout)


def default_prompt(schema: pa.Schema) -> str:
    """Return the template of the only text column; raises InputError where there is none, or more."""
    names = [column.name for column in schema if is_text(column.type) and not column.name.startswith(_INDEX)]
    if len(names) != 1:
        columns = ", ".join(f"{column.name} ({type_name(column.type)})" for column in schema)
        raise InputError(
            "prompt",
            hint=f"give one, since the rows have {len(names)} text columns and not 1 "
            f"(columns: {columns or 'none'})",
        )
    return f"{{{{ row[{json.dumps(names[0], ensure_ascii=False)}] }}}}"


def _anywhere(name: str, part: Any) -> Any:
    """Return a part of a prompt so that paths of files may lead anywhere, unless it names a folder."""
    expanded = media_part(name, part) if name in KIND_OF_FIELD else None
    return {"folder": "/", **expanded} if isinstance(expanded, Mapping) else part


_OF_BASE = {
    "engine", "limits", "order", "window", "dedupe", "bundle", "storage", "output.part_rows",
    "output.durable", "input.limit",
}  # fmt: skip
"""Parts of a job that hold for a batch file, from a base job or `--set`."""
CUSTOM_ID = "custom_id"
"""The column that the results name their requests by."""


def job_of_batch(requests: str, run: str, *, engine: Sequence[str], overrides: Sequence[str]) -> Job:
    """Return the job that sends the lines of the file `requests`; its run directory is `run`.

    The `engine` is a model, addresses of servers, or that of a job file, whose limits, order and window hold
    too. By default any number of lines may fail. Raises JobError.
    """
    for override in overrides:
        name = override.partition("=")[0].strip()
        if not {name, name.partition(".")[0]} & _OF_BASE:
            raise JobError(f"--set {override}: no part of a batch", hint="leave it out")
    first, *more = engine
    base = first if not more and first.endswith((".yaml", ".yml")) else "batch"
    source = engine if more else first
    tree: dict[str, Any] = {"engine": source} if base == "batch" else read_job_file(base)
    for part in ("output", "limits"):
        if not isinstance(tree.setdefault(part, {}), dict):
            raise JobError(f"{part}: should be a mapping", hint="write keys below it")
    left_out = {*Job.model_fields} - _OF_BASE  # each line of the batch file has its own
    output, limits = tree["output"], tree["limits"]
    tree = {part: value for part, value in tree.items() if part not in left_out} | {
        "input": {"path": requests, "columns": [CUSTOM_ID]},
        "prompt": BatchPrompts(),
        "output": {
            **{key: value for key, value in output.items() if f"output.{key}" in _OF_BASE},
            "path": run,
        },
        "limits": {"max_failed_rows": 1.0, "abort_failed_share": 1.0, **limits},
    }
    return load_job(tree, overrides=overrides, name=base)
