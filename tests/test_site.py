"""The documentation site: its strict build, and that it needs no network."""

import os
import re
import sys
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.conftest import ended, skip_without
from tests.support.page import new_page

ROOT = Path(__file__).parent.parent
LOADS = {"script": "src", "img": "src", "iframe": "src", "source": "srcset", "link": "href"}
"""Attributes by which a tag makes the browser load something."""
NO_LOAD = {"canonical", "next", "prev", "sitemap", "license"}
"""Values of `rel` with which a link tag loads nothing."""


class Loads(HTMLParser):
    """Collects the addresses that a page makes the browser load."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if tag in LOADS and values.get("rel") not in NO_LOAD and (address := values.get(LOADS[tag])):
            self.found.append(address)


@pytest.fixture(autouse=True, scope="module")
def _mkdocs() -> None:
    skip_without([] if find_spec("mkdocs") else ["mkdocs (make .venv/.dev)"])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the site of this repository, built as `make docs` does: a dead link would fail."""
    path = tmp_path_factory.mktemp("site")
    built = ended(
        sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", path,
        cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )  # fmt: skip
    assert built.returncode == 0, built.stderr
    return path


def test_the_site_loads_only_what_it_has(site: Path) -> None:
    """Each script, style sheet, picture or font that a page loads is a file of the site."""
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > len(list((ROOT / "docs").rglob("*.md")))
    for page in pages:
        loads = Loads()
        loads.feed(page.read_text())
        assert loads.found
        for address in loads.found:
            path = (page.parent / address.partition("#")[0].partition("?")[0]).resolve()
            # the page for a wrong address is served from any folder: its addresses begin at the root
            path = site / address.lstrip("/") if page.name == "404.html" else path
            assert address.startswith("data:") or path.is_file(), (page, address)
    for sheet in site.rglob("*.css"):
        assert re.findall(r"(?:@import|url\()\s*['\"]?(?:https?:)?//[^)]*", sheet.read_text()) == [], sheet


def test_the_pages_at_the_root_are_on_the_site(site: Path) -> None:
    """CONTRIBUTING.md and CHANGELOG.md are pages; their links lead to pages."""
    page = (site / "contributing.html").read_text()
    assert re.search(r'href="[\w/]*architecture\.html"', page)
    assert "docs/" not in "".join(re.findall(r'href="([^"#]*)', page))
    assert (site / "changelog.html").exists()


SOUGHT = {
    "resume after a crash": "how-to/resume.html",
    "CUDA out of memory": "troubleshooting.html#cuda-out-of-memory",
    "use from pandas": "how-to/python.html",
    "odd column names": "how-to/prompts.html",
    "NA in CSV": "how-to/data.html#csv",
    "S3": "how-to/object-stores.html",
    "docker": "run-on/docker.html",
    "retry failed rows": "how-to/resume.html#retry-failed-rows",
    "max_new_tokens": "how-to/values-by-row.html",
    "merge to CSV": "how-to/data.html#merge-to-csv-and-other-formats",
}
"""What people look for, and where they should find it among the first results."""
RESULTS = "[...document.querySelectorAll('.md-search-result__link')].slice(0, 4).map(a => a.href).join(' ')"


@pytest.mark.browser
async def test_the_search_finds_it(site: Path, tmp_path: Path) -> None:
    """Opened as files, without a server: the search finds pages, and nothing is asked of the network."""
    async with new_page(tmp_path) as page:
        for sought, found in SOUGHT.items():
            await page.open((site / "index.html").as_uri(), width=1300, height=900, dark=False)
            await page.run("document.querySelector('[data-md-component=search-query]').focus()")
            await page.call("Input.insertText", text=sought)
            links = [re.sub(r"\?[^#]*", "", link) for link in (await page.wait_for(RESULTS)).split()]
            assert f"{site.as_uri()}/{found}" in links, sought
        assert page.complaints == []
        assert [url for url in page.requested if not url.startswith(("file:", "data:", "blob:"))] == []


@pytest.mark.browser
@pytest.mark.parametrize("width", [390, 1300])
async def test_no_page_is_wider_than_the_screen(site: Path, tmp_path: Path, width: int) -> None:
    """Wide tables and code scroll by themselves, on a phone too."""
    async with new_page(tmp_path) as page:
        for path in sorted(site.rglob("*.html")):
            await page.open(path.as_uri(), width=width, height=900, dark=True)
            assert await page.run("document.documentElement.scrollWidth") <= width, path.name
