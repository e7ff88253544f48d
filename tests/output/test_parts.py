"""Parts are written whole, at one go, and none replaces another."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import batchrunner
from tests.conftest import (
    job_of,
    parts_of,
    results_of,
)

if TYPE_CHECKING:
    from tests.support.fake_sglang import Behaviour, FakeSGLang, Sent


@pytest.mark.parametrize("call", ["fsync", "link", "unlink"])
def test_parts_are_readable_at_any_moment(call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who reads the directory of parts while one is being written sees whole ones only, and no row twice."""
    run, real = tmp_path / "run", getattr(os, call)
    seen: list[tuple[set[int], list[int], set[int]]] = []

    def whole() -> set[int]:
        return {row for part in parts_of(run) for row in part["row"].to_pylist()}

    def look() -> None:
        if before := whole():
            seen.append((before, pq.read_table(run / "parts")["row"].to_pylist(), whole()))

    def look_and_do(*arguments: Any) -> None:
        look()
        real(*arguments)
        look()

    monkeypatch.setattr(os, call, look_and_do)
    batchrunner.run(job_of(tmp_path, rows=60, output={"part_rows": 20}))
    assert all(before <= set(read) <= after for before, read, after in seen)
    assert all(len(read) == len(set(read)) for _, read, _ in seen)
    assert {20, 40, 60} <= {len(read) for _, read, _ in seen}


def goes_on_beside(server: FakeSGLang, directory: Path, *, first: int, part_rows: int) -> dict[str, Any]:
    """Do 10 rows while a part of 4 rows, from `first` on, appears under the number of ours; return the job.

    It has been there all the time, perhaps, in a directory of which this machine saw an old listing.
    """
    job = job_of(directory, server, output={"part_rows": part_rows})
    batchrunner.run(job, overrides=["input.limit=4"])
    (part,) = (directory / "run" / "parts").iterdir()
    rows = [{**row, "row": first + place, "output": "theirs"} for place, row in enumerate(results_of(job))]
    theirs = pa.Table.from_pylist(rows, schema=pq.read_schema(part))
    part.unlink()

    def appears(_: Sent) -> Behaviour:
        if not part.exists():
            pq.write_table(theirs, part)
        return "answer"

    server.script = appears
    assert batchrunner.run(job).rows_ok == 10
    assert pq.read_table(part).equals(theirs)
    return job


@pytest.mark.parametrize(("first", "part_rows"), [(100, 4), (100, 10), (8, 10), (0, 10)])
def test_a_part_that_is_there_stays(tmp_path: Path, server: FakeSGLang, first: int, part_rows: int) -> None:
    """A part that appears under the number of ours is not replaced, and every row is there once."""
    job = goes_on_beside(server, tmp_path, first=first, part_rows=part_rows)
    assert [row["row"] for row in results_of(job)] == sorted({*range(10), *range(first, first + 4)})


@pytest.mark.parametrize("refusal", [errno.EPERM, errno.EOPNOTSUPP])
def test_a_file_system_without_links(
    tmp_path: Path, server: FakeSGLang, monkeypatch: pytest.MonkeyPatch, refusal: int
) -> None:
    """Where there are no hard links a run goes well all the same, and replaces no part that it sees."""

    def link(*_: Any, **__: Any) -> None:
        raise OSError(refusal, os.strerror(refusal))

    monkeypatch.setattr("os.link", link)
    job = goes_on_beside(server, tmp_path, first=10, part_rows=4)
    assert [row["row"] for row in results_of(job)] == list(range(14))


@pytest.mark.parametrize("call", ["fsync", "unlink"])
def test_a_part_that_is_written_again(
    tmp_path: Path, server: FakeSGLang, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """A part whose directory or journal the disk fails on is not doubled; it is synced before that goes."""
    parts, real, real_unlink = tmp_path / "run" / "parts", os.fsync, os.unlink
    made: list[str] = []

    def happens(what: str, path: str) -> None:
        if len(list(parts.glob("*.parquet"))) == 2 and (path == str(parts) or "journal-" in path):
            made.append(what)
            if what == call and made.count(what) == 1:
                raise OSError(errno.EIO, "Input/output error")

    def fsync(descriptor: int) -> None:
        happens("fsync", str(Path(f"/proc/self/fd/{descriptor}").readlink()))
        real(descriptor)

    def unlink(path: Any) -> None:
        happens("unlink", str(path))
        real_unlink(path)

    monkeypatch.setattr("os.fsync", fsync)
    monkeypatch.setattr("os.unlink", unlink)
    job = goes_on_beside(server, tmp_path, first=0, part_rows=10)
    assert [row["row"] for row in results_of(job)] == list(range(10))
    again = [call, "fsync", "unlink"] if call == "fsync" else ["fsync", call, "fsync", "unlink"]
    assert made[: len(again)] == again
