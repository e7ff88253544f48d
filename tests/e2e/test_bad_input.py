"""What a user did wrong is one clear line and exit code 2: nothing is sent and nothing is written."""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import batchrunner
from batchrunner.core.errors import InputError
from batchrunner.job.spec import Job
from batchrunner.runner.prepare import prepare
from tests.conftest import INSTANT, batchrun, job_of, write_job, write_rows
from tests.support.refusals import AS_ROOT, refusal, told

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.fake_sglang import FakeSGLang


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("nowhere.parquet", None, "no such file or directory"),
        ("sheet.xlsx", b"PK\x03\x04 and more", "another ending than .parquet, .csv"),
        ("in/*.parquet", None, "no Parquet file there"),
        ("in/", None, "no Parquet file there"),
        ("empty.parquet", b"", "not a readable Parquet file"),
        ("text.parquet", b"id,text\n1,hello world\n", "not a readable Parquet file"),
    ],
)
def test_input_that_cannot_be_read(tmp_path: Path, name: str, content: bytes | None, problem: str) -> None:
    """A path is named as it was written, with what is wrong there."""
    (tmp_path / "in").mkdir()
    write_rows(tmp_path / "input.parquet", 2)
    if content is not None:
        (tmp_path / name).write_bytes(content)
    place = f"{tmp_path}/{name}"
    told(refusal(job_of(tmp_path, input={"path": place}), tmp_path), place, problem)


def test_a_pipe(tmp_path: Path) -> None:
    """Its rows would be gone after they were read once; nothing waits for its writer."""
    pipe = tmp_path / "pipe.parquet"
    os.mkfifo(pipe)
    message = refusal(job_of(tmp_path, input={"path": str(pipe)}), tmp_path)
    told(message, pipe, "is a device or a pipe: save it to a file")


@pytest.mark.parametrize("share", [0.3, 0.99])
def test_one_truncated_file_of_several(tmp_path: Path, share: float) -> None:
    """A file that was cut off is named among many, before anything is sent."""
    for name in "abc":
        write_rows(tmp_path / "in" / f"{name}.parquet", 100)
    path = tmp_path / "in" / "b.parquet"
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])
    message = refusal(job_of(tmp_path, input={"path": str(tmp_path / "in")}), tmp_path)
    told(message, path, "not a readable Parquet file")


@pytest.mark.parametrize("path", ["in", "in/*/*.parquet"])
def test_a_file_whose_name_is_no_text(tmp_path: Path, path: str) -> None:
    """A name on disk that is not UTF-8 is told in one line, as the bytes that it is."""
    good = write_rows(tmp_path / "in" / "deep" / "good.parquet", 2)
    bad = tmp_path / "in" / os.fsdecode(b"deep/bad\xff.parquet")
    shutil.copy(good, bad)
    job = job_of(tmp_path, input={"path": f"{tmp_path}/{path}"})
    told(refusal(job, tmp_path), repr(os.fsencode(bad)), "not valid UTF-8")


def test_no_rows(tmp_path: Path) -> None:
    """A file without a row is an error and not a run that is done at once."""
    told(refusal(job_of(tmp_path, rows=0), tmp_path), tmp_path / "input.parquet", "no rows")


def test_reading_the_filter_can_be_stopped(tmp_path: Path) -> None:
    """It may take half an hour: a signal is heard after every batch."""
    write_rows(tmp_path / "input.parquet", 3000)
    job = Job.model_validate(job_of(tmp_path, input={"filter": "id > 5"}))

    def look() -> None:
        raise EOFError

    with pytest.raises(EOFError):
        prepare(job).selected(look)


def test_unreadable_file(tmp_path: Path) -> None:
    """A file that may not be read is named."""
    if AS_ROOT:
        pytest.skip("root may read everything")
    path = write_rows(tmp_path / "input.parquet", 3)
    path.chmod(0)
    result = batchrun(write_job(job_of(tmp_path), tmp_path))
    assert result.exit_code == 2
    told(result.stderr, path, "Permission denied")


def test_damage_inside_a_file(tmp_path: Path, server: FakeSGLang) -> None:
    """Damage that only reading the data shows ends the run in one line with the file's name."""
    path = write_rows(tmp_path / "input.parquet", 3000)
    content = bytearray(path.read_bytes())
    content[len(content) // 2 - 2000 : len(content) // 2 + 2000] = b"\xff" * 4000
    path.write_bytes(content)
    result = batchrun(write_job(job_of(tmp_path, server), tmp_path), "-q")
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    told(line, "batchrun: ", path, "cannot be read")


UNKNOWN = "unknown column 'txt'; did you mean 'text'? (the input has: id, text)"
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"prompt": {"text": "txt"}}, f"prompt.text: {UNKNOWN}"),
    ({"prompt": {"messages": "txt"}}, f"prompt.messages: {UNKNOWN}"),
    ({"prompt": {"system": "{% if txt %}x{% endif %}", "user": "x"}}, f"prompt.system: {UNKNOWN}"),
    ({"input": {"columns": ["txt"]}}, f"input.columns: {UNKNOWN}"),
    ({"input": {"filter": "txt == 'x'"}}, f"input.filter: {UNKNOWN}"),
    ({"sampling": {"stop": {"column": "txt"}}}, f"sampling.stop: {UNKNOWN}"),
    ({"input": {"filter": "id > 50"}}, "input.filter: true for none of the 10 rows: id > 50"),
    ({"input": {"filter": "id >"}}, "input.filter"),
    ({"prompt": {"text": "id"}}, "prompt.text: column 'id' must hold texts (got int64)"),
    ({"prompt": {"messages": "id"}}, "must hold lists of {role, content}"),
    ({"prompt": {"input_ids": "text"}}, "prompt.input_ids: column 'text' must hold lists of integers"),
    ({"sampling": {"temperature": {"column": "text"}}}, "must hold numbers (got string)"),
    ({"sampling": {"json_schema": {"column": "id"}}}, "sampling.json_schema: column 'id'"),
    ({"input": {"columns": ["id"], "rename": {"id": "row"}}}, "input.rename: {id: input_row}"),
    ({"prompt": {"user": "Say\n\n{% if text %}"}}, "prompt.user: line 3"),
    ({"prompt": {"system": "{{ text | nonsense }}", "user": "x"}}, "prompt.system: line 1"),
    ({"limits": {"deadline": "5 parsecs"}}, "limits.deadline: a duration is seconds or a text"),
]


@pytest.mark.parametrize(("change", "problem"), WRONG)
def test_wrong_jobs(tmp_path: Path, server: FakeSGLang, change: dict[str, Any], problem: str) -> None:
    """A column, a template or a value that cannot be is told with its place before anything is sent."""
    told(refusal(job_of(tmp_path, server, **change), tmp_path), problem)
    assert server.sent == []


@pytest.mark.parametrize("extra", [{"more": [1, 2]}, {"text": [1, 2]}])
def test_differing_schemas(tmp_path: Path, extra: dict[str, Any]) -> None:
    """Files that disagree on a column that the job uses are refused."""
    write_rows(tmp_path / "in" / "a.parquet", 2)
    pq.write_table(pa.table({"id": [1, 2], **extra}), tmp_path / "in" / "b.parquet")
    message = refusal(job_of(tmp_path, input={"path": str(tmp_path / "in")}), tmp_path)
    told(message, tmp_path / "in" / "b.parquet", "'text'")


def test_a_name_of_two_columns(tmp_path: Path) -> None:
    """A column that a file has twice is refused where the job uses it, and only there."""
    file = write_rows(tmp_path / "input.parquet", 2, tag=["x", "y"])
    pq.write_table(pq.read_table(file).append_column("tag", [["z", "z"]]), file)
    job = job_of(tmp_path)
    for prompt in ({"text": "tag"}, {"user": "{{ tag }}"}):
        told(refusal({**job, "prompt": prompt}, tmp_path), file, "has 2 columns 'tag'")
    assert batchrunner.run(job).rows_ok == 2
    table = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["t", "t"])
    with pytest.raises(InputError, match="has 2 columns 't'"):
        batchrunner.generate(table, prompt="{{ t }}", engine=INSTANT)


def test_templates_are_sandboxed(tmp_path: Path, server: FakeSGLang) -> None:
    """A job file from elsewhere cannot reach Python through a template."""
    prompt = {"user": "{{ text.__class__.__mro__ }}"}
    batchrunner.run(job_of(tmp_path, server, rows=1, prompt=prompt))
    assert server.sent == []


def test_check_refuses_the_same(tmp_path: Path) -> None:
    """`check` finds what a run would refuse, a wrong --set and a job that is not there."""
    file = write_job(job_of(tmp_path, prompt={"text": "txt"}), tmp_path)
    for words in ([file], [file, "--set", "limits.deadlin=3s"], [tmp_path / "jbo.yaml"]):
        refused = batchrun(*words)
        assert refused.exit_code == 2
        assert batchrun("check", *words).stderr == refused.stderr
