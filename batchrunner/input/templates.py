"""Jinja2 templates and expressions over a row's columns, in a sandbox that cannot reach Python objects."""

from __future__ import annotations

import difflib
import json
from functools import cache, wraps
from typing import TYPE_CHECKING, Any

import jinja2
import jinja2.filters
import jinja2.meta
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from batchrunner.core.errors import JobError, RowRefusedError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

_TO_TEXT = (
    "string", "upper", "lower", "trim", "title", "capitalize", "replace", "center", "truncate", "wordwrap",
    "indent", "striptags", "escape", "e", "forceescape", "urlize", "wordcount",
)  # fmt: skip
"""Filters that make a null the text "None"."""


class NullValueError(ValueError):
    """A template printed a null, which would otherwise read "None" in the prompt."""


def is_template(text: str) -> bool:
    """Tell a template from a plain column name."""
    return "{{" in text or "{%" in text


class Template:
    """A text template over columns; `columns` are those that it names."""

    def __init__(self, source: str, *, where: str, available: Collection[str]) -> None:
        """Compile `source`; raises JobError, naming `where`, on bad syntax or an unknown column."""
        self.columns = _columns_of(source, where=where, available=available)
        template = _text_environment().from_string(source)
        self._globals = dict(template.globals)
        self._new_context, self._parts = template.new_context, template.root_render_func

    def render(self, row: Mapping[str, Any]) -> str:
        """Fill in one row's values; raises RowRefusedError where its data does not fit the template."""
        try:
            # as Template.render, which would merge the globals anew for every row: half of the time
            return "".join(self._parts(self._new_context({**self._globals, **row}, shared=True)))
        except NullValueError:
            nulls = ", ".join(name for name in self.columns if row[name] is None)
            raise RowRefusedError(f"template: a value is null (null columns: {nulls or 'none'})") from None
        except SecurityError as failure:
            raise RowRefusedError(f"template: not allowed: {failure}") from None
        except Exception as failure:  # noqa: BLE001 - templates run user data through any operator
            raise RowRefusedError(f"template: {type(failure).__name__}: {failure}") from None


class Predicate:
    """A boolean expression over columns; `columns` are those that it names."""

    def __init__(self, source: str, *, where: str, available: Collection[str]) -> None:
        """Compile `source`; raises JobError, naming `where`, on bad syntax or an unknown column."""
        self.columns = _columns_of("{{ (" + source + ") }}", where=where, available=available)
        try:
            self._evaluate = _environment().compile_expression(source, undefined_to_none=False)
        except jinja2.TemplateSyntaxError as failure:
            raise JobError(f"{where}: {failure.message}") from None

    def __call__(self, row: Mapping[str, Any]) -> bool:
        """Evaluate for one row; raises RowRefusedError where its data does not fit the expression."""
        try:
            return bool(self._evaluate(row))
        except Exception as failure:  # noqa: BLE001 - expressions run user data through any operator
            raise RowRefusedError(f"filter: {type(failure).__name__}: {failure}") from None


def unknown_column(name: str, available: Collection[str]) -> str:
    """Say that a column is not there, with the nearest one that is."""
    near = difflib.get_close_matches(name, available, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"unknown column {name!r}{hint} (the input has: {', '.join(available)})"


def _columns_of(source: str, *, where: str, available: Collection[str]) -> list[str]:
    try:
        tree = _environment().parse(source)
        _environment().compile(source)  # finds more: filters and tests that do not exist
    except jinja2.TemplateSyntaxError as failure:
        raise JobError(f"{where}: line {failure.lineno}: {failure.message}") from None
    if any(name.name == "self" for name in tree.find_all(jinja2.nodes.Name)):
        raise JobError(f"{where}: `self` is a template's own name: no column can be read by it")
    bare = _environment().overlay()
    bare.globals = {}  # a column wins over jinja2's function of its name, such as `range`
    names = jinja2.meta.find_undeclared_variables(bare.parse(source))
    names -= set(_environment().globals) - set(available)
    for name in sorted(names):
        if name not in available:
            raise JobError(f"{where}: {unknown_column(name, available)}")
    return sorted(names)


class _Environment(ImmutableSandboxedEnvironment):
    """Finds a struct's field before a method of its name, such as `items`."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Return a field, or what jinja2 finds."""
        if isinstance(obj, dict) and attribute in obj:
            return obj[attribute]
        return super().getattr(obj, attribute)


class _TextCode(CodeGenerator):
    """Looks at each value that `~` makes a text."""

    def visit_Concat(self, node: jinja2.nodes.Concat, frame: Frame) -> None:  # noqa: N802
        """Write the call that joins them."""
        self.write("str_join((")
        for part in node.nodes:
            self.write("environment.finalize(")
            self.visit(part, frame)
            self.write("), ")
        self.write("))")


@cache
def _environment() -> _Environment:
    environment = _Environment(
        undefined=jinja2.StrictUndefined, finalize=_printed, keep_trailing_newline=False
    )
    # jinja2's own escapes < > & ' for HTML, which no prompt wants
    environment.filters["tojson"] = _tojson
    return environment


@cache
def _text_environment() -> _Environment:
    """Return that of prompts, where a null may not read "None"; an expression may compare it."""
    environment = _environment().overlay()
    assert isinstance(environment, _Environment)
    environment.code_generator_class = _TextCode
    environment.filters = dict(environment.filters)
    for name in _TO_TEXT:
        environment.filters[name] = _guarded(environment.filters[name], _refuse_null)
    environment.filters["join"] = _guarded(
        environment.filters["join"], lambda values: [_refuse_null(value) for value in values]
    )
    environment.filters["format"] = _format
    return environment


def _guarded(text_of: Callable[..., Any], look: Callable[[Any], Any]) -> Callable[..., Any]:
    """Look at what a filter makes a text."""
    first = 1 if hasattr(text_of, "jinja_pass_arg") else 0  # after jinja2's own argument

    @wraps(text_of)
    def guarded(*args: Any, **named: Any) -> Any:
        return text_of(*args[:first], look(args[first]), *args[first + 1 :], **named)

    return guarded


def _format(text: str, *values: Any, **named: Any) -> Any:
    for value in (*values, *named.values()):
        _refuse_null(value)
    return jinja2.filters.do_format(text, *values, **named)


def _refuse_null(value: Any) -> Any:
    if value is None:
        raise NullValueError
    return value


def _printed(value: Any) -> Any:
    """Refuse what would be a text without a meaning: a null, a method's address."""
    if callable(value):
        raise TypeError(f"{getattr(value, '__name__', 'it')!r} is a function, not a value")
    return _refuse_null(value)


def _tojson(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent, default=_as_text)


def _as_text(value: Any) -> str:
    return str(_printed(value))
