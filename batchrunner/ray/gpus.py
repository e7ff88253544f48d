"""The GPUs that an engine takes on a Ray cluster, which gives them to an actor before the engine starts."""

import socket
from collections.abc import Sequence

import ray

from batchrunner.core.errors import JobError
from batchrunner.engines.model_memory import cards_of
from batchrunner.job.engine import AttachEngine, EngineSpec, GatewayEngine, SimulatedEngine


def gpus_asked(engine: EngineSpec, on_nodes: Sequence[float]) -> int:
    """Return the GPUs that an actor asks for; `on_nodes` are those of each node of the cluster.

    With `device: auto` an engine runs on the CPU where no node has a GPU. Raises JobError where the number
    is not known before the start, or no node has as many.
    """
    if isinstance(engine, (AttachEngine, SimulatedEngine)) or getattr(engine, "url", None) is not None:
        return 0
    most = int(max(on_nodes, default=0))
    if engine.device == "cpu" or (engine.device == "auto" and not most):
        return 0
    if engine.tp == "auto":
        raise JobError(
            "engine.tp: auto: Ray gives an actor its GPUs before the model is looked at", hint="give a number"
        )
    asked = cards_of(engine.args, engine.tp)
    if isinstance(engine, GatewayEngine):
        if engine.replicas == "auto":
            raise JobError(
                "engine.replicas: auto: Ray gives an actor its GPUs before the replicas are counted",
                hint="give a number, or take kind: server and more actors",
            )
        asked *= engine.replicas
    if asked > most:
        raise JobError(
            f"engine: it takes {_gpus(asked)}, and no node of the Ray cluster has more than {most}",
            hint="set engine.tp to fewer, or add a node with as many",
            mark=";",
        )
    return asked


def gpus_of_nodes() -> list[float]:
    """Return the GPUs of each node of the cluster that this process is connected to."""
    return [node["Resources"].get("GPU", 0) for node in ray.nodes() if node["Alive"]]


def is_this_machine_alone() -> bool:
    """Tell whether all nodes of the cluster are on the machine of this process."""
    return {node["NodeManagerHostname"] for node in ray.nodes() if node["Alive"]} == {socket.gethostname()}


def _gpus(number: int) -> str:
    return "a GPU" if number == 1 else f"{number} GPUs"
