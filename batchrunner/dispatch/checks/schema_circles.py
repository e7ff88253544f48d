"""References of a JSON Schema that lead back to themselves without a step into the value: no check ends."""

from collections.abc import Iterator, Mapping
from typing import Any

from batchrunner.core.exact_json import part_at


def circle_in(schema: Mapping[str, Any]) -> str | None:
    """Say which reference leads back to itself; None where none does. All references lead somewhere."""
    done: set[int] = set()
    found = (_circle_from(part, schema, (), done) for part in _parts_of(schema))
    return next(filter(None, found), None)


def _circle_from(part: Any, root: Mapping[str, Any], way: tuple[int, ...], done: set[int]) -> str | None:
    if not isinstance(part, dict) or id(part) in done:
        return None
    way = (*way, id(part))
    for inner, keyword in _in_place(part, root):
        if id(inner) in way:
            return f"its {keyword} leads back to itself"
        found = _circle_from(inner, root, way, done)
        if found is not None:
            return found
    done.add(id(part))
    return None


def _in_place(part: Mapping[str, Any], root: Mapping[str, Any]) -> Iterator[tuple[Any, str]]:
    """Yield the schemas that the same value is compared with, each with what leads to it."""
    for name in ("allOf", "anyOf", "oneOf"):
        for inner in part[name] if isinstance(part.get(name), list) else ():
            yield inner, name
    for name in ("not", "if", "then", "else"):
        if name in part:
            yield part[name], name
    reference = part.get("$ref")
    if reference == "#":
        yield root, "reference '#'"
    elif isinstance(reference, str) and reference.startswith("#/"):
        yield part_at(root, reference), f"reference {reference!r}"


def _parts_of(part: Any) -> Iterator[Any]:
    yield part
    for inner in part.values() if isinstance(part, dict) else part if isinstance(part, list) else ():
        yield from _parts_of(inner)
