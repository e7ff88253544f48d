"""`generate` takes rows as people have them: texts, files, tables, data frames of others, iterators."""

from __future__ import annotations

import re
import tracemalloc
from pathlib import Path
from typing import TYPE_CHECKING, Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.dataset as pads
import pyarrow.parquet as pq
import pytest

import batchrunner
from batchrunner.core.errors import BatchrunError, InputError, JobError
from tests.conftest import INSTANT
from tests.support.fake_sglang import FakeSGLang

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

NAMES = pa.table({"id": [1, 2, 3], "name": ["Ada", "Bob", "Cyd"]})


def prompts_of(server: FakeSGLang) -> list[str]:
    """Return the prompts that a server got, sorted."""
    return sorted(sent.prompt for sent in server.sent)


class LazyFrame:
    """A frame that is computed when it is asked for, as polars has it."""

    def lazy(self) -> LazyFrame:
        return self

    def collect(self) -> pa.Table:
        return NAMES


class LazyBatches(LazyFrame):
    """A lazy frame that is computed in pieces, as newer versions of polars have it."""

    def collect_batches(self) -> Iterator[pa.Table]:
        yield NAMES[:2]
        yield NAMES[2:]


class HubDataset:
    """A data set with the methods of `datasets.Dataset`."""

    def with_format(self, kind: str) -> HubDataset:
        assert kind == "arrow"
        return self

    def iter(self, batch_size: int) -> Iterator[pa.Table]:
        assert batch_size > 0
        yield NAMES[:1]
        yield NAMES[1:]


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
    "data set": lambda _: pads.dataset(NAMES),
    "data set of files": lambda path: pads.dataset(saved(path)),
    "scanner": lambda _: pads.dataset(NAMES).scanner(),
    "relation of duckdb": lambda path: duckdb.sql(f"from '{saved(path)}/*.parquet'"),
    "lazy frame": lambda _: LazyFrame(),
    "lazy frame in batches": lambda _: LazyBatches(),
    "data set of Hugging Face": lambda _: HubDataset(),
    "mappings": lambda _: NAMES.to_pylist(),
    "iterator": lambda _: iter(NAMES.to_pylist()),
    "mappings in a tuple": lambda _: tuple(NAMES.to_pylist()),
    "directory": saved,
    "directory as text": lambda path: str(saved(path)),
    "glob": lambda path: f"{saved(path)}/*.parquet",
    "paths": lambda path: [saved(path) / "a.parquet", path / "in" / "b.parquet"],
}


@pytest.mark.parametrize("form", FORMS)
def test_rows_of_any_form(form: str, tmp_path: Path, server: FakeSGLang) -> None:
    """The same rows give the same requests and the same table, whatever they came as."""
    table = batchrunner.generate(
        FORMS[form](tmp_path), prompt={"text": "Hello {{ name }}"}, engine=server.url, columns=["id", "name"]
    )
    assert isinstance(table, pa.Table)
    assert prompts_of(server) == ["Hello Ada", "Hello Bob", "Hello Cyd"]
    assert table.select(["id", "name"]).cast(NAMES.schema).equals(NAMES)
    assert table.column("row").to_pylist() == [0, 1, 2]
    assert table.column("error").null_count == 3


TEXTS: dict[str, Callable[[], Any]] = {
    "list": lambda: ["a cat", "a dog"],
    "generator": lambda: (text for text in ["a cat", "a dog"]),
    "numpy": lambda: np.array(["a cat", "a dog"]),
    "arrow": lambda: pa.array(["a cat", "a dog"]),
    "chunked": lambda: pa.chunked_array([["a cat"], ["a dog"]]),
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


def test_texts_are_a_column() -> None:
    """A template and the results can use the texts under the name `text`."""
    table = batchrunner.generate(["a", None], prompt="Say {{ text }}", engine=INSTANT, columns=["text"])
    assert table.column("text").to_pylist() == ["a", None]


def test_a_text_that_is_missing_is_a_failed_row() -> None:
    """A bad row does not keep the others from their answers."""
    table = batchrunner.generate(["a", None], prompt={"text": "text"}, engine=INSTANT)
    first, second = table.column("error").to_pylist()
    assert first is None
    assert "null" in second


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        (pa.table({"id": [1]}), "0 text columns and not 1 (columns: id (int64))"),
        (pa.table({"a": ["x"], "b": ["y"]}), "2 text columns and not 1 (columns: a (string), b (string))"),
        ([{"a": "x", "b": "y"}], "columns: a (string), b (string)"),
    ],
)
def test_which_column_is_the_prompt(rows: Any, told: str) -> None:
    """Where the prompt cannot be guessed, the error lists the columns."""
    with pytest.raises(InputError, match=re.escape(told)):
        batchrunner.generate(rows, engine=INSTANT)


@pytest.mark.parametrize("rows", [[], iter([]), pa.table({"t": pa.array([], pa.string())}), HubDataset])
def test_nothing_gives_an_empty_table(rows: Any) -> None:
    """A pipeline's empty batch has the columns of any other."""
    if rows is HubDataset:
        rows = HubDataset()
        rows.iter = lambda batch_size: iter([])
    empty = batchrunner.generate(rows, engine=INSTANT)
    full = batchrunner.generate(["a"], engine=INSTANT)
    assert empty.num_rows == 0
    assert empty.schema.equals(full.schema)


def test_chunks_of_other_types(server: FakeSGLang) -> None:
    """Columns and types that come later in an iterator are those of all rows, as in a list."""

    def rows() -> Iterator[dict[str, Any]]:
        for number in range(3000):
            row: dict[str, Any] = {"i": number if number < 2000 else number + 0.5, "null_first": None}
            if number >= 2500:
                row |= {"late": str(number), "null_first": "x"}
            yield row

    options: dict[str, Any] = {
        "prompt": {"text": "{{ i }}"},
        "engine": INSTANT,
        "columns": ["i", "late", "null_first"],
    }
    streamed, listed = (batchrunner.generate(given, **options) for given in (rows(), list(rows())))
    assert streamed.select(options["columns"]).equals(listed.select(options["columns"]))


def nested(levels: int | None) -> list[Any]:
    """Return a list in so many others; with None, one that contains itself."""
    value: list[Any] = []
    if levels is None:
        value += [value, {"again": value}]
    for _ in range(levels or 0):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda: batchrunner.generate([7], engine=INSTANT), "a row of type int: row 0"),
        (lambda: batchrunner.generate(["a", b"b"], engine=INSTANT), "a row of type bytes: row 1"),
        (
            lambda: batchrunner.generate(iter([{"a": 1}] * 2048 + [{"a": "x"}]), prompt="x", engine=INSTANT),
            "rows: their types do not fit together",
        ),
        (lambda: batchrunner.generate([{"text": 10**30}], engine=INSTANT), "column 'text', rows 0 to 0: "),
        (
            lambda: batchrunner.generate([{"a": "x", "b": 1}, {"b": "y"}], engine=INSTANT),
            "column 'b', rows 0 to 1: ",
        ),
        (
            lambda: batchrunner.generate([{"a": "x", "b": nested(50)}], engine=INSTANT),
            "column 'b', row 0: has more than 49 levels, or contains itself",
        ),
        (
            lambda: batchrunner.generate([{"a": "x"}, {"b": nested(None)}], engine=INSTANT),
            "column 'b', row 1: has more than 49 levels, or contains itself",
        ),
        (lambda: batchrunner.generate([{1: "a"}], engine=INSTANT), "a column has the name 1: give a text"),
        (lambda: batchrunner.generate({"text": ["a"]}, engine=INSTANT), "got dict"),
        (lambda: batchrunner.generate("Tell me a joke", engine=INSTANT), "give texts as a list"),
        (lambda: batchrunner.generate("x" * 5000, engine=INSTANT), "give texts as a list"),
        (lambda: batchrunner.generate(Path("/no/such.parquet"), prompt="x", engine=INSTANT), "no such file"),
        (
            lambda: batchrunner.generate(["a"], engine=INSTANT, columns="text"),
            "columns: give a list of names",
        ),
    ],
)
def test_wrong_rows_are_explained(call: Callable[[], object], told: str) -> None:
    """Rows that cannot be a table are one clear line, which says where and what."""
    with pytest.raises(BatchrunError, match=re.escape(told)) as caught:
        call()
    assert len(str(caught.value).splitlines()) == 1
    assert len(str(caught.value)) < 500
    assert caught.value.exit_code == 2


def test_an_iterator_s_error_is_its_own() -> None:
    """What the program's own iterator raises comes through as it is."""

    def rows() -> Iterator[str]:
        yield "a"
        raise OSError(5, "my disk")

    with pytest.raises(OSError, match="my disk"):
        batchrunner.generate(rows(), engine=INSTANT)


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


# --- engines ---


def test_an_engine_by_its_address(server: FakeSGLang) -> None:
    """An address, or a list of addresses, is enough to name servers that run."""
    assert batchrunner.generate(["a"], engine=server.url).num_rows == 1
    with FakeSGLang() as second:
        assert batchrunner.generate(["a", "b"], engine=[server.url, second.url]).num_rows == 2
        with batchrunner.open_engine((server.url, second.url)) as engine:
            assert set(engine.info.routes) == {server.url, second.url}


def test_an_engine_by_its_name() -> None:
    """A text is the model of a server that the run starts, except for `simulated`."""
    with batchrunner.open_engine("simulated") as engine:
        assert engine.info.simulated
    with pytest.raises(BatchrunError, match="no/such-model"):
        batchrunner.generate(["a"], engine="/no/such-model")


@pytest.mark.parametrize(
    ("engine", "told"),
    [
        ("127.0.0.1:30000", "an address starts with http://"),
        ("localhost:30000/v1", "an address starts with http://"),
        ("ftp://host", "an address starts with http://"),
        ("http://[::1", "nvalid IPv6 URL"),
        ("http://host:99999999", "ort out of range 0-65535"),
        ("http://host:port", "ort could not be cast to integer value"),
        (["host"], "an address starts with http://"),
        ([], "urls"),
        ("", "engine: give an open engine"),
        ("server", "'server' needs more than its name"),
        (7, "engine: give an open engine"),
    ],
)
def test_wrong_engines_are_explained(engine: Any, told: str) -> None:
    """What is no engine is a JobError in one line."""
    with pytest.raises(JobError, match=re.escape(told)) as caught:
        batchrunner.generate(["a"], engine=engine)
    assert len(str(caught.value).splitlines()) == 1


def test_a_column_that_is_given_twice_names_no_file_of_ours() -> None:
    """The rows came from the program: where a column of theirs cannot be told, the error says "rows"."""
    table = pa.Table.from_arrays(
        [pa.array(["a"]), pa.array(["b"]), pa.array([1])], names=["text", "text", "n"]
    )
    for call in ({"prompt": "{{ text }}"}, {"prompt": "{{ n }}", "columns": ["text"]}):
        with pytest.raises(
            batchrunner.InputError, match=r"^rows: has 2 columns 'text': (prompt|input)\.\w+ can"
        ):
            batchrunner.generate(table, engine="simulated", **call)
    assert batchrunner.generate(table, prompt="{{ n }}", engine="simulated").num_rows == 1
