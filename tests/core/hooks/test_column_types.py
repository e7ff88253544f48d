"""Columns of a function by its annotation, and values of them."""

from __future__ import annotations

import collections
import dataclasses
import datetime as dt
import decimal
import enum
import threading
import uuid
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple, NotRequired, Optional, TypedDict

import numpy as np
import pydantic
import pytest

from batchrunner.core.hooks.column_types import NoColumnError, columns_of, row_value, value_of


class Mood(enum.Enum):
    GOOD = "good"
    BAD = "bad"


class Place(TypedDict):
    page: int
    line: NotRequired[float]


class Everything(TypedDict, total=False):
    text: str
    maybe: Optional[int]  # noqa: UP045 - people write it so
    union: int | None
    either: int | float
    mixed: int | str
    mood: Mood
    choice: Literal["a", "b"] | None
    many: list[str]
    several: Sequence[int]
    pair: tuple[int, int]
    places: list[Place]
    place: Place
    any: Any
    mapping: dict[str, int]
    other: Mapping[str, str]
    bare: list  # type: ignore[type-arg]
    day: dt.date
    time: dt.datetime
    price: decimal.Decimal
    id: uuid.UUID
    blob: bytes
    named: Annotated[int, "a number"]


PLACE = ("struct", (("page", "int64"), ("line", "float64")))


def test_types_of_annotations() -> None:
    """What Arrow has a type for gets that one; the rest is JSON."""
    assert dict(columns_of(Everything) or ()) == {
        "text": "string", "maybe": "int64", "union": "int64", "either": "float64", "mixed": "json",
        "mood": "string", "choice": "string", "many": ("list", "string"), "several": ("list", "int64"),
        "pair": ("list", "int64"), "places": ("list", PLACE), "place": PLACE, "any": "json",
        "mapping": "json", "other": "json", "bare": "json", "day": "date", "time": "timestamp",
        "price": "string", "id": "string", "blob": "binary", "named": "int64",
    }  # fmt: skip


@dataclasses.dataclass
class AsDataclass:
    label: str
    score: float = 0.5


class AsModel(pydantic.BaseModel):
    label: str
    score: float = 0.5


class AsTuple(NamedTuple):
    label: str
    score: float = 0.5


@pytest.mark.parametrize("kind", [AsDataclass, AsModel, AsTuple])
def test_classes_with_fields(kind: Any) -> None:
    """They tell their columns like a TypedDict, also where None is allowed, and their objects are values."""
    columns = (("label", "string"), ("score", "float64"))
    assert columns_of(kind) == columns_of(kind | None) == columns
    assert row_value(kind(label="a"), columns) == {"label": "a", "score": 0.5}


@pytest.mark.parametrize("annotation", [dict, dict[str, str], None, str, list[int], Any])
def test_other_types_tell_no_columns(annotation: Any) -> None:
    """Then the job has to."""
    assert columns_of(annotation) is None


class Unusual(TypedDict):
    ordered: collections.OrderedDict[str, int]
    worker: threading.Thread


def test_a_field_that_no_column_can_hold() -> None:
    """Its name is in the error, before the run begins."""
    with pytest.raises(NoColumnError, match="worker: no column can hold Thread"):
        columns_of(Unusual)


@pytest.mark.parametrize(
    ("value", "kind", "becomes"),
    [
        (None, "int64", None),
        (np.int64(3), "int64", 3),
        (3.0, "int64", 3),
        (True, "int64", 1),
        (np.float32(0.5), "float64", 0.5),
        (2, "float64", 2.0),
        (np.bool_(True), "bool", True),
        (Mood.BAD, "string", "bad"),
        (decimal.Decimal("1.50"), "string", "1.50"),
        ("2024-05-01", "date", dt.date(2024, 5, 1)),
        (dt.datetime(2024, 5, 1, 9, tzinfo=dt.UTC), "date", dt.date(2024, 5, 1)),
        ("2024-05-01T12:00:00+02:00", "timestamp", dt.datetime(2024, 5, 1, 10)),  # noqa: DTZ001
        (bytearray(b"ab"), "binary", b"ab"),
        ((1, 2), ("list", "int64"), [1, 2]),
        ({"page": 1}, PLACE, {"page": 1, "line": None}),
        ({"a": {1, 2}}, "json", '{"a": [1, 2]}'),
        ("a", "json", '"a"'),
        ({"a": np.int64(1), "b": np.array([1, 2]), "c": dt.date(2024, 5, 1)}, "json",
         '{"a": 1, "b": [1, 2], "c": "2024-05-01"}'),
    ],
)  # fmt: skip
def test_values_that_fit(value: Any, kind: Any, becomes: Any) -> None:
    found = value_of(value, kind)
    assert (found, type(found)) == (becomes, type(becomes))


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        ("3", "int64"), (3.5, "int64"), (1 << 63, "int64"), (1 << 31, "int32"), ("1.5", "float64"),
        (1, "bool"), (1, "string"), (b"a", "string"), (5, "binary"), ("soon", "date"), (7, "timestamp"),
        ("ab", ("list", "string")), ({"a": 1}, ("list", "string")), ([1], PLACE), ({"pages": 1}, PLACE),
        (float("nan"), "json"), (b"a", "json"), ({"a": [object()]}, "json"), ((n for n in "ab"), "json"),
        (len, "json"),
    ],
)  # fmt: skip
def test_values_that_do_not_fit(value: Any, kind: Any) -> None:
    """Nothing is guessed: a text is no number, and a key that no column has is not dropped."""
    with pytest.raises(ValueError, match=r"(is|has) .+"):
        value_of(value, kind)
