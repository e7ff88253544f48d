"""Section `engine` of a job, with one class for each `kind` of engine."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, Self, TypeAlias, get_args
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, field_validator, model_validator

from batchrunner.job.fields import Duration, ModelName, Off, Spec, UserPath, user_paths

API_KEY_VARIABLE = "SGLANG_API_KEY"
"""Environment variable with the API key of SGLang servers, if the job names no other."""
PARSER = "reasoning-parser"
"""SGLang's server argument for the parser that separates thinking from the answer."""
STRICT_THINKING = "enable-strict-thinking"
"""SGLang's server argument that is required for limits of thinking tokens."""
THINK_LIMIT = "SGLANG_MAX_THINK_TOKENS"
"""Environment variable that limits the thinking tokens of all requests to an SGLang server."""


def _checked_url(url: str) -> str:
    """Return the address of a server without a final slash; raise ValueError if it is invalid."""
    if not re.fullmatch(r"https?://[^/@\s]+(/[^@]*)?", url):
        raise ValueError("an address is http://HOST:PORT or https://HOST:PORT, without a user and a password")
    _ = urlsplit(url).port  # `port` raises ValueError for an invalid host or port.
    return url.rstrip("/")


Url: TypeAlias = Annotated[str, AfterValidator(_checked_url)]


class RunningServers(Spec):
    """SGLang servers that are already running."""

    api_key_env: str = API_KEY_VARIABLE
    """Environment variable with the API key of the servers."""
    api_key_file: UserPath | None = None
    """File with the API key, such as a mounted secret. It replaces `api_key_env`."""
    background: bool = False
    """Use only the spare capacity of servers that have other users. The requests of these users go first."""


class AttachEngine(RunningServers):
    """One or more SGLang servers that are already running."""

    kind: Literal["attach"]
    """`attach`: the servers are already running."""
    urls: Annotated[list[Url], Field(min_length=1)]
    """Addresses of the servers, which are replicas of one model."""


class GatewayEngine(RunningServers):
    """Servers behind an SGLang Model Gateway, which calls them its workers. All are already running."""

    kind: Literal["gateway"]
    """`gateway`: the servers are already running, as workers of a Model Gateway."""
    url: Url
    """Address of the gateway."""
    route: Literal["auto", "workers", "gateway"] = "auto"
    """How rows are sent to the workers. `workers`: to each worker's own address. `gateway`: through the
    gateway. `auto`: to the workers' addresses if all of them can be reached by HTTP, else through the
    gateway."""
    model: str | None = None
    """Model name in the gateway's list of workers. Needed if the gateway serves several models."""
    headers: dict[str, str] = {}
    """HTTP headers of every request to the gateway, such as `{x-smg-tenant-id: nightly, x-smg-priority:
    bulk}`."""
    routing_key_header: str = "x-smg-routing-key"
    """Name of the HTTP header with the routing key, one of those in the gateway's `--routing-key-headers`."""


RESERVED = ("model-path", "model", "host", "port", "api-key", "device", "nnodes", "node-rank")
"""Server arguments of SGLang that batchrunner sets itself, so a job must not set them."""


class ServerEngine(Spec):
    """Servers that the run starts on free local ports, restarts when they die, and stops at the end."""

    kind: Literal["server"]
    """`server`: the run starts the servers, and stops them at its end."""
    model: ModelName
    """Model directory, or a model name that SGLang can load."""
    replicas: Literal["auto"] | Annotated[int, Field(ge=1)] = 1
    """Number of servers (replicas), each with separate GPUs. `auto`: one for every `tp` visible GPUs, and one
    on a CPU."""
    gateway: bool = False
    """Also start a Model Gateway (`smg`), through which other clients can use all replicas at one address."""
    nodes: Annotated[int, Field(ge=1)] = 1
    """Number of machines that together run one server, for a model that needs several machines. `tp` then
    counts the GPUs of all machines."""
    args: dict[str, Any] = {}
    """SGLang's server arguments, such as `{mem-fraction-static: 0.88}`."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """Device of the server. `auto`: a GPU if there is one, else the CPU."""
    python: UserPath | None = None
    """Python interpreter that has SGLang. Default: the interpreter that runs batchrunner."""
    env: dict[str, str] = {}
    """Environment variables for the server."""
    cache_dir: UserPath | None = None
    """Directory on the machine's own disk, such as `/scratch/$USER`. The model is copied to it once, and
    servers load the model from it. Environment variables in the path are expanded on that machine."""
    start_timeout: Duration = 1800.0
    """Maximum time until the server is ready. If it takes longer, the start fails."""
    tp: Annotated[int, Field(ge=1)] | None = None
    """Number of GPUs of a replica (SGLang's `--tp-size`). Default: the value in `args`, or 1."""
    heal: bool = True
    """After a server ran out of memory, restart it with safer arguments. Later runs start with these
    arguments."""
    adapt: Literal["auto"] | Off = "auto"
    """During the run, tune flags that the job does not set, if the remaining time is worth a restart. Later
    runs of the same kind of job begin with the best flags."""

    @field_validator("args")
    @classmethod
    def _by_name(cls, args: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments with normalized names: no leading dashes, and `-` in place of `_`."""
        normalized = {name.lstrip("-").replace("_", "-"): user_paths(value) for name, value in args.items()}
        for name in normalized:
            if name in RESERVED:
                raise ValueError(f"batchrunner sets --{name} itself: leave it out of engine.args")
            if "=" in name:
                raise ValueError(f"{name}: write the value after a colon, as in `NAME: VALUE`")
        return normalized

    @model_validator(mode="after")
    def _agree(self) -> Self:
        """Raise ValueError for fields that contradict each other."""
        for name in ("tp", "tp-size", "tensor-parallel-size"):
            if self.tp is not None and name in self.args:
                raise ValueError(f"engine.tp and --{name} set the same value: leave out one of them")
        if self.nodes > 1 and self.replicas != 1:
            raise ValueError("with `nodes` above 1, only one replica is possible: leave out `replicas`")
        return self

    @field_validator("env")
    @classmethod
    def _paths_in_env(cls, env: dict[str, str]) -> dict[str, str]:
        return {name: user_paths(value) for name, value in env.items()}


class SimulatedEngine(Spec):
    """Simulation of an engine, with invented answers at a simulated speed, for trials and tests.

    The results say that they are simulated.
    """

    kind: Literal["simulated"]
    """`simulated`: the answers are invented."""
    max_running: Annotated[int, Field(ge=1)] = 256
    """Maximum number of requests that decode at once."""
    max_total_tokens: Annotated[int, Field(ge=1)] = 400_000
    """Size of the KV pool in tokens."""
    context_length: Annotated[int, Field(ge=1)] = 8192
    """Maximum number of tokens of prompt and output together. Longer rows are refused."""
    step_s: Annotated[float, Field(ge=0)] = 0.02
    """Time of a decode step in seconds. With 0, all answers come at once."""
    dimensions: Annotated[int, Field(ge=1, le=65_536)] = 384
    """Number of dimensions of the vectors of `task: embed`."""


def _with_short_forms(schema: dict[str, Any]) -> None:
    """Add the short forms of an engine to the JSON Schema: a text, and a list of texts."""
    schema["oneOf"] = [*schema["oneOf"], {"type": "string"}, {"type": "array", "items": {"type": "string"}}]


EngineSpec: TypeAlias = Annotated[
    AttachEngine | ServerEngine | GatewayEngine | SimulatedEngine,
    Field(discriminator="kind", json_schema_extra=_with_short_forms),
]
ENGINE_KINDS: tuple[str, ...] = tuple(
    kind
    for engine_class in get_args(get_args(EngineSpec)[0])
    for kind in get_args(engine_class.model_fields["kind"].annotation)
)
