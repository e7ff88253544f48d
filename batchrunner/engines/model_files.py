"""A model's name: whether it can be there, where, and what it is called in a run's fingerprint."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from batchrunner.core.errors import EngineStartError
from batchrunner.core.jsonfile import read_json


def model_identity(model: str) -> str:
    """Return a directory's full path, or a name as it is."""
    path = Path(model).expanduser()
    return str(path.resolve()) if path.exists() else model


def model_directory(model: str, revision: str | None = None) -> Path:
    """Return where a model's files are, or would be: its directory, or a name's in Hugging Face's cache.

    The cache is where huggingface_hub looks for it, the snapshot that of the revision, `main` by default.
    """
    path = Path(model).expanduser()
    if path.exists():
        return path
    home = os.environ.get("HF_HOME") or f"{os.environ.get('XDG_CACHE_HOME') or '~/.cache'}/huggingface"
    cache = Path(os.environ.get("HF_HUB_CACHE") or f"{home}/hub").expanduser()
    repository = cache / f"models--{model.replace('/', '--')}"
    commit = revision or "main"
    with contextlib.suppress(OSError):  # it is a commit itself, or the model is not there
        commit = (repository / "refs" / commit).read_text(encoding="utf-8").strip()
    return repository / "snapshots" / commit


def check_model(model: str) -> None:
    """Refuse a model that is plainly a path and is not there; raises EngineStartError."""
    path = Path(model).expanduser()
    # "org/name" is a name of a hub, unless the folder before the slash is here
    looks_like_path = (
        model.startswith(("/", ".", "~")) or model.count("/") > 1 or ("/" in model and path.parent.is_dir())
    )
    if looks_like_path and not path.exists():
        raise EngineStartError(f"engine.model: {model}: no such model directory")
    if path.is_dir() and not (path / "config.json").exists():
        raise EngineStartError(f"engine.model: {model}: not a model directory (no config.json)")


def vocabulary_of(model: str) -> int | None:
    """Return the number of token ids that a model knows, or None where its files are not on this machine."""
    config = read_json(model_directory(model) / "config.json")
    text = config.get("text_config")
    size = config.get("vocab_size") or (text.get("vocab_size") if isinstance(text, dict) else None)
    return size if isinstance(size, int) else None
