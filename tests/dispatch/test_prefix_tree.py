"""Which row follows which."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from batchrunner.dispatch.prefix_tree import find_leaders
from tests.support.prompts import shared, words


@given(st.lists(st.text(alphabet="ab", min_size=1, max_size=8), min_size=1, max_size=30))
def test_each_row_follows_one_that_shares_the_most_with_it(codes: list[str]) -> None:
    """Leaders first, what is computed is what the tree of all prompts holds; nobody waits for many others."""
    prefixes = ["".join(letter * 512 for letter in code).encode() for code in codes]
    places = find_leaders(prefixes)
    assert sum(place.shared_bytes for place in places.values()) == shared(prefixes)
    for index in range(len(prefixes)):
        steps, at = 0, index
        while at in places:
            steps, at = steps + 1, places[at].leader
        assert 2**steps <= len(prefixes)


def test_a_conversation_is_computed_by_its_longest_turn() -> None:
    """Turns that contain one another all follow the longest, and not each the one before."""
    turns = [words("talk", 100 * turn).encode() for turn in range(1, 7)]
    assert {place.leader for place in find_leaders(turns).values()} == {5}


def test_short_beginnings_make_no_families() -> None:
    """A template of a line is not worth an order."""
    assert find_leaders([b"Summarise: " + str(row).encode() * 100 for row in range(50)]) == {}
