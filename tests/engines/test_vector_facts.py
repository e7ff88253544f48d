"""What is known of vectors before a row is sent: their lengths, and which token makes them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.conftest import batchrun, job_of, results_of, write_job
from tests.support.fake_sglang import FakeSGLang

if TYPE_CHECKING:
    from pathlib import Path

MEAN, FIRST = "the mean over all tokens", "the first token"


def model_in(directory: Path, mode: str | None = None, **config: Any) -> str:
    """Write a model's config.json, and which `mode` its authors make vectors by."""
    pooling = directory / "1_Pooling"
    pooling.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps({"architectures": ["BertModel"], **config}))
    if mode is not None:
        modes = {"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": False, mode: True}
        (pooling / "config.json").write_text(json.dumps(modes))
    return str(directory)


def embedder(model: str, **told: Any) -> FakeSGLang:
    """A server of an embedding model that tells so much of its vectors."""
    facts = {"is_generation": False, "architectures": ["BertModel"], "embedding": told}
    return FakeSGLang(model=model, arguments=facts)


def run(directory: Path, engine: Any, **changes: Any) -> Any:
    return batchrun(write_job(job_of(directory, engine, rows=4, task="embed", **changes), directory))


@pytest.mark.parametrize(
    ("mode", "pooling", "warned"),
    [
        ("pooling_mode_mean_tokens", "cls", True),
        ("pooling_mode_lasttoken", "mean", True),
        ("pooling_mode_cls_token", "cls", False),
        ("pooling_mode_mean_tokens", "mean", False),
        ("pooling_mode_mean_tokens", "model_defined", False),
        (None, "cls", False),
    ],
)
def test_a_server_that_makes_vectors_otherwise(
    tmp_path: Path, mode: str | None, pooling: Any, warned: bool
) -> None:
    """A line says so, once, where files and server are known to differ; the rows are done."""
    with embedder(model_in(tmp_path / "model", mode), pooling=pooling) as server:
        done = run(tmp_path, server)
    assert done.exit_code == 0
    lines = [line for line in done.stderr.splitlines() if "makes vectors of" in line]
    assert len(lines) == warned
    if warned:
        assert "they will not be alike" in lines[0]
        assert FIRST in lines[0] or "the last token" in lines[0]
        assert ("mean_pooling" in lines[0]) == (mode == "pooling_mode_mean_tokens")


def test_odd_facts(tmp_path: Path) -> None:
    """A server that tells nonsense is taken for one that tells nothing."""
    model = model_in(tmp_path / "model", "pooling_mode_mean_tokens")
    odd: list[Any] = [None, [], "mean", {}, {"pooling": 3, "supports_dimensions": "no"}]
    for told in odd:
        with FakeSGLang(model=model, arguments={"is_generation": False, "embedding": told}) as server:
            done = run(tmp_path / str(told), server, output={"dimensions": 4})
        assert done.exit_code == 0
        assert "makes vectors of" not in done.stderr


@pytest.mark.parametrize(
    ("told", "asked", "message"),
    [
        ({"supports_dimensions": False}, 4, "makes vectors of its own length only (got 4)"),
        (
            {"supports_dimensions": True, "matryoshka_dimensions": [2, 4]},
            3,
            "makes vectors only 2, 4 (got 3)",
        ),
        ({"supports_dimensions": True, "matryoshka_dimensions": [2, 4]}, 4, None),
        ({"supports_dimensions": True, "matryoshka_dimensions": []}, 3, None),
        ({}, 3, None),
    ],
)
def test_dimensions_of_a_server(tmp_path: Path, told: Any, asked: int, message: str | None) -> None:
    """What the model cannot make is refused in one line, and nothing is sent."""
    with embedder("fake/model", **told) as server:
        job = job_of(tmp_path, server, rows=4, task="embed", output={"dimensions": asked})
        done = batchrun(write_job(job, tmp_path))
    if message is None:
        assert done.exit_code == 0
        assert {len(row["embedding"]) for row in results_of(job)} == {asked}
        return
    assert done.exit_code == 2
    assert f"output.dimensions: fake/model {message}" in done.stderr.splitlines()[-1]
    assert not server.sent


@pytest.mark.parametrize(("size", "code"), [(4, 0), (3, 2), (None, 0)])
def test_more_dimensions_than_the_model_of_a_server_has(tmp_path: Path, size: int | None, code: int) -> None:
    """Its config.json tells, where it is on this machine; nothing is sent."""
    model = model_in(tmp_path / "model", hidden_size=size)
    with embedder(model, supports_dimensions=True) as server:
        done = run(tmp_path, server, output={"dimensions": 4})
    assert done.exit_code == code
    assert ("makes vectors of 3 numbers at most (got 4): give fewer" in done.stderr) == (code != 0)
    assert bool(server.sent) == (code == 0)


@pytest.mark.parametrize(
    ("config", "args", "message"),
    [
        ({}, {}, "of its own length only"),
        ({"matryoshka_dimensions": [64]}, {}, "only 64"),
        ({"is_matryoshka": True}, {}, None),
        ({"is_matryoshka": True, "hidden_size": 32}, {}, None),
        ({"is_matryoshka": True, "hidden_size": 31}, {}, "of 31 numbers at most (got 32)"),
        ({"is_matryoshka": True, "text_config": {"hidden_size": 16}}, {}, "of 16 numbers at most"),
        ({"is_matryoshka": True, "hidden_size": "31"}, {}, None),
        ({"hidden_size": 31}, {"json-model-override-args": '{"is_matryoshka": true}'}, "of 31 numbers"),
        ({}, {"json-model-override-args": '{"is_matryoshka": true}'}, None),
        ({}, {"json-model-override-args": "{odd"}, None),
    ],
)
def test_dimensions_of_a_model_to_load(tmp_path: Path, config: Any, args: Any, message: str | None) -> None:
    """The model's files say it before a server is started; `check` says so too."""
    engine = {"kind": "server", "model": model_in(tmp_path / "model", **config), "args": args}
    path = write_job(job_of(tmp_path, engine, task="embed", output={"dimensions": 32}), tmp_path)
    checked = batchrun("check", path)
    assert checked.exit_code == (0 if message is None else 2), checked.stderr
    if message is not None:
        done = batchrun(path)
        assert done.exit_code == 2
        assert message in checked.stderr
        assert message in done.stderr.splitlines()[-1]
        assert "starting SGLang" not in done.stderr
