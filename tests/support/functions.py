"""Modules of Python functions, as a job's author writes them beside the job file."""

from pathlib import Path
from textwrap import dedent

LABEL = dedent("""
    from typing import TypedDict

    class Label(TypedDict):
        first: str
        length: int
        words: list[str]

    def label(answer) -> Label:
        return {"first": answer.split()[0], "length": len(answer), "words": answer.split()}
""")
"""A function `label` of an answer."""


def write_module(directory: Path, code: str, name: str = "hooks") -> Path:
    """Write a module and return its path."""
    path = directory / f"{name}.py"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(dedent(code))
    return path
