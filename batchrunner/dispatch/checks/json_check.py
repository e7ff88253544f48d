"""Checks that an answer is JSON, and that it satisfies its schema. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from functools import lru_cache
from typing import Any, NamedTuple

import orjson

from batchrunner.core.errors import JobError
from batchrunner.core.exact_json import part_at, read_exactly
from batchrunner.dispatch.checks.patterns import Pattern
from batchrunner.dispatch.checks.schema_circles import circle_in
from batchrunner.dispatch.checks.unevaluated import note, noting
from batchrunner.job.arrow_types import fit, kind_of_schema

FENCE = "```"
KEPT_SCHEMAS = 256
"""Schemas from a column that are kept compiled."""
_DATA = {"const", "default", "enum", "examples"}
"""Keywords whose values are no schemas."""
LONGEST_COMPLAINT = 300
"""Most characters of what is wrong with a value."""


class ParsedText(NamedTuple):
    """An answer as JSON."""

    value: Any
    """The value; None where there is none, or where it is null."""
    fitted: Any
    """The value as the column `parsed` holds it."""
    complaint: str | None
    """What is wrong with it, in a sentence; None for nothing."""


class JsonCheck:
    """Parses answers, and checks them against a schema."""

    def __init__(self, schema: Mapping[str, Any] | None, *, by_row: bool = False, where: str = "") -> None:
        """Compile the schema of all rows, or take that of each row where it differs (`by_row`).

        Raises JobError, naming `where`, for a schema that is none.
        """
        self._by_row = by_row
        self._validator = None if schema is None else _validator(schema, where)
        self._kind = kind_of_schema(schema)

    def parse(self, text: str, own_schema: Any = None) -> ParsedText:
        """Return an answer as JSON; `own_schema` is that of its row, as JSON text or a mapping."""
        try:
            value = read_exactly(text)
        except orjson.JSONDecodeError as failure:
            why = "it has a code fence (```) around it" if FENCE in text else _short(str(failure))
            return ParsedText(None, None, f"the answer is not JSON: {why}")
        validator = self._validator
        try:
            if self._by_row and own_schema is not None:
                as_text = own_schema if isinstance(own_schema, str) else orjson.dumps(own_schema).decode()
                validator = _validator_of_text(as_text)
            wrong = None if validator is None else next(validator.iter_errors(value), None)
        except JobError as failure:
            return ParsedText(value, None, str(failure))
        except Exception as failure:  # noqa: BLE001 - a schema may fail on a value in any way
            name = type(failure).__name__
            return ParsedText(value, None, f"the answer cannot be checked against its schema ({name})")
        if wrong is not None:
            at = "".join(f"[{step!r}]" for step in wrong.absolute_path)
            told = f"{at} {_short(wrong.message)}".lstrip()
            return ParsedText(value, None, f"the answer does not satisfy its schema: {told}")
        try:
            return ParsedText(value, fit(value, self._kind), None)
        except ValueError as failure:
            return ParsedText(value, None, f"the answer does not fit its column: {_short(str(failure))}")


def schema_problem(schema: Mapping[str, Any]) -> str | None:
    """Say why something is no JSON Schema that answers can be checked against; None where it is one."""
    from jsonschema import FormatChecker  # noqa: PLC0415 - 60 ms, only for jobs with a schema
    from jsonschema.exceptions import SchemaError  # noqa: PLC0415
    from jsonschema.validators import Draft202012Validator, validator_for  # noqa: PLC0415

    patterns = FormatChecker(formats=())
    patterns.checks("regex", raises=ValueError)(_is_pattern)
    try:
        validator_for(schema, default=Draft202012Validator).check_schema(schema, format_checker=patterns)
    except SchemaError as failure:
        return _short(failure.message)
    except Exception as failure:  # noqa: BLE001 - nested too deeply, for example
        return f"it cannot be read ({type(failure).__name__})"
    return _unresolved(schema, schema, 0) or circle_in(schema)


def _validator(schema: Mapping[str, Any], where: str) -> Any:
    from jsonschema.validators import Draft202012Validator, extend, validator_for  # noqa: PLC0415
    from referencing import Registry  # noqa: PLC0415

    problem = schema_problem(schema)
    if problem is not None:
        raise JobError(f"{where}: not a JSON Schema that answers can be checked against: {problem}")
    base = validator_for(schema, default=Draft202012Validator)
    own = {
        "pattern": _check_pattern,
        "patternProperties": _check_pattern_properties,
        "additionalProperties": _check_additional_properties,
        "multipleOf": _check_multiple,
        **noting(base.VALIDATORS),
    }
    return extend(base, own)(_without_dialect(schema), registry=Registry())


def _without_dialect(part: Any) -> Any:
    """Return a schema without `$schema`: where it stands, jsonschema goes back to its own keywords."""
    if isinstance(part, list):
        return [_without_dialect(below) for below in part]
    if not isinstance(part, dict):
        return part
    return {
        name: below if name in _DATA else _without_dialect(below)
        for name, below in part.items()
        if name != "$schema" or not isinstance(below, str)
    }


def _is_pattern(value: object) -> bool:
    """Tell whether a text is a regular expression in one of the dialects; raises ValueError where not."""
    try:
        return not isinstance(value, str) or Pattern(value).is_in("") in {True, False}
    except Exception as failure:  # noqa: BLE001 - of the package `regex`: its own, RecursionError, MemoryError
        raise ValueError(str(failure)) from None


def _check_multiple(_: Any, step: float, value: Any, __: Any) -> Any:
    """Check the keyword `multipleOf` exactly: for jsonschema 0.07 is no multiple of 0.01."""
    from jsonschema.exceptions import ValidationError  # noqa: PLC0415

    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if is_number and (Fraction(str(value)) / Fraction(str(step))).denominator != 1:
        yield ValidationError(f"{value!r} is not a multiple of {step!r}")


def _check_pattern(_: Any, pattern: str, value: Any, __: Any) -> Any:
    """Check the keyword `pattern` in a bounded time, as those below do; jsonschema uses Python's `re`."""
    from jsonschema.exceptions import ValidationError  # noqa: PLC0415

    if isinstance(value, str) and not Pattern(pattern).is_in(value):
        yield ValidationError(f"{value!r} does not match {pattern!r}")


def _check_pattern_properties(validator: Any, patterns: Mapping[str, Any], value: Any, _: Any) -> Any:
    """Check the keyword `patternProperties`."""
    if isinstance(value, dict):
        for pattern, schema in patterns.items():
            for key in filter(Pattern(pattern).is_in, value):
                if not note(value, [key]):
                    continue
                yield from validator.descend(value[key], schema, path=key, schema_path=pattern)


def _check_additional_properties(validator: Any, wanted: Any, value: Any, schema: Any) -> Any:
    """Check the keyword `additionalProperties`."""
    from jsonschema.exceptions import ValidationError  # noqa: PLC0415

    if not isinstance(value, dict):
        return
    patterns = [Pattern(pattern) for pattern in schema.get("patternProperties", ())]
    named = schema.get("properties", {})
    further = [key for key in value if key not in named and not any(each.is_in(key) for each in patterns)]
    if not note(value, further):
        return
    if wanted is False and further:
        yield ValidationError(f"additional properties are not allowed ({', '.join(map(repr, further))})")
    if isinstance(wanted, dict):
        for key in further:
            yield from validator.descend(value[key], wanted, path=key)


@lru_cache(KEPT_SCHEMAS)
def _validator_of_text(schema: str) -> Any:
    try:
        found = read_exactly(schema)
    except orjson.JSONDecodeError:
        found = None
    if not isinstance(found, dict):
        raise JobError(
            "the row's json_schema: not a JSON Schema that answers can be checked against: not JSON"
        )
    return _validator(found, "the row's json_schema")


def _unresolved(part: Any, root: Mapping[str, Any], depth: int) -> str | None:
    """Say which reference of a schema leads nowhere; none is looked up elsewhere."""
    if depth > 100:  # noqa: PLR2004
        return "it is nested too deeply"
    inner = part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
    reference = part.get("$ref") if isinstance(part, dict) else None
    if isinstance(reference, str) and not _leads_somewhere(reference, root):
        return f"its reference {reference!r} leads nowhere in it"
    return next(filter(None, (_unresolved(below, root, depth + 1) for below in inner)), None)


def _leads_somewhere(reference: str, root: Mapping[str, Any]) -> bool:
    if not reference.startswith("#/"):
        return reference.startswith("#")
    try:
        part_at(root, reference)
    except LookupError:
        return False
    return True


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= LONGEST_COMPLAINT else line[: LONGEST_COMPLAINT - 1] + "…"
