"""References within JSON Schemas lead to their parts."""

import pytest

from batchrunner.core.exact_json import part_at

SCHEMA = {"$defs": {"a b": 1, "c/d": 2, "e~f": 3, "ü": 4}, "anyOf": [{"type": "null"}, {"type": "integer"}]}


@pytest.mark.parametrize(
    ("reference", "part"),
    [
        ("#", SCHEMA),
        ("#/$defs/a%20b", 1),
        ("#/$defs/a b", 1),
        ("#/$defs/c~1d", 2),
        ("#/$defs/e~0f", 3),
        ("#/$defs/%C3%BC", 4),
        ("#/anyOf/1", {"type": "integer"}),
    ],
)
def test_a_reference_leads_to_a_part(reference: str, part: object) -> None:
    assert part_at(SCHEMA, reference) == part


@pytest.mark.parametrize(
    "reference", ["", "#a", "other.json", "#/b", "#/anyOf/2", "#/anyOf/x", "#/$defs/ü/1", "#/anyOf/1/type/x"]
)
def test_a_reference_that_leads_nowhere_is_refused(reference: str) -> None:
    with pytest.raises(LookupError):
        part_at(SCHEMA, reference)
