"""The pages for people: their links, the files and targets that they name, and the help of `make`."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCS = sorted((ROOT / "docs").glob("*.md"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *DOCS]
LINK = re.compile(r"\]\(([^)\s]+)\)")
NAMED_FILE = re.compile(r"`((?:\.ci|batchrunner|benchmarks|docs|jobs|tests)/[\w./*-]*)`")
TARGET = re.compile(r"\bmake ([a-z]+(?:-[a-z]+)*)(?![\w-]*…)")


def prose(page: Path) -> str:
    """Return a page without its blocks of code."""
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> list[str]:
    """Return the anchors of a page's headings, as GitHub and mkdocs make them."""
    headings = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]


def links(page: Path) -> list[tuple[str, Path, str]]:
    """Return a page's relative links: as written, the file, the anchor."""
    found = [link for link in LINK.findall(prose(page)) if "://" not in link]
    parts = [(link, *link.partition("#")[::2]) for link in found]
    return [(link, (page.parent / path).resolve() if path else page, anchor) for link, path, anchor in parts]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    """Each relative link is to a file that exists, and each anchor is a heading of it."""
    for link, path, anchor in links(page):
        assert path.exists(), link
        assert not anchor or anchor in anchors(path), link


@pytest.mark.parametrize("page", DOCS, ids=lambda page: page.name)
def test_docs_can_become_a_site(page: Path) -> None:
    """A page in docs/ has one title, and its links stay in docs/."""
    assert len(re.findall(r"^# ", prose(page), re.MULTILINE)) == 1
    for link, path, _ in links(page):
        assert path.parent == ROOT / "docs", link


def test_the_index_lists_every_page() -> None:
    """Each page is linked once from docs/index.md and from README.md."""
    pages = [page for page in DOCS if page.name != "index.md"]
    for start in (ROOT / "docs" / "index.md", ROOT / "README.md"):
        linked = {path for _, path, _ in links(start)}
        assert set(pages) <= linked, start


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_named_files_exist(page: Path) -> None:
    """A file of this repository that a page names is there."""
    for name in NAMED_FILE.findall(page.read_text()):
        assert list(ROOT.glob(name.rstrip("/"))), name


def targets() -> set[str]:
    """Return the targets of the Makefile that are no files, as make itself knows them."""
    done = subprocess.run(["make", "-npq"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    (phony,) = re.findall(r"^\.PHONY: (.+)$", done.stdout, re.MULTILINE)
    return set(phony.split())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_named_targets_exist(page: Path) -> None:
    """A target of `make` that a page names is there."""
    code = " ".join(re.findall(r"```.*?```|`[^`]+`", page.read_text(), re.DOTALL))
    assert set(TARGET.findall(code)) <= targets()


def test_make_help_has_every_target() -> None:
    """Every target without a dot or a slash is phony, and has its line of help."""
    names = re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert set(names) == targets()
    help_text = subprocess.run(
        ["make", "help"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert set(re.findall(r"^  make (\S+) +\S", help_text.stdout, re.MULTILINE)) == targets()


def test_the_readme_is_short() -> None:
    """The README fits on two screens; the rest is in docs/."""
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120
