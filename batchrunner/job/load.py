"""Loads a job from YAML and `--set`, with error messages that say what to change."""

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
"""Section `engine` of a job, or a short form of it, such as the name of a model."""
_YAML_MARKS = tuple("\"'|>!&*")
"""First characters of a text that is meant as YAML: of a quoted text, block, tag, anchor or alias."""
EXAMPLES = {
    "input": "input: {path: docs.parquet}",
    "prompt": 'prompt: {user: "Summarise: {{ text }}"}',
    "output": "output: {path: out/run}",
    "engine": "engine: Qwen/Qwen3-8B, to start a server, or engine: http://HOST:PORT of one that runs",
}
"""Example of each required section, shown if the section is missing."""
_TAB_HINT = "indent with spaces: YAML does not allow tabs in the indentation"
_YAML_HINT = (
    "put quotes around a text that begins with {{, % or *, or that contains a colon and a space; indent all "
    "keys of a section equally"
)


def load_job(
    source: str | Path | Mapping[str, Any] | Job,
    *,
    overrides: Sequence[str] = (),
    engine: EngineSpec | None = None,
    name: str | None = None,
    rollout: object = None,
) -> Job:
    """Load a job from a YAML file (`-`: standard input), a mapping or a Job; raise JobError if invalid.

    `overrides` are texts `a.b=c` that set fields, where c is YAML or plain text. `engine` is used if the job
    has no engine. `name` stands for the source in error messages. `rollout` replaces `prompt.rollout`.
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
            if "engine" in tree:  # `--set engine=…` may have replaced the section by a short form.
                tree["engine"] = _engine_tree(tree["engine"])
    faults.raise_all()
    if isinstance(source, (str, Path)) and source != "-":
        # By default, Python functions are looked up in the directory of the job file.
        tree.setdefault("python_path", [str(_job_path(source).absolute().parent)])
        name = name or str(source)
    job: Job = validated(Job, tree, name or "job")
    return job


def parse_engine(source: EngineLike | None) -> EngineSpec:
    """Return the engine that a section `engine` or a short form of it describes; raise JobError if invalid.

    Short forms are the name or directory of a model (starts a server), the address of a server or a list of
    addresses (attaches to the servers), the file of an engine that another process shares, and `simulated`.
    """
    if isinstance(source, BaseModel):
        return source
    tree = _deep_copy(_engine_tree(source))
    if not isinstance(tree, dict):
        raise JobError(
            "engine",
            hint="give an open engine (`with open_engine(…) as engine`), the section `engine` of a job, "
            f"a model, an address, a list of addresses or 'simulated' (got {source!r:.60})",
        )
    spec: EngineSpec = validated(EngineSpec, tree, "engine")
    return spec


def _engine_tree(source: Any) -> Any:
    """Return the section `engine` for a short form; any other value unchanged."""
    if isinstance(source, (list, tuple)):
        return {"kind": "attach", "urls": list(source)}
    is_shared_engine = isinstance(source, (str, Path)) and str(source).endswith(".json")
    if is_shared_engine:  # `open_engine(…, share=…)` writes a JSON file for other processes.
        if not _job_path(source).exists():
            raise JobError(
                f"engine: {source}: no such file", hint="the program that shares the engine must be running"
            )
        return read_job_file(source)
    if isinstance(source, os.PathLike):
        return {"kind": "server", "model": as_folder(source)}
    if not isinstance(source, str):
        return source
    return _engine_of_text(source)


def _engine_of_text(source: str) -> dict[str, Any]:
    """Return the section `engine` for an address, the name of a model, or `simulated`."""
    if source == "simulated":
        return {"kind": "simulated"}
    if "://" in source:
        return {"kind": "attach", "urls": [source]}
    similar_kinds = get_close_matches(source, ENGINE_KINDS, n=1, cutoff=0.75)
    if similar_kinds and not os.path.exists(source):  # noqa: PTH110 - false for a name that is too long
        raise JobError(
            f"engine: {source}: no model has this name", hint=f"did you mean kind: {similar_kinds[0]}?"
        )
    return {"kind": "server", "model": source}


class _StrictLoader(yaml.SafeLoader):
    """YAML loader that refuses a repeated key. SafeLoader would keep its last value."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Return the mapping of a node; raise ConstructorError for a repeated key."""
        keys: list[Any] = []
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue  # `<<` may be repeated: it merges mappings.
            key = self.construct_object(key_node, deep=True)
            if key in keys:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} is given twice", key_node.start_mark
                )
            keys.append(key)
        return super().construct_mapping(node, deep)


def parse(text: str, where: str) -> Any:
    """Return the value of a YAML text; raise JobError if it is invalid. The message begins with `where`."""
    try:
        return yaml.load(text, Loader=_StrictLoader)  # noqa: S506 - a SafeLoader
    except (yaml.YAMLError, ValueError, LookupError, TypeError, AttributeError, OverflowError) as failure:
        # PyYAML also raises errors of Python without a mark, for values such as a date with month 13.
        mark = getattr(failure, "problem_mark", None)
        line = f"line {mark.line + 1}: " if mark else ""
        problem = getattr(failure, "problem", None) or first_line(failure)
        # Quotes do not help if a key is repeated.
        hint = _YAML_HINT if mark and "given twice" not in problem else None
        if r"\t" in problem:
            hint = _TAB_HINT
        raise JobError(f"{where}: {line}not valid YAML: {problem}", hint=hint) from None


def _job_path(source: str | Path) -> Path:
    return Path(os.path.expanduser(source))  # noqa: PTH111 - keeps `~unknown`, for which Path would raise


def read_job_file(source: str | Path) -> dict[str, Any]:
    """Return the mapping in a YAML file (`-`: standard input), which may lack sections of a job.

    Raises JobError if the file cannot be read, or is not a mapping.
    """
    path = _job_path(source)
    # A .json file may be a job, because JSON is also YAML.
    if known_format(path.name) is not None and path.suffix != ".json" and path.is_file():
        raise JobError(
            f"{path}: is a data file, not a job",
            hint=f"write a job for these data: batchrun init {quote(str(path))}",
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
    """Set a field in the mapping of a job by a text `a.b=c`; raise JobError if the text is invalid."""
    field, equals, text = override.partition("=")
    if not equals or not field:
        raise JobError(f"--set {override}: is not of the form a.b=value", hint="write --set a.b=value")
    where = f"--set {field}"
    value = _value_of(text, where)
    *sections, key = field.strip().split(".")
    for section in sections:
        below = tree.setdefault(section, {})
        if not isinstance(below, dict):
            raise JobError(f"{where}: {section!r} is not a section with keys (got {below!r:.60})")
        tree = below
    tree[key] = value


def _value_of(text: str, where: str) -> Any:
    """Return the value of an override, read as YAML, or unchanged if it is not meant as YAML.

    A text that is not valid YAML, such as a template or an expression, is not meant as YAML. Nor is a text
    that YAML would change: YAML joins lines, and drops the rest of a line after ` #`.
    """
    try:
        value = parse(text, where)
    except JobError:
        # The text begins like a list or a mapping, and not like a template (`{{`, `{%` or `{#`).
        is_meant_as_yaml = re.match(r"\s*(\[|{(?![{%#]))", text) is not None
        if is_meant_as_yaml:
            raise
        return text
    if isinstance(value, str):
        is_changed = value != text.strip()
        is_meant_as_yaml = text.lstrip().startswith(_YAML_MARKS)
        return text if is_changed and not is_meant_as_yaml else value
    if value is None and text.strip().lower() not in {"", "~", "null"}:
        return text  # YAML reads `# 1` as a comment and so as null, but the user means the text.
    return value


def _deep_copy(value: Any) -> Any:
    """Copy mappings and lists, but not the objects in them; convert paths to texts."""
    if isinstance(value, Mapping):
        return {key: _deep_copy(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_deep_copy(inner) for inner in value]
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def validated(kind: Any, tree: dict[str, Any], name: str) -> Any:
    """Validate the mapping of a job, of a section or of a request, and return an instance of `kind`.

    Raises JobError with all faults, each of which begins with `name`.
    """
    try:
        return TypeAdapter(kind).validate_python(tree)
    except ValidationError as failure:
        faults = Faults()
        for problem, hint in _explain(failure, kind, tree):
            faults.add(JobError(f"{name}: {problem}", hint=hint))
        # There is at least one fault, so this always raises.
        faults.raise_all()


class _Location(NamedTuple):
    """Location of a problem that pydantic found."""

    path: tuple[str, ...]
    """Keys and list indices that lead to the problem in the user's job."""
    branches: dict[tuple[str, ...], str]
    """For each union on the way: the path to it, and the branch (alternative) in which the problem is."""


class _Problem(NamedTuple):
    """Problem that pydantic found, with its location in the user's job."""

    location: _Location
    details: ErrorDetails

    @property
    def progress(self) -> tuple[bool, int]:
        """How well a branch of a union fits the user's job; used to compare branches.

        An unknown key ranks highest, because pydantic reports it only if the other keys fit. Among other
        problems, the longest path ranks highest.
        """
        return self.details["type"] == "extra_forbidden", len(self.details["loc"])


def _explain(failure: ValidationError, kind: Any, tree: object) -> Iterator[tuple[str, str | None]]:
    """Yield pydantic's errors, each as a line for the user and a hint or None."""
    problems = [_Problem(_location_of(tree, error), error) for error in failure.errors(include_url=False)]
    errors_by_path: dict[tuple[str, ...], list[ErrorDetails]] = {}
    for location, error in _in_intended_branches(problems):
        errors_by_path.setdefault(location.path, []).append(error)
    misspelled_paths = set()  # For each unknown key, the path of the key that the user probably meant.
    for path, errors in errors_by_path.items():
        if errors[0]["type"] == "extra_forbidden":
            intended_key = _closest(path[-1], _keys(kind, path[:-1]))
            misspelled_paths.add((*path[:-1], intended_key))
    for path, errors in errors_by_path.items():
        # A missing key that was only misspelled is not a fault of its own: the unknown key is reported.
        is_misspelled = errors[0]["type"] == "missing" and path in misspelled_paths
        if not is_misspelled:
            yield from _faults_at(path, errors, kind)


def _in_intended_branches(problems: list[_Problem]) -> list[_Problem]:
    """Return the problems without those in branches of unions that the user did not intend.

    Pydantic reports the problems of every branch. The user probably intended the branch in which pydantic got
    furthest.
    """
    unions = {union for problem in problems for union in problem.location.branches}
    for union in sorted(unions, key=len):  # Outer unions come first, because their paths are shorter.
        rivals = [problem for problem in problems if union in problem.location.branches]
        if not rivals:
            continue
        best = max(rivals, key=lambda problem: problem.progress).location
        if best.path == union:
            # The value as a whole fits no branch. The messages from all branches are kept, because together
            # they say what is allowed.
            losers = [rival for rival in rivals if rival.location.path != union]
        else:
            losers = [rival for rival in rivals if rival.location.branches[union] != best.branches[union]]
        problems = [problem for problem in problems if problem not in losers]
    return problems


def _faults_at(
    path: Sequence[str], problems: list[ErrorDetails], kind: Any
) -> Iterator[tuple[str, str | None]]:
    """Yield the faults at a path of the user's job, each as a line for the user and a hint or None."""
    problem, where = problems[0], ".".join(path)
    if problem["type"] == "union_tag_invalid":
        engine_kind = problem["ctx"]["tag"]
        yield f"{where}.kind: unknown kind of engine {engine_kind!r}", _near(engine_kind, ENGINE_KINDS)
    elif problem["type"] == "extra_forbidden":
        yield f"unknown key {where!r}", _nearest(path, kind)
    elif problem["type"] == "missing":
        example = EXAMPLES.get(where)
        yield f"{where} is missing", None if example is None else f"for example {example}"
    else:
        messages = dict.fromkeys(map(_message, problems))
        value = problem["input"]
        # A whole section would be too long for the message.
        got = "" if isinstance(value, (Mapping, BaseModel)) else f" (got {value!r:.200})"
        hint = None
        if isinstance(value, bool) and any(error["type"] == "string_type" for error in problems):
            hint = "YAML reads yes, no, on and off as true and false: put quotes around a text"
        prefix = f"{where}: " if where else ""
        # The message of a validator may have several lines, one for each fault.
        for line in ", or ".join(messages).split("\n"):
            yield f"{prefix}{line}{got}", hint


def _message(problem: ErrorDetails) -> str:
    """Return pydantic's message in terms of YAML and of this package, such as `mapping` for `dictionary`."""
    if problem["type"] == "union_tag_not_found":
        return "kind is missing"
    message = problem["msg"].removeprefix("Value error, ").removeprefix("Input ")
    message = message.replace("a valid dictionary or instance of FromColumn", "{column: NAME}")
    message = re.sub(r"a valid dictionary( or .*)?$", "a mapping", message)
    message = re.sub(r", unable to .*| after validation, not \d+", "", message)
    return message[:1].lower() + message[1:]


def _location_of(tree: object, problem: ErrorDetails) -> _Location:
    """Return the location of an error in `tree`, the mapping of the user's job.

    Pydantic's location has keys, list indices, and names of branches of unions. A step that is not a key or
    index of the user's job is the name of a branch.
    """
    path: tuple[str, ...] = ()
    branches: dict[tuple[str, ...], str] = {}
    is_missing = problem["type"] == "missing"
    # The last step to a missing key is not in the job, but is no branch either. It is added below.
    for step in problem["loc"][:-1] if is_missing else problem["loc"]:
        if isinstance(tree, Mapping) and step in tree:
            path = (*path, str(step))
            tree = tree[step]
        elif isinstance(tree, (list, tuple)) and isinstance(step, int):
            path = (*path, str(step))
            tree = tree[step] if step < len(tree) else None
        elif not (isinstance(tree, Mapping) and step == tree.get("kind")):
            # A branch that the user chose by the `kind` of an engine is certain, so it is not recorded.
            branches.setdefault(path, str(step))
    if is_missing:
        path = (*path, str(problem["loc"][-1]))
    return _Location(path, branches)


def _nearest(path: Sequence[str], kind: Any) -> str:
    """Return the hint for an unknown key at `path`, in a job or in a section of the class `kind`."""
    *section, key = path
    keys = _keys(kind, section)
    if key in keys:  # Another class of the union has the key, but not the class that the user chose.
        return "this key belongs to another kind of engine: leave it out, or change `kind`"
    hint = _near(key, sorted(keys))
    return f"{hint} (arguments of SGLang go into engine.args)" if section == ["engine"] else hint


def _near(word: str, words: Sequence[str]) -> str:
    """Return a hint with the word that the user probably meant, or with all words if none is similar."""
    similar_word = _closest(word, words)
    return f"did you mean {similar_word!r}?" if similar_word else f"known: {', '.join(words)}"


def _closest(word: str, words: Collection[str]) -> str | None:
    """Return the word in `words` that the user probably meant by `word`; None if none is similar."""
    similar = get_close_matches(word, words, n=1)
    if not similar:
        # The user may have left out a part of the name, such as `seed` for `sampling_seed`.
        similar = [name for name in words if name.startswith(f"{word}_") or name.endswith(f"_{word}")]
    return similar[0] if similar else None


def _keys(kind: Any, path: Sequence[str]) -> set[str]:
    """Return the keys that are allowed at a path in a section of a job.

    `kind` is the type of the section: its class, or a list or union of classes.
    """
    is_section = isinstance(kind, type) and issubclass(kind, BaseModel)
    if not is_section:
        keys: set[str] = set()
        for member in get_args(kind):
            keys |= _keys(member, path)
        return keys
    fields = {field.alias or name: field.annotation for name, field in kind.model_fields.items()}
    if not path:
        return set(fields)
    key, *steps = path
    # All items of a list have the same type, so indices are left out.
    keys_below = [step for step in steps if not step.isdigit()]
    return _keys(fields.get(key), keys_below)
