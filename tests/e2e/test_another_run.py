"""A start is refused whose input, model or parts changed, and a run ends whose input changes meanwhile."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import batchrunner
from batchrunner.core.errors import EngineStartError, InputChangedError, OutputError, ResumeError
from tests.conftest import (
    batchrun,
    job_of,
    report_of,
    results_of,
    rows_in,
    run_job,
    started,
    write_job,
    write_rows,
)
from tests.support.fake_sglang import Behaviour, FakeSGLang, Sent
from tests.support.refusals import refusal, told
from tests.support.runs import held_from, rows_sent, some_done


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
        (["task=embed"], "task was 'generate' and is 'embed'"),
        (["accept.regex=row"], "accept.regex"),
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
    result = run_job(job, tmp_path, *arguments, code=2)
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


def test_a_damaged_part(tmp_path: Path, server: FakeSGLang) -> None:
    """A part that cannot be read is named, and moved away its rows are done again."""
    job = some_done(tmp_path, server)
    (part,) = (tmp_path / "run" / "parts").iterdir()
    part.write_bytes(part.read_bytes()[:-20])
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


ROWS = 2400
"""In three row groups: the first one fills the queue, so the others are read after the change."""


def another(path: Path) -> Path:
    """Write a file beside the input that has as many rows, and other texts."""
    return write_rows(path.with_name("another.pq"), ROWS, first=ROWS)


def replace(path: Path) -> None:
    another(path).replace(path)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def change_at(path: Path, change: Callable[[Path], object], prompt: str) -> Callable[[Sent], Behaviour]:
    """Return a script that changes the file when this prompt is asked."""

    def answer(sent: Sent) -> Behaviour:
        if sent.prompt == prompt and sent.tries == 1:
            change(path)
        return "answer"

    return answer


def carried_right(job: dict[str, Any]) -> list[int]:
    """Return the rows of the results, which are all of the first content."""
    results = results_of(job)
    assert all(row["text"] == f"row {row['row']}" for row in results)
    return [row["row"] for row in results]


@pytest.mark.parametrize(
    ("change", "join"),
    [
        (replace, []),
        (truncate, ["--join"]),
    ],
)
def test_a_file_that_changes(
    tmp_path: Path, server: FakeSGLang, change: Callable[[Path], object], join: list[str]
) -> None:
    """The run ends with exit code 2 and one line; what it wrote is of the first content."""
    job = job_of(tmp_path, server, rows=ROWS, input={"columns": ["text"]}, order="input", window=8)
    path = tmp_path / "input.parquet"
    kept = path.read_bytes()
    server.script = change_at(path, change, "row 3")
    file = write_job(job, tmp_path)
    result = batchrun(file, "-q", *join)
    assert result.exit_code == 2
    assert f"the input file {path} changed during the run" in result.stderr.splitlines()[-1]
    assert len(carried_right(job)) < ROWS
    assert {int(prompt.split()[1]) for prompt in server.prompts} <= set(range(ROWS))
    path.write_bytes(kept)  # as the line says
    assert batchrun(file, "-q", *join).exit_code == 0
    assert carried_right(job) == list(range(ROWS))


@pytest.mark.parametrize(
    ("change", "join", "order"),
    [(replace, [], "input"), (replace, ["--join"], "input"), (empty, [], "prefix")],
)
def test_a_file_that_changes_after_it_was_read(
    tmp_path: Path, server: FakeSGLang, change: Callable[[Path], object], join: list[str], order: str
) -> None:
    """All rows are in memory, or in the sorted copy: the run ends well, and one line tells of the change."""
    rows = ROWS if order == "prefix" else 10
    job = job_of(tmp_path, server, rows=rows, input={"columns": ["text"]}, order=order, window=8)
    server.script = change_at(tmp_path / "input.parquet", change, "row 3")
    result = batchrun(write_job(job, tmp_path), *join)
    assert result.exit_code == 0
    assert "changed during the run, after it was read: the results are those of the old" in result.stderr
    assert carried_right(job) == list(range(rows))


def test_a_file_that_was_not_opened_yet(tmp_path: Path, server: FakeSGLang) -> None:
    """The second file is replaced while the first one is read: none of its rows is sent."""
    source = tmp_path / "in"
    write_rows(source / "a.parquet", ROWS)
    second = write_rows(source / "b.parquet", 10, first=ROWS)
    job = job_of(tmp_path, server, input={"path": str(source), "columns": ["text"]}, order="input", window=8)
    server.script = change_at(second, lambda path: write_rows(path, 10, first=9 * ROWS), "row 3")
    with pytest.raises(InputChangedError, match=f"{second} changed during the run"):
        batchrunner.run(job)
    assert f"row {9 * ROWS}" not in server.prompts
    assert report_of(job)["exit_code"] == 2


def replace_by_a_copy(path: Path) -> None:
    copy = path.with_name("copy.pq")
    shutil.copy(path, copy)
    copy.replace(path)


@pytest.mark.parametrize("change", [lambda path: path.unlink(), lambda path: path.touch(), replace_by_a_copy])
def test_what_is_no_change(tmp_path: Path, server: FakeSGLang, change: Callable[[Path], object]) -> None:
    """Its name is gone, its time is another, or it was replaced by a copy: it is read to its end."""
    job = job_of(tmp_path, server, rows=ROWS, input={"columns": ["text"]}, order="input", window=8)
    server.script = change_at(tmp_path / "input.parquet", change, "row 3")
    assert batchrunner.run(job).exit_code == 0
    assert carried_right(job) == list(range(ROWS))


def test_a_few_bytes_of_a_large_file(tmp_path: Path, server: FakeSGLang) -> None:
    """Its digest covers blocks of it only: the time of its last change tells of an edit between them."""
    path = tmp_path / "large.parquet"
    texts = pa.table({"text": [f"row {row}".ljust(2000, ".") for row in range(ROWS)]})
    pq.write_table(texts, path, compression="none", use_dictionary=False, row_group_size=500)

    def edit(file: Path) -> None:
        content = file.read_bytes()
        with file.open("r+b") as opened:
            opened.seek(content.index(f"row {ROWS - 1} ".strip().encode() + b"."))
            opened.write(b"ROW")

    job = job_of(tmp_path, server, input={"path": str(path), "columns": ["text"]}, order="input", window=8)
    server.script = change_at(path, edit, "row 3".ljust(2000, "."))
    with pytest.raises(InputChangedError, match=f"{path} changed during the run"):
        batchrunner.run(job)
    assert not any(prompt.startswith("ROW") for prompt in server.prompts)


@pytest.mark.parametrize("join", [[], ["--join"]])
def test_a_file_that_is_added(tmp_path: Path, server: FakeSGLang, join: list[str]) -> None:
    """A run ends with exit code 1 if the input has more files at its end than at its start."""
    source = tmp_path / "in"
    first = write_rows(source / "a.parquet", 10)
    job = job_of(tmp_path, server, input={"path": str(source), "columns": ["text"]})
    server.script = change_at(first.with_name("b.parquet"), lambda path: write_rows(path, 5, 10), "row 3")
    file = write_job(job, tmp_path)
    result = batchrun(file, *join)
    assert result.exit_code == 1
    assert (
        "b.parquet came into the input, or grew, during the run: run the same command again" in result.stderr
    )
    assert batchrun(file, *join).exit_code == 0
    assert carried_right(job) == list(range(15))


def test_a_path_in_another_run(tmp_path: Path, server: FakeSGLang) -> None:
    """A run does not begin among the files of another one, which `--fresh` or a person deletes."""
    job = job_of(tmp_path, server)
    batchrunner.run(job)
    inner = {**job, "output": {"path": str(tmp_path / "run" / "parts" / "b")}}
    told(refusal(inner, tmp_path), f"output.path {tmp_path}/run/parts/b: lies in the run {tmp_path}/run")
    assert batchrunner.run(job).rows_resumed == 10


def test_a_run_s_results_are_the_next_one_s_input(tmp_path: Path, server: FakeSGLang) -> None:
    """The path of a run that is done means all its results in input order, however early it was merged."""
    first = job_of(tmp_path, server, rows=20, window=3)
    path = str(tmp_path / "run")
    server.script = held_from(10)

    async def interrupted() -> None:
        running = asyncio.create_task(batchrunner.arun(first))
        await asyncio.to_thread(server.wait_for, 13)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    asyncio.run(interrupted())
    prompt = {"text": "Again: {{ output }}"}
    second = {**first, "input": {"path": path}, "prompt": prompt, "output": {"path": f"{path}-2"}}
    told(
        refusal(second, tmp_path),
        f"{path}: this run is not done: 10 of 20 rows: run it again, or take what is there: {path}/parts",
    )
    server.script = lambda _: "answer"
    of_parts = {**second, "input": {"path": f"{path}/parts"}, "output": {"path": f"{path}-3"}}
    assert batchrunner.run(of_parts).rows_ok == 10
    batchrun("merge", path)
    assert batchrunner.run(first).rows_ok == 20
    assert [batchrunner.run(second).rows_ok, batchrunner.run(second).rows_resumed] == [20, 20]
    table = batchrunner.generate(path, prompt=prompt, engine=server.url)
    answers = [row["output"] for row in sorted(results_of(first), key=lambda row: row["row"])]
    assert [prompt for prompt in server.prompts if answers[15] in prompt] == [f"Again: {answers[15]}"] * 2
    assert table.column("row").to_pylist() == list(range(20))
