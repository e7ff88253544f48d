"""A model's name: whether it can be there, and what it is called in a run's fingerprint."""

from __future__ import annotations

from pathlib import Path

from batchrunner.errors import EngineStartError
from batchrunner.jsonfile import read_json


def model_identity(model: str) -> str:
    """Return a directory's full path, or a name as it is."""
    path = Path(model).expanduser()
    return str(path.resolve()) if path.exists() else model


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
    """Return the number of token ids that a model directory knows, or None where that cannot be read."""
    config = read_json(Path(model).expanduser() / "config.json")
    text = config.get("text_config")
    size = config.get("vocab_size") or (text.get("vocab_size") if isinstance(text, dict) else None)
    return size if isinstance(size, int) else None
