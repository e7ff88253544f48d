"""Reads JSON files that may be missing or damaged, such as those of a model directory."""

import json
from pathlib import Path
from typing import Any

from batchrunner.core.regular_files import read_regular


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; {} where the file is missing or holds no valid JSON object."""
    try:
        found = json.loads(read_regular(path).decode())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
