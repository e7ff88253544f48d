"""What is finished stays: rows are on disk within a second, whatever dies, and none is there twice."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import batchrunner
from batchrunner.output.journal import Journal, read_journal
from batchrunner.output.writer import PART_S
from tests.conftest import (
    INSTANT,
    batchrun,
    eventually,
    job_of,
    parts_of,
    report_of,
    results_of,
    started,
    write_job,
    write_rows,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.fake_sglang import Behaviour, FakeSGLang, Sent


def rows_once(job: dict[str, Any], rows: int) -> None:
    """Every row of the input is there, once, and went well."""
    results = results_of(job)
    assert [row["row"] for row in results] == list(range(rows))
    assert {row["error"] for row in results} <= {None}


def status_of(run: Path) -> dict[str, Any]:
    result = batchrun("status", run, "--json")
    found: dict[str, Any] = json.loads(result.stdout) if result.exit_code == 0 else {}
    return found


def after_thirty(sent: Sent) -> Behaviour:
    """Answer the first 30 rows and hold the others."""
    return "answer" if int(sent.prompt.split()[1]) < 30 else "hold"


def test_a_kill_loses_a_second_at_most(tmp_path: Path, server: FakeSGLang) -> None:
    """Rows that ended a second before a SIGKILL are not sent again, though no part was written."""
    server.script = after_thirty
    job = job_of(tmp_path, server, rows=100, window=8)
    with started(write_job(job, tmp_path)) as running:
        eventually(lambda: status_of(tmp_path / "run").get("rows_on_disk") == 30)
        running.process.send_signal(signal.SIGKILL)
        running.process.wait()
    assert list((tmp_path / "run" / "parts").glob("*.parquet")) == []
    server.answer_held()
    report = batchrunner.run(job)
    assert report.rows_resumed == 30
    rows_once(job, 100)
    assert list((tmp_path / "run" / "tasks" / "main").glob("journal-*")) == []


def test_rows_that_trickle_in(tmp_path: Path, server: FakeSGLang) -> None:
    """A row that ends after a quiet while is durable as soon as any other, and not only with its part."""
    ready = 4
    server.script = lambda sent: "answer" if int(sent.prompt.split()[1]) < ready else "busy 503"
    job = job_of(tmp_path, server, rows=40, window=4)
    with started(write_job(job, tmp_path)) as running:
        for ready in (4, 8, 12):
            began = time.monotonic()
            eventually(lambda: status_of(tmp_path / "run").get("rows_on_disk") == ready)  # noqa: B023
            assert time.monotonic() - began < PART_S / 2
        assert list((tmp_path / "run" / "parts").glob("*.parquet")) == []
        running.process.kill()


def test_a_killed_run_merges(tmp_path: Path, server: FakeSGLang) -> None:
    """What a killed run left in its journal is merged like the rest."""
    server.script = after_thirty
    job = job_of(tmp_path, server, rows=100, window=8)
    with started(write_job(job, tmp_path)) as running:
        eventually(lambda: status_of(tmp_path / "run").get("rows_on_disk") == 30)
        running.process.kill()
        running.process.wait()
    merged = batchrun("merge", tmp_path / "run")
    assert merged.exit_code == 1  # what reads it may want all of it
    assert "not finished: 30 of 100 rows ok" in merged.stderr
    assert pq.read_table(tmp_path / "run" / "merged").num_rows == 30


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A finished run of 40 rows, which tests copy."""
    job = job_of(tmp_path_factory.mktemp("finished"), rows=40, input={"columns": ["id"]})
    batchrunner.run(job)
    return job


@settings(max_examples=60)
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


@settings(max_examples=60)
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


class PowerCuts:
    """Takes note of what is durable: of each file and directory what its last fsync has seen, and no more."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._root = root
        self._files: dict[int, bytes] = {}
        self._directories: dict[int, dict[str, tuple[int, bool]]] = {}
        self._kept: list[int] = []  # descriptors, so that no inode is used again
        self._lock = threading.Lock()
        self.images: list[dict[Path, bytes | None]] = []
        real = os.fsync

        def fsync(descriptor: int) -> None:
            real(descriptor)
            with self._lock:
                self._note(os.dup(descriptor))

        monkeypatch.setattr("os.fsync", fsync)

    def _note(self, descriptor: int) -> None:
        self._kept.append(descriptor)
        found = os.fstat(descriptor)
        place = f"/proc/self/fd/{descriptor}"
        if stat.S_ISDIR(found.st_mode):
            with os.scandir(place) as entries:
                self._directories[found.st_ino] = {
                    entry.name: (entry.inode(), entry.is_dir()) for entry in entries
                }
        else:
            self._files[found.st_ino] = Path(place).read_bytes()
        self.images.append(dict(self._walk(self._root.stat().st_ino, Path())))

    def _walk(self, inode: int, path: Path) -> Iterator[tuple[Path, bytes | None]]:
        for name, (below, is_directory) in self._directories.get(inode, {}).items():
            if is_directory:
                yield path / name, None
                yield from self._walk(below, path / name)
            else:
                yield path / name, self._files.get(below, b"")

    def close(self) -> None:
        for descriptor in self._kept:
            os.close(descriptor)


def test_power_cuts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whenever the power goes, and with it what was not synced, the next start loses and doubles nothing."""
    disk = tmp_path / "disk"
    disk.mkdir()
    source = write_rows(tmp_path / "input.parquet", 60)
    job = job_of(disk, INSTANT, input={"path": str(source)}, output={"part_rows": 15, "durable": 0.001})
    with monkeypatch.context() as patch:
        cuts = PowerCuts(disk, patch)
        batchrunner.run(job)
    cuts.close()
    assert len(cuts.images) > 15
    kept = 0
    for number, image in enumerate(cuts.images):
        after = tmp_path / f"after-{number}"
        after.mkdir()
        for path, content in image.items():
            if content is None:
                (after / path).mkdir(exist_ok=True)
            else:
                (after / path).write_bytes(content)
        owner = after / "run" / "tasks" / "main" / "owner"
        if owner.exists() and owner.stat().st_size:  # the machine was started again since
            owner.write_text(json.dumps(json.loads(owner.read_text()) | {"boot": "the one before"}))
        again = {**job, "output": {**job["output"], "path": str(after / "run")}}
        report = batchrunner.run(again)
        rows_once(again, 60)
        assert report.rows_resumed >= kept  # what was durable once stays so
        kept = report.rows_resumed
    assert kept == 60


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


def test_a_disk_that_is_full_for_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk makes the run pause and say so; with room again it goes on, and nothing is lost."""
    full_until = time.monotonic() + 2.5
    real = os.pwrite

    def pwrite(descriptor: int, content: bytes, offset: int) -> int:
        if time.monotonic() < full_until and len(content) > 1000:  # not the line that says who writes
            real(descriptor, content[: len(content) // 2], offset)  # some of it still fits
            raise OSError(28, "No space left on device")
        return real(descriptor, content, offset)

    monkeypatch.setattr("os.pwrite", pwrite)
    engine = {"kind": "simulated", "step_s": 0.01}
    job = job_of(tmp_path, engine, rows=500, output={"durable": 0.05})
    result = batchrun(write_job(job, tmp_path))
    assert result.exit_code == 0
    assert "No space left on device: the run pauses until it can be written" in result.stderr
    assert report_of(job)["rows_ok"] == 500
    rows_once(job, 500)


def test_a_part_that_is_due_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part whose time is over while rows end is written: the loop gives such a timer no time of its own."""
    monkeypatch.setattr("batchrunner.output.writer.PART_S", 0.0)
    job = job_of(tmp_path, rows=2000)
    assert batchrunner.run(job).exit_code == 0
    rows_once(job, 2000)


def test_a_log_that_cannot_be_written_costs_no_row(tmp_path: Path) -> None:
    """Nor does it change the exit code: standard error may be on a full disk, or a pipe that nobody reads."""
    job = job_of(tmp_path, rows=300)
    command = [sys.executable, "-m", "batchrunner.cli", str(write_job(job, tmp_path))]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stderr=full, timeout=60, check=False)
        wrong = subprocess.run([*command, "--set", "limits=7"], stderr=full, timeout=60, check=False)
    assert (done.returncode, wrong.returncode) == (0, 2)
    assert [row["row"] for row in results_of(job)] == list(range(300))
