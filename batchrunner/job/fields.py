"""Base class of all sections of a job, and types of fields: durations, shares, paths, functions, models."""

import json
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import orjson
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    WithJsonSchema,
    field_validator,
)

_DURATION = re.compile(
    r"(?:(\d+(?:\.\d+)?)d)?(?:(\d+(?:\.\d+)?)h)?(?:(\d+(?:\.\d+)?)m(?:in)?)?(?:(\d+(?:\.\d+)?)s)?"
)
"""Pattern of a duration in days, hours, minutes and seconds, such as 2h30m."""
_UNITS_S = (86400.0, 3600.0, 60.0, 1.0)
"""Seconds in a day, an hour, a minute and a second, in the order of the groups of _DURATION."""


def _seconds(value: object) -> object:
    """Convert a text such as 2h30m to seconds; return any other value for pydantic to check."""
    if not isinstance(value, str):
        return value
    match = _DURATION.fullmatch(value.strip().replace(" ", ""))
    if not match or not any(match.groups()):  # All groups are optional, so the pattern also matches "".
        raise ValueError("a duration is a number of seconds, or a text such as 90s, 30m, 2h30m or 1d")
    return sum(float(number) * unit for number, unit in zip(match.groups(), _UNITS_S, strict=True) if number)


def _share(value: object) -> object:
    """Convert a text such as 1% to a fraction; return any other value for pydantic to check."""
    if not isinstance(value, str):
        return value
    try:
        number = float(value.strip().removesuffix("%"))
    except ValueError:
        raise ValueError("a share is a text such as 1%, or a number such as 0.01") from None
    # Without %, pydantic converts the text to a number.
    return number / 100 if value.strip().endswith("%") else value


_HOME = re.compile(r"^\$(?:HOME|\{HOME\})(?=/|$)")


def user_path(path: str) -> str:
    """Replace a leading `~`, `~user`, `$HOME` or `${HOME}` in a path by the home directory."""
    return os.path.expanduser(_HOME.sub("~", path))  # noqa: PTH111 - Path would drop a final slash


def user_paths(value: Any) -> Any:
    """Apply `user_path` to a text, or to each text in a list; return the value."""
    if isinstance(value, list):
        return [user_paths(item) for item in value]
    return user_path(value) if isinstance(value, str) else value


def _checked_path(path: str) -> str:
    """Return a path with its home directory expanded; raise ValueError if the path is empty."""
    if not path:  # pathlib would take an empty path for the current directory.
        raise ValueError("is empty")
    return user_path(path)


UserPath: TypeAlias = Annotated[str, AfterValidator(_checked_path)]
"""Path in which `~` and `$HOME` stand for a home directory."""
Off: TypeAlias = Annotated[Literal["off"], BeforeValidator(lambda value: "off" if value is False else value)]
"""The word `off`, which YAML reads as false."""
_SHARE_TEXT = {"type": "string", "pattern": r"^\s*\d+(\.\d+)?\s*%\s*$"}
"""JSON Schema of a share as a text, such as 1%."""
Duration: TypeAlias = Annotated[
    float,
    Field(gt=0, allow_inf_nan=True),
    BeforeValidator(_seconds),
    WithJsonSchema(
        {"anyOf": [{"type": "number", "exclusiveMinimum": 0}, {"type": "string", "minLength": 1}]}
    ),
]
"""Positive duration in seconds; a job file may also write it as a text such as 2h30m."""
Share: TypeAlias = Annotated[
    float,
    BeforeValidator(_share),
    Field(gt=0, le=1),
    WithJsonSchema({"anyOf": [{"type": "number", "exclusiveMinimum": 0, "maximum": 1}, _SHARE_TEXT]}),
]
"""Positive fraction of at most 1; a job file may also write it as a text such as 1%."""
CountOrShare: TypeAlias = Annotated[
    Annotated[int, Field(ge=0, strict=True)] | Annotated[float, Field(ge=0, le=1)],
    BeforeValidator(_share),
    WithJsonSchema({"anyOf": [{"type": "number", "minimum": 0}, _SHARE_TEXT]}),
]
"""An integer count, or a fraction (a float, or a text such as 1%)."""


REFERENCE = r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*"
"""Pattern of a reference to a Python function, `module:function`."""


def name_of(function: str | Callable[..., Any]) -> str:
    """Return the name `module:function` of a Python function; the argument may be this name already."""
    if isinstance(function, str):
        return function
    inner = getattr(function, "func", function)  # A functools.partial gets the name of its function.
    # A callable object gets the name of its class.
    named = inner if hasattr(inner, "__qualname__") else type(inner)
    return f"{named.__module__}:{named.__qualname__}"


def _function(value: object) -> object:
    """Return a function, or a reference to one, unchanged; raise ValueError for any other value."""
    is_function = re.fullmatch(REFERENCE, value) if isinstance(value, str) else callable(value)
    if is_function:
        return value
    raise ValueError("should be a Python function: write it as module:function")


PythonFunction: TypeAlias = Annotated[
    Any,
    BeforeValidator(_function),
    PlainSerializer(name_of, when_used="json"),
    WithJsonSchema({"type": "string", "pattern": f"^{REFERENCE}$"}),
]
"""Python function as `module:function`; a program may pass the function itself."""


def refuse(faults: Iterable[str]) -> None:
    """Raise ValueError with a line for each fault, if there are any."""
    if lines := "\n".join(faults):
        raise ValueError(lines)


class Spec(BaseModel):
    """Base class of all sections of a job: immutable, no unknown keys, only values of JSON types."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
        allow_inf_nan=False,
        serialize_by_alias=True,  # Some keys, such as `continue`, are Python keywords and need an alias.
    )

    @field_validator("*")
    @classmethod
    def _as_json(cls, value: Any) -> Any:
        """Return a value in the JSON form that run.json stores and the engine receives.

        Raises ValueError for a value without such a form.
        """
        items = value if isinstance(value, list) and value else [value]
        if all(isinstance(item, BaseModel) or callable(item) for item in items):
            return value  # Sections and functions are validated elsewhere.
        try:
            if not isinstance(value, dict):
                orjson.dumps(value)  # orjson refuses integers over 64 bits and texts that are not UTF-8.
                return value
            json.dumps(value, allow_nan=False, default=str)  # json refuses NaN. orjson would write null.
            return orjson.loads(orjson.dumps(value))
        except (TypeError, ValueError, RecursionError) as failure:
            raise ValueError(f"cannot be written as JSON: {failure}") from None


_NAME = r"(?![.-])(?!.*(?:--|\.\.))[\w.-]+(?<![.-])"
_HUB_NAME = re.compile(rf"{_NAME}|{_NAME}/{_NAME}(?::[\w.-]+)?|{_NAME}/{_NAME}/.+\.gguf")
"""Pattern of the names of models on the Hugging Face Hub.

It includes SGLang's forms OWNER/NAME:QUANTIZATION and OWNER/NAME/FILE.gguf.
"""


def is_hub_name(text: str) -> bool:
    """Tell whether a text may name a model, or a GGUF file, on the Hugging Face Hub."""
    return _HUB_NAME.fullmatch(text) is not None


def as_folder(path: os.PathLike[str]) -> str:
    """Return a path as text; begin it with `./` if it might be taken for a model on the Hugging Face Hub."""
    text = os.fspath(path)
    return text if Path(text).exists() or text.startswith(("/", ".", "~")) else f"./{text}"


def _checked_model(model: str) -> str:
    """Return a model's directory or name unchanged; raise ValueError for a text that can be neither.

    The directory may be on another machine, so it need not exist here.
    """
    looks_like_path = model.startswith(("/", ".", "~")) or (model != "" and Path(model).exists())
    if looks_like_path or is_hub_name(model):
        return model
    raise ValueError(
        "no model has this name: give a folder (./NAME) or a name on the Hugging Face Hub (OWNER/NAME); for "
        "a server that already runs, use `kind: attach` with its address (http://HOST:PORT) in `urls`"
    )


ModelName: TypeAlias = Annotated[UserPath, AfterValidator(_checked_model)]
"""Directory of a model, or a name by which SGLang can load the model."""
