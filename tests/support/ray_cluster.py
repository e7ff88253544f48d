"""A Ray cluster of three nodes on this machine: two with two cores, and a head that only directs."""

import contextlib
import logging
import os
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import pytest
import ray
from ray.cluster_utils import Cluster

from tests.support.server_thread import PATIENCE_S

T = TypeVar("T")
STORE_BYTES = 80 << 20
"""Memory of a node's object store; Ray takes 75 MB at least."""
NODE_S = 120.0
"""Longest start of a node, in seconds."""
TRIES = 5
NODES = 2
CORES = 2


class RayNodes:
    """The nodes of the cluster, which a test may kill."""

    def __init__(self) -> None:
        self._cluster = _started(lambda: Cluster(initialize_head=True, head_node_args=_node(0)))
        self._workers: list[Any] = []
        for _ in range(NODES):
            self.add()
        self._cluster.wait_for_nodes(PATIENCE_S)

    @property
    def address(self) -> str:
        """Address of the cluster."""
        return str(self._cluster.address)

    def add(self) -> None:
        """Add a node."""
        self._workers.append(_started(lambda: self._cluster.add_node(**_node(CORES))))

    def kill_the_node_of(self, actor: str, pid: int | None = None) -> None:
        """Kill a node where an actor runs whose class name has this text, at once; another node comes.

        With `pid`, the actor is the one in that process.
        """
        self.take_away_the_node_of(actor, pid)
        self.add()

    def take_away_the_node_of(self, actor: str, pid: int | None = None) -> None:
        """Kill such a node; no other one comes."""
        nodes = {
            each["Address"]["NodeID"]
            for each in ray._private.state.actors().values()
            if actor in each["ActorClassName"] and each["State"] == "ALIVE" and pid in {None, each["Pid"]}
        }
        node = next(node for node in self._workers if node.node_id in nodes)
        self._workers.remove(node)
        self._cluster.remove_node(node, allow_graceful=False)

    def close(self) -> None:
        """End all nodes."""
        self._cluster.shutdown()


def _patient(get_node: Callable[[str, str], Any]) -> Callable[[str, str], Any]:
    """Return a search for a node that just starts, of which Ray gives up after 30 s."""

    def found(address: str, node: str) -> Any:
        deadline = time.monotonic() + NODE_S
        while True:
            try:
                return get_node(address, node)
            except RuntimeError:
                if time.monotonic() > deadline:
                    raise
            time.sleep(0.1)

    return found


def _started(start: Callable[[], T]) -> T:
    """Start something again where its node died: of agents that take 15 s to tell their ports, as a rule."""
    for _ in range(TRIES - 1):
        with contextlib.suppress(Exception):  # Ray has no kind of its own for it
            return start()
    return start()


def _node(cores: int) -> dict[str, Any]:
    return {"num_cpus": cores, "object_store_memory": STORE_BYTES, "include_dashboard": False}


@contextlib.contextmanager
def ray_nodes() -> Iterator[RayNodes]:
    """Start the cluster, and connect this process to it."""
    os.environ.setdefault("RAY_DATA_DISABLE_PROGRESS_BARS", "1")
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("ignore")
        patch.setattr("ray._private.services.get_node", _patient(ray._private.services.get_node))
        nodes = RayNodes()
        try:
            ray.init(address=nodes.address, logging_level=logging.ERROR, log_to_driver=False)
            context = ray.data.DataContext.get_current()
            context.enable_progress_bars = False
            yield nodes
        finally:
            ray.shutdown()
            nodes.close()
