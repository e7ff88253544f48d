"""Makes a job from the arguments of a library call, or of `batchrun batch`."""

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
"""A template, the section `prompt` of a job, or a function that returns the prompt of a row."""

_INDEX = "__index_level_"
"""Prefix of the columns in which pandas stores the index of a data frame."""


class CallOptions(TypedDict, total=False):
    """Keyword arguments that describe a job in `generate`, `stream` and a stage of Ray Data."""

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
    """Arguments of a library call, such as `generate`, without its rows."""

    engine: EngineSpec
    prompt: Prompt | None = None
    """Prompt of a row, see `Prompt`.

    A string is a template of the user message. For a task without decoding, it is a template of the whole
    prompt, or the name of a column. None means the only text column.
    """
    columns: Sequence[str] = ()
    """Columns of the rows that are copied into the results."""
    limits: Mapping[str, Any] | LimitsSpec | None = None
    task: TaskName = GENERATE
    task_options: Mapping[str, Any] | None = None
    """Options of the task, such as `dtype` for the job field `output.dtype`."""
    rollout: str | Callable[..., Any] | None = None
    parse: str | Callable[..., Any] | None = None
    sampling: Mapping[str, Any] | None = None
    answers: Sequence[str] = ()
    accept: Mapping[str, Any] | None = None
    on_length: OnLength | None = None
    on_repetition: OnRepetition = "auto"
    own_rows: bool = False
    """Whether the program passes the rows themselves instead of paths of files.

    The images, audio and videos of such rows may be in any folder.
    """

    def job(self, schema: pa.Schema, paths: Sequence[str], output: Path) -> Job:
        """Return the job that reads the files `paths` and writes to the directory `output`.

        `schema` has the columns of the input. Raises JobError for invalid arguments, and InputError if there
        is no prompt and the input does not have exactly one text column.
        """
        prompt = self.prompt
        if prompt is None:
            prompt = default_prompt(schema) if self.rollout is None else {}
        if isinstance(prompt, str):
            prompt = {"user" if self.task == GENERATE else "text": prompt}
        elif not isinstance(prompt, Mapping):
            prompt = {"python": prompt}
        if self.own_rows:  # The rows come from the program, so their files may be in any folder.
            prompt = {name: _anywhere(name, value) for name, value in prompt.items()}
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
        task_fields = TASKS[self.task].takes if self.task in TASKS else ()
        # An option has the last part of a field's name: `softmax` sets `output.softmax`.
        fields_by_option = {field.rpartition(".")[2]: field for field in task_fields}
        for option, value in (self.task_options or {}).items():
            if option not in fields_by_option:
                raise JobError(
                    f"task_options: {option!r} is not an option of task: {self.task}",
                    hint=f"options of this task: {', '.join(fields_by_option) or 'none'}",
                )
            section, _, key = fields_by_option[option].rpartition(".")
            mapping = tree[section] if section else tree
            mapping[key] = value
        return load_job(tree, rollout=self.rollout)


def default_prompt(schema: pa.Schema) -> str:
    """Return the template that prints the only text column; raise InputError unless there is exactly one."""
    names = [column.name for column in schema if is_text(column.type) and not column.name.startswith(_INDEX)]
    if len(names) != 1:
        columns = ", ".join(f"{column.name} ({type_name(column.type)})" for column in schema)
        raise InputError(
            "prompt is missing",
            hint=f"only rows with exactly 1 text column need none, but these have {len(names)} text columns "
            f"(columns: {columns or 'none'})",
        )
    # A column's name may not be a valid variable in Jinja2, hence `{{ row["NAME"] }}`.
    return f"{{{{ row[{json.dumps(names[0], ensure_ascii=False)}] }}}}"


def _anywhere(name: str, value: Any) -> Any:
    """Return the value of a field of `prompt`. For a field such as `images`, allow all folders by default."""
    expanded = media_part(name, value) if name in KIND_OF_FIELD else None
    return {"folder": "/", **expanded} if isinstance(expanded, Mapping) else value


_OF_BASE = {
    "engine", "limits", "order", "window", "dedupe", "bundle", "storage", "output.part_rows",
    "output.durable", "input.limit",
}  # fmt: skip
"""Job fields that `batchrun batch` takes from a base job or from `--set`."""
CUSTOM_ID = "custom_id"
"""Column of a batch file and its results that identifies a request."""


def job_of_batch(
    requests: str,
    run: str,
    *,
    engine: Sequence[str],
    overrides: Sequence[str],
    allows_repeated: bool = False,
    endpoint: str | None = None,
) -> Job:
    """Return the job that sends the requests in the batch file `requests`; its run directory is `run`.

    `engine` is a model, the addresses of servers, or a base job: a job file of which only the fields in
    _OF_BASE are used. By default, any number of requests may fail. With `allows_repeated`, several lines may
    have the same custom_id. With `endpoint`, each line must name this endpoint. Raises JobError if the base
    job or an override is invalid.
    """
    for override in overrides:
        name = override.partition("=")[0].strip()
        # `name` may be a field in _OF_BASE or a key below it, such as engine.args.
        if not {name, name.partition(".")[0]} & _OF_BASE:
            raise JobError(f"--set {override}: a batch does not have this field", hint="leave it out")
    is_base_job = len(engine) == 1 and engine[0].endswith((".yaml", ".yml"))
    source = engine[0] if len(engine) == 1 else engine
    tree: dict[str, Any] = read_job_file(engine[0]) if is_base_job else {"engine": source}
    for section in ("output", "limits"):
        if not isinstance(tree.setdefault(section, {}), dict):
            raise JobError(f"{section}: should be a mapping", hint="write keys below it")
    # The requests themselves replace the other fields. Unknown keys are kept, so that `load_job` refuses
    # them.
    dropped_fields = {*Job.model_fields} - _OF_BASE
    output, limits = tree["output"], tree["limits"]
    tree = {field: value for field, value in tree.items() if field not in dropped_fields} | {
        "input": {"path": requests, "columns": [CUSTOM_ID]},
        "prompt": BatchPrompts(allows_repeated=allows_repeated, endpoint=endpoint),
        "output": {
            **{key: value for key, value in output.items() if f"output.{key}" in _OF_BASE},
            "path": run,
        },
        "limits": {"max_failed_rows": 1.0, "abort_failed_share": 1.0, **limits},
    }
    return load_job(tree, overrides=overrides, name=engine[0] if is_base_job else "batch")
