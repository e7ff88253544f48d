"""Versions of this package and of the SGLang that it is tested with."""

import functools
import re
from importlib.metadata import PackageNotFoundError, requires, version

SOURCE_TREE = "from a source tree"
"""Stands for the version where this package is not installed."""


@functools.cache
def installed_version(name: str) -> str | None:
    """Return the version of an installed package; None where it is not installed, as in a source tree.

    It is looked up once: what this process has imported does not change.
    """
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def version_lines() -> list[str]:
    """Return the lines of `batchrun --version`."""
    own = installed_version("batchrunner")
    needed = requires("batchrunner") or [] if own else []
    found = [match[1] for text in needed if (match := re.match(r"sglang==([\w.]+)", text))]
    lines = [f"batchrun {own or SOURCE_TREE}"]
    if found:
        lines.append(f"SGLang {found[0]} (tested); other releases of 0.4 and 0.5 should work")
    return lines
