"""The pages of reference: they are what the code makes, and nothing that a user can meet is missing."""

import ast
import json
import re
from dataclasses import fields
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

from batchrunner.cli.commands import EXIT_CODES
from batchrunner.core import errors
from batchrunner.core.engine_info import Incident
from batchrunner.dispatch.concurrency.law import Decision
from batchrunner.dispatch.reorder import DistanceChange
from batchrunner.input.order import OrderDecision
from batchrunner.output.events import read_events
from docs.tools.reference.command_line import commands
from docs.tools.reference.environment import READ, SET
from docs.tools.reference.job_file import field_paths
from docs.tools.reference.pages import FOLDER, pages
from tests.conftest import ROOT, batchrun, job_of, printed, report_of, write_job
from tests.support.fake_sglang import FakeSGLang
from tests.test_layout import trees

MADE = pages()
KEYS = re.compile(r"^- (`\w+`(?:, `\w+`)*): ", re.MULTILINE)
NO_VARIABLES = {
    "LABEL_": "the beginning of the name of a class",
    "SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION": "a variable of SGLang that advice names",
    "SC_AVPHYS_PAGES": "a name of sysconf",
    "SC_PAGE_SIZE": "a name of sysconf",
    "STRICT_SPREAD": "a strategy of Ray",
}


def keys_below(page: str, heading: str) -> set[str]:
    """Return the keys of the list below a heading of a page."""
    (_, below) = (FOLDER / page).read_text(encoding="utf-8").split(f"\n{heading}\n", 1)
    cells = KEYS.findall(re.split(r"^#", below, maxsplit=1, flags=re.MULTILINE)[0])
    return set(re.findall(r"\w+", " ".join(cells)))


def fields_of_events() -> dict[str, set[str]]:
    """Return the fields of each event on its page."""
    headings = re.findall(r"^## ([\w, ]+)$", (FOLDER / "events.md").read_text(encoding="utf-8"), re.MULTILINE)
    known = {heading: keys_below("events.md", f"## {heading}") for heading in headings}
    return {
        name: keys
        for heading, keys in known.items()
        if heading != "Every event"
        for name in heading.split(", ")
    }


@pytest.mark.parametrize(
    "name", sorted({*MADE, *(path.name for path in FOLDER.glob("*.md"))} - {"events.md"})
)
def test_the_page_is_what_the_code_makes(name: str) -> None:
    """A page in docs/reference/ is made by `make docs-reference`, and each thing on it has a meaning."""
    path = FOLDER / name
    assert path.exists(), "run `make docs-reference`"
    assert path.read_text(encoding="utf-8") == MADE.get(name), "run `make docs-reference`"
    assert re.findall(r"^- .*: *$", MADE[name], re.MULTILINE) == []


FIELDS = field_paths()


def test_each_job_field_has_a_description() -> None:
    """Each field of the schema has a docstring in `job/`."""
    assert [path for path, field in FIELDS.items() if not field.get("description")] == []


@pytest.mark.parametrize("name", [name for name in commands() if name])
def test_each_option_is_explained(name: str) -> None:
    """Each command has its heading and names its options, each of which has its help."""
    command, page = commands()[name], MADE["command-line.md"]
    section = page.split(f"\n## batchrun {name}\n", 1)[1].split("\n## ")[0]
    for parameter in command.params:
        assert parameter.help, f"give {parameter.name} a help text"
        assert f": {parameter.help}" in page
        option = parameter.opts[0] if parameter.param_type_name == "option" else parameter.metavar
        assert option in section
    assert command.help


def calls_of_write() -> list[ast.Call]:
    """Return the calls in the package that write an event."""
    calls = (node for tree in trees().values() for node in ast.walk(tree) if isinstance(node, ast.Call))
    return [
        call
        for call in calls
        if isinstance(call.func, ast.Attribute)
        and call.func.attr == "write"
        and ast.unparse(call.func.value).endswith("events")
    ]


def test_each_event_is_explained() -> None:
    """The page of events has each event that the package writes, with the fields that it gives."""
    events = fields_of_events()
    names = {f"engine_{what}" for what in get_args(get_type_hints(Incident)["what"])}
    for call in calls_of_write():
        if isinstance(call.args[0], ast.JoinedStr):
            continue
        given = {keyword.arg for keyword in call.keywords if keyword.arg}
        for name in (node.value for node in ast.walk(call.args[0]) if isinstance(node, ast.Constant)):
            assert given <= events[str(name)], name
            names.add(str(name))
    assert set(events) == names
    for name, kind in {"window": Decision, "order": OrderDecision, "lead": DistanceChange}.items():
        assert {field.name for field in fields(kind)} == events[name]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the job file of a run that has ended, and of which some rows failed."""
    path = tmp_path_factory.mktemp("run")
    job = job_of(path, rows=30, prompt={"text": "{{ text }}{{ 1 / (id % 9) }}"})
    file = write_job({**job, "limits": {"max_failed_rows": 9}}, path)
    assert batchrun("run", file, "-q").exit_code == 0
    return file


def test_the_events_of_a_run_are_explained(job: Path) -> None:
    """An event in a real log has no field that the page lacks."""
    events = list(read_events(job.parent / "run" / "events.jsonl"))
    assert {"start", "window", "order", "sample", "end"} <= {event["event"] for event in events}
    kinds = fields_of_events()
    for event in events:
        assert set(event) - keys_below("events.md", "## Every event") <= kinds[event["event"]]


def test_the_keys_of_json_are_explained(job: Path, server: FakeSGLang, tmp_path: Path) -> None:
    """Each key that commands print with --json, and of report.json, is on the page, and no other."""
    run = job.parent / "run"
    told, saved = printed("run", job), json.loads((run / "report.json").read_text())
    shared = job_of(tmp_path, server)
    printed("run", write_job(shared, tmp_path))
    check, status, advice = printed("check", job), printed("status", run), printed("advise", run)
    comparison = printed("report", run, run)
    page = printed("report", run)
    for heading, found in {
        "## report --json": {**page, **comparison},
        "### answers": comparison["answers"][0],
        "## report.json": saved,
        "### load": saved["load"],
        "### failures": saved["failures"][0],
        "### sharing": report_of(shared)["sharing"],
        "## check --json": check,
        "## status --json": status,
        "### tasks": status["tasks"][0],
        "## advise --json": advice,
    }.items():
        assert set(found) == keys_below("json-output.md", heading), heading
    assert set(told) == set(saved)


def test_each_exit_code_is_explained() -> None:
    """Each constant and each error's exit code is on the page, in the command's help and in the README."""
    codes = {
        value for name, value in vars(errors).items() if name.startswith("EXIT_") and isinstance(value, int)
    }
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    codes |= {kind.exit_code for kind in kinds if issubclass(kind, errors.BatchrunError)}
    assert set(errors.EXIT_MEANINGS) == codes
    assert set(map(int, re.findall(r"^- (\d+): ", MADE["exit-codes.md"], re.MULTILINE))) == codes
    help_text, readme = EXIT_CODES, (ROOT / "README.md").read_text()
    for code in codes:
        assert re.search(rf"\b{code}\b", help_text)
        assert re.search(rf"^\|.*\b{code}\b.*\|", readme, re.MULTILINE)


def test_each_environment_variable_is_explained() -> None:
    """Each text in the package that is spelled like an environment variable is on the page."""
    texts = {
        node.value
        for tree in trees().values()
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    variables = {text for text in texts if re.fullmatch(r"PYTHON[A-Z]+|[A-Z][A-Z0-9]*(_[A-Z0-9]*)+", text)}
    assert set(NO_VARIABLES) <= variables
    told = {name for names in (*READ, *SET) for name in names.split(", ")}
    assert variables - set(NO_VARIABLES) - told == set(), "add it to docs/tools/reference/environment.py"
