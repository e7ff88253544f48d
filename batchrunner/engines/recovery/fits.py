"""Whether a model's weights fit into memory, decided before minutes are spent on a start that must fail.

Only what is certain is refused: weights that take more than all of a card's memory. Whether they leave room
for a KV pool is for the server to find out, and for the healer to mend.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from batchrunner.core.errors import EngineStartError
from batchrunner.core.files import read_json
from batchrunner.engines.device import cards
from batchrunner.engines.flags import name_in
from batchrunner.engines.model_files import (
    UnknownShapeError,
    model_directory,
    read_config,
    shape_of,
    weights_dtype,
)
from batchrunner.engines.model_kinds import has_latent_attention, has_uneven_experts
from batchrunner.engines.recovery.host import memory_bytes

INDEX = "model.safetensors.index.json"
_PARAMETER_BYTES = {
    "float32": 4, "float": 4, "bfloat16": 2, "float16": 2, "half": 2, "float8_e4m3fn": 1, "float8_e5m2": 1,
}  # fmt: skip
"""Bytes of a parameter, by torch's and SGLang's names of its type."""
_BYTE_QUANTISATIONS = {"fp8", "mxfp8", "w8a8_fp8", "w8a8_int8"}
"""Values of `--quantization` with which a parameter takes one byte; other values: size not known here."""
_OFFLOADS = ("cpu-offload-gb", "offload-group-size", "enable-weight-offload")
_MOST_OF_A_CARD = 0.85
"""Fraction of a card for the weights, by which the error proposes a tp-size: the rest is for a KV pool."""


class ModelWeights(NamedTuple):
    """Memory that a model's weights take."""

    size_bytes: float
    source: str
    """Where the figure is from."""


def check_fits(model: str, args: Mapping[str, Any], *, tp: int | None = None, cpu: bool) -> None:
    """Refuse weights that can never fit, with the arithmetic; raises EngineStartError.

    `args` are the server's arguments, `tp` the job's own `engine.tp`. Does nothing where the model is not on
    this machine, or where its size, the card's or the effect of quantising is not known.
    """
    weights = weights_of(model, args)
    name, room_bytes = _room(cpu=cpu)
    if weights is None or room_bytes is None:
        return
    ways = split_over(args, tp)
    each = weights.size_bytes / ways
    if each <= room_bytes:
        return
    least = 2 ** math.ceil(math.log2(weights.size_bytes / (room_bytes * _MOST_OF_A_CARD)))
    remedy = (
        "take a smaller or a quantised model, or a machine with more memory"
        if cpu
        else f"set tp-size to {least}, quantise (quantization: fp8 is a byte a parameter), or a larger card"
    )
    raise EngineStartError(
        f"engine.model {model}: its weights do not fit: {_gib(weights.size_bytes)} ({weights.source}) over "
        f"{ways} {'ranks' if ways > 1 else 'rank'} is {_gib(each)} each, and {name} has {_gib(room_bytes)}",
        hint=remedy,
    )


def split_over(args: Mapping[str, Any], tp: int | None = None) -> int:
    """Return the number of cards that a model's weights are split over: `tp-size` times `pp-size`."""
    sizes = [tp or args.get(name_in(args, "tp-size")), args.get(name_in(args, "pp-size"))]
    return math.prod(size if isinstance(size, int) and size > 0 else 1 for size in sizes)


def cards_of(args: Mapping[str, Any], tp: int | None = None) -> int:
    """Return how many cards a server takes; `dp-size` makes copies of it, but not with DP attention."""
    dp = args.get(name_in(args, "dp-size"))
    parted = args.get(name_in(args, "enable-dp-attention"))
    copies = dp if isinstance(dp, int) and dp > 0 and not parted else 1
    return copies * split_over(args, tp)


def weights_of(model: str, args: Mapping[str, Any]) -> ModelWeights | None:
    """Return what the weights take once loaded with these arguments; None where that is not known."""
    if any(args.get(name) for name in _OFFLOADS):
        return None
    revision = args.get("revision")
    config = read_config(model, revision)
    stored = _stored(model_directory(model, revision)) or _by_config(config)
    quantisation = args.get("quantization")
    if stored is None or (quantisation and quantisation not in _BYTE_QUANTISATIONS):
        return None
    size, dtype = _PARAMETER_BYTES.get(weights_dtype(config)), str(args.get("dtype") or "auto")
    if dtype == "auto" and size == _PARAMETER_BYTES["float32"]:
        dtype = "half"  # SGLang's choice (configs/model_config.py)
    wanted = _PARAMETER_BYTES.get(dtype)
    if size is None or "quantization_config" in config:  # loaded as it is stored
        return stored
    if quantisation:
        return ModelWeights(stored.size_bytes / size, f"{stored.source}, with quantization {quantisation}")
    if wanted and wanted != size:
        return ModelWeights(stored.size_bytes * wanted / size, f"{stored.source}, with dtype {dtype}")
    return stored


def _stored(directory: Path) -> ModelWeights | None:
    """Return the size of the files, by their index or by their own sizes."""
    total = read_json(directory / INDEX).get("metadata", {}).get("total_size")
    if isinstance(total, (int, float)) and total > 0:
        return ModelWeights(float(total), INDEX)
    for pattern in ("model*.safetensors", "*.safetensors", "pytorch_model*.bin"):
        size = sum(file.stat().st_size for file in directory.glob(pattern))
        if size:
            return ModelWeights(float(size), pattern)
    return None


def _by_config(config: Mapping[str, Any]) -> ModelWeights | None:
    """Return the size of the parameters that config.json describes, for a model without files."""
    size = _PARAMETER_BYTES.get(weights_dtype(config))
    if size is None or has_latent_attention(config) or has_uneven_experts(config):  # other parameters
        return None
    try:
        parameters = shape_of(config).parameters
    except UnknownShapeError:
        return None
    return ModelWeights(parameters * size, f"{parameters / 1e9:.1f} billion parameters by config.json")


def _room(*, cpu: bool) -> tuple[str, int | None]:
    """Return the name of the largest card, or the machine, and its memory in bytes."""
    if cpu:
        return "this machine", memory_bytes()
    found = max(cards(), key=lambda card: card.memory_bytes, default=None)
    return (found.name, found.memory_bytes) if found else ("the card", None)


def _gib(size: float) -> str:
    return f"{size / 2**30:.1f} GiB"
