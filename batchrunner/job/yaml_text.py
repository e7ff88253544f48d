"""Reads YAML strictly and in bounded time: no repeated key, no huge file, no aliases that multiply."""

import codecs
import contextlib
import difflib
import re
import sys
from collections.abc import Hashable
from pathlib import Path
from shlex import quote
from typing import Any, BinaryIO

import yaml

from batchrunner.core.errors import JobError
from batchrunner.core.file_format import known_format
from batchrunner.core.uris import is_uri, uri_of

MOST_BYTES = 2 << 20
"""Bytes of a job file at most: tens of thousands of times a common one, and read in some seconds."""
MOST_VALUES = 200_000
"""Values of a job at most, with those that aliases repeat."""
_BARE_TEMPLATE = re.compile(r"(?:^|[{,])\s*(?:- )?\w+:\s*\{\{")
"""A template that is no text for YAML, since it begins with a brace and has no quotes."""
_QUOTE_TEMPLATES = "put quotes around a text that begins with {{, or write it below `|`"
_HINTS = {
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
_UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


class _StrictLoader(yaml.SafeLoader):
    """SafeLoader that refuses a repeated key, where YAML would keep the last value, and alias bombs."""

    def get_single_node(self) -> yaml.Node | None:
        """Return the document; raises ConstructorError where its aliases repeat too many values."""
        node = super().get_single_node()
        if node is not None:
            self._count(node, {})
        return node

    def _count(self, node: yaml.Node, known: dict[int, int | None]) -> int:
        """Return how many values a node has once its aliases are resolved."""
        if isinstance(node, yaml.ScalarNode):
            return 1
        size = known.setdefault(id(node), 0)
        if size is None:
            raise yaml.constructor.ConstructorError(None, None, "an alias stands in itself", node.start_mark)
        if size:
            return size
        known[id(node)] = None
        pairs = isinstance(node, yaml.MappingNode)
        below = [item for pair in node.value for item in pair] if pairs else node.value
        size = 1 + sum(self._count(item, known) for item in below)
        if size > MOST_VALUES:
            problem = f"it has more than {MOST_VALUES:,} values, with those that aliases repeat"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
        known[id(node)] = size
        return size

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


def read_text(path: Path) -> str:
    """Return the text of a job file, which is UTF-8, or UTF-16 with its mark; raises JobError."""
    try:
        with path.open("rb") as file:
            return _decoded(file, str(path))
    except FileNotFoundError:
        if is_uri(str(path)):
            raise JobError(f"{uri_of(path)}: is a URI", hint="give a job file on this machine") from None
        raise JobError(f"{path}: no such job file", hint=_nearest(path), mark=";") from None
    except IsADirectoryError:
        raise JobError(f"{path}: is a directory", hint="give the job file in it") from None
    except UnicodeDecodeError as failure:
        raise JobError(f"{path}: cannot be read as a job file: {failure}", hint="save it as UTF-8") from None
    except (OSError, ValueError) as failure:  # ValueError: a NUL in the path
        raise JobError(f"{path}: cannot be read as a job file: {failure}") from None


def read_standard_input() -> str:
    """Return the text of a job that comes from standard input, to its end; raises JobError."""
    try:
        return _decoded(sys.stdin.buffer, "standard input")
    except UnicodeDecodeError as failure:
        raise JobError(
            f"standard input: cannot be read as a job: {failure}", hint="send it as UTF-8"
        ) from None
    except (OSError, ValueError) as failure:  # ValueError: it was closed
        raise JobError(f"standard input: cannot be read as a job: {failure}") from None


def _decoded(file: BinaryIO, name: str) -> str:
    content = file.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise JobError(f"{name}: is no job file: it has more than {MOST_BYTES >> 20} MiB")
    return content.decode("utf-16" if content.startswith(_UTF16) else "utf-8-sig")


def _nearest(path: Path) -> str | None:
    with contextlib.suppress(OSError, ValueError):  # ValueError: a NUL in the path
        jobs = [file.name for file in path.parent.iterdir() if file.suffix in {".yaml", ".yml"}]
        if near := difflib.get_close_matches(path.name, jobs, n=1, cutoff=0.8):
            return f"did you mean {str(path.with_name(near[0]))!r}?"
    return None


def data_file_error(path: Path) -> JobError | None:
    """Return what to say of a data file that was given as a job; None for another file."""
    if known_format(path.name) is None or path.suffix == ".json" or not path.is_file():
        return None
    return JobError(
        f"{path}: is a data file and no job",
        hint=f"this writes a job for it: batchrun init {quote(str(path))}",
    )


def parse(text: str, where: str) -> Any:
    """Return the value of a YAML text; raises JobError, naming `where`."""
    try:
        return yaml.load(text, Loader=_StrictLoader)  # noqa: S506 - a SafeLoader
    except yaml.YAMLError as failure:
        raise JobError(f"{where}: {_problem(failure)}", hint=_hint(failure, text), mark=";") from None
    except RecursionError:
        raise JobError(f"{where}: not valid YAML: it is nested too deeply") from None
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError) as failure:
        # errors of PyYAML's constructors: a date with month 13, `!!int x`
        raise JobError(f"{where}: not valid YAML: {str(failure).partition(';')[0]}") from None


def _problem(failure: yaml.YAMLError) -> str:
    mark = getattr(failure, "problem_mark", None)
    where = f"line {mark.line + 1}: " if mark else ""
    return f"{where}not valid YAML: {getattr(failure, 'problem', None) or str(failure).splitlines()[0]}"


def _hint(failure: yaml.YAMLError, text: str) -> str | None:
    """Return what to do about a mistake in a YAML text; None where its problem says it all."""
    problem = getattr(failure, "problem", None) or ""
    hint = next((hint for words, hint in _HINTS.items() if words in problem), None)
    mark = getattr(failure, "problem_mark", None)
    line = text.splitlines()[mark.line : mark.line + 1] if mark else []
    return _QUOTE_TEMPLATES if hint and line and _BARE_TEMPLATE.search(line[0]) else hint
