"""The GPUs that an actor asks for: as many as its engine takes, if a node has them."""

from __future__ import annotations

from typing import Any

import pytest

from batchrunner.core.errors import JobError
from batchrunner.job.load import parse_engine
from batchrunner.ray.gpus import gpus_asked

pytestmark = pytest.mark.ray


@pytest.mark.parametrize(
    ("engine", "on_nodes", "asked"),
    [
        ("simulated", [8], 0),
        ("http://localhost:1", [8], 0),
        ({"kind": "gateway", "url": "http://localhost:1"}, [8], 0),
        ("a/model", [0, 8], 1),
        ("a/model", [0, 0], 0),
        ({"kind": "server", "model": "m", "device": "cpu"}, [8], 0),
        ({"kind": "server", "model": "m", "tp": 4}, [0, 8], 4),
        ({"kind": "server", "model": "m", "args": {"tp-size": 2, "dp-size": 2}}, [8], 4),
        ({"kind": "server", "model": "m", "args": {"pp-size": 2}, "tp": 2}, [8], 4),
        ({"kind": "gateway", "model": "m", "tp": 2, "replicas": 3}, [8], 6),
    ],
)
def test_an_engine_takes_so_many(engine: Any, on_nodes: list[float], asked: int) -> None:
    """Tensor, pipeline and data parallelism count, and the replicas behind a gateway."""
    assert gpus_asked(parse_engine(engine), on_nodes) == asked


@pytest.mark.parametrize(
    ("engine", "on_nodes", "said"),
    [
        ({"kind": "server", "model": "m", "tp": 4}, [2, 2], "takes 4 GPUs, and no node .* more than 2; set"),
        ({"kind": "server", "model": "m", "device": "cuda"}, [], "takes a GPU, and no node .* more than 0"),
        ({"kind": "server", "model": "m", "tp": "auto"}, [8], "engine.tp: auto.*give a number"),
        ({"kind": "gateway", "model": "m"}, [8], "engine.replicas: auto.*give a number"),
    ],
)
def test_what_no_node_can_give_is_refused(engine: Any, on_nodes: list[float], said: str) -> None:
    """An actor that no node has room for would be waited for without end."""
    with pytest.raises(JobError, match=said):
        gpus_asked(parse_engine(engine), on_nodes)
