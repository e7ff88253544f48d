"""What is known of a server beside its load: arguments, limits, memory, model, card, what befell it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping

    from batchrunner.engines.logs.lines import Died, OutOfMemory, Phase, ServerReady

Architecture = Literal["hopper", "blackwell", "ada", "ampere"]

_ARCHITECTURES: dict[str, Architecture] = {
    "H100": "hopper", "H200": "hopper", "H800": "hopper", "H20": "hopper", "GH200": "hopper",
    "B200": "blackwell", "B300": "blackwell", "GB200": "blackwell", "GB300": "blackwell", "B100": "blackwell",
    "L40S": "ada", "L40": "ada", "L20": "ada", "L4": "ada", "4090": "ada", "RTX_6000_ADA": "ada",
    "A100": "ampere", "A800": "ampere", "A10G": "ampere", "A10": "ampere", "A30": "ampere", "A40": "ampere",
    "A6000": "ampere", "3090": "ampere",
}  # fmt: skip
FP8: frozenset[Architecture] = frozenset({"hopper", "blackwell", "ada"})
"""Cards that compute in 8-bit floats: NVIDIA's from compute capability 8.9."""
LARGEST = 1e15
"""No argument, limit or memory of a server is larger."""
KNOWN_CARDS = ", ".join(_ARCHITECTURES)
_MOE = ("Moe", "MoE", "Mixtral", "Deepseek", "GptOss", "Kimi", "MiniMax", "Grok", "Dbrx")
_MLA = ("DeepseekV2", "DeepseekV3", "Kimi")


@dataclass(frozen=True, slots=True)
class Trouble:
    """One time that memory ran out."""

    phase: Phase
    what: OutOfMemory
    running: int = 0
    """`#running-req` before it."""


@dataclass(slots=True)
class Facts:
    """Filled while a source is read; what is not known stays None or empty."""

    version: str | None = None
    arguments: dict[str, Any] = field(default_factory=dict)
    """By SGLang's own field names, with underscores."""
    ready: ServerReady | None = None
    troubles: list[Trouble] = field(default_factory=list)
    last_trouble: Trouble | None = None
    """Of what ran out of memory since the last batch: what came before, the server has survived."""
    died: Died | None = None
    """What the log says of a death: that it was a SIGKILL, the exception, or that there was one."""
    card: str | None = None
    card_gb: float | None = None
    """Memory of one GPU."""
    weights_gb: float | None = None
    """Of one rank."""
    quantised: str | None = None
    """How the checkpoint is quantised; empty where it is not."""
    model: str | None = None
    """Its class."""
    metrics: bool | None = None
    """Whether /metrics answers."""
    mute: bool = False
    """A live server that tells its load nowhere."""
    idle_gpus: int = 0
    """Those that a run's server saw and did not take."""

    def number(self, name: str, default: float | None = None) -> float | None:
        """Return an argument that is a number."""
        value = number(self.arguments.get(name))
        return default if value is None else value

    @property
    def tp(self) -> int:
        """GPUs that one replica's weights are spread over."""
        return int(self.number("tp_size", 1) or 1)

    @property
    def gpus(self) -> int:
        """GPUs that the server takes."""
        replicas = 1 if self.attn_dp > 1 else self.number("dp_size", 1) or 1
        return int(self.tp * (self.number("pp_size", 1) or 1) * replicas)

    @property
    def in_16_bits(self) -> bool:
        """Whether it is known that the weights are not quantised."""
        return self.quantised == "" and not self.arguments.get("quantization")

    @property
    def attn_dp(self) -> int:
        """Ranks that DP attention parts the requests of one replica among; 1 without it."""
        ranks = self.number("attn_dp_size", 1) or 1
        older = ranks == 1 and self.arguments.get("enable_dp_attention")  # before --attn-dp-size
        return int((self.number("dp_size", 1) if older else ranks) or 1)

    @property
    def max_running(self) -> int | None:
        """`max_running_requests` of one scheduler."""
        told = self.ready.max_running_requests if self.ready else None
        return told or int(self.number("max_running_requests", 0) or 0) // self.attn_dp or None

    @property
    def chunk(self) -> int | None:
        """`chunked_prefill_size` of one scheduler, in tokens."""
        told = self.ready.chunked_prefill_size if self.ready else None
        return told or int(self.number("chunked_prefill_size", 0) or 0) or None

    @property
    def architecture(self) -> Architecture | None:
        """The card's generation, where its name is known."""
        return architecture_of(self.card or "")

    @property
    def on_cpu(self) -> bool:
        """Whether it computes on a CPU."""
        return self.arguments.get("device") == "cpu"

    @property
    def is_moe(self) -> bool:
        """Whether the model has experts, by its class."""
        return any(name in (self.model or "") for name in _MOE)

    @property
    def is_mla(self) -> bool:
        """Whether its attention is multi-head latent, as DeepSeek's is."""
        return any(name in (self.model or "") for name in _MLA)

    @property
    def graph_disabled(self) -> bool:
        """Whether the arguments switch off CUDA graphs for decoding."""
        return _decode_graph(self.arguments) == "disabled" or bool(self.arguments.get("disable_cuda_graph"))

    @property
    def graph_max_bs(self) -> int | None:
        """The largest batch for which a CUDA graph was captured."""
        config = _phase(self.arguments, "decode").get("max_bs")
        names = ("cuda_graph_max_bs_decode", "cuda_graph_max_bs")
        found = number(config or next(filter(None, map(self.arguments.get, names)), None))
        return int(found) if found else None


def number(value: Any) -> float | None:
    """Return what somebody else wrote where it is a number that can be counted with, else None."""
    counts = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < LARGEST
    return float(value) if counts else None


def architecture_of(card: str) -> Architecture | None:
    """Return the generation of a card, by any name that has a known one's words in it."""
    words = f"_{re.sub('[^A-Z0-9]+', '_', card.upper())}_"
    return next((found for name, found in _ARCHITECTURES.items() if f"_{name}_" in words), None)


def _phase(arguments: Mapping[str, Any], phase: str) -> Mapping[str, Any]:
    config = arguments.get("cuda_graph_config")
    found = config.get(phase) if isinstance(config, dict) else None
    return found if isinstance(found, dict) else {}


def _decode_graph(arguments: Mapping[str, Any]) -> Any:
    return _phase(arguments, "decode").get("backend") or arguments.get("cuda_graph_backend_decode")


def prefill_graph_off(arguments: Mapping[str, Any]) -> bool:
    """Tell whether the arguments say that prefill passes run without a CUDA graph."""
    backend = _phase(arguments, "prefill").get("backend") or arguments.get("cuda_graph_backend_prefill")
    return backend == "disabled" or arguments.get("enable_piecewise_cuda_graph") is False
