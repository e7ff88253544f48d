"""Records of CSV files: which are read, and what is wrong with the others."""

import io
from typing import Any

import pytest

from batchrunner.core.errors import InputError
from batchrunner.input.csv_records import csv_table, delimiter_on
from batchrunner.job.spec import InputSpec

RECORDS = [
    ('1,"a, b"', [(2, ["1", "a, b"], None)]),
    ('1,"two\nlines"\n2,c', [(2, ["1", "two\nlines"], None), (4, ["2", "c"], None)]),
    ("1,a\n\n2,b", [(2, ["1", "a"], None), (4, ["2", "b"], None)]),
    ("1\n2,b", [(2, [], "has 1 value(s), but the header has 2"), (3, ["2", "b"], None)]),
    ('1,"a"b\n2,c', [(2, [], "has misplaced quotes"), (3, ["2", "c"], None)]),
    ('1,"open\n2,b', [(2, [], "has misplaced quotes"), (3, ["2", "b"], None)]),
]
"""The text below the header `id,text`, and its records: line, values, beginning of the problem."""


def table_of(
    text: str, encoding: str = "utf-8", **options: str
) -> tuple[list[str], list[tuple[int, list[str], str | None]]]:
    """Return the header of a CSV file, and the line, the values and the problem of each record."""
    spec = InputSpec.model_validate({"path": "a.csv", **options})
    source: Any = io.BufferedReader(io.BytesIO(text.encode(encoding)))
    header, records = csv_table(source, "a.csv", spec, ",")
    return header, [(record.line, [*record.values.values()], record.problem) for record in records]


@pytest.mark.parametrize(("text", "expected"), RECORDS)
def test_records(text: str, expected: list[tuple[int, list[str], str | None]]) -> None:
    """A bad record has its line and its problem; the records around it have their values."""
    header, records = table_of(f"id,text\n{text}\n")
    assert header == ["id", "text"]
    assert [(line, values) for line, values, _ in records] == [(line, values) for line, values, _ in expected]
    for (_, _, problem), (_, _, beginning) in zip(records, expected, strict=True):
        assert (problem or "").startswith(beginning or "")
        assert (problem is None) == (beginning is None)


@pytest.mark.parametrize(
    ("line", "delimiter"), [("sep=;\r\n", ";"), ('"SEP=\t"\n', "\t"), ("sep=;;\n", None), ("id;text\n", None)]
)
def test_the_delimiter_for_excel(line: str, delimiter: str | None) -> None:
    """The first line of a file may name it, and is no record then."""
    assert delimiter_on(line) == delimiter
    if delimiter:
        assert table_of(f"{line}id{delimiter}text\n1{delimiter}a\n") == (
            ["id", "text"],
            [(3, ["1", "a"], None)],
        )


def test_an_encoding_that_fits_no_record() -> None:
    """The file is refused; if the encoding fits other records, only the undecodable one fails."""
    with pytest.raises(InputError, match=r"a\.csv: line 2 is not UTF-8: set input\.encoding"):
        table_of("id,text\n1,é\n", encoding="latin-1")
    mixed = "id,text\n1,é\n".encode() + "2,é\n".encode("latin-1")
    _, records = table_of(mixed.decode("latin-1"), encoding="latin-1")
    assert [(line, problem is None) for line, _, problem in records] == [(2, True), (3, False)]
