"""Rules of the house that a machine can check: one-way imports, light imports, names, docstrings, help."""

import ast
import functools
import sys
from collections import Counter
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import batchrunner
from tests.conftest import ROOT, ended, job_of, write_job
from tests.support.blocks import parsed
from tests.support.fake_sglang import FakeSGLang
from tests.support.scheduling import GROUPS, group_of

PACKAGE = Path(batchrunner.__file__).parent
FOLDERS = (
    "core", "job", "output", "input", "sglang", "tuning", "engines", "report", "dispatch",
    "runner", "forecast", "api", "ray", "serve", "cli",
)  # fmt: skip
"""The package's folders and files, each of which imports only from those before it."""
FILES = {
    path.relative_to(PACKAGE).with_suffix("").as_posix().replace("/", "."): path
    for path in sorted(PACKAGE.rglob("*.py"))
    if "cpu_shim" not in path.parts
}


@functools.cache
def trees() -> dict[Path, ast.Module]:
    """Return the syntax trees of the package's files."""
    return {path: parsed(path.read_text(encoding="utf-8")) for path in FILES.values()}


@functools.cache
def imports_of(path: Path) -> set[str]:
    """Return the modules of the package that a file imports anywhere, for types too."""
    found = set()
    for node in ast.walk(trees()[path]):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            module = node.module or ""
            names = [module, *(f"{module}.{alias.name}" for alias in node.names)]
        found |= {name.removeprefix("batchrunner.") for name in names if name.startswith("batchrunner.")}
    return found & set(FILES)


def test_the_folders_are_those_of_the_list() -> None:
    """The package has these folders and files at its top, and no others."""
    found = {path.stem for path in PACKAGE.iterdir() if path.name != "__pycache__"}
    assert found - {"__init__", "__main__", "py"} == set(FOLDERS)


@pytest.mark.parametrize("folder", FOLDERS)
def test_folders_import_one_way(folder: str) -> None:
    """A folder imports only from itself and from those before it."""
    allowed = FOLDERS[: FOLDERS.index(folder) + 1]
    wrong = [
        f"{name} imports {other}"
        for name, path in FILES.items()
        if name.split(".")[0] == folder
        for other in imports_of(path)
        if other.split(".")[0] not in allowed
    ]
    assert wrong == []


FOLDERS_WITHIN = sorted({path.parent for path in FILES.values()} - {PACKAGE})


@pytest.mark.parametrize("folder", FOLDERS_WITHIN, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_no_circle_of_imports(folder: Path) -> None:
    """The files of a folder do not import each other in a circle; a folder in it counts as one file."""
    prefix = ".".join(folder.relative_to(PACKAGE).parts) + "."
    imported: dict[str, set[str]] = {}
    for name, path in FILES.items():
        if name.startswith(prefix) and path.name != "__init__.py":
            own = name.removeprefix(prefix).split(".")[0]
            others = (other.removeprefix(prefix) for other in imports_of(path) if other.startswith(prefix))
            imported.setdefault(own, set()).update({other.split(".")[0] for other in others} - {own})
    in_order = TopologicalSorter(imported).static_order()  # a circle is a CycleError, which names its files
    assert imported.keys() <= {*in_order}


def test_msgspec_reads_types_with_decoders_of_modules() -> None:
    """msgspec inspects a type when it is used first, and crashes where two threads do so at once.

    A decoder that a module makes has inspected it while the module was imported, which one thread does.
    """
    wrong = [
        f"{path}:{call.lineno}: {ast.unparse(call)}"
        for path, tree in trees().items()
        for function in ast.walk(tree)
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        for call in ast.walk(function)
        if isinstance(call, ast.Call) and _inspects_a_type(call)
    ]
    assert wrong == []


def _inspects_a_type(call: ast.Call) -> bool:
    """Tell whether a call gives msgspec a type to read."""
    name = ast.unparse(call.func)
    if name in {"msgspec.json.Decoder", "msgspec.msgpack.Decoder", "msgspec.convert"}:
        return True
    return name.startswith("msgspec.") and any(keyword.arg == "type" for keyword in call.keywords)


def test_class_names_are_unique() -> None:
    """Who searches for a class finds one."""
    classes = Counter(
        node.name for tree in trees().values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)
    )
    assert [name for name, count in classes.items() if count > 1] == []


def test_tests_mirror_the_package() -> None:
    """`tests/<folder>/test_<module>.py` tests that module; e2e has tests of whole runs, support helpers."""
    tests = ROOT / "tests"
    files = (path.relative_to(tests) for path in tests.rglob("test_*.py"))
    mirrored = (path for path in files if len(path.parts) > 1 and path.parts[0] != "e2e")
    modules = {path: PACKAGE / path.with_name(path.name.removeprefix("test_")) for path in mirrored}
    assert [str(path) for path, module in modules.items() if not module.exists()] == []


def loaded_by(code: str) -> set[str]:
    """Return the modules that are loaded after some code in a fresh interpreter."""
    script = f"{code}\nimport sys; print(*sys.modules)"
    done = ended(sys.executable, "-c", script)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.splitlines()[-1].split())


LIGHT = {"pyarrow", "aiohttp", "pydantic", "jinja2"}
HEAVY = {*LIGHT, "torch", "sglang", "transformers", "pandas", "ray"}


@pytest.mark.parametrize(
    ("code", "absent"),
    [
        ("import batchrunner", HEAVY),
        ("import batchrunner.cli; batchrunner.cli.app(['--help'], standalone_mode=False)", HEAVY),
        ("import batchrunner.runner.run, batchrunner.engines.launched.fleet", HEAVY - LIGHT - {"ray"}),
    ],
    ids=["import", "help", "attach"],
)
def test_nothing_heavy_is_imported_early(code: str, absent: set[str]) -> None:
    """Import and help are fast; attaching to a server needs no SGLang or torch, which may be missing."""
    assert not loaded_by(code) & absent


MOST_MODULES = 108
"""Modules of the package, its folders included, that a plain attached run imports; 90 is the goal."""


def test_a_plain_run_imports_few_modules(tmp_path: Path, server: FakeSGLang) -> None:
    """Functions, media, batches, other engines and the like are imported by the jobs that use them."""
    file = str(write_job(job_of(tmp_path, server), tmp_path))
    modules = loaded_by(
        "import batchrunner.cli, sys\n"
        f"sys.argv[1:] = [{file!r}, '--quiet']\n"
        "try:\n"
        "    batchrunner.cli.main()\n"
        "except SystemExit as end:\n"
        "    assert not end.code\n"
    )
    ours = sorted(name for name in modules if name.partition(".")[0] == "batchrunner")
    assert len(ours) <= MOST_MODULES, ours


@pytest.mark.parametrize("samples", [1, 3])
def test_the_commands_load_no_pandas(tmp_path: Path, samples: int) -> None:
    """pyarrow would import it, where it is installed, for lists that become a column: 0.5 s."""
    job = job_of(
        tmp_path, order="prefix", input={"filter": "id > 2"}, accept={"regex": "a|b"},
        sampling={"n": samples}, output={"part_rows": 4},
        limits={"max_failed_rows": 10, "abort_failed_share": 1},
    )  # fmt: skip
    file, run = str(write_job(job, tmp_path)), str(tmp_path / "run")
    commands = [
        ["check", file], [file, "--set", "input.limit=5"], [file], ["status", run], ["merge", run],
        ["advise", run], ["merge", run, str(tmp_path / "a.csv")],
    ]  # fmt: skip
    loaded = loaded_by(
        "import batchrunner.cli, contextlib, io, sys\n"
        f"for words in {commands}:\n"
        "    sys.argv[1:] = words\n"
        "    try:\n"
        "        with contextlib.redirect_stdout(io.StringIO()):\n"
        "            batchrunner.cli.main()\n"
        "    except SystemExit as ended:\n"
        "        assert not ended.code\n"
    )
    assert {"pyarrow", "duckdb"} <= loaded
    assert "pandas" not in loaded


def test_groups_of_tests_name_what_there_is() -> None:
    """A file or test that is renamed keeps its group, so that its engine or cluster is started once."""
    for group, beginnings in GROUPS.items():
        for beginning in beginnings:
            nodeid = beginning if beginning.startswith("tests/") else f"tests/e2e/{beginning}"
            file, _, test = nodeid.partition("::")
            assert f"def {test}" in (ROOT / file).read_text(), nodeid
            assert group_of(nodeid) == group


def test_every_real_engine_is_started_in_a_group() -> None:
    """No more than three engines run at the same time, whatever files are added."""
    files = (ROOT / "tests" / "e2e").glob("test_real_*.py")
    assert {group_of(f"tests/e2e/{file.name}::test") for file in files} <= {"replicas", "answers", "deaths"}
