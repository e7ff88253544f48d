"""JSON that the simulated engine makes up: values that satisfy a schema, as far as it is a simple one."""

from typing import Any

import orjson

from batchrunner.core.json_pointer import part_at

MOST_DEPTH = 16
_WORD = "simulated"


def made_up(schema: Any, number: int) -> str:
    """Return JSON for a schema, given as a mapping or as JSON text; the same for the same `number`."""
    try:
        root = orjson.loads(schema) if isinstance(schema, str) else schema
    except orjson.JSONDecodeError:
        root = {}
    return orjson.dumps(_value(root, root, number, 0)).decode()


def _value(schema: Any, root: Any, number: int, depth: int) -> Any:
    if not isinstance(schema, dict) or depth > MOST_DEPTH:
        return None
    if "$ref" in schema:
        return _value(_referred(schema["$ref"], root), root, number, depth + 1)
    if "const" in schema:
        return schema["const"]
    choices = schema.get("enum")
    if choices:
        return choices[number % len(choices)]
    parts = schema.get("anyOf") or schema.get("oneOf") or schema.get("allOf")
    if parts:
        return _value(parts[0], root, number, depth + 1)
    return _of_type(schema, root, number, depth)


def _of_type(schema: dict[str, Any], root: Any, number: int, depth: int) -> Any:
    kinds = schema.get("type", "object" if "properties" in schema else "string")
    kind = kinds[0] if isinstance(kinds, list) and kinds else kinds
    if kind == "object":
        properties = schema.get("properties") or {}
        return {name: _value(part, root, number, depth + 1) for name, part in properties.items()}
    if kind == "array":
        count = max(schema.get("minItems", 1), 0)
        return [_value(schema.get("items", {}), root, number + at, depth + 1) for at in range(count)]
    if kind in {"integer", "number"}:
        least, most = schema.get("minimum", 0), schema.get("maximum")
        value = least + number % 10
        return value if most is None else min(value, most)
    if kind == "boolean":
        return number % 2 == 0
    if kind == "null":
        return None
    text = _WORD + "." * max(0, schema.get("minLength", 0) - len(_WORD))
    return text[: schema.get("maxLength", len(text))]


def _referred(reference: Any, root: Any) -> Any:
    try:
        return part_at(root, str(reference))
    except LookupError:
        return None
