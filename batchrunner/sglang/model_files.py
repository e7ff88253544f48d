"""The files of a model: its directory, its identity in a run's fingerprint, its config.json, its size."""

import contextlib
import logging
import math
import os
import re
import time
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from batchrunner.core.errors import EngineStartError
from batchrunner.core.files import read_json
from batchrunner.core.timing import TIMING
from batchrunner.job.engine import ServerEngine
from batchrunner.job.fields import is_hub_name
from batchrunner.sglang.flags import name_in

log = logging.getLogger(__name__)

EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts", "num_routed_experts")
"""Keys for the number of experts of a layer. 0, 1 and null mean a dense model."""
_LANGUAGE_PARTS = ("text_config", "language_config", "llm_config", "thinker_config")
"""Keys below which a model that takes more than text describes its language model; a later one wins, as in
SGLang (`get_hf_text_config`)."""


def language_part(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config with the values of its language model at the top level."""
    parts = dict(config)
    for name in _LANGUAGE_PARTS:
        part = config.get(name)
        if isinstance(part, dict):
            parts |= language_part(part)
    return parts


def has_experts(config: Mapping[str, Any]) -> bool:
    """Tell whether the model is a mixture of experts."""
    inner = config.get("ffn_config")  # of Dbrx
    parts = [config, inner] if isinstance(inner, dict) else [config]
    return any(_largest(part.get(name)) > 1 for part in parts for name in EXPERTS)


def has_latent_attention(config: Mapping[str, Any]) -> bool:
    """Tell whether attention keeps a compressed KV cache (MLA), which all heads share.

    DeepSeek-V4 (`compress_ratios`) has the keys, but another attention, as in SGLang's model_config.
    """
    return bool(
        _largest(config.get("kv_lora_rank"))
        and config.get("use_mla") is not False
        and not config.get("compress_ratios")
    )


def has_sparse_attention(config: Mapping[str, Any]) -> bool:
    """Tell whether an indexer chooses the tokens that attention reads (DSA): SGLang has backends for it."""
    return _largest(config.get("index_topk")) > 0


def _largest(value: Any) -> int:
    """Return a count, the largest of a list of counts; 0 for anything else."""
    values = value if isinstance(value, list) else [value]
    return max((count for count in values if type(count) is int), default=0)


def model_identity(model: str) -> str:
    """Return the model's full path if it is a directory, otherwise its name unchanged."""
    path = _local(model)
    return str(path.resolve()) if path else model


def _local(model: str) -> Path | None:
    """Return the path of a model on this machine; None for any other name."""
    try:
        path = Path(model).expanduser()
        return path if path.exists() else None
    except (OSError, RuntimeError, ValueError):  # too long; no such user as in ~name; a NUL
        return None


def model_directory(model: str, revision: str | None = None) -> Path:
    """Return the directory of a model: its own, or a snapshot in Hugging Face's cache, even if absent.

    The cache is that of huggingface_hub, the snapshot that of the revision, which is `main` by default.
    """
    if path := _local(model):
        return path
    home = os.environ.get("HF_HOME") or f"{os.environ.get('XDG_CACHE_HOME') or '~/.cache'}/huggingface"
    hub_cache = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    cache = Path(hub_cache or f"{home}/hub").expanduser()
    repository = cache / f"models--{model.replace('/', '--')}"
    commit = revision or "main"
    with contextlib.suppress(OSError, ValueError):  # it is a commit itself, or the model is not there
        commit = (repository / "refs" / commit).read_text(encoding="utf-8").strip()
    return repository / "snapshots" / commit


def check_model(model: str) -> None:
    """Raise EngineStartError for a model that is a path which does not exist."""
    path = Path(model).expanduser()
    # "org/name" is a model's name in a hub, unless a folder `org` is here
    looks_like_path = not is_hub_name(model) or ("/" in model and path.parent.is_dir())
    if looks_like_path and not path.exists():
        raise EngineStartError(
            f"engine.model: {model}: no such model directory",
            hint="give a folder that is there, or a name on the Hub (OWNER/NAME)",
        )
    if path.is_dir() and not any((path / name).exists() for name in ("config.json", "params.json")):
        raise EngineStartError(f"engine.model: {model}: not a model directory (no config.json)")


_LEADS_ELSEWHERE = re.compile(
    "HF_|HUGGINGFACE_|TRANSFORMERS_|XDG_CACHE_HOME|SGLANG_USE_MODELSCOPE|.*_proxy$", re.IGNORECASE
)
"""Variables that may lead a server to a model which this process cannot find."""
HUB_TIMEOUT_S = 10.0
HUB_TRIES = 3
"""Tries to reach the Hub: a machine that has just started may have no network yet."""


def check_on_hub(spec: ServerEngine) -> None:
    """Raise EngineStartError for a model that is neither on this machine nor on the Hub.

    SGLang would try for a minute, and then quote three errors. Where it may still find the model, nothing is
    raised: with variables or arguments that lead elsewhere, or where the Hub answers something unexpected.
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

    hub = HfApi(endpoint=os.environ.get("HF_ENDPOINT"))
    for tries in range(1, HUB_TRIES + 1):
        try:
            hub.model_info(repository, revision=revision, timeout=HUB_TIMEOUT_S)
        except (RepositoryNotFoundError, RevisionNotFoundError):
            at = f" at revision {revision}" if revision else ""
            raise EngineStartError(
                f"engine.model: {model}: {hub.endpoint} has no such model{at}, or shows it only with a token",
                hint="correct the name, set HF_TOKEN, or give a folder",
            ) from None
        except (httpx.ConnectError, ConnectionError) as failure:  # the second: HF_HUB_OFFLINE is set
            if tries == HUB_TRIES:
                raise EngineStartError(
                    f"engine.model: {model}: is not on this machine, and {hub.endpoint} cannot be reached: "
                    f"{failure}",
                    hint=f"`hf download {repository}` where there is a network, or give a folder",
                ) from None
            time.sleep(TIMING.first_retry * 2**tries)
        except (httpx.HTTPError, HfHubHTTPError, ValueError, OSError) as failure:
            log.debug("the Hub was asked for %s in vain: %r", model, failure)
            return
        else:
            return


def _looks_elsewhere(spec: ServerEngine) -> bool:
    """Tell whether a server may find its model in places that this process does not know."""
    has_variable = any(map(_LEADS_ELSEWHERE.match, spec.env)) or "SGLANG_USE_MODELSCOPE" in os.environ
    # with `cache_dir` files are copied that have to be here, which is checked with the copy
    return has_variable or name_in(spec.args, "download-dir") in spec.args or spec.cache_dir is not None


def read_config(model: str, revision: str | None = None) -> dict[str, Any]:
    """Return a model's config.json, with its language model's values at the top; empty where it is not here.

    A model that takes more than text describes its language model in `text_config`, whose values win, as they
    do in SGLang.
    """
    return language_part(read_json(model_directory(model, revision) / "config.json"))


def takes_mean(model: str) -> bool:
    """Tell whether a model's authors take the mean over all tokens as its vector, by its files.

    sentence-transformers writes them; False where they are not on this machine.
    """
    pooling = read_json(model_directory(model) / "1_Pooling" / "config.json")
    return pooling.get("pooling_mode_mean_tokens") is True


def vocabulary_of(model: str) -> int | None:
    """Return the number of token ids that a model knows, or None where its files are not on this machine."""
    size = read_config(model).get("vocab_size")
    return size if type(size) is int and size > 0 else None


def class_names(model: str) -> tuple[str, ...]:
    """Return the names of a classification model's classes, in order; empty where its files are not here."""
    names = read_config(model).get("id2label")
    if not isinstance(names, dict):
        return ()
    return tuple(str(names.get(str(number), f"LABEL_{number}")) for number in range(len(names)))


def kv_bytes(config: Mapping[str, Any], width: int) -> int | None:
    """Return the KV cache bytes of a token, at `width` bytes a number; None where unknown."""
    layers, heads = config.get("num_hidden_layers"), config.get("num_attention_heads")
    kv_heads = config.get("num_key_value_heads") or heads
    head_dim = config.get("head_dim")
    if not head_dim and isinstance(heads, int) and isinstance(config.get("hidden_size"), int):
        head_dim = config["hidden_size"] // heads
    sizes = [size for size in (layers, kv_heads, head_dim) if isinstance(size, int) and size > 0]
    return None if has_latent_attention(config) or len(sizes) < 3 else 2 * width * math.prod(sizes)  # noqa: PLR2004


INDEX = "model.safetensors.index.json"
_WEIGHTS = ("model*.safetensors", "*.safetensors", "pytorch_model*.bin")
STATIC_SHARE = 0.83
"""Share of a card for weights and KV pool, where the job does not set `mem-fraction-static`: SGLang's on an
H100 (0.5.23); the rest is for activations and graphs."""


def with_tp(spec: ServerEngine) -> ServerEngine:
    """Return the engine with its `tp` moved into its arguments."""
    args = {**spec.args, "tp-size": spec.tp} if spec.tp else spec.args
    return spec.model_copy(update={"tp": None, "args": args})


def split_over(args: Mapping[str, Any]) -> int:
    """Return the number of cards that a model's weights are split over: `tp-size` times `pp-size`."""
    return max(_number(args, "tp-size"), 1) * max(_number(args, "pp-size"), 1)


def cards_of(args: Mapping[str, Any]) -> int:
    """Return the number of cards of a server; `dp-size` multiplies it, except with DP attention."""
    parted = args.get(name_in(args, "enable-dp-attention"))
    return split_over(args) * (1 if parted else max(_number(args, "dp-size"), 1))


def weights_bytes(directory: Path, config: Mapping[str, Any]) -> float | None:
    """Return the bytes of a model's loaded weights by its files; None where these are absent."""
    total: float | None = read_json(directory / INDEX).get("metadata", {}).get("total_size")
    if not isinstance(total, (int, float)) or total <= 0:
        files = (directory.glob(name) for name in _WEIGHTS)
        sizes = (sum(file.stat().st_size for file in tensor_bytes) for tensor_bytes in files)
        total = next(filter(None, sizes), None)
    # SGLang loads 32 bits as 16
    is_wide = str(config.get("dtype") or config.get("torch_dtype") or "float32").startswith("float32")
    return total / 2 if total and is_wide and "quantization_config" not in config else total


def _number(args: Mapping[str, Any], name: str) -> int:
    """Return an argument that is a whole number, by any of its names; 0 for anything else."""
    value = args.get(name_in(args, name))
    return value if isinstance(value, int) else 0
