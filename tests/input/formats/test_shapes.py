"""What templates render of the numbers and times of input files: what the file says."""

from __future__ import annotations

import datetime as dt
import json
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.conftest import batchrun, job_of, write_job

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

BIG = "123456789012345678901234567890"
PRECISE = "3.14159265358979323846"


def rendered(directory: Path, file: Path, types: Mapping[str, str] | None = None) -> list[Any]:
    """Return what `{{ v }}` renders of each row, or why it cannot be sent."""
    job = job_of(directory, input={"path": str(file), "types": types or {}}, prompt={"user": "{{ v }}"})
    checked = batchrun("check", write_job(job, directory), "--json")
    found = json.loads(checked.stdout)
    assert "prompts" in found, found
    return [row["error"] or row["prompt"][0]["content"] for row in found["prompts"]]


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        # as they are written
        (["7", "-1"], ["7", "-1"]),
        (["9223372036854775807", "-9223372036854775808"], ["9223372036854775807", "-9223372036854775808"]),
        (["9223372036854775808", "1"], ["9223372036854775808", "1"]),
        ([BIG, "3"], [BIG, "3"]),
        (["-" + BIG, "1.10"], ["-" + BIG, "1.10"]),
        (["9007199254740993", "1.5"], ["9007199254740993", "1.5"]),
        (["1.5", "9007199254740993"], ["1.5", "9007199254740993"]),
        (["9007199254740993", "1"], ["9007199254740993", "1"]),
        ([PRECISE, "1.10"], [PRECISE, "1.10"]),
        (["12345678901234567.89", "1"], ["12345678901234567.89", "1"]),
        (['"a"', "1.10"], ["a", "1.10"]),
        (['"a"', '{"b": 1.10}'], ["a", '{"b":1.10}']),
        (["0.30000000000000004", "2.5"], ["0.30000000000000004", "2.5"]),
        # in objects and lists
        ([f"[{BIG}, 1]"], [f"[{BIG},1]"]),
        ([f'{{"a": {BIG}}}', '{"a": 3}'], [f'{{"a":{BIG}}}', '{"a":3}']),
        (['{"a": [9007199254740993, 1.5]}'], ['{"a":[9007199254740993,1.5]}']),
        # as floats, as docs/how-to/data.md says
        (["1.10", "3"], ["1.1", "3.0"]),
        (["1e3", "0.10000000000000001"], ["1000.0", "0.1"]),
        (["0.1000000000000000055511151231257827021181583404541015625"], ["0.1"]),
        (['{"a": 1.00000000000000000001}'], ["{'a': 1.0}"]),
    ],
)
def test_numbers_in_json_lines(tmp_path: Path, written: list[str], expected: list[str]) -> None:
    """A number that 64 bits cannot hold makes its column a text, of which each value is as it is written."""
    file = tmp_path / "in.jsonl"
    file.write_text("".join(f'{{"v": {value}, "long_id": "{BIG}"}}\n' for value in written))
    assert rendered(tmp_path, file) == expected


@pytest.mark.parametrize(
    ("kind", "written", "expected"),
    [
        ("string", ["1.10", "3", f"[1.0, {BIG}]"], ["1.10", "3", f"[1.0,{BIG}]"]),
        ("float64", [PRECISE, "3"], ["3.141592653589793", "3.0"]),
    ],
)
def test_json_lines_with_a_type(tmp_path: Path, kind: str, written: list[str], expected: list[str]) -> None:
    """The job decides what becomes of a column of numbers."""
    file = tmp_path / "in.jsonl"
    file.write_text("".join(f'{{"v": {value}}}\n' for value in written))
    assert rendered(tmp_path, file, {"v": kind}) == expected


def test_a_whole_number_that_its_type_cannot_hold(tmp_path: Path) -> None:
    """The row says what stands in the file, not what is left of it."""
    file = tmp_path / "in.jsonl"
    file.write_text(f'{{"v": {BIG}}}\n')
    (error,) = rendered(tmp_path, file, {"v": "int64"})
    assert f"column 'v': '{BIG}' is not int64" in error


@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [
        ("string", ["007", "+4912345", BIG, "1.10", "1e400"], []),
        ("int64", ["7"], [BIG, "1.10", "1e3"]),
        ("int32", ["7"], ["2147483648"]),
        ("float64", ["inf", "nan", "1.5"], ["1e400", "-1e400"]),
        ("float32", ["1.5"], ["1e39"]),
        (
            "timestamp",
            ["2024-01-02 03:04:05"],
            ["2024-01-02T03:04:05+02:00", "2024-01-02 03:04:05.123456789"],
        ),
    ],
)
def test_digits_in_csv(tmp_path: Path, kind: str, good: list[str], bad: list[str]) -> None:
    """Without a type all is text; with one, a value is what the file says, or its row fails."""
    for values in (good, bad):
        for at in range(0, len(values), 3):  # `check` shows three
            some = values[at : at + 3]
            file = tmp_path / "in.csv"
            file.write_text("".join(f"{line}\n" for line in ["v", *some]))
            found = rendered(tmp_path, file, {"v": kind})
            wrong = [f"{value!r} is not" for value in some]
            assert all(map(str.__contains__, found, some if values is good else wrong)), found


@pytest.mark.parametrize(
    ("value", "kind", "expected"),
    [
        (2**64 - 1, pa.uint64(), str(2**64 - 1)),
        (Decimal("1.10"), pa.decimal128(38, 2), "1.10"),
        (Decimal(BIG + ".10"), pa.decimal256(60, 2), BIG + ".10"),
        (1704164645123456789, pa.timestamp("ns"), "2024-01-02 03:04:05.123456789"),
        (1704164645000000, pa.timestamp("us"), "2024-01-02 03:04:05"),
        (1704164645000000, pa.timestamp("us", "Europe/Berlin"), "2024-01-02 04:04:05+01:00"),
        (1704164645, pa.timestamp("s", "UTC"), "2024-01-02 03:04:05+00:00"),
        (dt.date(2024, 1, 2), pa.date32(), "2024-01-02"),
        (dt.time(1, 2, 3), pa.time64("us"), "01:02:03"),
        (0.1, pa.float32(), "0.10000000149011612"),
        ([2**63 + 1], pa.list_(pa.uint64()), f"[{2**63 + 1}]"),
        ({"a": 2**64 - 1}, pa.struct([("a", pa.uint64())]), f"{{'a': {2**64 - 1}}}"),
    ],
)
def test_values_in_parquet(tmp_path: Path, value: object, kind: pa.DataType, expected: str) -> None:
    """Integers and decimals have all digits; times have those of the file, and its time zone."""
    pq.write_table(pa.table({"v": pa.array([value], kind)}), tmp_path / "in.parquet")
    assert rendered(tmp_path, tmp_path / "in.parquet") == [expected]
