"""The pages for people: their links, the files and targets that they name, and the help of `make`."""

import json
import re
import tomllib
from pathlib import Path

import pytest

from batchrunner.core.errors import EXIT_MEANINGS, install_command
from tests.conftest import ended

ROOT = Path(__file__).parent.parent
DOCS = sorted((ROOT / "docs").rglob("*.md"))
ASSETS = ROOT / "docs" / "assets"
STARTS = [ROOT / "README.md", ROOT / "docs" / "index.md"]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *DOCS]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(([^)\s]+)\)")
NAMED_FILE = re.compile(r"`((?:\.ci|batchrunner|benchmarks|docs|jobs|tests)/[\w./*-]*)`")
TARGET = re.compile(r"\bmake ([a-z]+(?:-[a-z0-9]+)*)(?![\w-]*…)")


def name_of(page: Path) -> str:
    """Return a page's path in the repository."""
    return page.relative_to(ROOT).as_posix()


def prose(page: Path) -> str:
    """Return a page without its blocks of code."""
    return BLOCK.sub("", page.read_text())


def code(page: Path, language: str = "") -> str:
    """Return a page's blocks of code in a language."""
    return "".join(block for name, block in BLOCK.findall(page.read_text()) if name == language)


def anchors(page: Path) -> list[str]:
    """Return the anchors of a page's headings, as GitHub and mkdocs make them."""
    headings = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]


def links(page: Path) -> list[tuple[str, Path, str]]:
    """Return a page's relative links: as written, the file, the anchor."""
    found = [link for link in LINK.findall(prose(page)) if "://" not in link]
    parts = [(link, *link.partition("#")[::2]) for link in found]
    return [(link, (page.parent / path).resolve() if path else page, anchor) for link, path, anchor in parts]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    """Each relative link is to a file that exists, and each anchor is a heading of it."""
    for link, path, anchor in links(page):
        assert path.exists(), link
        assert not anchor or anchor in anchors(path), link


@pytest.mark.parametrize("page", DOCS, ids=name_of)
def test_a_page_begins_with_what_it_is_for(page: Path) -> None:
    """Below its only title is a paragraph: no code, table, list, heading or remark."""
    assert len(re.findall(r"^# ", prose(page), re.MULTILINE)) == 1
    below_title = f"\n{page.read_text()}".partition("\n# ")[2].partition("\n")[2].lstrip("\n")
    assert re.match(r"(\*\*|\[|`(?!``))?\w", below_title), below_title[:80]


@pytest.mark.parametrize("start", STARTS, ids=name_of)
def test_every_page_is_near(start: Path) -> None:
    """Each page in docs/ is two links away at most, from docs/index.md and from README.md."""
    near = {path for _, path, _ in links(start)}
    near |= {path for page in near & set(DOCS) for _, path, _ in links(page)}
    assert set(DOCS) - near - {start} == set()


SEARCHED = {
    "multi-turn": "how-to/rollouts.md",
    "agent": "how-to/rollouts.md",
    "llm as a judge": "how-to/rollouts.md",
    "synthetic": "how-to/rollouts.md",
    "tool calls": "how-to/whole-answers.md",
    "structured output": "how-to/json-answers.md",
    "guided decoding": "how-to/json-answers.md",
    "multimodal": "how-to/images.md",
    "embeddings": "how-to/embeddings.md",
    "rate limits": "how-to/filters-and-limits.md",
    "spare capacity": "how-to/background.md",
    "flag tuning": "how-to/adapt.md",
    "autotuning": "how-it-works/tuning.md",
    "speculative decoding": "how-to/speculative-decoding.md",
    "n-gram": "how-to/speculative-decoding.md",
    "batch api": "how-to/serve.md",
    "resume": "how-to/resume.md",
    "large datasets": "how-to/large-runs.md",
    "billion rows": "how-to/large-runs.md",
}
"""Words that people search for, and the page that they should find."""


@pytest.mark.parametrize("words", SEARCHED)
def test_pages_have_the_words_that_people_search_for(words: str) -> None:
    """The words are in docs/index.md, and in the page's title or its first paragraph."""
    assert words in " ".join((ROOT / "docs" / "index.md").read_text().lower().split())
    title, first_paragraph, *_ = (ROOT / "docs" / SEARCHED[words]).read_text().lower().split("\n\n")
    assert words in " ".join(f"{title} {first_paragraph}".split())


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_named_files_exist(page: Path) -> None:
    """A file of this repository that a page names is there."""
    for name in NAMED_FILE.findall(page.read_text()):
        assert list(ROOT.glob(name.rstrip("/"))), name


def targets() -> set[str]:
    """Return the targets of the Makefile that are no files, as make itself knows them."""
    done = ended("make", "-npq", cwd=ROOT)
    (phony,) = re.findall(r"^\.PHONY: (.+)$", done.stdout, re.MULTILINE)
    return set(phony.split())


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_named_targets_exist(page: Path) -> None:
    """A target of `make` that a page names is there."""
    named = [code(page), code(page, "sh"), *re.findall(r"`[^`]+`", prose(page))]
    assert set(TARGET.findall("\n".join(named))) <= targets()


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PINNED = dict(re.findall(r"^([\w.-]+)==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
INSTALLED = re.compile(r"""pip (?:install|wheel) .*?['"](batchrunner|\.)\[([\w,]+)\](==[\d.]+)?['"].*""")


@pytest.mark.parametrize("page", [*PAGES, ROOT / "batchrunner"], ids=name_of)
def test_extras_are_installed_from_a_clone(page: Path) -> None:
    """The package is on no index: it is `.` in a clone, or comes from a folder that the command names."""
    files = [page] if page.is_file() else sorted(page.rglob("*.py"))
    text = re.sub(r"\bpip\s+install\s+", "pip install ", "\n".join(file.read_text() for file in files))
    assert "install batchrunner[" not in text
    for command in INSTALLED.finditer(text):
        name, extras, version = command.groups()
        assert name == "." or "--find-links" in command[0], command[0]
        assert version in {None, f"=={PROJECT['version']}"}, command[0]
        assert {*extras.split(",")} <= PROJECT["optional-dependencies"].keys(), command[0]


def test_the_command_that_messages_name() -> None:
    """It is one of the page on installing, and works for each extra."""
    command = install_command("engine").partition(": ")[2]
    assert command in (ROOT / "docs" / "start" / "install.md").read_text()


def test_supported_versions_are_those_of_the_tests() -> None:
    """The page names the versions that pyproject.toml asks for and constraints.txt pins."""
    page = (ROOT / "docs" / "start" / "versions.md").read_text()
    extras = PROJECT["optional-dependencies"]
    ray = extras["ray"][0].removeprefix("ray[data]")
    assert f"- Python: {PROJECT['requires-python'].removeprefix('>=')} or newer" in page
    assert f"- SGLang: {PINNED['sglang']}. This is the version of the extra `engine`" in page
    assert extras["engine"] == [f"sglang=={PINNED['sglang']}"]
    assert f"- Model Gateway (`smg`): {PINNED['smg']}, the version in the tests" in page
    assert re.findall(r"\bRay (\d\S*)", page) == [PINNED["ray"]]
    assert f"the extra `ray` takes `{ray}`" in page


def test_the_figures_of_the_readme() -> None:
    """The README's figures of a GPU stand in its section of the benchmarks, to which other pages link."""
    speed = re.search(
        r"^- \*\*Speed\*\*: (.*?)^$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL
    )
    assert speed
    (card,) = re.findall(r"on one (H\d+)", speed[1])
    section = (
        (ROOT / "docs" / "benchmarks.md")
        .read_text()
        .partition(f"## On one {card}\n")[2]
        .partition("\n## ")[0]
    )
    figures = re.findall(r"\d+\.\d+|\d[\d,]{2,}", speed[1].replace(card, ""))
    assert len(figures) >= 4
    assert [figure for figure in figures if figure not in section] == []
    assert [name_of(page) for page in PAGES if "not on a GPU yet" in prose(page)] == []
    for page in ("who-it-is-for.md", "versions.md"):
        text = (ROOT / "docs" / "start" / page).read_text()
        assert f"(../benchmarks.md#on-one-{card.lower()})" in text, page


def test_the_client_figures_of_the_comparison() -> None:
    """The rows/s, the ratios and the kills that two pages give are the same on both."""
    comparison = (ROOT / "docs" / "comparison.md").read_text()
    benchmarks = (ROOT / "docs" / "benchmarks.md").read_text()
    for figure in ("1.11 [0.85, 1.25]", "8,288", "0.99 [0.94, 1.03]", "1,062 kills"):
        assert figure in comparison
        assert figure in benchmarks


def test_the_figures_of_large_runs() -> None:
    """The tables on large runs have the figures of the last measurements."""
    page = (ROOT / "docs" / "how-to" / "large-runs.md").read_text()
    results = ROOT / "benchmarks" / "results"
    sizes = json.loads((results / "resume.json").read_text())["runs"]
    costs = [cost for size in sizes for case, cost in size["measured"].items() if case != "joined_status"]
    assert len(costs) >= 20
    for cost in costs:
        assert f"{cost['cpu_s']:.1f} s, {cost['peak_mb']:.0f} MB" in page
    for run in json.loads((results / "many_workers.json").read_text())["runs"]:
        cells = run["operations_a_second_mean"], run["operations_a_second_worst_worker"]
        assert f"| {run['workers']:,} | {cells[0]} | {cells[1]} |" in page


@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "docs" / "troubleshooting.md"], ids=name_of)
def test_exit_codes_after_which_a_run_resumes(page: Path) -> None:
    """Pages that say "run it again" of exit codes agree with the page on resuming."""
    resume = re.search(
        r"\[exit codes\]\(\S+\) ([\d, and]+) run the command again",
        (ROOT / "docs" / "how-to" / "resume.md").read_text(),
    )
    assert resume
    again = set(re.findall(r"\d+", resume[1]))
    text = page.read_text()
    rows = re.findall(r"^\| ([\d, ]+) \|.*run it again", text, re.MULTILINE)
    lists = re.findall(r"run the same command again \(([\d, ]+)\)", " ".join(text.split()))
    assert {code for codes in [*rows, *lists] for code in re.findall(r"\d+", codes)} == again
    assert again == {str(code) for code in EXIT_MEANINGS} - {"0", "2", "3"}


def test_make_help_has_every_target() -> None:
    """Every target without a dot or a slash is phony, and has its line of help."""
    names = re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert set(names) == targets()
    help_text = ended("make", "help", cwd=ROOT)
    assert set(re.findall(r"^  make (\S+) +\S", help_text.stdout, re.MULTILINE)) == targets()


def test_the_readme_is_short() -> None:
    """The README fits on two screens; the rest is in docs/."""
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


def test_pictures_are_small_and_used() -> None:
    """Each picture in docs/assets/ is on a page, has less than 300 kB, and loads nothing."""
    pages = "".join(page.read_text() for page in PAGES)
    for picture in [*ASSETS.glob("*.svg"), *ASSETS.glob("*.png")]:
        assert f"assets/{picture.name}" in pages, picture.name
        assert picture.stat().st_size < 300_000, picture.name
        if picture.suffix == ".svg":
            assert re.findall(r"(?:href=|url\()['\"]?(?:https?:)?//[^'\")]*", picture.read_text()) == []
