"""Reads a job from YAML and `--set`; its errors say what to change."""

import os
import re
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from shlex import quote
from typing import Any, NamedTuple, TypeAlias, get_args

import yaml
from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from batchrunner.core.errors import Faults, JobError, first_line
from batchrunner.core.files import known_format
from batchrunner.job.engine import ENGINE_KINDS, EngineSpec
from batchrunner.job.fields import as_folder
from batchrunner.job.spec import Job

EngineLike: TypeAlias = EngineSpec | Mapping[str, Any] | str | Path | Sequence[str]
"""The `engine` section of a job, or a short form of it."""
_YAML_MARKS = tuple("\"'|>!&*")
"""First characters of a quoted text, block, tag, anchor or alias in YAML."""
EXAMPLES = {
    "input": "input: {path: docs.parquet}",
    "prompt": 'prompt: {user: "Summarise: {{ text }}"}',
    "output": "output: {path: out/run}",
    "engine": "engine: Qwen/Qwen3-8B, to start a server, or engine: http://HOST:PORT of one that runs",
}
"""An example of each section that a job must have."""
_TAB_HINT = "indent with spaces: YAML allows no tabs there"
_YAML_HINT = (
    "put quotes around a text that begins with {{, % or *, or that has a colon and a space in it; the keys "
    "of one level begin in one column"
)


def load_job(
    source: str | Path | Mapping[str, Any] | Job,
    *,
    overrides: Sequence[str] = (),
    engine: EngineSpec | None = None,
    name: str | None = None,
    rollout: object = None,
) -> Job:
    """Return the job from a YAML file (`-`: standard input), a mapping or a Job, with overrides applied.

    `overrides` are texts `a.b=c`, where c is YAML or plain text. `engine` is used if the job has none. `name`
    stands for the source in errors. `rollout` is the function of `prompt.rollout`. Raises JobError.
    """
    if isinstance(source, Job) and not overrides and rollout is None:
        return source
    if isinstance(source, (str, Path)):
        tree = read_job_file(source)
    elif isinstance(source, (Mapping, Job)):
        tree = _deep_copy(source if isinstance(source, Mapping) else source.model_dump(exclude_unset=True))
    else:
        raise JobError("job", hint=f"give a path, a mapping or a Job (got {source!r:.60})")
    if rollout is not None:
        tree["prompt"] = {**(tree.get("prompt") or {}), "rollout": rollout}
    if engine is not None:
        tree.setdefault("engine", engine.model_dump(exclude_unset=True))
    if "engine" in tree:
        tree["engine"] = _engine_tree(tree["engine"])
    faults = Faults()
    for override in overrides:
        with faults.collect():
            _override(tree, override)
            if "engine" in tree:  # an override may replace the whole section
                tree["engine"] = _engine_tree(tree["engine"])
    faults.raise_all()
    if isinstance(source, (str, Path)) and source != "-":
        tree.setdefault("python_path", [str(_job_path(source).absolute().parent)])
        name = name or str(source)
    job: Job = validated(Job, tree, name or "job")
    return job


def parse_engine(source: EngineLike | None) -> EngineSpec:
    """Return the engine of an `engine` section, or of a short form of it; raises JobError.

    Short forms are the name or directory of a model (starts a server), the address of a server or a list of
    addresses (attaches to them), the file of an engine that another process shares, and `simulated`.
    """
    if isinstance(source, BaseModel):
        return source
    tree = _deep_copy(_engine_tree(source))
    if not isinstance(tree, dict):
        raise JobError(
            "engine",
            hint="give an open engine (`with open_engine(…) as engine`), the `engine` part of a job, a model,"
            f" an address, a list of addresses or 'simulated' (got {source!r:.60})",
        )
    spec: EngineSpec = validated(EngineSpec, tree, "engine")
    return spec


def _engine_tree(source: Any) -> Any:
    """Return the `engine` section for a short form; return anything else unchanged."""
    if isinstance(source, (list, tuple)):
        return {"kind": "attach", "urls": list(source)}
    if isinstance(source, (str, Path)) and str(source).endswith(".json"):  # of `open_engine(…, share=…)`
        if not _job_path(source).exists():
            raise JobError(
                f"engine: {source}: no such file", hint="the program that shares the engine must be running"
            )
        return read_job_file(source)
    if isinstance(source, os.PathLike):
        return {"kind": "server", "model": as_folder(source)}
    if not isinstance(source, str):
        return source
    if source == "simulated":
        return {"kind": "simulated"}
    near = [] if "://" in source else get_close_matches(source, ENGINE_KINDS, n=1, cutoff=0.75)
    if near and not os.path.exists(source):  # noqa: PTH110 - false for a name that is too long
        raise JobError(f"engine: {source}: no model has this name", hint=f"did you mean kind: {near[0]}?")
    return {"kind": "attach", "urls": [source]} if "://" in source else {"kind": "server", "model": source}


class _StrictLoader(yaml.SafeLoader):
    """SafeLoader that refuses a repeated key, instead of keeping its last value."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys: list[Any] = []
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue  # `<<: *base` is not a key: the base class merges it
            key = self.construct_object(key_node, deep=True)
            if key in keys:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} is given twice", key_node.start_mark
                )
            keys.append(key)
        return super().construct_mapping(node, deep)


def parse(text: str, where: str) -> Any:
    """Return the value of a YAML text; raises JobError, naming `where`."""
    try:
        return yaml.load(text, Loader=_StrictLoader)  # noqa: S506 - a SafeLoader
    except (yaml.YAMLError, ValueError, LookupError, TypeError, AttributeError, OverflowError) as failure:
        # errors that are not PyYAML's own come from its constructors: a date with month 13, `!!int x`
        mark = getattr(failure, "problem_mark", None)
        line = f"line {mark.line + 1}: " if mark else ""
        problem = getattr(failure, "problem", None) or first_line(failure)
        hint = _YAML_HINT if mark and "given twice" not in problem else None
        if r"\t" in problem:
            hint = _TAB_HINT
        raise JobError(f"{where}: {line}not valid YAML: {problem}", hint=hint) from None


def _job_path(source: str | Path) -> Path:
    return Path(os.path.expanduser(source))  # noqa: PTH111 - keeps `~unknown`, where Path raises


def read_job_file(source: str | Path) -> dict[str, Any]:
    """Return the tree of a YAML file (`-`: standard input), which may lack sections; raises JobError."""
    path = _job_path(source)
    if known_format(path.name) is not None and path.suffix != ".json" and path.is_file():
        raise JobError(
            f"{path}: is a data file, not a job",
            hint=f"this writes a job for it: batchrun init {quote(str(path))}",
        )
    name = "standard input" if source == "-" else str(path)
    try:
        content = sys.stdin.buffer.read() if source == "-" else path.read_bytes()
        text = content.decode("utf-8-sig")
    except FileNotFoundError:
        raise JobError(f"{name}: no such job file") from None
    except (OSError, ValueError) as failure:
        raise JobError(f"{name}: cannot be read as a job file: {failure}") from None
    tree = parse(text, name)
    if not isinstance(tree, dict):
        raise JobError(f"{name}: a job is a mapping with input, prompt, output, engine (got {tree!r:.60})")
    if any(not isinstance(key, str) for key in tree):
        raise JobError(f"{name}: the keys of a job must be text, such as input (got {[*tree]!r:.60})")
    return tree


def _override(tree: dict[str, Any], override: str) -> None:
    """Set a field of a job by a text `a.b=c`; raises JobError."""
    place, equals, text = override.partition("=")
    if not equals or not place:
        raise JobError(f"--set {override}", hint="write it as a.b=value")
    where = f"--set {place}"
    value = _value_of(text, where)
    *path, last = place.strip().split(".")
    for step in path:
        below = tree.setdefault(step, {})
        if not isinstance(below, dict):
            raise JobError(f"{where}: {step!r} is {below!r:.60} and has no keys below it")
        tree = below
    tree[last] = value


def _value_of(text: str, where: str) -> Any:
    """Return an override's value, read as YAML.

    It is plain text if it is not valid YAML, such as a template or an expression. It is also plain text if
    YAML would change it: YAML joins lines, and drops the rest of a line after ` #`.
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
    """Copy mappings and lists, but not the objects in them."""
    if isinstance(value, Mapping):
        return {key: _deep_copy(below) for key, below in value.items()}
    if isinstance(value, list):
        return [_deep_copy(below) for below in value]
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def validated(kind: Any, tree: dict[str, Any], name: str) -> Any:
    """Return a validated section of a job, or a request; raises JobError, which begins with `name`."""
    try:
        return TypeAdapter(kind).validate_python(tree)
    except ValidationError as failure:
        faults = Faults()
        for problem, hint in _explain(failure, kind, tree):
            faults.add(JobError(f"{name}: {problem}", hint=hint))
        faults.raise_all()


class _Place(NamedTuple):
    """Place of a problem that pydantic found."""

    path: tuple[str, ...]
    """Path in the user's job."""
    branches: dict[tuple[str, ...], str]
    """Paths of unions, each with the branch that has the problem."""


class _Problem(NamedTuple):
    """A problem that pydantic found, with its place in the user's job."""

    place: _Place
    details: ErrorDetails

    @property
    def progress(self) -> tuple[bool, int]:
        """How far pydantic got: furthest with an unknown key, else by the length of the path."""
        return self.details["type"] == "extra_forbidden", len(self.details["loc"])


def _explain(failure: ValidationError, kind: Any, tree: object) -> Iterator[tuple[str, str | None]]:
    """Yield the faults in pydantic's list of errors: a line for the user, and a hint or None."""
    problems = [_Problem(_place_of(tree, error), error) for error in failure.errors(include_url=False)]
    errors_by_path: dict[tuple[str, ...], list[ErrorDetails]] = {}
    for place, error in _in_intended_branches(problems):
        errors_by_path.setdefault(place.path, []).append(error)
    intended_paths = set()  # that the user probably misspelled
    for path, errors in errors_by_path.items():
        if errors[0]["type"] == "extra_forbidden":
            intended_key = _closest(path[-1], _keys(kind, path[:-1]))
            intended_paths.add((*path[:-1], intended_key))
    for path, errors in errors_by_path.items():
        is_misspelled = errors[0]["type"] == "missing" and path in intended_paths
        if not is_misspelled:  # otherwise the unknown key and its hint say enough
            yield from _faults_at(path, errors, kind)


def _in_intended_branches(problems: list[_Problem]) -> list[_Problem]:
    """Drop the problems of those branches of unions that the user did not intend.

    Pydantic reports every branch of a union. The user intended the branch in which it got furthest.
    """
    unions = {union for problem in problems for union in problem.place.branches}
    for union in sorted(unions, key=len):
        rivals = [problem for problem in problems if union in problem.place.branches]
        if not rivals:
            continue
        best = max(rivals, key=lambda problem: problem.progress).place
        if best.path == union:  # no branch got further: their messages together say what is allowed
            losers = [rival for rival in rivals if rival.place.path != union]
        else:
            losers = [rival for rival in rivals if rival.place.branches[union] != best.branches[union]]
        problems = [problem for problem in problems if problem not in losers]
    return problems


def _faults_at(
    path: Sequence[str], problems: list[ErrorDetails], kind: Any
) -> Iterator[tuple[str, str | None]]:
    """Yield the faults at a path of the user's job, each with a hint or None."""
    problem, where = problems[0], ".".join(path)
    if problem["type"] == "union_tag_invalid":
        tag = problem["ctx"]["tag"]
        yield f"{where}.kind: unknown kind of engine {tag!r}", _near(tag, ENGINE_KINDS)
    elif problem["type"] == "extra_forbidden":
        yield f"unknown key {where!r}", _nearest(path, kind)
    elif problem["type"] == "missing":
        example = EXAMPLES.get(where)
        yield f"{where} is missing", example and f"for example {example}"
    else:
        messages = dict.fromkeys(map(_message, problems))
        got = problem["input"]
        value = "" if isinstance(got, (Mapping, BaseModel)) else f" (got {got!r:.200})"
        hint = None
        if isinstance(got, bool) and any(error["type"] == "string_type" for error in problems):
            hint = "YAML reads yes, no, on and off as true and false: put quotes around a text"
        for line in ", or ".join(messages).split("\n"):  # a rule between fields may report several lines
            yield f"{where + ': ' if where else ''}{line}{value}", hint


def _message(problem: ErrorDetails) -> str:
    if problem["type"] == "union_tag_not_found":
        return "kind is missing"
    message = problem["msg"].removeprefix("Value error, ").removeprefix("Input ")
    message = message.replace("a valid dictionary or instance of FromColumn", "{column: NAME}")
    message = re.sub(r"a valid dictionary( or .*)?$", "a mapping", message)
    message = re.sub(r", unable to .*| after validation, not \d+", "", message)
    return message[:1].lower() + message[1:]


def _place_of(tree: object, problem: ErrorDetails) -> _Place:
    """Return the place of an error in the user's job."""
    path: tuple[str, ...] = ()
    branches: dict[tuple[str, ...], str] = {}
    is_missing = problem["type"] == "missing"
    for step in problem["loc"][:-1] if is_missing else problem["loc"]:
        if isinstance(tree, Mapping) and step in tree:
            path = (*path, str(step))
            tree = tree[step]
        elif isinstance(tree, (list, tuple)) and isinstance(step, int):
            path = (*path, str(step))
            tree = tree[step] if step < len(tree) else None
        elif not (isinstance(tree, Mapping) and step == tree.get("kind")):  # not the discriminator
            branches.setdefault(path, str(step))
    if is_missing:
        path = (*path, str(problem["loc"][-1]))
    return _Place(path, branches)


def _nearest(path: Sequence[str], kind: Any) -> str:
    """Return the hint for an unknown key of a job, or of a section of this kind."""
    keys = _keys(kind, path[:-1])
    if path[-1] in keys:
        return "this key belongs to another kind of engine: leave it out, or change `kind`"
    hint = _near(path[-1], sorted(keys))
    return f"{hint} (arguments of SGLang go into engine.args)" if [*path[:-1]] == ["engine"] else hint


def _near(word: str, words: Sequence[str]) -> str:
    """Return a hint: the word that the user probably meant, or all words if none is similar."""
    near = _closest(word, words)
    return f"did you mean {near!r}?" if near else f"known: {', '.join(words)}"


def _closest(word: str, words: Collection[str]) -> str | None:
    """Return the word that the user probably meant; None if none is similar."""
    near = get_close_matches(word, words, n=1)
    near = near or [name for name in words if word in name.split("_")]  # `seed` is part of `sampling_seed`
    return near[0] if near else None


def _keys(kind: Any, path: Sequence[str]) -> set[str]:
    """Return the keys below a path in a section of a job; `kind` is its class, or a list or union."""
    is_section = isinstance(kind, type) and issubclass(kind, BaseModel)
    if not is_section:
        keys: set[str] = set()
        for member in get_args(kind):
            keys |= _keys(member, path)
        return keys
    fields = {field.alias or name: field.annotation for name, field in kind.model_fields.items()}
    if not path:
        return set(fields)
    first, *steps = path
    below_first = [step for step in steps if not step.isdigit()]  # an index in a list is no key
    return _keys(fields.get(first), below_first)
