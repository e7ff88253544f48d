"""`engine.tp: auto`: the fewest cards that hold a model's weights and a KV pool.

Fewer cards for a replica mean more replicas, which do not wait for one another: splitting pays only where
the memory of a card is too small. The choice is pure; `with_tp` asks the machine.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from batchrunner.core.errors import EngineStartError
from batchrunner.engines.device import cards, gpus, on_cpu
from batchrunner.engines.flags import name_in
from batchrunner.engines.model_files import UnknownShapeError, read_config, shape_of
from batchrunner.engines.model_kinds import has_latent_attention
from batchrunner.engines.recovery.fits import cards_of, split_over, weights_of
from batchrunner.job.engine import GatewayEngine, ServerEngine

log = logging.getLogger(__name__)

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
