"""Parts and journals are complete at any moment, never replaced, and counted up to damage."""

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

import batchrunner
from batchrunner.core.timing import TIMING
from batchrunner.core.types import Completion, Outcome, RowRef
from batchrunner.output.counts import count, with_counts
from batchrunner.output.parts import Journal, read_journal
from tests.conftest import (
    batchrun,
    examples,
    job_of,
    parts_of,
    report_of,
    results_of,
    rows_in,
    write_job,
)
from tests.support.fake_sglang import Behaviour, FakeSGLang, Sent
from tests.support.runs import rows_once, status_of


@pytest.mark.parametrize("call", ["fsync", "link", "unlink"])
def test_parts_are_readable_at_any_moment(call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader of the parts during a run sees only complete parts, and no row twice."""
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
    """A part that another process writes under our number is kept, and no row is lost or doubled."""
    job = goes_on_beside(server, tmp_path, first=first, part_rows=part_rows)
    assert rows_in(job) == sorted({*range(10), *range(first, first + 4)})


@pytest.mark.parametrize("refusal", [errno.EPERM, errno.EOPNOTSUPP])
def test_a_file_system_without_links(
    tmp_path: Path, server: FakeSGLang, monkeypatch: pytest.MonkeyPatch, refusal: int
) -> None:
    """A file system without hard links works too: no existing part is replaced."""

    def link(*_: Any, **__: Any) -> None:
        raise OSError(refusal, os.strerror(refusal))

    monkeypatch.setattr("os.link", link)
    job = goes_on_beside(server, tmp_path, first=10, part_rows=4)
    assert rows_in(job) == list(range(14))


@pytest.mark.parametrize("call", ["fsync", "unlink"])
def test_a_part_that_is_written_again(
    tmp_path: Path, server: FakeSGLang, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """A disk error after the write of a part doubles no row; the journal goes only after the sync."""
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
    assert rows_in(job) == list(range(10))
    again = [call, "fsync", "unlink"] if call == "fsync" else ["fsync", call, "fsync", "unlink"]
    assert made[: len(again)] == again


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A finished run of 40 rows, which tests copy."""
    job = job_of(tmp_path_factory.mktemp("finished"), rows=40, input={"columns": ["id"]})
    batchrunner.run(job)
    return job


@examples(20)
@given(data=st.data())
def test_a_torn_journal(data: st.DataObject, finished: dict[str, Any]) -> None:
    """Wherever a crash or bit rot damages a journal, the rows before are kept and the others repeated."""
    with scratch_copy(finished) as (job, run):
        (part,) = (run / "parts").glob("*.parquet")
        table = pq.read_table(part)
        part.unlink()
        path = run / "tasks" / "main" / "journal-000000"
        write_journal(path, table.schema, [table.to_pylist()], 10)
        whole = path.read_bytes()
        at = data.draw(st.integers(0, len(whole)))
        tail = data.draw(st.binary(max_size=40) | st.integers(1, 99).map(bytes))  # zeros: after a power cut
        path.write_bytes(whole[:at] + tail)
        kept = sum(table.num_rows for table in read_journal(path))
        assert kept % 10 == 0
        assert kept >= 40 * at // len(whole) - 20
        report = batchrunner.run(job)
        assert report.rows_resumed == kept
        rows_once(job, 40)


@examples(20)
@given(
    rows=st.permutations(range(40)),
    ends=st.sets(st.integers(0, 40), max_size=5),
    failed=st.sets(st.integers(0, 39)),
    group_rows=st.integers(1, 15),
    in_journal=st.booleans(),
    journal_number=st.integers(0, 5),
    twice=st.sets(st.integers(0, 39)),
    retry_failed=st.booleans(),
)
def test_what_is_there_is_counted(
    rows: list[int],
    ends: set[int],
    failed: set[int],
    group_rows: int,
    *,
    in_journal: bool,
    journal_number: int,
    twice: set[int],
    retry_failed: bool,
    finished: dict[str, Any],
) -> None:
    """Status and the next start count rows as a reader does, wherever they lie in parts and journals.

    A journal may have the number of a part, and then frames of that part or of later ones, or none of them.
    """
    with scratch_copy(finished) as (job, run):
        (part,) = (run / "parts").glob("*.parquet")
        table = pq.read_table(part)
        found = [ended(row, failed=row["row"] in failed) for row in table.to_pylist()]
        part.unlink()
        cuts = sorted(ends)
        pieces = [rows[start:end] for start, end in zip([0, *cuts], cuts, strict=False)]
        for number, piece in enumerate(pieces):
            written = [found[row] for row in piece]
            if in_journal and number == len(pieces) - 1:
                became = min(journal_number, number)
                also = [found[row] for piece in pieces[became:number] for row in piece if row in twice]
                path = run / "tasks" / "main" / f"journal-{became:06d}"
                write_journal(path, table.schema, [also, written], group_rows)
            else:
                path = run / "parts" / f"part-main-{number:06d}.parquet"
                pq.write_table(counted(written, table.schema), path, row_group_size=group_rows)
        there = [found[row] for piece in pieces for row in piece]
        bad = [row for row in there if row["error"]]
        tokens = sum(row["completion_tokens"] or 0 for row in there)
        state = status_of(run)
        assert (state["rows_on_disk"], state["rows_failed"], state["output_tokens"]) == (
            len(there),
            len(bad),
            tokens,
        )
        with mock.patch("batchrunner.output.counts.MOST_GROUPS", 3):
            report = batchrunner.run(job, retry_failed=retry_failed)
        kept = 0 if retry_failed else len(bad)
        assert (report.rows_resumed, report.rows_failed) == (len(there) - len(bad) + kept, kept)
        assert report.output_tokens_all_starts - report.output_tokens == tokens
        assert sum(group["rows"] for group in report.failures) == kept
        assert len(report.failures) <= 4  # and one for the others
        assert rows_in(job) == list(range(40))


def ended(row: dict[str, Any], *, failed: bool) -> dict[str, Any]:
    """Return a row unchanged, or as a failed row with its own reason."""
    reason = {"output": None, "completion_tokens": None, "error": "no" + "o" * row["row"]}
    return {**row, **reason} if failed else row


def counted(rows: list[dict[str, Any]], schema: pa.Schema) -> pa.Table:
    """Return rows as a table whose metadata has their counts."""
    outcomes = []
    for row in rows:
        answer = Completion([row["output"]], ["stop"], [row["completion_tokens"]], None, None)
        ref = RowRef(row["row"], None, 0)
        outcomes.append(Outcome(ref, None if row["error"] else answer, row["error"], 0.1, 1))
    return with_counts(pa.Table.from_pylist(rows, schema=schema), count(outcomes))


def write_journal(path: Path, schema: pa.Schema, pieces: list[list[dict[str, Any]]], frame_rows: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    journal = Journal(path)
    for rows in pieces:
        for first in range(0, len(rows), frame_rows):
            journal.append(counted(rows[first : first + frame_rows], schema))
    journal.close()


@contextlib.contextmanager
def scratch_copy(job: dict[str, Any]) -> Iterator[tuple[dict[str, Any], Path]]:
    source = Path(job["output"]["path"])
    run = source.with_name("copy")
    shutil.rmtree(run, ignore_errors=True)
    shutil.copytree(source, run)
    yield {**job, "output": {**job["output"], "path": str(run)}}, run
    shutil.rmtree(run)


def test_a_disk_that_is_full_for_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a full disk the run pauses with a warning; it continues when there is room, and loses nothing."""
    refused: list[int] = []
    real = os.pwrite

    def pwrite(descriptor: int, content: bytes, offset: int) -> int:
        if len(content) > 1000 and len(refused) < 3:  # not the line that says who writes
            refused.append(len(content))
            real(descriptor, content[: len(content) // 2], offset)  # some of it still fits
            raise OSError(28, "No space left on device")
        return real(descriptor, content, offset)

    monkeypatch.setattr("os.pwrite", pwrite)
    engine = {"kind": "simulated", "step_s": 0.01}
    job = job_of(tmp_path, engine, rows=500, output={"durable": 0.05})
    result = batchrun(write_job(job, tmp_path))
    assert result.exit_code == 0
    assert "No space left on device: the run pauses until the file can be written" in result.stderr
    assert report_of(job)["rows_ok"] == 500
    rows_once(job, 500)


def test_a_part_that_is_due_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A due part is written while rows keep finishing, when the event loop never idles."""
    monkeypatch.setattr(TIMING, "part", 0.0)
    job = job_of(tmp_path, rows=2000)
    assert batchrunner.run(job).exit_code == 0
    rows_once(job, 2000)
