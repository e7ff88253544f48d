"""A start is refused whose input, model, parts or run file changed, or whose run another process writes."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pyarrow.parquet as pq
import pytest

import batchrunner
from batchrunner.core.errors import EngineStartError, OutputError, ResumeError
from tests.conftest import (
    batchrun,
    job_of,
    results_of,
    started,
    write_job,
    write_rows,
)
from tests.support.refusals import told
from tests.support.runs import held_from, rows_in, rows_sent, some_done

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.support.fake_sglang import FakeSGLang


def change_the_input(directory: Path) -> list[str]:
    write_rows(directory / "input.parquet", 10, first=1)
    return []


def put_a_file_before(directory: Path) -> list[str]:
    write_rows(directory / "a.parquet", 10, first=1)
    return [f"input.path=[{directory}/a.parquet, {directory}/input.parquet]"]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (change_the_input, "the input file"),
        (put_a_file_before, "input.parquet: name it to come last"),
        (["prompt.text='Say {{ text }}'"], "prompt.text was 'text' and is 'Say {{ text }}'"),
        (["sampling.temperature=0.5"], "sampling.temperature was unset and is 0.5"),
        (["input.filter=id > 2"], "input.filter was unset and is 'id > 2'"),
        (["input.columns=[id]"], "input.columns was [] and is ['id']"),
        (["input.limit=2"], "input.limit was 4 and is 2: it can only grow"),
    ],
)
def test_another_run_is_refused(
    tmp_path: Path,
    server: FakeSGLang,
    change: list[str] | Callable[[Path], list[str]],
    told: str,
) -> None:
    """Results of two different jobs never mix: what differs is said in one line, with the way out."""
    job = some_done(tmp_path, server)
    overrides = change if isinstance(change, list) else change(tmp_path)
    arguments = [argument for override in overrides for argument in ("--set", override)]
    before = results_of(job)
    result = batchrun(write_job(job, tmp_path), *arguments)
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"batchrun: {tmp_path}/run holds another run: ")
    assert told in line
    assert "take another output.path, or discard what is there with --fresh (with --join" in line
    assert (server.sent, results_of(job)) == ([], before)


def test_a_refused_start_binds_nobody(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A job that was refused once the engine was there can be corrected."""
    job = job_of(tmp_path)
    with pytest.raises(EngineStartError, match="no tokenizer that we know of"):
        batchrunner.run(job, overrides=["prompt.truncate=head"])
    assert caplog.records == []
    assert batchrunner.run(job).rows_ok == 10


def test_parts_without_a_run_are_refused(tmp_path: Path, server: FakeSGLang) -> None:
    """Parts of which nobody knows where they come from are not added to."""
    job = some_done(tmp_path, server)
    (tmp_path / "run" / "run.json").unlink()
    with pytest.raises(ResumeError, match=r"has results but no run\.json"):
        batchrunner.run(job)


@pytest.mark.parametrize("content", ["{", "{}", "[]", '{"format": 1}'])
def test_a_broken_run_file_is_refused(tmp_path: Path, server: FakeSGLang, content: str) -> None:
    """A run file that cannot be read is named with the way out."""
    job = some_done(tmp_path, server)
    (tmp_path / "run" / "run.json").write_text(content)
    with pytest.raises(ResumeError, match=r"run\.json: is damaged, or .*: .* --fresh"):
        batchrunner.run(job)


def cut_off(part: Path) -> None:
    part.write_bytes(part.read_bytes()[:-20])


def leave_out_the_errors(part: Path) -> None:
    pq.write_table(pq.read_table(part).drop_columns("error"), part)


@pytest.mark.parametrize("damage", [cut_off, leave_out_the_errors])
def test_a_damaged_part(tmp_path: Path, server: FakeSGLang, damage: Callable[[Path], None]) -> None:
    """A part that cannot be read is named, and moved away its rows are done again."""
    job = some_done(tmp_path, server)
    (part,) = (tmp_path / "run" / "parts").iterdir()
    damage(part)
    with pytest.raises(ResumeError) as caught:
        batchrunner.run(job)
    assert f"{part}: is damaged: move it away, and its rows will be done again" in str(caught.value)
    part.rename(tmp_path / "damaged")
    assert batchrunner.run(job).rows_ok == 10
    assert rows_sent(server) == list(range(10))


def test_a_second_writer_is_refused(tmp_path: Path, server: FakeSGLang) -> None:
    """Two starts on one path cannot both write; the second one is told who does, --fresh or not."""
    server.script = held_from(5)
    job = job_of(tmp_path, server)
    with started(write_job(job, tmp_path)) as process:
        server.wait_for(10)
        for options in ([], ["--fresh"]):
            result = batchrun(tmp_path / "job.yaml", *options)
            assert result.exit_code == 2
            assert f"batchrun with pid {process.process.pid}" in result.stderr
            assert "is writing this run" in result.stderr
        server.answer_held()
        assert process.end() == 0
    assert rows_in(job) == list(range(10))
    assert len(server.sent) == 10


async def test_a_second_writer_in_the_same_process(tmp_path: Path, server: FakeSGLang) -> None:
    """The same holds for two runs of one program."""
    server.script = lambda _: "hold"
    job = job_of(tmp_path, server)
    first = asyncio.create_task(batchrunner.arun(job))
    await asyncio.to_thread(server.wait_for, 10)
    with pytest.raises(OutputError, match="is writing this run"):
        await batchrunner.arun(job)
    server.answer_held()
    assert (await first).rows_ok == 10


def test_report_names_the_damaged_part(tmp_path: Path) -> None:
    """The line has the file and the reason, whichever of its columns is damaged."""
    batchrunner.run(job_of(tmp_path))
    (part,) = (tmp_path / "run" / "parts").iterdir()
    content = bytearray(part.read_bytes())
    content[8 : len(content) // 3] = b"\xff" * (len(content) // 3 - 8)
    part.write_bytes(content)
    result = batchrun("report", tmp_path / "run")
    assert result.exit_code == 2
    told(result.stderr, f"{part}: is damaged", "(")
