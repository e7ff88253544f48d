"""What a fresh Python interpreter loads."""

from __future__ import annotations

import subprocess
import sys

from tests.support.server_thread import PATIENCE_S


def loaded_by(code: str) -> set[str]:
    """Return the modules that are loaded after some code in a fresh interpreter."""
    script = f"{code}\nimport sys; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=PATIENCE_S, check=True
    )
    return set(done.stdout.splitlines()[-1].split())
