"""Journals and parts of a run are counted and read as far as they are whole."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

import batchrunner
from batchrunner.output.parts import Journal, read_journal
from tests.conftest import (
    examples,
    job_of,
    results_of,
)
from tests.support.runs import rows_once, status_of

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A finished run of 40 rows, which tests copy."""
    job = job_of(tmp_path_factory.mktemp("finished"), rows=40, input={"columns": ["id"]})
    batchrunner.run(job)
    return job


@examples(20)
@given(data=st.data())
def test_a_torn_journal(data: st.DataObject, finished: dict[str, Any]) -> None:
    """Wherever a crash or rot cuts a journal, the rows before are kept and the others done again, once."""
    with scratch_copy(finished) as (job, run):
        (part,) = (run / "parts").glob("*.parquet")
        table = pq.read_table(part)
        part.unlink()
        path = run / "tasks" / "main" / "journal-000000"
        write_journal(path, table, 10)
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
    """However rows lie in parts and journals, status and the next start count them as a reader would.

    A journal may have the number of a part, and then rows of that part or of later ones, or none of them.
    """
    with scratch_copy(finished) as (job, run):
        (part,) = (run / "parts").glob("*.parquet")
        table = pq.read_table(part)
        found = [ended(row, failed=row["row"] in failed) for row in table.to_pylist()]
        part.unlink()
        cuts = sorted(ends)
        pieces = [rows[start:end] for start, end in zip([0, *cuts], cuts, strict=False)]
        for number, piece in enumerate(pieces):
            written = pa.Table.from_pylist([found[row] for row in piece], schema=table.schema)
            if in_journal and number == len(pieces) - 1:
                became = min(journal_number, number)
                also = [row for piece in pieces[became:number] for row in piece if row in twice]
                more = pa.Table.from_pylist([found[row] for row in also], schema=table.schema)
                path = run / "tasks" / "main" / f"journal-{became:06d}"
                write_journal(path, pa.concat_tables([more, written]), group_rows)
            else:
                path = run / "parts" / f"part-main-{number:06d}.parquet"
                pq.write_table(written, path, row_group_size=group_rows)
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
        assert [row["row"] for row in results_of(job)] == list(range(40))


def ended(row: dict[str, Any], *, failed: bool) -> dict[str, Any]:
    """Return a row as it is, or as if it had failed, for a reason of its own."""
    reason = {"output": None, "completion_tokens": None, "error": "no" + "o" * row["row"]}
    return {**row, **reason} if failed else row


def write_journal(path: Path, table: pa.Table, frame_rows: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    journal = Journal(path)
    for first in range(0, table.num_rows, frame_rows):
        journal.append(table.slice(first, frame_rows))
    journal.close()


def test_a_part_that_goes_while_it_is_looked_at(finished: dict[str, Any]) -> None:
    """Status counts what is left where a part was listed and is gone when it is read, and does not fail."""
    with scratch_copy(finished) as (_, run):
        gone = run / "parts" / "part-main-000007.parquet"
        gone.symlink_to(run / "nowhere")
        assert status_of(run)["rows_on_disk"] == 40


@contextlib.contextmanager
def scratch_copy(job: dict[str, Any]) -> Iterator[tuple[dict[str, Any], Path]]:
    source = Path(job["output"]["path"])
    run = source.with_name("copy")
    shutil.rmtree(run, ignore_errors=True)
    shutil.copytree(source, run)
    yield {**job, "output": {**job["output"], "path": str(run)}}, run
    shutil.rmtree(run)
