"""Reads a job from YAML, environment variables and `--set`, with errors that say what to change.

Precedence, lowest first: the file, environment variables (`BATCHRUN__ENGINE__MODEL=…`), `--set a.b=c`.
"""

import contextlib
import os
import re
import sys
from collections.abc import Hashable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from shlex import quote
from typing import Any, TypeAlias, TypeVar

import yaml
from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from batchrunner.core.errors import JobError, WrongValueError
from batchrunner.core.files import known_format
from batchrunner.job.engine import ENGINE_KINDS, EngineSpec
from batchrunner.job.fields import as_folder, is_address, is_hub_page
from batchrunner.job.spec import Job


def expand_engine(tree: dict[str, Any]) -> None:
    """Put the mapping in the place of an `engine` of a job that is a text or a list; raises JobError."""
    if isinstance(tree.get("engine"), (str, list, tuple, os.PathLike)):
        tree["engine"] = engine_of_short_form(tree["engine"])


def engine_of_short_form(source: object) -> dict[str, Any]:
    """Return the `engine` part of a job that a short form stands for; raises JobError."""
    if isinstance(source, (list, tuple)):
        return {"kind": "attach", "urls": list(source)}
    if isinstance(source, os.PathLike):
        return {"kind": "server", "model": as_folder(source)}
    if not isinstance(source, str) or not source.strip():
        raise JobError(
            "engine",
            hint="give an open engine, the `engine` part of a job, a model, an address, a list of "
            f"addresses or 'simulated' (got {kind_of(source)})",
        )
    if source == "simulated":
        return {"kind": "simulated"}
    if "://" in source and not is_hub_page(source):
        return {"kind": "attach", "urls": [source]}
    if is_address(source):
        raise JobError(f"engine: an address starts with http:// or https:// (got {source!r})")
    if get_close_matches(source, ("simulated", *ENGINE_KINDS), cutoff=0.7) and not Path(source).exists():
        raise JobError(f"engine: {source!r} is no engine", hint="give 'simulated', an address or a model")
    return {"kind": "server", "model": source}


def kind_of(value: object) -> str:
    """Return what a value is, in a word or two, for a message."""
    names = {dict: "a mapping", list: "a list", str: "a text", type(None): "nothing"}
    return names.get(type(value), f"{value!r}")


_BARE_TEMPLATE = re.compile(r"(?:^|[{,])\s*(?:- )?\w+:\s*\{\{")
"""A template that is no text for YAML, since it begins with a brace and has no quotes."""
_QUOTE_TEMPLATES = "put quotes around a text that begins with {{, or write it below `|`"
_YAML_HINTS = {
    "found unhashable key": _QUOTE_TEMPLATES,
    "mapping values are not allowed": "put quotes around a text that has a colon and a space in it, "
    "and let the keys of one level begin in one column",
    "'\\t' that cannot start any token": "indent with spaces, not with tabs",
    "that cannot start any token": "put quotes around a text that begins with this character",
    "alphabetic or numeric character": "put quotes around a text that begins with this character",
    "expected <block end>": "let the keys of one level begin in one column; "
    "write a text that has quotes in it below `|`",
    "end of stream": "close the quotes",
    "expected ',' or": "close the brackets, and put quotes around a text between them "
    "that has , : or brackets in it",
}
"""What to do about a problem, by words of the YAML parser."""


class _StrictLoader(yaml.SafeLoader):
    """SafeLoader that refuses a repeated key, where YAML would keep the last value."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue  # `<<: *base` is not a key: the base class merges it
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, Hashable):
                continue  # the base class raises a better error
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} is given twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


def _text_of(path: Path) -> str:
    """Return the text of a job file; raises JobError, which also says how a data file is made a job."""
    try:
        return path.read_text("utf-8-sig")
    except FileNotFoundError:
        raise JobError(f"{path}: no such job file", hint=_nearest_file(path), mark=";") from None
    except IsADirectoryError:
        raise JobError(f"{path}: is a directory", hint="give the job file in it") from None
    except (OSError, ValueError) as failure:
        hint = "save it as UTF-8" if isinstance(failure, UnicodeDecodeError) else None
        raise JobError(f"{path}: cannot be read as a job file: {failure}", hint=hint) from None


def _text_of_standard_input() -> str:
    try:
        return sys.stdin.buffer.read().decode("utf-8-sig")
    except (OSError, ValueError) as failure:
        raise JobError(
            f"standard input: cannot be read as a job: {failure}", hint="send it as UTF-8"
        ) from None


def _nearest_file(path: Path) -> str | None:
    with contextlib.suppress(OSError):
        jobs = [file.name for file in path.parent.iterdir() if file.suffix in {".yaml", ".yml"}]
        if near := get_close_matches(path.name, jobs, n=1, cutoff=0.8):
            return f"did you mean {str(path.with_name(near[0]))!r}?"
    return None


def parse(text: str, where: str) -> Any:
    """Return the value of a YAML text; raises JobError, naming `where`."""
    try:
        return yaml.load(text, Loader=_StrictLoader)  # noqa: S506 - a SafeLoader
    except yaml.YAMLError as failure:
        raise JobError(f"{where}: {_problem(failure)}", hint=_yaml_hint(failure, text), mark=";") from None
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError) as failure:
        # errors of PyYAML's constructors: a date with month 13, `!!int x`
        raise JobError(f"{where}: not valid YAML: {str(failure).partition(';')[0]}") from None


def _problem(failure: yaml.YAMLError) -> str:
    mark = getattr(failure, "problem_mark", None)
    where = f"line {mark.line + 1}: " if mark else ""
    return f"{where}not valid YAML: {getattr(failure, 'problem', None) or str(failure).splitlines()[0]}"


def _yaml_hint(failure: yaml.YAMLError, text: str) -> str | None:
    """Return what to do about a mistake in a YAML text; None where its problem says it all."""
    problem = getattr(failure, "problem", None) or ""
    hint = next((hint for words, hint in _YAML_HINTS.items() if words in problem), None)
    mark = getattr(failure, "problem_mark", None)
    line = text.splitlines()[mark.line : mark.line + 1] if mark else []
    return _QUOTE_TEMPLATES if hint and line and _BARE_TEMPLATE.search(line[0]) else hint


T = TypeVar("T")
EngineLike: TypeAlias = EngineSpec | Mapping[str, Any] | str | Path | Sequence[str]
"""What an engine may be given as: the `engine` part of a job, or a short form of it."""
ENV_PREFIX = "BATCHRUN__"
"""Prefix of environment variables that override the job."""
_OWN_NAMES = (["engine", "env"], ["input", "rename"], ["input", "types"])
"""Paths of mappings whose keys are the user's own, in which upper and lower case differ."""
_YAML_MARKS = tuple("\"'|>!&*")
"""First characters of a text in YAML syntax: quoted, a block, tagged, an anchor or an alias."""
_SGLANG_NAMES = {"tp": "tp-size", "dp": "dp-size", "ep": "ep-size", "pp": "pp-size"}
"""Short names of SGLang's arguments."""
_MEANT = {
    "model": "engine.model",
    "sampling.guided_json": "sampling.json_schema",
    "sampling.guided_regex": "sampling.regex",
    "sampling.logprobs": "output.columns: [logprobs]",
    "sampling.response_format": "sampling.json_schema",
    "sampling.stop_sequences": "sampling.stop",
    "sampling.tools": "prompt.tools",
    "sampling.top_logprobs": "output.top_logprobs",
}
"""What is meant by names that other tools have for fields of a job."""


def load_job(
    source: str | Path | Mapping[str, Any] | Job,
    *,
    overrides: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
    engine: EngineSpec | None = None,
    no_python: bool = False,
    name: str | None = None,
) -> Job:
    """Return the job from a YAML file (`-`: standard input), a mapping or a Job, with overrides applied.

    `overrides` are texts `a.b=c`, where c is YAML or a plain text. `environ` is the process's environment by
    default; only variables that begin with BATCHRUN__ are used. `engine` is used if the job has none; `name`
    stands for the source in errors. `no_python` refuses a job that runs Python functions. Raises JobError.
    """
    if isinstance(overrides, str):
        raise JobError("overrides", hint='give a list of texts, such as ["input.limit=100"]')
    if isinstance(source, Job) and not overrides:
        return source
    tree, own_name = _tree_of(source)
    expand_engine(tree)
    if engine is not None:
        tree.setdefault("engine", engine.model_dump(exclude_unset=True))
    # sorted, so that BATCHRUN__ENGINE comes before BATCHRUN__ENGINE__MODEL, a part of it
    for key, text in sorted((os.environ if environ is None else environ).items()):
        if key.startswith(ENV_PREFIX):
            _override(tree, _steps_of(key), text, where=f"environment: {key}")
    for override in overrides:
        path, equals, text = override.partition("=")
        if not equals or not path:
            raise JobError(f"--set {override}", hint="write it as a.b=value")
        _override(tree, path.strip().split("."), text, where=f"--set {path}")
    expand_engine(tree)  # a variable or --set may give a whole one
    if isinstance(source, (str, Path)) and source != "-" and functions_in(tree):
        tree.setdefault("python_path", [str(Path(os.path.expanduser(source)).absolute().parent)])  # noqa: PTH111
    job = _validated(TypeAdapter(Job), tree, name or own_name)
    if no_python and (found := functions_in(tree)):
        where, function = next(iter(found.items()))
        raise JobError(
            f"--no-python: {where} is {function}, a Python function that the job would run",
            hint="leave --no-python out if you trust its author",
        )
    return job


def functions_in(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return the Python functions of a job as plain containers, by their places in it."""
    found = {
        f"{name}.python": tree[name].get("python")
        for name in ("prompt", "parse", "check")
        if isinstance(tree.get(name), Mapping)
    }
    if "parse" in tree and not isinstance(tree["parse"], Mapping):
        found["parse"] = tree["parse"]
    return {where: function for where, function in found.items() if function is not None}


def read_job_file(source: str) -> dict[str, Any]:
    """Return a job in a YAML file (`-`: standard input), parts of which may be missing; raises JobError."""
    return _tree_of(source)[0]


def _steps_of(key: str) -> list[str]:
    """Return the path of a variable, engine.model for BATCHRUN__ENGINE__MODEL; user-given names keep case."""
    steps = key[len(ENV_PREFIX) :].split("__")
    ours = [step.lower() for step in steps]
    return ours[:2] + steps[2:] if ours[:2] in _OWN_NAMES else ours


def _tree_of(source: object) -> tuple[dict[str, Any], str]:
    """Return a job as plain containers, and its name for error messages."""
    match source:
        case Job():
            return source.model_dump(exclude_unset=True), "job"
        case Mapping():
            return _deep_copy(source), "job"
        case "-":
            return _tree_in(_text_of_standard_input(), "standard input"), "standard input"
        case str() | Path():
            return _read_yaml(Path(os.path.expanduser(source))), str(source)  # noqa: PTH111 - `~unknown` is left
        case _:
            raise JobError("job", hint=f"give a path, a mapping or a Job (got {kind_of(source)})")


def parse_engine(source: EngineLike | None) -> EngineSpec:
    """Return the engine from the `engine` part of a job, or from a short form of it; raises JobError.

    The short forms: a model's name or directory (a server is started), the address of a server or a list of
    addresses (attached), `simulated`.
    """
    if isinstance(source, BaseModel):
        return source
    tree = _deep_copy(source) if isinstance(source, Mapping) else engine_of_short_form(source)
    adapter: TypeAdapter[EngineSpec] = TypeAdapter(EngineSpec)
    return _validated(adapter, tree, "engine")


def _validated(adapter: TypeAdapter[T], tree: dict[str, Any], name: str) -> T:
    try:
        return adapter.validate_python(tree)
    except ValidationError as failure:
        problem, hint = _explain(failure, adapter.json_schema(), tree)
        raise JobError(f"{name}: {problem}", hint=hint, mark=";") from None


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        return _tree_in(_text_of(path), str(path))
    except JobError:
        if known_format(path.name) is None or path.suffix == ".json" or not path.is_file():
            raise
        raise JobError(
            f"{path}: is a data file and no job",
            hint=f"this writes a job for it: batchrun init {quote(str(path))}",
        ) from None


def _tree_in(text: str, name: str) -> dict[str, Any]:
    tree = parse(text, name)
    if not isinstance(tree, dict):
        raise JobError(f"{name}: a job is a mapping with input, prompt, output, engine (got {kind_of(tree)})")
    return tree


def _override(tree: dict[str, Any], path: list[str], text: str, *, where: str) -> None:
    value = _value_of(text, where)
    for step in path[:-1]:
        below = tree.setdefault(step, {})
        if not isinstance(below, dict):
            raise JobError(f"{where}: {step!r} is {kind_of(below)} and has no keys below it")
        tree = below
    tree[path[-1]] = value


def _value_of(text: str, where: str) -> Any:
    """Return an override's value, read as YAML.

    It is taken as a plain text if it is not valid YAML (a template, an expression), or if YAML would change
    it, because it joins lines and drops what follows ` #`.
    """
    try:
        value = parse(text, where)
    except JobError:
        if re.match(r"\s*(\[|{(?![{%#]))", text):  # clearly meant as a list or a mapping
            raise
        return text
    if isinstance(value, str) and value != text.strip() and not text.lstrip().startswith(_YAML_MARKS):
        return text
    is_null = text.strip().lower() in {"", "~", "null"}
    return text if value is None and not is_null else value


def _deep_copy(value: Any) -> Any:
    """Copy mappings and lists, but not their other values, which may be any objects."""
    if isinstance(value, Mapping):
        return {key: _deep_copy(below) for key, below in value.items()}
    if isinstance(value, list):
        return [_deep_copy(below) for below in value]
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _explain(failure: ValidationError, schema: dict[str, Any], tree: object) -> tuple[str, str | None]:
    """Return one line for the user from pydantic's list of errors, and a hint where there is one."""
    problems = failure.errors(include_url=False)
    # pydantic reports every branch of a union: the one that got furthest is the one that the user meant
    problem = max(problems, key=lambda p: (p["type"] == "extra_forbidden", len(p["loc"])))
    path = _path_in(tree, problem)
    paths = {tuple(_path_in(tree, p)) for p in problems}
    others = sum(tuple(path[: len(other)]) != other for other in paths)
    more = f" (and {others} more)" if others else ""
    where = ".".join(path)
    if problem["type"] == "extra_forbidden":
        hint = _nearest(path, schema, tree)
        return (f"unknown key {where!r}", hint + more) if hint else (f"unknown key {where!r}{more}", None)
    if problem["type"] == "missing":
        return f"{where} is missing{more}", None
    # a union has an error for each member: together they say what is allowed
    messages = dict.fromkeys(_message(p) for p in problems if _path_in(tree, p) == path)
    message = ", or ".join(messages)
    got = problem["input"]
    shown = "" if "(got " in message or isinstance(got, (Mapping, BaseModel)) else f" (got {_brief(got)})"
    refused = problem.get("ctx", {}).get("error")
    hint = refused.hint if isinstance(refused, WrongValueError) else None
    if isinstance(got, bool) and any(p["type"] == "string_type" and p["input"] is got for p in problems):
        hint = hint or "YAML reads yes, no, on and off as true and false: put quotes around a text"
    return f"{where + ': ' if where else ''}{message}{shown}{more}", hint


def _brief(value: object) -> str:
    text = repr(value)
    limit = 200
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _message(problem: ErrorDetails) -> str:
    if problem["type"] == "union_tag_not_found":
        return "kind is missing"
    if problem["type"] == "union_tag_invalid":
        return f"kind should be one of {problem['ctx']['expected_tags']} (got {problem['ctx']['tag']!r})"
    message = problem["msg"].removeprefix("Value error, ").removeprefix("Input ")
    message = message.replace("a valid dictionary or instance of FromColumn", "{column: NAME}")
    message = re.sub(r"a valid dictionary( or .*)?$", "a mapping", message)
    message = re.sub(r", unable to .*| after validation, not \d+", "", message)
    return message[0].lower() + message[1:]


def _path_in(tree: object, problem: ErrorDetails) -> list[str]:
    """Return the path of an error in the user's job, without pydantic's names for the branches of unions."""
    path: list[str] = []
    for step in problem["loc"]:
        if isinstance(tree, Mapping) and step in tree:
            path.append(str(step))
            tree = tree[step]
        elif isinstance(tree, (list, tuple)) and isinstance(step, int):
            path.append(str(step))
            tree = tree[step] if step < len(tree) else None
    if problem["type"] == "missing":
        path.append(str(problem["loc"][-1]))
    return path


def _nearest(path: list[str], schema: dict[str, Any], tree: object) -> str | None:
    if meant := _MEANT.get(".".join(path)):
        return f"did you mean {meant!r}?"
    known = _known_keys(path[:-1], schema, tree)
    if elsewhere := _sections_with(path[-1], schema, tree) if len(path) == 1 else ():
        return f"did you mean {' or '.join(map(repr, elsewhere))}?"
    near = get_close_matches(path[-1], known, n=1)
    near = near or [name for name in known if path[-1] in name.split("_")][:1]  # seed: sampling_seed
    if path[:1] == ["engine"] and path[-1] in _SGLANG_NAMES:
        near = []  # a name of SGLang's own, and no misspelt field such as `tp`
    hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(known)}" if known else ""
    if not near and path[:1] == ["engine"] and isinstance(tree, Mapping):
        hint = _argument_hint(path, known, tree) + hint
    return hint or None


def _sections_with(key: str, schema: dict[str, Any], tree: object) -> list[str]:
    """Return the fields of this name that the sections of a job have, such as `prompt.choices`."""
    sections = _known_keys([], schema, tree)
    return [f"{name}.{key}" for name in sections if key in _known_keys([name], schema, tree)]


def _argument_hint(path: list[str], known: list[str], tree: Mapping[str, Any]) -> str:
    """Return where an argument of SGLang goes that stands beside the engine's fields."""
    if len(path) != 2 or "args" not in known:  # noqa: PLR2004 - engine.NAME
        return ""
    name = path[1].lstrip("-").replace("_", "-")
    value = _brief(tree["engine"][path[1]])
    return f"an argument of SGLang goes into engine.args: {{{_SGLANG_NAMES.get(name, name)}: {value}}}; "


def _known_keys(path: list[str], schema: dict[str, Any], tree: object) -> list[str]:
    node: Any = schema
    for step in path:
        node = _resolved(node, schema, tree).get("properties", {}).get(step, {})
        tree = tree.get(step) if isinstance(tree, Mapping) else None
    return sorted(_resolved(node, schema, tree).get("properties", {}))


def _resolved(node: Any, schema: dict[str, Any], tree: object) -> Any:
    """Return the schema that a reference, a union or the engine's `kind` leads to."""
    if "discriminator" in node:
        kind = tree.get("kind") if isinstance(tree, Mapping) else None
        node = {"$ref": node["discriminator"]["mapping"].get(kind)}
    # only one member of a union has keys: {column: NAME}
    node = next((member for member in node.get("anyOf", ()) if "$ref" in member), node)
    return schema["$defs"][node["$ref"].rsplit("/", 1)[-1]] if node.get("$ref") else node
