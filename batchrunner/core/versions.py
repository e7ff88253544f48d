"""Versions of this package and of the SGLang that it is tested with."""

import re
from importlib.metadata import PackageNotFoundError, requires, version


def version_lines() -> list[str]:
    """Return the lines of `batchrun --version`."""
    try:
        own, needed = version("batchrunner"), requires("batchrunner") or []
    except PackageNotFoundError:  # run from a source tree
        own, needed = "from a source tree", []
    found = [match[1] for text in needed if (match := re.match(r"sglang==([\w.]+)", text))]
    lines = [f"batchrun {own}"]
    if found:
        lines.append(f"SGLang {found[0]} (tested); other releases of 0.4 and 0.5 should work")
    return lines
