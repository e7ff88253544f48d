"""JSON values: how deep they are, and where a reference in a schema leads."""

from typing import Any
from urllib.parse import unquote

DEEPEST = 250
"""Most levels of lists and objects that are written: readers differ in how many they take."""


def has_more_levels(value: object, most: int) -> bool:
    """Tell whether a list or mapping has more levels than `most`; one that contains itself has."""
    if isinstance(value, dict):
        value = tuple(value.values())
    if not isinstance(value, (list, tuple)):
        return False
    return not most or any(
        has_more_levels(part, most - 1) for part in value if isinstance(part, (list, tuple, dict))
    )


def part_at(root: Any, reference: str) -> Any:
    """Return the part of a schema that a reference leads to; raises LookupError where it leads nowhere.

    A reference is `#` and a JSON pointer (RFC 6901) in the form of a URI: `%20` stands for a space.
    """
    if reference != "#" and not reference.startswith("#/"):
        raise LookupError(reference)
    found = root
    for step in unquote(reference).split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and name.isdecimal():
            found = found[int(name)]
        elif isinstance(found, dict):
            found = found[name]
        else:
            raise LookupError(reference)
    return found
