"""Write a few thousand real documents, without a network: the standard library's docstrings.

One row for each docstring of the running interpreter's standard library, read with `ast`, so that
nothing is imported. `pip install pyarrow` is all it needs.

Example: python jobs/prepare_docs.py data/docs.parquet
"""

from __future__ import annotations

import argparse
import ast
import inspect
import sysconfig
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq

if TYPE_CHECKING:
    from collections.abc import Iterator

DOCS = Path("data/docs.parquet")
# 200 would do on a full CPython, but not where a distribution packs tkinter apart.
MIN_CHARS, MAX_CHARS = 150, 4000
ROWS_PER_GROUP = 500
SKIPPED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "idlelib", "lib2to3"}
KINDS = {
    ast.Module: "module",
    ast.ClassDef: "class",
    ast.FunctionDef: "function",
    ast.AsyncFunctionDef: "coroutine function",
}
Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def modules(stdlib: Path) -> Iterator[tuple[str, Path]]:
    """(dotted name, file) of each module under `stdlib`, test suites and packages' copies out."""
    for path in sorted(stdlib.rglob("*.py")):
        parts = path.relative_to(stdlib).with_suffix("").parts
        if SKIPPED.isdisjoint(parts) and all(part.isidentifier() for part in parts):
            yield ".".join(parts).removesuffix(".__init__"), path


def definitions(tree: ast.Module, module: str) -> Iterator[tuple[str, str, Documented]]:
    """(id, title, node) of the module and of all that is defined in it, however deep."""
    yield module, f"{module} (module)", tree
    waiting: list[tuple[ast.AST, str]] = [(tree, "")]
    while waiting:
        node, prefix = waiting.pop()
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                name = prefix + child.name
                kind = KINDS[type(child)]
                if isinstance(node, ast.ClassDef):
                    kind = "nested class" if kind == "class" else "method"
                yield f"{module}.{name}", f"{name} ({kind} of {module})", child
                waiting.append((child, f"{name}."))
            else:  # an `if` or a `try` around a definition adds no name
                waiting.append((child, prefix))


def documents(stdlib: Path) -> list[dict[str, str]]:
    """Make the rows (`id`, `title`, `text`), sorted by id; of texts with one id, the longest."""
    rows: dict[str, dict[str, str]] = {}
    for module, path in modules(stdlib):
        try:
            with warnings.catch_warnings():  # old escapes in old files
                warnings.simplefilter("ignore")
                tree = ast.parse(path.read_bytes())
        except SyntaxError:  # a template that only looks like a module
            continue
        for key, title, node in definitions(tree, module):
            text = inspect.cleandoc(ast.get_docstring(node, clean=False) or "")
            longest = len(rows[key]["text"]) if key in rows else MIN_CHARS - 1
            if longest < len(text) <= MAX_CHARS:
                rows[key] = {"id": key, "title": title, "text": text}
    return [rows[key] for key in sorted(rows)]


def write_docs(target: Path) -> int | None:
    """Write the documents to `target` and return how many; None if the file was there."""
    if target.exists():
        return None
    rows = documents(Path(sysconfig.get_path("stdlib")))
    schema = pa.schema([(name, pa.string()) for name in ("id", "title", "text")])
    table = pa.Table.from_pylist(rows, schema=schema)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.partial")
    pq.write_table(table, partial, row_group_size=ROWS_PER_GROUP, compression="zstd")
    partial.replace(target)
    return len(rows)


def main() -> None:
    """Parse the argument, write the file, print one line."""
    parser = argparse.ArgumentParser(description="Write the standard library's docstrings.")
    parser.add_argument("target", type=Path, nargs="?", default=DOCS, help="the Parquet file")
    target: Path = parser.parse_args().target
    rows = write_docs(target)
    print(f"{target}: " + ("already there" if rows is None else f"{rows} rows written"))


if __name__ == "__main__":
    main()
