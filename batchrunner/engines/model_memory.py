"""Whether a model's weights fit into memory, decided before minutes are spent on a start that must fail.

Only what is certain is refused: weights that take more than all of a card's memory. Whether they leave room
for a KV pool is for the server to find out, and for the healer to mend.
"""

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

from batchrunner.core.errors import EngineStartError
from batchrunner.core.files import read_json
from batchrunner.engines.device import cards, gpus, memory_bytes, on_cpu
from batchrunner.engines.flags import name_in
from batchrunner.engines.model_files import (
    UnknownShapeError,
    has_latent_attention,
    has_uneven_experts,
    model_directory,
    read_config,
    shape_of,
    weights_dtype,
)
from batchrunner.job.engine import GatewayEngine, ServerEngine

log = logging.getLogger(__name__)

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


STATIC_SHARE = 0.83
"""Share of a card for weights and KV pool, where the job does not set `mem-fraction-static`: SGLang's on an
H100 (0.5.23); the rest is for activations and graphs."""
LEAST_POOL_TOKENS = 32_768
"""Tokens that the KV pool should hold at least: 32 rows of 1,024 tokens. A job with a longer `context-length`
needs that many."""
UNKNOWN_POOL_SHARE = 0.25
"""Share of that memory for the KV pool of a model whose tokens are not known to take how much."""
MOST_CARDS = 64
"""Cards up to which the error says how many would be needed."""

_Spec = TypeVar("_Spec", bound=ServerEngine | GatewayEngine)


@dataclass(frozen=True, slots=True)
class CardMemory:
    """The cards that a replica may have."""

    count: int
    name: str
    memory_bytes: int
    """Memory of each; of the smallest, where they differ."""


@dataclass(frozen=True, slots=True)
class ModelNeed:
    """The memory that a model needs, over all of its cards."""

    weights_bytes: float
    source: str
    """Where the size of the weights is from."""
    heads: int | None
    """Query heads, which are divided among the cards; None where that is not known."""
    kv_heads: int
    """Heads of the KV cache, which are divided too; 1 where each card keeps all of the cache."""
    token_bytes: float | None
    """Bytes of KV cache that a token takes, over all heads; None where that is not known."""
    pool_tokens: int = LEAST_POOL_TOKENS
    share: float = STATIC_SHARE
    """Share of a card for weights and KV pool."""
    split: int = 1
    """Ways in which layers are divided besides (`pp-size`), and copies of the model beside one another."""
    copies: int = 1

    def on_each(self, tp: int, card_bytes: float) -> tuple[float, float]:
        """Return the bytes of weights, and of the KV pool, on each of `tp` cards."""
        weights = self.weights_bytes / (tp * self.split)
        if self.token_bytes is None:
            return weights, UNKNOWN_POOL_SHARE * self.share * card_bytes
        return weights, self.pool_tokens * self.token_bytes / (min(tp, self.kv_heads) * self.split)

    def fits(self, tp: int, card_bytes: float) -> bool:
        """Tell whether weights and pool fit `tp` cards of this memory."""
        return sum(self.on_each(tp, card_bytes)) <= self.share * card_bytes

    def divides(self, tp: int) -> bool:
        """Tell whether SGLang can divide the heads among `tp` cards."""
        return self.heads is None or self.heads % tp == 0


def choose_tp(need: ModelNeed, card: CardMemory) -> tuple[int, str]:
    """Return the number of cards, a power of two, and why; raises EngineStartError for too few."""
    powers = [1 << n for n in range(MOST_CARDS.bit_length())]
    fitting = next((tp for tp in powers if need.fits(tp, card.memory_bytes) and need.divides(tp)), None)
    there = card.count // (need.split * need.copies)
    if fitting is None or fitting > there:
        cards_needed = fitting and fitting * need.split * need.copies
        wanted = f"{cards_needed} cards" if cards_needed else f"more than {MOST_CARDS} cards"
        raise EngineStartError(
            f"engine.tp auto: weights of {_gib(need.weights_bytes)} ({need.source}) and {_pool(need)} need "
            f"{wanted} like {card.name} ({_gib(card.memory_bytes)}), and a replica can have {card.count}",
            hint="take a smaller or a quantised model, or larger cards",
            mark=";",
        )
    weights, pool = need.on_each(fitting, card.memory_bytes)
    return fitting, (
        f"weights of {_gib(need.weights_bytes)} ({need.source}) and {_pool(need)} take "
        f"{_gib(weights + pool)} of the {_gib(need.share * card.memory_bytes)} that they may have on each of "
        f"{fitting} {card.name}"
    )


def with_tp(spec: _Spec) -> _Spec:
    """Return an engine whose `tp` is a number; with a server, in its arguments.

    Raises EngineStartError where `auto` cannot be decided, or too few cards are there.
    """
    if spec.tp is None:
        return spec
    tp = _decided(spec) if spec.tp == "auto" else spec.tp
    args = {**spec.args, **_argument(spec, tp)}
    return cast("_Spec", spec.model_copy(update={"tp": tp, "args": args}))


def _argument(spec: ServerEngine | GatewayEngine, tp: int) -> dict[str, int]:
    return {} if isinstance(spec, GatewayEngine) else {"tp-size": tp}  # a gateway's replicas get it in argv


def need_of(model: str, args: Mapping[str, Any]) -> ModelNeed | None:
    """Return what a model needs with these arguments; None where its files do not tell how large it is."""
    weights = weights_of(model, args)
    if weights is None:
        return None
    config = read_config(model, args.get("revision"))
    heads, share = config.get("num_attention_heads"), args.get("mem-fraction-static")
    context = args.get(name_in(args, "context-length"))
    kv_heads, token_bytes = _kv_of(config, args)
    ways = split_over(args)
    return ModelNeed(
        weights_bytes=weights.size_bytes,
        source=weights.source,
        heads=heads if type(heads) is int and heads > 0 else None,
        kv_heads=kv_heads,
        token_bytes=token_bytes,
        pool_tokens=max(LEAST_POOL_TOKENS, context if type(context) is int else 0),
        share=share if isinstance(share, float) and 0 < share < 1 else STATIC_SHARE,
        split=ways,
        copies=cards_of(args) // ways,
    )


def _kv_of(config: Mapping[str, Any], args: Mapping[str, Any]) -> tuple[int, float | None]:
    """Return the heads of the KV cache, and the bytes that a token takes in it."""
    width = 1 if str(args.get("kv-cache-dtype") or "auto").startswith("fp8") else 2
    if has_latent_attention(config):  # each card keeps all of it
        layers, rank = config.get("num_hidden_layers") or config.get("num_layers"), config["kv_lora_rank"]
        rope = config.get("qk_rope_head_dim") or 0
        return 1, layers * (rank + rope) * width if isinstance(layers, int) else None
    try:
        shape = shape_of(config)
    except (UnknownShapeError, TypeError, ValueError):
        return 1, None
    return shape.kv_heads, shape.kv_bytes(width)


def _decided(spec: ServerEngine | GatewayEngine) -> int:
    assert spec.model is not None
    if on_cpu(spec.device):
        return 1
    need = need_of(spec.model, spec.args)
    if need is None:
        raise EngineStartError(
            f"engine.tp auto: how much memory the weights of {spec.model} take is not known here",
            hint="give a number, or a model whose files are on this machine",
        )
    card = _cards_for(spec)
    if card is None:
        raise EngineStartError("engine.tp auto: nvidia-smi tells of no GPU here", hint="give a number")
    tp, why = choose_tp(need, card)
    log.info("engine.tp auto: %d: %s", tp, why)
    return tp


def _cards_for(spec: ServerEngine | GatewayEngine) -> CardMemory | None:
    """Return the cards that one replica may have; None where they are not known."""
    found = cards()
    if not found:
        return None
    count = len(gpus(spec.env)) or len(found)
    if isinstance(spec, GatewayEngine) and isinstance(spec.replicas, int):
        count //= spec.replicas
    smallest = min(found, key=lambda card: card.memory_bytes)
    return CardMemory(count, smallest.name, smallest.memory_bytes)


def _pool(need: ModelNeed) -> str:
    if need.token_bytes is None:
        return f"a KV pool of {UNKNOWN_POOL_SHARE:.0%}"
    return f"a KV pool of {need.pool_tokens:,} tokens ({_gib(need.pool_tokens * need.token_bytes)})"


def _gib(size: float) -> str:
    return f"{size / 2**30:.1f} GiB"
