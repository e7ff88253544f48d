"""Renders rows into requests: fills in templates, reads prompts and sampling parameters from columns."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import orjson
import pyarrow as pa
import pyarrow.types as pt

from batchrunner.core.errors import Faults, InputError, JobError, RowRefusedError
from batchrunner.core.media import PromptFile
from batchrunner.core.types import ROLLOUT, Outcome, PromptKind, Request, RequestBody, RowRef, Tools
from batchrunner.input.dataset import (
    ColumnSource,
    Row,
    RowBatch,
    holds_bytes,
    is_ids,
    is_list,
    rows_of,
)
from batchrunner.input.messages import holds_messages, messages_in, tools_in
from batchrunner.input.request_bodies import BODY, URL, request_of
from batchrunner.input.templates import (
    FIELDS,
    AnswerExpression,
    Predicate,
    Template,
    is_template,
    template_of_column,
    with_fields,
)
from batchrunner.job.answers import AnswerPlan, takes_row
from batchrunner.job.arrow_types import is_text, type_name
from batchrunner.job.prompt import PromptSpec
from batchrunner.job.sampling import GRAMMARS, THINKING, FromColumn, SamplingSpec
from batchrunner.job.spec import InputSpec, Job

if TYPE_CHECKING:
    from batchrunner.core.hook_pool import HookPool
    from batchrunner.input.media.prompts import MediaPrompts
    from batchrunner.input.python_prompts import PythonPrompts

_WHOLE = {"max_new_tokens", "min_new_tokens", THINKING, "top_k", "sampling_seed"}
"""Sampling parameters that are whole numbers."""


class Renderer:
    """Renders the rows of a job; `columns` are the input columns that it reads.

    `kind` is the kind of its prompts; None if a Python function makes them, since their kinds may differ.
    """

    def __init__(
        self, job: Job, dataset: ColumnSource, answers: AnswerPlan, functions: HookPool | None
    ) -> None:
        """Compile the templates and check the columns.

        `functions` are the job's Python functions. Raises JobError for bad templates, InputError for columns
        that are missing or have a wrong type; the error names all faults at once.
        """
        source, prompt = job.input, job.prompt
        faults = Faults()

        # The prompt, and the files in it.
        self._python: PythonPrompts | None = None
        prompts = PromptSource(None, dict, ())  # a Python function makes prompts later, from whole rows
        if prompt.python and functions:
            from batchrunner.input.python_prompts import PythonPrompts  # noqa: PLC0415 - few jobs have one

            self._python = PythonPrompts(functions, dataset)
            prompts = prompts._replace(columns=self._python.columns)
        else:
            with faults.collect():
                prompts = _prompt_source(prompt, dataset, functions)
        self.kind = prompts.kind
        self._prompt_of = prompts.prompt_of
        self._request_kind: PromptKind = self.kind or "messages"  # a stand-in until a function makes one
        self._media: MediaPrompts | None = None
        if prompt.media:
            from batchrunner.input.media.prompts import MediaPrompts  # noqa: PLC0415 - few jobs have files

            with faults.collect():
                self._media = MediaPrompts(prompt, dataset, prompts.prompt_of, prompts.printed)

        # The sampling parameters, which tasks without decoding do not send.
        self._sampling: dict[str, Any] = {}
        self._per_row: dict[str, str] = {}
        with faults.collect():
            fixed, per_row = _split_sampling(job.sampling, dataset)
            if answers.task is None:
                self._sampling, self._per_row = fixed, per_row

        # The other fields of requests.
        self._by_row: dict[str, ByColumn] = {}
        self._shared: dict[str, Any] = {
            "chat_template_kwargs": prompt.chat_template_kwargs, "continues": prompt.continues,
            "asks": answers.asks, "task": answers.task,
            "stops_repetition": answers.on_repetition != "keep",
        }  # fmt: skip
        with faults.collect():
            for field, value in _other_fields(job, dataset).items():
                if isinstance(value, ByColumn):
                    self._by_row[field] = value
                else:
                    self._shared[field] = value

        # The filter and the check of answers.
        self.predicate: Predicate | None = None
        self._for_check: Sequence[str] = []
        self._compile_expressions(job, dataset.schema.names, faults)
        self._same: tuple[Any, ...] | None = None
        """Values of a request's fields after `sampling`, if they are the same for all rows; else None."""
        if not (self._by_row or self._for_check or self._media):
            self._same = tuple({**Request._field_defaults, **self._shared}.values())

        # The columns that it reads, for requests or to carry them into the results.
        self._used = self._columns_used(prompts)
        self.carried_schema = pa.schema([])
        with faults.collect():
            self.carried_schema = _carried_schema(source, dataset, self._used)
        faults.raise_all()
        self._carried = [*source.columns]
        self._carried_names = source.carried_names
        self.columns = sorted({*self._used, *self._carried})
        if takes_row(functions):  # a function that gets an answer and its row may read any column
            self._used = self.columns

    def _compile_expressions(self, job: Job, columns: Sequence[str], faults: Faults) -> None:
        """Compile the filter, and find the columns that `accept.expression` reads."""
        with faults.collect():
            if job.input.filter is not None:
                self.predicate = Predicate(job.input.filter, where="input.filter", available=columns)
        with faults.collect():
            if job.accept.expression:
                self._for_check = AnswerExpression(job.accept.expression, columns).columns

    def _columns_used(self, prompts: PromptSource) -> list[str]:
        """Return the columns that requests, the filter and the check of answers read."""
        used = {*prompts.columns, *self._per_row.values(), *self._for_check}
        used |= {value.column for value in self._by_row.values()}
        if self._media is not None:
            used |= {*self._media.columns}
        if self.predicate is not None:
            used |= {*self.predicate.columns}
        return sorted(used)

    def carried(self, batch: RowBatch) -> pa.RecordBatch:
        """Return the carried columns of a batch, under their names in the results."""
        return batch.data.select(self._carried).rename_columns(self._carried_names)

    def render(
        self,
        batch: RowBatch,
        is_stopped: Callable[[], object] = lambda: False,
        digests: list[bytes | None] | None = None,
    ) -> list[Request | Outcome]:
        """Return a request for each row of a batch, in order, or an Outcome if the row cannot be rendered.

        `digests` has an element for each row, where the digest of its request is stored later. Once
        `is_stopped` returns true, the rest of the batch is dropped. `is_stopped` may raise.
        """
        carried = self.carried(batch)
        items: list[Request | Outcome] = []
        for position, (row, values) in enumerate(zip(batch.rows, rows_of(batch, self._used), strict=True)):
            if is_stopped():
                break
            ref = RowRef(row, carried, position, digests)
            try:
                items.append(self._request(ref, values))
            except RowRefusedError as failure:
                items.append(Outcome.unsent(ref, str(failure)))
        return items if self._python is None else self._python.fill(items, is_stopped)

    def _request(self, ref: RowRef, row: Row | str) -> Request:
        if isinstance(row, str):  # the reason why it cannot be read
            raise RowRefusedError(row)
        if self.predicate is not None:
            self.predicate(row)  # rows on which the filter fails are selected too; the error is raised here
        media: tuple[PromptFile, ...] = ()
        if self._media is None:
            prompt = self._prompt_of(row)
        else:
            prompt, media = self._media.prompt(ref.row, row)
        sampling = self._sampling
        if isinstance(prompt, RequestBody):
            sampling = {"max_new_tokens": prompt.most_tokens}
            if prompt.most_thinking is not None:
                sampling[THINKING] = prompt.most_thinking
        if self._per_row:
            sampling = {**sampling, **self._sampling_of(row)}
        if self._same is not None:
            return Request(ref, self._request_kind, prompt, sampling, *self._same)
        row_fields = {name: field.of(row[field.column]) for name, field in self._by_row.items()}
        if self._for_check:
            row_fields["row"] = {name: row[name] for name in self._for_check}
        return Request(ref, self._request_kind, prompt, sampling, media=media, **self._shared, **row_fields)

    def _sampling_of(self, row: Row) -> dict[str, Any]:
        """Return the sampling parameters that a row's columns give; a null leaves the default."""
        values = {name: row[column] for name, column in self._per_row.items()}
        return {name: _sendable(name, value) for name, value in values.items() if value is not None}


def _sendable(name: str, value: Any) -> Any:
    """Return a column's value as it is sent; raises RowRefusedError for an unusable number."""
    if not isinstance(value, float):
        return value
    if name in _WHOLE and value.is_integer() and abs(value) < 1 << 63:
        return int(value)  # pandas turns a column of whole numbers with a null into floats
    if name in _WHOLE or not math.isfinite(value):
        raise RowRefusedError(f"sampling.{name}: {value} is not a valid value")
    return value


class PromptSource(NamedTuple):
    """A function that makes prompts of rows, and the columns that it reads."""

    kind: PromptKind | None
    prompt_of: Callable[[Row], Any]
    """Makes the prompt of a row."""
    columns: Sequence[str]
    """Columns that `prompt_of` reads."""
    printed: frozenset[str] = frozenset()
    """Columns that a template prints."""


def _carried_schema(source: InputSpec, dataset: ColumnSource, used: Sequence[str]) -> pa.Schema:
    """Return the schema of the carried columns, under their names in the results.

    Raises InputError if one of them, or of the `used` columns, is missing.
    """
    fields, faults = [], Faults()
    for name in used:
        with faults.collect():
            dataset.field(name, where="prompt")
    for name, new in zip(source.columns, source.carried_names, strict=True):
        with faults.collect():
            fields.append(dataset.field(name, where="input.columns").with_name(new))
    faults.raise_all()
    return pa.schema(fields)


def _prompt_source(prompt: PromptSpec, dataset: ColumnSource, functions: HookPool | None) -> PromptSource:
    if prompt.rollout and functions:
        from batchrunner.input.python_prompts import columns_given  # noqa: PLC0415 - few jobs have one

        names = columns_given(functions.facts[ROLLOUT], dataset)
        return PromptSource(None, lambda row: [{name: row[name] for name in names}], names)
    if isinstance(prompt.messages, str):
        column = prompt.messages
        expected = "lists of {role, content} or {from, value}, or JSON texts of such lists"
        _check(dataset, column, where="prompt.messages", fits=holds_messages, expected=expected)
        return PromptSource("messages", partial(messages_in, column, continues=prompt.continues), [column])
    if prompt.is_batch:
        return PromptSource("body", request_of, [URL, BODY])
    if prompt.input_ids is not None:
        _check(dataset, prompt.input_ids, where="prompt.input_ids", fits=is_ids, expected="lists of integers")
        return PromptSource("input_ids", partial(_prompt_in, prompt.input_ids), [prompt.input_ids])
    if prompt.text is not None and not prompt.fields and not is_template(prompt.text):
        _check(dataset, prompt.text, where="prompt.text", fits=is_text, expected="texts")
        return PromptSource("text", partial(_prompt_in, prompt.text), [prompt.text])
    return _from_templates(prompt, dataset)


def _prompt_in(column: str, row: Row) -> Any:
    value = row[column]
    if value is None:
        raise RowRefusedError(f"prompt: column {column!r} is null")
    if not value:
        raise RowRefusedError(f"prompt: column {column!r} is empty")
    return value


def _from_templates(prompt: PromptSpec, dataset: ColumnSource) -> PromptSource:
    sources: list[tuple[str, str, str]] = []
    if isinstance(prompt.messages, list):
        sources += ((f"messages.{at}.content", m.role, m.content) for at, m in enumerate(prompt.messages))
    for role in ("system", "user", "text"):
        if getattr(prompt, role) is not None:
            sources.append((role, role, getattr(prompt, role)))
    available = [*dataset.schema.names, *([FIELDS] if prompt.fields else [])]
    templates: list[tuple[str, Template]] = []
    faults = Faults()
    for field, role, source in sources:
        with faults.collect():
            template = Template(source, where=f"prompt.{field}", available=available)
            for name in template.printed:
                if name != FIELDS and name not in prompt.media_columns:
                    _refuse_bytes(dataset, name, f"prompt.{field}")
            templates.append((role, template))
    faults.raise_all()
    columns = {name for _, template in templates for name in template.columns}
    if not columns:
        _refuse_single_braces(str(sources), dataset)
    printed = frozenset(name for _, template in templates for name in template.printed)
    kind: PromptKind = "messages" if prompt.text is None else "text"
    make: Callable[[Row], Any] = partial(_messages, templates)
    if prompt.text is not None:
        make = templates[0][1].render
    if prompt.fields:
        make, columns = _with_fields(prompt.fields.columns, dataset, make, columns)
    return PromptSource(kind, make, sorted(columns), printed)


def _refuse_single_braces(templates: str, dataset: ColumnSource) -> None:
    """Raise JobError if templates that read no column contain a column in single braces, such as `{text}`.

    All rows would have the same prompt.
    """
    for name in dataset.schema.names:
        if f"{{{name}}}" in templates:
            expression = f"{{{{ {template_of_column(name)} }}}}"
            raise JobError(f"prompt: {{{name}}} does not insert the column", hint=f"write {expression}")


def _with_fields(
    fields: list[str], dataset: ColumnSource, make: Callable[[Row], Any], columns: set[str]
) -> tuple[Callable[[Row], Any], set[str]]:
    """Return a function that calls `make` with a row and the lines of these fields.

    Also return the columns that this function reads.
    """
    if FIELDS in dataset.schema.names:
        raise JobError(
            f"prompt.fields: the input has a column {FIELDS!r}, a name that templates use for prompt.fields",
            hint="rename that column in the input",
        )
    if FIELDS not in columns:
        raise JobError(
            "prompt.fields: no template uses {{ fields }}", hint="write {{ fields }} in the template"
        )
    for name in fields:
        _refuse_bytes(dataset, name, "prompt.fields")
    return partial(with_fields, make, fields), columns - {FIELDS} | {*fields}


def _messages(templates: Sequence[tuple[str, Template]], row: Row) -> list[dict[str, Any]]:
    return [{"role": role, "content": template.render(row)} for role, template in templates]


def _refuse_bytes(dataset: ColumnSource, name: str, where: str) -> None:
    """Raise InputError for a column with bytes: the prompt would show them as "b'…'"."""
    kind = dataset.field(name, where=where).type
    if holds_bytes(kind):
        raise InputError(
            f"{where}: column {name!r} holds bytes ({kind}), not text",
            hint=f"write {{{{ {template_of_column(name)}.decode() }}}} if it is text in UTF-8",
        )


def _check(
    dataset: ColumnSource, name: str, *, where: str, fits: Callable[[pa.DataType], bool], expected: str
) -> None:
    """Raise InputError for a missing column, or one whose type does not fit.

    A column of nulls or empty lists fits: its rows are checked one by one.
    """
    kind = dataset.field(name, where=where).type
    values = kind.value_type if is_list(kind) else kind
    if not (pt.is_null(values) or fits(kind)):
        raise InputError(
            f"{where}: column {name!r} must hold {expected} (got {type_name(kind)})",
            hint="a column of CSV gets a type in input.types" if is_text(kind) else None,
        )


class ByColumn(NamedTuple):
    """A field of requests whose value comes from a column."""

    column: str
    of: Callable[[Any], Any]
    """Converts the column's value to that of the field; raises RowRefusedError."""


def _other_fields(job: Job, dataset: ColumnSource) -> dict[str, Any]:
    """Return the fields of requests that are neither the prompt nor sampling; raises InputError."""
    makers: dict[str, Callable[[], Any]] = {
        "lora_path": lambda: _lora_path(job.sampling),
        "tools": lambda: _tools(job.prompt, job.sampling, dataset),
        "items": lambda: _items(job.prompt, dataset),
    }
    fields, faults = {}, Faults()
    for field, make in makers.items():
        with faults.collect():
            fields[field] = make()
    faults.raise_all()
    return fields


def _lora_path(sampling: SamplingSpec) -> ByColumn | str | None:
    lora = sampling.lora_path
    return ByColumn(lora.column, lambda value: value) if isinstance(lora, FromColumn) else lora


def _tools(prompt: PromptSpec, sampling: SamplingSpec, dataset: ColumnSource) -> ByColumn | Tools | None:
    """Return the tools that the model may call in a chat."""
    choice = sampling.tool_choice
    if isinstance(prompt.tools, str):
        expected = "lists of tools, or JSON texts of such lists"
        _check(
            dataset,
            prompt.tools,
            where="prompt.tools",
            fits=lambda kind: is_text(kind) or is_list(kind),
            expected=expected,
        )
        return ByColumn(prompt.tools, partial(tools_in, prompt.tools, choice))
    has_tools = prompt.tools is not None or choice is not None
    return Tools(prompt.tools, choice) if has_tools else None


def _items(prompt: PromptSpec, dataset: ColumnSource) -> ByColumn | tuple[str, ...]:
    """Return the choices or documents, each of which is combined with the prompt."""
    field = "choices" if prompt.documents is None else "documents"
    value = getattr(prompt, field) or ()
    if not isinstance(value, str):
        return tuple(value)
    _check(
        dataset,
        value,
        where=f"prompt.{field}",
        fits=_is_text_or_texts,
        expected="texts or lists of texts",
    )
    return ByColumn(value, partial(_items_in, f"prompt.{field}: column {value!r}"))


def _items_in(label: str, value: str | list[Any] | None) -> tuple[str, ...]:
    """Return the items in a column; raises RowRefusedError for a null, and for an empty list or item."""
    items = (value,) if isinstance(value, str) else tuple(value or ())
    if not items or not all(items):
        raise RowRefusedError(f"{label} is null or empty, or has such an item")
    return items


def _is_number(kind: pa.DataType) -> bool:
    return bool(pt.is_integer(kind) or pt.is_floating(kind))


def _is_text_or_texts(kind: pa.DataType) -> bool:
    return is_text(kind.value_type if is_list(kind) else kind)


_COLUMN_TYPES: dict[str, tuple[Callable[[pa.DataType], bool], str]] = {
    **dict.fromkeys({*GRAMMARS, "lora_path"}, (is_text, "texts")),
    **dict.fromkeys(("stop", "stop_regex"), (_is_text_or_texts, "texts or lists of texts")),
    "stop_token_ids": (is_ids, "lists of integers"),
    "ignore_eos": (pt.is_boolean, "booleans"),
}
"""For some sampling parameters, the test of a column's type and the name of the type that the column must
have. The columns of all other parameters must hold numbers."""


def _split_sampling(sampling: SamplingSpec, dataset: ColumnSource) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the parameters that all rows share, and the columns of the other parameters."""
    fixed: dict[str, Any] = {}
    per_row: dict[str, str] = {}
    faults = Faults()
    for name, field in type(sampling).model_fields.items():
        value = getattr(sampling, name)
        if isinstance(value, FromColumn):
            fits, expected = _COLUMN_TYPES.get(name, (_is_number, "numbers"))
            with faults.collect():
                _check(dataset, value.column, where=f"sampling.{name}", fits=fits, expected=expected)
        if name in {"lora_path", "tool_choice"}:  # fields of requests, not sampling parameters
            continue
        if isinstance(value, FromColumn):
            per_row[name] = value.column
            value = field.default  # the value for a null
        if value is not None:
            fixed[name] = value
    faults.raise_all()
    if isinstance(fixed.get("json_schema"), dict):
        fixed["json_schema"] = orjson.dumps(fixed["json_schema"]).decode()
    if fixed["n"] == 1:
        del fixed["n"]
    return fixed, per_row
