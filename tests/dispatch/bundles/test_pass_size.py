"""The size of a list of rows without decoding."""

from __future__ import annotations

from batchrunner.dispatch.bundles.pass_size import LISTS, MOST_ROWS, PassSize
from batchrunner.dispatch.forward_passes import ForwardPasses
from tests.support.prompts import request


def test_a_list_has_a_pass_or_a_quarter_of_the_rows_in_flight() -> None:
    """So several are in flight, and the server has rows while one of them travels; the speed is no matter."""
    size = PassSize(ForwardPasses(16_384))
    assert size.most_tokens == 16_384
    for end in range(10):
        size.ended(10.0 * end)
    assert [size.rows(outstanding) for outstanding in (1, 7, 40, 10**6)] == [0, 1, 40 // LISTS, MOST_ROWS]


def test_rows_that_are_taken_tell_how_many_a_pass_holds() -> None:
    """The queue's band is made of their tokens."""
    passes = ForwardPasses(1000)
    size = PassSize(passes)
    for row in range(50):
        size.taken(request(row, "x" * 40))  # of about 10 tokens
    assert passes.rows(None) == 100
