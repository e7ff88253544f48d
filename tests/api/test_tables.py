"""`generate`: rows as people have them (texts, tables, data frames of others, iterators) become a table."""

from __future__ import annotations

import os
import re
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.dataset as pads
import pyarrow.parquet as pq
import pytest
from typing_extensions import TypedDict

import batchrunner
from batchrunner.core.errors import BatchrunError, JobError
from tests.conftest import INSTANT
from tests.support.engine_processes import descendants_of
from tests.support.fake_sglang import FakeSGLang

NAMES = pa.table({"id": [1, 2, 3], "name": ["Ada", "Bob", "Cyd"]})


class HubDataset:
    """A data set with the methods of `datasets.Dataset`."""

    def with_format(self, kind: str) -> HubDataset:
        assert kind == "arrow"
        return self

    def iter(self, batch_size: int) -> Iterator[pa.Table]:
        assert batch_size > 0
        yield NAMES[:1]
        yield NAMES[1:]


class Foreign:
    """A data frame that speaks Arrow's interface, as those of pandas and polars do."""

    __arrow_c_stream__ = NAMES.__arrow_c_stream__

    def __iter__(self) -> Iterator[str]:  # over its columns' names
        return iter(NAMES.column_names)


class LazyFrame:
    """A query of Polars 1: it runs as a whole, and has a schema before."""

    def __init__(self, failure: Exception | None = None) -> None:
        self._failure = failure

    def collect_schema(self) -> pa.Schema:
        if self._failure is not None:
            raise self._failure
        return NAMES.schema

    def collect(self) -> Foreign:
        return Foreign()


class StreamedLazyFrame(LazyFrame):
    """A query of Polars 2, whose results are a stream that is read once."""

    def collect(self) -> Foreign:
        raise AssertionError("the results of the query would all be in memory")

    def collect_batches(self, *, chunk_size: int, lazy: bool) -> pa.RecordBatchReader:
        assert lazy
        return NAMES.to_reader(max_chunksize=min(chunk_size, 2))


def saved(directory: Path) -> Path:
    """Write the names as two files, and return their directory."""
    (directory / "in").mkdir()
    pq.write_table(NAMES[:2], directory / "in" / "a.parquet")
    pq.write_table(NAMES[2:], directory / "in" / "b.parquet")
    return directory / "in"


FORMS: dict[str, Callable[[Path], Any]] = {
    "table": lambda _: NAMES,
    "record batch": lambda _: NAMES.to_batches()[0],
    "reader": lambda _: NAMES.to_reader(max_chunksize=2),
    "data set of files": lambda path: pads.dataset(saved(path)),
    "relation of duckdb": lambda path: duckdb.sql(f"from '{saved(path)}/*.parquet'"),
    "data set of Hugging Face": lambda _: HubDataset(),
    "data frame": lambda _: Foreign(),
    "query": lambda _: LazyFrame(),
    "query with a stream": lambda _: StreamedLazyFrame(),
    "mappings": lambda _: NAMES.to_pylist(),
    "iterator": lambda _: iter(NAMES.to_pylist()),
    "directory": saved,
    "glob": lambda path: f"{saved(path)}/*.parquet",
    "paths": lambda path: [saved(path) / "a.parquet", path / "in" / "b.parquet"],
}


@pytest.mark.parametrize("form", FORMS)
def test_rows_of_any_form(form: str, tmp_path: Path, server: FakeSGLang) -> None:
    """The same rows give the same requests and the same table, whatever they came as."""
    rows = FORMS[form](tmp_path)
    options: dict[str, Any] = {"columns": ["id", "name"], "sampling": {"top_k": 1}}
    table = batchrunner.generate(rows, prompt="Hello {{ name }}", engine=server.url, **options)
    assert server.sent[0].body["top_k"] == 1
    assert sorted(server.prompts) == ["Hello Ada", "Hello Bob", "Hello Cyd"]
    assert table.select(["id", "name"]).cast(NAMES.schema).equals(NAMES)
    assert table.column("row").to_pylist() == [0, 1, 2]
    assert table.column("error").null_count == 3


TEXTS: dict[str, Callable[[], Any]] = {
    "list": lambda: ["a cat", "a dog"],
    "numpy": lambda: np.array(["a cat", "a dog"]),
    "arrow": lambda: pa.array(["a cat", "a dog"]),
    "one text column": lambda: pa.table({"n": [1, 2], 'odd "name" \\': ["a cat", "a dog"]}),
    "a column called row": lambda: pa.table({"row": ["a cat", "a dog"]}),
    "a dictionary": lambda: pa.table({"word": pa.array(["a cat", "a dog"]).dictionary_encode()}),
    "mappings": lambda: [{"question": "a cat", "n": 1}, {"question": "a dog", "n": 2}],
}


@pytest.mark.parametrize("form", TEXTS)
def test_texts_need_no_prompt(form: str, server: FakeSGLang) -> None:
    """Texts are the prompts, and so is the only text column of a table."""
    table = batchrunner.generate(TEXTS[form](), engine=server.url)
    assert [sent.body["messages"] for sent in sorted(server.sent, key=lambda sent: sent.prompt)] == [
        [{"role": "user", "content": "a cat"}],
        [{"role": "user", "content": "a dog"}],
    ]
    assert table.num_rows == 2


def test_chunks_of_other_types() -> None:
    """Columns and types that come later in an iterator are those of all rows, as in a list."""

    def rows() -> Iterator[dict[str, Any]]:
        for number in range(3000):
            row: dict[str, Any] = {"i": number if number < 2000 else number + 0.5, "null_first": None}
            row["odd"] = {"b": [None]} if number == 2999 else 1
            yield row | ({"late": str(number), "null_first": "x"} if number >= 2500 else {})

    columns = ["i", "late", "null_first", "odd"]
    streamed, listed = (
        batchrunner.generate(given, prompt={"text": "{{ i }}"}, engine=INSTANT, columns=columns)
        for given in (rows(), list(rows()))
    )
    assert streamed.select(columns).equals(listed.select(columns))
    assert streamed.column("odd").to_pylist()[-2:] == [
        "1",
        '{"b":[null]}',
    ]  # without a common type: JSON text


class TwoOfAName:
    """A frame of pandas with two columns `t`."""

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        raise ValueError("Duplicate column names found: ['t', 't']")


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        (TwoOfAName(), "rows: Duplicate column names found: ['t', 't']"),
        (LazyFrame(ValueError("no column 'x'")), "rows: the query cannot be run: no column 'x'"),
        (["a", b"b"], "a row of type bytes: row 1"),
        ([{"text": object()}], "column 'text' of rows 0 to 0 cannot be converted to Arrow: "),
        ([{1: "a"}], "the name of a column is 1, which is not text: name the column by a text"),
        ({"text": ["a"]}, "got dict"),
        ([{}], "1 row without any column, starting at row 0"),
        ([{}, {}], "2 rows without any column, starting at row 0"),
        ("x" * 5000, "give prompts as a list of texts"),
        (Path("/no/such.parquet"), "no such file"),
        (pa.table({"id": [1]}), "these have 0 text columns (columns: id (int64))"),
        ([{"a": "x", "b": "y"}], "these have 2 text columns (columns: a (string), b (string))"),
    ],
)
def test_wrong_rows_are_explained(rows: Any, told: str) -> None:
    """Rows that cannot be a table, or in which no prompt can be told, are one clear line."""
    with pytest.raises(BatchrunError, match=re.escape(told)) as caught:
        batchrunner.generate(rows, engine=INSTANT)
    assert len(str(caught.value).splitlines()) == 1
    assert len(str(caught.value)) < 500
    assert caught.value.exit_code == 2


def test_an_iterator_is_not_kept_in_memory() -> None:
    """The rows of an iterator are never all in memory."""
    rows = ({"id": number, "text": f"{number} " + "x" * 20_000} for number in range(4000))
    tracemalloc.start()
    try:
        with pytest.raises(JobError, match="unknown column"):  # found once all rows were read
            batchrunner.generate(rows, prompt="{{ nothing }}", engine=INSTANT)
        assert tracemalloc.get_traced_memory()[1] < 60 << 20  # all rows together have 80 MB
    finally:
        tracemalloc.stop()
    assert next(rows, None) is None


def test_generate_is_never_half_a_table(
    server: FakeSGLang, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the run stops early there is an error and not a shorter table; no file is left behind."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    server.script = lambda _: "too long"
    with pytest.raises(BatchrunError, match="were not sent"):
        batchrunner.generate([{"a": i} for i in range(2000)], prompt="{{ a }}", engine=server.url)
    assert list(tmp_path.iterdir()) == []


NOTHING = pa.table({"id": pa.array([], pa.int64()), "text": pa.array([], pa.string())})


class Size(TypedDict):
    size: int


def size_of(answer: str) -> Size:
    return {"size": len(answer)}


def test_a_table_without_rows(server: FakeSGLang) -> None:
    """A pipeline's empty batch gives an empty table with the columns of any other; nothing is sent."""
    options: dict[str, Any] = {"prompt": "{{ text }}", "engine": server.url, "parse": size_of}
    empty = batchrunner.generate(NOTHING, columns=["id"], **options)
    assert (empty.num_rows, server.sent) == (0, [])
    full = batchrunner.generate(pa.table({"id": [1], "text": ["a"]}), columns=["id"], **options)
    assert empty.schema.equals(full.schema)
    assert batchrunner.generate([], **options).num_rows == 0


# --- functions of the program ---


class Inner(TypedDict):
    word: str


class Sizes(TypedDict):
    size: int
    words: list[Inner]


class Row(TypedDict):
    text: str


def test_the_library_takes_functions(server: FakeSGLang) -> None:
    """Closures too; annotations are read in the program, also as texts; nothing of them stays at work."""
    before = set(descendants_of(os.getpid()))
    greeting = "Hello "

    def ask(row: Row) -> str:
        return f"{greeting}{sorted(row)} {row['text']}"

    def parse(answer: str) -> Sizes | None:
        if "Bob" in answer:
            return None
        return {"size": len(answer), "words": [{"word": word} for word in answer.split()[-2:]]}

    rows = pa.table({"id": [1, 2], "text": ["Ada", "Bob"]})
    table = batchrunner.generate(rows, prompt=ask, parse=parse, engine=server.url)
    assert sorted(server.prompts) == ["Hello ['text'] Ada", "Hello ['text'] Bob"]
    assert table.column("size").to_pylist() == [len("answer 0 to Hello ['text'] Ada"), None]
    assert table.column("words").to_pylist() == [[{"word": "['text']"}, {"word": "Ada"}], None]
    assert table.column("error").null_count == 2
    assert set(descendants_of(os.getpid())) <= before
