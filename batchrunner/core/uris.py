"""Tells URIs, such as `s3://bucket/key`, from paths on this machine."""

import re
from pathlib import Path

_URI = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")
"""Beginning of a URI; a `Path` of it has one slash only."""


def is_uri(given: str) -> bool:
    """Tell whether a text is a URI and no path on this machine."""
    return _URI.match(given) is not None


def uri_of(path: Path) -> str:
    """Return the URI that a `Path` was made of, with both slashes."""
    return str(path).replace(":/", "://", 1)
