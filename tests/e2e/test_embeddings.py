"""Jobs with `task: embed`: each row has its vector, whatever happens on the way."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import batchrunner
from tests.conftest import (
    INSTANT,
    batchrun,
    job_of,
    parts_of,
    results_of,
    run_job,
    write_job,
    write_rows,
)
from tests.support.answers import LENGTH, Body, vector_for
from tests.support.fake_sglang import FakeSGLang, Sent

EMBED: dict[str, Any] = {"task": "embed"}
ROWS = 40


@pytest.fixture
def embedder() -> Iterator[FakeSGLang]:
    """A server of an embedding model."""
    with FakeSGLang(arguments={"is_generation": False}) as fake:
        yield fake


def ids_job(directory: Path, engine: Any, rows: int = ROWS, **changes: Any) -> dict[str, Any]:
    """A job whose prompts are token ids, which go in lists of 8."""
    path = directory / "input.parquet"
    if not path.exists():
        write_rows(path, rows, ids=[[n, n + 1, 7] for n in range(rows)])
    more = {"prompt": {"input_ids": "ids"}, "bundle": 8, "window": 32, **changes}
    return job_of(directory, engine, **EMBED, **more)


def run(job: dict[str, Any], directory: Path, *options: str) -> Any:
    return batchrun(write_job(job, directory), *options)


def vectors_of(job: dict[str, Any]) -> list[Any]:
    return [row["embedding"] for row in results_of(job)]


def expected(rows: int = ROWS) -> list[list[float]]:
    return [vector_for(str([n, n + 1, 7])) for n in range(rows)]


def inputs_of(sent: Sent) -> list[list[int]]:
    """Return the prompts of the request that a row came in."""
    found = sent.body["input"]
    return found if sent.together > 1 else [found]


def column_type(job: dict[str, Any]) -> pa.DataType:
    (kind,) = {part.schema.field("embedding").type for part in parts_of(job["output"]["path"])}
    return kind


@pytest.mark.usefixtures("full_requests")
def test_lists_are_filled_by_tokens(tmp_path: Path) -> None:
    """A list has the tokens of a forward pass, with prompts of about one length; a longer one goes alone."""
    lengths = [2 + (13 * n) % 60 for n in range(200)] + [900]
    path = write_rows(tmp_path / "input.parquet", 201, ids=[[n + 1] * size for n, size in enumerate(lengths)])
    limits = {"is_generation": False, "max_prefill_tokens": 256, "chunked_prefill_size": -1}
    with FakeSGLang(arguments={**limits, "disable_radix_cache": True}) as fake:
        job = ids_job(tmp_path, fake, bundle="auto", window=100, input={"path": str(path)})
        del job["bundle"]
        result = run(job, tmp_path)
    assert result.exit_code == 0, result.stderr
    by_content = {repr(inputs): inputs for inputs in map(inputs_of, fake.sent)}
    lists = [list(map(len, inputs)) for inputs in by_content.values()]
    assert sum(map(len, lists)) == 201
    assert all(sum(each) <= 256 or len(each) == 1 for each in lists)
    assert [900] in lists
    assert len(lists) < 60
    assert sum(max(each) - min(each) for each in lists) / len(lists) < 20  # of 60 in the order of the input
    assert len(results_of(job)) == 201


@pytest.mark.parametrize("engine", ["server", "simulated"])
def test_texts_have_vectors(tmp_path: Path, embedder: FakeSGLang, engine: str) -> None:
    """Prompts may be texts, from a column or a template; equal ones are sent once."""
    path = write_rows(tmp_path / "input.parquet", 6, same=["x"] * 6)
    job = job_of(
        tmp_path, embedder if engine == "server" else {**INSTANT, "dimensions": LENGTH},
        **EMBED, input={"path": str(path)}, prompt={"text": "query: {{ same }}"}, bundle="off",
    )  # fmt: skip
    run_job(job, tmp_path)
    found = vectors_of(job)
    assert len(found) == 6
    assert [each == found[0] and len(each) == LENGTH for each in found] == [True] * 6
    assert sorted(row["attempts"] for row in results_of(job)) == [0] * 5 + [1]


@pytest.mark.parametrize("as_floats", [False, True])
def test_dtype_normalize_dimensions(tmp_path: Path, embedder: FakeSGLang, as_floats: bool) -> None:
    """Vectors are shortened by the server, and made of length 1 and of 16 bits here."""
    embedder.floats = as_floats
    job = ids_job(tmp_path, embedder, output={"dtype": "float16", "normalize": True, "dimensions": 4})
    run_job(job, tmp_path)
    assert column_type(job) == pa.list_(pa.float16())
    for found, whole in zip(vectors_of(job), expected(), strict=True):
        norm = math.hypot(*whole[:4])
        assert found == list(struct.unpack("<4e", struct.pack("<4e", *(n / norm for n in whole[:4]))))


def odd_vector(sent: Sent) -> list[float]:
    whole = vector_for(sent.prompt)
    return {
        str([1, 2, 7]): [math.nan, *whole[1:]],
        str([2, 3, 7]): [math.inf, *whole[1:]],
        str([3, 4, 7]): [],
        str([5, 6, 7]): [0.0] * LENGTH,
        str([6, 7, 7]): [1e5, *whole[1:]],
    }.get(sent.prompt, whole)


@pytest.mark.parametrize("as_floats", [False, True])
def test_vectors_without_use(tmp_path: Path, embedder: FakeSGLang, as_floats: bool) -> None:
    """NaN, infinite, empty, too large for 16 bits: these rows fail, with the reason."""
    embedder.vector, embedder.floats = odd_vector, as_floats
    job = ids_job(
        tmp_path, embedder, bundle="off", window=1, order="input", output={"dtype": "float16"},
        limits={"max_failed_rows": 5, "abort_failed_share": 1},
    )  # fmt: skip
    run_job(job, tmp_path)
    errors = {row["row"]: row["error"] for row in results_of(job) if row["error"]}
    assert errors == {
        1: "the vector has numbers that are NaN or infinite",
        2: "the vector has numbers that are NaN or infinite",
        3: "the vector is empty",
        6: "output.dtype: the vector has numbers too large for float16",
    }
    assert column_type(job) == pa.list_(pa.float16())


def test_dimensions_that_the_model_lacks(tmp_path: Path, embedder: FakeSGLang) -> None:
    """A server that does not heed `dimensions` fails the rows."""
    embedder.vector = lambda sent: vector_for(sent.prompt)
    job = ids_job(tmp_path, embedder, rows=4, output={"dimensions": 3}, limits={"max_failed_rows": 4})
    run(job, tmp_path)
    assert {row["error"] for row in results_of(job)} == {
        "the vector has 8 numbers, and output.dimensions is 3"
    }


def test_an_odd_list_reply(tmp_path: Path, embedder: FakeSGLang) -> None:
    """A reply with fewer vectors than rows says nothing of any: they are sent in other lists."""
    short = Body(b'{"data": [{"embedding": [1.0, 2.0], "index": 0}]}')
    embedder.script = lambda sent: short if sent.together > 1 else "answer"
    job = ids_job(tmp_path, embedder, rows=16)
    run_job(job, tmp_path)
    assert vectors_of(job) == expected(16)
    assert {row["attempts"] for row in results_of(job)} == {1}


def test_the_function_embed() -> None:
    """The library makes vectors of texts, in order, of numbers that numpy reads without a copy."""
    engine = {**INSTANT, "dimensions": 16}
    table = batchrunner.embed(["a cat", "a dog", "a cat"], engine=engine, normalize=True)
    vectors = table.column("embedding").combine_chunks()
    assert vectors.type == pa.list_(pa.float32())
    matrix = vectors.flatten().to_numpy(zero_copy_only=True).reshape(3, 16)
    assert (matrix[0] == matrix[2]).all()
    assert not (matrix[0] == matrix[1]).all()
    assert abs((matrix * matrix).sum(axis=1) - 1).max() < 1e-5
    assert batchrunner.embed([], prompt="text", engine=engine).num_rows == 0


def test_an_engine_opened_for_another_task(embedder: FakeSGLang) -> None:
    """An open engine takes jobs of its task only."""
    with batchrunner.open_engine(embedder.url, task="embed") as engine:
        assert batchrunner.embed(["x"], engine=engine).column("embedding").to_pylist() == [vector_for("x")]
        with pytest.raises(batchrunner.JobError, match="was opened for task embed, and the"):
            batchrunner.generate(["x"], engine=engine)
    with (
        pytest.raises(batchrunner.JobError, match="task 'embeddings': give one of generate, embed"),
        batchrunner.open_engine(embedder.url, task="embeddings"),  # type: ignore[arg-type]
    ):
        pass
