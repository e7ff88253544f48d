"""Which columns a template reads: by their names, or through `row`, the mapping of all columns."""

import difflib
import json
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import jinja2.meta
import jinja2.nodes as tree_of
from jinja2.sandbox import SandboxedEnvironment
from jinja2.visitor import NodeTransformer

from batchrunner.core.errors import JobError

FILTERS_TO_TEXT = (
    "string", "upper", "lower", "trim", "title", "capitalize", "replace", "center", "truncate", "wordwrap",
    "indent", "striptags", "escape", "e", "forceescape", "urlize", "wordcount",
)  # fmt: skip
"""Filters of jinja2 that would turn a null into the text "None", and bytes into "b'…'"."""
PRINTING = frozenset({*FILTERS_TO_TEXT, "default", "d", "safe", "tojson"})
"""Filters whose result shows the value that they are given."""
ROW = "row"
"""Name of the mapping of all columns in a template, unless a column has this name."""
_ALL_COLUMNS = "_batchrunner_columns"
"""Name that stands for the mapping where a column is called `row`."""
_TAKEN = {ROW, "self", "true", "false", "none", "not", "and", "or", "in", "is", "if", "else"}
"""Words of templates, which do not read columns of these names."""
_OTHER_SEPARATORS = (";", "\t", "|")
"""Characters between the columns of files that are CSV to others."""
_METHODS = {"items", "keys", "values", "get"}
"""Methods of a mapping, by which a template may read any column."""


class ColumnsRead:
    """The columns that a template reads, `names`, and the variables that it gets for a row."""

    def __init__(
        self,
        tree: tree_of.Template,
        environment: SandboxedEnvironment,
        where: str,
        available: Collection[str],
    ) -> None:
        """Look through a template; raises JobError, naming `where`, for an unknown column."""
        if any(name.name == "self" for name in tree.find_all(tree_of.Name)):
            raise JobError(
                f"{where}: `self` is a template's own name: no column can be read by it",
                hint='write row["self"]' if "self" in available else None,
            )
        self._where = where
        self._available = available
        own_row = ROW in available
        stored = any(name.name == ROW and name.ctx != "load" for name in tree.find_all(tree_of.Name))
        if own_row and not stored:
            tree = _RowOfColumns(available).visit(tree)
        self.tree = tree
        found = _free_names(tree, environment, available)
        self._mapping = next((name for name in (_ALL_COLUMNS, ROW) if name in found), None)
        if self._mapping == ROW and own_row:
            self._mapping = None
        if self._mapping:
            found = found - {self._mapping} | self._through_row(self._mapping, every=stored)
        for name in sorted(found):
            if name not in available:
                meant = _meant(name, tree, available)
                unknown, hint = unknown_column(where, name, available, meant, in_template=True)
                raise JobError(unknown, hint=hint)
        self.names = sorted(found)
        self.printed = sorted(found.intersection(self._printed()))
        """Columns that the template shows as they are, or through filters that do."""

    def variables(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return what the template gets for a row: its columns, and the mapping of them where it is read."""
        if self._mapping is None:
            return row
        if self._mapping == _ALL_COLUMNS and isinstance(row.get(ROW), dict):
            return {**row, self._mapping: {**row, **row[ROW]}}  # a field of the struct `row` comes first
        return {**row, self._mapping: row}

    def _printed(self) -> Iterator[str]:
        """Yield the names of what the template prints."""
        for output in self.tree.find_all(tree_of.Output):
            for node in output.nodes:
                shown: tree_of.Expr | None = node
                while isinstance(shown, tree_of.Filter) and shown.name in PRINTING:
                    shown = shown.node
                if isinstance(shown, tree_of.Name):
                    yield shown.name
                elif isinstance(shown, (tree_of.Getattr, tree_of.Getitem)):
                    of_row = isinstance(shown.node, tree_of.Name) and shown.node.name == self._mapping
                    name = shown.attr if isinstance(shown, tree_of.Getattr) else _constant(shown.arg)
                    if of_row and name is not None:
                        yield name

    def _through_row(self, mapping: str, *, every: bool) -> set[str]:
        """Return the columns that are read through `row`: all of them unless each is named."""
        reads: list[tree_of.Getitem | tree_of.Getattr] = []
        for kind in (tree_of.Getitem, tree_of.Getattr):
            for node in self.tree.find_all(kind):
                assert isinstance(node, tree_of.Getitem | tree_of.Getattr)
                if isinstance(node.node, tree_of.Name) and node.node.name == mapping:
                    reads.append(node)
        uses = sum(name.name == mapping for name in self.tree.find_all(tree_of.Name))
        names: set[str] = set()
        for node in reads:
            name = node.attr if isinstance(node, tree_of.Getattr) else _constant(node.arg)
            if name is None or (name in _METHODS and name not in self._available):
                every = True
            else:
                names.add(name)
        return set(self._available) if every or len(reads) < uses else names


class _RowOfColumns(NodeTransformer):
    """Lets `row["name"]` mean a column where another column is called `row`."""

    def __init__(self, available: Collection[str]) -> None:
        self._available = available

    def visit_Getitem(self, node: tree_of.Getitem) -> tree_of.Node:  # noqa: N802 - jinja2 calls it so
        """Read the column of this name from all columns."""
        self.generic_visit(node)
        is_row = isinstance(node.node, tree_of.Name) and node.node.name == ROW
        if is_row and _constant(node.arg) in self._available:
            node.node = tree_of.Name(_ALL_COLUMNS, "load", lineno=node.lineno)
        return node


def _constant(node: tree_of.Expr) -> str | None:
    return node.value if isinstance(node, tree_of.Const) and isinstance(node.value, str) else None


def _free_names(
    tree: tree_of.Template, environment: SandboxedEnvironment, available: Collection[str]
) -> set[str]:
    """Return the names that are neither the template's own nor jinja2's: a column wins over the latter.

    jinja2 reports a variable that only one branch of an `if` sets as undeclared. It is the template's own all
    the same, except for `row`, which may mean the mapping of all columns in the other branch.
    """
    bare = environment.overlay()
    bare.globals = {}
    tree.set_environment(bare)
    names = jinja2.meta.find_undeclared_variables(tree)
    tree.set_environment(environment)
    others = (_names_set(tree) - {ROW}) | set(environment.globals)
    return names - (others - set(available))


def _names_set(tree: tree_of.Template) -> set[str]:
    """Return the names of a template's variables and macros."""
    names = {macro.name for macro in tree.find_all(tree_of.Macro)}
    for kind in (tree_of.Assign, tree_of.AssignBlock):
        for assignment in tree.find_all(kind):
            assert isinstance(assignment, tree_of.Assign | tree_of.AssignBlock)
            target = assignment.target
            found = [target] if isinstance(target, tree_of.Name) else target.find_all(tree_of.Name)
            names |= {name.name for name in found if name.ctx == "store"}
    return names


def _meant(name: str, tree: tree_of.Template, available: Collection[str]) -> str | None:
    """Return the column whose name has dots, and which a template reads as if it were fields of `name`."""
    paths = {_path(node).removeprefix(f"{ROW}.") for node in tree.find_all(tree_of.Getattr)}
    return next((path for path in sorted(paths & set(available)) if path.startswith(f"{name}.")), None)


def _path(node: tree_of.Node) -> str:
    """Return a name with its fields, as the template has them; empty for other expressions."""
    if isinstance(node, tree_of.Name):
        return node.name
    path = _path(node.node) if isinstance(node, tree_of.Getattr) else ""
    return f"{path}.{node.attr}" if isinstance(node, tree_of.Getattr) and path else ""


def unknown_column(
    where: str, name: str, available: Collection[str], meant: str | None = None, *, in_template: bool = False
) -> tuple[str, str | None]:
    """Return the error text for a missing column, and the hint in it.

    The hint names the column that is `meant`, or the most similar one.
    """
    names = ", ".join(column or '""' for column in available)
    if mark := other_separator(available):
        write = f"{mark!r} separates no columns here: write the file with commas, or as Parquet"
        return f"{where}: unknown column {name!r}; {write} (the input has: {names})", write
    near = [meant] if meant is not None else difflib.get_close_matches(name, available, n=1, cutoff=0.5)
    near = near or [column for column in available if name in column.split() or column.startswith(name)][:1]
    hint = f"did you mean {written(near[0], in_template=in_template)}?" if near else None
    how = odd_names(available) if in_template else None
    text = f"{where}: unknown column {name!r}{f'; {hint}' if hint else ''} (the input has: {names})"
    return (f"{text}; {how}" if how else text), hint or how


def other_separator(names: Collection[str]) -> str | None:
    """Return the character in the name of an only column that separates columns elsewhere; None without."""
    return next(
        (mark for mark in _OTHER_SEPARATORS for name in names if len(names) == 1 and mark in name), None
    )


def template_of_column(name: str) -> str:
    """Return the expression by which a template reads a column, whatever its name."""
    plain = name.isidentifier() and name.isascii() and name.lower() not in _TAKEN
    return name if plain else f"{ROW}[{json.dumps(name, ensure_ascii=False)}]"


def odd_names(available: Collection[str]) -> str | None:
    """Return how a template reads columns whose names are no identifiers; None where there are none."""
    odd = next((name for name in available if name and not name.isidentifier()), None)
    if odd is None:
        return None
    return f"a column whose name is not an identifier is written {written(odd, in_template=True)}"


def written(name: str, *, in_template: bool) -> str:
    """Return a column as a job names it; in a template some names can only be read through `row`."""
    if in_template and not name.isidentifier():
        return f"row[{json.dumps(name, ensure_ascii=False)}]"
    return repr(name)
