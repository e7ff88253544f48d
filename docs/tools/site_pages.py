"""Hooks of the documentation site: pages that live outside docs/, and links to files that are no pages."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[2]
OUTSIDE = {"CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md", "README.md": "index.md"}
"""Files at the root of the repository, and the pages that the site has for them."""
WEIGHTS = {"troubleshooting.md": 2.0, "how-to/": 2.0, "changelog.md": 0.5}
"""How much the search prefers pages, by the beginning of their path; 1 where there is none."""
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")
CODE = re.compile(r"(^```.*?^```$)", re.DOTALL | re.MULTILINE)


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that live at the root of the repository."""
    for name, page in OUTSIDE.items():
        if files.get_file_from_path(page) is None:
            files.append(File.generated(config, page, abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrite links between files of the repository as links between pages of the site; weigh the page."""
    for begin, weight in WEIGHTS.items():
        if page.file.src_uri.startswith(begin):
            page.meta["search"] = {"boost": weight}
    source = next((name for name, to in OUTSIDE.items() if to == page.file.src_uri), None)
    source = source if source and not (ROOT / "docs" / page.file.src_uri).exists() else None
    here = source or f"docs/{page.file.src_uri}"
    parts = CODE.split(markdown)  # every second one is a block of code
    parts[::2] = [
        LINK.sub(lambda link: _rewritten(link, here, page.file.src_uri), text) for text in parts[::2]
    ]
    return "".join(parts)


def _rewritten(link: re.Match[str], here: str, page: str) -> str:
    """Return a link as the site has it; one to a file that is no page becomes its text.

    `here` is the path of the file that has the link, from the root of the repository. A link to a file that
    does not exist is left as it is: the strict build reports it.
    """
    image, text, target = link.groups()
    path, hash_sign, anchor = target.partition("#")
    if not path or "://" in path or path.startswith("mailto:"):
        return link[0]
    linked_file = posixpath.normpath(posixpath.join(posixpath.dirname(here), path))
    in_site = OUTSIDE.get(linked_file) or (
        linked_file.removeprefix("docs/") if linked_file.startswith("docs/") else None
    )
    if in_site is not None:
        relative = posixpath.relpath(in_site, posixpath.dirname(page) or ".")
        return f"{image}[{text}]({relative}{hash_sign}{anchor})"
    return text if (ROOT / linked_file).exists() and not image else link[0]
