"""Jobs made from the arguments of a library call, or of `batchrun batch`."""

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
from batchrunner.job.spec import Job, LimitsSpec, OnLength, OnRepetition
from batchrunner.job.tasks import GENERATE, TASKS, TaskName

Prompt: TypeAlias = str | Mapping[str, Any] | Callable[..., Any]
"""A template, the `prompt` section of a job, or a function that returns the prompt of a row."""

_INDEX = "__index_level_"
"""Beginning of the name of a column in which pandas stores an index."""


class CallOptions(TypedDict, total=False):
    """Arguments that `generate` shares with `stream` and with a stage of Ray Data, and the task."""

    prompt: Prompt | None
    rollout: str | Callable[..., Any] | None
    parse: str | Callable[..., Any] | None
    sampling: Mapping[str, Any] | None
    answers: Sequence[str]
    accept: Mapping[str, Any] | None
    on_length: OnLength | None
    on_repetition: OnRepetition
    limits: Mapping[str, Any] | LimitsSpec | None
    task: TaskName
    task_options: Mapping[str, Any] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LibraryCall:
    """A library call without its rows; the fields are its arguments."""

    engine: EngineSpec
    prompt: Prompt | None = None
    """A string is a template for the user message. For a task without decoding it is a template for the whole
    prompt, or the name of a column. None uses the only text column."""
    columns: Sequence[str] = ()
    limits: Mapping[str, Any] | LimitsSpec | None = None
    task: TaskName = GENERATE
    task_options: Mapping[str, Any] | None = None
    """Job fields of a task without decoding, by the last parts of their names, such as `dtype`."""
    rollout: str | Callable[..., Any] | None = None
    parse: str | Callable[..., Any] | None = None
    sampling: Mapping[str, Any] | None = None
    answers: Sequence[str] = ()
    accept: Mapping[str, Any] | None = None
    on_length: OnLength | None = None
    on_repetition: OnRepetition = "keep"
    own_rows: bool = False
    """Whether the program passes the rows itself. Their files (images, audio, videos) may then lie
    anywhere."""

    def job(self, schema: pa.Schema, paths: Sequence[str], output: Path) -> Job:
        """Return the job that reads `paths` and writes to the directory `output`.

        `schema` has the columns of the input.

        Raises JobError, and InputError if the call has no prompt.
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
            "on_repetition": self.on_repetition,
            "output": {"path": str(output), "columns": self.answers},
            "engine": self.engine,
            "limits": self.limits or {},
        }
        fields = TASKS[self.task].takes if self.task in TASKS else ()
        places = {place.rpartition(".")[2]: place for place in fields}
        for name, value in (self.task_options or {}).items():
            if name not in places:
                raise JobError(
                    f"task_options: {name!r} does not go with task: {self.task}",
                    hint=f"options of this task: {', '.join(places) or 'none'}",
                )
            section, _, key = places[name].rpartition(".")
            (tree[section] if section else tree)[key] = value
        return load_job(tree, rollout=self.rollout)


def default_prompt(schema: pa.Schema) -> str:
    """Return the template of the only text column; raises InputError unless there is exactly one."""
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
    """Return a field of `prompt`; unless it names a folder, its files may lie anywhere."""
    expanded = media_part(name, part) if name in KIND_OF_FIELD else None
    return {"folder": "/", **expanded} if isinstance(expanded, Mapping) else part


_OF_BASE = {
    "engine", "limits", "order", "window", "dedupe", "bundle", "storage", "output.part_rows",
    "output.durable", "input.limit",
}  # fmt: skip
"""Job fields that a batch takes from a base job or `--set`."""
CUSTOM_ID = "custom_id"
"""Column that identifies the request of a result."""


def job_of_batch(
    requests: str, run: str, *, engine: Sequence[str], overrides: Sequence[str], allows_repeated: bool = False
) -> Job:
    """Return the job that sends the lines of the file `requests`; its run directory is `run`.

    `engine` is a model, the addresses of servers, or a job file, whose engine, limits, order and window are
    used. By default any number of lines may fail. `allows_repeated` tells whether several lines may have one
    custom_id. Raises JobError.
    """
    for override in overrides:
        name = override.partition("=")[0].strip()
        if not {name, name.partition(".")[0]} & _OF_BASE:
            raise JobError(f"--set {override}: a batch does not have this field", hint="leave it out")
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
        "prompt": BatchPrompts(allows_repeated=allows_repeated),
        "output": {
            **{key: value for key, value in output.items() if f"output.{key}" in _OF_BASE},
            "path": run,
        },
        "limits": {"max_failed_rows": 1.0, "abort_failed_share": 1.0, **limits},
    }
    return load_job(tree, overrides=overrides, name=base)
