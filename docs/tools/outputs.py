"""Write the pasted output in the docs again, from a run of each page: what `make docs-outputs` does."""

import os
import tempfile
from pathlib import Path

from tests.support.blocks import PROGRESS, ROOT, PageReader, blocks_of


def main() -> None:
    """Run each page that has pasted output, and put what its commands print into it."""
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        if any(block.is_output for block in blocks_of(page)):
            text = page.read_text(encoding="utf-8")
            for (start, end), printed in reversed(outputs(page)):
                text = text[:start] + printed + text[end:]
            page.write_text(text, encoding="utf-8")
            print(page.relative_to(ROOT))


def outputs(page: Path) -> list[tuple[tuple[int, int], str]]:
    """Return where the outputs of a page are pasted, and what they should be."""
    found, before = [], Path.cwd()
    with tempfile.TemporaryDirectory() as directory:
        os.chdir(directory)
        try:
            reader = PageReader(Path(directory))
            for block in blocks_of(page):
                reader.take(block)
                if block.is_output:
                    found.append((block.span, f"{PROGRESS.sub('', reader.printed).strip()}\n"))
        finally:
            os.chdir(before)
    return found


if __name__ == "__main__":
    main()
