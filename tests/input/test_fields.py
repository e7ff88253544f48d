"""The block of `{{ fields }}`: what it shows, and the order in which rows share most."""

import json
import random
from collections.abc import Sequence
from datetime import date
from decimal import Decimal
from itertools import pairwise, permutations, takewhile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import batchrunner
from batchrunner.input.fields import choose_order
from tests.conftest import batchrun, job_of, results_of, write_job
from tests.support.fake_sglang import FakeSGLang
from tests.support.refusals import refusal

WIDTHS = {"kind": 4, "place": 12, "title": 30, "text": 80}


def table(seed: int, rows: int, distinct: Sequence[int]) -> dict[str, list[str]]:
    """Return columns whose values have one width; a later column may depend on an earlier one."""
    dice = random.Random(seed)
    columns: dict[str, list[str]] = {}
    for (name, width), count in zip(WIDTHS.items(), distinct, strict=True):
        pool = [f"{dice.getrandbits(200):0{width}x}"[:width] for _ in range(count)]
        columns[name] = [dice.choice(pool) for _ in range(rows)]
    return columns


def shared_bytes(columns: dict[str, list[str]], order: Sequence[str]) -> int:
    """Return how many bytes rows share if all are cached, whole lines only."""
    lines = [[f"{name}: {columns[name][at]}\n" for name in order] for at in range(len(columns["text"]))]
    pairs = (zip(*rows, strict=True) for rows in pairwise(sorted(lines)))
    shared = (takewhile(lambda pair: pair[0] == pair[1], each) for each in pairs)
    return sum(len(line) for each in shared for line, _ in each)


def lengths(columns: dict[str, list[str]]) -> dict[str, int]:
    return {name: len(f"{name}: {values[0]}\n") for name, values in columns.items()}


@pytest.mark.parametrize("seed", range(12))
def test_hardly_an_order_shares_more(seed: int) -> None:
    """The best of all orders of the columns shares little more."""
    dice = random.Random(1000 + seed)
    columns = table(seed, 120, [dice.choice([1, 2, 5, 20, 60, 500]) for _ in WIDTHS])
    found = choose_order(columns, lengths(columns))
    most = max(shared_bytes(columns, order) for order in permutations(columns))
    assert shared_bytes(columns, found) >= 0.95 * most


def test_a_long_key_goes_last() -> None:
    """In a small sample of many films few occur twice, and no key does."""
    dice = random.Random(3)
    films = [dice.randrange(5000) for _ in range(2000)]
    values = {"id": [*range(2000)], "film": films}
    assert choose_order(values, {"id": 900, "film": 10}) == ["film", "id"]


def write(path: Path, rows: int, *, first: int = 0, groups: int = 4, swap: bool = False) -> None:
    """Write rows with a key, a kind of few values and a plot of each kind; `swap` makes the key the kind."""
    numbers = range(first, first + rows)
    few, many = [n % groups for n in numbers], list(numbers)
    key, kind = (few, many) if swap else (many, few)
    plot = [f"A long plot of number {value}, told at length. " * 3 for value in kind]
    path.parent.mkdir(exist_ok=True)
    pq.write_table(pa.table({"key": key, "kind": kind, "plot": plot}), path, row_group_size=50)


def a_job(directory: Path, server: FakeSGLang, **changes: Any) -> dict[str, Any]:
    prompt = {"text": "{{ fields }}", "fields": {"columns": ["key", "plot", "kind"]}}
    return job_of(
        directory, server, **{"input": {"path": str(directory / "in")}, "prompt": prompt, **changes}
    )


def orders(server: FakeSGLang) -> set[str]:
    """Return the orders of the columns in the prompts that were sent."""
    return {",".join(line.split(":")[0] for line in sent.prompt.split("\n")) for sent in server.sent}


def test_what_rows_share_comes_first(tmp_path: Path, server: FakeSGLang) -> None:
    """The key goes last, in every prompt; the log says so, and run.json has the order."""
    write(tmp_path / "in" / "a.parquet", 200)
    ran = batchrun(write_job(a_job(tmp_path, server), tmp_path))
    assert ran.exit_code == 0, ran.stderr
    assert orders(server) == {"plot,kind,key"}
    assert "prompt.fields: plot, kind, key" in ran.stderr
    facts = json.loads((tmp_path / "run" / "run.json").read_text())
    assert facts["job"]["prompt"]["fields"]["columns"] == ["plot", "kind", "key"]


def test_a_resumed_run_keeps_its_order(tmp_path: Path, server: FakeSGLang) -> None:
    """Added files may have made another order the best: prompts of one run are of one form all the same."""
    write(tmp_path / "in" / "a.parquet", 100)
    job = a_job(tmp_path, server, input={"path": str(tmp_path / "in"), "limit": 50})
    batchrunner.run(job)
    write(tmp_path / "in" / "b.parquet", 3000, first=100, swap=True)
    del job["input"]["limit"]
    batchrunner.run(job)
    assert orders(server) == {"plot,kind,key"}
    job["prompt"]["fields"]["columns"] = ["kind", "key", "plot"]  # the same columns, written otherwise
    write(tmp_path / "in" / "c.parquet", 5, first=9000)
    batchrunner.run(job)
    assert orders(server) == {"plot,kind,key"}
    assert len(results_of(job)) == 3105
    refused = batchrun(
        write_job({**job, "prompt": {**job["prompt"], "fields": {"columns": ["kind"]}}}, tmp_path)
    )
    assert refused.exit_code == 2
    assert "holds another run: prompt.fields" in refused.stderr
    server.sent.clear()
    batchrunner.run(job, fresh=True)
    assert orders(server) == {"key,plot,kind"} or orders(server) == {"key,kind,plot"}


ROW = {
    "name": "Ada", "born": date(1815, 12, 10), "score": 2.5, "sum": Decimal("1.10"), "alive": False,
    "note": None, "tags": ["a", "ö"], "place": {"city": "London"}, "n": 3, "two": "one\ntwo",
}  # fmt: skip
BLOCK = """name: Ada
born: 1815-12-10
score: 2.5
sum: 1.10
alive: false
note: null
tags: ["a", "ö"]
place: {"city": "London"}
n: 3
two: one
two"""


@pytest.mark.parametrize("where", ["user", "system", "text", "messages"])
def test_where_it_stands(where: str, tmp_path: Path, server: FakeSGLang) -> None:
    """Each kind of template shows it, beside columns of the row; values are written as people do, or JSON."""
    template = "Look:\n{{ fields }}\nand {{ n }}."
    prompt: dict[str, Any] = {where: template}
    if where == "system":
        prompt["user"] = "{{ name }}?"
    if where == "messages":
        prompt = {"messages": [{"role": "user", "content": template}]}
    pq.write_table(pa.Table.from_pylist([{**ROW, "note": "x"}, ROW]), tmp_path / "input.parquet")
    prompt["fields"] = {"columns": [*ROW], "order": "written"}
    batchrunner.run(job_of(tmp_path, server, prompt=prompt))
    bodies = [str(sent.body.get("text") or sent.body["messages"][0]["content"]) for sent in server.sent]
    assert f"Look:\n{BLOCK}\nand 3." in bodies


@pytest.mark.parametrize(
    ("prompt", "told"),
    [
        (
            {"text": "{{ name }}"},
            "prompt.fields: no template uses {{ fields }}: write {{ fields }} in the template",
        ),
        ({"input_ids": "n"}, "`fields` has no effect together with `input_ids`"),
        ({"fields": ["name", "nmae"]}, "prompt.fields: unknown column 'nmae'; did you mean 'name'?"),
        ({"fields": ["raw"]}, "prompt.fields: column 'raw' holds bytes (binary), not text"),
    ],
)
def test_fields_that_cannot_be(prompt: dict[str, Any], told: str, tmp_path: Path) -> None:
    """Fields that no prompt has, unknown columns, doubled ones, bytes: one line, exit code 2."""
    pq.write_table(pa.table({"name": ["a"], "n": [1], "raw": [b"x"]}), tmp_path / "input.parquet")
    shown = {"columns": prompt.get("fields", ["name", "n"])}
    prompt = {"text": "{{ fields }}", "fields": shown} if "fields" in prompt else {**prompt, "fields": shown}
    assert told in refusal(job_of(tmp_path, prompt=prompt), tmp_path)


def test_a_column_of_that_name(tmp_path: Path, server: FakeSGLang) -> None:
    """Which of the two is meant nobody can know; without `prompt.fields` it is a column like any other."""
    pq.write_table(pa.table({"fields": ["a column"], "name": ["b"]}), tmp_path / "input.parquet")
    job = job_of(tmp_path, server, prompt={"text": "{{ fields }}"})
    batchrunner.run(job)
    assert [sent.prompt for sent in server.sent] == ["a column"]
    job["prompt"]["fields"] = {"columns": ["name"]}
    other = {**job, "output": {"path": str(tmp_path / "other")}}
    assert "prompt.fields: the input has a column 'fields'" in refusal(other, tmp_path)
