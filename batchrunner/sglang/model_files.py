"""Facts of a model by its name: directory, identity in a run's fingerprint, config.json, GPUs it needs."""

import contextlib
import logging
import math
import os
import re
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from batchrunner.core.errors import EngineStartError
from batchrunner.core.files import read_json
from batchrunner.job.engine import ServerEngine
from batchrunner.job.fields import is_hub_name
from batchrunner.sglang.flags import name_in

log = logging.getLogger(__name__)

EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts", "num_routed_experts")
"""Keys of config.json for the number of experts in a layer. 0, 1 and null mean a dense model."""
_LANGUAGE_PARTS = ("text_config", "language_config", "llm_config", "thinker_config")
"""Keys below which a multimodal model describes its language model. A later one takes precedence, as in
SGLang (`get_hf_text_config`)."""


def language_part(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config with the values of its language model moved to the top."""
    flat = dict(config)
    for name in _LANGUAGE_PARTS:
        part = config.get(name)
        if isinstance(part, dict):
            flat |= language_part(part)
    return flat


def has_experts(config: Mapping[str, Any]) -> bool:
    """Tell whether the model is a mixture of experts."""
    inner = config.get("ffn_config")  # Dbrx has them there
    parts = [config, inner] if isinstance(inner, dict) else [config]
    return any(_largest(part.get(name)) > 1 for part in parts for name in EXPERTS)


def has_latent_attention(config: Mapping[str, Any]) -> bool:
    """Tell whether the model has multi-head latent attention (MLA): a compressed KV cache for all heads.

    DeepSeek-V4 has its keys but another attention, which `compress_ratios` shows (SGLang's model_config).
    """
    return bool(
        _largest(config.get("kv_lora_rank"))
        and config.get("use_mla") is not False
        and not config.get("compress_ratios")
    )


def has_sparse_attention(config: Mapping[str, Any]) -> bool:
    """Tell whether an indexer selects the tokens that attention reads (DSA); SGLang has backends for it."""
    return _largest(config.get("index_topk")) > 0


def _largest(value: Any) -> int:
    """Return a count, or the largest of a list of counts; 0 for anything else."""
    values = value if isinstance(value, list) else [value]
    return max((count for count in values if type(count) is int), default=0)


def model_identity(model: str) -> str:
    """Return the resolved path of a model directory; any other name unchanged."""
    path = _local(model)
    return str(path.resolve()) if path else model


def _local(model: str) -> Path | None:
    """Return the path of a model that is a file or directory on this machine; None for any other name."""
    try:
        path = Path(model).expanduser()
        return path if path.exists() else None
    except (OSError, RuntimeError, ValueError):  # too long; no such user as in ~name; a NUL
        return None


def model_directory(model: str, revision: str | None = None) -> Path:
    """Return the directory of a model's files, which may not exist yet.

    For a name on the Hub it is the snapshot of the revision (default: `main`) in huggingface_hub's cache.
    """
    if path := _local(model):
        return path
    home = os.environ.get("HF_HOME") or f"{os.environ.get('XDG_CACHE_HOME') or '~/.cache'}/huggingface"
    hub_cache = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    cache = Path(hub_cache or f"{home}/hub").expanduser()
    repository = cache / f"models--{model.replace('/', '--')}"
    commit = revision or "main"
    with contextlib.suppress(OSError, ValueError):  # the revision is a commit, or the model is missing
        commit = (repository / "refs" / commit).read_text(encoding="utf-8").strip()
    return repository / "snapshots" / commit


def check_model(model: str) -> None:
    """Raise EngineStartError for a missing model directory, or one without a model."""
    path = Path(model).expanduser()
    # "org/name" is a name on the Hub, unless there is a folder `org`.
    looks_like_path = not is_hub_name(model) or ("/" in model and path.parent.is_dir())
    if looks_like_path and not path.exists():
        raise EngineStartError(
            f"engine.model: {model}: no such model directory",
            hint="give an existing directory, or a name on the Hub (OWNER/NAME)",
        )
    if path.is_dir() and not any((path / name).exists() for name in ("config.json", "params.json")):
        raise EngineStartError(f"engine.model: {model}: not a model directory (no config.json)")


_LEADS_ELSEWHERE = re.compile(
    "HF_|HUGGINGFACE_|TRANSFORMERS_|XDG_CACHE_HOME|SGLANG_USE_MODELSCOPE|.*_proxy$", re.IGNORECASE
)
"""Environment variables with which a server may find a model where this process does not look."""
HUB_TIMEOUT_S = 10.0
HUB_TRIES = 3
"""Tries to reach the Hub: a machine that has just started may have no network yet."""


def check_on_hub(spec: ServerEngine) -> None:
    """Raise EngineStartError for a model that is neither on this machine nor on the Hub.

    SGLang would try for a minute, and then quote three errors. If the server may look elsewhere, by its
    variables or arguments, or if the Hub's answer is unexpected, nothing is raised.
    """
    model, revision = spec.model, spec.args.get("revision")
    repository = "/".join(model.partition(":")[0].split("/")[:2])  # without a quantization or a file
    is_here = _local(model) or model_directory(repository, revision).exists()
    if is_here or _looks_elsewhere(spec) or not find_spec("huggingface_hub"):
        return
    import httpx  # noqa: PLC0415 - slow imports, for names on the Hub alone
    from huggingface_hub import HfApi  # noqa: PLC0415
    from huggingface_hub.errors import (  # noqa: PLC0415
        HfHubHTTPError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )
    from tenacity import Retrying  # noqa: PLC0415

    from batchrunner.core.retry import backoff  # noqa: PLC0415

    hub = HfApi(endpoint=os.environ.get("HF_ENDPOINT"))

    def is_unreachable(failure: BaseException) -> bool:
        return isinstance(failure, (httpx.ConnectError, ConnectionError))  # the second by HF_HUB_OFFLINE

    retrying = Retrying(**backoff(is_unreachable, attempts=HUB_TRIES))
    try:
        retrying(hub.model_info, repository, revision=revision, timeout=HUB_TIMEOUT_S)
    except (RepositoryNotFoundError, RevisionNotFoundError):
        at = f" at revision {revision}" if revision else ""
        raise EngineStartError(
            f"engine.model: {model}: {hub.endpoint} has no such model{at}, or shows it only with a token",
            hint="correct the name, set HF_TOKEN, or give a folder",
        ) from None
    except (httpx.ConnectError, ConnectionError) as failure:
        raise EngineStartError(
            f"engine.model: {model}: is not on this machine, and {hub.endpoint} cannot be reached: {failure}",
            hint=f"`hf download {repository}` where there is a network, or give a folder",
        ) from None
    except (httpx.HTTPError, HfHubHTTPError, ValueError, OSError) as failure:
        log.debug("%s: the Hub's answer is unexpected: %r", model, failure)


def _looks_elsewhere(spec: ServerEngine) -> bool:
    """Tell whether a server may find its model in places that this process does not know."""
    has_variable = any(map(_LEADS_ELSEWHERE.match, spec.env)) or "SGLANG_USE_MODELSCOPE" in os.environ
    # `cache_dir` needs local files, which the copy checks.
    return has_variable or name_in(spec.args, "download-dir") in spec.args or spec.cache_dir is not None


def read_config(model: str, revision: str | None = None) -> dict[str, Any]:
    """Return a model's config.json with the values of its language model at the top; empty if it is missing.

    A multimodal model describes its language model in `text_config`, whose values take precedence, as in
    SGLang.
    """
    return language_part(read_json(model_directory(model, revision) / "config.json"))


def takes_mean(model: str) -> bool:
    """Tell whether a model's vector is the mean over all tokens, by the files of sentence-transformers.

    False if they are not on this machine.
    """
    pooling = read_json(model_directory(model) / "1_Pooling" / "config.json")
    return pooling.get("pooling_mode_mean_tokens") is True


def vocabulary_of(model: str) -> int | None:
    """Return the size of a model's vocabulary; None if its files are not on this machine."""
    size = read_config(model).get("vocab_size")
    return size if type(size) is int and size > 0 else None


def class_names(model: str) -> tuple[str, ...]:
    """Return the names of a classifier's classes, in order; empty if its files are not on this machine."""
    names = read_config(model).get("id2label")
    if not isinstance(names, dict):
        return ()
    return tuple(str(names.get(str(number), f"LABEL_{number}")) for number in range(len(names)))


def _attention_layers(config: Mapping[str, Any]) -> Any:
    """Return the number of layers with a KV cache: those of a hybrid model that keep a state have none."""
    layers, kinds = config.get("num_hidden_layers"), config.get("layer_types")
    if isinstance(kinds, list):
        return sum(kind not in {"linear_attention", "mamba"} for kind in kinds)
    if isinstance(pattern := config.get("hybrid_override_pattern"), str):  # Nemotron-H
        return pattern.count("*")
    every = config.get("full_attention_interval")
    return layers // every if isinstance(layers, int) and isinstance(every, int) and every > 0 else layers


def kv_bytes(config: Mapping[str, Any], width: int) -> int | None:
    """Return the bytes of KV cache per token, at `width` bytes a number; None if unknown."""
    layers, heads = _attention_layers(config), config.get("num_attention_heads")
    kv_heads = config.get("num_key_value_heads") or heads
    head_dim = config.get("head_dim")
    if not head_dim and isinstance(heads, int) and isinstance(config.get("hidden_size"), int):
        head_dim = config["hidden_size"] // heads
    sizes = [size for size in (layers, kv_heads, head_dim) if isinstance(size, int) and size > 0]
    if has_latent_attention(config) or len(sizes) < 3:  # noqa: PLR2004
        return None
    return 2 * width * math.prod(sizes)


INDEX = "model.safetensors.index.json"
_WEIGHTS = ("model*.safetensors", "*.safetensors", "pytorch_model*.bin")
STATIC_SHARE = 0.83
"""Share of a GPU's memory for weights and KV pool if the job does not set `mem-fraction-static`: SGLang's on
an H100 (0.5.23). The rest is for activations and CUDA graphs."""


def with_tp(spec: ServerEngine) -> ServerEngine:
    """Return the spec with its `tp` as the argument `tp-size`."""
    args = {**spec.args, "tp-size": spec.tp} if spec.tp else spec.args
    return spec.model_copy(update={"tp": None, "args": args})


def split_over(args: Mapping[str, Any]) -> int:
    """Return the number of GPUs over which a model's weights are split: `tp-size` times `pp-size`."""
    return max(_number(args, "tp-size"), 1) * max(_number(args, "pp-size"), 1)


def cards_of(args: Mapping[str, Any]) -> int:
    """Return the number of GPUs of a server; `dp-size` multiplies it, except with DP attention."""
    has_dp_attention = args.get(name_in(args, "enable-dp-attention"))
    return split_over(args) * (1 if has_dp_attention else max(_number(args, "dp-size"), 1))


def weights_bytes(directory: Path, config: Mapping[str, Any]) -> float | None:
    """Return the bytes of a model's loaded weights, by its files; None if they are not on this machine."""
    total: float | None = read_json(directory / INDEX).get("metadata", {}).get("total_size")
    if not isinstance(total, (int, float)) or total <= 0:
        files = (directory.glob(pattern) for pattern in _WEIGHTS)
        sizes = (sum(file.stat().st_size for file in files_of_kind) for files_of_kind in files)
        total = next(filter(None, sizes), None)
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "float32")
    if total and dtype.startswith("float32") and "quantization_config" not in config:
        return total / 2  # SGLang loads 32-bit weights as 16-bit numbers
    return total


def _number(args: Mapping[str, Any], name: str) -> int:
    """Return an integer argument under any of its names; 0 for any other value."""
    value = args.get(name_in(args, name))
    return value if isinstance(value, int) else 0
