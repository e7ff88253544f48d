"""Columns of a function by its annotation, and what a function may return for them."""

import dataclasses
import datetime as dt
import decimal
import enum
import threading
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, NotRequired
from typing import TypedDict as PlainTypedDict

import numpy as np
import pydantic
import pytest
from typing_extensions import TypedDict

from batchrunner.core.hook_protocol import HookLoadError
from batchrunner.core.types import ColumnKind
from batchrunner.job.hook_loading import (
    Annotations,
    HookFunction,
    annotations_of,
    columns_of,
    load_functions,
    row_value,
)


class Mood(enum.Enum):
    GOOD = "good"
    BAD = "bad"


class Place(TypedDict):
    page: int
    line: NotRequired[float]


PLACE = ("struct", (("page", "int64"), ("line", "float64")))


@dataclasses.dataclass
class Data:
    number: int
    place: Place | None = None


class PlaceModel(pydantic.BaseModel):
    page: int
    line: float | None = None


class Model(pydantic.BaseModel):
    number: int
    place: PlaceModel | None = None


class Named(NamedTuple):
    number: int
    place: Place | None = None


class Message(PlainTypedDict, total=False):
    role: Literal["user", "assistant"]
    content: Annotated[str | None, "text"]
    replies: "list[Message]"


@dataclasses.dataclass
class Chat:
    messages: tuple[Message, ...]
    number: int = 0


class Chats(PlainTypedDict):
    chats: NotRequired[dict[str, int] | list[Chat]]
    last: Chat | None


def test_typed_dicts_of_python_within_each_other() -> None:
    """A TypedDict of the module `typing` is a struct, also in a dataclass; one in itself is JSON."""
    message = ("struct", (("role", "string"), ("content", "string"), ("replies", ("list", "json"))))
    chat = ("struct", (("messages", ("list", message)), ("number", "int64")))
    assert columns_of(Chats) == (("chats", "json"), ("last", chat))
    assert columns_of(Chat) == chat[1]


class Odd(TypedDict):
    a: threading.Thread


COLUMNS = Annotations((("number", "int64"), ("place", PLACE)), may_be_none=True)


@pytest.mark.parametrize("kind", [Data, Model, Named])
def test_classes_with_fields(kind: Any) -> None:
    """A dataclass, a model of pydantic and a named tuple are columns, and their objects are values."""
    assert columns_of(kind) == COLUMNS.columns
    value = kind(number=3, place={"page": 1})
    assert row_value(value, COLUMNS) == {"number": 3, "place": {"page": 1, "line": None}}


def test_what_a_function_says() -> None:
    """It may return None, and names the columns that it reads; classes without fields are no columns."""

    def function(row: Place) -> Data | None: ...

    assert annotations_of(function) == (COLUMNS.columns, True, ("page", "line"))
    assert annotations_of(Data).columns == COLUMNS.columns
    for kind in (dict, str, list[int], None):
        assert columns_of(kind) == ()
    with pytest.raises(ValueError, match=r"returns a column a: .*Thread"):
        columns_of(Odd)


def test_values_become_plain_python() -> None:
    """Numpy's numbers, enums, sets, times with a zone and the like are values as columns hold them."""
    kinds: dict[str, ColumnKind] = {
        "whole": "int64", "real": "float64", "yes": "bool", "mood": "string", "price": "string",
        "many": ("list", "int64"), "time": "timestamp", "day": "date", "any": "json",
        "missing": "int32",
    }  # fmt: skip
    known = Annotations(tuple(kinds.items()))
    zone = dt.timezone(dt.timedelta(hours=2))
    value = {
        "whole": np.int32(3), "real": np.float32(0.5), "yes": np.bool_(True), "mood": Mood.GOOD,
        "price": decimal.Decimal("1.50"), "many": np.array([1, 2]), "day": dt.date(2024, 1, 1),
        "time": dt.datetime(2024, 1, 1, 12, tzinfo=zone), "any": {"a": [Model(number=1)], "b": {1}},
    }  # fmt: skip
    assert row_value(value, known) == {
        "whole": 3, "real": 0.5, "yes": True, "mood": "good", "price": "1.50", "many": [1, 2],
        "time": dt.datetime(2024, 1, 1, 10),  # noqa: DTZ001
        "day": dt.date(2024, 1, 1),
        "any": '{"a":[{"number":1,"place":null}],"b":[1]}', "missing": None,
    }  # fmt: skip
    assert row_value(None, COLUMNS) == {"number": None, "place": None}


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ({"number": "3"}, "number: '3' is not a whole number"),
        ({"number": 1 << 63}, "number: 9223372036854775808 has more than 64 bits"),
        ({"number": 1, "place": [1]}, r"place: '\[1\]' is not of type object"),
        ({"numbr": 1}, r"returned 'numbr', not a declared column \(columns: number, place\)"),
        ({"place": {"page": 1, "pages": 2}}, r"place: 'pages' is not a declared key \(keys: "),
        (3, "returned an int: return a dict"),
    ],
)
def test_values_that_do_not_fit(value: Any, says: str) -> None:
    """The error names the column, and is one line."""
    with pytest.raises(ValueError, match=says):
        row_value(value, COLUMNS)


@pytest.mark.parametrize(
    ("code", "name", "says"),
    [
        ("", "a:prompt", "cannot be imported: .* has no attribute 'prompt'"),
        ("", "nowhere.at_all:prompt", "No module named 'refused_nowhere.at_all'"),
        ("import sys; sys.exit(4)", "c:prompt", "cannot be imported: refused_c.py:1: SystemExit: 4"),
        ("def prompt(): pass", "d:prompt", r"takes \(\): it must take one argument, the row"),
        ("async def prompt(row): pass", "e:prompt", "is asynchronous or a generator: give"),
        ("prompt = 3", "g:prompt", "is not a function"),
    ],
)
def test_functions_that_cannot_be_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, name: str, says: str
) -> None:
    """Each is one line, with the function's place in the job and its name."""
    module = "refused_" + name
    (tmp_path / f"{module.partition(':')[0].partition('.')[0]}.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(HookLoadError, match=says) as caught:
        load_functions([HookFunction("prompt.python", module, module)])
    assert str(caught.value).startswith(f"prompt.python: {module}")
