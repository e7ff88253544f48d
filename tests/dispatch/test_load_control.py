"""Runs that use an engine at once share its windows."""

from hypothesis import given
from hypothesis import strategies as st

from batchrunner.dispatch.load_control import fair_shares


@given(whole=st.integers(1, 5000), wanted=st.lists(st.integers(0, 2000), min_size=1, max_size=12))
def test_runs_share_slots_fairly(whole: int, wanted: list[int]) -> None:
    """All slots are given, and no run that wants more has fewer than another, but for one slot."""
    parts = fair_shares(whole, wanted)
    assert sum(parts) == whole
    least = min((part for part, want in zip(parts, wanted, strict=True) if part < want), default=whole)
    assert all(part <= least + 1 for part, want in zip(parts, wanted, strict=True) if part <= want)
