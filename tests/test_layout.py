"""The house rules that a machine can keep: one-way imports, light imports, help that helps."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import batchrunner
from tests.conftest import batchrun
from tests.support.interpreter import loaded_by

PACKAGE = Path(batchrunner.__file__).parent
MAP = re.findall(r"^    ([a-z_.]+)  +\S", (batchrunner.__doc__ or "").split("says so:")[1], re.MULTILINE)


def modules() -> dict[str, Path]:
    """Return every module of the package, by its name without "batchrunner."."""
    found = {}
    for path in PACKAGE.rglob("*.py"):
        name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        if not name.endswith("__init__") and "cpu_shim" not in name:
            found[name] = path
    return found


def imports_of(path: Path) -> set[str]:
    """Return the modules of the package that a file imports anywhere, for types too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            module = node.module or ""
            names = [module, *(f"{module}.{alias.name}" for alias in node.names)]
        found |= {name.removeprefix("batchrunner.") for name in names if name.startswith("batchrunner.")}
    return found & set(modules())


def test_the_map_is_complete() -> None:
    """Every file has its line in the package's docstring, and every line its file."""
    assert len(MAP) == len(set(MAP))
    assert set(MAP) == set(modules())


@pytest.mark.parametrize("name", MAP)
def test_imports_go_one_way(name: str) -> None:
    """A file imports only from lines above its own."""
    above = set(MAP[: MAP.index(name)])
    assert imports_of(modules()[name]) <= above


HEAVY = {"pyarrow", "aiohttp", "pydantic", "jinja2", "torch", "sglang", "transformers", "pandas"}


@pytest.mark.parametrize(
    "code",
    [
        "import batchrunner",
        "import batchrunner.cli; batchrunner.cli.app(['--help'], standalone_mode=False)",
    ],
)
def test_nothing_heavy_is_imported_early(code: str) -> None:
    """The import and the help stay fast because they load none of the heavy packages."""
    assert not loaded_by(code) & HEAVY


def test_a_run_on_a_server_needs_no_engine_package() -> None:
    """Attaching to a server loads neither SGLang nor torch, which its users may not have."""
    code = "import batchrunner.runner.execute, batchrunner.engines.launched.server"
    assert not loaded_by(code) & {"torch", "sglang", "transformers", "pandas"}


@pytest.mark.parametrize(
    "command", ["run", "slurm", "check", "status", "merge", "report", "advise", "tune", "schema"]
)
def test_help_has_an_example(command: str) -> None:
    """Each command's help is a sentence and an example that names it or its default."""
    result = batchrun(command, "--help")
    assert result.exit_code == 0
    assert "Example: batchrun" in result.stdout


def test_help_of_all_lists_the_exit_codes() -> None:
    """The first help that one sees has an example and the exit codes."""
    text = " ".join(batchrun("--help").stdout.split())
    assert "Example: batchrun jobs/summarize.yaml" in text
    for code in ("0 done", "1 could not go on", "2 the job or its input", "3 done, but", "130/138/143"):
        assert code in text


def test_every_module_says_what_it_is() -> None:
    """A file begins with a docstring of what it is for."""
    without = [name for name, path in modules().items() if not ast.get_docstring(ast.parse(path.read_text()))]
    assert without == []
