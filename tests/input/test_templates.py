"""Templates and filters of any kind: columns of any name, nulls, bytes, and a template that never ends."""

import math
from datetime import date
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import csv

import batchrunner
from batchrunner.input.templates import Template
from tests.conftest import (
    job_of,
    results_of,
    rows_in,
    write_rows,
)
from tests.support.fake_sglang import FakeSGLang
from tests.support.refusals import refusal, told


def test_a_template_of_a_text_that_was_meant_as_a_number(tmp_path: Path) -> None:
    """The failed row says which column it is, and what to do."""
    write_rows(tmp_path / "input.parquet", 2, size=["7", "8"])
    job = job_of(tmp_path, prompt={"text": "{% if size < 30 %}{{ text }}{% endif %}"})
    assert batchrunner.run(job).rows_failed == 2
    (said,) = {row["error"] for row in results_of(job)}
    told(
        said,
        "template: TypeError: ",
        "(columns with text: size, text; compare them with text, or convert them by NAME | float)",
    )
    job["prompt"]["text"] = "{% if size | float < 30 %}{{ text }}{% endif %}"
    assert batchrunner.run(job, fresh=True).rows_failed == 0


@pytest.mark.parametrize("name", ["data.csv", "data.parquet"])
def test_a_filter_of_a_text_that_was_meant_as_a_number(tmp_path: Path, name: str) -> None:
    """It is told once, before anything is sent, and with a type only where the file has none."""
    table = pa.table({"size": ["7", None, "8"], "text": ["a", "b", "c"]})
    (csv.write_csv if name == "data.csv" else pq.write_table)(table, tmp_path / name)
    job = job_of(tmp_path, input={"path": str(tmp_path / name), "filter": "size > 5"})
    said = refusal(job, tmp_path)
    fails = "3 rows" if name == "data.csv" else "2 rows"  # CSV has no nulls
    told(
        said,
        f"fails on {fails}, and is true for 0: row 0: TypeError",
        "columns with text: size; ",
        "NAME | float",
    )
    assert ("other types in input.types" in said) == (name == "data.csv")
    job["input"]["filter"] = "size != '8' or size > 5"  # it fails on one row, and is true for the others
    report = batchrunner.run(job)
    assert (report.rows_ok, report.rows_failed) == (2, 1)


@pytest.mark.parametrize(
    ("template", "error"),
    [
        ("{% if b %}{{ b }}{% endif %} {{ c | upper }}", "c is null"),
        ("{{ b or '-' }} {{ c }}", "c is null"),
        ("{{ row['author']['name'] | trim }}", 'row["author"]["name"] is null'),
        ("{{ author.name.first }}", "'None' has no attribute 'first' (in author.name.first)"),
        ("{% for each in b %}{% endfor %}", "'NoneType' object is not iterable (in b, c)"),
        ("{% macro show(it) %}{{ it }}{% endmacro %}{{ show(b) }}", "b is null"),
    ],
)
def test_what_is_null_is_named(tmp_path: Path, template: str, error: str) -> None:
    """The row's error names the column or field that failed, and none that the template guards."""
    nothing = pa.nulls(1, pa.string())
    named = [{"name": "x"}, {"name": None}]
    table = pa.table({"text": ["a"], "b": nothing, "c": nothing, "author": named[1:], "tags": [named]})
    pq.write_table(table, tmp_path / "input.parquet")
    template += "{{ c or '' }}"
    job = job_of(tmp_path, prompt={"user": template})
    batchrunner.run(job)
    (row,) = results_of(job)
    assert row["error"].startswith("template: ")
    assert row["error"].endswith(error)


@pytest.mark.parametrize(
    "value", ["", "100 %s {{ b }}", 7, 2.50, 1e300, math.nan, True, date(2026, 1, 31), ["x"]]
)
@pytest.mark.parametrize(
    "source", ["{{ a }}", "100 % of {{ a }}: {{ range }}%{{- a }}\n", "5 %%s {{ a }}\n\n"]
)
def test_a_template_that_only_prints_columns_is_a_template(source: str, value: object) -> None:
    """Its text is the same beside an empty condition, which needs all of Jinja2."""
    row = {"a": value, "range": "%d"}
    with_condition = "{% if true %}{% endif %}" + source
    plain, general = (Template(text, where="prompt.text", available=row) for text in (source, with_condition))
    assert plain.render(row) == general.render(row)


def test_a_hint_about_names_where_one_is_at_fault(tmp_path: Path) -> None:
    """A wrong template is told how to read a column of an odd name only where its line has that name."""
    job = job_of(tmp_path, prompt={"user": "{{ my text }}"})
    pq.write_table(pa.table({"my text": ["x"], "text": ["y"]}), tmp_path / "input.parquet")
    told(
        refusal(job, tmp_path),
        "in '{{ my text }}': the name of the column is not an identifier: write row[\"my",
    )
    job["prompt"]["user"] = "{% if text }"
    assert refusal(job, tmp_path).endswith("in '{% if text }'")


@pytest.mark.parametrize("expression", ["id = 1", "id > 1 AND id < 3", "id IS NOT NULL"])
def test_a_word_of_sql_is_told_what_it_is_here(tmp_path: Path, expression: str) -> None:
    """A filter is no SQL, but who writes one has often written SQL."""
    write_rows(tmp_path / "input.parquet", 2)
    message = refusal(job_of(tmp_path, input={"filter": expression}), tmp_path)
    told(message, "input.filter", "after the expression (write ==, and, or, not, in, is none)")


ODD = {
    "max tok": ["a", "b"],
    "Description-en": ["c", "d"],
    "2024": ["e", "f"],
    "row": ["g", "h"],
    "self": ["i", "j"],
    "range": ["k", "l"],
    "in": ["q", "r"],
    'a"b': ["s", "t"],
    "größe": ["u", "v"],
}


def odd_columns(directory: Path, *without: str) -> dict[str, Any]:
    columns = {name: values for name, values in ODD.items() if name not in without}
    pq.write_table(pa.table(columns), directory / "input.parquet")
    return {"path": str(directory / "input.parquet")}


@pytest.mark.parametrize(
    ("name", "without"), [*((name, ["row"]) for name in ODD if name != "row"), ("row", []), ("in", [])]
)
def test_columns_of_any_name(tmp_path: Path, server: FakeSGLang, name: str, without: list[str]) -> None:
    """`row["name"]` reads any column, in templates and in filters, also one that is called `row`."""
    written = f"row[{name!r}]"
    source = {**odd_columns(tmp_path, *without), "filter": f"{written} != {ODD[name][0]!r}"}
    job = job_of(tmp_path, server, input=source, prompt={"user": f"{{{{ {written} }}}}"})
    report = batchrunner.run(job)
    assert (report.rows_total, report.rows_ok) == (1, 1)
    assert server.prompts == [ODD[name][1]]


@pytest.mark.parametrize(
    ("template", "prompt"),
    [
        ("{{ row|tojson }}", '{"id": 0, "text": "row 0"}'),
        ("{% for name, value in row.items() %}{{ name }}={{ value }} {% endfor %}", "id=0 text=row 0 "),
        ("{{ row.text }} {{ row.get('id') }}", "row 0 0"),
        ("{% set row = 'mine' %}{{ row }}", "mine"),
        ("{% if id == 0 %}{% set own %}{{ text }}{% endset %}{{ own }}{% else %}-{% endif %}", "row 0"),
        ("{% if id %}{% set text = 'mine' %}{% endif %}{{ text }}", "row 0"),
    ],
)
def test_row_is_a_mapping(tmp_path: Path, server: FakeSGLang, template: str, prompt: str) -> None:
    """It may be read whole or by a name that is computed; a template's own variable `row` hides it."""
    batchrunner.run(job_of(tmp_path, server, rows=1, prompt={"text": template}))
    assert server.prompts == [prompt]


@pytest.mark.parametrize(
    ("template", "hints"),
    [
        ("{{ max_tok }}", ['did you mean row["max tok"]?']),
        ("{{ max tok }}", ["line 1: ", 'not an identifier: write row["max tok"]']),
        ("{{ Description-en }}", ['did you mean row["Description-en"]?']),
        ('{{ row["max tk"] }}', ["unknown column 'max tk'", 'did you mean row["max tok"]?']),
        ("{{ row.rnge }}", ["unknown column 'rnge'", "did you mean 'range'?"]),
    ],
)
def test_the_nearest_column_is_named(tmp_path: Path, template: str, hints: list[str]) -> None:
    """An unknown name is refused with the nearest column, written as a template has to write it."""
    source = odd_columns(tmp_path, "row")
    told(refusal(job_of(tmp_path, input=source, prompt={"user": template}), tmp_path), "prompt.user", *hints)


JSON_TEXTS = ['{"name": "Ada", "tags": ["a", "b"]}', '"Bob"', None, "not JSON", '{"name": "Eve", "tags": []}']


def test_a_column_of_json_texts(tmp_path: Path, server: FakeSGLang) -> None:
    """`fromjson` reads it in templates and filters; a row whose text is not JSON, or is null, fails alone."""
    table = pa.table({"meta": JSON_TEXTS, "struct": [{"name": "x"}] * 5})
    pq.write_table(table, tmp_path / "input.parquet")
    read = "{{ (struct | fromjson).name }} {{ (meta | fromjson).name }}{{ (meta | fromjson).tags[0] }}"
    limits = {"max_failed_rows": 4, "abort_failed_share": 1}
    job = job_of(tmp_path, server, prompt={"text": read}, limits=limits)
    report = batchrunner.run(job)
    assert (report.rows_ok, report.rows_failed, server.prompts) == (1, 4, ["x Adaa"])
    errors = {row["row"]: row["error"] for row in results_of(job)}
    assert errors[2] == "template: meta.name is null"
    assert errors[3] == (
        "template: ValueError: fromjson: 'not JSON' is not JSON: Expecting value: line 1 column 1 (char 0)"
    )
    job["input"]["filter"] = "(meta | fromjson) is mapping and (meta | fromjson).name == 'Eve'"
    assert batchrunner.run(job, fresh=True).rows_total == 2  # the text that is not JSON fails, and is kept


NULLS = {"id": [1, None, 3, 4], "lang": ["en", "en", None, "de"]}


@pytest.mark.parametrize(
    ("expression", "rows"),
    [
        ("id > 2", [2, 3]),
        ("not id > 2", [0]),
        ("id > 2 or lang == 'en'", [0, 1, 2, 3]),
        ("id > 2 and lang|length == 2", [3]),
        ("meta.score > 1", [0]),
        ("'e' in lang", [0, 1, 3]),
        ("id is none", [1]),
        ("row['id'] > 2", [2, 3]),
    ],
)
def test_a_filter_takes_a_null_as_no(tmp_path: Path, expression: str, rows: list[int]) -> None:
    """A part of it that fails on a null is unknown, as in SQL; nulls may still be compared by name."""
    meta = [{"score": 5}, {"score": None}, None, {"score": 1}]
    pq.write_table(pa.table({**NULLS, "meta": meta, "text": ["a"] * 4}), tmp_path / "input.parquet")
    job = job_of(tmp_path, input={"filter": expression})
    report = batchrunner.run(job)
    assert report.exit_code == 0
    assert rows_in(job) == rows


BYTES = {"image": [b"\x89PNG", b"hello"], "images": [[b"\x89PNG"], []], "text": ["a", "b"]}


@pytest.mark.parametrize(
    ("where", "template"),
    [
        ("user", "{{ image }}"), ("system", '{{ row["image"] | upper }}'), ("text", "{{ images }}"),
        ("messages", "{% if image %}{{ row.image | trim }}{% endif %}"),
        ("text", "{{ text }}{{ image | tojson }}"),
    ],
)  # fmt: skip
def test_a_column_of_bytes_is_no_text(tmp_path: Path, template: str, where: str) -> None:
    """It would read b'…' in each prompt: the column is named before anything is sent."""
    pq.write_table(pa.table(BYTES), tmp_path / "input.parquet")
    prompt: dict[str, Any] = {where: template}
    if where == "system":
        prompt["user"] = "{{ text }}"
    if where == "messages":
        prompt = {"messages": [{"role": "user", "content": template}]}
    message = refusal(job_of(tmp_path, prompt=prompt), tmp_path)
    name = "images" if "images" in template else "image"
    told(message, f"prompt.{where}", f"column '{name}' holds bytes", f"write {{{{ {name}.decode() }}}}")


SHOWS_BYTES = ["{% set x = image %}{{ x }}", "{{ 'a' ~ image }}", "{{ [image] | join }}", "{{ [[image]] }}"]


@pytest.mark.parametrize("template", SHOWS_BYTES)
def test_bytes_that_are_found_late_fail_their_row(tmp_path: Path, server: FakeSGLang, template: str) -> None:
    pq.write_table(pa.table(BYTES), tmp_path / "input.parquet")
    job = job_of(tmp_path, server, prompt={"text": template + " {{ text }}"})
    batchrunner.run(job)
    shown = "x" if "set x" in template else "image"
    assert {row["error"] for row in results_of(job)} == {f"template: {shown} holds bytes"}
    assert server.sent == []


def test_bytes_that_are_made_text_are_text(tmp_path: Path, server: FakeSGLang) -> None:
    """Older files hold texts in columns of bytes; and the length of an image may be asked for."""
    pq.write_table(pa.table(BYTES).slice(1), tmp_path / "input.parquet")
    job = job_of(tmp_path, server, prompt={"text": "{{ image.decode() }} {{ image | length }}"})
    assert batchrunner.run(job).exit_code == 0
    assert server.prompts == ["hello 5"]
