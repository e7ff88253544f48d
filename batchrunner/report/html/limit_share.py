"""The share of the GPUs' physical limit that a run reached, from run.json and the model's config.json."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from batchrunner.advise.roofline import (
    CARDS,
    Limit,
    RooflineSetting,
    TokenWork,
    UnknownLimitError,
    limit,
    model_of_config,
)
from batchrunner.engines.flags import name_in
from batchrunner.engines.model_files import ModelShape, read_config

_WIDTHS = {"bfloat16": 2.0, "float16": 2.0, "half": 2.0, "auto": 2.0, "fp8": 1.0}
"""Bytes of a parameter by its type; the table of GPUs has no peak for other types."""


@dataclass(frozen=True, slots=True)
class LimitShare:
    """A run compared with its limit."""

    limit: Limit
    engine_s: float
    """Seconds for which engines worked, summed over all tasks."""
    card: str
    """Name of the GPU."""
    setting: RooflineSetting
    model: ModelShape

    @property
    def of_roof(self) -> float:
        """Share of the speed that is possible with full overlap, from 0 to 1."""
        return self.limit.roof_s / self.engine_s

    @property
    def of_sequential(self) -> float:
        """Share of the speed that is possible without overlap, from 0 to 1."""
        return self.limit.sequential_s / self.engine_s


def share_of_limit(facts: Mapping[str, Any], replicas: int, work: TokenWork, engine_s: float) -> LimitShare:
    """Return the share of the limit that a run reached; `facts` is run.json, `replicas` those of one engine.

    Raises UnknownLimitError with what is missing; nothing is guessed.
    """
    info, args = facts["engine"], _args(facts["job"]["engine"], facts["engine"])
    if info.get("simulated"):
        raise UnknownLimitError("the engine is simulated")
    name = info.get("card")
    if name is None:
        raise UnknownLimitError("the GPU is not known (a CPU, or a server that the run did not start)")
    if name not in CARDS:
        raise UnknownLimitError(f"no data sheet is known for the GPU {name}")
    if not (replicas and info.get("max_total_tokens") and info.get("max_running")):
        raise UnknownLimitError("the engine did not report its KV pool, or how many requests it runs")
    config = read_config(info["model"], args.get("revision"))
    if not config:
        raise UnknownLimitError(f"the config.json of {info['model']} is not on this machine")
    setting = RooflineSetting(
        CARDS[name],
        cards=args["tp-size"],
        replicas=replicas,
        pool_tokens=info["max_total_tokens"] // replicas,
        max_running=info["max_running"] // replicas,
        weight_width=_weight_width(args, config),
        kv_width=1.0 if str(args.get("kv-cache-dtype")).startswith("fp8") else 2.0,
    )
    model = model_of_config(config)
    return LimitShare(limit(work, model, setting), max(engine_s, 1e-9), name, setting, model)


def _args(spec: Mapping[str, Any], info: Mapping[str, Any]) -> dict[str, Any]:
    """Return the engine's arguments by their long names; raises UnknownLimitError for what is not covered."""
    args = {str(name).replace("_", "-"): value for name, value in (spec.get("args") or {}).items()}
    for name in ("dp-size", "pp-size", "ep-size", "attn-dp-size"):
        if int(args.get(name_in(args, name)) or 1) > 1:
            raise UnknownLimitError(f"the formulas do not cover --{name}")
    given = spec.get("tp")
    chosen = given if isinstance(given, int) else info.get("tp")  # by the run, for `auto`
    args["tp-size"] = int(chosen or args.get(name_in(args, "tp-size")) or 1)
    return args


def _weight_width(args: Mapping[str, Any], config: Mapping[str, Any]) -> float:
    of_config = (config.get("quantization_config") or {}).get("quant_method")
    kind = str(args.get("quantization") or of_config or args.get("dtype") or "auto")
    if kind not in _WIDTHS:
        raise UnknownLimitError(f"no peak is known for weights of the type {kind}")
    return _WIDTHS[kind]
