"""IDs that stand on several lines are found, however many there are."""

from __future__ import annotations

from batchrunner.input.formats.unique_ids import CHUNK_IDS, UniqueIds


def test_repeated_ids() -> None:
    """Each line is found whose ID an earlier line has, in the same chunk and in others, and no other line."""
    ids = UniqueIds()
    count = 2 * CHUNK_IDS + 10
    repeated = {5: 3, CHUNK_IDS + 7: 3, count - 1: CHUNK_IDS + 9, count - 2: 0}
    for line in range(count):
        ids.add(f"id {repeated.get(line, line)}", line)
    assert sorted(ids.repeated()) == sorted(repeated)


def test_no_ids() -> None:
    """A file without IDs has none twice."""
    assert not UniqueIds().repeated()
