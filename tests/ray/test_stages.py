"""Stages of Ray Data on a cluster of three nodes: every row once, whatever fails; an engine is kept busy."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
import ray

import batchrunner
import batchrunner.ray
from batchrunner.core.errors import EngineStartError, InputError, JobError
from tests.support.fake_sglang import Behaviour, FakeSGLang, Sent

if TYPE_CHECKING:
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
    second = batchrunner.ray.embed(
        first,
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
    with pytest.raises(JobError, match=r"ds is no data set of Ray Data \(got list\)"):
        batchrunner.ray.generate(["a"], **engine)
    with pytest.raises(InputError, match="nothing"):
        batchrunner.ray.generate(ds, engine=server.url, prompt={"text": "nothing"})
    with pytest.raises(InputError, match=r"columns: .*'texts'"):
        batchrunner.ray.generate(ds, columns=["texts"], **engine)
    with pytest.raises(JobError, match="has a column 'output', and so do the results; give a prefix"):
        batchrunner.ray.generate(ds.rename_columns({"id": "output"}), **engine)
    with pytest.raises(JobError, match="replicas: 0"):
        batchrunner.ray.generate(ds, replicas=0, **engine)
    with pytest.raises(JobError, match=r"replicas: 'two': give a number from 1 on, or \(least, most\)"):
        batchrunner.ray.generate(ds, replicas="two", **engine)  # type: ignore[arg-type]
    with pytest.raises(JobError, match="num_cpus: -1: give the cores of an actor"):
        batchrunner.ray.generate(ds, num_cpus=-1, **engine)
    with pytest.raises(JobError, match="prefix: 3: give a text"):
        batchrunner.ray.generate(ds, prefix=3, **engine)  # type: ignore[arg-type]
    with pytest.raises(JobError, match="tasks: 0: give a number"):
        batchrunner.ray.generate(ds, tasks=0, **engine)
    with pytest.raises(EngineStartError, match="no/such/folder: no such model directory; give a folder"):
        batchrunner.ray.generate(ds, prompt=TEXT, engine="./no/such/folder")
    with pytest.raises(JobError, match="no model is named so"):
        batchrunner.ray.embed(ds, prompt=TEXT, engine="BAAI/bge small")
    with pytest.raises(JobError, match="sampling"):
        batchrunner.ray.generate(ds, sampling={"temprature": 0}, **engine)
    assert not server.sent
