"""The least time that a GPU needs for the rows of a run: T_roof and T_seq, from data sheets and lengths.

`F` FLOP/s and `BW` bytes/s are the peaks of the GPU, `P` the parameters that a token passes, `W` the bytes
of all weights, `M` those of the KV pool, `κ` those of a token in it, `L` the layers, `H` the width of
attention. A row has a prompt of `p` tokens, `c` of them cached, and an output of `d`:

    T_comp = Σ[2P(p-c+d) + 2LH(p²-c²) + 4LH(pd+d²/2)] / F
    T_kv   = κ·Σ(pd + d²/2) / BW
    Iters  = max(κΣ(pd+d²/2)/M, Σd/max_running, max d)      decode passes that are needed at least
    T_mem  = T_kv + W·Iters/BW
    T_roof = max(T_comp, T_mem)                             all overlaps: nothing can be faster
    T_seq  = T_comp + T_mem                                 nothing overlaps: stock SGLang at its best
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from batchrunner.engines.model_files import ModelShape, UnknownShapeError, shape_of
from batchrunner.engines.model_kinds import has_uneven_experts


@dataclass(frozen=True, slots=True)
class CardSpec:
    """Peaks of a GPU, dense (without sparsity), by its data sheet."""

    bf16_flops: float
    fp8_flops: float | None
    """FLOP/s in FP8; None where its tensor cores lack FP8."""
    bandwidth: float
    """Memory bandwidth in bytes/s."""


CARDS = {
    "NVIDIA B200": CardSpec(2250e12, 4500e12, 8.0e12),
    "NVIDIA H200": CardSpec(989e12, 1979e12, 4.8e12),
    "NVIDIA H200 NVL": CardSpec(835e12, 1671e12, 4.8e12),
    "NVIDIA H100 80GB HBM3": CardSpec(989e12, 1979e12, 3.35e12),
    "NVIDIA H100 NVL": CardSpec(835e12, 1671e12, 3.9e12),
    "NVIDIA H100 PCIe": CardSpec(756e12, 1513e12, 2.0e12),
    "NVIDIA A100-SXM4-80GB": CardSpec(312e12, None, 2.039e12),
    "NVIDIA A100 80GB PCIe": CardSpec(312e12, None, 1.935e12),
    "NVIDIA A100-SXM4-40GB": CardSpec(312e12, None, 1.555e12),
    "NVIDIA A100-PCIE-40GB": CardSpec(312e12, None, 1.555e12),
    "NVIDIA L40S": CardSpec(362e12, 733e12, 0.864e12),
    "NVIDIA L4": CardSpec(121e12, 242e12, 0.3e12),
    "NVIDIA A10": CardSpec(125e12, None, 0.6e12),
}
"""GPUs by the name that `nvidia-smi` prints. Source: NVIDIA's data sheets, "with sparsity" halved.
The limit of a GPU that is not here is unknown."""


class UnknownLimitError(ValueError):
    """The limit cannot be computed: the message says what is missing."""


@dataclass(frozen=True, slots=True)
class TokenWork:
    """Sums over the rows that an engine answered, in tokens."""

    passed: int = 0
    """Σ(p - c + d): tokens that went through the model."""
    squares: int = 0
    """Σ(p² - c²): for attention in prefill."""
    read: float = 0.0
    """Σ(pd + d²/2): cached tokens that decode read."""
    outputs: int = 0
    """Σd: output tokens."""
    longest: int = 0
    """max d: the longest output."""


@dataclass(frozen=True, slots=True)
class RooflineSetting:
    """The setup of the engine."""

    card: CardSpec
    cards: int
    """GPUs of one replica (`tp`)."""
    replicas: int
    pool_tokens: int
    """KV pool of one replica, in tokens."""
    max_running: int
    """Requests that one replica runs at most."""
    weight_width: float = 2.0
    """Bytes of a parameter; 1 means FP8."""
    kv_width: float = 2.0
    """Bytes of a number in the KV pool."""

    @property
    def flops(self) -> float:
        """Peak FLOP/s of one GPU for these weights; raises UnknownLimitError where it has none."""
        peak = self.card.bf16_flops if self.weight_width > 1 else self.card.fp8_flops
        if peak is None:
            raise UnknownLimitError("the card does not compute in FP8")
        return peak


@dataclass(frozen=True, slots=True)
class Limit:
    """The least times for some work, in seconds, and its output tokens."""

    compute_s: float
    memory_s: float
    outputs: int

    @property
    def roof_s(self) -> float:
        """Seconds when computing and reading memory overlap fully: nothing can be faster."""
        return max(self.compute_s, self.memory_s)

    @property
    def sequential_s(self) -> float:
        """Seconds when nothing overlaps and each operation runs at the peak: stock SGLang at its best."""
        return self.compute_s + self.memory_s

    @property
    def roof_tokens_per_s(self) -> float:
        """Output tokens a second with full overlap."""
        return self.outputs / self.roof_s

    @property
    def sequential_tokens_per_s(self) -> float:
        """Output tokens a second without overlap."""
        return self.outputs / self.sequential_s


def limit(work: TokenWork, model: ModelShape, setting: RooflineSetting) -> Limit:
    """Return the limit for work that is spread evenly over the replicas.

    Raises UnknownLimitError where there is no output, or the GPU has no peak for these weights.
    """
    if not work.outputs:
        raise UnknownLimitError("no output tokens are known")
    attention = model.layers * model.attention
    operations = 2 * model.active * work.passed + attention * (2 * work.squares + 4 * work.read)
    kv_bytes = model.kv_bytes(setting.kv_width) * work.read
    pool_bytes = model.kv_bytes(setting.kv_width) * setting.pool_tokens
    passes = max(
        kv_bytes / pool_bytes / setting.replicas,
        work.outputs / setting.max_running / setting.replicas,
        work.longest,
    )
    all_cards = setting.cards * setting.replicas
    bandwidth = setting.card.bandwidth
    weights_s = model.parameters * setting.weight_width * passes / (bandwidth * setting.cards)
    return Limit(
        compute_s=operations / (setting.flops * all_cards),
        memory_s=kv_bytes / (bandwidth * all_cards) + weights_s,
        outputs=work.outputs,
    )


_NOT_COVERED = {
    "kv_lora_rank": "attention with a compressed KV cache (MLA)",
    "layer_types": "layers of several kinds",
    "sliding_window": "attention in a sliding window",
    "vision_config": "a part for images",
    "text_config": "a part beside the language model",
    "language_config": "a part beside the language model",
    "llm_config": "a part beside the language model",
    "thinker_config": "a part beside the language model",
    "linear_num_value_heads": "layers with linear attention",
    "hybrid_layer_pattern": "layers of several kinds",
    "attention_chunk_size": "attention in chunks",
    "mamba_d_state": "Mamba layers",
    "encoder_layers": "an encoder",
}
"""Fields of a config.json whose model the formulas do not describe."""


def model_of_config(config: Mapping[str, Any]) -> ModelShape:
    """Read a model's config.json, as transformers writes it for dense models and mixtures of experts.

    Raises UnknownLimitError for a kind of model that the formulas do not describe.
    """
    kinds = set(config.get("layer_types") or []) - {"full_attention"}
    for name, what in _NOT_COVERED.items():
        of_window = name == "sliding_window" and config.get("use_sliding_window") is False
        if config.get(name) and not of_window and (name != "layer_types" or kinds):
            raise UnknownLimitError(f"the formulas do not cover {what} ({name} in config.json)")
    if has_uneven_experts(config):
        raise UnknownLimitError("the formulas do not cover experts in some of the layers only")
    try:
        return shape_of(config)
    except UnknownShapeError as failure:
        raise UnknownLimitError(str(failure)) from None
