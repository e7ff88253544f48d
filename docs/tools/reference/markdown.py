"""Pieces of Markdown, and the docstrings below fields."""

import ast
import inspect
import re
import textwrap
from collections.abc import Iterable
from dataclasses import fields


def meanings(entries: Iterable[tuple[str, str]]) -> str:
    """Return a list of names (several may be separated by commas) with their meanings."""
    return named((", ".join(f"`{name}`" for name in names.split(", ")), text) for names, text in entries)


def named(entries: Iterable[tuple[str, str]]) -> str:
    """Return a list of Markdown texts with their meanings."""
    return "\n".join(f"- {one_line(thing)}: {one_line(text)}" for thing, text in entries)


def one_line(text: str) -> str:
    """Return a text without line breaks."""
    return re.sub(r"\s+", " ", text).strip()


def fenced(text: str, language: str = "") -> str:
    """Return a block of code."""
    return f"```{language}\n{text.strip()}\n```"


def paragraphs(docstring: str | None) -> str:
    """Return a docstring's text with each paragraph on one line."""
    parts = re.split(r"\n\s*\n", inspect.cleandoc(docstring or ""))
    return "\n\n".join(one_line(part) for part in parts)


def field_docs(kind: type) -> dict[str, str]:
    """Return the docstrings below the fields of a dataclass; empty for a field that has none."""
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(body, ast.ClassDef)
    docs: dict[str, str] = {}
    for node, below in zip(body.body, [*body.body[1:], ast.Pass()], strict=True):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            match below:
                case ast.Expr(value=ast.Constant(value=str(text))):
                    docs[node.target.id] = one_line(text)
                case _:
                    docs[node.target.id] = ""
    return docs


def field_list(kind: type) -> str:
    """Return the fields of a dataclass as a list."""
    docs = field_docs(kind)
    return meanings((field.name, docs[field.name]) for field in fields(kind))
