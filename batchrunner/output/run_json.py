"""run.json: the job of a run, and the fingerprint by which a later attempt recognises the same run."""

import contextlib
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from operator import attrgetter
from pathlib import Path
from typing import Any

import orjson

from batchrunner.core.errors import OutputError, ResumeError
from batchrunner.core.files import read_regular
from batchrunner.core.types import InputFile
from batchrunner.job.fields import name_of
from batchrunner.job.spec import Job
from batchrunner.job.tasks import GENERATE, TASKS
from batchrunner.output.files import create_file, write_json, writing
from batchrunner.output.run_dir import OWNER, TUNE, RunDir
from batchrunner.output.run_facts import RunFacts, problem_in

MOST_DEPTH = 3
"""Levels of directories below output.path that are searched for other runs."""
FORMAT = 1
"""Version of the format of run.json."""
DISCARD = "--fresh (with --join: delete the directory)"
"""What a user types to discard a run, for error messages."""
RUN_ID = "run_id"
"""Key in run.json of a run in an object store: a random name, by which a working copy is recognised."""
_MISSING: dict[str, Any] = {
    "types": {}, "explode": False, "parse": None, "check": {}, "task": GENERATE, "task_fields": {},
}  # fmt: skip
"""Parts of a fingerprint that may be missing, and what they then are."""
_SECRET = re.compile(r"key|token(?!iz|s)|secret|password", re.IGNORECASE)
"""Names of engine arguments whose values are masked: `admin-api-key`, but not `tokenizer-path`."""


def fingerprint(job: Job, files: Sequence[InputFile], model: str) -> dict[str, Any]:
    """Return what two attempts must have in common to belong to the same run.

    `files` are those of the input, in its order; `model` is "" where it is not to be compared.
    """
    parsing = job.parsing and {"parse": job.parsing.model_dump(mode="json", exclude_unset=True)}
    return {
        "files": [{"path": file.path, "rows": file.rows, "digest": file.digest} for file in files],
        "filter": job.input.filter,
        "limit": job.input.limit,
        "columns": job.input.columns,
        "rename": job.input.rename,
        "types": job.input.types,
        "prompt": job.prompt.model_dump(mode="json", exclude_none=True),
        "sampling": job.sampling.model_dump(mode="json", exclude_none=True),
        "model": model,
        **({"explode": True} if job.output.explode else {}),
        **(parsing or {}),  # left out where there is none, as in runs of earlier versions
        **({"check": _conditions(job)} if job.has_check or job.on_length else {}),
        **({"task": job.task, "task_fields": _task_fields(job)} if job.task != GENERATE else {}),
    }


def _task_fields(job: Job) -> dict[str, Any]:
    """Return the values of the job's fields that its task takes, by their names in the job."""
    values = {field: attrgetter(field)(job) for field in TASKS[job.task].takes}
    return {field: value for field, value in values.items() if value is not None}


def _conditions(job: Job) -> dict[str, Any]:
    """Return what makes an answer good; how often it is asked for may change between starts."""
    check = job.check
    given = {
        "json": check.json_,
        "regex": check.regex,
        "expression": check.expression,
        "python": None if check.python is None else name_of(check.python),
        "on_length": job.on_length,
    }
    return {name: value for name, value in given.items() if value is not None}


def check_same_run(
    old: Mapping[str, Any], new: Mapping[str, Any], where: str | Path, *, model_known: bool = True
) -> None:
    """Raise ResumeError, naming the difference, where the fingerprints belong to different runs.

    `old` is that of the results at `where`. The limit may grow, and files may be added after the known ones.
    Without `model_known` the models are not compared.
    """
    difference = _files_difference(old["files"], new["files"])
    difference = difference or _limit_difference(old["limit"], new["limit"])
    for name in (
        "task",
        "task_fields",
        "filter",
        "columns",
        "rename",
        "types",
        "prompt",
        "sampling",
        "explode",
        "parse",
        "check",
        *(["model"] if model_known else []),
    ):
        missing = _MISSING.get(name)  # earlier versions did not write it
        before = old.get(name, missing) if name in _MISSING else old[name]
        if difference is None and before != new.get(name, missing):
            difference = _difference(name, before, new.get(name, missing))
    if difference is not None:
        raise ResumeError(
            f"{where} holds another run: {difference}",
            hint=f"take another output.path, or discard what is there with {DISCARD}",
            mark=";",
        )


def known_fields(found: Mapping[str, Any]) -> list[str] | None:
    """Return the columns of `prompt.fields` in the order of a run, by its fingerprint; None without any."""
    fields = found["prompt"].get("fields")
    columns = fields.get("columns") if isinstance(fields, dict) else None
    return columns if isinstance(columns, list) and all(isinstance(name, str) for name in columns) else None


def _files_difference(old: list[dict[str, Any]], new: list[dict[str, Any]]) -> str | None:
    if len(new) < len(old):
        return f"the input had {len(old)} files and has {len(new)}"
    known = {file["digest"] for file in old}
    for before, after in zip(old, new, strict=False):
        if before["digest"] != after["digest"]:
            if after["digest"] not in known and before["digest"] in {file["digest"] for file in new}:
                return (
                    f"the new input file {after['path']} sorts before {before['path']}: name it to come last"
                )
            moved = "" if before["path"] == after["path"] else f" (it stands where {before['path']} stood)"
            return f"the input file {after['path']} changed{moved}"
    return None


def _limit_difference(old: int | None, new: int | None) -> str | None:
    if new is not None and (old is None or new < old):
        return f"input.limit was {old or 'unset'} and is {new}: it can only grow"
    return None


def _difference(name: str, old: Any, new: Any) -> str:
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted({*old, *new}):
            if old.get(key) != new.get(key):
                return f"{_label(name, key)} was {_brief(old.get(key))} and is {_brief(new.get(key))}"
    return f"{_label(name)} was {_brief(old)} and is {_brief(new)}"


def _label(name: str, key: str | None = None) -> str:
    if name == "task_fields" and key is not None:
        return key
    label = {"explode": "output.explode"}.get(
        name, f"input.{name}" if name in {"filter", "columns", "rename", "types"} else name
    )
    return label if key is None else f"{label}.{key}"


def _brief(value: Any) -> str:
    text = "unset" if value is None else repr(value)
    limit = 60
    return text if len(text) <= limit else text[: limit - 1] + "…"


def read_run_json(run_dir: RunDir) -> dict[str, Any] | None:
    """Return the content of run.json, None where there is no file; raises ResumeError for other content."""
    try:
        content = read_regular(run_dir.run_json)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as failure:
        raise ResumeError(f"{run_dir.run_json}: cannot be read: {failure.strerror or failure}") from None
    found = None
    try:
        found = orjson.loads(content)
        problem = problem_in(found)
    except orjson.JSONDecodeError as failure:
        problem = f"not JSON: {failure}"
    if problem is None and isinstance(found, dict):
        return found
    raise ResumeError(
        f"{run_dir.run_json}: not a run file of this version: {problem}",
        hint=f"take another output.path, or {DISCARD}",
    )


def require_run_json(run_dir: RunDir) -> dict[str, Any]:
    """Return the content of run.json; raises OutputError where there is no file, else as `read_run_json`."""
    found = read_run_json(run_dir)
    if found is None:
        raise OutputError(
            f"{run_dir.name}: not a run's output path (no run.json)",
            hint="give the job's output.path, without /parts",
            mark=";",
        )
    return found


def write_run_json(run_dir: RunDir, job: Job, **values: Any) -> None:
    """Write run.json with the job and these values, whose names are the other fields of `RunFacts`.

    Raises StorageError.
    """
    content = {"format": FORMAT, "job": without_secrets(job), **values}
    if run_dir.store.objects is not None:
        content[RUN_ID] = _run_id(run_dir, content)
    write_json(run_dir.run_json, content, run_dir.task, run_dir.store.replace)


def _run_id(run_dir: RunDir, content: Mapping[str, Any]) -> str:
    """Return the name of the run, which is that of the task that wrote run.json first."""
    new = {**content, RUN_ID: secrets.token_hex(8)}
    with writing(run_dir.run_json):
        run_dir.store.bring(run_dir.run_json, again=True)
        earlier = read_run_json(run_dir)
        if earlier is None:
            create_file(run_dir.run_json, orjson.dumps(new), run_dir.task, run_dir.store.add)
            earlier = read_run_json(run_dir)
    return str((earlier or new).get(RUN_ID) or new[RUN_ID])


def holds_run(directory: Path) -> bool:
    """Tell whether a directory is the output path of a run, which may have just begun."""
    try:
        found = orjson.loads(read_regular(directory / "run.json"))
        if isinstance(found, dict) and found.keys() >= RunFacts.model_fields.keys():
            return True
    except (OSError, orjson.JSONDecodeError):
        pass
    with contextlib.suppress(OSError):
        return any(directory.glob(f"tasks/*/{OWNER}"))
    return False


def refuse_nesting(run_dir: RunDir) -> None:
    """Raise OutputError where the run would lie in another one, or another one in it.

    One would read, count or delete files of the other. Trials of `tune` lie in RUN/tune on purpose.
    """
    path = run_dir.path.resolve()
    chain = (path, *path.parents)
    for inner, outer in pairwise(chain):
        if inner.name == TUNE:
            break
        if holds_run(outer):
            raise OutputError(
                f"output.path {run_dir.path}: lies in the output path of another run, {outer}",
                hint="give a directory outside of it",
            )
    for inner in _runs_below(path):
        if TUNE not in inner.relative_to(path).parts:
            raise OutputError(
                f"output.path {run_dir.path}: holds the output path of another run, {inner}",
                hint="give another directory",
            )


def _runs_below(path: Path) -> Iterator[Path]:
    """Yield the runs in a directory, some levels deep."""
    for depth in range(1, MOST_DEPTH + 1):
        below = "*/" * depth
        found = {file.parent for file in path.glob(f"{below}run.json")}
        found |= {file.parents[2] for file in path.glob(f"{below}tasks/*/{OWNER}")}
        yield from filter(holds_run, sorted(found))


def raise_total(run_dir: RunDir, rows_total: int, new: Mapping[str, Any]) -> None:
    """Write into run.json that the run has more rows now; `new` is the fingerprint of its input.

    So `merge` and `status` know them before the first of them is done. Without a run.json nothing is written:
    the first attempt that sends rows writes it. Raises StorageError or ResumeError.
    """
    if (old := _newest(run_dir)) is not None:
        grown = {**old["fingerprint"], "files": new["files"], "limit": new["limit"]}
        content = {**old, "fingerprint": grown, "rows_total": rows_total}
        write_json(run_dir.run_json, content, run_dir.task, run_dir.store.replace)


def write_limits(run_dir: RunDir, job: Job) -> None:
    """Write a job's limits, by which `merge` judges the run, into run.json; raises as `raise_total`."""
    limits = without_secrets(job).get("limits", {})
    old = _newest(run_dir)
    if old is not None and old["job"].get("limits", {}) != limits:
        content = {**old, "job": {**old["job"], "limits": limits}}
        write_json(run_dir.run_json, content, run_dir.task, run_dir.store.replace)


def _newest(run_dir: RunDir) -> dict[str, Any] | None:
    with writing(run_dir.run_json):
        run_dir.store.bring(run_dir.run_json, again=True)
    return read_run_json(run_dir)


def may_be_secret(name: str) -> bool:
    """Tell whether the value of an engine's argument of this name may be secret."""
    return _SECRET.search(name) is not None


def without_secrets(job: Job) -> dict[str, Any]:
    """Return the job as run.json keeps it: values that may be secret (all of `engine.env`) become ***."""
    spec = job.model_dump(mode="json", exclude_unset=True)
    for section in ("env", "args", "gateway_args"):
        values = spec["engine"].get(section, {})
        masked = [name for name in values if section == "env" or may_be_secret(name)]
        values.update(dict.fromkeys(masked, "***"))
    return spec
