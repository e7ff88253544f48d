"""Stages of Ray Data on a cluster of three nodes: every row once, whatever fails; an engine is kept busy."""

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
import pytest
import ray

import batchrunner
import batchrunner.ray
from batchrunner.core.errors import BatchrunError, InputError, JobError
from batchrunner.job.call import LibraryCall
from batchrunner.job.load import parse_engine
from batchrunner.ray.stages import EngineWorker, StageCall, gpus_required
from tests.support.fake_sglang import Behaviour, FakeSGLang, Sent
from tests.support.ray_cluster import RayNodes

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore")]
TEXT = {"text": "text"}
WORKER = "EngineWorker"


def rows(count: int, blocks: int = 1) -> Any:
    """Return a data set of rows `id, text` in so many blocks."""
    table = pa.table({"id": list(range(count)), "text": [f"row {i}" for i in range(count)]})
    return ray.data.from_arrow([table.slice(i * count // blocks, count // blocks) for i in range(blocks)])


def test_rows_keep_their_columns_and_get_those_of_a_result(nodes: RayNodes, server: FakeSGLang) -> None:
    """Two stages of one pipeline, with several actors and blocks: failed rows are rows with an error.

    A row that takes long holds up neither the rows of its block nor those of the next blocks.
    """

    def script(sent: Sent) -> Behaviour:
        held: dict[str, Behaviour] = {"row 7": "too long", "row 0": "hold"}
        return held.get(sent.prompt, "answer")

    server.script = script
    first = batchrunner.ray.generate(rows(300, 15), prompt=TEXT, engine=server.url, replicas=2, batch_size=20)
    second = batchrunner.ray.generate(
        first,
        task="embed",
        prompt={"text": "{{ text }}"},
        engine="simulated",
        columns=["id", "output", "error"],
        prefix="v_",
    )
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(second.take_all)
        server.wait_for(300)
        assert not running.done()
        server.answer_held()
        table = {row["id"]: row for row in running.result()}
    assert sorted(table) == list(range(300))
    assert {i for i, row in table.items() if row["error"]} == {7}
    assert table[7]["output"] is None
    assert "longer than the model's context length" in table[7]["error"]
    assert table[8]["output"] == "answer 0 to row 8"
    alone = batchrunner.embed(["row 8"], prompt=TEXT, engine="simulated").column("embedding")[0].as_py()
    assert list(table[8]["v_embedding"]) == alone
    assert table[8]["v_error"] is None
    assert {"row", "v_row"}.isdisjoint(table[8])


@pytest.mark.long
def test_a_node_that_dies_in_mid_run_costs_no_row(nodes: RayNodes, server: FakeSGLang) -> None:
    """Its actor is started again elsewhere, and does again what it had not finished."""
    server.script = lambda sent: "hold" if sent.prompt in {"row 50", "row 250"} else "answer"
    out = batchrunner.ray.generate(
        rows(400, 20), prompt=TEXT, engine=server.url, replicas=2, batch_size=20, tasks=2
    )
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(out.take_all)
        server.wait_for(60)
        nodes.kill_the_node_of(WORKER)
        server.answer_held()
        found = running.result()
    assert sorted(row["id"] for row in found) == list(range(400))
    assert {row["output"].removeprefix("answer 0 to ") for row in found} == {f"row {i}" for i in range(400)}


def test_what_is_wrong_is_told_before_the_pipeline_runs(nodes: RayNodes, server: FakeSGLang) -> None:
    """The call itself raises, and nothing is sent."""
    ds = rows(3)
    engine: dict[str, Any] = {"engine": server.url, "prompt": TEXT}
    with batchrunner.open_engine("simulated") as opened, pytest.raises(JobError, match="open engine"):
        batchrunner.ray.generate(ds, prompt=TEXT, engine=opened)  # type: ignore[arg-type]
    with pytest.raises(JobError, match=r"ds is not a dataset of Ray Data \(got list\)"):
        batchrunner.ray.generate(["a"], **engine)
    with pytest.raises(InputError, match="nothing"):
        batchrunner.ray.generate(ds, engine=server.url, prompt={"text": "nothing"})
    with pytest.raises(InputError, match=r"columns: .*'texts'"):
        batchrunner.ray.generate(ds, columns=["texts"], **engine)
    with pytest.raises(JobError, match="has a column 'output', and so do the results: give a prefix"):
        batchrunner.ray.generate(ds.rename_columns({"id": "output"}), **engine)
    with pytest.raises(JobError, match="sampling"):
        batchrunner.ray.generate(ds, sampling={"temprature": 0}, **engine)
    assert not server.sent


@pytest.mark.parametrize(
    ("engine", "on_nodes", "asked"),
    [
        ("http://localhost:1", [8], 0),
        ("a/model", [0, 8], 1),
        ("a/model", [0, 0], 0),
        ({"kind": "server", "model": "m", "device": "cpu"}, [8], 0),
        ({"kind": "server", "model": "m", "args": {"tp-size": 2, "dp-size": 2}}, [8], 4),
        ({"kind": "server", "model": "m", "tp": 2, "replicas": 3}, [8], 6),
        ({"kind": "server", "model": "m", "tp": 16, "nodes": 2}, [8], 8),
    ],
)
def test_an_engine_takes_so_many(engine: Any, on_nodes: list[float], asked: int) -> None:
    """Tensor, pipeline and data parallelism count, and the replicas."""
    assert gpus_required(parse_engine(engine), on_nodes) == asked


@pytest.mark.parametrize(
    ("engine", "on_nodes", "said"),
    [
        (
            {"kind": "server", "model": "m", "tp": 4},
            [2, 2],
            "needs 4 GPUs, but no node .* more than 2: lower",
        ),
        ({"kind": "server", "model": "m", "device": "cuda"}, [], "needs 1 GPU, but no node .* more than 0"),
        ({"kind": "server", "model": "m", "replicas": "auto"}, [8], "engine.replicas: auto.*give a number"),
    ],
)
def test_what_no_node_can_give_is_refused(engine: Any, on_nodes: list[float], said: str) -> None:
    """An actor that no node has room for would be waited for without end."""
    with pytest.raises(JobError, match=said):
        gpus_required(parse_engine(engine), on_nodes)


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
    fields = {"engine": parse_engine(engine), "prompt": TEXT, "task": task or "generate"}
    call = LibraryCall(**{**fields, **own})
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
