"""Syntax trees of Python text."""

from __future__ import annotations

import ast
import contextlib
import gc
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


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
