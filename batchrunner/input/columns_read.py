"""Which columns a template reads: by their names, or through `row`, the mapping of all columns."""

import difflib
import json
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import jinja2.meta
import jinja2.nodes as tree_of
from jinja2.sandbox import SandboxedEnvironment

from batchrunner.core.errors import JobError

FILTERS_TO_TEXT = (
    "string", "upper", "lower", "trim", "title", "capitalize", "replace", "center", "truncate", "wordwrap",
    "indent", "striptags", "escape", "e", "forceescape", "urlize", "wordcount",
)  # fmt: skip
"""Filters of jinja2 that would turn a null into the text "None", and bytes into "b'…'"."""
PRINTING = frozenset({*FILTERS_TO_TEXT, "default", "d", "safe", "tojson"})
"""Filters whose result shows the value that they are given."""
ROW = "row"
"""Name of the mapping of all columns in a template."""
_TAKEN = {ROW, "self", "true", "false", "none", "not", "and", "or", "in", "is", "if", "else"}
"""Words of templates, which do not read columns of these names."""
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
        self.tree = tree
        found = _free_names(tree, environment, available)
        self._reads_mapping = ROW in found
        if self._reads_mapping:
            fields = [_field_of_row(node) for node in tree.find_all((tree_of.Getattr, tree_of.Getitem))]
            names = {name for name in fields if name and (name in available or name not in _METHODS)}
            uses = sum(name.name == ROW for name in tree.find_all(tree_of.Name))
            is_each_named = sum(name in names for name in fields) == uses
            found = found - {ROW} | (names if is_each_named else {*available})
        for name in sorted(found):
            if name not in available:
                unknown, hint = unknown_column(where, name, available, in_template=True)
                raise JobError(unknown, hint=hint)
        self.names = sorted(found)
        self.printed = sorted(found.intersection(_printed(tree)))
        """Columns that the template shows as they are, or through filters that do."""

    def variables(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return what the template gets for a row: its columns, and the mapping of them where it is read."""
        return {**row, ROW: row} if self._reads_mapping else row


def _field_of_row(node: tree_of.Node) -> str | None:
    """Return the name of the column that an expression such as `row.name` or `row["name"]` reads."""
    if not isinstance(node, (tree_of.Getattr, tree_of.Getitem)) or not isinstance(node.node, tree_of.Name):
        return None
    if node.node.name != ROW:
        return None
    name = node.attr if isinstance(node, tree_of.Getattr) else getattr(node.arg, "value", None)
    return name if isinstance(name, str) else None


def _printed(tree: tree_of.Template) -> Iterator[str | None]:
    """Yield the names of what a template prints."""
    for output in tree.find_all(tree_of.Output):
        for node in output.nodes:
            shown: tree_of.Expr = node
            while isinstance(shown, tree_of.Filter) and shown.name in PRINTING and shown.node:
                shown = shown.node
            yield shown.name if isinstance(shown, tree_of.Name) else _field_of_row(shown)


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
    own = {macro.name for macro in tree.find_all(tree_of.Macro)}
    own |= {name.name for name in tree.find_all(tree_of.Name) if name.ctx == "store"}
    others = (own - {ROW}) | set(environment.globals)
    return names - (others - set(available))


def unknown_column(
    where: str, name: str, available: Collection[str], *, in_template: bool = False
) -> tuple[str, str | None]:
    """Return the error text for a missing column, and the hint in it, which names the most similar one."""
    near = difflib.get_close_matches(name, available, n=1, cutoff=0.5)
    near = near or [column for column in available if name in column.split() or column.startswith(name)][:1]
    hint = f"did you mean {written(near[0], in_template=in_template)}?" if near else None
    if len(available) == 1 and any(mark in column for mark in ";\t|" for column in available):
        hint = "write the file with commas, or as Parquet"
    elif not near and in_template:
        hint = odd_names(available)
    names = ", ".join(column or '""' for column in available)
    return f"{where}: unknown column {name!r}{f'; {hint}' if hint else ''} (the input has: {names})", hint


def template_of_column(name: str) -> str:
    """Return the expression by which a template reads a column, whatever its name."""
    plain = name.isidentifier() and name.isascii() and name.lower() not in _TAKEN
    return name if plain else f"{ROW}[{json.dumps(name, ensure_ascii=False)}]"


def odd_names(available: Collection[str]) -> str | None:
    """Return how a template reads columns whose names are no identifiers; None where there are none."""
    odd = next((name for name in available if name and not name.isidentifier()), None)
    return odd and f"a column whose name is not an identifier is written {template_of_column(odd)}"


def written(name: str, *, in_template: bool) -> str:
    """Return a column as a job names it; in a template some names can only be read through `row`."""
    return template_of_column(name) if in_template and not name.isidentifier() else repr(name)
