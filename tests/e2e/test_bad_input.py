"""Wrong input, jobs, engines and paths are one clear line and exit code 2; a bad record fails its row."""

import csv
import gzip
import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import batchrunner
from batchrunner.core import errors
from batchrunner.core.errors import InputError, JobError, StorageError
from batchrunner.input import csv_records, text_lines
from batchrunner.job.spec import Job
from batchrunner.runner.prepare import prepare
from tests.conftest import INSTANT, ROOT, batchrun, ended, job_of, results_of, rows_in, write_job, write_rows
from tests.support.fake_sglang import FakeSGLang
from tests.support.refusals import refusal, told


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("nowhere.parquet", None, "no such file or directory"),
        ("sheet.xlsx", b"PK\x03\x04 and more", "an ending other than .parquet, .csv"),
        ("in/*.parquet", None, "found no Parquet, CSV, JSON Lines or Arrow file"),
        ("in/", None, "found no Parquet, CSV, JSON Lines or Arrow file"),
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


def test_all_columns_and_templates_in_one_go(tmp_path: Path) -> None:
    """Everything that does not fit the input gets a line, in `check` and at a start."""
    job = job_of(
        tmp_path,
        input={"columns": ["id", "nam", "ttl"], "filter": "ide > 3"},
        prompt={"system": "{{ tone }}", "user": "Say {{ text }} {% if %}"},
        sampling={"temperature": {"column": "temp"}, "stop": {"column": "id"}},
        accept={"expression": "outptu == 1", "regex": "a"},
    )
    file = write_job(job, tmp_path)
    wrong = [
        "accept.expression: unknown column 'outptu'", "prompt.system: unknown column 'tone'",
        "prompt.user: line 1: ", "sampling.temperature: unknown column 'temp'",
        "sampling.stop: column 'id' must hold texts", "input.filter: unknown column 'ide'",
        "input.columns: unknown column 'nam'", "input.columns: unknown column 'ttl'",
    ]  # fmt: skip
    for command in (["check", file], [file]):
        refused = batchrun(*command)
        assert refused.exit_code == 2
        lines = refused.stderr.splitlines()
        assert [line[: len(f"batchrun: {begin}")] for line, begin in zip(lines, wrong, strict=True)] == [
            f"batchrun: {begin}" for begin in wrong
        ]


def test_a_pipe(tmp_path: Path) -> None:
    """Its rows would be gone after they were read once; nothing waits for its writer."""
    pipe = tmp_path / "pipe.parquet"
    os.mkfifo(pipe)
    message = refusal(job_of(tmp_path, input={"path": str(pipe)}), tmp_path)
    told(message, pipe, "is a device or a pipe: save the data to a file")


def test_one_truncated_file_of_several(tmp_path: Path) -> None:
    """A file that was cut off is named among many, before anything is sent."""
    for name in "abc":
        write_rows(tmp_path / "in" / f"{name}.parquet", 100)
    path = tmp_path / "in" / "b.parquet"
    path.write_bytes(path.read_bytes()[:-99])
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


def test_reading_the_filter_can_be_stopped(tmp_path: Path) -> None:
    """It may take half an hour: a signal is heard after every batch."""
    write_rows(tmp_path / "input.parquet", 3000)
    job = Job.model_validate(job_of(tmp_path, input={"filter": "id > 5"}))

    def look() -> None:
        raise EOFError

    with pytest.raises(EOFError):
        prepare(job).selected(look)


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


UNKNOWN = "unknown column 'txt'; did you mean 'text'?"
CHAT = {"user": "{{ text }}"}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"prompt": {"text": "txt"}}, f"prompt.text: {UNKNOWN}"),
    ({"prompt": {"system": "{% if txt %}x{% endif %}", "user": "x"}}, f"prompt.system: {UNKNOWN}"),
    ({"sampling": {"stop": {"column": "txt"}}}, f"sampling.stop: {UNKNOWN}"),
    ({"input": {"filter": "id > 50"}}, "input.filter: true for none of the 10 rows: id > 50"),
    ({"input": {"types": {"id": "string"}}}, "input.types: applies to CSV and JSON Lines"),
    ({"prompt": {"text": "id"}}, "prompt.text: column 'id' must hold texts (got int64)"),
    ({"sampling": {"temperature": {"column": "text"}}}, "must hold numbers (got string)"),
    ({"prompt": {"user": "Say\n\n{% if text %}"}}, "prompt.user: line 3"),
    ({"engine": {"kind": "server", "model": str(ROOT / "docs")}}, "config.json"),
    ({"engine": {"kind": "server", "model": "./nowhere"}}, "no such model directory"),
    # checks of answers
    (
        {"accept": {"json": {"properties": {"a": {"type": "strin"}}}}},
        """['a']['type'] "strin" is not one of""",
    ),
    ({"accept": {"expression": "outptu == 1"}}, "did you mean 'output'?"),
    ({"accept": {"regex": "x", "feedback": True}}, "need a chat prompt"),
    (
        {"prompt": CHAT, "accept": {"regex": "x", "feedback": True}, "sampling": {"n": 2}},
        "accept.feedback cannot be combined with sampling.n above 1",
    ),
    # columns of answers
    ({"output": {"columns": ["tool_calls"]}}, "tool_calls need a chat prompt"),
    # tools
    ({"prompt": {**CHAT, "tools": [{"name": "x"}]}}, "tool 1 is not of the form {type: function"),
    ({"prompt": {"text": "text", "tools": [TOOL]}}, "`tools` has no effect together with `text`"),
    ({"prompt": {**CHAT, "tools": [TOOL]}, "tokenize": "client"}, "the server tokenizes prompts with tools"),
    (
        {"prompt": {**CHAT, "tools": [TOOL]}, "sampling": {"tool_choice": "required", "regex": "a"}},
        "regex cannot be combined with a tool_choice that demands a tool call",
    ),
    # images, audio, documents
    ({"prompt": {"user": "x", "audio": "id"}}, "prompt.audio: column 'id'"),
    ({"prompt": {"user": "x", "pdf": {"column": "text", "pages": "3-1"}}}, "prompt.pdf.pages"),
    ({"prompt": {"text": "{{ text }}", "images": "text"}}, "images.placeholder"),
    ({"prompt": {"user": "x", "images": "text", "truncate": "head"}}, "truncate"),
    # tasks without decoding
    ({"task": "embed", "sampling": {"n": 2}}, "sampling.n: cannot be used for task: embed"),
    ({"task": "embed", "prompt": {"user": "x"}}, "prompt.user: cannot be used for task: embed"),
    ({"output": {"dtype": "float16"}}, "needs task: embed"),
    ({"labels": [" yes"]}, "labels: needs task: score"),
    ({"task": "score"}, "task: score: needs either labels"),
    ({"task": "rerank", "prompt": {"text": "text"}}, "task: rerank: prompt.documents is missing"),
    ({"task": "rerank", "prompt": {"text": "text", "documents": "id"}}, "must hold texts or lists of texts"),
]


@pytest.mark.parametrize(("change", "problem"), WRONG)
def test_wrong_jobs(tmp_path: Path, change: dict[str, Any], problem: str) -> None:
    """A column, a template or a value that cannot be, or has no effect, is told with its place by `check`."""
    refused = batchrun("check", write_job(job_of(tmp_path, **change), tmp_path))
    (line,) = refused.stderr.splitlines()
    assert (refused.exit_code, problem in line) == (2, True), line


def test_differing_schemas(tmp_path: Path) -> None:
    """Files that disagree on a column that the job uses are refused; others do not matter."""
    write_rows(tmp_path / "in" / "a.parquet", 2, more=["a", "b"])
    path = tmp_path / "in" / "b.parquet"
    pq.write_table(pa.table({"id": [1, 2], "text": [1, 2], "more": [1, 2]}), path)
    message = refusal(job_of(tmp_path, input={"path": str(tmp_path / "in")}), tmp_path)
    told(
        message,
        path,
        "column 'text' is int64, but string in",
        "write the column with the same type in all files",
    )
    pq.write_table(pa.table({"text": ["c", "d"], "more": [1, 2]}), path)
    assert batchrunner.run(job_of(tmp_path, input={"path": str(tmp_path / "in")})).rows_ok == 4


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


def test_check_refuses_the_same(tmp_path: Path) -> None:
    """`check` finds what a run would refuse, a wrong --set and a job that is not there."""
    file = write_job(job_of(tmp_path, prompt={"text": "txt"}), tmp_path)
    for words in ([file], [file, "--set", "limits.deadlin=3s"], [tmp_path / "jbo.yaml"]):
        refused = batchrun(*words)
        assert refused.exit_code == 2
        assert batchrun("check", *words).stderr == refused.stderr


def job_on(directory: Path, name: str, content: bytes, **source: Any) -> dict[str, Any]:
    path = directory / name
    path.write_bytes(content)
    source = {"path": str(path), "columns": ["id"], **source}
    return job_of(directory, INSTANT, input=source, limits={"max_failed_rows": 9, "abort_failed_share": 1})


RECORDS = [
    ("a.csv", b"9,a,b", "line 3: has 3 value(s), but the header has 2"),
    (
        "a.csv",
        b"9,caf\xe9",
        "line 3: is not UTF-8: set input.encoding; Excel writes cp1252 or utf-16",
    ),
    ("a.csv", b'9,"a"b', "line 3: has misplaced quotes: ',' expected after '\"'"),
    ("a.csv", b'9,"never closed', "line 3: has misplaced quotes: unexpected end of data"),
    ("a.csv", b"9,a\rb", "line 3: has misplaced quotes: new-line character seen in unquoted field"),
    ("a.tsv", b"9", "line 3: has 1 value(s), but the header has 2"),
    ("a.jsonl", b'{"id": 9', "line 2: not valid JSON: Input data was truncated"),
    (
        "a.jsonl",
        b'{"x": [1, -Infinity]}',
        "line 2: not valid JSON: Infinity is not a valid JSON number (use null)",
    ),
    ("a.jsonl", b"[9]", "line 2: not a JSON object"),
    ("a.jsonl", b'{"text": "\\ud800"}', "line 2: not valid JSON: "),
    (
        "a.jsonl",
        b'{"x": ' + b'{"a":[' * 400 + b"1" + b"]}" * 400 + b"}",
        "line 2: the JSON has more than 48 nested levels",
    ),
]
"""A record that cannot be read, in its file, and what its row says."""


@pytest.mark.parametrize(("name", "record", "problem"), RECORDS)
def test_a_bad_record(tmp_path: Path, name: str, record: bytes, problem: str) -> None:
    """It fails with the line and the reason; the rows around it are done, and no filter hides it."""
    lines = [b'{"id": "7", "text": "a"}', record, b'{"id": "8", "text": "b"}']
    if name != "a.jsonl":
        lines = [b"id,text", b"7,a", record, "8,ü".encode()]
    content = b"\n".join(lines) + b"\n"
    if name == "a.tsv":
        content = content.replace(b",", b"\t")
    job = job_on(tmp_path, name, content, filter="id == '7' or text == 'none'")
    for order in ("input", "prefix"):
        batchrunner.run({**job, "order": order}, fresh=True)
        good, bad = results_of(job)
        assert (good["id"], good["error"], bad["row"]) == ("7", None, 1)
        assert bad["error"].startswith(f"{tmp_path / name}: {problem}")


def test_misplaced_quotes(tmp_path: Path) -> None:
    """Each record with one fails with its line, one that is never closed too; all others are sent."""
    content = 'id,text\n1,"a"x\n2,"b, or\n3,"good ""one"""\n4,"two\nlines"\n5,""z\n6,"open\n7,c\n'
    job = job_on(tmp_path, "a.csv", content.encode(), columns=["id", "text"])
    batchrunner.run(job)
    rows = results_of(job)
    assert [(row["id"], row["text"]) for row in rows if row["error"] is None] == [
        ("3", 'good "one"'), ("4", "two\nlines"), ("7", "c"),
    ]  # fmt: skip
    lines = [row["error"].partition(": line ")[2].partition(":")[0] for row in rows if row["error"]]
    assert lines == ["2", "3", "7", "8"]


@pytest.fixture
def short_lines(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let the longest line, and the longest value of CSV, have 1000 bytes."""
    for module in (csv_records, text_lines):
        monkeypatch.setattr(module, "LONGEST_LINE_BYTES", 1000)
    limit = csv.field_size_limit(1000)
    yield
    csv.field_size_limit(limit)


def file_with(name: str, record: bytes) -> bytes:
    """Return a file with 200 good records, the second of which this one precedes."""
    good = [b'{"id": "%d", "text": "a"}\n' if name == "a.jsonl" else b"%d,a\n"] * 200
    head = (b"" if name == "a.jsonl" else b"id,text\n") + good[0] % 1
    return head + record.replace(b"%s", b"x" * 3000) + b"".join(line % at for at, line in enumerate(good, 3))


@pytest.mark.usefixtures("short_lines")
@pytest.mark.parametrize(
    ("name", "record", "line"),
    [
        ("a.jsonl", b'{"id": "2", "text": "%s"}\n', 2),
        ("a.csv", b"2,%s\n", 3),
        ("a.csv", b'2,"%s"\n', 3),
        ("a.csv", b'2,"%s,\n,""%s""\n"\n', 3),
        ("a.csv", b'2,"' + b"line,of\n" * 300 + b'"\n', 3),
        ("a.csv", b'2,"' + b'a ""word""\n' * 300 + b'and more",\n', 3),
    ],
)
def test_a_very_long_value(tmp_path: Path, name: str, record: bytes, line: int) -> None:
    """A line, or a value of many lines, that is too long fails alone, with its number."""
    job = job_on(tmp_path, name, file_with(name, record))
    batchrunner.run(job)
    rows = results_of(job)
    failed = [row["error"] for row in rows if row["error"]]
    assert [row["id"] for row in rows] == ["1", None, *map(str, range(3, 203))]
    assert [int(error.partition(": line ")[2].partition(":")[0]) for error in failed] == [line]


@pytest.mark.usefixtures("short_lines")
@pytest.mark.parametrize(
    "record",
    [
        b'2,"' + b"line,of\n" * 300 + b'5" wide\n',
        b'2,%s 5" wide\n',
        b'2,"not closed\n',
        b'2,%s"\n',
    ],
)
def test_a_long_value_without_a_closing_quote(tmp_path: Path, record: bytes) -> None:
    """The file is refused with the line: nobody can tell which lines below it are records."""
    line = refusal(job_on(tmp_path, "a.csv", file_with("a.csv", record)), tmp_path)
    assert f"{tmp_path}/a.csv: line 3: a value of more than 0 MiB has no closing quote" in line


@pytest.mark.parametrize(
    ("name", "source", "problem"),
    [
        (
            "a.csv",
            {"encoding": "utf-99"},
            "input.encoding: 'utf-99' is not an encoding of Python: give utf-8, cp1252,",
        ),
        ("a.csv", {"encoding": "utf-16"}, "line 1 is not UTF-16: set input.encoding"),
        ("a.csv", {"delimiter": "\\t"}, "input.delimiter: give one character, such as"),
        ("a.jsonl", {"delimiter": ";"}, "input.delimiter: applies to CSV, and the input has no such file"),
        ("a.csv", {"types": {"txt": "int64"}}, "input.types: unknown column 'txt'; did you mean 'text'?"),
        ("a.csv", {"types": {"id": "integer"}}, "input.types.id: "),
    ],
)
def test_a_wrong_way_to_read_csv(tmp_path: Path, name: str, source: dict[str, Any], problem: str) -> None:
    """It is refused in one line."""
    content = b"id,text\n1,a\n" if name == "a.csv" else b'{"id": 1, "text": "a"}'
    assert problem in refusal(job_on(tmp_path, name, content, **source), tmp_path)


def test_a_whole_number_of_more_than_64_bits(tmp_path: Path) -> None:
    """Its column becomes text, in which each number is as it stands in the file."""
    numbers = [1, 10**30, -(1 << 63) - 1]
    content = "".join(f'{{"id": {n}, "deep": [{{"n": {n}}}], "text": "a"}}\n' for n in numbers)
    job = job_on(tmp_path, "a.jsonl", content.encode(), columns=["id", "deep"])
    batchrunner.run({**job, "prompt": {"text": "{{ id }}"}})
    rows = results_of(job)
    assert [row["id"] for row in rows] == [str(n) for n in numbers]
    assert [row["deep"] for row in rows] == [f'[{{"n":{n}}}]' for n in numbers]


def test_json_lines_files_have_one_schema(tmp_path: Path) -> None:
    """A key, or a wider type, that only one file has is known in all; an added file may not change it."""
    source = tmp_path / "in"
    source.mkdir()
    (source / "a.jsonl").write_text('{"text": "a", "n": 1}\n')
    (source / "b.jsonl").write_text('{"text": "b", "n": 1.5, "more": "m"}\n')
    job = job_of(tmp_path, INSTANT, input={"path": str(source), "columns": ["n", "more"]})
    batchrunner.run(job)
    assert [(row["n"], row["more"]) for row in results_of(job)] == [(1.0, None), (1.5, "m")]
    (source / "c.jsonl").write_text('{"text": "c", "n": "many"}\n')
    told(batchrun(write_job(job, tmp_path)).stderr, "columns.n was", "and is 'string'")


FILES = [
    ("a.csv", b"", "the header is missing"),
    ("a.csv", b"id,text\n", "no rows in 1 file(s)"),
    ("a.csv", "id,text\n1,a\n".encode("utf-16"), "line 1: the header is not UTF-8: set input.encoding"),
    (
        "a.csv",
        "id,text\n1,a\n2,ü\n".encode("cp1252"),
        "line 3 is not UTF-8: set input.encoding; Excel writes",
    ),
    ("a.csv", b'id,"te"xt\n9,a\n', "line 1: the header has misplaced quotes: ',' expected after '\"'"),
    ("a.csv", b"id,text,text\n1,a,b\n", "line 1: the header has 'text' twice"),
    (
        "a.csv.gz",
        gzip.compress(b"id,text\n" + b"1,a\n" * 99, mtime=0)[:-9],
        "not a readable CSV file: Truncated",
    ),
    ("a.jsonl", b"\n", "a.jsonl: is empty: write JSON Lines, an object on each line"),
    ("a.json", b'[{"id": 1,\n"text": "a"}]', "no line is a JSON object (line 1: "),
    (
        "a.jsonl",
        b'{"id": 9007199254740993}\n' + b'{"id": 1}\n' * 5000 + b'{"id": 0.5}\n',
        "Integer value 9007199254740993 not in range",
    ),
    ("a.arrow", b"ARROW1\0\0abc", "not a readable Arrow file"),
]


@pytest.mark.parametrize(("name", "content", "problem"), FILES)
def test_a_bad_file(tmp_path: Path, name: str, content: bytes, problem: str) -> None:
    """It is refused in one line, before anything is sent."""
    line = refusal(job_on(tmp_path, name, content), tmp_path)
    assert str(tmp_path / name) in line or "column" in line
    assert problem in line


ZIP = b"PK\x03\x04\x14\0\0\0\x08\0" + b"\0" * 20
ZSTD_OF_2_GIB = b"\x28\xb5\x2f\xfd\x00\xa8\x09\0\0a"
"""A frame whose window has 2 GiB, as `zstd --long=31` writes it."""


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("a b.csv", ZIP + b"a.csv", "is a ZIP file: unpack it: unzip -p '{path}' > NEW_FILE"),
        ("a.csv", ZIP + b"[Content_Types].xml", "is an Excel workbook: save it as CSV"),
        ("a.jsonl", b"\xfd7zXZ\0 and more", "is a xz file: unpack it: xz -dc {path} > NEW_FILE"),
        ("a.jsonl.zst", ZSTD_OF_2_GIB, "unpack it: zstd -dc --long=31 {path} > NEW_FILE"),
        ("a.parquet", gzip.compress(b"PAR1", mtime=0), "unpack it: gzip -dc {path} > NEW_FILE"),
        ("a.zip", ZIP, "unpack it: unzip -p {path} > NEW_FILE; a file with an ending other"),
    ],
)
def test_a_compressed_file(tmp_path: Path, name: str, content: bytes, problem: str) -> None:
    """Where it cannot be read, the line has the command that unpacks it."""
    line = refusal(job_on(tmp_path, name, content), tmp_path)
    assert problem.format(path=tmp_path / name) in line


def test_another_delimiter(tmp_path: Path) -> None:
    """Each column that is missing is named, and what to write where another character divides columns."""
    refused = batchrun(write_job(job_on(tmp_path, "a.csv", b"id;text\n1;a\n"), tmp_path))
    assert refused.exit_code == 2
    hint = "; if ';' separates the columns of the file, set input.delimiter: \";\" (the input has: id;text)"
    assert refused.stderr.splitlines() == [
        f"batchrun: prompt.text: unknown column 'text'{hint}",
        f"batchrun: input.columns: unknown column 'id'{hint}",
    ]


CLASSES = [
    value
    for value in vars(errors).values()
    if isinstance(value, type) and issubclass(value, errors.BatchrunError)
]


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_each_error_says_what_to_do(kind: type[errors.BatchrunError]) -> None:
    """An error without a hint of its own has that of its class; the printed line is what it was."""
    plain = kind("it is wrong")
    assert len(plain.hint.split()) > 2
    assert (str(plain), str(kind("a", hint="mend it"))) == ("it is wrong", "a: mend it")


@pytest.mark.parametrize(
    ("event", "kind", "code"),
    [
        ("raise LookupError('no such thing')", "LookupError", 1),
        ("os.kill(os.getpid(), signal.SIGINT); time.sleep(60)", "BatchrunError", 130),
    ],
)
def test_what_nobody_foresaw(tmp_path: Path, event: str, kind: str, code: int) -> None:
    """An unforeseen error and a Ctrl-C are JSON too, also while the command has other work than a run."""
    script = (
        "import os, signal, sys, time, batchrunner.cli, batchrunner.runner.check as check\n"
        f"def fails(*_, **__): {event}\n"
        "check.check = fails\n"
        "sys.argv = ['batchrun', 'check', 'job.yaml', '--json']\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "batchrunner.cli.main()\n"
    )
    environ = {"TMPDIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    done = ended(sys.executable, "-c", script, env=environ)
    found = json.loads(done.stdout)
    assert done.returncode == found["exit_code"] == code
    assert found["error"]["type"] == kind
    (line,) = done.stderr.strip().splitlines()  # typer has an empty line before what follows an EOFError
    assert line.startswith(f"batchrun: {found['error']['message']}")
    assert "the same command" in found["error"]["hint"]
    assert len(list(tmp_path.glob("batchrun-error-*"))) == (code == 1)


def test_not_sglang(tmp_path: Path) -> None:
    """Something else that answers at the address is said not to be SGLang."""
    with FakeSGLang(is_sglang=False) as web:
        told(refusal(job_of(tmp_path, web), tmp_path), web.url, "not SGLang")


def test_api_key_wanted(tmp_path: Path, server: FakeSGLang, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that wants an API key is answered with where the key comes from, and not with the key."""
    server.api_key = "right"
    monkeypatch.setenv("SGLANG_API_KEY", "wrong")
    message = refusal(job_of(tmp_path, server), tmp_path)
    told(message, server.url, "401", "engine.api_key_env")
    assert "wrong" not in message


@pytest.mark.parametrize("below", ["", "/run", "/deep/run"])
def test_output_is_a_file(tmp_path: Path, below: str) -> None:
    """An output path that is a file, or lies under one, is refused."""
    (tmp_path / "out").write_text("precious")
    job = job_of(tmp_path, output={"path": f"{tmp_path}/out{below}"})
    told(refusal(job, tmp_path), tmp_path / "out", "is a file: give a directory")


@pytest.mark.parametrize("section", ["input", "output"])
def test_a_path_that_is_no_text(tmp_path: Path, section: str) -> None:
    """A path of bytes that are no UTF-8, as a shell passes them on, is refused in one line."""
    changes: dict[str, Any] = {section: {"path": f"{tmp_path}/\udce9"}}
    with pytest.raises(JobError, match=f"{section}.path.*not valid UTF-8"):
        batchrunner.run(job_of(tmp_path, **changes))


def test_a_directory_in_the_logs_place(tmp_path: Path) -> None:
    """Where the event log cannot be written the run does not begin."""
    (tmp_path / "run" / "events.jsonl").mkdir(parents=True)
    with pytest.raises(StorageError, match=r"events\.jsonl: cannot be written: Is a directory") as caught:
        batchrunner.run(job_of(tmp_path))
    assert str(caught.value).endswith(
        "make sure that this place can be written and run the same command again"
    )


def test_an_existing_run_is_left_alone(tmp_path: Path) -> None:
    """A mistake in the job does not cost the results that are there, with --fresh neither."""
    job = job_of(tmp_path, INSTANT)
    batchrunner.run(job)
    refusal({**job, "prompt": {"text": "txt"}}, tmp_path, "--fresh")
    refusal({**job, "engine": "http://127.0.0.1:9"}, tmp_path, "--fresh")


def test_a_link_to_a_run(tmp_path: Path) -> None:
    """A link to a run is that run: it is resumed, and refused to another job; a circle is refused."""
    job = job_of(tmp_path)
    assert batchrunner.run(job, overrides=["input.limit=4"]).rows_ok == 4
    (tmp_path / "link").symlink_to(tmp_path / "run")
    assert batchrunner.run({**job, "output": {"path": str(tmp_path / "link")}}).rows_resumed == 4
    other = job_of(tmp_path, output={"path": str(tmp_path / "link")}, sampling={"temperature": 0.5})
    told(refusal(other, tmp_path), "sampling.temperature")
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    assert refusal(job_of(tmp_path, output={"path": f"{tmp_path}/circle/run"}), tmp_path)


@pytest.mark.parametrize("pattern", ["", "/**/*.parquet", "/*/*/*.parquet"])
def test_results_of_another_run_in_the_input(tmp_path: Path, pattern: str) -> None:
    """A directory or a pattern that also names the results of another run is refused."""
    write_rows(tmp_path / "data" / "day" / "x" / "a.parquet", 10)
    source = {"path": f"{tmp_path}/data{pattern}"}
    job = job_of(tmp_path, input=source, output={"path": f"{tmp_path}/data/run1"})
    for limit in (5, 10):  # its own results do not count
        batchrunner.run(job, overrides=[f"input.limit={limit}"])
    assert rows_in(job) == [*range(10)]
    second = {**job, "output": {"path": f"{tmp_path}/data/run2"}}
    told(refusal(second, tmp_path), f"also matches files of the run {tmp_path}/data/run1")
    meant = {**second, "input": {"path": f"{tmp_path}/data/run1/parts"}, "prompt": {"text": "output"}}
    assert batchrunner.run(meant).rows_ok == 10


def test_types(tmp_path: Path) -> None:
    """CSV keeps texts as they stand; a type makes values of them, and one that does not fit fails its row."""
    content = b"id,text,n,x,b,d\n007,a,5,0.5,true,2024-02-29\n008,b,,,,\n009,c,1.5,nan,no,2024-13-01\n"
    types = {"n": "int64", "x": "float64", "b": "bool", "d": "date"}
    job = job_on(tmp_path, "a.csv", content, types=types, columns=["id", "n", "x", "b"])
    job["prompt"] = {"text": "{{ text }}{% if n is not none %} {{ n + 1 }} {{ d.year }}{% endif %}"}
    batchrunner.run(job)
    one, two, three = results_of(job)
    assert (one["id"], one["n"], one["x"], one["b"], one["error"]) == ("007", 5, 0.5, True, None)
    assert (two["id"], two["n"], two["x"], two["b"], two["error"]) == ("008", None, None, None, None)
    assert "line 4: column 'n': '1.5' is not int64" in three["error"]


def test_two_models(tmp_path: Path, server: FakeSGLang) -> None:
    """Addresses of different models are not one engine."""
    with FakeSGLang(model="other/model") as other:
        told(refusal(job_of(tmp_path, [server, other]), tmp_path), "fake/model", "other/model")
