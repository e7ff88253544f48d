"""The sorted copy of an input: its keys, groups and row groups."""

from __future__ import annotations

import random
from itertools import groupby

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchrunner.input.prefixes import sort_key
from batchrunner.input.sorted_copy import cut_into_groups


@given(st.data())
def test_equal_beginnings_stand_together(data: st.DataObject) -> None:
    """In the order of keys all prompts with the same first blocks are neighbours, whatever follows."""
    blocks = [bytes([letter]) * 64 for letter in b"abc"]
    prompts = data.draw(
        st.lists(
            st.tuples(st.lists(st.sampled_from(blocks), max_size=5), st.binary(max_size=70)).map(
                lambda parts: b"".join(parts[0]) + parts[1]
            ),
            max_size=40,
        )
    )
    ordered = sorted(prompts, key=sort_key)
    for depth in range(0, 400, 64):
        deep = (prompt[:depth] for prompt in ordered if len(prompt) >= depth)
        beginnings = [beginning for beginning, _ in groupby(deep)]
        assert len(beginnings) == len(set(beginnings))
    assert [key for key, _ in groupby(ordered)] == list(dict.fromkeys(ordered))


@pytest.mark.parametrize("length", [0, 63, 64, 1024, 5000, 1_000_000])
def test_a_longer_conversation_comes_behind_its_beginning(length: int) -> None:
    """A prompt that goes on where another ends has a key that does so too, and that is short."""
    turn = random.Random(length).randbytes(length)
    key, _ = sort_key(turn)
    longer, _ = sort_key(turn + b"and then?" * 99)
    assert longer.startswith(key)
    assert len(key) <= 520 or length > 1 << 20


@given(st.lists(st.integers(0, 40), max_size=300), st.integers(1, 20))
def test_row_groups_are_of_whole_prefix_groups(rows: list[int], wanted: int) -> None:
    """They hold all rows in order, about as many as wanted, and part rows that begin alike if they must."""
    keys = [b"%02d" % group * 4 for group in sorted(rows)]
    cuts = list(cut_into_groups([(key, 1) for key in keys], wanted))
    assert sum(count for count, _ in cuts) == len(rows)
    start = 0
    for count, size in cuts[:-1]:
        assert wanted <= count == size <= 2 * wanted
        if keys[start + count - 1] == keys[start + count]:
            assert len(set(keys[start + wanted - 1 : start + count])) == 1
        start += count


@given(st.lists(st.integers(0, 20 << 20), max_size=100), st.integers(1, 50))
def test_row_groups_fit_into_memory(sizes: list[int], wanted: int) -> None:
    """However large rows are, those of one group have 32 MiB at most, or are one row."""
    cuts = list(cut_into_groups([(b"", size) for size in sizes], wanted))
    assert sum(count for count, _ in cuts) == len(sizes)
    assert all(size <= 32 << 20 for _, size in cuts)


def prompts(texts: list[str], window: int = 1024) -> list[list[bytes]]:
    """Return texts as a sample that is everything."""
    return [[text.encode() for text in texts[at : at + window]] for at in range(0, len(texts), window)]
