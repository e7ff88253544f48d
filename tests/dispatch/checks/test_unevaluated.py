"""`unevaluatedProperties` means what it means to jsonschema; slow patterns beside it have a time limit."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema.validators import Draft202012Validator

from batchrunner.dispatch.checks.json_check import JsonCheck

LEAVES: tuple[dict[str, Any] | bool, ...] = (
    True,
    False,
    {"type": "integer"},
    {"properties": {"a": True}},
    {"properties": {"a": {"type": "integer"}, "b": True}},
    {"properties": {"b": {"unevaluatedProperties": False}}},
    {"patternProperties": {"^[bc]$": {"type": "integer"}}},
    {"patternProperties": {"^(?!a)": True}},
    {"additionalProperties": {"type": "integer"}},
    {"properties": {"a": True}, "additionalProperties": {"type": "object"}},
    {"properties": {"a": True}, "unevaluatedProperties": {"type": "integer"}},
    {"required": ["b"]},
    {"$ref": "#/$defs/ref"},
    {"dependentSchemas": {"a": {"properties": {"b": True}}}},
)


def with_branches(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    several = st.lists(inner, min_size=1, max_size=3)
    return st.fixed_dictionaries(
        {},
        optional={
            "allOf": several,
            "anyOf": several,
            "oneOf": several,
            "not": inner,
            "if": inner,
            "then": inner,
            "else": inner,
            "properties": st.fixed_dictionaries({}, optional={"a": inner, "c": inner}),
            "unevaluatedProperties": st.sampled_from([False, True, {"type": "integer"}]),
        },
    )


SCHEMAS = st.recursive(st.sampled_from(LEAVES), with_branches, max_leaves=6)
VALUES = st.recursive(
    st.sampled_from([1, "x"]),
    lambda inner: st.dictionaries(st.sampled_from(["a", "b", "c", "d"]), inner, max_size=4),
    max_leaves=6,
)


@given(inner=SCHEMAS, wanted=st.sampled_from([False, {"type": "integer"}]), value=VALUES)
def test_it_means_what_it_means_to_jsonschema(inner: Any, wanted: Any, value: Any) -> None:
    """Whatever keywords stand beside it, or in schemas for the same object."""
    schema = {
        "$defs": {"ref": {"properties": {"c": True}}},
        "allOf": [inner],
        "unevaluatedProperties": wanted,
    }
    expected = Draft202012Validator(schema).is_valid(value)
    complaint = JsonCheck(None, by_row=True).parse(json.dumps(value), schema).complaint
    assert (complaint is None) == expected, complaint


LONG = "a" * 50 + "!"


@pytest.mark.parametrize("pattern", [r"^(?!z)(a|aa)+$", r"^(a|aa)+$"])
@pytest.mark.parametrize("dialect", ["2019-09", "2020-12"])
@pytest.mark.parametrize("nest", [lambda part: part, lambda part: {"anyOf": [part]}], ids=["beside", "below"])
def test_a_slow_pattern_ends(pattern: str, dialect: str, nest: Any) -> None:
    """Python's `re` would try all ways to part the letters, for longer than a life."""
    about = {"$schema": f"https://json-schema.org/draft/{dialect}/schema"}
    check = JsonCheck(
        {**about, "unevaluatedProperties": False, **nest({"patternProperties": {pattern: True}})}
    )
    assert check.parse(json.dumps({LONG: 1})).complaint is not None
    assert check.parse('{"aa": 1}').complaint is None


def test_a_slow_pattern_ends_where_a_schema_names_its_dialect() -> None:
    """`$schema`, also in a part of a schema, brings Python's `re` no part of the check."""
    about = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
    schema = {
        **about,
        "$defs": {"a": {**about, "pattern": r"^(?!z)(a|aa)+$"}},
        "items": {"$ref": "#/$defs/a"},
    }
    assert JsonCheck(schema).parse(json.dumps([LONG])).complaint is not None
    assert JsonCheck(schema).parse('["aa"]').complaint is None


def test_the_complaint_names_the_keys() -> None:
    """A model that is asked again can learn from it."""
    schema = {"properties": {"a": True}, "unevaluatedProperties": False}
    found = JsonCheck(schema).parse('{"a": 1, "b": 2}')
    assert found.complaint == (
        "the answer does not satisfy its schema: unevaluated properties are not allowed ('b')"
    )
    nested = {"properties": {"a": {"unevaluatedProperties": {"type": "string"}}}}
    found = JsonCheck(nested).parse('{"a": {"b": 2}}')
    assert found.complaint is not None
    assert "['a']['b'] 2 is not of type 'string'" in found.complaint


def test_objects_in_objects_cost_no_more_than_their_size() -> None:
    """Each is looked at once for its keys and once for its values, however deep it lies."""
    schema = {
        "properties": {"a": {"$ref": "#"}}, "patternProperties": {"^b": {"$ref": "#"}},
        "unevaluatedProperties": False,
    }  # fmt: skip
    value: dict[str, Any] = {}
    for _ in range(40):
        value = {"a": value, "b": {}}
    assert JsonCheck(schema).parse(json.dumps(value)).complaint is None
    assert Draft202012Validator(schema).is_valid({"a": {}})
