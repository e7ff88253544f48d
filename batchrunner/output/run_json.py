"""The file run.json: a run's job, and a fingerprint by which a later attempt recognizes the run."""

import logging
import re
import secrets
import sys
from collections.abc import Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

import orjson

from batchrunner.core.errors import OutputError, ResumeError
from batchrunner.core.files import read_json
from batchrunner.job.fields import name_of
from batchrunner.job.spec import Job
from batchrunner.job.tasks import GENERATE, TASKS
from batchrunner.output.files import create_file, write_json, writing
from batchrunner.output.holder import OWNER
from batchrunner.output.run_dir import RUN_ID, RunDir

log = logging.getLogger(__name__)

FORMAT = 1
"""Version of the format of run.json."""
DISCARD = "--fresh (with --join: delete the directory)"
"""How to discard a run, for error messages."""
CODE = "code_of_functions"
"""Key in run.json for the digests of the code of Python functions.

A function whose code changed between starts has several digests, the newest last.
"""
_KEYS = {"format", "job", "fingerprint", "rows_total", "engine", "versions"}
_SECRET = re.compile(r"key|token(?!iz|s)|secret|password", re.IGNORECASE)
"""Matches engine arguments whose values may be secret, such as `admin-api-key` but not `tokenizer-path`."""
_LONGEST_VALUE = 60
"""Maximum length in characters of a value in an error message."""

_OF_INPUT = ("filter", "columns", "rename", "types", "delimiter", "encoding")


def fingerprint(job: Job, files: Sequence[Mapping[str, Any]], model: str) -> dict[str, Any]:
    """Return the properties of a job that must not change between attempts.

    `files` has path, rows, digest and size of each input file, in order. If `model` is empty, models are not
    compared.
    """
    # Fields that only this task has, such as `output.dimensions` of `embed`.
    fields = () if job.task == GENERATE else TASKS[job.task].takes
    return {
        "files": files,
        "limit": job.input.limit,
        "task": job.task,
        **{field: attrgetter(field)(job) for field in fields},
        **{f"input.{field}": getattr(job.input, field) for field in _OF_INPUT},
        "prompt": job.prompt.model_dump(mode="json", exclude_none=True),
        "sampling": job.sampling.model_dump(mode="json", exclude_none=True),
        "parse": None if job.parse is None else name_of(job.parse),
        "accept": _conditions(job),
        "model": model,
    }


def _conditions(job: Job) -> dict[str, Any]:
    """Return the settings that decide whether an answer is accepted. They must not change between starts.

    `accept.tries` may change, so it is not among them.
    """
    accept = job.accept
    conditions = {
        "json": accept.json_,
        "regex": accept.regex,
        "expression": accept.expression,
        "python": None if accept.python is None else name_of(accept.python),
        "on_length": job.on_length,
    }
    # The default is left out. Then runs that are older than this field can be resumed.
    if job.on_repetition != "auto":
        conditions["on_repetition"] = job.on_repetition
    return conditions


def check_same_run(old: Mapping[str, Any], new: Mapping[str, Any], where: str | Path) -> None:
    """Raise ResumeError, which names the difference, if two fingerprints belong to different runs.

    `old` is the fingerprint of the results at `where`, and `new` that of this attempt. Three differences are
    allowed: a higher `input.limit`, additional files after the old ones, and rows appended to the last old
    file. Models are compared only if `new` has one.
    """
    difference = _files_difference(old["files"], new["files"])
    old_limit = old["limit"] or sys.maxsize  # No limit counts as the highest possible limit.
    if difference is None and new["limit"] is not None and new["limit"] < old_limit:
        difference = f"input.limit was {old['limit'] or 'unset'} and is {new['limit']}: it can only grow"
    may_differ = {"files", "limit"} if new["model"] else {"files", "limit", "model"}
    for name in {**new, **old}:
        before, after = old.get(name), new.get(name)
        if difference is None and name not in may_differ and before != after:
            difference = describe_difference(name, before, after)
    if difference is not None:
        raise ResumeError(
            f"{where} holds another run: {difference}",
            hint=f"use another output.path, or discard the old run with {DISCARD}",
        )


def known_fields(fingerprint_of_run: Mapping[str, Any]) -> list[str] | None:
    """Return the columns of `prompt.fields` in the order that a run uses; None if it has none."""
    fields = fingerprint_of_run["prompt"].get("fields")
    return fields["columns"] if isinstance(fields, dict) else None


def _files_difference(old: list[dict[str, Any]], new: list[dict[str, Any]]) -> str | None:
    """Describe a change of the input files that changes rows of the run; None if there is none."""
    if len(new) < len(old):
        return f"the input has {len(new)} files now, but had {len(old)}"
    old_digests, new_digests = ({file["digest"] for file in files} for files in (old, new))
    for before, after in zip(old, new, strict=False):
        # `grown_from` is the digest of a file before rows were appended to it.
        if before["digest"] not in {after["digest"], after.get("grown_from")}:
            is_new = after["digest"] not in old_digests
            old_file_exists = before["digest"] in new_digests
            if is_new and old_file_exists:
                return (
                    f"the new input file {after['path']} sorts before {before['path']}: "
                    "rename it so that it comes last"
                )
            moved = "" if before["path"] == after["path"] else f" (it takes the place of {before['path']})"
            return f"the input file {after['path']} changed{moved}"
    return None


def describe_difference(name: str, before: Any, after: Any) -> str:
    """Describe how a section or field of a job differs; name the innermost field that differs."""
    if isinstance(before, dict) and isinstance(after, dict):
        key = next(key for key in sorted({*before, *after}) if before.get(key) != after.get(key))
        return describe_difference(f"{name}.{key}", before.get(key), after.get(key))
    return f"{name} was {_brief(before)} and is {_brief(after)}"


def _brief(value: Any) -> str:
    """Return a value as a text of at most _LONGEST_VALUE characters, for an error message."""
    text = "unset" if value is None else repr(value)
    return text if len(text) <= _LONGEST_VALUE else text[: _LONGEST_VALUE - 1] + "…"


def read_run_json(run_dir: RunDir) -> dict[str, Any] | None:
    """Return the content of run.json; None if it is missing. Raises ResumeError if it is damaged."""
    try:
        content = orjson.loads(run_dir.run_json.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as failure:
        raise ResumeError(f"{run_dir.run_json}: cannot be read: {failure.strerror or failure}") from None
    except orjson.JSONDecodeError:
        content = None
    if isinstance(content, dict) and content.keys() >= _KEYS and content["format"] == FORMAT:
        return content
    raise ResumeError(
        f"{run_dir.run_json}: is damaged, or not a run file of this version",
        hint=f"use another output.path, or discard the run with {DISCARD}",
    )


def require_run_json(run_dir: RunDir) -> dict[str, Any]:
    """Return the content of run.json. Raises OutputError if it is missing, ResumeError if it is damaged."""
    content = read_run_json(run_dir)
    if content is None and run_dir.is_being_discarded():
        raise OutputError(
            f"{run_dir.name}: --fresh was stopped while it discarded this run",
            hint="start the job again to discard the remaining files",
        )
    if content is None:
        raise OutputError(
            f"{run_dir.name}: not a run's output path (no run.json)",
            hint="give the job's output.path, without /parts",
        )
    return content


def write_run_json(run_dir: RunDir, job: Job, code_digests: Mapping[str, str], **values: Any) -> None:
    """Write run.json with the job and these values: `fingerprint`, `rows_total`, `engine` and `versions`.

    `code_digests` has the digest of each Python function's code in this attempt. Raises StorageError if the
    file cannot be written.
    """
    content = {
        "format": FORMAT,
        "job": without_secrets(job),
        CODE: code_versions(read_run_json(run_dir), code_digests),
        **values,
    }
    if run_dir.store.objects is not None:
        content[RUN_ID] = _run_id(run_dir, content)
    _write(run_dir, content)


def code_versions(content: Mapping[str, Any] | None, code_digests: Mapping[str, str]) -> dict[str, list[str]]:
    """Return the digests of each Python function's code, the newest last. Log a warning for changed code.

    `content` is the present content of run.json, and `code_digests` has the digests of this attempt.
    """
    versions: dict[str, list[str]] = {**(content or {}).get(CODE, {})}
    for where, digest in code_digests.items():
        before = versions.get(where, [])
        if before[-1:] != [digest]:
            versions[where] = [*before, digest]
        if before and before[-1] != digest:
            log.warning(
                "%s: the code has changed since the last start: finished rows keep the results of the old "
                "code. To compute them again, discard the run with %s",
                where, DISCARD,
            )  # fmt: skip
    return versions


def _write(run_dir: RunDir, content: Mapping[str, Any]) -> None:
    write_json(run_dir.run_json, content, run_dir.task, run_dir.store.replace)


def _run_id(run_dir: RunDir, content: Mapping[str, Any]) -> str:
    """Return the run ID, a random name. The worker that creates run.json chooses it for all workers."""
    content = {**content, RUN_ID: secrets.token_hex(8)}
    published = _newest(run_dir)
    # If several workers create run.json at once, only one succeeds. All use the ID that it chose.
    if published is None:
        with writing(run_dir.run_json):
            create_file(run_dir.run_json, orjson.dumps(content), run_dir.task, run_dir.store.add)
        published = read_run_json(run_dir) or content
    return str(published[RUN_ID])


def holds_run(directory: Path) -> bool:
    """Tell whether a directory is the output path of a run, even of one that has just begun."""
    return read_json(directory / "run.json").keys() >= _KEYS or any(directory.glob(f"tasks/*/{OWNER}"))


def raise_total(
    run_dir: RunDir, rows_total: int, new: Mapping[str, Any], code_digests: Mapping[str, str]
) -> None:
    """Increase the number of rows in run.json, so that `merge` and `status` expect the new rows at once.

    `new` is the fingerprint with the longer input. `code_digests` has the digest of each Python function's
    code in this attempt. A missing run.json is not created: the first attempt that sends rows does that.
    Raises StorageError if run.json cannot be written, ResumeError if it is damaged.
    """
    if (content := _newest(run_dir)) is not None:
        longer = {**content["fingerprint"], "files": new["files"], "limit": new["limit"]}
        versions = code_versions(content, code_digests)
        _write(run_dir, {**content, CODE: versions, "fingerprint": longer, "rows_total": rows_total})


def write_limits(run_dir: RunDir, job: Job) -> None:
    """Write the job's `limits` into run.json if they have changed.

    Raises StorageError if run.json cannot be written, ResumeError if it is damaged.
    """
    limits = without_secrets(job).get("limits", {})
    content = _newest(run_dir)
    if content is not None and content["job"].get("limits", {}) != limits:
        _write(run_dir, {**content, "job": {**content["job"], "limits": limits}})


def _newest(run_dir: RunDir) -> dict[str, Any] | None:
    """Return the present content of run.json, which another worker may have written.

    None if it is missing.
    """
    with writing(run_dir.run_json):
        run_dir.store.bring(run_dir.run_json, again=True)
    return read_run_json(run_dir)


def without_secrets(job: Job) -> dict[str, Any]:
    """Return the job for run.json, with `***` for values that may be secret and for all of `engine.env`."""
    spec = job.model_dump(mode="json", exclude_unset=True)
    for section in ("env", "args"):
        values = spec["engine"].get(section, {})
        masked = [name for name in values if section == "env" or _SECRET.search(name)]
        values.update(dict.fromkeys(masked, "***"))
    return spec
