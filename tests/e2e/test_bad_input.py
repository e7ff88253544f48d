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


def test_missing_input(tmp_path: Path, server: FakeSGLang) -> None:
    """A path that is not there is named."""
    path = tmp_path / "nowhere.parquet"
    told(
        refusal(job_of(tmp_path, server, input={"path": str(path)}), tmp_path),
        path,
        "no such file or directory",
    )
    assert server.sent == []


def test_another_format(tmp_path: Path) -> None:
    """A spreadsheet is not called a broken Parquet file only: the endings that are read are named."""
    (tmp_path / "sheet.xlsx").write_bytes(b"PK\x03\x04 and more of a spreadsheet")
    place = tmp_path / "sheet.xlsx"
    told(
        refusal(job_of(tmp_path, input={"path": str(place)}), tmp_path),
        place,
        "another ending than .parquet, .csv",
    )


@pytest.mark.parametrize("path", ["*.parquet", ""])
def test_no_input_files(tmp_path: Path, path: str) -> None:
    """A glob or a directory without a file is named as it was written."""
    (tmp_path / "in").mkdir()
    place = f"{tmp_path}/in/{path}"
    told(refusal(job_of(tmp_path, input={"path": place}), tmp_path), place, "no Parquet file there")


@pytest.mark.parametrize("within", ["", "in"])
def test_a_pipe(tmp_path: Path, within: str) -> None:
    """Its rows would be gone after they were read once; nothing waits for its writer."""
    pipe = tmp_path / within / "pipe.parquet"
    pipe.parent.mkdir(exist_ok=True)
    os.mkfifo(pipe)
    job = job_of(tmp_path, input={"path": str(tmp_path / within if within else pipe)})
    told(refusal(job, tmp_path), pipe, "is a device or a pipe: save it to a file")


def test_text_file(tmp_path: Path) -> None:
    """A file that is only called Parquet is not one."""
    (tmp_path / "input.parquet").write_text("id,text\n1,hello world\n")
    told(refusal(job_of(tmp_path), tmp_path), tmp_path / "input.parquet", "not a readable Parquet file")


@pytest.mark.parametrize("share", [0.3, 0.99])
def test_truncated_file(tmp_path: Path, share: float) -> None:
    """A file that was cut off is refused before anything is sent."""
    path = write_rows(tmp_path / "input.parquet", 100)
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])
    told(refusal(job_of(tmp_path), tmp_path), path, "not a readable Parquet file")


def test_one_bad_file_of_several(tmp_path: Path) -> None:
    """The one bad file among many is named."""
    for name in "abc":
        write_rows(tmp_path / "in" / f"{name}.parquet", 3)
    (tmp_path / "in" / "b.parquet").write_bytes(b"PAR1 and then nothing")
    message = refusal(job_of(tmp_path, input={"path": str(tmp_path / "in")}), tmp_path)
    told(message, tmp_path / "in" / "b.parquet", "not a readable Parquet file")


@pytest.mark.parametrize("path", ["in", "in/*/*.parquet"])
@pytest.mark.parametrize("name", [b"deep/bad\xff.parquet", b"bad\xff/a.parquet"])
def test_a_file_whose_name_is_no_text(tmp_path: Path, path: str, name: bytes) -> None:
    """A name on disk that is not UTF-8 is told in one line, as the bytes that it is; `check` does so too."""
    good = write_rows(tmp_path / "in" / "deep" / "good.parquet", 2)
    bad = tmp_path / "in" / os.fsdecode(name)
    bad.parent.mkdir(exist_ok=True)
    shutil.copy(good, bad)
    job = job_of(tmp_path, input={"path": f"{tmp_path}/{path}"})
    told(refusal(job, tmp_path), repr(os.fsencode(bad)), "not valid UTF-8")
    checked = batchrun("check", write_job(job, tmp_path))
    assert checked.exit_code == 2
    told(checked.stderr, repr(os.fsencode(bad)))


def test_no_rows(tmp_path: Path) -> None:
    """A file without a row is an error and not a run that is done at once."""
    told(refusal(job_of(tmp_path, rows=0), tmp_path), tmp_path / "input.parquet", "no rows")


def test_no_row_selected(tmp_path: Path, server: FakeSGLang) -> None:
    """A filter that is true for no row is a mistake, like a file without rows."""
    message = refusal(job_of(tmp_path, server, input={"filter": "id > 50"}), tmp_path)
    told(message, "input.filter: true for none of the 10 rows: id > 50")
    assert server.sent == []


def test_reading_the_filter_can_be_stopped(tmp_path: Path) -> None:
    """It may take half an hour: a signal is heard after every batch."""
    write_rows(tmp_path / "input.parquet", 3000)
    job = Job.model_validate(job_of(tmp_path, input={"filter": "id > 5"}))

    class StopError(Exception):
        pass

    def look() -> None:
        raise StopError

    with pytest.raises(StopError):
        prepare(job).selected(look)


def test_unreadable_file(tmp_path: Path) -> None:
    """A file that may not be read is named."""
    if AS_ROOT:
        pytest.skip("root may read everything")
    path = write_rows(tmp_path / "input.parquet", 3)
    path.chmod(0)
    file = write_job(job_of(tmp_path), tmp_path)
    result = batchrun(file)
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


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"prompt": {"text": "txt"}}, "prompt.text"),
        ({"prompt": {"messages": "txt"}}, "prompt.messages"),
        ({"prompt": {"input_ids": "txt"}}, "prompt.input_ids"),
        ({"prompt": {"user": "Say {{ txt }}"}}, "prompt.user"),
        ({"prompt": {"system": "{{ txt }}", "user": "x"}}, "prompt.system"),
        ({"prompt": {"text": "{% if txt %}x{% endif %}"}}, "prompt.text"),
        ({"input": {"columns": ["txt"]}}, "input.columns"),
        ({"input": {"filter": "txt == 'x'"}}, "input.filter"),
        ({"sampling": {"temperature": {"column": "txt"}}}, "sampling.temperature"),
        ({"sampling": {"stop": {"column": "txt"}}}, "sampling.stop"),
        ({"sampling": {"lora_path": {"column": "txt"}}}, "sampling.lora_path"),
    ],
)
def test_unknown_columns(tmp_path: Path, server: FakeSGLang, change: dict[str, Any], where: str) -> None:
    """A column that is not there is named with its place in the job, the nearest one, and all there are."""
    message = refusal(job_of(tmp_path, server, **change), tmp_path)
    told(message, where, "unknown column 'txt'; did you mean 'text'?", "(the input has: id, text)")
    assert server.sent == []


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({"prompt": {"text": "id"}}, ["prompt.text", "'id'", "must hold texts (got int64)"]),
        ({"prompt": {"messages": "id"}}, ["prompt.messages", "lists of {role, content}", "(got int64)"]),
        ({"prompt": {"input_ids": "text"}}, ["prompt.input_ids", "lists of integers (got string)"]),
        ({"prompt": {"input_ids": "id"}}, ["prompt.input_ids", "lists of integers (got int64)"]),
        (
            {"sampling": {"temperature": {"column": "text"}}},
            ["sampling.temperature", "numbers (got string)", "a type in input.types"],
        ),
        ({"sampling": {"stop": {"column": "id"}}}, ["sampling.stop", "(got int64)"]),
        ({"sampling": {"json_schema": {"column": "id"}}}, ["sampling.json_schema", "(got int64)"]),
        ({"sampling": {"regex": {"column": "id"}}}, ["sampling.regex", "(got int64)"]),
        ({"sampling": {"stop_token_ids": {"column": "id"}}}, ["sampling.stop_token_ids", "(got int64)"]),
        ({"sampling": {"ignore_eos": {"column": "text"}}}, ["sampling.ignore_eos", "(got string)"]),
        ({"sampling": {"lora_path": {"column": "id"}}}, ["sampling.lora_path", "(got int64)"]),
        ({"input": {"columns": ["id"], "rename": {"id": "row"}}}, ["'row'", "input.rename"]),
    ],
)
def test_columns_of_the_wrong_type(
    tmp_path: Path, server: FakeSGLang, change: dict[str, Any], parts: list[str]
) -> None:
    """A column that cannot be what the job wants it to be is refused before anything is sent."""
    told(refusal(job_of(tmp_path, server, **change), tmp_path), *parts)
    assert server.sent == []


def test_a_reserved_name(tmp_path: Path) -> None:
    """A carried column that a result has of its own is refused with the `rename` that helps."""
    write_rows(tmp_path / "input.parquet", 2, output=["a", "b"])
    message = refusal(job_of(tmp_path, input={"columns": ["output"]}), tmp_path)
    told(message, "'output'", "input.rename: {output: input_output}")


@pytest.mark.parametrize("extra", [{"more": [1, 2]}, {"text": [1, 2]}, {}])
def test_differing_schemas(tmp_path: Path, extra: dict[str, Any]) -> None:
    """Files that disagree on a column that the job uses are refused."""
    for name in "ab":
        columns = extra if name == "b" else {"text": ["x", "y"]}
        (tmp_path / "in").mkdir(exist_ok=True)
        pq.write_table(pa.table({"id": [1, 2], **columns}), tmp_path / "in" / f"{name}.parquet")
    message = refusal(job_of(tmp_path, input={"path": str(tmp_path / "in")}), tmp_path)
    told(message, tmp_path / "in" / "b.parquet", "'text'")


@pytest.mark.parametrize("name", ["a", "b"])
@pytest.mark.parametrize("prompt", [{"text": "tag"}, {"user": "{{ tag }}"}])
def test_a_name_of_two_columns(tmp_path: Path, name: str, prompt: dict[str, str]) -> None:
    """A column that a file has twice is refused where the job uses it, and only there."""
    for each in "ab":
        write_rows(tmp_path / "in" / f"{each}.parquet", 2, tag=["x", "y"])
    file = tmp_path / "in" / f"{name}.parquet"
    pq.write_table(pq.read_table(file).append_column("tag", [["z", "z"]]), file)
    job = job_of(tmp_path, input={"path": str(tmp_path / "in")})
    told(refusal({**job, "prompt": prompt}, tmp_path), file, "has 2 columns 'tag'")
    assert batchrunner.run(job).rows_ok == 4


def test_a_name_of_two_columns_in_a_table() -> None:
    """The library says the same of a table."""
    table = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["t", "t"])
    with pytest.raises(InputError, match="has 2 columns 't'"):
        batchrunner.generate(table, prompt="{{ t }}", engine=INSTANT)


@pytest.mark.parametrize(
    ("prompt", "where"),
    [
        ({"user": "Say {{ text"}, "prompt.user: line 1"),
        ({"user": "Say\n\n{% if text %}"}, "prompt.user: line 3"),
        ({"system": "{{ text | nonsense }}", "user": "x"}, "prompt.system: line 1"),
        ({"text": "{% for x in %}"}, "prompt.text: line 1"),
    ],
)
def test_template_syntax(tmp_path: Path, server: FakeSGLang, prompt: dict[str, str], where: str) -> None:
    """A template that cannot be read is refused with its place and line."""
    told(refusal(job_of(tmp_path, server, prompt=prompt), tmp_path), where)
    assert server.sent == []


def test_filter_syntax(tmp_path: Path) -> None:
    """A filter that cannot be read is refused with its place."""
    told(refusal(job_of(tmp_path, input={"filter": "id >"}), tmp_path), "input.filter")


@pytest.mark.parametrize(
    "template", ["{{ text.__class__ }}", "{{ text.__class__.__mro__ }}", "{{ ''.__class__ }}{{ text }}"]
)
def test_templates_are_sandboxed(tmp_path: Path, server: FakeSGLang, template: str) -> None:
    """A job file from elsewhere cannot reach Python through a template."""
    batchrunner.run(job_of(tmp_path, server, rows=1, prompt={"user": template}))
    assert server.sent == []


GOOD = """\
input: {path: input.parquet}
prompt: {text: text}
output: {path: run}
engine: {kind: simulated}
"""


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("- a\n- list\n", ["a job is a mapping", "(got a list)"]),
        ("", ["a job is a mapping", "(got nothing)"]),
        ("input: [\n", ["not valid YAML", "line"]),
        (GOOD + "engine: {kind: simulated}\n", ["line 5", "'engine' is given twice"]),
        (GOOD.replace("text: text", "text: text, text: id"), ["line 2", "'text' is given twice"]),
        (GOOD + "limits: {deadline: 5 parsecs}\n", ["limits.deadline", "'5 parsecs'", "90s"]),
        (GOOD + "sampling: {temperature: hot}\n", ["sampling.temperature", "'hot'"]),
        (GOOD + "window: wide\n", ["window", "'wide'"]),
        (GOOD + "samplng: {top_k: 1}\n", ["'samplng'", "did you mean 'sampling'?"]),
        (GOOD.replace("prompt: {text: text}\n", ""), ["prompt is missing"]),
    ],
)
def test_job_files(tmp_path: Path, text: str, parts: list[str]) -> None:
    """A job file that is not a job is refused with its name, the place and what would be right."""
    told(refusal(text, tmp_path), tmp_path / "job.yaml", *parts)


def test_no_job_file(tmp_path: Path) -> None:
    """A job file that is not there is named."""
    result = batchrun(tmp_path / "jbo.yaml")
    assert (result.exit_code, result.stderr) == (2, f"batchrun: {tmp_path}/jbo.yaml: no such job file\n")


def test_bad_override(tmp_path: Path) -> None:
    """A wrong --set is refused as a wrong file is."""
    told(refusal(job_of(tmp_path), tmp_path, "--set", "limits.deadlin=3s"), "limits.deadlin", "deadline")


def test_check_refuses_the_same(tmp_path: Path) -> None:
    """`check` finds what a run would refuse."""
    file = write_job(job_of(tmp_path, prompt={"text": "txt"}), tmp_path)
    assert batchrun("check", file).stderr == batchrun(file).stderr


@pytest.mark.parametrize("rows", [[1, 2], "text", {"a": 1}, [{"a": object()}]])
def test_rows_that_are_no_table(rows: Any) -> None:
    """The library refuses rows that make no table with the same kind of error."""
    with pytest.raises(InputError, match="rows: "):
        batchrunner.generate(rows, prompt="{{ a }}", engine=INSTANT)
