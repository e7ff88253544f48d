"""`generate` and `stream` take the functions of a program."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, TypedDict

import pyarrow as pa
import pytest

import batchrunner
from batchrunner.core.errors import JobError
from tests.support.functions import children_of

if TYPE_CHECKING:
    from tests.support.fake_sglang import FakeSGLang


def test_the_library_takes_functions(server: FakeSGLang) -> None:
    """Lambdas and closures too; nothing of them stays at work."""
    before = children_of(os.getpid())
    greeting = "Hello "
    table = batchrunner.generate(
        ["Ada", "Bob"],
        prompt=lambda row: greeting + row["text"],
        parse={"python": lambda answer: {"size": len(answer)}, "columns": {"size": "int32"}},
        engine=server.url,
    )
    assert sorted(server.prompts) == ["Hello Ada", "Hello Bob"]
    assert table.column("size").to_pylist() == [len(text) for text in table.column("output").to_pylist()]
    assert table.schema.field("size").type == pa.int32()
    assert children_of(os.getpid()) <= before


def test_no_rows_have_the_same_columns(server: FakeSGLang) -> None:
    """A pipeline may have nothing to do."""
    found = batchrunner.generate(
        pa.table({"text": pa.array([], pa.string())}),
        parse={"python": len, "columns": {"size": "int32"}},
        engine=server.url,
    )
    assert found.schema.names[-1] == "size"


def test_checks_of_no_rows_are_checked() -> None:
    """What is wrong with a check does not wait for the first rows."""
    nothing = pa.table({"text": pa.array([], pa.string())})
    wrong: tuple[dict[str, Any], ...] = {"expression": "score > 1"}, {"json": {"type": "strin"}}
    for check, told in zip(wrong, ("unknown column 'score'", "not a JSON Schema"), strict=True):
        with pytest.raises(JobError, match=told):
            batchrunner.generate(nothing, engine="simulated", check=check)


class Inner(TypedDict):
    word: str


class Sizes(TypedDict):
    size: int
    words: list[Inner]


class Row(TypedDict):
    text: str


def test_annotations_of_a_program(server: FakeSGLang) -> None:
    """They are read in the program, where their names are known, also as texts."""

    def ask(row: Row) -> str:
        return f"{sorted(row)} {row['text']}"

    def parse(answer: str) -> Sizes | None:
        if "Bob" in answer:
            return None
        return {"size": len(answer), "words": [{"word": word} for word in answer.split()[-2:]]}

    rows = pa.table({"id": [1, 2], "text": ["Ada", "Bob"]})
    table = batchrunner.generate(rows, prompt=ask, parse=parse, engine=server.url)
    assert sorted(server.prompts) == ["['text'] Ada", "['text'] Bob"]
    assert table.column("size").to_pylist() == [len("answer 0 to ['text'] Ada"), None]
    assert table.column("words").to_pylist() == [[{"word": "['text']"}, {"word": "Ada"}], None]
    assert table.column("error").null_count == 2


async def test_a_stream_takes_functions(server: FakeSGLang) -> None:
    """Each row comes with the columns of its answer; one that cannot be parsed comes with its error."""

    def parse(answer: str) -> dict[str, int]:
        return {"number": int(answer.rsplit(maxsplit=1)[-1])}

    def rows() -> Any:
        yield from ({"text": str(n) if n != 7 else "seven"} for n in range(20))

    found = batchrunner.stream(
        rows(),
        prompt=lambda row: None if row["text"] == "3" else [{"role": "user", "content": row["text"]}],
        parse={"python": parse, "columns": {"number": "int64"}},
        engine=server.url,
    )
    by_row = {row["row"]: row async for row in found}
    assert sorted(by_row) == list(range(20))
    assert (by_row[3]["finish_reason"], by_row[3]["number"], by_row[3]["error"]) == ("left_out", None, None)
    assert "ValueError: invalid literal" in by_row[7]["error"]
    assert by_row[7]["output"] == "answer 0 to seven"
    assert [by_row[n]["number"] for n in range(8, 20)] == list(range(8, 20))
