"""Style of all pages, and the hashes of inline scripts and styles for a content security policy."""

import base64
import hashlib
from pathlib import Path


def page_style() -> str:
    """Return the style that the page of a run and the page of `batchrun serve` share."""
    return Path(__file__).with_name("page.css").read_text(encoding="utf-8")


def source_hash(text: str) -> str:
    """Return the source expression of a content security policy that allows an inline script or style."""
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"'sha256-{digest}'"
