"""JSON values: how deep they are, and where a reference in a schema leads."""

from typing import Any

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

    A reference is `#`, or `#/` and keys with slashes between them.
    """
    if not reference.startswith("#"):
        raise LookupError(reference)
    found = root
    for step in reference.split("/")[1:]:
        if not isinstance(found, dict):
            raise LookupError(reference)  # noqa: TRY004
        found = found[step]
    return found
