"""The `engine` part of a job: one class for each `kind` of engine."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

from pydantic import Field, field_validator, model_validator

from batchrunner.job.fields import Duration, Spec

if TYPE_CHECKING:
    from collections.abc import Mapping


class AttachEngine(Spec):
    """A server that runs already."""

    kind: Literal["attach"]
    """`attach`: the server runs already."""
    urls: Annotated[list[str], Field(min_length=1)]
    """One or more addresses of replicas of one model; rows go where there is room."""
    api_key_env: str = "SGLANG_API_KEY"
    """Environment variable that holds the server's API key; unset means no key."""

    @field_validator("urls")
    @classmethod
    def _http(cls, urls: list[str]) -> list[str]:
        return [_checked_url(url) for url in urls]


def _checked_url(url: str) -> str:
    if not re.match(r"https?://[^/]+", url):
        raise ValueError(f"an address starts with http:// or https:// (got {url!r})")
    if "@" in url.split("/")[2]:
        raise ValueError("an address has no user and password in it: name the key's variable in api_key_env")
    return url.rstrip("/")


class _LocalEngine(Spec):
    args: dict[str, Any] = {}
    """SGLang's server arguments, such as `{mem-fraction-static: 0.88, enable-metrics: true}`."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """`auto` takes the GPU where there is one, else SGLang's CPU engine, which is for trying and testing."""

    @field_validator("args")
    @classmethod
    def _own_arguments(cls, args: dict[str, Any]) -> dict[str, Any]:
        return _checked_args(args, ("model-path", "model", "host", "port", "api-key", "device"), "args")


def _checked_args(args: Mapping[str, Any], own: tuple[str, ...], field: str) -> dict[str, Any]:
    """Return arguments by their names on a command line, without `--`; those in `own` are refused."""
    clean = {name.lstrip("-").replace("_", "-"): value for name, value in args.items()}
    for name in own:
        if name in clean:
            raise ValueError(f"batchrunner sets --{name} itself: leave it out of engine.{field}")
    return clean


class LaunchedEngine(_LocalEngine):
    """What servers that the run starts have in common."""

    python: str | None = None
    """The interpreter that has SGLang, where it is not this one."""
    env: dict[str, str] = {}
    """Environment variables for the server."""
    start_timeout: Duration = 1800.0
    """How long loading may take."""
    heal: bool = True
    """A server that dies for want of memory is started again with safer arguments, which the next run of this
    model, card and version starts with; `false` leaves `args` as they are, and an earlier run's alone."""


class ServerEngine(LaunchedEngine):
    """A server that the run starts on a free loopback port and ends."""

    kind: Literal["server"]
    """`server`: the run starts it and ends it."""
    model: str
    """A model directory, or a name that SGLang can load."""


class GatewayEngine(LaunchedEngine):
    """Replicas of one model behind SGLang's Model Gateway: the run starts both, or finds them at `url`.

    A launched replica that dies is taken out, started again and put back, and so is the gateway.
    """

    kind: Literal["gateway"]
    """`gateway`: replicas behind SGLang's Model Gateway, launched (`model`) or running already (`url`)."""
    model: str | None = None
    """A model directory, or a name that SGLang can load: the run starts and ends replicas and gateway."""
    url: str | None = None
    """The address of a gateway that runs already; its workers must be within reach too, for their load."""
    api_key_env: str = "SGLANG_API_KEY"
    """With `url`: environment variable that holds the API key of gateway and workers; unset means none."""
    replicas: Literal["auto"] | Annotated[int, Field(ge=1)] = "auto"
    """How many; `auto` is one for every `tp` GPUs that CUDA_VISIBLE_DEVICES leaves, and one on a CPU."""
    tp: Annotated[int, Field(ge=1)] = 1
    """GPUs a replica (`--tp-size`)."""
    policy: Literal["auto", "cache_aware", "round_robin", "random", "power_of_two"] = "auto"
    """How the gateway chooses a replica. `auto` is its policy `manual` with keys that the runner sends: rows
    that share a beginning go to one replica, all others to the one with the fewest requests. (cache_aware
    keeps similar prompts on one replica until it has 64 requests more than another: a batch with one system
    prompt fills one first.)"""
    gateway_args: dict[str, Any] = {}
    """More arguments of sglang_router, such as `{log-level: info}`."""

    @field_validator("url")
    @classmethod
    def _http(cls, url: str | None) -> str | None:
        return url if url is None else _checked_url(url)

    @field_validator("gateway_args")
    @classmethod
    def _own_gateway_arguments(cls, args: dict[str, Any]) -> dict[str, Any]:
        own = ("host", "port", "prometheus-host", "prometheus-port", "api-key", "worker-urls", "policy")
        return _checked_args(args, own, "gateway_args")

    @model_validator(mode="after")
    def _launched_or_found(self) -> GatewayEngine:
        if (self.model is None) == (self.url is None):
            raise ValueError("give `model` (the run starts replicas and gateway) or `url` (they run already)")
        launch_only = type(self).model_fields.keys() - {"kind", "model", "url", "api_key_env"}
        if self.url is not None and self.model_fields_set & launch_only:
            names = ", ".join(sorted(self.model_fields_set & launch_only))
            raise ValueError(f"{names}: goes with `model`, not with `url`, where everything runs already")
        for name in ("tp", "tp-size", "tensor-parallel-size"):
            if name in self.args:
                raise ValueError(f"say engine.tp instead of --{name}: it also decides the number of replicas")
        return self


GATEWAY_DROPS: dict[str, frozenset[str]] = {
    "chat": frozenset({"stop_regex", "structural_tag", "custom_params"}),
    "generate": frozenset(
        {"stop_regex", "structural_tag", "custom_params", "logit_bias", "spaces_between_special_tokens"}
    ),
}
"""Sampling parameters that sglang_router 0.3.2 leaves out of the body it passes on, without a word (or, for
a chat's `structural_tag`, refuses), by the endpoint: a row that has them must not be sent through it."""


class InprocessEngine(_LocalEngine):
    """`sglang.Engine` in this process."""

    kind: Literal["inprocess"]
    """`inprocess`: `sglang.Engine` in this process."""
    model: str
    """A model directory, or a name that SGLang can load."""


class SimulatedEngine(Spec):
    """No engine at all: made-up answers at a made-up speed, to see the screen and to test. Always marked."""

    kind: Literal["simulated"]
    """`simulated`: answers are made up."""
    max_running: Annotated[int, Field(ge=1)] = 256
    """Requests that decode together."""
    max_total_tokens: Annotated[int, Field(ge=1)] = 400_000
    """KV pool in tokens."""
    context_length: Annotated[int, Field(ge=1)] = 8192
    """Longest prompt and output together, in tokens; longer rows are refused."""
    step_s: Annotated[float, Field(ge=0)] = 0.02
    """Time of a decode step; 0 answers at once."""


EngineSpec: TypeAlias = Annotated[
    AttachEngine | ServerEngine | GatewayEngine | InprocessEngine | SimulatedEngine,
    Field(discriminator="kind"),
]
