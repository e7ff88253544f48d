"""The page on job files, from their JSON Schema."""

from collections.abc import Iterable
from typing import Any

import yaml

from batchrunner.job.spec import Job
from docs.tools.reference.markdown import named, one_line

HEAD = """# Job file

All fields of a job file. [Write a job file](../jobs.md) shows how they work together; `--set input.limit=100`
overrides a field. Any other key is an error, except top-level keys that begin with `x-`, which may hold YAML
anchors.

A *duration* is a number of seconds, or a text such as `90s`, `30m`, `2h30m` or `1d`. A *function* is
`module:function` in Python: see [Python functions](../how-to/python-hooks.md). *Or column*: `{column: NAME}`
takes the value from a column of the row."""


def page() -> str:
    """Return the page."""
    schema = Job.model_json_schema()
    tops = schema["properties"]
    parts = [HEAD]
    for name, node in tops.items():
        if "discriminator" in node:
            parts += [f"## {name}", one_line(node["description"]), *_engines(schema)]
        elif reference := _section(node):
            section = _resolved(reference, schema)
            parts += [f"## {name}", one_line(section["description"])]
            if "description" in node and "$ref" not in node:  # it has a short form too
                parts += [
                    f"*{type_of(node)} · default {_value(node.get('default'))}*",
                    one_line(node["description"]),
                ]
            parts.append(_fields(section, section["properties"]))
    plain_fields = [
        name for name, node in tops.items() if "discriminator" not in node and _section(node) is None
    ]
    parts += ["## Top level", _fields(schema, plain_fields)]
    return "\n\n".join(parts)


def field_paths() -> dict[str, dict[str, Any]]:
    """Return the schema of each field by its path; a field of an engine has the engine's kind in its path."""
    schema = Job.model_json_schema()
    paths: dict[str, dict[str, Any]] = {}
    for name, node in schema["properties"].items():
        if "discriminator" in node:
            for kind, ref in node["discriminator"]["mapping"].items():
                section = _resolved({"$ref": ref}, schema)
                paths |= {f"engine.{field} ({kind})": at for field, at in section["properties"].items()}
        elif reference := _section(node):
            section = _resolved(reference, schema)
            paths |= {f"{name}.{field}": at for field, at in section["properties"].items()}
        else:
            paths[name] = node
    return paths


def _section(node: dict[str, Any]) -> dict[str, Any] | None:
    """Return the reference to the section that a field at the top is, or may be."""
    return next((member for member in (node, *node.get("anyOf", ())) if "$ref" in member), None)


def _engines(schema: dict[str, Any]) -> list[str]:
    """Return a section for each kind; fields that an earlier kind has too are named only."""
    parts: list[str] = []
    earlier_fields: dict[str, dict[str, Any]] = {}
    for kind in ("attach", "server", "gateway", "simulated"):
        section = _resolved(
            {"$ref": schema["properties"]["engine"]["discriminator"]["mapping"][kind]}, schema
        )
        fields_of_kind = {name: field for name, field in section["properties"].items() if name != "kind"}
        repeated = [
            f"`{name}`" for name in fields_of_kind if earlier_fields.get(name) == fields_of_kind[name]
        ]
        parts += [f"### engine of kind {kind}", one_line(section["description"])]
        parts.append(
            _fields(
                section, [name for name in fields_of_kind if earlier_fields.get(name) != fields_of_kind[name]]
            )
        )
        if repeated:
            parts.append(f"And, as above: {', '.join(repeated)}.")
        earlier_fields |= fields_of_kind
    return parts


def _fields(node: dict[str, Any], names: Iterable[str]) -> str:
    """Return a list of fields, each with its type, default and description."""
    rows = []
    for name in sorted(names, key=lambda name: name not in node.get("required", ())):
        field = node["properties"][name]
        facts = [type_of(field)]
        if name in node.get("required", ()):
            facts.append("required")
        elif field.get("default") not in (None, {}, []):
            facts.append(f"default {_value(field['default'])}" + (" s" if facts[0] == "duration" else ""))
        rows.append((f"`{name}` ({', '.join(facts)})", field["description"]))
    return named(rows)


def _value(default: object) -> str:
    if isinstance(default, float):
        return f"`{default:g}`"
    shown = yaml.safe_dump(default, default_flow_style=True).removesuffix("...\n")
    return f"`{shown.strip()}`"


def _resolved(node: dict[str, Any], schema: dict[str, Any]) -> Any:
    return schema["$defs"][node["$ref"].rsplit("/", 1)[-1]]


def type_of(node: dict[str, Any]) -> str:
    """Return the type of a field in words."""
    match node:
        case {"$ref": name}:
            words = "column" if name.endswith("/FromColumn") else "mapping"
        case {"anyOf": [{"type": "number"}, {"type": "string", "minLength": 1}, *_]}:
            words = "duration"
        case {"anyOf": members}:
            words = " or ".join(dict.fromkeys(type_of(m) for m in members if m.get("type") != "null"))
        case {"enum": values}:
            words = f"{', '.join(f'`{value}`' for value in values[:-1])} or `{values[-1]}`"
        case {"const": value}:
            words = f"`{value}`"
        case {"pattern": pattern}:
            words = (
                "percentage such as `1%`"
                if "%" in pattern
                else "function"
                if "://" not in pattern
                else "address"
            )
        case {"prefixItems": _}:
            words = "list of two integers"
        case {"items": {"enum": _}}:
            words = "list of names"
        case {"items": items}:
            kinds = [type_of(kind) for kind in items.get("anyOf", [items])]
            words = f"list of {' or '.join(kind.split(' from')[0] + 's' for kind in kinds)}"
        case _:
            words = _NAMES[node.get("type", "")] + _range(node)
    return words


_NAMES = {
    "string": "text",
    "integer": "integer",
    "number": "number",
    "boolean": "boolean",
    "object": "mapping",
    "": "any value",
}


def _range(node: dict[str, Any]) -> str:
    if "minimum" in node and "maximum" in node:
        return f" from {node['minimum']:g} to {node['maximum']:g}"
    if "exclusiveMinimum" in node:
        top = f", at most {node['maximum']:g}" if "maximum" in node else ""
        return f" above {node['exclusiveMinimum']:g}{top}"
    return f" ≥ {node['minimum']:g}" if "minimum" in node else ""
