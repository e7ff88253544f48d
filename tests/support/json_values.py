"""Arbitrary JSON values, and known ones of which a part is replaced by them."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st

ODD_NUMBERS = (2**31, -(2**31), 2**33, 2**63, 2**64, 10**30, -1, 1e308, float("inf"), float("nan"), 0.5)
ODD_TEXTS = ("", "\0", "\ud800", "\udfff\ud800", "\u00b2", "a" * 1000, "../../x", "abort")
LEAVES = (
    st.none() | st.booleans() | st.sampled_from(ODD_NUMBERS) | st.integers() | st.floats()
    | st.sampled_from(ODD_TEXTS) | st.text(max_size=20)
)  # fmt: skip
ANY_JSON = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


def json_of(value: Any) -> bytes:
    """Return a value as JSON, with NaN, Infinity and lone surrogates as Python writes them."""
    return json.dumps(value).encode()


def places_in(value: Any, here: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the path of every value within a value, its own first."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [here, *(path for key, found in inner for path in places_in(found, (*here, key)))]


def replaced(value: Any, path: tuple[Any, ...], odd: Any) -> Any:
    """Return a value of which the part at a path is another one."""
    if not path:
        return odd
    key, *rest = path
    if isinstance(value, dict):
        return {**value, key: replaced(value[key], tuple(rest), odd)}
    if isinstance(value, list) and key < len(value):
        return [*value[:key], replaced(value[key], tuple(rest), odd), *value[key + 1 :]]
    return value


@st.composite
def some_odd(draw: st.DrawFn, known: list[Any]) -> Any:
    """One of the known values, of which up to three parts are odd."""
    value = draw(st.sampled_from(known))
    for _ in range(draw(st.integers(0, 3))):
        value = replaced(value, draw(st.sampled_from(places_in(value))), draw(ANY_JSON))
    return value
