"""Pages of a document as a job or a row writes them, such as `1-3,7`."""

import re

_PAGES = re.compile(r"\s*\d+\s*(-\s*\d+\s*)?(,\s*\d+\s*(-\s*\d+\s*)?)*")


def page_ranges(pages: str) -> list[range]:
    """Return ranges of page numbers, counted from 1; raises ValueError, whose text says what is wrong."""
    if not _PAGES.fullmatch(pages):
        raise ValueError(f"pages are `all`, a number, or ranges such as 1-3,7 (got {pages!r})")
    found = []
    for part in pages.split(","):
        first, _, last = part.partition("-")
        found.append(range(int(first), int(last or first) + 1))
        if found[-1].start < 1 or not found[-1]:
            raise ValueError(f"pages are counted from 1, and a range goes up (got {part.strip()!r})")
    return found
