"""Every block of code in the pages for people is run or validated, or says why it is not.

A page is run as a reader would do it: from its first block to its last, in an empty directory. A block that
cannot run here has the comment `<!-- not run: REASON -->` on the line before it; its commands and fields are
validated all the same. A block of YAML or Python that begins with a comment such as `# job.yaml` is saved
under that name.
"""

import ast
import json
import re
from pathlib import Path

import pytest
import typer
import yaml

import batchrunner
from batchrunner.cli import app
from batchrunner.job.load import load_job
from batchrunner.job.spec import Job
from tests.support.blocks import (
    Block,
    PageReader,
    blocks_of,
    commands_in,
    logical_lines,
    parsed,
    without_figures,
)
from tests.test_docs import PAGES, name_of, prose, targets

BLOCKS = {page: blocks_of(page) for page in PAGES}
ALL = [block for blocks in BLOCKS.values() for block in blocks]
SHOWN_ONLY = {"", "text", "dockerfile", "console"}
"""Languages of blocks that are read only: pasted output, drawings, forms."""
RUNNABLE = {"sh", "python", "yaml", "json"}
COMMAND_NAMES = ("batchrun", "make", "pip", "python", "python3", "uv", "docker", "apptainer")


def of(language: str) -> list[Block]:
    """Return the blocks in a language, wherever they are."""
    return [block for block in ALL if block.language == language]


def test_the_blocks_are_found() -> None:
    """As many blocks are found as there are pairs of fences."""
    fences = sum(len(re.findall(r"^ *```[^`\n]*$", page.read_text(), re.MULTILINE)) for page in PAGES)
    assert fences == 2 * len(ALL)
    reasons = sum(len(re.findall(r"^ *<!-- not run:", page.read_text(), re.MULTILINE)) for page in PAGES)
    assert reasons == sum(block.reason is not None for block in ALL), (
        "the comment stands directly before its block"
    )


@pytest.mark.parametrize("block", ALL, ids=str)
def test_a_block_says_what_it_is(block: Block) -> None:
    """A block has a known language, and one with commands is `sh`."""
    assert block.language in SHOWN_ONLY | RUNNABLE
    if block.language in {"", "text"} and not block.is_output and "reference" not in block.page.parts:
        begins = [line.split(" ")[0] for line in block.text.splitlines()]
        assert set(begins) & set(COMMAND_NAMES) == set(), "begin the block with ```sh"


@pytest.mark.parametrize("block", [*of("sh"), *of(""), *of("text"), *of("console")], ids=str)
def test_commands_are_spelled_right(block: Block) -> None:
    """Each call of `batchrun` is of a command that there is, with options that it takes; so is make's."""
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    lines = logical_lines(block.text)
    if block.language != "sh":  # in pasted output commands follow a prompt
        lines = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
    for line in lines:
        for name, *args in commands_in(line, "batchrun"):
            if name == "--version":
                continue
            full = [name, *args] if name in commands else ["run", name, *args]
            commands[full[0]].make_context(full[0], full[1:])
        for args in commands_in(line, "make"):
            assert {arg for arg in args if "=" not in arg and not arg.startswith("-")} <= targets()


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_in_a_sentence_have_known_options(page: Path) -> None:
    """A command that a sentence names, such as `batchrun report RUN`, has the options that stand with it."""
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    for span in re.findall(r"`batchrun ([^`]+)`", prose(page)):
        words = span.split()
        command = commands.get(words[0], commands["run"])
        known = {
            option for parameter in command.params for option in [*parameter.opts, *parameter.secondary_opts]
        }
        own = span.partition(" -- ")[0]  # what follows is for another program
        assert set(re.findall(r"--[a-z][a-z-]*", own)) <= known | {"--help", "--version"}, span


@pytest.mark.parametrize("block", of("yaml"), ids=str)
def test_a_job_is_valid(block: Block) -> None:
    """Each document of a block of YAML is a job, or sections of one: the schema takes it."""
    whole = {
        "input": {"path": "rows.parquet"},
        "prompt": {"user": "{{ text }}"},
        "output": {"path": "out/run"},
        "engine": {"kind": "simulated"},
    }
    for tree in yaml.safe_load_all(block.text):
        assert tree, "a job has sections"
        is_job = isinstance(tree, dict) and set(tree) <= set(Job.model_fields)
        if block.reason is None or is_job:
            load_job(whole | tree)


@pytest.mark.parametrize("block", [*of("python"), *of("json")], ids=str)
def test_code_is_spelled_right(block: Block) -> None:
    """JSON can be read; Python compiles, and uses only what `batchrunner` and `batchrunner.ray` export."""
    if block.language == "json":
        json.loads(block.text)
        return
    used = set()
    for node in ast.walk(parsed(block.text)):
        if isinstance(node, ast.Attribute):
            used.add(ast.unparse(node))
        elif isinstance(node, ast.ImportFrom):
            used |= {f"{node.module}.{name.name}" for name in node.names}
    names = {f"batchrunner.{name}" for name in batchrunner.__all__}
    on_ray = {"batchrunner.ray", "batchrunner.ray.generate"}
    assert {name for name in used if re.match(r"batchrunner\.(ray\.)?\w+$", name)} <= names | on_ray


@pytest.mark.parametrize("page", [page for page, blocks in BLOCKS.items() if blocks], ids=name_of)
def test_the_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks of a page run one after the other in an empty directory; none fails.

    A block with the comment `<!-- output -->` is what the block of shell before it printed, but for figures.
    """
    monkeypatch.chdir(tmp_path)
    reader = PageReader(tmp_path)
    for block in BLOCKS[page]:
        reader.take(block)
        if block.is_output:
            assert without_figures(block.text) == without_figures(reader.printed), "run `make docs-outputs`"
