"""`batchrun init`: a commented job for a data file, whose prompt is the likeliest text column."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from shlex import quote
from typing import Any

import pyarrow as pa
import pyarrow.types as pt
import yaml
from pyroaring import BitMap64

from batchrunner.core.errors import BatchrunError, InputError, JobError, OutputError
from batchrunner.core.files import format_of
from batchrunner.input.columns_read import other_separator, template_of_column
from batchrunner.input.dataset import Dataset
from batchrunner.input.messages import holds_messages
from batchrunner.input.prompt_types import is_ids, is_text
from batchrunner.job.fields import user_paths
from batchrunner.job.output import RESULT_COLUMNS
from batchrunner.output.files import refuse_uri

ENGINES = ("server", "simulated")
TEXT_NAMES = (
    "prompt", "instruction", "question", "query", "input", "text", "content", "document", "body", "article",
    "message", "source", "review", "comment", "description", "abstract", "title",
)  # fmt: skip
"""Names of columns that commonly hold what is asked, the likeliest first."""
ID_NAME = re.compile(r"(.*[ _-])?(?i:id|uuid|guid|key)|.*[a-z](Id|ID)")
ROWS_LOOKED_AT = 100
"""Rows whose texts are measured where no name tells the text column."""
_PLAIN = re.compile(r"[A-Za-z_./][\w./-]*")
_SERVER = """engine:
  kind: server                    # starts an SGLang server here, and ends it with the run
  model: Qwen/Qwen3-8B            # put your model here: a name of Hugging Face, or a directory
  # args: {mem-fraction-static: 0.88}   # arguments of the server
# engine: {kind: simulated}       # instead: answers are made up, to try the job without a GPU
"""
_SIMULATED = """engine: {kind: simulated}         # answers are made up, to try the job without a GPU
# engine:                         # instead: a real one
#   kind: server                  # starts an SGLang server here, and ends it with the run
#   model: Qwen/Qwen3-8B          # put your model here: a name of Hugging Face, or a directory
"""


@dataclass(frozen=True, slots=True)
class NewJob:
    """A job that `init` made."""

    text: str
    """The job file."""
    prompt: str
    """Column that is the prompt, or stands in it."""
    columns: Mapping[str, str]
    """Types of the data's columns, by their names."""

    def as_dict(self, path: str) -> dict[str, Any]:
        """Return the result for `--json`; `path` is where the job was written, `-` where it was not."""
        file = None if path == "-" else path
        return {"job": file, "text": self.text, "prompt_column": self.prompt, "columns": dict(self.columns)}

    def next_steps(self, path: str) -> str:
        """Return what a person does next."""
        return f"wrote {path}: the prompt is the column {self.prompt!r}; next: batchrun check {quote(path)}"


def new_job(path: str, engine: str, file: str) -> NewJob:
    """Return a job for the data at `path`, with an engine of a kind; raises JobError or InputError.

    `file` is the name that the commands in its first lines give to the job.
    """
    if engine not in ENGINES:
        raise JobError(
            f"--engine {engine}", hint="give server or simulated; change the job for the other kinds"
        )
    dataset = Dataset(user_paths(path))
    if not dataset.total_rows:
        raise InputError(f"{path}: no rows in {len(dataset.files)} file(s)")
    _refuse_other_separator(path, dataset)
    if {"custom_id", "url", "body"} <= set(dataset.schema.names):
        how = f"batchrun batch {quote(path)} -o results.jsonl --model MODEL answers it"
        raise InputError(f"{path}: is a batch file, which needs no job", hint=how)
    usable, problems = _usable(dataset)
    if not usable:
        why = f": {next(iter(problems.values()))}" if problems else ""
        raise InputError(f"the data has no column that a prompt can be made of{why}")
    prompt, column = _prompt(dataset, usable)
    carried = [n for n, kind in usable.items() if ID_NAME.fullmatch(n) and not pt.is_nested(kind)]
    carried = [name for name in carried if name not in {column, *RESULT_COLUMNS}]
    hint = "" if carried else ": name those that tell rows apart"
    known = {field.name: str(field.type) for field in dataset.schema}
    columns = "".join(
        f"#   {_scalar(name)}: {' '.join((problems.get(name) or kind).split())}\n"
        for name, kind in known.items()
    )
    job = quote(file) if file.isprintable() else "JOB.yaml"
    text = (
        "# A job for batchrunner, made by `batchrun init`. Change what you like, then:\n"
        f"#   batchrun check {job}   validates it and shows three prompts; sends nothing\n"
        f"#   batchrun {job}         runs it; the same command resumes\n"
        f"#\n# Columns of the data, {dataset.total_rows:,} rows:\n{columns}\n"
        f"input:\n  path: {_scalar(path)}\n"
        f"  columns: [{', '.join(map(_scalar, carried))}]   # copied into the results{hint}\n"
        "  # limit: 100                    # for a trial: the first rows only\n\n"
        f"prompt:\n{prompt}\n"
        "sampling:\n"
        "  max_new_tokens: 256             # the longest output, in tokens\n"
        "  temperature: 0\n\n"
        f"output:\n  path: {_scalar(_free_output(path))}   # the results come into parts/ below it\n\n"
        f"{_SIMULATED if engine == 'simulated' else _SERVER}"
        "\nlimits:\n  max_failed_rows: 1%             # with more the exit code is 3\n"
    )
    return NewJob(text, column, known)


def _refuse_other_separator(path: str, dataset: Dataset) -> None:
    """Refuse a CSV file whose one column has a name with another separator in it."""
    names = dataset.schema.names
    mark = other_separator(names)
    if mark and format_of(dataset.files[0].path).kind == "CSV":
        raise InputError(
            f"{path}: has one column, {names[0]!r}: {mark!r} separates no columns here",
            hint=f"write it with commas, or as Parquet; duckdb reads it by read_csv('…', delim='{mark}')",
            mark=";",
        )


def save(job: NewJob, path: str) -> None:
    """Write a new job file; raises OutputError, also where the file exists."""
    refuse_uri(path, path)
    try:
        with Path(path).open("x", encoding="utf-8") as file:
            file.write(job.text)
    except FileExistsError:
        raise OutputError(
            f"{path}: exists, and init overwrites nothing", hint="give another file with -o"
        ) from None
    except (OSError, ValueError) as failure:  # ValueError: a NUL in the path
        raise OutputError(f"{path}: cannot be written: {failure}") from None


def _usable(dataset: Dataset) -> tuple[dict[str, pa.DataType], dict[str, str]]:
    """Return the types of the columns that a job can use, in order, and why it cannot use the others."""
    found, problems = {}, {}
    for name in dict.fromkeys(dataset.schema.names):
        try:
            found[name] = dataset.field(name, where="a job").type
        except BatchrunError as problem:  # files disagree on it, or it stands twice
            problems[name] = f"cannot be used: {problem}"
    return found, problems


def _prompt(dataset: Dataset, usable: Mapping[str, pa.DataType]) -> tuple[str, str]:
    """Return the lines of the job's `prompt`, and the column that it reads."""
    for name in _of_kind(usable, _is_conversation):
        return f"  messages: {_scalar(name)}   # the model's chat template is applied\n", name
    texts = _of_kind(usable, is_text)
    if texts:
        name = _likeliest(dataset, texts)
        return _user(template_of_column(name)), name
    for name in _of_kind(usable, is_ids):
        return f"  input_ids: {_scalar(name)}   # token ids\n", name
    name = next(iter(usable))
    return _user(template_of_column(name)), name


def _user(expression: str) -> str:
    template = _scalar(f"{{{{ {expression} }}}}", quoted=True)
    return f"  # system: You are terse.\n  user: {template}   # Jinja2 over the columns of a row\n"


def _of_kind(usable: Mapping[str, pa.DataType], fits: Callable[[pa.DataType], bool]) -> list[str]:
    return [name for name, kind in usable.items() if fits(kind)]


def _is_conversation(kind: pa.DataType) -> bool:
    """Tell whether a column surely holds messages; a text might, as JSON."""
    return holds_messages(kind) and not is_text(kind)


def _likeliest(dataset: Dataset, texts: list[str]) -> str:
    """Return the column with a common name, else the one with the longest texts in the first rows."""
    for wanted in TEXT_NAMES:
        for name in texts:
            if name.lower() == wanted:
                return name
    if len(texts) == 1:
        return texts[0]
    length = dict.fromkeys(texts, 0)
    wanted_rows = BitMap64(range(min(ROWS_LOOKED_AT, dataset.total_rows)))
    columns = [*texts, *dataset.problems]
    for batch in islice(dataset.read(wanted_rows, columns), ROWS_LOOKED_AT):
        for name in texts:
            length[name] += sum(
                len(str(value)) for value in batch.data[name].to_pylist() if value is not None
            )
    return max(texts, key=lambda name: (not ID_NAME.fullmatch(name), length[name]))


def _free_output(path: str) -> str:
    """Return an output path of the data's name where nothing lies yet."""
    name = re.sub(r"[^\w-]+", "-", Path(path).name.partition(".")[0]).strip("-") or "run"
    number, free = 2, f"out/{name}"
    while Path(free).exists():
        number, free = number + 1, f"out/{name}-{number}"
    return free


def _scalar(text: str, *, quoted: bool = False) -> str:
    """Return a text as YAML on one line: plain where it surely is a text, else in double quotes."""
    if not quoted and _PLAIN.fullmatch(text) and yaml.safe_load(text) == text:
        return text
    return yaml.dump(text, default_style='"', allow_unicode=True, width=float("inf")).removesuffix("\n")
