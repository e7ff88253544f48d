"""Short forms of a job's `engine`: a model, an address, a list of addresses, or `simulated`."""

import os
from typing import Any

from batchrunner.core.errors import JobError
from batchrunner.job.engine import ENGINE_KINDS
from batchrunner.job.model_name import as_folder, is_address, is_hub_page, is_misspelt


def expand_engine(tree: dict[str, Any]) -> None:
    """Put the mapping in the place of an `engine` of a job that is a text or a list; raises JobError."""
    if isinstance(tree.get("engine"), (str, list, tuple, os.PathLike)):
        tree["engine"] = engine_of_short_form(tree["engine"])


def engine_of_short_form(source: object) -> dict[str, Any]:
    """Return the `engine` part of a job that a short form stands for; raises JobError."""
    if isinstance(source, (list, tuple)):
        return {"kind": "attach", "urls": list(source)}
    if isinstance(source, os.PathLike):
        return {"kind": "server", "model": as_folder(source)}
    if not isinstance(source, str) or not source.strip():
        raise JobError(
            "engine",
            hint="give an open engine, the `engine` part of a job, a model, an address, a list of "
            f"addresses or 'simulated' (got {kind_of(source)})",
        )
    if source == "simulated":
        return {"kind": "simulated"}
    if "://" in source and not is_hub_page(source):
        return {"kind": "attach", "urls": [source]}
    if is_address(source):
        raise JobError(f"engine: an address starts with http:// or https:// (got {source!r})")
    if source in ENGINE_KINDS:
        raise JobError(f"engine: {source!r} needs more than its name", hint="give the `engine` part of a job")
    if is_misspelt(source, ("simulated", *ENGINE_KINDS)):
        raise JobError(f"engine: {source!r} is no engine", hint="give 'simulated', an address or a model")
    return {"kind": "server", "model": source}


def kind_of(value: object) -> str:
    """Return what a value is, in a word or two, for a message."""
    names = {dict: "a mapping", list: "a list", str: "a text", type(None): "nothing"}
    return names.get(type(value), f"{value!r}")
