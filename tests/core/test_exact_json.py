"""References within JSON Schemas lead to their parts."""

import pytest

from batchrunner.core.exact_json import part_at

SCHEMA = {"$defs": {"a b": 1, "ü": {"b": 2}}}


@pytest.mark.parametrize(("reference", "part"), [("#", SCHEMA), ("#/$defs/a b", 1), ("#/$defs/ü/b", 2)])
def test_a_reference_leads_to_a_part(reference: str, part: object) -> None:
    assert part_at(SCHEMA, reference) == part


@pytest.mark.parametrize("reference", ["", "other.json", "#/b", "#/$defs/a b/c"])
def test_a_reference_that_leads_nowhere_is_refused(reference: str) -> None:
    with pytest.raises(LookupError):
        part_at(SCHEMA, reference)
