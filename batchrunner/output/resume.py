"""What is durable: the parts say which rows are done, run.json says of which job they are."""

from __future__ import annotations

import contextlib
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import orjson
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyroaring import BitMap64

from batchrunner.core.errors import OutputError, ResumeError
from batchrunner.core.row_set import from_column
from batchrunner.output.columns import arrow_array
from batchrunner.output.counts import COUNTED_COLUMNS, RowCounts
from batchrunner.output.journal import read_journal
from batchrunner.output.parts import open_part
from batchrunner.output.run_dir import whole_file, write_json, writing

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from batchrunner.core.types import InputFile
    from batchrunner.job.spec import Job
    from batchrunner.output.run_dir import RunDir

FORMAT = 1
"""Version of run.json."""
DISCARD = "--fresh (with --join or --shard: delete the directory)"
"""How one begins anew."""
_SECRET = re.compile(r"key|token(?!iz|s)|secret|password", re.IGNORECASE)
"""An argument of this name is not written down: `admin-api-key`, say, and not `tokenizer-path`."""
_KEYS = {"format", "job", "fingerprint", "rows_total", "engine", "versions"}
READERS = 4
"""Parts that are read at once: on a network file system most of the time is waiting. From memory one is as
fast, and eight are slower: they take the interpreter from each other."""


@dataclass(slots=True)
class DoneRows:
    """The rows that the parts hold."""

    rows: BitMap64 = field(default_factory=BitMap64)
    counts: RowCounts = field(default_factory=RowCounts)

    @property
    def ok(self) -> int:
        """Rows with an answer; a row that two parts hold counts once."""
        return len(self.rows) - self.counts.failed

    def add(self, results: pa.Table, *, without_failed: bool) -> None:
        """Count the rows of a table that has COUNTED_COLUMNS."""
        if without_failed:
            results = results.filter(pc.is_null(results.column("error")))
        self.rows |= from_column(results.column("row"))
        self.counts.add_table(results)

    def include(self, other: DoneRows) -> None:
        """Add the rows and counts of other parts."""
        self.rows |= other.rows
        self.counts.include(other.counts)


def read_done(run_dir: RunDir, *, without_failed: bool = False) -> DoneRows:
    """Read what this task has done from its parts and journals; `without_failed`, failed rows do not count.

    Raises ResumeError where a part is damaged.
    """
    done = DoneRows()
    # before the parts are listed: a journal may become one meanwhile
    journals = _read_journals(run_dir)
    parts = run_dir.own_parts()
    with ThreadPoolExecutor(READERS) as pool:
        for found in pool.map(partial(_read_part, without_failed=without_failed), parts):
            done.include(found)
    for table in journals:
        new = [at for at, row in enumerate(table.column("row").to_pylist()) if row not in done.rows]
        done.add(table.take(arrow_array(new, pa.int64())), without_failed=without_failed)
    return done


def _read_part(path: Path, *, without_failed: bool) -> DoneRows:
    done = DoneRows()
    # one that was discarded or moved away since it was listed: its rows are not done
    with contextlib.suppress(FileNotFoundError), open_part(path) as part:
        done.add(part.read(COUNTED_COLUMNS, use_threads=False), without_failed=without_failed)
    return done


def done_by_all(run_dir: RunDir) -> DoneRows:
    """Return what all tasks of the run have done together."""
    together = DoneRows()
    for task in run_dir.all_tasks():
        together.include(read_done(task))
    return together


def rows_of_others(run_dir: RunDir) -> BitMap64:
    """Return what the run's other tasks have done: shares move when the input grows, and rows must not."""
    rows = BitMap64()
    for task in run_dir.all_tasks():
        if task.task != run_dir.task:
            rows |= read_done(task).rows
    return rows


def _read_journals(run_dir: RunDir) -> list[pa.Table]:
    """Return what is counted of the rows in the journals, and no more of them: a copy."""
    found: list[pa.Table] = []
    for path in run_dir.journals():
        with contextlib.suppress(FileNotFoundError):
            found += [table.select(COUNTED_COLUMNS).sort_by("row") for table in read_journal(path)]
    return found


def schema_of_results(run_dir: RunDir) -> pa.Schema | None:
    """Return the schema of a part, or of a journal that is to be one; None where there is neither."""
    with contextlib.suppress(FileNotFoundError):  # it became a part, or was moved away, since it was listed
        for path in run_dir.all_parts():
            with open_part(path) as part:
                return part.schema_arrow
        for path in (path for task in run_dir.all_tasks() for path in task.journals()):
            for table in read_journal(path):
                return table.schema
    return None


def drop_failed(run_dir: RunDir) -> None:
    """Rewrite this task's parts without their failed rows; killed half-way, the old parts stand."""
    for path in run_dir.own_parts():
        with open_part(path) as part:
            errors = part.read(["error"]).column("error")
            if errors.null_count == len(errors):
                continue
            kept = part.read().filter(pc.is_null(errors))
        with writing(path), whole_file(path) as temporary:
            pq.write_table(kept, temporary, compression="zstd")


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What makes two starts the same run."""

    files: list[dict[str, Any]]
    """Path, rows and digest of each input file, in order."""
    filter: str | None
    limit: int | None
    columns: list[str]
    rename: dict[str, str]
    prompt: dict[str, Any]
    sampling: dict[str, Any]
    model: str

    def as_dict(self) -> dict[str, Any]:
        """Return it as run.json has it."""
        return asdict(self)


def fingerprint(job: Job, files: Sequence[InputFile], model: str) -> Fingerprint:
    """Take the fingerprint of a start."""
    return Fingerprint(
        files=[{"path": file.path, "rows": file.rows, "digest": file.digest} for file in files],
        filter=job.input.filter,
        limit=job.input.limit,
        columns=job.input.columns,
        rename=job.input.rename,
        prompt=job.prompt.model_dump(mode="json", exclude_none=True),
        sampling=job.sampling.model_dump(mode="json", exclude_none=True),
        model=model,
    )


def check_same_run(old: dict[str, Any], new: Fingerprint, where: Path, *, model_known: bool = True) -> None:
    """Raise ResumeError, naming what differs, where `where` holds the results of another run.

    Allowed are a larger limit and files added after the known ones.
    """
    now = new.as_dict()
    difference = _files_difference(old["files"], now["files"]) or _limit_difference(
        old["limit"], now["limit"]
    )
    for name in ("filter", "columns", "rename", "prompt", "sampling", *(["model"] if model_known else [])):
        if difference is None and old[name] != now[name]:
            difference = _difference(name, old[name], now[name])
    if difference is not None:
        raise ResumeError(
            f"{where} holds another run: {difference}; take another output.path, "
            f"or discard what is there with {DISCARD}"
        )


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
                return f"{name}.{key} was {_brief(old.get(key))} and is {_brief(new.get(key))}"
    label = f"input.{name}" if name in {"filter", "columns", "rename"} else name
    return f"{label} was {_brief(old)} and is {_brief(new)}"


def _brief(value: Any) -> str:
    text = "unset" if value is None else repr(value)
    limit = 60
    return text if len(text) <= limit else text[: limit - 1] + "…"


def facts_of(run_dir: RunDir) -> dict[str, Any]:
    """Return what run.json says; raises OutputError where there is none, ResumeError as `read_run_json`."""
    facts = read_run_json(run_dir)
    if facts is None:
        raise OutputError(f"{run_dir.path}: not a run's output path (no run.json)")
    return facts


def read_run_json(run_dir: RunDir) -> dict[str, Any] | None:
    """Return what earlier starts wrote of the run, or None; raises ResumeError where it cannot be read."""
    try:
        content = run_dir.run_json.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    with contextlib.suppress(orjson.JSONDecodeError):
        found = orjson.loads(content)
        if isinstance(found, dict) and found.keys() >= _KEYS and found["format"] == FORMAT:
            return found
    raise ResumeError(
        f"{run_dir.run_json}: not a run file of this version: take another output.path, or {DISCARD}"
    )


def write_run_json(run_dir: RunDir, job: Job, **facts: Any) -> None:
    """Write what later starts are to find; raises StorageError."""
    content = {"format": FORMAT, "job": without_secrets(job), **facts}
    write_json(run_dir.run_json, content, writer=run_dir.task)


def without_secrets(job: Job) -> dict[str, Any]:
    """Return the job as run.json keeps it: what `engine.env` holds (tokens, often) is nobody's business."""
    spec = job.model_dump(mode="json", exclude_unset=True)
    for section in ("env", "args", "gateway_args"):
        values = spec["engine"].get(section, {})
        masked = [name for name in values if section == "env" or _SECRET.search(name)]
        values.update(dict.fromkeys(masked, "***"))
    return spec
