"""Whether a model's weights fit on the cards that it is to have, before minutes are spent on finding out.

Only what is certain is refused: weights that take more than all of a card's memory. Whether they leave room
for a KV pool is for the server to find out, and for the healer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from batchrunner.core.errors import EngineStartError
from batchrunner.core.jsonfile import read_json
from batchrunner.engines.device import cards
from batchrunner.engines.flags import name_in
from batchrunner.engines.model_files import model_directory
from batchrunner.engines.recovery.host import memory_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

INDEX = "model.safetensors.index.json"
_SIZES = {
    "float32": 4, "float": 4, "bfloat16": 2, "float16": 2, "half": 2, "float8_e4m3fn": 1, "float8_e5m2": 1,
}  # fmt: skip
"""Bytes of a parameter, by torch's and SGLang's names."""
_BYTE_QUANTISATIONS = {"fp8", "mxfp8", "w8a8_fp8", "w8a8_int8"}
"""`--quantization` that makes a byte a parameter while loading; what others come to is not known here."""
_OFFLOADS = ("cpu-offload-gb", "offload-group-size", "enable-weight-offload")
_MOST_OF_A_CARD = 0.85
"""Of a card, for weights and a pool of some use: for the tp-size that is proposed."""


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """What a model's weights take."""

    size_bytes: float
    source: str
    """Where the figure is from."""


def check_fits(model: str, args: Mapping[str, Any], *, tp: int | None = None, cpu: bool) -> None:
    """Refuse weights that can never fit, with the arithmetic; raises EngineStartError.

    `args` are the server's arguments, `tp` the job's where they do not say it. Does nothing where the model
    is not on this machine, or where its size, the card's or what quantising makes of it is not known.
    """
    weights = weights_of(model_directory(model, args.get("revision")), args)
    name, room_bytes = _room(cpu=cpu)
    if weights is None or room_bytes is None:
        return
    ways = split_over(args, tp)
    each = weights.size_bytes / ways
    if each <= room_bytes:
        return
    least = 2 ** math.ceil(math.log2(weights.size_bytes / (room_bytes * _MOST_OF_A_CARD)))
    remedy = (
        f"take a smaller or a quantised model, or {'a machine' if cpu else 'a card'} with more memory"
        if cpu
        else f"set tp-size to {least}, quantise (quantization: fp8 is a byte a parameter), or a larger card"
    )
    raise EngineStartError(
        f"engine.model {model}: its weights do not fit: {_gib(weights.size_bytes)} ({weights.source}) over "
        f"{ways} {'ranks' if ways > 1 else 'rank'} is {_gib(each)} each, and {name} has {_gib(room_bytes)}: "
        f"{remedy}"
    )


def split_over(args: Mapping[str, Any], tp: int | None = None) -> int:
    """Return over how many cards a model is split: `tp-size` times `pp-size`."""
    sizes = [tp or args.get(name_in(args, "tp-size")), args.get(name_in(args, "pp-size"))]
    return math.prod(size if isinstance(size, int) and size > 0 else 1 for size in sizes)


def cards_of(args: Mapping[str, Any], tp: int | None = None) -> int:
    """Return how many cards a server takes: `dp-size` makes copies, unless attention alone is parted."""
    dp = args.get(name_in(args, "dp-size"))
    parted = args.get(name_in(args, "enable-dp-attention"))
    copies = dp if isinstance(dp, int) and dp > 0 and not parted else 1
    return copies * split_over(args, tp)


def weights_of(directory: Path, args: Mapping[str, Any]) -> ModelWeights | None:
    """Return what the weights take once loaded with these arguments, in bytes; None where that is unknown."""
    if any(args.get(name) for name in _OFFLOADS):
        return None
    config = read_json(directory / "config.json")
    config = {**config, **(config.get("text_config") or {})}
    stored = _stored(directory) or _by_config(config)
    quantisation = args.get("quantization")
    if stored is None or (quantisation and quantisation not in _BYTE_QUANTISATIONS):
        return None
    size, dtype = _SIZES.get(_dtype(config)), str(args.get("dtype") or "auto")
    if dtype == "auto" and size == _SIZES["float32"]:
        dtype = "half"  # SGLang's choice (configs/model_config.py)
    wanted = _SIZES.get(dtype)
    if size is None or "quantization_config" in config:  # as it is stored
        return stored
    if quantisation:
        return ModelWeights(stored.size_bytes / size, f"{stored.source}, with quantization {quantisation}")
    if wanted and wanted != size:
        return ModelWeights(stored.size_bytes * wanted / size, f"{stored.source}, with dtype {dtype}")
    return stored


def _stored(directory: Path) -> ModelWeights | None:
    """Return the size of the files, by their index or by themselves."""
    total = read_json(directory / INDEX).get("metadata", {}).get("total_size")
    if isinstance(total, (int, float)) and total > 0:
        return ModelWeights(float(total), INDEX)
    for pattern in ("model*.safetensors", "*.safetensors", "pytorch_model*.bin"):
        size = sum(file.stat().st_size for file in directory.glob(pattern))
        if size:
            return ModelWeights(float(size), pattern)
    return None


def _by_config(config: Mapping[str, Any]) -> ModelWeights | None:
    """Count the parameters of a plain decoder, or of one with experts, by its config.json."""
    names = ("hidden_size", "num_hidden_layers", "vocab_size", "num_attention_heads")
    hidden, layers, vocabulary, heads = (config.get(name) for name in names)
    width = config.get("moe_intermediate_size") or config.get("intermediate_size")
    size = _SIZES.get(_dtype(config))
    if not all((hidden, layers, vocabulary, heads, width, size)) or "kv_lora_rank" in config:
        return None
    assert hidden and layers and vocabulary and heads and width and size  # noqa: PT018 - for the type checker
    head = config.get("head_dim") or hidden // heads
    attention = 2 * hidden * head * (heads + (config.get("num_key_value_heads") or heads))
    experts = _first(config, ("num_local_experts", "num_experts", "n_routed_experts")) or 1
    embeddings = hidden * vocabulary * (1 if config.get("tie_word_embeddings") else 2)
    parameters = layers * (attention + 3 * hidden * width * experts) + embeddings
    return ModelWeights(float(parameters * size), f"{parameters / 1e9:.1f} billion parameters by config.json")


def _room(*, cpu: bool) -> tuple[str, int | None]:
    """Return who has how much memory for weights, in bytes."""
    if cpu:
        return "this machine", memory_bytes()
    found = max(cards(), key=lambda card: card.memory_bytes, default=None)
    return (found.name, found.memory_bytes) if found else ("the card", None)


def _dtype(config: Mapping[str, Any]) -> str:
    return str(config.get("dtype") or config.get("torch_dtype") or "float32")


def _first(values: Mapping[str, Any], names: Iterable[str]) -> Any:
    return next((values[name] for name in names if values.get(name)), None)


def _gib(size: float) -> str:
    return f"{size / 2**30:.1f} GiB"
