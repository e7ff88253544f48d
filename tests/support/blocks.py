"""The fenced blocks of the pages for people, and a reader who follows them and sees what they print."""

import ast
import contextlib
import gc
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.conftest import batchrun
from tests.support.server_thread import PATIENCE_S

ROOT = Path(__file__).parent.parent.parent
FENCE = re.compile(
    r"(?:^[ ]*<!-- (?:not run: (?P<reason>[^\n]*?)|(?P<output>output)) -->\n+)?"
    r"^(?P<indent>[ ]*)```(?P<language>[\w+-]*)[^\n`]*\n(?P<text>.*?)^(?P=indent)```[ ]*$",
    re.DOTALL | re.MULTILINE,
)
OPERATORS = re.compile(r"[;|&<>()]+")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: Path
    line: int
    """Line of its fence, from 1."""
    language: str
    text: str
    reason: str | None
    """Why it is not run, from the comment `<!-- not run: REASON -->` before it."""
    span: tuple[int, int]
    """Where its text begins and ends in the page."""
    is_output: bool
    """Whether it is what the block of shell before it prints: it has the comment `<!-- output -->`."""

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks_of(page: Path) -> list[Block]:
    """Return the blocks of a page, in order."""
    text = page.read_text(encoding="utf-8")
    found = []
    for fence in FENCE.finditer(text):
        indent = len(fence["indent"])
        body = "".join(line[indent:] for line in fence["text"].splitlines(keepends=True))
        line = text.count("\n", 0, fence.start("language")) + 1
        found.append(
            Block(
                page,
                line,
                fence["language"],
                body,
                fence["reason"],
                fence.span("text"),
                bool(fence["output"]),
            )
        )
    return found


def logical_lines(text: str) -> list[str]:
    """Return the commands of a shell block, a line each: a backslash at the end joins two lines."""
    joined = re.sub(r"\\\n\s*", " ", text)
    return [line for line in joined.splitlines() if line.strip() and not line.lstrip().startswith("#")]


def commands_in(line: str, program: str) -> list[list[str]]:
    """Return the arguments of each call of a program in a line of shell, wherever it is started from."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split, lexer.commenters = True, "#"
    found: list[list[str]] = []
    inside: list[str] | None = None
    for token in lexer:
        if OPERATORS.fullmatch(token):
            inside = None
        elif inside is None and token.rpartition("/")[2] == program:
            found.append(inside := [])
        elif inside is not None:
            inside.append(token)
    return found


def is_plain(line: str) -> bool:
    """Tell whether a line of shell is one call of `batchrun`, which needs no shell."""
    return len(commands_in(line, "batchrun")) == 1 and re.match(r"batchrun [^|&;<>$`]*$", line) is not None


SAVED_AS = re.compile(r"# ([\w./-]+\.(?:yaml|py))\s*$", re.MULTILINE)
PROGRESS = re.compile(r"^\d\d:\d\d:\d\d .*\n", re.MULTILINE)
"""A line of progress: how many there are depends on the machine."""
FIGURE = re.compile(r"(?:\d+ h )?(?:\d+ min )?\d[\d.,]*")


def without_figures(printed: str) -> str:
    """Return what a command printed without what differs by run: times, speeds, lines of progress."""
    return FIGURE.sub("0", PROGRESS.sub("", printed)).strip()


class PageReader:
    """Follows the blocks of a page in a directory, which is the current one."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.printed = ""
        """Output and log of the last block of shell."""

    def take(self, block: Block) -> None:
        """Do what a block says, if it is not marked as `not run`; raises what its Python raises."""
        if block.reason is not None:
            return
        if block.language in {"python", "yaml"} and (name := SAVED_AS.match(block.text)):
            (self._directory / name[1]).write_text(block.text)
        if block.language == "python" and "import ray" in block.text:
            self._run(block, [sys.executable, "-c", block.text], os.environ)  # Ray stays in its process
        elif block.language == "python":
            exec(compile(block.text, str(block), "exec"), {"__name__": "__main__"})
        if block.language == "sh":
            plain = all(map(is_plain, logical_lines(block.text)))
            self.printed = self._in_this_process(block) if plain else self._in_a_shell(block)

    def _in_this_process(self, block: Block) -> str:
        """Run calls of `batchrun`, which is faster so."""
        printed = ""
        for line in logical_lines(block.text):
            done = batchrun(*commands_in(line, "batchrun")[0])
            assert done.exit_code == 0, f"{block}: {line}\n{done.output}"
            printed += done.output
        return printed

    def _in_a_shell(self, block: Block) -> str:
        script = self._directory / ".bin" / "batchrun"
        script.parent.mkdir(exist_ok=True)
        script.write_text(f'#!/bin/sh\nexec {sys.executable} -m batchrunner "$@"\n')
        script.chmod(0o755)
        environ = {**os.environ, "PATH": f"{script.parent}:{os.environ['PATH']}"}
        return self._run(block, ["bash", "-euo", "pipefail", "-c", block.text], environ)

    def _run(self, block: Block, command: Sequence[str], environ: Mapping[str, str]) -> str:
        """Run a program, which must end well; return what it prints."""
        ended = subprocess.run(
            command, cwd=self._directory, env={**environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=PATIENCE_S, check=False,
        )  # fmt: skip
        assert ended.returncode == 0, f"{block}\n{ended.stdout}"
        return ended.stdout


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Collect no garbage meanwhile.

    A finalizer that shows an exception parses source too, and CPython 3.11 then fails the parse that it
    interrupts: "AST constructor recursion depth mismatch" (python/cpython#106905).
    """
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def parsed(text: str) -> ast.Module:
    """Return the syntax tree of Python text."""
    with no_collection():
        return ast.parse(text)
