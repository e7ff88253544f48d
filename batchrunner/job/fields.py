"""Base class of all sections of a job, and the types of its fields: durations, shares, paths, models."""

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
_UNITS_S = (86400.0, 3600.0, 60.0, 1.0)


def _seconds(value: object) -> object:
    if not isinstance(value, str):
        return value
    match = _DURATION.fullmatch(value.strip().replace(" ", ""))
    if not match or not any(match.groups()):
        raise ValueError("a duration is seconds or a text such as 90s, 30m, 2h30m or 1d")
    return sum(float(part) * unit for part, unit in zip(match.groups(), _UNITS_S, strict=True) if part)


def _share(value: object) -> object:
    if not isinstance(value, str):
        return value
    try:
        number = float(value.strip().removesuffix("%"))
    except ValueError:
        raise ValueError("a share is a text such as 1%, or a number such as 0.01") from None
    return number / 100 if value.strip().endswith("%") else value


_HOME = re.compile(r"^\$(?:HOME|\{HOME\})(?=/|$)")


def user_path(path: str) -> str:
    """Return a path with the home directory for a leading `~`, `~user`, `$HOME` or `${HOME}`."""
    return os.path.expanduser(_HOME.sub("~", path))  # noqa: PTH111 - Path would drop a final slash


def user_paths(value: Any) -> Any:
    """Return the value of an argument after `user_path` was applied to its texts, also in lists."""
    if isinstance(value, list):
        return [user_paths(item) for item in value]
    return user_path(value) if isinstance(value, str) else value


def _given_path(path: str) -> str:
    if not path:  # it would be the current directory
        raise ValueError("is empty")
    return user_path(path)


UserPath: TypeAlias = Annotated[str, AfterValidator(_given_path)]
"""A path in which `~` and `$HOME` stand for a home directory."""
Off: TypeAlias = Annotated[Literal["off"], BeforeValidator(lambda given: "off" if given is False else given)]
"""The word `off`, which YAML reads as false."""
_SHARE_TEXT = {"type": "string", "pattern": r"^\s*\d+(\.\d+)?\s*%\s*$"}
Duration: TypeAlias = Annotated[
    float,
    Field(gt=0, allow_inf_nan=True),
    BeforeValidator(_seconds),
    WithJsonSchema(
        {"anyOf": [{"type": "number", "exclusiveMinimum": 0}, {"type": "string", "minLength": 1}]}
    ),
]
Share: TypeAlias = Annotated[
    float,
    BeforeValidator(_share),
    Field(gt=0, le=1),
    WithJsonSchema({"anyOf": [{"type": "number", "exclusiveMinimum": 0, "maximum": 1}, _SHARE_TEXT]}),
]
CountOrShare: TypeAlias = Annotated[
    Annotated[int, Field(ge=0, strict=True)] | Annotated[float, Field(ge=0, le=1)],
    BeforeValidator(_share),
    WithJsonSchema({"anyOf": [{"type": "number", "minimum": 0}, _SHARE_TEXT]}),
]


REFERENCE = r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*"
"""Pattern of `module:function`."""


def name_of(function: str | Callable[..., Any]) -> str:
    """Return the name `module:function` of a function, which may be the function itself."""
    if isinstance(function, str):
        return function
    inner = getattr(function, "func", function)  # of a functools.partial
    named = inner if hasattr(inner, "__qualname__") else type(inner)
    return f"{named.__module__}:{named.__qualname__}"


def _function(value: object) -> object:
    if re.fullmatch(REFERENCE, value) if isinstance(value, str) else callable(value):
        return value
    raise ValueError("should be a Python function: write it as module:function")


PythonFunction: TypeAlias = Annotated[
    Any,
    BeforeValidator(_function),
    PlainSerializer(name_of, when_used="json"),
    WithJsonSchema({"type": "string", "pattern": f"^{REFERENCE}$"}),
]
"""A Python function as `module:function`; a program may pass the function itself."""


def refuse(faults: Iterable[str]) -> None:
    """Raise ValueError with a line for each fault, if there are any."""
    if lines := "\n".join(faults):
        raise ValueError(lines)


class Spec(BaseModel):
    """Base class of all sections of a job: immutable, no unknown keys, values that JSON can hold."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
        allow_inf_nan=False,
        serialize_by_alias=True,  # a key may be a keyword of Python
    )

    @field_validator("*")
    @classmethod
    def _as_json(cls, value: Any) -> Any:
        """Return a value in its JSON form, which run.json stores and the engine receives."""
        parts = value if isinstance(value, list) and value else [value]
        if all(isinstance(part, BaseModel) or callable(part) for part in parts):
            return value  # sections and functions are validated elsewhere
        try:
            if not isinstance(value, dict):
                orjson.dumps(value)  # refuses integers over 64 bits and texts that are not UTF-8
                return value
            json.dumps(value, allow_nan=False, default=str)  # orjson turns NaN into null
            return orjson.loads(orjson.dumps(value))
        except (TypeError, ValueError, RecursionError) as failure:
            raise ValueError(f"cannot be written as JSON: {failure}") from None


_NAME = r"(?![.-])(?!.*(?:--|\.\.))[\w.-]+(?<![.-])"
_HUB_NAME = re.compile(rf"{_NAME}|{_NAME}/{_NAME}(?::[\w.-]+)?|{_NAME}/{_NAME}/.+\.gguf")
"""Names of huggingface_hub, and SGLang's OWNER/NAME:QUANTIZATION and OWNER/NAME/FILE.gguf."""


def is_hub_name(text: str) -> bool:
    """Tell whether a text may name a model, or a GGUF file, on the Hub."""
    return _HUB_NAME.fullmatch(text) is not None


def as_folder(path: os.PathLike[str]) -> str:
    """Return a path as a text that cannot be taken for a name on the Hub, even if the path does not exist."""
    text = os.fspath(path)
    return text if Path(text).exists() or text.startswith(("/", ".", "~")) else f"./{text}"


def _checked_model(model: str) -> str:
    """Return a model as it is; raises ValueError for a text that cannot name a model.

    A folder need not exist here, because it may be on another machine.
    """
    looks_like_path = model.startswith(("/", ".", "~")) or (model != "" and Path(model).exists())
    if looks_like_path or is_hub_name(model):
        return model
    raise ValueError(
        "no model has this name: give a folder (./NAME), a name on the Hub (OWNER/NAME), or the address of a "
        "server, http://HOST:PORT, as `urls` of an engine of `kind: attach`"
    )


ModelName: TypeAlias = Annotated[UserPath, AfterValidator(_checked_model)]
"""A model's directory or name."""
