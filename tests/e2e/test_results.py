"""What a run leaves behind: parts, their columns and types, the report, the merged dataset."""

from __future__ import annotations

import datetime as dt
import io
import json
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import batchrunner
from batchrunner.core.errors import InputError, OutputError
from batchrunner.dispatch.snapshot import ProgressBar, Snapshot
from batchrunner.output.events import read_events
from batchrunner.output.run_dir import RunDir
from batchrunner.output.task_lock import hold_task
from batchrunner.report.totals import report_of_all
from batchrunner.runner.status import status
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
from tests.support.fake_sglang import FakeSGLang, Sent
from tests.support.launchable import launchable

if TYPE_CHECKING:
    from collections.abc import Callable

UTC = dt.timezone.utc  # noqa: UP017 - as pyarrow returns it


# --- a result row ---


def test_columns_and_types(tmp_path: Path, server: FakeSGLang) -> None:
    """Whoever reads the parts finds the promised columns, in their order and with their types."""
    job = job_of(tmp_path, server, input={"columns": ["id"]})
    batchrunner.run(job)
    (part,) = parts_of(job["output"]["path"])
    assert {field.name: str(field.type) for field in part.schema} == {
        "row": "int64",
        "id": "int64",
        "output": "string",
        "finish_reason": "string",
        "prompt_tokens": "int32",
        "cached_tokens": "int32",
        "completion_tokens": "int32",
        "latency_s": "double",
        "attempts": "int32",
        "error": "string",
    }
    first = results_of(job)[0]
    assert first.pop("latency_s") > 0
    assert first == {
        "row": 0,
        "id": 0,
        "output": "answer 0 to row 0",
        "finish_reason": "stop",
        "prompt_tokens": 2,
        "cached_tokens": 1,
        "completion_tokens": 5,
        "attempts": 1,
        "error": None,
    }


@pytest.mark.parametrize("prompt", [{"text": "text"}, {"user": "{{ text }}"}])
def test_samples_are_lists(tmp_path: Path, server: FakeSGLang, prompt: dict[str, str]) -> None:
    """With n > 1 each sample has its own output, finish reason and token count, from either endpoint."""
    server.script = lambda sent: "too long" if sent.prompt == "row 1" else "answer"
    job = job_of(tmp_path, server, rows=2, prompt=prompt, sampling={"n": 3})
    batchrunner.run(job)
    good, bad = results_of(job)
    assert good["output"] == [f"answer {i} to row 0" for i in range(3)]
    assert (good["finish_reason"], good["completion_tokens"]) == (["stop"] * 3, [5, 5, 5])
    assert good["prompt_tokens"] == 2
    assert (bad["output"], bad["finish_reason"], bad["completion_tokens"]) == (None, None, None)
    assert report_of(job)["output_tokens"] == 15


def test_parts_are_compressed_with_zstd(tmp_path: Path) -> None:
    """Results take no more room than they must."""
    job = job_of(tmp_path)
    batchrunner.run(job)
    (path,) = (tmp_path / "run" / "parts").iterdir()
    with pq.ParquetFile(path) as part:
        assert part.metadata.row_group(0).column(0).compression == "ZSTD"


@pytest.mark.parametrize("rows", [1, 7, 8, 9])
def test_part_rows(tmp_path: Path, rows: int) -> None:
    """A part has at most `part_rows` rows, whatever the number of rows."""
    job = job_of(tmp_path, rows=rows, output={"part_rows": 4}, window=1)
    batchrunner.run(job)
    sizes = [part.num_rows for part in parts_of(tmp_path / "run")]
    assert sum(sizes) == rows
    assert max(sizes) <= 4


# --- carried columns ---

MOMENT = dt.datetime(2024, 2, 29, 12, 30, 15, 123456, tzinfo=UTC)
CARRIED: dict[str, pa.Array[Any]] = {
    "timestamp": pa.array([MOMENT, None, MOMENT], pa.timestamp("us", "UTC")),
    "nanoseconds": pa.array([1, 2, None], pa.timestamp("ns")),
    "date": pa.array([dt.date(2024, 2, 29), None, dt.date(1, 1, 1)]),
    "decimal": pa.array([Decimal("1.10"), None, Decimal("-99999999.99")], pa.decimal128(20, 2)),
    "list": pa.array([[1], None, []], pa.list_(pa.int16())),
    "struct": pa.array([{"a": "x", "b": [1.5]}, None, {"a": None, "b": None}]),
    "map": pa.array([[("k", 1)], None, []], pa.map_(pa.string(), pa.int8())),
    "dictionary": pa.array(["a", None, "b"]).dictionary_encode(),
    "binary": pa.array([b"\xff\x00", None, b""]),
    "large_string": pa.array(["a", None, ""], pa.large_string()),
    "fixed": pa.array([[1, 2], None, [3, 4]], pa.list_(pa.int32(), 2)),
    "unsigned": pa.array([2**64 - 1, None, 0], pa.uint64()),
    "half": pa.array([1.5, None, 2.5], pa.float32()),
    "boolean": pa.array([True, None, False]),
    "time": pa.array([dt.time(1, 2, 3), None, dt.time(0)], pa.time64("us")),
    "null": pa.nulls(3),
}


@pytest.mark.parametrize("name", CARRIED)
def test_carried_columns_keep_their_types(tmp_path: Path, name: str) -> None:
    """A carried column comes out as it went in, type and values, also through several parts and `merge`."""
    source = pa.table({"text": ["row 0", "row 1", "row 2"], name: CARRIED[name]})
    pq.write_table(source, tmp_path / "input.parquet", row_group_size=1)
    job = job_of(tmp_path, input={"columns": [name]}, output={"part_rows": 2})
    batchrunner.run(job)
    expected = pq.read_table(tmp_path / "input.parquet").column(name)
    parts = pa.concat_tables(parts_of(tmp_path / "run")).sort_by("row").column(name)
    merged = pq.read_table(batchrun_merge(tmp_path / "run")).column(name)
    assert parts.type == merged.type == expected.type
    assert parts.to_pylist() == merged.to_pylist() == expected.to_pylist()


VIEWS: dict[str, tuple[pa.DataType, list[Any]]] = {
    "large_list": (pa.large_list(pa.string_view()), [["a"], None, []]),
    "fixed": (pa.list_(pa.binary_view(), 1), [[b"a"], None, [None]]),
    "map": (pa.map_(pa.string_view(), pa.list_(pa.string_view())), [[("a", ["b"])], None, []]),
    "list_view": (pa.list_view(pa.string_view()), [["a"], None, []]),
}


@pytest.mark.parametrize("name", VIEWS)
def test_views_within_carried_columns(tmp_path: Path, name: str) -> None:
    """Arrow cannot pick views, whatever they lie in: they are carried as texts and bytes."""
    kind, values = VIEWS[name]
    table = pa.table({"text": ["row 0", "row 1", "row 2"], "of_views": pa.array(values, kind)})
    pq.write_table(table, tmp_path / "input.parquet")
    job = job_of(tmp_path, input={"columns": ["of_views"]})
    batchrunner.run(job)
    assert [row["of_views"] for row in results_of(job)] == values


DECLARED: dict[str, tuple[pa.DataType, pa.DataType, list[Any], list[Any]]] = {
    "number": (pa.int64(), pa.int64(), [1, 2], [None, 3]),
    "dictionary": (*[pa.dictionary(pa.int32(), pa.string())] * 2, ["a", "b"], [None, "b"]),
    "list": (
        pa.list_(pa.field("item", pa.string(), nullable=False)),
        pa.list_(pa.field("item", pa.string(), metadata={"of": "another"})),
        [["a"], []],
        [None, [None]],
    ),
    "struct": (
        pa.struct([pa.field("a", pa.int8(), nullable=False)]),
        pa.struct([pa.field("a", pa.int8())]),
        [{"a": 1}, {"a": 2}],
        [None, {"a": None}],
    ),
    "map": (
        pa.map_(pa.string(), pa.field("value", pa.int8(), nullable=False)),
        pa.map_(pa.string(), pa.int8()),
        [[("k", 1)], []],
        [None, [("k", None)]],
    ),
}


@pytest.mark.parametrize("order", ["input", "prefix"])
@pytest.mark.parametrize("names", ["ab", "ba"])
@pytest.mark.parametrize("column", DECLARED)
def test_one_file_says_that_it_has_no_nulls(tmp_path: Path, column: str, names: str, order: str) -> None:
    """Files agree on a carried column whatever each of them says of nulls and in its metadata."""
    full, holey, *both = DECLARED[column]
    fields = [pa.field("of", full, nullable=False, metadata={"by": "a"}), pa.field("of", holey)]
    (tmp_path / "in").mkdir()
    for name, field, values in zip(names, fields, both, strict=True):
        schema = pa.schema([pa.field("text", pa.string()), field], metadata={"file": name})
        columns = [pa.array(["row 0", "row 1"]), pa.array(values, field.type)]
        pq.write_table(pa.Table.from_arrays(columns, schema=schema), tmp_path / "in" / f"{name}.parquet")
    job = job_of(tmp_path, input={"path": str(tmp_path / "in"), "columns": ["of"]}, order=order)
    batchrunner.run(job)
    expected = [value for _, values in sorted(zip(names, both, strict=True)) for value in values]
    assert [row["of"] for row in results_of(job)] == expected
    assert pq.read_table(batchrun_merge(tmp_path / "run")).column("of").to_pylist() == expected


def batchrun_merge(run: Path) -> Path:
    result = batchrun("merge", run)
    assert result.exit_code == 0, result.stderr
    return Path(result.stdout.strip())


@settings(max_examples=25)
@given(data=st.data())
def test_carried_rows_stay_with_their_results(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """However rows are grouped, batched and ordered, each result stands beside its own carried values."""
    texts = data.draw(st.lists(st.text(min_size=1, max_size=5), min_size=1, max_size=40))
    tmp_path = tmp_path_factory.mktemp("carried")
    table = pa.table({"text": texts, "tag": pa.array(texts).dictionary_encode(), "n": range(len(texts))})
    pq.write_table(
        table, tmp_path / "input.parquet", row_group_size=data.draw(st.integers(1, 10), "row group")
    )
    part_rows = data.draw(st.integers(1, 10), "part")
    with FakeSGLang() as server:
        job = job_of(
            tmp_path, server, input={"columns": ["tag", "n", "text"]}, output={"part_rows": part_rows}
        )
        batchrunner.run(job)
    rows = results_of(job)
    assert [row["row"] for row in rows] == [row["n"] for row in rows] == list(range(len(texts)))
    assert [row["tag"] for row in rows] == [row["text"] for row in rows] == texts
    assert [row["output"] for row in rows] == [f"answer 0 to {text}" for text in texts]


def test_rename(tmp_path: Path) -> None:
    """A carried column may get another name, such as one that a result has of its own."""
    write_rows(tmp_path / "input.parquet", 3, output=["a", "b", "c"])
    job = job_of(tmp_path, input={"columns": ["output", "id"], "rename": {"output": "reference"}})
    batchrunner.run(job)
    (part,) = parts_of(tmp_path / "run")
    assert part.schema.names[:4] == ["row", "reference", "id", "output"]
    assert part.column("reference").to_pylist() == ["a", "b", "c"]


# --- prompts ---


def test_templates_make_messages(tmp_path: Path, server: FakeSGLang) -> None:
    """`system` and `user` templates reach the server as messages; its chat template is applied there."""
    job = job_of(
        tmp_path,
        server,
        rows=1,
        prompt={
            "system": "Be {{ id }}.",
            "user": "Say {{ text }}",
            "chat_template_kwargs": {"enable_thinking": False},
        },
    )
    batchrunner.run(job)
    (sent,) = server.sent
    assert sent.path == "/v1/chat/completions"
    assert sent.body["messages"] == [
        {"role": "system", "content": "Be 0."},
        {"role": "user", "content": "Say row 0"},
    ]
    assert sent.body["chat_template_kwargs"] == {"enable_thinking": False}


def test_a_column_of_messages(tmp_path: Path, server: FakeSGLang) -> None:
    """A conversation that stands in a column is sent as it is."""
    talk = [[{"role": "user", "content": "hello"}], [{"role": "user", "content": "bye"}]]
    pq.write_table(pa.table({"talk": talk}), tmp_path / "input.parquet")
    job = job_of(tmp_path, server, prompt={"messages": "talk"})
    batchrunner.run(job)
    assert sorted(server.prompts) == ["bye", "hello"]
    assert server.sent[0].path == "/v1/chat/completions"


@pytest.mark.parametrize("prompt", ["text", "{{ text }}"])
def test_text_is_sent_as_it_is(tmp_path: Path, server: FakeSGLang, prompt: str) -> None:
    """A text column, or a template of a text, goes to the model without a chat template."""
    batchrunner.run(job_of(tmp_path, server, rows=1, prompt={"text": prompt}))
    (sent,) = server.sent
    assert (sent.path, sent.body["text"]) == ("/generate", "row 0")


def test_token_ids_are_sent_as_they_are(tmp_path: Path, server: FakeSGLang) -> None:
    """Whoever tokenises for himself gets exactly these tokens to the model."""
    pq.write_table(pa.table({"ids": [[1, 2], [3]]}), tmp_path / "input.parquet")
    batchrunner.run(job_of(tmp_path, server, prompt={"input_ids": "ids"}))
    assert sorted(sent.body["input_ids"] for sent in server.sent) == [[1, 2], [3]]


def test_a_prompt_without_columns(tmp_path: Path, server: FakeSGLang) -> None:
    """A prompt that is the same for all rows needs no column, and nothing is carried either."""
    job = job_of(tmp_path, server, rows=5, prompt={"user": "Make up a name."}, input={"limit": 3})
    batchrunner.run(job)
    assert server.prompts == ["Make up a name."] * 3
    assert [row["row"] for row in results_of(job)] == [0, 1, 2]


# --- sampling ---


@pytest.mark.parametrize("prompt", [{"text": "text"}, {"user": "{{ text }}"}])
def test_sampling_from_columns(tmp_path: Path, server: FakeSGLang, prompt: dict[str, str]) -> None:
    """A row brings its own value, a null leaves the engine's default, and the rest is the job's."""
    write_rows(tmp_path / "input.parquet", 3, heat=[0.5, None, 0.0], seed=[1, 2, None])
    job = job_of(
        tmp_path,
        server,
        prompt=prompt,
        sampling={"temperature": {"column": "heat"}, "sampling_seed": {"column": "seed"}, "top_k": 7},
    )
    batchrunner.run(job)
    found = {
        sent.prompt: (
            sampling_of(sent).get("temperature"),
            sampling_of(sent).get("sampling_seed", sampling_of(sent).get("seed")),
            sampling_of(sent)["top_k"],
        )
        for sent in server.sent
    }
    assert found == {"row 0": (0.5, 1, 7), "row 1": (None, 2, 7), "row 2": (0.0, None, 7)}


def sampling_of(sent: Sent) -> dict[str, Any]:
    found: dict[str, Any] = sent.body.get("sampling_params", sent.body)
    return found


def test_a_schema_reaches_either_endpoint(tmp_path: Path, server: FakeSGLang) -> None:
    """One job with a JSON schema means the same with and without a chat template."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    job = job_of(tmp_path, server, rows=1, sampling={"json_schema": schema, "stop": ["END"]})
    batchrunner.run(job)
    batchrunner.run({**job, "prompt": {"user": "{{ text }}"}, "output": {"path": str(tmp_path / "chat")}})
    raw, chat = server.sent
    assert json.loads(raw.body["sampling_params"]["json_schema"]) == schema
    assert chat.body["response_format"]["json_schema"]["schema"] == schema
    assert raw.body["sampling_params"]["stop"] == chat.body["stop"] == ["END"]
    assert raw.body["sampling_params"]["max_new_tokens"] == chat.body["max_completion_tokens"] == 1024


# --- which rows ---


def test_row_counts_before_filter_and_limit(tmp_path: Path, server: FakeSGLang) -> None:
    """`row` is the place in the input, so a result can be joined back whatever was selected."""
    job = job_of(tmp_path, server, rows=10, input={"filter": "id % 3 == 1", "limit": 2, "columns": ["id"]})
    assert batchrunner.run(job).rows_total == 2
    assert [(row["row"], row["id"]) for row in results_of(job)] == [(1, 1), (4, 4)]


ABC = [("c", 6), ("a", 0), ("b", 3)]


def test_files_are_taken_in_sorted_path_order(tmp_path: Path) -> None:
    """`row` does not depend on the order in which a file system or a list names the files."""
    source = tmp_path / "in"
    c, a, b = (write_rows(source / f"{name}.parquet", 3, first) for name, first in ABC)
    for number, path in enumerate([[str(c), str(a), str(b)], str(source / "*.parquet"), str(source)]):
        run = tmp_path / f"run{number}"
        job = job_of(tmp_path, input={"path": path, "columns": ["id"]}, output={"path": str(run)})
        batchrunner.run(job)
        assert [(row["row"], row["id"]) for row in results_of(job)] == [(i, i) for i in range(9)]


def test_a_file_that_is_named_twice_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever its directory is called; it is shown by the first name that was given."""
    write_rows(tmp_path / "in" / "a.parquet", 3)
    (tmp_path / "link").symlink_to(tmp_path / "in")
    monkeypatch.chdir(tmp_path)
    names = [
        "in/a.parquet",
        f"{tmp_path}/in/a.parquet",
        "link/a.parquet",
        "in/../in",
        f"file://{tmp_path}/in",
    ]
    job = job_of(tmp_path, input={"path": names, "columns": ["id"]})
    batchrunner.run(job)
    assert [row["id"] for row in results_of(job)] == [0, 1, 2]
    run = json.loads((tmp_path / "run" / "run.json").read_text())
    assert [file["path"] for file in run["fingerprint"]["files"]] == ["in/a.parquet"]


class Bucket:
    """Stands for `pyarrow.fs.FileSystem`, with directories as buckets: s3://NAME/… is TOP/NAME/…."""

    def __init__(self, top: Path) -> None:
        self._top = top

    def from_uri(self, uri: str) -> tuple[pafs.FileSystem, str]:
        bucket, _, path = uri.removeprefix("s3://").partition("/")
        return pafs.SubTreeFileSystem(str(self._top / bucket), pafs.LocalFileSystem()), path


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A bucket with what a failed Spark job leaves behind beside what another wrote."""
    remote = SimpleNamespace(**{**vars(pafs), "FileSystem": Bucket(tmp_path)})
    monkeypatch.setattr("batchrunner.input.files.pafs", remote)
    for number, name in enumerate(["year=1/a", "year=2/b", "_temporary/0/year=2/b", "other"]):
        top = tmp_path / "bucket" / ("in" if "/" in name else "")
        write_rows(top / f"{name}.parquet", 1, first=number)
    (tmp_path / "bucket" / "in" / "_SUCCESS").touch()
    return tmp_path / "bucket"


@pytest.mark.parametrize(
    ("path", "ids"),
    [
        ("in", [0, 1]),
        ("in/", [0, 1]),
        ("in/year=2/b.parquet", [1]),
        ("in/year=*/*.parquet", [0, 1]),
        ("in/year=1/*", [0]),
        ("**/b.parquet", [2, 1]),
        ("*.parquet", [3]),
    ],
)
def test_uris(tmp_path: Path, bucket: Path, path: str, ids: list[int]) -> None:
    """A URI names a file, a directory, in which hidden ones do not count, or files by a pattern."""
    job = job_of(tmp_path, input={"path": f"s3://bucket/{path}", "columns": ["id"]})
    batchrunner.run(job)
    assert [row["id"] for row in results_of(job)] == ids


@pytest.mark.parametrize(
    ("paths", "problem"),
    [
        (["s3://bucket/on"], "s3://bucket/on: no Parquet file there"),
        (["s3://bucket/in/*.csv"], "s3://bucket/in/*.csv: no Parquet file there"),
        (
            ["s3://bucket/in", "s3://bucket2/in"],
            "s3://bucket2/in: lies on another file system than s3://buck",
        ),
        (["s3://bucket/in", "in.parquet"], "in.parquet: lies on another file system than s3://bucket/in"),
    ],
)
def test_uris_that_name_no_input(tmp_path: Path, bucket: Path, paths: list[str], problem: str) -> None:
    """A URI without files is refused, and so are paths that one file system does not have all of."""
    with pytest.raises(InputError) as refused:
        batchrunner.run(job_of(tmp_path, input={"path": paths}))
    assert problem in str(refused.value)


def test_hive_partitions_are_columns(tmp_path: Path, server: FakeSGLang) -> None:
    """The partitions of a directory can be carried, put into prompts and filtered by."""
    for year in (2023, 2024):
        for language in ("de", "en%2FGB"):
            write_rows(tmp_path / "in" / f"year={year}" / f"language={language}" / "x.parquet", 1)
    job = job_of(
        tmp_path,
        server,
        input={"path": str(tmp_path / "in"), "columns": ["year", "language"], "filter": "year > 2023"},
        prompt={"text": "{{ language }} {{ year + 1 }}"},
    )
    batchrunner.run(job)
    assert sorted(server.prompts) == ["de 2025", "en/GB 2025"]
    assert [(row["row"], row["year"], row["language"]) for row in results_of(job)] == [
        (2, 2024, "de"),
        (3, 2024, "en/GB"),
    ]


def test_only_partitions_are_needed(tmp_path: Path, server: FakeSGLang) -> None:
    """A job may use nothing that stands in the files themselves."""
    for year in (2023, 2024):
        write_rows(tmp_path / "in" / f"year={year}" / "x.parquet", 2)
    job = job_of(tmp_path, server, input={"path": str(tmp_path / "in")}, prompt={"user": "In {{ year }}?"})
    batchrunner.run(job)
    assert sorted(server.prompts) == ["In 2023?"] * 2 + ["In 2024?"] * 2


def test_a_stored_column_wins_over_the_path(tmp_path: Path, server: FakeSGLang) -> None:
    """What the file says counts: a writer may keep a partition's column, as a text, or not mean the path."""
    write_rows(tmp_path / "lang=3" / "zip=123" / "x.parquet", 2, zip=["0123"] * 2, lang=["en", "de"])
    job = job_of(
        tmp_path,
        server,
        input={"path": str(tmp_path / "lang=3"), "columns": ["zip"], "filter": "lang == 'de'"},
        prompt={"text": "Where is {{ zip }}?"},
    )
    batchrunner.run(job)
    assert server.prompts == ["Where is 0123?"]
    assert [(row["row"], row["zip"]) for row in results_of(job)] == [(1, "0123")]


# --- the report ---


def test_report(tmp_path: Path, server: FakeSGLang) -> None:
    """report.json has what later tools read, and says the same as the returned report."""
    server.script = lambda sent: "too long" if sent.prompt in {"row 3", "row 4"} else "answer"
    job = job_of(tmp_path, server, limits={"max_failed_rows": 2})
    report = batchrunner.run(job)
    saved = report_of(job)
    assert saved == json.loads(json.dumps(report.as_dict(), default=str))
    expected = {
        "rows_total": 10,
        "rows_ok": 8,
        "rows_failed": 2,
        "rows_resumed": 0,
        "output_tokens": 40,
        "prompt_tokens": 16,
        "cached_tokens": 8,
        "retries": 0,
        "exit_code": 0,
        "starts": 1,
        "finish_reasons": {"stop": 8},
        "simulated": False,
    }
    assert {name: saved[name] for name in expected} == expected
    (group,) = saved["failures"]
    assert group["rows"] == 2
    assert "longer than the model's context length" in group["example"]
    assert saved["wall_s"] > 0
    assert saved["output_tokens_per_s"] == pytest.approx(40 / saved["wall_s"], rel=0.1)
    assert saved["engine"]["model"] == "fake/model"
    assert saved["versions"]["engine"] == "0.5.23"


def test_answers_without_a_reason_are_counted(tmp_path: Path, server: FakeSGLang) -> None:
    """The report of a whole run counts them as that of a start does; failed rows have no reason to end."""
    server.script = lambda sent: "too long" if sent.prompt == "row 3" else "answer"
    batchrunner.run(job_of(tmp_path, server))
    (part,) = (tmp_path / "run" / "parts").iterdir()
    table = pq.read_table(part)
    column = table.schema.get_field_index("finish_reason")
    pq.write_table(table.set_column(column, "finish_reason", pa.nulls(10, pa.string())), part)
    assert report_of_all(tmp_path / "run").finish_reasons == {"unknown": 9}


def test_json_output_is_the_report(tmp_path: Path, server: FakeSGLang) -> None:
    """A script that calls the command reads its result from standard output and nothing else."""
    job = job_of(tmp_path, server)
    result = batchrun(write_job(job, tmp_path), "--json")
    assert json.loads(result.stdout) == report_of(job)


def test_quiet_says_nothing(tmp_path: Path) -> None:
    """`--quiet` leaves a log empty where all went well."""
    result = batchrun(write_job(job_of(tmp_path), tmp_path), "--quiet")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "", "")


def test_what_a_person_reads(tmp_path: Path, server: FakeSGLang) -> None:
    """At the end stands how many rows went well, how many not and why, and where the results are."""
    server.script = lambda sent: "bad schema" if sent.prompt == "row 7" else "answer"
    result = batchrun(write_job(job_of(tmp_path, server), tmp_path))
    assert result.exit_code == 3
    assert "9 of 10 rows ok, 1 failed" in result.stderr
    assert "failed: 1 rows: 400: Failed to compile json grammar" in result.stderr
    assert f"results: {tmp_path / 'run'}/parts" in result.stderr


def test_the_bar_follows_the_total() -> None:
    """A run that others join has more rows than at the start, and the bar has them too."""
    stream = io.StringIO()
    bar = ProgressBar(stream)
    for total, done in [(500, 100), (1200, 700)]:
        bar.show(Snapshot(total, done, 0, 10, 0, 0, 0, 1, 1, 0, 0, (), {}, {}, simulated=False))
    bar.close()
    assert "700/1200" in stream.getvalue()


def test_an_old_sample_is_not_shown(tmp_path: Path) -> None:
    """While a later start loads its engine nothing is said of a speed that was yesterday's."""
    batchrunner.run(job_of(tmp_path))
    run_dir = RunDir(tmp_path / "run")
    with hold_task(run_dir):
        assert status(run_dir.path)["tasks"][0]["last_sample"]["rows_done"] == 10
        events = [{**event, "time": event["time"] - 86400} for event in read_events(run_dir.events)]
        run_dir.events.write_text("".join(json.dumps(event) + "\n" for event in events))
        state = status(run_dir.path)
    assert (state["tasks"][0]["last_sample"], state["rows_per_s"]) == (None, 0)
    assert state["running"]


def test_the_run_directory(tmp_path: Path, server: FakeSGLang) -> None:
    """What later tools look for lies where they look for it."""
    job = job_of(tmp_path, server)
    batchrunner.run(job)
    found = json.loads((tmp_path / "run" / "run.json").read_text())
    assert found["job"]["prompt"] == {"text": "text"}
    assert found["fingerprint"]["model"] == "fake/model"
    assert found["versions"]["engine"] == "0.5.23"
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    told = [event["event"] for event in events if event["event"] != "sample"]
    assert told == ["start", "tokenize", "window", "order", "end"]


def test_no_secret_is_written_down(
    tmp_path: Path, server: FakeSGLang, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The API key reaches the server and no file of the run."""
    monkeypatch.setenv("MY_KEY", "s3cret-key")
    server.api_key = "s3cret-key"
    engine = {"kind": "attach", "urls": [server.url], "api_key_env": "MY_KEY"}
    assert batchrunner.run(job_of(tmp_path, engine)).rows_ok == 10
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert files
    assert not [path for path in files if b"s3cret-key" in path.read_bytes()]


ANSWERS = """
class Handler(Server):
    known = {"/ready": {}, "/model_info": {"model_path": "answers"}, "/server_info": {"version": "0.5.23"}}
    def asked(self, body):
        self.answer("to " + body["text"])
"""


def test_no_secret_of_the_engine_is_written_down(tmp_path: Path) -> None:
    """What the engine gets in its environment, and in arguments named as secrets are, stays unwritten."""
    engine = launchable(tmp_path, ANSWERS, HF_TOKEN="s3cret-1")
    engine["args"] = {"admin-api-key": "s3cret-2", "tokenizer-path": "shown"}
    assert batchrunner.run(job_of(tmp_path, engine)).rows_ok == 10
    run = (tmp_path / "run" / "run.json").read_text()
    assert "shown" in run
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert not [path for path in files if b"s3cret" in path.read_bytes()]


# --- while it runs, and afterwards ---


def test_parts_can_be_read_at_any_moment(tmp_path: Path, server: FakeSGLang) -> None:
    """A reader that looks into a running run finds whole parts, and `status` tells how far it is."""
    server.script = lambda sent: "hold" if int(sent.prompt.split()[1]) >= 10 else "answer"
    job = job_of(tmp_path, server, rows=12, output={"part_rows": 5}, window=4)
    with started(write_job(job, tmp_path)) as process:
        server.wait_for(12)
        eventually(lambda: len(parts_of(tmp_path / "run")) == 2)
        assert sorted(row["row"] for row in results_of(job)) == list(range(10))
        state = json.loads(batchrun("status", tmp_path / "run", "--json").stdout)
        assert str(process.process.pid) in state["running"]
        assert (state["rows_on_disk"], state["rows_total"], state["finished"]) == (10, 12, False)
        server.answer_held()
        assert process.end() == 0
    state = json.loads(batchrun("status", tmp_path / "run", "--json").stdout)
    assert (state["rows_on_disk"], state["running"], state["finished"]) == (12, None, True)


@settings(max_examples=15)
@given(rows=st.integers(1, 60), part_rows=st.integers(1, 20), wanted=st.integers(1, 3))
def test_merge_is_in_input_order(
    rows: int, part_rows: int, wanted: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """`merge` writes every result once, in the order of the input, however the parts came to be."""
    tmp_path = tmp_path_factory.mktemp("merge")
    with FakeSGLang(lambda sent: "too long" if sent.prompt.endswith("3") else "answer") as server:
        job = job_of(tmp_path, server, rows=rows, output={"part_rows": part_rows}, window=3)
        job["input"] |= {"columns": ["id"], "filter": f"id % {wanted} == 0"}
        batchrunner.run(job)
    merged = pq.read_table(batchrun_merge(tmp_path / "run"))
    assert merged.column("row").to_pylist() == [i for i in range(rows) if i % wanted == 0]
    assert merged.to_pylist() == results_of(job)


def test_merge_again(tmp_path: Path) -> None:
    """A second merge replaces the first one."""
    job = job_of(tmp_path, input={"limit": 3})
    batchrunner.run(job)
    batchrun_merge(tmp_path / "run")
    batchrunner.run(job, overrides=["input.limit=6"])
    assert pq.read_table(batchrun_merge(tmp_path / "run")).num_rows == 6


def test_merge_of_nothing(tmp_path: Path) -> None:
    """A path that holds no run is said to be one."""
    result = batchrun("merge", tmp_path)
    assert result.exit_code == 2
    assert "no parts to merge" in result.stderr


def test_merge_of_long_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bucket is bounded by its bytes too, where footers hide them: all rows carry the same long text."""
    monkeypatch.setattr("batchrunner.output.merge.BUCKET_BYTES", 1 << 20)
    write_rows(tmp_path / "input.parquet", 40, page=["x" * 100_000] * 40)
    job = job_of(tmp_path, input={"columns": ["page"]}, output={"part_rows": 7})
    batchrunner.run(job)
    merged = sorted(batchrun_merge(tmp_path / "run").iterdir())
    assert max(pq.read_table(file).nbytes for file in merged) <= 1 << 20
    assert [row for file in merged for row in pq.read_table(file)["row"].to_pylist()] == list(range(40))


def cut_a_part(run: Path) -> None:
    part = next((run / "parts").iterdir())
    part.write_bytes(part.read_bytes()[:-20])


def add_a_part_of_others(run: Path) -> None:
    pq.write_table(pa.table({"a": [1]}), run / "parts" / "part-main-000009.parquet")


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (cut_a_part, "is damaged: move it away"),
        (add_a_part_of_others, "parts: cannot be merged"),
        (lambda run: (run / "merged").write_text(""), "merged: cannot be written"),
        (lambda run: (run / "merged.tmp").write_text(""), "merged: cannot be written"),
    ],
)
def test_what_cannot_be_merged(tmp_path: Path, spoil: Callable[[Path], object], told: str) -> None:
    """Damage and whatever stands in the way are said in one line."""
    batchrunner.run(job_of(tmp_path))
    spoil(tmp_path / "run")
    refused = batchrun("merge", tmp_path / "run")
    assert refused.exit_code == 2
    assert told in refused.stderr
    assert len(refused.stderr.splitlines()) == 1


def test_files_that_are_no_parts(tmp_path: Path) -> None:
    """Copies and other files beside the parts are nobody's: not counted, not merged, not deleted."""
    job = job_of(tmp_path)
    batchrunner.run(job, overrides=["input.limit=4"])
    parts = tmp_path / "run" / "parts"
    copy = parts / "part-main-000000-bak.parquet"
    copy.write_bytes((parts / "part-main-000000.parquet").read_bytes())
    pq.write_table(pa.table({"a": [1]}), parts / "part-x.parquet")
    assert batchrunner.run(job).rows_resumed == 4
    state = json.loads(batchrun("status", tmp_path / "run", "--json").stdout)
    assert [task["task"] for task in state["tasks"]] == ["main"]
    assert pq.read_table(batchrun_merge(tmp_path / "run")).num_rows == 10
    assert batchrunner.run(job, fresh=True).rows_resumed == 0
    assert sorted(path.name for path in parts.glob("*-[bx]*")) == [copy.name, "part-x.parquet"]


@pytest.mark.parametrize("command", ["status", "report", "merge"])
def test_a_job_is_no_run(tmp_path: Path, command: str) -> None:
    """A job file in a run's place is refused in one line."""
    refused = batchrun(command, write_job(job_of(tmp_path), tmp_path))
    assert refused.exit_code == 2
    assert "not a run's output path" in refused.stderr


# --- simulated ---


def test_simulated_results_are_marked(tmp_path: Path) -> None:
    """Nobody takes made-up answers for a model's: output, file, merged file, report, screen all say it."""
    job = job_of(tmp_path)
    result = batchrun(write_job(job, tmp_path))
    assert all(row["output"].startswith("[simulated] ") for row in results_of(job))
    (part,) = parts_of(tmp_path / "run")
    for table in (part, pq.read_table(batchrun_merge(tmp_path / "run"))):
        assert (table.schema.metadata or {})[b"simulated"] == b"true"
    assert report_of(job)["simulated"] is True
    assert "simulated" in result.stderr
    assert "simulated" in batchrun("status", tmp_path / "run").stdout


def test_real_results_are_not_marked(tmp_path: Path, server: FakeSGLang) -> None:
    """The mark is on simulated results only."""
    job = job_of(tmp_path, server)
    result = batchrun(write_job(job, tmp_path))
    (part,) = parts_of(tmp_path / "run")
    assert b"simulated" not in (part.schema.metadata or {})
    assert "simulated" not in result.stderr


# --- check ---


def test_check_sends_nothing(tmp_path: Path, server: FakeSGLang) -> None:
    """`check` shows three prompts, what is to do and what is done, and touches neither server nor disk."""
    job = job_of(tmp_path, server, prompt={"user": "Say {{ text }}"}, input={"limit": 5})
    result = batchrun("check", write_job(job, tmp_path), "--json")
    found = json.loads(result.stdout)
    assert (found["rows_total"], found["rows_done"], found["rows_to_do"]) == (5, 0, 5)
    assert [prompt["prompt"][0]["content"] for prompt in found["prompts"]] == [
        f"Say row {i}" for i in range(3)
    ]
    assert server.sent == []
    assert not (tmp_path / "run").exists()
    batchrunner.run(job)
    later = json.loads(batchrun("check", write_job(job, tmp_path), "--json", "--set", "input.limit=7").stdout)
    assert (later["rows_total"], later["rows_done"], later["rows_to_do"]) == (7, 5, 2)


def test_files_must_agree_on_columns_that_are_used_only(tmp_path: Path) -> None:
    """Files may differ in columns that the job does not use; in one that it uses they may not."""
    write_rows(tmp_path / "in" / "a.parquet", 2, extra=[1, 2])
    write_rows(tmp_path / "in" / "b.parquet", 2, extra=["x", "y"])
    job = job_of(tmp_path, INSTANT, input={"path": str(tmp_path / "in")})
    assert batchrunner.run(job).rows_ok == 4
    with pytest.raises(InputError, match="column 'extra' is string, but int64 in"):
        batchrunner.run(job, overrides=["input.columns=[extra]"], fresh=True)


# --- what a new user stumbled over ---


def test_results_are_never_read_as_input(tmp_path: Path) -> None:
    """An output path that holds the input would make the next start take its results for new rows."""
    write_rows(tmp_path / "in" / "a.parquet", 5)
    job = job_of(tmp_path, input={"path": str(tmp_path / "in")}, output={"path": str(tmp_path / "in")})
    refused = batchrun(write_job(job, tmp_path))
    assert refused.exit_code == 2
    assert "lies in it: give another directory" in refused.stderr
    assert sorted(p.name for p in (tmp_path / "in").iterdir()) == ["a.parquet"]


@pytest.mark.parametrize("path", [".", "**/*.parquet", ["x", "."]])
def test_an_output_within_the_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str | list[str]
) -> None:
    """The run's own files are none of the input's: it goes on where it was."""
    write_rows(tmp_path / "x" / "input.parquet", 5)
    monkeypatch.chdir(tmp_path)
    job = job_of(tmp_path, input={"path": path, "limit": 3}, output={"path": "out"})
    assert batchrunner.run(job).rows_ok == 3
    report = batchrunner.run(job, overrides=["input.limit=5"])
    assert (report.rows_ok, report.rows_resumed) == (5, 3)


def test_a_result_that_is_named_as_input(tmp_path: Path) -> None:
    """Who names a file of the run is told so, and not that there is none."""
    job = job_of(tmp_path)
    batchrunner.run(job)
    parts = tmp_path / "run" / "parts"
    (part,) = map(str, parts.iterdir())
    for path in (part, str(parts), f"{parts}/*.parquet", [part, str(tmp_path / "input.parquet")]):
        with pytest.raises(OutputError, match=f"the input file {part} lies in it"):
            batchrunner.run({**job, "input": {"path": path}})


def test_fresh_leaves_what_is_not_ours(tmp_path: Path) -> None:
    """`--fresh` deletes the run's own files and no other."""
    job = job_of(tmp_path)
    batchrunner.run(job)
    mine = tmp_path / "run" / "parts" / "mine.txt"
    mine.write_text("precious")
    assert batchrunner.run(job, fresh=True).rows_resumed == 0
    assert mine.read_text() == "precious"


def test_a_merge_does_not_outlive_the_next_start(tmp_path: Path) -> None:
    """What was merged is gone as soon as there are more rows."""
    job = job_of(tmp_path, rows=30)
    batchrunner.run(job, overrides=["input.limit=10"])
    assert batchrun("merge", tmp_path / "run").exit_code == 0
    batchrunner.run(job, overrides=["input.limit=20"])
    assert not (tmp_path / "run" / "merged").exists()


def test_a_finished_run_keeps_its_report(tmp_path: Path) -> None:
    """Starting a finished job again does nothing, and does not put zeros over its figures."""
    job = job_of(tmp_path)
    batchrunner.run(job)
    before = report_of(job)
    again = batchrunner.run(job)
    assert (again.exit_code, again.rows_ok, again.rows_resumed) == (0, 10, 10)
    assert report_of(job) == before


def test_an_override_can_be_a_template(tmp_path: Path, server: FakeSGLang) -> None:
    """`--set prompt.text={{ text }}` is what it looks like, though YAML reads braces otherwise."""
    job = job_of(tmp_path, server, rows=1, prompt={"text": "id {{ id }}"})
    batchrunner.run(job, overrides=["prompt.text={{ text }}!"])
    assert server.prompts == ["row 0!"]


def test_numbers_that_json_has_not(tmp_path: Path, server: FakeSGLang) -> None:
    """A NaN in a sampling column fails its row; sent, it would be the engine's default."""
    write_rows(tmp_path / "input.parquet", 2, t=[float("nan"), 0.5])
    job = job_of(tmp_path, server, sampling={"temperature": {"column": "t"}})
    batchrunner.run(job)
    assert [row["error"] for row in results_of(job)] == [
        "sampling.temperature: nan is not a number that can be sent",
        None,
    ]


def test_check_says_what_cannot_be_sent(tmp_path: Path) -> None:
    """A job whose first rows all fail is not called fine."""
    job = job_of(tmp_path, prompt={"user": "{{ text.nothing.there }}"})
    assert "3 of the first 3 rows cannot be sent" in batchrun("check", write_job(job, tmp_path)).stdout


def test_check_says_what_json_cannot_hold(tmp_path: Path, server: FakeSGLang) -> None:
    """Rows that a run would refuse before it sends them are shown with its own words."""
    kind = pa.list_(pa.struct({"role": pa.string(), "content": pa.string(), "score": pa.decimal128(5, 2)}))
    message = {"role": "user", "content": "hi", "score": Decimal("1.50")}
    table = pa.table({"chat": pa.array([[message], [{**message, "score": None}]], kind), "text": ["a", ""]})
    pq.write_table(table, tmp_path / "input.parquet")
    for prompt, bad in [({"messages": "chat"}, 0), ({"text": "{{ text }}"}, 1)]:
        job = job_of(tmp_path, server, prompt=prompt, output={"path": str(tmp_path / f"run{bad}")})
        file = write_job(job, tmp_path)
        shown = batchrun("check", file)
        assert "1 of the first 2 rows cannot be sent" in shown.stdout
        found = json.loads(batchrun("check", file, "--json").stdout)["prompts"]
        inside = batchrun("check", file, "--set", "engine={kind: inprocess, model: a/b}").stdout
        assert ("the job is fine" in inside) is (bad == 0)  # it takes any value beside a message's text
        batchrunner.run(job)
        errors = [row["error"] for row in results_of(job)]
        assert [prompt["error"] for prompt in found] == errors
        assert errors[bad] is not None
        assert errors[bad] in shown.stdout


def test_a_lost_engine_leaves_a_report(tmp_path: Path, server: FakeSGLang) -> None:
    """`--json` prints the report whatever ended the run."""
    server.script = lambda _: "busy 503"
    job = job_of(tmp_path, server, limits={"engine_wait": 0.3})
    result = batchrun(write_job(job, tmp_path), "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["rows_total"] == 10


def test_version() -> None:
    """`--version` says which batchrunner this is."""
    assert batchrun("--version").stdout.startswith("batchrun 0.")
