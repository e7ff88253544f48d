"""Columns by JSON Schemas, and values of them."""

from __future__ import annotations

import datetime as dt
from typing import Any, Literal, NotRequired

import pytest
from pydantic import TypeAdapter
from typing_extensions import TypedDict

from batchrunner.job.arrow_types import fit, kind_of_schema


class Place(TypedDict):
    page: int
    line: NotRequired[float]


class Tree(TypedDict):
    name: str
    below: list[Tree]


PLACE = ("struct", (("page", "int64"), ("line", "float64")))


@pytest.mark.parametrize(
    ("annotation", "kind"),
    [
        (str, "string"), (int | None, "int64"), (int | float, "float64"), (int | str, "json"),
        (Literal["a", "b"] | None, "string"), (list[str], ("list", "string")), (set[int], ("list", "int64")),
        (tuple[int, int], ("list", "int64")), (Place | None, PLACE), (list[Place], ("list", PLACE)),
        (dict[str, int], "json"), (Any, "json"), (list, "json"), (dt.date, "date"), (bytes, "binary"),
        (dt.datetime, "timestamp"), (Tree, ("struct", (("name", "string"), ("below", ("list", "json"))))),
    ],
)  # fmt: skip
def test_kinds(annotation: Any, kind: Any) -> None:
    """What Arrow has a type for gets that one; the rest is JSON text."""
    assert kind_of_schema(TypeAdapter(annotation).json_schema(), formats=True) == kind


@pytest.mark.parametrize(
    ("value", "kind", "fitted"),
    [
        (None, "int64", None), (3.0, "int64", 3), (2, "float64", 2.0),
        ({"a": [1, None]}, "json", '{"a":[1,null]}'),
        ("a", "json", '"a"'), ("2024-05-01", "date", dt.date(2024, 5, 1)),
        ("2024-05-01T12:00:00+02:00", "timestamp", dt.datetime(2024, 5, 1, 10)),  # noqa: DTZ001
        ({"page": 1, "more": 2}, PLACE, {"page": 1, "line": None}),
    ],
)  # fmt: skip
def test_values_that_fit(value: Any, kind: Any, fitted: Any) -> None:
    assert fit(value, kind) == fitted


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        ("3", "int64"), (3.5, "int64"), (True, "int64"), (1 << 63, "int64"),
        (1e400, "float64"), (10**400, "float64"), (1, "bool"), (1, "string"), (5, "binary"), ("soon", "date"),
        ("ab", ("list", "string")), ([1], PLACE), ({"page": "x"}, PLACE),
    ],
)  # fmt: skip
def test_values_that_do_not_fit(value: Any, kind: Any) -> None:
    with pytest.raises(ValueError, match=r"is no|bits|too large|Invalid"):
        fit(value, kind)
