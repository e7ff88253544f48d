"""Jinja2 templates and filter expressions over the columns of a row, in a sandbox."""

import difflib
import json
from collections.abc import Callable, Collection, Mapping
from functools import cache, wraps
from typing import Any

import jinja2
import jinja2.filters
import jinja2.meta
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from batchrunner.core.errors import JobError, RowRefusedError

_TO_TEXT = (
    "string", "upper", "lower", "trim", "title", "capitalize", "replace", "center", "truncate", "wordwrap",
    "indent", "striptags", "escape", "e", "forceescape", "urlize", "wordcount",
)  # fmt: skip
"""Filters of jinja2 that would turn a null into the text "None"."""


class NullValueError(ValueError):
    """A template prints a null, which would read "None" in the prompt."""


def is_template(text: str) -> bool:
    """Return whether a text is a template and not a column name."""
    return "{{" in text or "{%" in text


class Template:
    """A template of a text; `columns` are the input columns that it names."""

    def __init__(self, source: str, *, where: str, available: Collection[str]) -> None:
        """Compile `source`; raises JobError, naming `where`, on bad syntax or an unknown column."""
        self.columns = _columns_of(source, where=where, available=available)
        template = _text_environment().from_string(source)
        self._globals = dict(template.globals)
        self._new_context, self._parts = template.new_context, template.root_render_func

    def render(self, row: Mapping[str, Any]) -> str:
        """Return the text for a row; raises RowRefusedError where the template fails on its values."""
        try:
            # like jinja2's render, which merges the globals again for each row and takes twice as long
            return "".join(self._parts(self._new_context({**self._globals, **row}, shared=True)))
        except NullValueError:
            nulls = ", ".join(name for name in self.columns if row[name] is None)
            raise RowRefusedError(f"template: a value is null (null columns: {nulls or 'none'})") from None
        except SecurityError as failure:
            raise RowRefusedError(f"template: not allowed: {failure}") from None
        except Exception as failure:  # noqa: BLE001 - templates run user data through any operator
            raise RowRefusedError(f"template: {type(failure).__name__}: {failure}") from None


class Predicate:
    """A boolean expression; `columns` are the input columns that it names."""

    def __init__(self, source: str, *, where: str, available: Collection[str]) -> None:
        """Compile `source`; raises JobError, naming `where`, on bad syntax or an unknown column."""
        self.columns = _columns_of("{{ (" + source + ") }}", where=where, available=available)
        try:
            self._evaluate = _environment().compile_expression(source, undefined_to_none=False)
        except jinja2.TemplateSyntaxError as failure:
            raise JobError(f"{where}: {failure.message}") from None

    def __call__(self, row: Mapping[str, Any]) -> bool:
        """Return the expression's truth for a row; raises RowRefusedError where it fails on its values."""
        try:
            return bool(self._evaluate(row))
        except Exception as failure:  # noqa: BLE001 - expressions run user data through any operator
            raise RowRefusedError(f"filter: {type(failure).__name__}: {failure}") from None


def unknown_column(name: str, available: Collection[str]) -> str:
    """Return the error text for a missing column, with the most similar existing one."""
    near = difflib.get_close_matches(name, available, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"unknown column {name!r}{hint} (the input has: {', '.join(available)})"


def _columns_of(source: str, *, where: str, available: Collection[str]) -> list[str]:
    try:
        tree = _environment().parse(source)
        _environment().compile(source)  # also finds unknown filters and tests
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
    """Looks up a struct's field before a method of the same name, such as `items`."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Return the field, else what jinja2 returns."""
        if isinstance(obj, dict) and attribute in obj:
            return obj[attribute]
        return super().getattr(obj, attribute)


class _TextCode(CodeGenerator):
    """Compiles `~` so that each operand passes through `finalize`, which refuses nulls."""

    def visit_Concat(self, node: jinja2.nodes.Concat, frame: Frame) -> None:  # noqa: N802
        """Write the call that joins the operands."""
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
    # jinja2's own filter escapes < > & ' for HTML
    environment.filters["tojson"] = _tojson
    return environment


@cache
def _text_environment() -> _Environment:
    """Return the environment of prompts, which refuses nulls; in filter expressions nulls may be compared."""
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


def _guarded(text_of: Callable[..., Any], check: Callable[[Any], Any]) -> Callable[..., Any]:
    """Return a filter that passes its value through `check` first."""
    first = 1 if hasattr(text_of, "jinja_pass_arg") else 0  # jinja2 may pass an argument of its own first

    @wraps(text_of)
    def guarded(*args: Any, **named: Any) -> Any:
        return text_of(*args[:first], check(args[first]), *args[first + 1 :], **named)

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
    """Return a value that is to be printed; raises for a null or a function, whose text is meaningless."""
    if callable(value):
        raise TypeError(f"{getattr(value, '__name__', 'it')!r} is a function, not a value")
    return _refuse_null(value)


def _tojson(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent, default=lambda item: str(_printed(item)))
