"""What an actor does with its batches; no cluster is needed for that."""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from batchrunner.core.errors import BatchrunError, JobError
from batchrunner.job.call import GenerateCall, LibraryCall, TaskCall
from batchrunner.job.load import parse_engine
from batchrunner.ray.engine_worker import EngineWorker
from batchrunner.ray.stage_call import StageCall

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.fake_sglang import Behaviour, FakeSGLang, Sent

pytestmark = pytest.mark.ray
TEXT = {"text": "text"}
SIMULATED = {"kind": "simulated", "step_s": 0}


@contextmanager
def worker(
    engine: Any = SIMULATED,
    task: Any = None,
    *,
    columns: list[str] | None = None,
    prefix: str = "",
    **own: Any,
) -> Iterator[EngineWorker]:
    """Give the worker of a call, and close it as Ray Data does."""
    fields = {"engine": parse_engine(engine), "prompt": TEXT, "columns": (), "limits": None}
    generating = {
        "parse": None, "sampling": None, "answers": (), "explode": False, "check": None, "on_length": None,
        "own_rows": True,
    }  # fmt: skip
    call: LibraryCall
    if task is None:
        call = GenerateCall(**{**fields, **generating, **own})
    else:
        call = TaskCall(task=task, **{**fields, **own})
    made = EngineWorker(StageCall(call, columns, prefix))
    try:
        yield made
    finally:
        made.__del__()


def batch(first: int, count: int, **columns: Any) -> pa.Table:
    """Return rows `id, text`."""
    ids = list(range(first, first + count))
    return pa.table({"id": ids, "text": [f"row {i}" for i in ids], **columns})


async def test_batches_overlap(server: FakeSGLang) -> None:
    """Batches that are given at once are sent as one stream: each comes back as soon as its rows are done."""
    server.script = lambda sent: "hold" if sent.prompt == "row 0" else "answer"
    with worker(server.url) as call:
        held, *others = (asyncio.create_task(call(batch(10 * i, 10))) for i in range(5))
        tables = await asyncio.gather(*others)
        assert not held.done()
        server.answer_held()
        tables = [await held, *tables]
    assert [table.column("id").to_pylist() for table in tables] == [
        list(range(10 * i, 10 * i + 10)) for i in range(5)
    ]
    answers = pa.concat_tables(tables).column("output").to_pylist()
    assert answers == [f"answer 0 to row {i}" for i in range(50)]


async def test_each_task_has_its_columns() -> None:
    """The tables of a task have the same types, also where no row has an answer."""
    documents = [["a", "b"]] * 3
    with worker(task="score", labels=[" yes", " no"], fields={"softmax": True}, prefix="s_") as call:
        scored = await call(batch(0, 3))
    assert [sum(scores) for scores in scored.column("s_scores").to_pylist()] == pytest.approx([1] * 3)
    with worker(task="rerank", items={"documents": "documents"}) as call:
        ranked = await call(batch(0, 3, documents=documents))
    assert [len(scores) for scores in ranked.column("scores").to_pylist()] == [2] * 3
    with worker(task="embed") as call:
        nothing = await call(pa.table({"id": [1], "text": pa.array([None], pa.string())}))
        some = await call(batch(0, 3))
        empty = await call(batch(0, 3).slice(0, 0))
    assert nothing.column("error").to_pylist() != [None]
    assert some.schema.field("embedding").type == pa.list_(pa.float32())
    assert nothing.schema.equals(some.schema)
    assert empty.schema.equals(some.schema)


async def test_each_answer_of_a_row_can_be_a_row() -> None:
    """With `explode` the columns of a row are repeated."""
    with worker(sampling={"n": 2}, explode=True, columns=["id"]) as call:
        tables = [await call(batch(0, 3)), await call(batch(3, 3))]
    found = pa.concat_tables(tables).select(["id", "sample"]).to_pylist()
    assert found == [{"id": i, "sample": n} for i in range(6) for n in range(2)]


async def test_a_function_gets_the_columns_that_are_kept() -> None:
    """`parse` may ask for the row."""

    def of(text: str, row: dict[str, Any]) -> dict[str, int]:
        return {"of": row["id"], "length": len(text)}

    parse = {"python": of, "columns": {"of": "int64", "length": "int64"}}
    with worker(parse=parse) as call:
        table = await call(batch(5, 3))
    assert table.column("of").to_pylist() == [5, 6, 7]
    assert min(table.column("length").to_pylist()) > 0


async def test_columns_of_other_types_are_kept() -> None:
    """A later batch may have a column of another type, and a column may be of a type that no prompt takes."""
    odd = {"odd": pa.array([{"a": [b"x"]}] * 2), "when": pa.array([1, 2], pa.duration("s"))}
    with worker() as call:
        one = await call(batch(0, 2, **odd))
        other = await call(batch(2, 2, odd=["a", "b"]))
    assert one.column("odd").to_pylist() == [{"a": [b"x"]}] * 2
    assert other.column("odd").to_pylist() == ["a", "b"]
    assert one.column("error").null_count == other.column("error").null_count == 2


async def test_a_stream_that_ends_fails_its_batches_and_another_begins(server: FakeSGLang) -> None:
    """A pipeline that goes on without some blocks goes on with the engine."""
    refusing = True

    def script(_: Sent) -> Behaviour:
        return "too long" if refusing else "answer"

    server.script = script
    with worker(server.url, limits={"abort_failed_share": 0.5}) as call:
        ended = await asyncio.gather(*(call(batch(i, 100)) for i in range(3)), return_exceptions=True)
        refusing = False
        assert all(isinstance(each, (BatchrunError, pa.Table)) for each in ended)
        assert any("of the rows failed" in str(each) for each in ended)
        assert (await call(batch(0, 2))).column("output").to_pylist() == [
            "answer 0 to row 0",
            "answer 0 to row 1",
        ]


async def test_results_do_not_replace_columns() -> None:
    """Where the columns were not known before, the first batch tells."""
    with worker() as call, pytest.raises(JobError, match="a column 'error', and so do the results"):
        await call(batch(0, 1, error=["mine"]))
