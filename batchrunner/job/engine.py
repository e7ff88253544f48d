"""The section `engine` of a job: one class for each `kind` of engine."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, Self, TypeAlias, get_args
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, field_validator, model_validator

from batchrunner.job.fields import Duration, ModelName, Off, Spec, UserPath, user_paths

API_KEY_VARIABLE = "SGLANG_API_KEY"
"""Environment variable with the API key of SGLang servers, if the job names no other variable."""
PARSER, STRICT_THINKING = "reasoning-parser", "enable-strict-thinking"
THINK_LIMIT = "SGLANG_MAX_THINK_TOKENS"
"""Arguments and variable with which SGLang limits thinking."""


def _checked_url(url: str) -> str:
    if not re.fullmatch(r"https?://[^/@\s]+(/[^@]*)?", url):
        raise ValueError("an address is http://HOST:PORT or https://HOST:PORT, without a user and a password")
    _ = urlsplit(url).port  # raises ValueError for a host or a port that cannot be
    return url.rstrip("/")


Url: TypeAlias = Annotated[str, AfterValidator(_checked_url)]


class RunningServers(Spec):
    """SGLang servers that already run."""

    api_key_env: str = API_KEY_VARIABLE
    """Environment variable with the servers' API key."""
    api_key_file: UserPath | None = None
    """File with the API key instead, such as a mounted secret."""
    background: bool = False
    """The servers have other users, whose requests go first. Rows use only the spare capacity."""


class AttachEngine(RunningServers):
    """One or more SGLang servers that already run."""

    kind: Literal["attach"]
    """`attach`: the servers already run."""
    urls: Annotated[list[Url], Field(min_length=1)]
    """Addresses of the servers, replicas of one model."""


class GatewayEngine(RunningServers):
    """The workers of SGLang's Model Gateway, which already runs."""

    kind: Literal["gateway"]
    """`gateway`: the servers already run, and a Model Gateway lists them."""
    url: Url
    """Address of the gateway."""
    route: Literal["auto", "workers", "gateway"] = "auto"
    """How rows reach the workers. `workers`: at each worker's own address. `gateway`: through the gateway.
    `auto`: directly if all workers can be reached from here by HTTP, else through the gateway."""


RESERVED = ("model-path", "model", "host", "port", "api-key", "device", "nnodes", "node-rank")
"""Arguments of SGLang that batchrunner sets."""


class ServerEngine(Spec):
    """Servers that the run starts on free local ports, restarts when they die, and stops at the end."""

    kind: Literal["server"]
    """`server`: the run starts and stops them."""
    model: ModelName
    """Model directory, or a model name that SGLang can load."""
    replicas: Literal["auto"] | Annotated[int, Field(ge=1)] = 1
    """Number of servers, each with GPUs of its own. `auto`: one for every `tp` visible GPUs; one on a CPU."""
    gateway: bool = False
    """Also start a Model Gateway (`smg`), through which other clients can use all replicas at one address."""
    nodes: Annotated[int, Field(ge=1)] = 1
    """Number of machines of a server, for a model that needs several; `tp` counts the GPUs of all
    machines."""
    args: dict[str, Any] = {}
    """SGLang's server arguments, such as `{mem-fraction-static: 0.88}`."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """`auto`: a GPU if there is one, else SGLang's CPU engine."""
    python: UserPath | None = None
    """Python interpreter that has SGLang. Default: the one that runs batchrunner."""
    env: dict[str, str] = {}
    """Environment variables for the server."""
    cache_dir: UserPath | None = None
    """Directory on the machine's own disk, such as `/scratch/$USER`, to which the model is copied once, and
    from which servers load it. Environment variables in it are expanded on that machine."""
    start_timeout: Duration = 1800.0
    """Maximum time until the server is ready; after it the start fails."""
    tp: Annotated[int, Field(ge=1)] | None = None
    """Number of GPUs of a replica (SGLang's `--tp-size`). Default: what `args` say, or 1."""
    heal: bool = True
    """Restart a server that ran out of memory with safer arguments, and begin later runs with them."""
    adapt: Literal["auto"] | Off = "auto"
    """During the run, tune flags that the job does not name, if the remaining time is worth a restart. Later
    runs of the same kind of job begin with the best flags."""

    @field_validator("args")
    @classmethod
    def _by_name(cls, args: dict[str, Any]) -> dict[str, Any]:
        clean = {name.lstrip("-").replace("_", "-"): user_paths(value) for name, value in args.items()}
        for name in clean:
            if name in RESERVED:
                raise ValueError(f"batchrunner sets --{name} itself: leave it out of engine.args")
            if "=" in name:
                raise ValueError(f"{name}: write its value after a colon")
        return clean

    @model_validator(mode="after")
    def _agree(self) -> Self:
        for name in ("tp", "tp-size", "tensor-parallel-size"):
            if self.tp is not None and name in self.args:
                raise ValueError(f"engine.tp and --{name} set the same value: leave out one of them")
        if self.nodes > 1 and self.replicas != 1:
            raise ValueError("a server on several `nodes` has one replica: leave out `replicas`")
        return self

    @field_validator("env")
    @classmethod
    def _paths_in_env(cls, env: dict[str, str]) -> dict[str, str]:
        return {name: user_paths(value) for name, value in env.items()}


class SimulatedEngine(Spec):
    """No engine: invented answers at a simulated speed, for trials and tests. Results are marked."""

    kind: Literal["simulated"]
    """`simulated`: the answers are invented."""
    max_running: Annotated[int, Field(ge=1)] = 256
    """Maximum number of requests that decode at once."""
    max_total_tokens: Annotated[int, Field(ge=1)] = 400_000
    """Size of the KV pool in tokens."""
    context_length: Annotated[int, Field(ge=1)] = 8192
    """Maximum number of tokens of prompt and output together; longer rows are refused."""
    step_s: Annotated[float, Field(ge=0)] = 0.02
    """Seconds that a decode step takes; 0 answers at once."""
    dimensions: Annotated[int, Field(ge=1, le=65_536)] = 384
    """Length of the vectors of `task: embed`."""


def _with_short_forms(schema: dict[str, Any]) -> None:
    """Let the JSON Schema take a model's name, an address, a list of addresses and `simulated` too."""
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
"""The values of `engine.kind`."""
