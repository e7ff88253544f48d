"""Jinja2's environments for prompts and for filter expressions: sandboxed, bounded, strict about nulls."""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from functools import cache, wraps
from typing import Any

import jinja2
import jinja2.filters
from jinja2.compiler import CodeGenerator, Frame
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from batchrunner.input.made_text import Parts, TooLargeError, check_length

_MOST_ITEMS = 10_000_000
"""Most items of a list that a template makes, and the largest number that is a width."""
_MOST_BITS = 10_000
"""Most bits of a whole number that a template computes by `*` or `**`."""
_WIDE_PERCENT = re.compile(r"%[-+ #.\d]*(?:\d{8,}|\*)")
_WIDE_BRACES = re.compile(r"\{[^{}]*:[^{}]*\d{8,}")
_WIDTH_APART = re.compile(r"\{[^{}]*:[^{}]*\{")
"""Widths in a format that are too large, or that are given apart."""
_NULL = re.compile(r"\bNone(Type)?\b")
"""What Python's and jinja2's errors about a null have in common."""
_TO_TEXT = (
    "string", "upper", "lower", "trim", "title", "capitalize", "replace", "center", "truncate", "wordwrap",
    "indent", "striptags", "escape", "e", "forceescape", "urlize", "wordcount",
)  # fmt: skip
"""Filters of jinja2 that would turn a null into the text "None", and bytes into "b'…'"."""
PRINTING = frozenset({*_TO_TEXT, "default", "d", "safe", "tojson"})
"""Filters whose result shows the value that they are given."""
_WITH_SIZES = ("batch", "center", "indent", "join", "replace", "slice", "tojson")
"""Filters of jinja2 whose result may be far longer than what they are given."""
_BY_NUMBER = {"batch", "center", "expandtabs", "indent", "ljust", "rjust", "slice", "tojson", "zfill"}
"""Filters, and methods of texts, whose numbers are widths or counts."""


class NullValueError(ValueError):
    """A template prints a null, which would read "None" in the prompt."""


class BytesValueError(ValueError):
    """A template prints bytes, which would read "b'…'" in the prompt."""


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """Looks up a struct's field before a method of the same name, such as `items`; refuses huge values."""

    intercepted_binops = frozenset({"*", "**", "+", "%"})

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Return the field, else what jinja2 returns."""
        if isinstance(obj, dict) and attribute in obj:
            return obj[attribute]
        return super().getattr(obj, attribute)

    def call(self, context: Context, function: Any, /, *args: Any, **named: Any) -> Any:
        """Call a function or a method; raises TooLargeError before a huge text is made."""
        owner = getattr(function, "__self__", None)
        if isinstance(owner, str):
            _check_sizes(function.__name__, owner, args, named)
        return super().call(context, function, *args, **named)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Compute an operator; raises TooLargeError before the result is huge."""
        if operator == "*":
            for one, other in ((left, right), (right, left)):
                if isinstance(other, int):
                    _check_product(one, other)
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            _check_bits(left.bit_length() * max(right, 0))
        elif operator == "%" and isinstance(left, str):
            _check_percent(left)
        elif operator == "+" and hasattr(left, "__len__") and hasattr(right, "__len__"):
            _check_length(left, len(left) + len(right))
        return super().call_binop(context, operator, left, right)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Return what formats a text by its method `format`; it raises TooLargeError for a huge width."""
        formats = super().wrap_str_format(value)
        if formats is None:
            return None

        def bounded(*args: Any, **named: Any) -> str:
            text = str(value.__self__)
            large = any(isinstance(item, int) and item > _MOST_ITEMS for item in (*args, *named.values()))
            if _WIDE_BRACES.search(text) or (large and _WIDTH_APART.search(text)):
                raise TooLargeError("a width in a format is too large")
            return formats(*args, **named)

        return bounded

    def joined(self, *texts: Any) -> str:
        """Return what `~` makes of its operands; raises TooLargeError."""
        parts = Parts()
        parts.extend(map(str, texts))
        return parts.text()

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


def _check_product(value: Any, times: int) -> None:
    if isinstance(value, int):
        _check_bits(value.bit_length() + times.bit_length())
    elif hasattr(value, "__len__"):
        _check_length(value, len(value) * times)


def _check_bits(bits: int) -> None:
    if bits > _MOST_BITS:
        raise TooLargeError(f"a number of {bits} bits is too large")


def _check_length(value: Any, length: int) -> None:
    if isinstance(value, str):
        check_length(length)
    elif length > _MOST_ITEMS:
        raise TooLargeError(f"a value of {length} items is too large")


def _check_sizes(name: str, value: Any, args: tuple[Any, ...], named: Mapping[str, Any]) -> None:
    """Raise TooLargeError where a filter or a method of a text would make a huge one."""
    given = (*args, *named.values())
    if name in _BY_NUMBER and any(isinstance(number, int) and number > _MOST_ITEMS for number in given):
        raise TooLargeError(f"{name}: a number above {_MOST_ITEMS} is too large")
    texts = [text for text in given if isinstance(text, str)]
    if name == "replace" and len(texts) > 1:
        old, new = texts[:2]
        _check_length("", len(value) + str(value).count(old) * (len(new) - len(old)))
    elif name == "join":
        items = args[0] if isinstance(value, str) and args else value
        if isinstance(items, (list, tuple)):
            _check_length("", sum(len(item) for item in items if isinstance(item, str)))


class _BlockCode(CodeGenerator):
    """Compiles blocks so that their text is bounded."""

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
        _check_sizes(name, args[first], args[first + 1 :], named)
        return text_of(*args, **named)

    return bounded


def _check_percent(text: str) -> None:
    if _WIDE_PERCENT.search(text):
        raise TooLargeError("a width in a format is too large")


def _format(text: str, *values: Any, **named: Any) -> Any:
    _check_percent(str(text))
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
    if callable(value):
        raise TypeError(f"{getattr(value, '__name__', 'it')!r} is a function, not a value")
    return _refuse_no_text(value)


def _tojson(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent, default=lambda item: str(_printed(item)))
