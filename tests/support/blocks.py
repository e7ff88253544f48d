"""The fenced blocks of the pages for people: what each is, and why it is not run where it is not."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

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
