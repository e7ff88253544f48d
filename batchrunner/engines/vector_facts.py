"""What a model's files and its server say of its vectors: their lengths, and which token makes them. Pure.

`/model_info` of SGLang 0.5.23 has `embedding`, with `supports_dimensions`, `matryoshka_dimensions` and
`pooling`. The first two come from the model's config.json, the last from the name of its architecture.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import orjson

from batchrunner.core.engine_info import EngineInfo
from batchrunner.core.errors import JobError
from batchrunner.core.files import read_json
from batchrunner.engines.model_files import model_directory, read_config
from batchrunner.job.engine import EngineSpec, LaunchedEngine
from batchrunner.job.spec import Job

MATRYOSHKA = ("is_matryoshka", "matryoshka_dimensions")
"""Keys of a config.json that say whether a model was trained for shorter vectors, and for which."""
OVERRIDES = "json-model-override-args"
"""Argument of a server with values that stand above those of config.json."""
_WORDS = {"cls": "the first token", "last": "the last token", "mean": "the mean over all tokens"}
"""What makes a vector, by SGLang's names."""
_MODES = {
    "pooling_mode_cls_token": _WORDS["cls"],
    "pooling_mode_lasttoken": _WORDS["last"],
    "pooling_mode_mean_tokens": _WORDS["mean"],
    "pooling_mode_max_tokens": "the maximum over all tokens",
    "pooling_mode_mean_sqrt_len_tokens": "the sum over all tokens by the root of their number",
    "pooling_mode_weightedmean_tokens": "a weighted mean over all tokens",
}
"""The same by the names of sentence-transformers."""
_MEAN_MODULES = {"BertModel", "XLMRobertaModel"}
"""Architectures for which servers that we launch take the mean (`engines/server_modules`)."""


def lengths_of(config: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Return the lengths that a model with this config.json can cut its vectors to, empty for none.

    None where any length is possible, or nothing is known.
    """
    listed = config.get("matryoshka_dimensions")
    if isinstance(listed, list) and listed:
        return tuple(length for length in listed if type(length) is int)
    return () if config and not config.get("is_matryoshka") else None


def lengths_told(models: Sequence[Mapping[str, Any]]) -> tuple[int, ...] | None:
    """Return the same by the `/model_info` of each replica."""
    for model in models:
        told = model.get("embedding")
        if isinstance(told, dict) and isinstance(told.get("supports_dimensions"), bool):
            names = {"is_matryoshka": told["supports_dimensions"]}
            return lengths_of({**names, "matryoshka_dimensions": told.get("matryoshka_dimensions")})
    return None


def longest_of(config: Mapping[str, Any]) -> int | None:
    """Return the most numbers of a vector of a model with this config.json: those of its hidden states."""
    size = config.get("hidden_size")
    return size if type(size) is int and size > 0 else None


def config_of_launched(spec: EngineSpec) -> dict[str, Any]:
    """Return the config.json of a model that the run loads itself, with the engine's values above it.

    Empty where it is not known.
    """
    if not isinstance(spec, LaunchedEngine) or spec.model is None:
        return {}
    config = read_config(spec.model)
    given = spec.args.get(OVERRIDES)
    with suppress(orjson.JSONDecodeError):
        more = orjson.loads(given) if isinstance(given, str) else given
        return {**config, **more} if isinstance(more, dict) and config else config
    return {}


def check_dimensions(
    job: Job, lengths: tuple[int, ...] | None, model: str, longest: int | None = None
) -> None:
    """Raise JobError where the job asks for vectors of a length that the model cannot make.

    `lengths` are as in `lengths_of`, and `longest` is the longest one; None where it is not known.
    """
    asked = job.output.dimensions
    if asked is None:
        return
    if lengths is not None and asked not in lengths:
        known = f"only {', '.join(map(str, lengths))}" if lengths else "of its own length only"
        raise JobError(
            f"output.dimensions: {model} makes vectors {known} (got {asked})",
            hint="leave it out; for a model that was trained for shorter ones and does not say so in its "
            f"config.json, start SGLang with --{OVERRIDES} '{{\"is_matryoshka\": true}}'",
        )
    if longest is not None and asked > longest:
        raise JobError(
            f"output.dimensions: {model} makes vectors of {longest} numbers at most (got {asked})",
            hint="give fewer, or leave it out",
        )


def check_dimensions_of_launched(job: Job) -> None:
    """Do so for a model that the run is to load, by its files."""
    config = config_of_launched(job.engine)
    model = str(getattr(job.engine, "model", None))
    check_dimensions(job, lengths_of(config), model, longest_of(config))


def check_dimensions_of_open(job: Job, info: EngineInfo) -> None:
    """Do so for the model of an open engine, by what it tells, and by the files where they are here."""
    config = {} if info.simulated or job.output.dimensions is None else read_config(info.model)
    check_dimensions(job, info.vector_lengths, info.model, longest_of(config))


def pooling_note(model: Mapping[str, Any], *, launched: bool) -> str | None:
    """Return a line for the user where a server makes vectors otherwise than the model's authors.

    `model` is its `/model_info`. None where either is not known, or where a server that we `launched` takes
    the mean.
    """
    told = model.get("embedding")
    server = _WORDS.get(str(told.get("pooling"))) if isinstance(told, dict) else None
    path = str(model.get("model_path"))
    authors = authors_pooling(path)
    if server is None or authors is None or server == authors:
        return None
    is_ours = authors == _WORDS["mean"] and _MEAN_MODULES.issuperset(_names(model))
    if is_ours and launched:
        return None
    unless = ", unless it was started with SGLANG_EXTERNAL_MODEL_PACKAGE=mean_pooling" if is_ours else ""
    return (
        f"the server makes vectors of {server}, and the authors of {path} make them of {authors} "
        f"(1_Pooling/config.json): they will not be alike{unless}"
    )


def authors_pooling(model: str) -> str | None:
    """Return what makes a vector by the model's files, in words; None where they are not on this machine."""
    pooling = read_json(model_directory(model) / "1_Pooling" / "config.json")
    found = [words for name, words in _MODES.items() if pooling.get(name) is True]
    return " and ".join(found) or None


def _names(model: Mapping[str, Any]) -> list[str]:
    names = model.get("architectures")
    return [str(name) for name in names] if isinstance(names, list) and names else [""]
