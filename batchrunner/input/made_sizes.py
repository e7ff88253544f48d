"""How large a value becomes that a template makes in one call into C, which cannot be interrupted.

Each function raises TooLargeError before the call. What a template does step by step is ended by its limit of
CPU time (`render_limit.py`).
"""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from batchrunner.input.made_text import LONGEST_TEXT, TooLargeError, check_length

MOST_ITEMS = 10_000_000
"""Most items of a list that a template makes, and the largest number that is a width."""
MOST_BITS = 10_000
"""Most bits of a whole number that a template computes by `*`, `**` or `//`."""
MOST_DIGITS = 10_000
"""Most characters of a text that becomes a number."""
MOST_PLACES = 1_000
"""Most decimal places to which a number is rounded."""
MOST_STEPS = 1_000_000_000
"""Most comparisons of characters, or copies of items, in one call: it takes a second."""
_NESTED = 64
"""Characters for which a list or mapping counts beside its items: it takes as long to look at."""
_OTHER = 20
"""Characters of any other value, such as a number with a fraction."""
WIDEST_INDENT = 100
"""Widest indentation of JSON."""
_BY_NUMBER = {"batch", "center", "ljust", "rjust", "slice", "zfill"}
"""Filters, and methods of texts, whose numbers are widths or counts."""
_FROM_RIGHT = {"rfind", "rindex", "rpartition", "rsplit", "lstrip", "rstrip", "strip", "trim"}
"""Those that compare each character of their value with each of their argument, in the worst case."""
_TO_LIST = {"list", "rsplit", "split", "splitlines"}
"""Those that part a text."""
_FIELD = re.compile(r"%[-+ #0]*(\d*)(?:\.(\d*))?|\{[^{}]*?(?::[^{}]*?(\d*)(?:\.(\d*))?[^{}\d]*)?\}")
"""A field in a format of either kind, with its width and precision."""
_WIDTH_APART = re.compile(r"%[-+ #.\d]*\*|\{[^{}]*:[^{}]*\{")
"""A width that is given apart from the format."""


def check_value(value: Any) -> int:
    """Return about how long the text of a value is; raises TooLargeError where it is too long.

    Lists in lists may hold the same ones again and again: their text, and a comparison of two of them, is
    then far larger than they are.
    """
    if isinstance(value, (str, bytes)):
        return len(value)
    length, parts = 0, [value]
    while parts:
        part = parts.pop()
        if isinstance(part, (str, bytes)):
            length += len(part)
        elif isinstance(part, Mapping):
            length += _NESTED + 2 * len(part)
            parts.extend(part)
            parts.extend(part.values())
        elif isinstance(part, (list, tuple, set, frozenset)):
            length += _NESTED + 2 * len(part)
            parts.extend(part)
        elif isinstance(part, int):
            length += 1 + part.bit_length() // 3
        else:
            length += _OTHER
        if length > LONGEST_TEXT:
            raise TooLargeError(f"a value of more than {LONGEST_TEXT} characters is too large")
    return length


def listed(values: Any) -> Any:
    """Return the items of an iterator as a list of bounded size; any other value as it is."""
    if not isinstance(values, Iterator):
        return values
    items: list[Any] = []
    length = 0
    for item in values:
        length += 1 + check_value(item)
        if length > LONGEST_TEXT:
            raise TooLargeError(f"a list of more than {LONGEST_TEXT} characters is too large")
        items.append(item)
    return items


def check_product(value: Any, times: int) -> None:
    """Raise TooLargeError where a value becomes too large by `*`."""
    if isinstance(value, int):
        check_bits(value.bit_length() + times.bit_length())
    elif hasattr(value, "__len__"):
        check_items(value, len(value) * times)


def check_bits(bits: int) -> None:
    """Raise TooLargeError for a whole number of so many bits."""
    if bits > MOST_BITS:
        raise TooLargeError(f"a number of {bits} bits is too large")


def check_items(value: Any, length: int) -> None:
    """Raise TooLargeError for a value of the same kind that has this length."""
    if isinstance(value, str):
        check_length(length)
    elif length > MOST_ITEMS:
        raise TooLargeError(f"a value of {length} items is too large")


def check_format(text: str, values: tuple[Any, ...], named: Mapping[str, Any]) -> None:
    """Raise TooLargeError where a format makes a huge text: each field may hold the longest value."""
    fields = _FIELD.findall(text)
    if _WIDTH_APART.search(text) and any(
        isinstance(number, int) and number > MOST_ITEMS for number in (*values, *named.values())
    ):
        raise TooLargeError("a width in a format is too large")
    widths = sum(int(number) for field in fields for number in field if number)
    longest = max(map(check_value, (*values, *named.values())), default=0)
    if widths > MOST_ITEMS or len(fields) * longest > LONGEST_TEXT:
        raise TooLargeError("a text from a format is too large")


def check_call(name: str, value: Any, args: tuple[Any, ...], named: Mapping[str, Any]) -> None:
    """Raise TooLargeError where a filter, or a method of a value, would make a huge one or take too long."""
    given = (*args, *named.values())
    length = check_value(value)
    if length > LONGEST_TEXT:
        raise TooLargeError(f"{name}: a text of {length} characters is too large")
    longest = max(map(check_value, given), default=0)
    numbers = [number for number in given if isinstance(number, int)]
    if name == "tojson" and any(number > WIDEST_INDENT for number in numbers):
        raise TooLargeError(f"tojson: an indentation above {WIDEST_INDENT} is too large")
    if name in _BY_NUMBER and any(number > MOST_ITEMS for number in numbers):
        raise TooLargeError(f"{name}: a number above {MOST_ITEMS} is too large")
    if name in _FROM_RIGHT and length * longest > MOST_STEPS:
        raise TooLargeError(f"{name}: {length} and {longest} characters are too large to be compared")
    if name in _TO_LIST and length > MOST_ITEMS:
        raise TooLargeError(f"{name}: a text of {length} characters is too large")
    check = _CHECKS.get(name)
    if check is not None:
        check(_Call(value, given, length, longest, max(numbers, default=0)))


class _Call(NamedTuple):
    """A call of a filter or method."""

    value: Any
    given: tuple[Any, ...]
    """Its arguments."""
    length: int
    """Characters of the value."""
    longest: int
    """Characters of the longest argument."""
    most: int
    """The largest number of the arguments; 0 where there is none."""

    @property
    def line_ends(self) -> int:
        """Line ends of the value, at most."""
        return self.value.count("\n") if isinstance(self.value, str) else self.length


def _check_replace(call: _Call) -> None:
    texts = [text for text in call.given if isinstance(text, (str, bytes))]
    if len(texts) > 1:
        old, new = texts[:2]
        whole: Any = call.value if isinstance(call.value, (str, bytes)) else str(call.value)
        count = whole.count(old) if isinstance(old, type(whole)) or isinstance(whole, type(old)) else 0
        check_items("", call.length + count * (len(new) - len(old)))


def _check_join(call: _Call) -> None:
    if isinstance(call.value, (str, bytes)):  # the method of the separator
        items = next((each for each in call.given if isinstance(each, (list, tuple))), ())
        check_items("", call.longest + call.length * len(items))
    elif hasattr(call.value, "__len__"):
        check_items("", call.length + call.longest * len(call.value))


def _check_lines(call: _Call) -> None:
    """Check what is put before or after each line of a text, or of the text of a value."""
    check_items("", call.length + (call.line_ends + 1) * max(call.longest, call.most))


def _check_wrap(call: _Call) -> None:
    width = next((number for number in call.given if isinstance(number, int) and number > 1), 1)
    check_items("", call.length + (call.length // width + call.line_ends + 1) * call.longest)


def _check_tabs(call: _Call) -> None:
    tabs = call.value.count("\t" if isinstance(call.value, str) else b"\t")
    check_items("", call.length + tabs * call.most)


def _check_each_character(call: _Call) -> None:
    check_items("", call.length + call.length * call.longest)


def _check_links(call: _Call) -> None:
    check_items("", call.length + call.length // 4 * call.longest)


def _check_places(call: _Call) -> None:
    if any(isinstance(number, int) and abs(number) > MOST_PLACES for number in call.given):
        raise TooLargeError(f"round: more than {MOST_PLACES} places are too large")


def _check_digits(call: _Call) -> None:
    if call.length > MOST_DIGITS:
        raise TooLargeError(f"a number of {call.length} characters is too large")


def _check_bytes(call: _Call) -> None:
    check_bits(8 * max(call.longest, call.most))


def _check_sum(call: _Call) -> None:
    items = call.value if hasattr(call.value, "__len__") else ()
    lists = [item for item in items if isinstance(item, (list, tuple))]
    if len(lists) * sum(map(len, lists)) > MOST_STEPS:
        raise TooLargeError(f"sum: {len(lists)} lists are too large")


_CHECKS: Mapping[str, Callable[[_Call], None]] = {
    "expandtabs": _check_tabs,
    "float": _check_digits,
    "from_bytes": _check_bytes,
    "indent": _check_lines,
    "int": _check_digits,
    "join": _check_join,
    "replace": _check_replace,
    "round": _check_places,
    "sum": _check_sum,
    "to_bytes": _check_bytes,
    "tojson": _check_lines,
    "translate": _check_each_character,
    "urlize": _check_links,
    "wordwrap": _check_wrap,
}
"""What a filter or method makes of its value and its arguments."""
