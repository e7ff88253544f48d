"""The directory of our files that may be deleted at any time, except while a run uses them."""

import os
from pathlib import Path


def cache_directory() -> Path:
    """Return the directory of our files, in XDG_CACHE_HOME or ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if Path(base).is_absolute() else Path.home() / ".cache") / "batchrunner"
