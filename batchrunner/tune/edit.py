"""Edit `engine.args` and `engine.env` in a job file: only the changed values, and no other character."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from batchrunner.core.errors import JobError
from batchrunner.job.engine import EngineSpec
from batchrunner.job.load import parse_engine
from batchrunner.output.files import whole_file, writing


def apply_args(path: Path, args: Mapping[str, Any], env: Mapping[str, str] | None = None) -> None:
    """Set arguments in the `engine.args` of a job file, and variables in `engine.env`; the rest stays.

    The edited text is parsed and compared before it replaces the file. Raises JobError where the file cannot
    be edited this way (an anchor, a merge, two documents); the file is unchanged then.
    """
    path = path.resolve()  # a link stays a link
    text = path.read_bytes().decode()  # keeps the line ends
    wanted = yaml.safe_load(text)
    engine = wanted.get("engine") if isinstance(wanted, dict) else None
    new: str | None = text
    for part, values in (("args", args), ("env", env or {})):
        new = edited(new, values, part) if new is not None and values else new
        if isinstance(engine, dict) and values:
            engine[part] = _merged(engine.get(part) or {}, values)
    if new is None or _loaded(new) != wanted:
        raise JobError(f"{path}: its engine.args cannot be edited in place", hint="put the block in by hand")
    with writing(path), whole_file(path) as temporary:
        temporary.write_bytes(new.encode())
        temporary.chmod(path.stat().st_mode)


def own_engine(path: Path) -> EngineSpec:
    """Return the engine that a job file defines without overrides; raises JobError where it is not valid."""
    tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    return parse_engine(tree.get("engine"))


def edited(text: str, args: Mapping[str, Any], part: str = "args") -> str | None:
    """Return the text of a job with these arguments; None where it has no mapping to put them into.

    `part` is the mapping under `engine` that gets them.
    """
    engine = _below(yaml.compose(text, Loader=yaml.SafeLoader), "engine")
    if not isinstance(engine, yaml.MappingNode):
        return None
    if _below(engine, part) is None:
        return _added(text, engine, {part: dict(args)})
    for name, value in args.items():
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        node = _below(_below(root, "engine"), part)
        if not isinstance(node, yaml.MappingNode):
            return None
        old = _below(node, name)
        if old is None:
            text = _added(text, node, {name: value})
        else:
            text = text[: old.start_mark.index] + _scalar(value) + text[old.end_mark.index :]
    return text


def _loaded(text: str) -> object:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return None


def _added(text: str, node: yaml.MappingNode, items: dict[str, Any]) -> str:
    """Append items to a mapping, in its style."""
    if node.flow_style or not node.value:
        at = text.rindex("}", 0, node.end_mark.index)
        inner = ", ".join(f"{_scalar(name)}: {_scalar(value)}" for name, value in items.items())
        return text[:at].rstrip(" \r\n,") + (", " if node.value else "") + inner + text[at:]
    at = _end_of_line(text, _last(node).end_mark.index)
    indent = " " * node.start_mark.column
    block = yaml.safe_dump(items, sort_keys=False, default_flow_style=False)
    end = "\r\n" if "\r\n" in text else "\n"
    lines = "".join(f"{indent}{line}{end}" for line in block.splitlines())
    return text[:at] + ("" if text[:at].endswith("\n") else end) + lines + text[at:]


def _last(node: yaml.Node) -> yaml.Node:
    """Return the last value of a block mapping: YAML ends the mapping itself where the next token begins."""
    while isinstance(node, (yaml.MappingNode, yaml.SequenceNode)) and not node.flow_style and node.value:
        last = node.value[-1]
        node = last[1] if isinstance(last, tuple) else last
    return node


def _end_of_line(text: str, at: int) -> int:
    """Return where the next line begins, for a place in a line or at the beginning of the next."""
    if at and text[at - 1] == "\n":  # a block text ends after its last line
        return at
    found = text.find("\n", at)
    return len(text) if found < 0 else found + 1


def _below(node: yaml.Node | None, name: str) -> yaml.Node | None:
    """Return the value of a key of a mapping; a key may have underscores, or dashes before it."""
    if not isinstance(node, yaml.MappingNode):
        return None
    return next((value for key, value in node.value if _name(key.value) == _name(name)), None)


def _name(key: object) -> str:
    return str(key).lstrip("-").replace("_", "-")


def _merged(old: Mapping[str, Any], args: Mapping[str, Any]) -> dict[str, Any]:
    """Return the old arguments with the new values, each under the name that the file uses."""
    names = {_name(name): name for name in old}
    return {**old, **{names.get(_name(name), name): value for name, value in args.items()}}


def _scalar(value: object) -> str:
    """Write a value on one line, as it may stand in any mapping."""
    return yaml.safe_dump([value], default_flow_style=True, sort_keys=False, width=10**6).strip()[1:-1]
