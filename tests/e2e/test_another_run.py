"""A start is refused whose input, model or parts changed, and a run ends whose input changes meanwhile."""

import asyncio
import errno
import gzip
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import batchrunner
from batchrunner.core.errors import (
    EngineStartError,
    InputChangedError,
    OutputError,
    ResumeError,
)
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
        (put_a_file_before, "input.parquet: rename it so that it comes last"),
        (["prompt.text='Say {{ text }}'"], "prompt.text was 'text' and is 'Say {{ text }}'"),
        (["sampling.temperature=0.5"], "sampling.temperature was unset and is 0.5"),
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
    assert "use another output.path, or discard the old run with --fresh (with --join" in line
    assert (server.sent, results_of(job)) == ([], before)


def test_a_refused_start_binds_nobody(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A job that was refused once the engine was there can be corrected."""
    job = job_of(tmp_path)
    with pytest.raises(EngineStartError, match="the engine reports no tokenizer"):
        batchrunner.run(job, overrides=["prompt.truncate=head"])
    assert caplog.records == []
    assert batchrunner.run(job).rows_ok == 10


@pytest.mark.parametrize("content", ["", "{", "[]", '{"format": 1}'])
def test_a_broken_run_file_is_refused(tmp_path: Path, server: FakeSGLang, content: str) -> None:
    """A run file that cannot be read, or is gone, is named with the way out."""
    job = some_done(tmp_path, server)
    file = tmp_path / "run" / "run.json"
    file.write_text(content) if content else file.unlink()
    with pytest.raises(ResumeError, match=r"run\.json: is damaged, or .* --fresh|but no run\.json"):
        batchrunner.run(job)


def test_a_damaged_part(tmp_path: Path, server: FakeSGLang) -> None:
    """A part that cannot be read is named, and moved away its rows are done again."""
    job = some_done(tmp_path, server)
    (part,) = (tmp_path / "run" / "parts").iterdir()
    part.write_bytes(part.read_bytes()[:-20])
    with pytest.raises(ResumeError) as caught:
        batchrunner.run(job)
    assert f"{part}: is damaged: move the file away, and its rows will be sent again" in str(caught.value)
    part.rename(tmp_path / "damaged")
    assert batchrunner.run(job).rows_ok == 10
    assert rows_sent(server) == list(range(10))


def test_a_part_that_the_disk_does_not_read_for_a_while(
    tmp_path: Path, server: FakeSGLang, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing calls it damaged, and the same command goes on once the disk reads it."""
    job = some_done(tmp_path, server)
    (part,) = (tmp_path / "run" / "parts").iterdir()
    server.forget()
    with monkeypatch.context() as patch:
        failing = Mock(side_effect=OSError(errno.EIO, "Error reading bytes from file"))
        patch.setattr("pyarrow.parquet.ParquetFile.read", failing)
        for command in ([write_job(job, tmp_path), "-q"], ["merge", tmp_path / "run"]):
            failed = batchrun(*command)
            assert failed.exit_code == 1
            told(failed.stderr, f"{part}: cannot be read: Input/output error: the file is kept; run the same")
    assert batchrunner.run(job).rows_ok == 10
    assert not set(rows_sent(server)) & set(pq.read_table(part)["row"].to_pylist())


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


def job_while(change: Callable[[Path], object], directory: Path, server: FakeSGLang, **more: Any) -> Any:
    """Return a job that reads its input slowly, which changes when row 3 is asked."""
    server.script = change_at(directory / "input.parquet", change, "row 3")
    given = {"rows": ROWS, "order": "input", **more}
    return job_of(directory, server, input={"columns": ["text"]}, window=8, **given)


def carried_right(job: dict[str, Any]) -> list[int]:
    """Return the rows of the results, which are all of the first content."""
    results = results_of(job)
    assert all(row["text"] == f"row {row['row']}" for row in results)
    return [row["row"] for row in results]


@pytest.mark.parametrize(("change", "join"), [(replace, []), (truncate, ["--join"])])
def test_a_file_that_changes(
    tmp_path: Path, server: FakeSGLang, change: Callable[[Path], object], join: list[str]
) -> None:
    """The run ends with exit code 2 and one line; what it wrote is of the first content."""
    job = job_while(change, tmp_path, server)
    path = tmp_path / "input.parquet"
    kept = path.read_bytes()
    result = run_job(job, tmp_path, "-q", *join, code=2)
    assert f"the input file {path} changed during the run" in result.stderr.splitlines()[-1]
    assert len(carried_right(job)) < ROWS
    assert set(rows_sent(server)) <= set(range(ROWS))
    path.write_bytes(kept)  # as the line says
    run_job(job, tmp_path, "-q", *join)
    assert carried_right(job) == list(range(ROWS))


@pytest.mark.parametrize(
    ("change", "join", "order"),
    [(replace, ["--join"], "input"), (empty, [], "prefix")],
)
def test_a_file_that_changes_after_it_was_read(
    tmp_path: Path, server: FakeSGLang, change: Callable[[Path], object], join: list[str], order: str
) -> None:
    """All rows are in memory, or in the sorted copy: the run ends well, and one line tells of the change."""
    rows = ROWS if order == "prefix" else 10
    job = job_while(change, tmp_path, server, rows=rows, order=order)
    result = run_job(job, tmp_path, *join)
    assert "changed during the run, after it was read: the results are from the old" in result.stderr
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
    job = job_while(change, tmp_path, server)
    batchrunner.run(job)
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
    told = run_job(job, tmp_path, *join, code=1).stderr
    assert "b.parquet appeared in the input, or grew, during the run: run the same command again" in told
    run_job(job, tmp_path, *join)
    assert carried_right(job) == list(range(15))


def test_a_path_in_another_run(tmp_path: Path, server: FakeSGLang) -> None:
    """A run does not begin among the files of another one, which `--fresh` or a person deletes."""
    job = job_of(tmp_path, server)
    batchrunner.run(job)
    inner = {**job, "output": {"path": str(tmp_path / "run" / "parts" / "b")}}
    told(
        refusal(inner, tmp_path),
        f"output.path {tmp_path}/run/parts/b: lies in the directory of the run {tmp_path}/run",
    )
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
        f"{path}: this run is not done: 10 of 20 rows are done: "
        f"run its job again, or use the finished rows in {path}/parts",
    )
    server.script = lambda _: "answer"
    of_parts = {**second, "input": {"path": f"{path}/parts"}, "output": {"path": f"{path}-3"}}
    assert batchrunner.run(of_parts).rows_ok == 10
    batchrun("merge", path)
    assert batchrunner.run(first).rows_ok == 20
    server.forget()
    assert [batchrunner.run(second).rows_ok, batchrunner.run(second).rows_resumed] == [20, 20]
    table = batchrunner.generate(path, prompt=prompt, engine=server.url)
    assert sorted(server.prompts) == sorted(f"Again: {row['output']}" for row in results_of(first) * 2)
    assert table.column("row").to_pylist() == list(range(20))


# --- rows that are appended to a file are done, and those before keep their results ---


def lines(name: str, rows: range) -> str:
    if name.endswith(".csv"):
        head = "id,text\n" if not rows.start else ""
        return head + "".join(f"{row},row {row}\n" for row in rows)
    return "".join(f'{{"id": {row}, "text": "row {row}"}}\n' for row in rows)


def grown(path: Path, rows: range) -> None:
    with path.open("a") as file:
        file.write(lines(path.name, rows))


def job_on(path: Path, server: FakeSGLang, **changes: Any) -> dict[str, Any]:
    path.write_text(lines(path.name, range(10)))
    given = {"path": str(path), "columns": ["id"], **changes.pop("input", {})}
    return job_of(path.parent, server, input=given, **changes)


def done(job: dict[str, Any], rows: int) -> bool:
    """Tell whether so many rows have their results, once, each with its own."""
    found = [(row["row"], int(row["id"]), row["error"]) for row in results_of(job)]
    return found == [(row, row, None) for row in range(rows)]


@pytest.mark.parametrize("options", [[], ["--join"]], ids=["alone", "join"])
@pytest.mark.parametrize("order", ["input", "prefix"])
@pytest.mark.parametrize("name", ["rows.csv", "rows.jsonl"])
def test_rows_that_were_appended(
    tmp_path: Path, server: FakeSGLang, name: str, order: str, options: list[str]
) -> None:
    """Again and again they are done, and one line tells what was found."""
    path = tmp_path / name
    job = job_on(path, server, order=order)
    run_job(job, tmp_path, *options)
    for known, rows in ((10, 13), (13, 14)):
        server.forget()
        grown(path, range(known, rows))
        result = run_job(job, tmp_path, *options)
        assert f"{path} has grown: the first {known} rows are those of this run" in result.stderr
        assert rows_sent(server) == [*range(known, rows)]
        assert done(job, rows)
    assert batchrun("merge", tmp_path / "run").exit_code == 0
    server.forget()
    assert "grew" not in run_job(job, tmp_path, *options).stderr
    assert not server.sent


def test_rows_of_a_run_that_was_not_done(tmp_path: Path, server: FakeSGLang) -> None:
    """A filter and a limit hold for all rows, old and new, in their order."""
    path = tmp_path / "rows.csv"
    job = job_on(path, server, input={"filter": "id|int % 2", "limit": 3, "types": {"id": "int64"}})
    assert batchrunner.run(job).rows_ok == 3
    grown(path, range(10, 14))
    assert batchrunner.run(job).rows_resumed == 3
    report = batchrunner.run(job, overrides=["input.limit=6"])
    assert (report.rows_resumed, report.rows_ok) == (3, 6)
    assert rows_sent(server) == [1, 3, 5, 7, 9, 11]


CHANGES = {
    "an edit": lambda text: text.replace("row 3", "row X") + lines("a.csv", range(10, 12)),
    "a row before": lambda text: text.replace("0,", "7,row 7\n0,", 1) + "8,row 8\n",
    "no end of line": lambda text: text + "more of the last one\n",
    "fewer rows": lambda text: text[: text.index("9,")],
}


@pytest.mark.parametrize("change", CHANGES)
def test_other_changes_are_refused(tmp_path: Path, server: FakeSGLang, change: str) -> None:
    """Where a known row may be another one, nothing is sent."""
    path = tmp_path / "rows.csv"
    job = job_on(path, server)
    if change == "no end of line":
        path.write_text(path.read_text().rstrip())
    batchrunner.run(job)
    server.forget()
    path.write_text(CHANGES[change](path.read_text()))
    assert f"the input file {path} changed" in run_job(job, tmp_path, code=2).stderr
    assert not server.sent


def test_only_the_last_file_may_grow(tmp_path: Path, server: FakeSGLang) -> None:
    """Rows of a file before the last would move those after them; files that come after it may be new."""
    one, two, three = (tmp_path / f"{name}.csv" for name in ("one", "two", "zzz"))
    job = job_on(one, server)
    two.write_text(lines("a.csv", range(4)))
    job["input"]["path"] = str(tmp_path / "*.csv")
    batchrunner.run(job)
    grown(two, range(4, 6))
    three.write_text(lines("a.csv", range(1)))
    report = batchrunner.run(job)
    assert (report.rows_resumed, report.rows_ok) == (14, 17)
    assert [int(row["id"]) for row in results_of(job)] == [*range(10), *range(6), 0]
    grown(one, range(10, 11))
    with pytest.raises(ResumeError, match=f"the input file {one} changed"):
        batchrunner.run(job)


def test_a_compressed_file_is_not_looked_into(tmp_path: Path) -> None:
    """Where it ends in the middle of a line cannot be seen."""
    path = tmp_path / "rows.csv.gz"
    path.write_bytes(gzip.compress(lines("a.csv", range(10)).encode()))
    job = job_of(tmp_path, input={"path": str(path)})
    batchrunner.run(job)
    path.write_bytes(path.read_bytes() + gzip.compress(lines("a.csv", range(10, 11)).encode()))
    with pytest.raises(ResumeError, match="changed"):
        batchrunner.run(job)


def test_a_file_that_grows_during_the_run(tmp_path: Path, server: FakeSGLang) -> None:
    """The run does what it found, and says that there is more."""
    path = tmp_path / "rows.jsonl"
    job = job_on(path, server)

    def answer(sent: Sent) -> Behaviour:
        if sent.prompt == "row 3":
            grown(path, range(10, 12))
        return "answer"

    server.script = answer
    result = run_job(job, tmp_path, code=1)
    assert (
        f"{path} appeared in the input, or grew, during the run: run the same command again" in result.stderr
    )
    server.script = lambda _: "answer"
    assert batchrunner.run(job).rows_resumed == 10
    assert done(job, 12)
