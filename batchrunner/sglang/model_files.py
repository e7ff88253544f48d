"""Facts about a model: its directory, its identity, its config.json and the number of GPUs it needs."""

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
"""Keys of config.json with the number of experts in a layer. The values 0, 1 and null mean a dense model."""
_LANGUAGE_SECTIONS = ("text_config", "language_config", "llm_config", "thinker_config")
"""Keys of the sections of config.json in which a multimodal model describes its language model. If there are
several, the last one here counts, as in SGLang (`get_hf_text_config`)."""


def language_part(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a model's config with the values of its language model moved to the top level."""
    flat_config = dict(config)
    for name in _LANGUAGE_SECTIONS:
        section = config.get(name)
        if isinstance(section, dict):
            flat_config |= language_part(section)
    return flat_config


def has_experts(config: Mapping[str, Any]) -> bool:
    """Tell whether a model is a mixture of experts, by its config.json."""
    # Dbrx has the number of experts in this section.
    section = config.get("ffn_config")
    sections = [config, section] if isinstance(section, dict) else [config]
    return any(_largest(section.get(name)) > 1 for section in sections for name in EXPERTS)


def has_latent_attention(config: Mapping[str, Any]) -> bool:
    """Tell whether a model has multi-head latent attention (MLA): a compressed KV cache for all heads.

    DeepSeek-V4 has the same keys in config.json, but another kind of attention, which the key
    `compress_ratios` shows (SGLang's model_config.py).
    """
    return bool(
        _largest(config.get("kv_lora_rank"))
        and config.get("use_mla") is not False
        and not config.get("compress_ratios")
    )


def has_sparse_attention(config: Mapping[str, Any]) -> bool:
    """Tell whether a model has sparse attention (DSA), in which an indexer selects the tokens to read."""
    return _largest(config.get("index_topk")) > 0


def _largest(value: Any) -> int:
    """Return a count, or the largest count in a list; 0 for any other value."""
    values = value if isinstance(value, list) else [value]
    return max((count for count in values if type(count) is int), default=0)


def model_identity(model: str) -> str:
    """Return the resolved path of a model directory. Any other model name is returned unchanged."""
    path = _local(model)
    return str(path.resolve()) if path else model


def _local(model: str) -> Path | None:
    """Return the path of a model that is a file or directory on this machine; None for any other name."""
    try:
        path = Path(model).expanduser()
        return path if path.exists() else None
    # The name is too long or has a null byte, or the user in `~user` does not exist.
    except (OSError, RuntimeError, ValueError):
        return None


def model_directory(model: str, revision: str | None = None) -> Path:
    """Return the directory of a model's files, which may not exist yet.

    For a name on the Hub, it is the snapshot of the revision (default: `main`) in huggingface_hub's cache.
    """
    if path := _local(model):
        return path
    home = os.environ.get("HF_HOME") or f"{os.environ.get('XDG_CACHE_HOME') or '~/.cache'}/huggingface"
    hub_cache = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    cache = Path(hub_cache or f"{home}/hub").expanduser()
    repository = cache / f"models--{model.replace('/', '--')}"
    commit = revision or "main"
    # In the Hub's cache, a file for each branch or tag contains the commit. There is no such file if the
    # revision is itself a commit, or if the model is not in the cache.
    with contextlib.suppress(OSError, ValueError):
        commit = (repository / "refs" / commit).read_text(encoding="utf-8").strip()
    return repository / "snapshots" / commit


def check_model(model: str) -> None:
    """Raise EngineStartError for a missing model directory, or for a directory without a model."""
    path = Path(model).expanduser()
    # `OWNER/NAME` is a name on the Hub, unless there is a directory `OWNER` here.
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
"""Matches environment variables that may make the server look for its model elsewhere than this process
does."""
HUB_TIMEOUT_S = 10.0
"""Maximum seconds for a request to the Hub."""
HUB_TRIES = 3
"""Maximum number of attempts to reach the Hub: a machine that has just started may have no network yet."""


def check_on_hub(spec: ServerEngine) -> None:
    """Raise EngineStartError for a model that is neither on this machine nor on the Hub.

    Without this check, SGLang would try for a minute, and then show three errors. Nothing is raised if the
    server may look for its model elsewhere, or if the Hub's answer is unexpected.
    """
    model, revision = spec.model, spec.args.get("revision")
    # `OWNER/NAME` may be followed by a quantization (`:Q4_K_M`) or a file, which is cut off here.
    repository = "/".join(model.partition(":")[0].split("/")[:2])
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
        # With HF_HUB_OFFLINE, the Hub's client raises a ConnectionError.
        return isinstance(failure, (httpx.ConnectError, ConnectionError))

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
            hint=f"run `hf download {repository}` on a machine with a network, or give a folder",
        ) from None
    except (httpx.HTTPError, HfHubHTTPError, ValueError, OSError) as failure:
        log.debug("%s: the Hub's answer is unexpected: %r", model, failure)


def _looks_elsewhere(spec: ServerEngine) -> bool:
    """Tell whether a server may find its model in a place that this process does not know."""
    # With `cache_dir`, the files are copied from another directory. The copying code reports missing files.
    if spec.cache_dir is not None:
        return True
    has_variable = any(map(_LEADS_ELSEWHERE.match, spec.env)) or "SGLANG_USE_MODELSCOPE" in os.environ
    return has_variable or name_in(spec.args, "download-dir") in spec.args


def read_config(model: str, revision: str | None = None) -> dict[str, Any]:
    """Return a model's config.json, with its language model's values at the top level.

    A multimodal model describes its language model in a section such as `text_config`. The values of that
    section take precedence, as in SGLang. Return {} if the file is not on this machine.
    """
    return language_part(read_json(model_directory(model, revision) / "config.json"))


def takes_mean(model: str) -> bool:
    """Tell from a model's sentence-transformers files whether its vector is the mean over all tokens.

    Return False if these files are not on this machine.
    """
    pooling = read_json(model_directory(model) / "1_Pooling" / "config.json")
    return pooling.get("pooling_mode_mean_tokens") is True


def vocabulary_of(model: str) -> int | None:
    """Return the number of tokens in a model's vocabulary; None if its files are not on this machine."""
    size = read_config(model).get("vocab_size")
    return size if type(size) is int and size > 0 else None


def class_names(model: str) -> tuple[str, ...]:
    """Return the names of a classifier's classes, in order; empty if its files are not on this machine."""
    names = read_config(model).get("id2label")
    if not isinstance(names, dict):
        return ()
    return tuple(str(names.get(str(number), f"LABEL_{number}")) for number in range(len(names)))


def _attention_layers(config: Mapping[str, Any]) -> Any:
    """Return the number of layers with a KV cache; in a hybrid model, not all layers have one.

    Different models describe their layers under different keys of config.json.
    """
    layers, layer_types = config.get("num_hidden_layers"), config.get("layer_types")
    if isinstance(layer_types, list):
        return sum(layer_type not in {"linear_attention", "mamba"} for layer_type in layer_types)
    if isinstance(pattern := config.get("hybrid_override_pattern"), str):  # Nemotron-H
        return pattern.count("*")
    interval = config.get("full_attention_interval")
    if isinstance(layers, int) and isinstance(interval, int) and interval > 0:
        return layers // interval
    return layers


def kv_bytes(config: Mapping[str, Any], width: int) -> int | None:
    """Return the bytes of KV cache per token, if each number takes `width` bytes; None if unknown."""
    layers, heads = _attention_layers(config), config.get("num_attention_heads")
    kv_heads = config.get("num_key_value_heads") or heads
    head_dim = config.get("head_dim")
    if not head_dim and isinstance(heads, int) and isinstance(config.get("hidden_size"), int):
        head_dim = config["hidden_size"] // heads
    sizes = [layers, kv_heads, head_dim]
    has_all_sizes = all(isinstance(size, int) and size > 0 for size in sizes)
    if has_latent_attention(config) or not has_all_sizes:
        return None
    # The factor 2 counts the key and the value of each head.
    return 2 * width * int(math.prod(sizes))


INDEX = "model.safetensors.index.json"
_WEIGHTS = ("model*.safetensors", "*.safetensors", "pytorch_model*.bin")
STATIC_SHARE = 0.83
"""Fraction of a GPU's memory for weights and KV pool, if the job does not set `mem-fraction-static`. SGLang
0.5.23 uses this value on an H100. The rest of the memory is for activations and CUDA graphs."""


def with_tp(spec: ServerEngine) -> ServerEngine:
    """Return the engine with its field `tp` moved to the argument `tp-size`."""
    args = {**spec.args, "tp-size": spec.tp} if spec.tp else spec.args
    return spec.model_copy(update={"tp": None, "args": args})


def split_over(args: Mapping[str, Any]) -> int:
    """Return the number of GPUs over which a model's weights are split: `tp-size` times `pp-size`."""
    return max(_number(args, "tp-size"), 1) * max(_number(args, "pp-size"), 1)


def cards_of(args: Mapping[str, Any]) -> int:
    """Return the number of GPUs of a server. With DP attention, all DP ranks share the same GPUs."""
    if args.get(name_in(args, "enable-dp-attention")):
        return split_over(args)
    return split_over(args) * max(_number(args, "dp-size"), 1)


def weights_bytes(directory: Path, config: Mapping[str, Any]) -> float | None:
    """Return the bytes that a model's weights take when loaded; None if its files are not on this machine."""
    total: float | None = read_json(directory / INDEX).get("metadata", {}).get("total_size")
    if not isinstance(total, (int, float)) or total <= 0:
        total = None
        # A directory may have the weights in several formats. Only the first one that is found counts.
        for pattern in _WEIGHTS:
            files_bytes = sum(file.stat().st_size for file in directory.glob(pattern))
            if files_bytes:
                total = files_bytes
                break
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "float32")
    if total and dtype.startswith("float32") and "quantization_config" not in config:
        # SGLang loads 32-bit weights as 16-bit numbers.
        return total / 2
    return total


def _number(args: Mapping[str, Any], name: str) -> int:
    """Return the value of an integer argument under any of its names; 0 if there is none."""
    value = args.get(name_in(args, name))
    return value if isinstance(value, int) else 0
