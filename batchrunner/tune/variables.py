"""Environment variables of the server among the flags that are tuned: they belong into `engine.env`."""

from collections.abc import Mapping
from typing import Any

from batchrunner.engines.flags import command_line

CLIP = "SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION"
"""Most output tokens that admission expects of a request; the server has no flag for it."""
VARIABLES = frozenset({CLIP})
"""The variables that are tuned."""


def arguments_in(args: Mapping[str, Any]) -> dict[str, Any]:
    """Return what belongs into `engine.args`."""
    return {name: value for name, value in args.items() if name not in VARIABLES}


def variables_in(args: Mapping[str, Any]) -> dict[str, str]:
    """Return what belongs into `engine.env`, whose values are texts."""
    return {name: str(value) for name, value in args.items() if name in VARIABLES}


def numbers_in(env: Mapping[str, str]) -> dict[str, int]:
    """Return the tuned variables that a job sets itself; the server reads each as a number."""
    return {name: int(value) for name, value in env.items() if name in VARIABLES and value.isdecimal()}


def as_typed(args: Mapping[str, Any]) -> str:
    """Write arguments and variables as a person types them."""
    variables = [f"{name}={value}" for name, value in variables_in(args).items()]
    return " ".join([*variables, *([command_line(found)] if (found := arguments_in(args)) else [])])
