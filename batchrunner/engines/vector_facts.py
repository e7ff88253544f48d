"""Vectors of a model: the lengths that it can make, and which token makes them, by its files and its server.

`/model_info` of SGLang 0.5.23 has `embedding`, with `supports_dimensions`, `matryoshka_dimensions` and
`pooling`. The first two come from the model's config.json, the last from the name of its architecture.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from batchrunner.core.engine_info import EngineInfo
from batchrunner.core.errors import JobError
from batchrunner.core.files import read_json
from batchrunner.engines.model_files import model_directory, read_config
from batchrunner.job.engine import LaunchedEngine
from batchrunner.job.spec import Job

OVERRIDES = "json-model-override-args"
"""Argument of a server with values that stand above those of config.json."""
_POOLINGS = {
    "cls": ("pooling_mode_cls_token", "the first token"),
    "last": ("pooling_mode_lasttoken", "the last token"),
    "mean": ("pooling_mode_mean_tokens", "the mean over all tokens"),
}
"""What makes a vector: SGLang's name, that of sentence-transformers, and words."""


def _lengths_of(config: Mapping[str, Any]) -> tuple[int, ...] | None:
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
            return _lengths_of({**told, "is_matryoshka": told["supports_dimensions"]})
    return None


def check_dimensions_of_launched(job: Job) -> None:
    """Raise JobError where the job asks for vectors that the model to be loaded cannot make, by its files."""
    engine = job.engine
    if job.output.dimensions is None or not isinstance(engine, LaunchedEngine) or engine.model is None:
        return
    config, given = read_config(engine.model), engine.args.get(OVERRIDES)
    try:
        more = orjson.loads(given) if isinstance(given, str) else given
    except orjson.JSONDecodeError:  # SGLang says what is wrong with it
        return
    config |= more if isinstance(more, dict) and config else {}
    _check_dimensions(job.output.dimensions, _lengths_of(config), engine.model, config)


def check_dimensions_of_open(job: Job, info: EngineInfo) -> None:
    """Raise JobError where the job asks for vectors that the model of an open engine cannot make."""
    if job.output.dimensions is not None:
        config = {} if info.simulated else read_config(info.model)
        _check_dimensions(job.output.dimensions, info.vector_lengths, info.model, config)


def _check_dimensions(
    asked: int, lengths: tuple[int, ...] | None, model: str, config: Mapping[str, Any]
) -> None:
    longest = config.get("hidden_size")
    if lengths is not None and asked not in lengths:
        known = f"only {', '.join(map(str, lengths))}" if lengths else "of its own length only"
        raise JobError(
            f"output.dimensions: {model} makes vectors {known} (got {asked})",
            hint="leave it out; for a model that was trained for shorter ones and does not say so in its "
            f"config.json, start SGLang with --{OVERRIDES} '{{\"is_matryoshka\": true}}'",
        )
    if type(longest) is int and asked > longest:
        raise JobError(
            f"output.dimensions: {model} makes vectors of {longest} numbers at most (got {asked})",
            hint="give fewer, or leave it out",
        )


def pooling_note(model: Mapping[str, Any]) -> str | None:
    """Return a line for the user where a running server makes vectors otherwise than the model's authors.

    `model` is its `/model_info`. None where either is not known.
    """
    told, path = model.get("embedding"), str(model.get("model_path"))
    server = str(told.get("pooling")) if isinstance(told, dict) else ""
    files = read_json(model_directory(path) / "1_Pooling" / "config.json")
    authors = next((name for name, (mode, _) in _POOLINGS.items() if files.get(mode) is True), server)
    if server not in _POOLINGS or authors == server:
        return None
    unless = ", unless it was started with SGLANG_EXTERNAL_MODEL_PACKAGE=mean_pooling"
    return (
        f"the server makes vectors of {_POOLINGS[server][1]}, and the authors of {path} make them of "
        f"{_POOLINGS[authors][1]} (1_Pooling/config.json): they will not be alike"
        f"{unless if authors == 'mean' else ''}"
    )
