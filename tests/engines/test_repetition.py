"""Repetitions that last: found at the end of a text, and not in what only looks like one."""

import os
import random
import time
from pathlib import Path

import pyarrow as pa
import pytest

from batchrunner.core.types import Request, RowRef
from batchrunner.engines.http.wire import tokens_between_events
from batchrunner.engines.repetition import (
    LEAST_CHARACTERS,
    LONGEST_PERIOD,
    Repetition,
    find_repetition,
    is_mentioned,
    is_prose,
    repeats_in_prompt,
    repeats_itself,
)

REF = RowRef(0, pa.RecordBatch.from_pydict({"a": [1]}), 0)
BEGINNING = "The answer begins in order, and then it goes on and on: "
SENTENCES = " ".join(f"Sentence {number} says something about {number * 7}." for number in range(400))


@pytest.mark.parametrize("unit", ["-", "ab", " I am sorry.", "Line\n" * 2 + "end\n", "長い文。" * 9])
@pytest.mark.parametrize("rest", [0, 1])
def test_a_loop_is_found_where_it_begins(unit: str, rest: int) -> None:
    """The text up to the first repeat is what the model had to say, wherever in a period the text ends."""
    loop = unit * (LEAST_CHARACTERS // len(unit) + 2) + unit[: rest * len(unit) // 2]
    repetition = find_repetition(BEGINNING + loop)
    assert repetition is not None
    shortest = next(at for at in range(1, len(unit) + 1) if (unit + unit)[at : at + len(unit)] == unit)
    assert repetition.period == shortest
    kept = (BEGINNING + loop)[: repetition.first_end]
    assert kept.startswith(BEGINNING)
    assert len(kept) <= len(BEGINNING) + shortest


def test_long_periods_need_several_repeats() -> None:
    """A paragraph that comes six times is a loop; one that comes five times is not yet."""
    paragraph = SENTENCES[: LONGEST_PERIOD - 9]
    assert find_repetition(paragraph * 5) is None
    assert find_repetition(paragraph * 6) == Repetition(0, len(paragraph))
    assert find_repetition(SENTENCES[: LONGEST_PERIOD + 9] * 7) is None


def _table(columns: int, rows: int) -> str:
    head = "|" + "---|" * columns
    return "\n".join([head, *(f"| {row} |" + " 0 |" * (columns - 1) for row in range(rows))])


@pytest.mark.parametrize(
    "text",
    [
        SENTENCES,
        _table(9, 400),
        "\n".join(
            f"[2026-11-28 22:{at // 60:02}:{at % 60:02}] Decode batch, #running-req: 4" for at in range(400)
        ),
        "\n".join(("=" * 110, "Title", "=" * 110) * 3),
        "\n".join(f"{number},0,0,0,0,0,0,0,0,0,0" for number in range(900)),
        ("ha " * 600) + "and then it was over",
        "And it goes round,\nand round it goes,\nand nobody knows.\n\n" * 20,
        "".join(random.Random(1).choices("ABCDwxyz0123+/", k=9000)),
    ],
)
def test_ordinary_texts_are_no_loops(text: str) -> None:
    """Numbered lines, rulers, refrains, random characters and loops that end are never stopped."""
    assert not any(find_repetition(text[:length]) for length in range(0, len(text), 97))


def test_programs_are_no_loops() -> None:
    """None of the modules at the top of Python's own library is stopped, at any length."""
    for module in sorted(Path(os.__file__).parent.glob("*.py")):
        text = module.read_text(encoding="utf-8", errors="replace")
        alarms = [length for length in range(2048, len(text), 2048) if find_repetition(text[:length])]
        assert not alarms, module


@pytest.mark.parametrize("almost", ["a" * 1_000_000 + "b", ("a" * 700 + "b") * 1400])
def test_the_search_takes_linear_time(almost: str) -> None:
    """A text that nearly repeats itself, which naive searches compare at each place, is searched at once."""
    began = time.process_time()
    for _ in range(3):
        find_repetition(almost)
    assert time.process_time() - began < 60  # A search that compares at each place would take days.


def test_a_repetition_that_the_prompt_has() -> None:
    """A prompt that repeats the same thing asks for it; one that mentions it once does not."""
    output = "yes\n" * 600
    assert repeats_in_prompt("Continue this column:\n" + "yes\n" * 20, output)
    assert not repeats_in_prompt("Say yes\nor no\n", output)
    assert not repeats_in_prompt("---\n", "-" * 3000)
    assert repeats_in_prompt([5, *[7, 8, 9] * 30], [1, 2, *[8, 9, 7] * 300])
    assert not repeats_in_prompt([5, 7, 8, 9, 7, 8, 9], [8, 9, 7] * 300)
    assert not repeats_in_prompt("anything", "")


def test_a_prompt_that_repeats_itself() -> None:
    """A repetition is found wherever it is, as characters or as token ids; rules are too short."""
    question = f"Translate: {SENTENCES}"
    for period in (4, 100, 1500):
        prompt = question + SENTENCES[:period] * (8000 // period) + "\nThe end."
        assert repeats_itself(prompt)
        assert repeats_itself([ord(character) for character in prompt[::4]])
    assert not repeats_itself(question)
    assert not repeats_itself([ord(character) for character in question])
    assert not repeats_itself("Title\n" + "=" * 110 + "\n" + question + "-" * 110)
    assert not repeats_itself("")


@pytest.mark.parametrize(
    "period",
    [
        " I am sorry.",
        "\n- 1/4 cup of chopped mint\n- 1/4 cup of chopped dill",
        "He said: \u201cNo.\u201d She left.\n",
        " #goodmorning #happyday",
        "今天天气很好",
        "நான் இன்று சந்தைக்குச் செல்கிறேன். ",
        "ယနေ့ ကျွန်ုပ်တို့ ဈေးသို့ သွားမည်။ ",
        "ថ្ងៃនេះយើងទៅផ្សារ",
        "The door was closed and the light was off. ",
        "\n\nThis is not right, so we have to look for another root: $x = 3$.  So {4} is the sum.",
    ],
)
def test_prose(period: str) -> None:
    """Sentences, lists and scripts without spaces are prose, wherever in a period the text begins."""
    assert all(is_prose(period[start:] + period[:start]) for start in range(len(period)))


@pytest.mark.parametrize(
    "period",
    [
        "A", "GATC", "0, ", "-", " ",
        "\nred,no,3", "\n| a cell | a cell |", "\nSTATUS", "0\n", '"name": "unknown", ',
        "),\n        words.Word(0", ",\n\tKIND_A,\n\tKIND_B", " x +", " FROM a.b JOIN",
        "Link error at 04:30:31 of node\n", '"could not open the file",\n', "one      two\n",
        "[Decode batch ended] ",
    ],
)  # fmt: skip
def test_data_is_no_prose(period: str) -> None:
    """Encoded data, rows of tables, code and log lines have equal records in earnest, wherever they begin."""
    assert not any(is_prose(period[start:] + period[:start]) for start in range(len(period)))


def test_a_prompt_that_mentions_the_repetition() -> None:
    """A prompt with one period, or nearly one, may ask for it; a prompt about something else does not."""
    output = "I will not talk in class.\n" * 100
    assert is_mentioned('Write "I will not talk in class." 500 times.', output)
    assert not is_mentioned("Write what you will not do in class.", output)
    assert is_mentioned([1, *range(50, 99), 2], [3, *[*range(49, 100)] * 30])
    assert not is_mentioned([1, *range(50, 80), 2], [3, *[*range(49, 100)] * 30])
    assert not is_mentioned("anything", "")


def _row(**sampling: object) -> Request:
    return Request(REF, "input_ids", [1], {"max_new_tokens": 8192, **sampling}, stops_repetition="any")


def test_which_rows_are_watched() -> None:
    """Rows that may have to repeat, short rows and rows of several outputs are not watched."""
    assert tokens_between_events(_row()) == 256
    assert tokens_between_events(_row(max_new_tokens=65_536)) == 2048
    assert tokens_between_events(_row(max_new_tokens=None)) == 512
    assert tokens_between_events(_row(json_schema='{"properties": {"a": {"type": "string"}}}')) == 256
    for sampling in (
        {"json_schema": '{"properties": {"a": {"type": "array"}}}'},
        {"regex": "(ab)+"}, {"ebnf": "root ::= root"}, {"ignore_eos": True}, {"n": 2},
        {"max_new_tokens": 100}, {"stop_regex": "x+"},
    ):  # fmt: skip
        assert tokens_between_events(_row(**sampling)) is None, sampling
    assert tokens_between_events(_row()._replace(stops_repetition=None)) is None
    assert tokens_between_events(_row()._replace(kind="messages", prompt=[])) is None


def test_which_rows_are_watched_by_default() -> None:
    """Rows with little room, any schema or a minimum length are not watched either."""
    row = _row()._replace(stops_repetition="prose")
    assert tokens_between_events(row) == 256
    for sampling in (
        {"json_schema": '{"properties": {"a": {"type": "string"}}}'},
        {"min_new_tokens": 9}, {"ignore_eos": True}, {"max_new_tokens": 2047},
    ):  # fmt: skip
        assert tokens_between_events(row._replace(sampling={**row.sampling, **sampling})) is None, sampling
