"""The wheel that a user installs: built, installed in an environment of its own, and run there."""

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml

import batchrunner
from tests.conftest import ended, job_of, rows_in

ROOT = Path(__file__).parent.parent.parent
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "batchrunner")
DATA = (
    "batchrunner/py.typed",
    "batchrunner/report/html/page.css",
    "batchrunner/report/html/page.html",
    "batchrunner/report/html/page.js",
    "batchrunner/serve/page.css",
    "batchrunner/serve/page.html",
    "batchrunner/serve/page.js",
    "batchrunner/sglang/cpu_shim/sgl_kernel/__init__.py",
    "batchrunner/engines/launched/launcher.py",
)


def command(*args: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a program that sees nothing of this checkout, and return what it printed."""
    env = {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "PYTHONHOME"}}
    done = ended(*args, cwd=cwd, env=env)
    assert done.returncode == 0, f"{args}\n{done.stdout}\n{done.stderr}"
    return done


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from the sdist, which is built from a copy of the sources."""
    copy = tmp_path_factory.mktemp("sources")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, copy)
    command(sys.executable, "-m", "build", "--no-isolation", "--outdir", "dist", ".", cwd=copy)
    assert len(list((copy / "dist").glob("*.tar.gz"))) == 1
    (built,) = (copy / "dist").glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `bin` of a new environment with the wheel in it, which borrows the dependencies of this one."""
    home = tmp_path_factory.mktemp("environment")
    venv.create(home)
    pip = (sys.executable, "-m", "pip", "--python", home / "bin" / "python")
    command(*pip, "install", "--no-index", "--no-deps", wheel, cwd=home)
    (packages,) = home.glob("lib/python*/site-packages")
    # a line of a .pth file adds a folder to the path, but not what that folder's own .pth files name
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return home / "bin"


def test_the_wheel_has_every_file(wheel: Path) -> None:
    """Every module is in it, and the files that are data: the page's template, the CPU shim, py.typed."""
    names = set(zipfile.ZipFile(wheel).namelist())
    package = ROOT / "batchrunner"
    modules = {f"batchrunner/{path.relative_to(package)}" for path in package.rglob("*.py")}
    assert modules | set(DATA) <= names


def test_the_installed_command(installed: Path, tmp_path: Path) -> None:
    """`batchrun` and `python -m batchrunner` are the same command, of the wheel and not of this checkout.

    A job of simulated answers is done, and its page is written.
    """
    where = command(
        installed / "python", "-c", "import batchrunner; print(batchrunner.__file__)", cwd=tmp_path
    )
    assert Path(where.stdout.strip()).is_relative_to(installed.parent)
    assert "Example: batchrun" in command(installed / "batchrun", "--help", cwd=tmp_path).stdout
    version = command(installed / "python", "-m", "batchrunner", "--version", cwd=tmp_path).stdout
    assert version.splitlines()[0] == f"batchrun {batchrunner.__version__}"
    job: dict[str, Any] = job_of(tmp_path, rows=10)
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    command(installed / "batchrun", "job.yaml", cwd=tmp_path)
    assert rows_in(job) == list(range(10))
    command(installed / "batchrun", "report", "run", cwd=tmp_path)
    assert (tmp_path / "run" / "report.html").stat().st_size > 0
