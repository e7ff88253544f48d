"""The keyword `unevaluatedProperties` of JSON Schemas, without jsonschema's own search for patterns.

jsonschema finds the keys that other keywords have looked at by Python's `re`, which has no time limit. Here
those keywords note them themselves, in the object that is checked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeAlias

KEYWORD = "unevaluatedProperties"
KeywordCheck: TypeAlias = Callable[[Any, Any, Any, Any], Any]
"""What checks a keyword: of the validator, the keyword's value, the value to check and the schema."""


class NotedObject(dict[str, Any]):
    """A JSON object, and the keys of it that a keyword has looked at."""

    def __init__(self, value: Mapping[str, Any], *, is_checked: bool) -> None:
        """`is_checked` is whether the values of these keys are to be checked too."""
        super().__init__(value)
        self.noted: set[str] = set()
        self.is_checked = is_checked


def note(value: Any, keys: Iterable[str]) -> bool:
    """Note that a keyword has looked at these keys of an object; return whether it is to check their values.

    They are noted where the object is asked about them.
    """
    if not isinstance(value, NotedObject):
        return True
    value.noted.update(keys)
    return value.is_checked


def noting(checks: Mapping[str, KeywordCheck]) -> dict[str, KeywordCheck]:
    """Return the checks of keywords that apply schemas to the same object, so that they note its keys.

    `checks` are jsonschema's. A schema that is not satisfied notes nothing.
    """
    if KEYWORD not in checks:  # drafts before 2019-09
        return {}
    return {
        KEYWORD: _check_unevaluated,
        "properties": _noting_named(checks["properties"]),
        "anyOf": _noting_branches(checks["anyOf"]),
        "oneOf": _noting_branches(checks["oneOf"]),
        "not": _without_notes(checks["not"]),
        "if": _check_if,
    }


def _check_unevaluated(validator: Any, wanted: Any, value: Any, schema: Mapping[str, Any]) -> Iterator[Any]:
    from jsonschema.exceptions import ValidationError  # noqa: PLC0415 - only for jobs with a schema

    if not isinstance(value, dict):
        return
    looked = NotedObject(value, is_checked=False)
    for _ in validator.descend(looked, {name: below for name, below in schema.items() if name != KEYWORD}):
        pass  # other keywords say what is wrong
    further = [key for key in value if key not in looked.noted]
    if wanted is False and further:
        yield ValidationError(f"unevaluated properties are not allowed ({', '.join(map(repr, further))})")
    elif isinstance(wanted, dict):
        for key in further:
            yield from validator.descend(value[key], wanted, path=key)
    note(value, value)


def _noting_named(check: KeywordCheck) -> KeywordCheck:
    def noting_named(validator: Any, named: Mapping[str, Any], value: Any, schema: Any) -> Any:
        if isinstance(value, dict) and not note(value, named.keys() & value.keys()):
            return ()
        return check(validator, named, value, schema)

    return noting_named


def _noting_branches(check: KeywordCheck) -> KeywordCheck:
    def noting_branches(validator: Any, branches: Any, value: Any, schema: Any) -> Any:
        if isinstance(value, NotedObject):
            for branch in branches:
                _satisfies(validator, branch, value)
        return check(validator, branches, _plain(value), schema)

    return noting_branches


def _without_notes(check: KeywordCheck) -> KeywordCheck:
    return lambda validator, wanted, value, schema: check(validator, wanted, _plain(value), schema)


def _check_if(validator: Any, condition: Any, value: Any, schema: Mapping[str, Any]) -> Any:
    follows = "then" if _satisfies(validator, condition, value) else "else"
    if follows in schema:
        yield from validator.descend(value, schema[follows], schema_path=follows)


def _satisfies(validator: Any, schema: Any, value: Any) -> bool:
    """Tell whether a value satisfies a schema; if it does, the keys that this has looked at are noted."""
    looked = NotedObject(value, is_checked=True) if isinstance(value, dict) else value
    if next(iter(validator.descend(looked, schema)), None) is not None:
        return False
    if isinstance(looked, NotedObject):
        note(value, looked.noted)
    return True


def _plain(value: Any) -> Any:
    return dict(value) if isinstance(value, NotedObject) else value
