"""Run the pages that have pasted output and update it: what `make docs-outputs` does."""

import os
import tempfile
from pathlib import Path

from tests.support.blocks import PROGRESS, ROOT, PageReader, blocks_of


def main() -> None:
    """Run each page that has pasted output, and paste what its commands print."""
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        if any(block.is_output for block in blocks_of(page)):
            text = page.read_text(encoding="utf-8")
            for (start, end), printed in reversed(outputs(page)):
                text = text[:start] + printed + text[end:]
            page.write_text(text, encoding="utf-8")
            print(page.relative_to(ROOT))


def outputs(page: Path) -> list[tuple[tuple[int, int], str]]:
    """Return the spans of a page's pasted outputs, each with what its command prints now."""
    spans: list[tuple[tuple[int, int], str]] = []
    directory_before = Path.cwd()
    with tempfile.TemporaryDirectory() as directory:
        os.chdir(directory)
        try:
            reader = PageReader(Path(directory))
            for block in blocks_of(page):
                reader.take(block)
                if block.is_output:
                    spans.append((block.span, f"{PROGRESS.sub('', reader.printed).strip()}\n"))
        finally:
            os.chdir(directory_before)
    return spans


if __name__ == "__main__":
    main()
