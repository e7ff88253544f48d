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
        self.tree = tree
        found = _free_names(tree, environment, available)
        self._reads_mapping = ROW in found
        reads = [
            (node.node, name)
            for node, name in self._fields()
            if isinstance(node.node, tree_of.Name) and node.node.name == ROW
        ]
        if self._reads_mapping:
            uses = [name.ctx for name in tree.find_all(tree_of.Name) if name.name == ROW]
            names = {name for _, name in reads if name in available or name not in _METHODS}
            is_each_named = len(reads) == len(uses) and {*uses} == {"load"}
            every = not is_each_named or None in names or len(names) < len({name for _, name in reads})
            found = found - {ROW} | (set(available) if every else {name for name in names if name})
        for name in sorted(found):
            if name not in available:
                unknown, hint = unknown_column(where, name, available, in_template=True)
                raise JobError(unknown, hint=hint)
        self.names = sorted(found)
        self.printed = sorted(found.intersection(self._printed()))
        """Columns that the template shows as they are, or through filters that do."""

    def variables(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return what the template gets for a row: its columns, and the mapping of them where it is read."""
        return {**row, ROW: row} if self._reads_mapping else row

    def _fields(self) -> Iterator[tuple[tree_of.Getitem | tree_of.Getattr, str | None]]:
        """Yield each place where a field is read, with its name; None for one that is computed."""
        for get in self.tree.find_all(tree_of.Getattr):
            yield get, get.attr
        for item in self.tree.find_all(tree_of.Getitem):
            name = item.arg.value if isinstance(item.arg, tree_of.Const) else None
            yield item, name if isinstance(name, str) else None

    def _printed(self) -> Iterator[str]:
        """Yield the names of what the template prints."""
        fields = {id(node): name for node, name in self._fields()}
        for output in self.tree.find_all(tree_of.Output):
            for node in output.nodes:
                shown: tree_of.Expr | None = node
                while isinstance(shown, tree_of.Filter) and shown.name in PRINTING:
                    shown = shown.node
                if isinstance(shown, tree_of.Name):
                    yield shown.name
                elif isinstance(shown, (tree_of.Getattr, tree_of.Getitem)):
                    of_row = isinstance(shown.node, tree_of.Name) and shown.node.name == ROW
                    name = fields[id(shown)]
                    if of_row and name is not None:
                        yield name


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
    names = ", ".join(column or '""' for column in available)
    if mark := other_separator(available):
        write = f"{mark!r} separates no columns here: write the file with commas, or as Parquet"
        return f"{where}: unknown column {name!r}; {write} (the input has: {names})", write
    near = difflib.get_close_matches(name, available, n=1, cutoff=0.5)
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
