"""References within a JSON Schema, such as `#/$defs/Address`."""

from typing import Any
from urllib.parse import unquote


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
