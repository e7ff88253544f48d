"""Jinja2 templates and filter expressions over the columns of a row, in a sandbox and in limited time."""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jinja2
import jinja2.nodes
from jinja2.exceptions import SecurityError
from jinja2.parser import Parser

from batchrunner.core.errors import JobError, RowRefusedError
from batchrunner.input.columns_read import ColumnsRead, odd_names
from batchrunner.input.made_text import Parts, TooLargeError, begin_row
from batchrunner.input.render_limit import RenderLimit
from batchrunner.input.sandbox import (
    BytesValueError,
    NullValueError,
    TemplateEnvironment,
    filter_environment,
    is_about_null,
    text_environment,
)

LINE_SHOWN = 100
"""Characters of a template's line that an error shows at most."""
_OF_JINJA = {"=": "==", "AND": "and", "OR": "or", "NOT": "not", "IN": "in", "IS": "is none"}
"""Words of SQL and how Jinja2 writes them."""
_RESULT = "batchrunner_value"
"""Variable in which a compiled expression leaves its value."""


def is_template(text: str) -> bool:
    """Return whether a text is a template and not a column name."""
    return "{{" in text or "{%" in text


class Template:
    """A template of a text; `columns` are the input columns that it reads."""

    def __init__(
        self, source: str, *, where: str, available: Collection[str], limit: RenderLimit | None = None
    ) -> None:
        """Compile `source`; raises JobError, naming `where`, on bad syntax or an unknown column."""
        template, self._read = _compiled(_text_tree, source, text_environment(), where, available)
        self.columns = self._read.names
        self.printed = self._read.printed
        """Columns of them that are shown as they are."""
        self._globals = dict(template.globals)
        self._new_context, self._parts = template.new_context, template.root_render_func
        self._limit = limit or RenderLimit()

    def render(self, row: Mapping[str, Any]) -> str:
        """Return the text for a row; raises RowRefusedError where the template fails on its values."""
        try:
            text: str = self._limit.call(self._text, row)
        except NullValueError:
            nulls = ", ".join(name for name in self.columns if row[name] is None)
            raise RowRefusedError(f"template: a value is null (null columns: {nulls or 'none'})") from None
        except BytesValueError:
            held = ", ".join(name for name in self.columns if isinstance(row[name], bytes))
            raise RowRefusedError(
                f"template: a value is bytes (columns of bytes: {held or 'none'})"
            ) from None
        except (SecurityError, TooLargeError) as failure:
            raise RowRefusedError(f"template: not allowed: {failure}") from None
        except RowRefusedError as failure:
            raise RowRefusedError(f"template: {failure}") from None
        except Exception as failure:  # noqa: BLE001 - templates run user data through any operator
            raise RowRefusedError(f"template: {_told(failure, self.columns, row)}") from None
        return text

    def _text(self, row: Mapping[str, Any]) -> str:
        # like jinja2's render, which merges the globals again for each row and takes twice as long
        context = self._new_context({**self._globals, **self._read.variables(row)}, shared=True)
        begin_row()
        texts = Parts()
        texts.extend(self._parts(context))
        return texts.text()


class Predicate:
    """A boolean expression; `columns` are the input columns that it reads."""

    def __init__(
        self, source: str, *, where: str, available: Collection[str], limit: RenderLimit | None = None
    ) -> None:
        """Compile `source`; raises JobError, naming `where`, on bad syntax or an unknown column."""
        self._template, self._read = _compiled(
            _expression_tree, source, filter_environment(), where, available
        )
        self.columns = self._read.names
        self._limit = limit or RenderLimit()

    def __call__(self, row: Mapping[str, Any]) -> bool:
        """Return the expression's truth for a row; one that fails on a null is false.

        Raises RowRefusedError where it fails otherwise.
        """
        try:
            return bool(self._limit.call(self._value, row))
        except RowRefusedError as failure:
            raise RowRefusedError(f"filter: {failure}") from None
        except Exception as failure:  # noqa: BLE001 - expressions run user data through any operator
            if is_about_null(failure):
                return False
            raise RowRefusedError(f"filter: {_told(failure, self.columns, row)}") from None

    def _value(self, row: Mapping[str, Any]) -> bool:
        begin_row()
        context = self._template.new_context(dict(self._read.variables(row)))
        for _ in self._template.root_render_func(context):
            pass
        return bool(context.vars[_RESULT])


def _told(failure: Exception, columns: Sequence[str], row: Mapping[str, Any]) -> str:
    """Return an error in words; where a text stands beside a number or a time, with what to write."""
    told = f"{type(failure).__name__}: {failure}"
    if not isinstance(failure, TypeError) or not re.search(r"\bstr\b", str(failure)):
        return told
    if re.search(r"'(Timestamp|datetime\.(datetime|date|time))'", str(failure)):
        return f"{told}: compare the text of a time: NAME | string"
    texts = [repr(name) for name in columns if isinstance(row.get(name), str)]
    if not texts:
        return told
    what = f"column {texts[0]} is" if len(texts) == 1 else f"columns {', '.join(texts)} are"
    return f"{told}: {what} text: write a text beside it, or give it a type in input.types"


TreeMaker = Callable[[TemplateEnvironment, str], jinja2.nodes.Template]


def _text_tree(environment: TemplateEnvironment, source: str) -> jinja2.nodes.Template:
    return environment.parse(source)


def _expression_tree(environment: TemplateEnvironment, source: str) -> jinja2.nodes.Template:
    """Return the syntax tree of an expression, as jinja2's `compile_expression` makes it."""
    parser = Parser(environment, source, state="variable")
    value = parser.parse_expression()
    if not parser.stream.eos:
        found = parser.stream.current
        known = _OF_JINJA.get(str(found.value).upper())
        instead = f" (write {known})" if known not in {None, found.value} else ""
        problem = f"unexpected {found.value!r} after the expression{instead}"
        raise jinja2.TemplateSyntaxError(problem, found.lineno)
    target = jinja2.nodes.Name(_RESULT, "store", lineno=1)
    tree = jinja2.nodes.Template([jinja2.nodes.Assign(target, value, lineno=1)], lineno=1)
    tree.set_environment(environment)
    return tree


def _syntax_problem(failure: jinja2.TemplateSyntaxError, source: str) -> str:
    """Return what is wrong in a template, with the line of it."""
    lines = source.splitlines()[failure.lineno - 1 : failure.lineno]
    problem = (failure.message or "is no template").removesuffix(".")
    return f"{problem}, in {lines[0].strip()[:LINE_SHOWN]!r}" if lines else problem


def _compiled(
    tree_of: TreeMaker, source: str, environment: TemplateEnvironment, where: str, available: Collection[str]
) -> tuple[jinja2.Template, ColumnsRead]:
    try:
        read = ColumnsRead(tree_of(environment, source), environment, where, available)
        return environment.from_string(read.tree), read
    except JobError:
        raise
    except jinja2.TemplateSyntaxError as failure:
        raise JobError(
            f"{where}: line {failure.lineno}: {_syntax_problem(failure, source)}",
            hint=odd_names(available),
            mark=";",
        ) from None
    except RecursionError:
        raise JobError(f"{where}: cannot be compiled: it is nested too deeply") from None
    except Exception as failure:  # noqa: BLE001 - of jinja2, and of Python, which compiles what jinja2 writes
        problem = str(failure).partition("\n")[0] or type(failure).__name__
        raise JobError(f"{where}: cannot be compiled: {problem}") from None
