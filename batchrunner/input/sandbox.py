"""Jinja2's environments for prompts and for filter expressions: sandboxed, bounded, strict about nulls."""

import json
import re
from collections.abc import Callable, Iterable
from functools import cache, wraps
from typing import Any

import jinja2
import jinja2.compiler
import jinja2.filters
from jinja2.compiler import CodeGenerator, Frame
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from batchrunner.input.made_sizes import (
    check_bits,
    check_call,
    check_format,
    check_items,
    check_product,
    check_value,
    listed,
)
from batchrunner.input.made_text import Parts

_NULL = re.compile(r"\bNone(Type)?\b")
"""What Python's and jinja2's errors about a null have in common."""
_TO_TEXT = (
    "string", "upper", "lower", "trim", "title", "capitalize", "replace", "center", "truncate", "wordwrap",
    "indent", "striptags", "escape", "e", "forceescape", "urlize", "wordcount",
)  # fmt: skip
"""Filters of jinja2 that would turn a null into the text "None", and bytes into "b'…'"."""
PRINTING = frozenset({*_TO_TEXT, "default", "d", "safe", "tojson"})
"""Filters whose result shows the value that they are given."""
_WITH_SIZES = (
    *_TO_TEXT, "batch", "dictsort", "float", "groupby", "int", "join", "list", "max", "min", "pprint",
    "reverse", "round", "slice", "sort", "sum", "tojson", "unique", "urlencode", "xmlattr",
)  # fmt: skip
"""Filters of jinja2 whose result may be far larger than what they are given, or that may take long."""
_OF_ALL = {"join", "list", "reverse", "sort", "sum", "tojson", "unique"}
"""Those that take all items of an iterator."""
_COMPARING = ("==", "eq", "equalto", "!=", "ne", ">", "gt", "greaterthan", ">=", "ge", "<", "lt", "lessthan",
    "<=", "le", "in")  # fmt: skip
"""Tests of jinja2 that compare two values."""
_OWNERS = (str, bytes, int, list, tuple, type)
"""Types of values whose methods may make a huge value, or may take long."""


class NullValueError(ValueError):
    """A template prints a null, which would read "None" in the prompt."""


class BytesValueError(ValueError):
    """A template prints bytes, which would read "b'…'" in the prompt."""


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """Looks up a struct's field before a method of the same name, such as `items`; refuses huge values."""

    intercepted_binops = frozenset({"*", "**", "+", "%", "//"})

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Return the field, else what jinja2 returns."""
        if isinstance(obj, dict) and attribute in obj:
            return obj[attribute]
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        """Return the item; raises TooLargeError for a huge key."""
        return super().getitem(obj, self.comparable(argument))

    def call(self, context: Context, function: Any, /, *args: Any, **named: Any) -> Any:
        """Call a function or a method; raises TooLargeError before a huge value is made."""
        owner = getattr(function, "__self__", None)
        if isinstance(owner, _OWNERS):
            check_call(function.__name__, "" if isinstance(owner, type) else owner, args, named)
        return super().call(context, function, *args, **named)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Compute an operator; raises TooLargeError before the result is huge."""
        if operator == "*":
            for one, other in ((left, right), (right, left)):
                if isinstance(other, int):
                    check_product(one, other)
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            check_bits(left.bit_length() * max(right, 0))
        elif operator == "%" and isinstance(left, (str, bytes)):
            values = right if isinstance(right, tuple) else (right,)
            check_format(left if isinstance(left, str) else left.decode("latin-1"), values, {})
        elif operator in {"//", "%"} and isinstance(left, int) and isinstance(right, int):
            check_bits(max(left.bit_length(), right.bit_length()))
        elif operator == "+" and hasattr(left, "__len__") and hasattr(right, "__len__"):
            check_items(left, len(left) + len(right))
        return super().call_binop(context, operator, left, right)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Return what formats a text by its method `format`; it raises TooLargeError for a huge width."""
        formats = super().wrap_str_format(value)
        if formats is None:
            return None

        def bounded(*args: Any, **named: Any) -> str:
            mapping = args[0] if value.__name__ == "format_map" and args else {}
            check_format(str(value.__self__), args, {**mapping, **named})
            return formats(*args, **named)

        return bounded

    def joined(self, *texts: Any) -> str:
        """Return what `~` makes of its operands; raises TooLargeError."""
        parts = Parts()
        parts.extend(str(self.comparable(text)) for text in texts)
        return parts.text()

    def comparable(self, value: Any) -> Any:
        """Return a value that is compared or printed; raises TooLargeError where that takes too long."""
        if isinstance(value, (list, tuple, dict)):
            check_value(value)
        return value

    def parts(self) -> Parts:
        """Return an empty list for the parts of a `set` block, a macro or a `call` block."""
        return Parts()

    def concat(self, parts: Iterable[str]) -> str:
        """Return what such a block makes of its parts."""
        return parts.text() if isinstance(parts, Parts) else "".join(parts)

    def either(self, left: Callable[[], Any], right: Callable[[], Any]) -> Any:
        """Return `left or right`, where an operand that fails on a null is unknown, as in SQL."""
        try:
            value = left()
        except Exception as failure:
            if is_about_null(failure) and (other := right()):
                return other
            raise
        return value or right()

    def both(self, left: Callable[[], Any], right: Callable[[], Any]) -> Any:
        """Return `left and right`, where an operand that fails on a null is unknown, as in SQL."""
        try:
            value = left()
        except Exception as failure:
            if is_about_null(failure) and not (other := right()):
                return other
            raise
        return value and right()


def is_about_null(failure: Exception) -> bool:
    """Tell whether an expression failed because a value is null."""
    return _NULL.search(str(failure)) is not None


class _BlockCode(CodeGenerator):
    """Compiles blocks so that their text is bounded, and comparisons so that they do not take too long."""

    def visit_Compare(self, node: jinja2.nodes.Compare, frame: Frame) -> None:  # noqa: N802
        """Write a comparison of bounded values."""
        self.write("(")
        self._write_bounded(node.expr, frame)
        for operand in node.ops:
            self.write(f" {jinja2.compiler.operators[operand.op]} ")
            self._write_bounded(operand.expr, frame)
        self.write(")")

    def visit_Dict(self, node: jinja2.nodes.Dict, frame: Frame) -> None:  # noqa: N802
        """Write a mapping with bounded keys."""
        self.write("{")
        for item in node.items:
            self._write_bounded(item.key, frame)
            self.write(": ")
            self.visit(item.value, frame)
            self.write(", ")
        self.write("}")

    def _write_bounded(self, node: jinja2.nodes.Expr, frame: Frame) -> None:
        self.write("environment.comparable(")
        self.visit(node, frame)
        self.write(")")

    def buffer(self, frame: Frame) -> None:
        """Write the list for the parts of a block."""
        super().buffer(frame)
        self.writeline(f"{frame.buffer} = environment.parts()")


class _TextCode(_BlockCode):
    """Compiles `~` so that each operand passes through `finalize`, which refuses nulls."""

    def visit_Concat(self, node: jinja2.nodes.Concat, frame: Frame) -> None:  # noqa: N802
        """Write the call that joins the operands."""
        self.write("environment.joined(")
        for part in node.nodes:
            self.write("environment.finalize(")
            self.visit(part, frame)
            self.write("), ")
        self.write(")")


class _FilterCode(_BlockCode):
    """Compiles `and` and `or` so that one operand may fail on a null where the other decides."""

    def visit_Concat(self, node: jinja2.nodes.Concat, frame: Frame) -> None:  # noqa: N802
        """Write the call that joins the operands."""
        self.write("environment.joined(")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write(")")

    def visit_And(self, node: jinja2.nodes.BinExpr, frame: Frame) -> None:  # noqa: N802
        """Write `left and right`."""
        self._write_operands("both", node, frame)

    def visit_Or(self, node: jinja2.nodes.BinExpr, frame: Frame) -> None:  # noqa: N802
        """Write `left or right`."""
        self._write_operands("either", node, frame)

    def _write_operands(self, function: str, node: jinja2.nodes.BinExpr, frame: Frame) -> None:
        self.write(f"environment.{function}(lambda: ")
        self.visit(node.left, frame)
        self.write(", lambda: ")
        self.visit(node.right, frame)
        self.write(")")


@cache
def filter_environment() -> TemplateEnvironment:
    """Return the environment of filter expressions, in which nulls may be compared."""
    environment = TemplateEnvironment(
        undefined=jinja2.StrictUndefined, finalize=_printed, keep_trailing_newline=False
    )
    environment.code_generator_class = _FilterCode
    # jinja2's own filter escapes < > & ' for HTML
    environment.filters["tojson"] = _tojson
    environment.filters["format"] = _format
    for name in _WITH_SIZES:
        environment.filters[name] = _bounded(name, environment.filters[name])
    tests: dict[str, Any] = dict(environment.tests)
    environment.tests = tests | {name: _comparing(tests[name]) for name in _COMPARING}
    return environment


@cache
def text_environment() -> TemplateEnvironment:
    """Return the environment of prompts, which refuses nulls."""
    environment = filter_environment().overlay()
    assert isinstance(environment, TemplateEnvironment)
    environment.code_generator_class = _TextCode
    environment.filters = dict(environment.filters)
    for name in _TO_TEXT:
        environment.filters[name] = _guarded(environment.filters[name], _refuse_no_text)
    environment.filters["join"] = _guarded(
        environment.filters["join"], lambda values: [_refuse_no_text(value) for value in values]
    )
    environment.filters["format"] = _format_without_nulls
    return environment


def _guarded(text_of: Callable[..., Any], check: Callable[[Any], Any]) -> Callable[..., Any]:
    """Return a filter that passes its value through `check` first."""
    first = 1 if hasattr(text_of, "jinja_pass_arg") else 0  # jinja2 may pass an argument of its own first

    @wraps(text_of)
    def guarded(*args: Any, **named: Any) -> Any:
        return text_of(*args[:first], check(args[first]), *args[first + 1 :], **named)

    return guarded


def _bounded(name: str, text_of: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter that refuses to make a huge value."""
    first = 1 if hasattr(text_of, "jinja_pass_arg") else 0

    @wraps(text_of)
    def bounded(*args: Any, **named: Any) -> Any:
        value = listed(args[first]) if name in _OF_ALL else args[first]
        check_call(name, value, args[first + 1 :], named)
        return text_of(*args[:first], value, *args[first + 1 :], **named)

    return bounded


def _comparing(test: Callable[..., Any]) -> Callable[[Any, Any], Any]:
    """Return a test of jinja2 that refuses to compare huge values."""

    def bounded(value: Any, other: Any) -> Any:
        check_value(value)
        check_value(other)
        return test(value, other)

    return bounded


def _format(text: str, *values: Any, **named: Any) -> Any:
    check_format(str(text), values, named)
    return jinja2.filters.do_format(text, *values, **named)


def _format_without_nulls(text: str, *values: Any, **named: Any) -> Any:
    for value in (*values, *named.values()):
        _refuse_no_text(value)
    return _format(text, *values, **named)


def _refuse_no_text(value: Any) -> Any:
    """Return a value; raises for a null, and for bytes and what holds them."""
    if value is None:
        raise NullValueError
    if not isinstance(value, str) and _holds_bytes(value):
        raise BytesValueError
    return value


def _holds_bytes(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(map(_holds_bytes, value))
    if isinstance(value, dict):
        return any(map(_holds_bytes, value.values()))
    return isinstance(value, bytes)


def _printed(value: Any) -> Any:
    """Return a value that is to be printed; raises for a null or a function, whose text is meaningless."""
    if isinstance(value, jinja2.Undefined):  # which is callable, too
        str(value)  # raises an error that names the field
    if callable(value):
        raise TypeError(f"{getattr(value, '__name__', 'it')!r} is a function, not a value")
    if not isinstance(value, str):
        check_value(value)
    return _refuse_no_text(value)


def _tojson(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent, default=lambda item: str(_printed(item)))
