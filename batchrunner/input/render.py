"""Renders rows into requests: prompts and parameters come from templates and columns."""

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
from batchrunner.core.types import (
    ROLLOUT,
    Outcome,
    PromptKind,
    RepeatedText,
    Request,
    RequestBody,
    RowRef,
    Tools,
)
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
from batchrunner.job.answers import LEAST_ROOM, AnswerPlan, takes_row
from batchrunner.job.arrow_types import is_text, type_name
from batchrunner.job.prompt import PromptSpec
from batchrunner.job.sampling import GRAMMARS, THINKING, FromColumn, SamplingSpec
from batchrunner.job.spec import InputSpec, Job

if TYPE_CHECKING:
    from batchrunner.core.hook_pool import HookPool
    from batchrunner.input.media.prompts import MediaPrompts
    from batchrunner.input.python_prompts import PythonPrompts

_INTEGER_PARAMETERS = {"max_new_tokens", "min_new_tokens", THINKING, "top_k", "sampling_seed"}


class Renderer:
    """Renders the rows of a job into requests.

    `columns` are the input columns that it reads. `kind` is the kind of every prompt (text, messages or token
    ids). It is None if a Python function of the job makes the prompts, because each may be of another kind.
    """

    def __init__(
        self, job: Job, dataset: ColumnSource, answers: AnswerPlan, functions: HookPool | None
    ) -> None:
        """Compile the templates and check the columns.

        `functions` are the job's Python functions. Raises JobError for bad templates, and InputError for
        columns that are missing or have a wrong type. One error names all faults.
        """
        source, prompt = job.input, job.prompt
        faults = Faults()

        # The job's function `prompt.python`, which makes the prompts; None if the job has no such function.
        self._python: PythonPrompts | None = None
        # A request first holds the whole row in place of its prompt. Later, one call of the user's function
        # makes the prompts of a batch of rows.
        prompts = PromptSource(kind=None, prompt_of=dict, columns=())
        if prompt.python and functions:
            from batchrunner.input.python_prompts import PythonPrompts  # noqa: PLC0415 - few jobs have one

            self._python = PythonPrompts(functions, dataset)
            prompts = prompts._replace(columns=self._python.columns)
        else:
            with faults.collect():
                prompts = _prompt_source(prompt, dataset, functions)
        self.kind = prompts.kind
        self._prompt_of = prompts.prompt_of
        # With `prompt.python`, this kind is provisional: the function decides it row by row.
        self._request_kind: PromptKind = self.kind or "messages"
        self._media: MediaPrompts | None = None
        if prompt.media:
            from batchrunner.input.media.prompts import MediaPrompts  # noqa: PLC0415 - few jobs have files

            with faults.collect():
                self._media = MediaPrompts(prompt, dataset, prompts.prompt_of, prompts.printed)

        # Sampling parameters that all rows share, and those that come from a column of the row. Tasks that
        # generate no tokens have neither.
        self._sampling: dict[str, Any] = {}
        self._sampling_columns: dict[str, str] = {}
        with faults.collect():
            shared_parameters, columns_by_parameter = _split_sampling(job.sampling, dataset)
            if answers.task is None:
                self._sampling, self._sampling_columns = shared_parameters, columns_by_parameter

        # The other fields of requests: a value for all rows, or a column with the value of each row.
        self._row_fields: dict[str, ByColumn] = {}
        self._shared_fields: dict[str, Any] = {
            "chat_template_kwargs": prompt.chat_template_kwargs, "continues": prompt.continues,
            "asks": answers.asks, "task": answers.task,
            "stops_repetition": _repetition_to_stop(job, answers),
        }  # fmt: skip
        with faults.collect():
            for field, value in _other_fields(job, dataset).items():
                if isinstance(value, ByColumn):
                    self._row_fields[field] = value
                else:
                    self._shared_fields[field] = value

        # Compiled `input.filter`; None if the job has no filter.
        self.predicate: Predicate | None = None
        self._expression_columns: Sequence[str] = []
        self._compile_expressions(job, dataset.schema.names, faults)
        self._last_fields: tuple[Any, ...] | None = None
        """Values of the request fields after `sampling`; None if they may differ between rows."""
        if not (self._row_fields or self._expression_columns or self._media):
            self._last_fields = tuple({**Request._field_defaults, **self._shared_fields}.values())

        # Columns to read, for requests or to be copied into the results.
        self._used = self._columns_used(prompts)
        self.carried_schema = pa.schema([])
        with faults.collect():
            self.carried_schema = _carried_schema(source, dataset, self._used)
        faults.raise_all()
        self._carried = [*source.columns]
        self._carried_names = source.carried_names
        self.columns = sorted({*self._used, *self._carried})
        # A Python function that gets an answer with its row may read any column. If a column of a row cannot
        # be read, the row must therefore fail before it is sent.
        if takes_row(functions):
            self._used = self.columns

    def _compile_expressions(self, job: Job, columns: Sequence[str], faults: Faults) -> None:
        with faults.collect():
            if job.input.filter is not None:
                self.predicate = Predicate(job.input.filter, where="input.filter", available=columns)
        with faults.collect():
            if job.accept.expression:
                self._expression_columns = AnswerExpression(job.accept.expression, columns).columns

    def _columns_used(self, prompts: PromptSource) -> list[str]:
        """Return the columns that requests, the filter and the check of answers read."""
        used = {*prompts.columns, *self._sampling_columns.values(), *self._expression_columns}
        used |= {value.column for value in self._row_fields.values()}
        if self._media is not None:
            used |= {*self._media.columns}
        if self.predicate is not None:
            used |= {*self.predicate.columns}
        return sorted(used)

    def carried(self, batch: RowBatch) -> pa.RecordBatch:
        """Return the columns of a batch that are copied into the results, with their names in the results."""
        return batch.data.select(self._carried).rename_columns(self._carried_names)

    def render(
        self,
        batch: RowBatch,
        is_stopped: Callable[[], object] = lambda: False,
        digests: list[bytes | None] | None = None,
    ) -> list[Request | Outcome]:
        """Return a request for each row of a batch, or an Outcome if the row cannot be rendered.

        `is_stopped` is called before each row. If it returns true, the remaining rows are left out; it may
        raise instead. `digests` is a list with one element for each row. Each request keeps a reference to
        the list, so that the request's digest can be stored there later.
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
        """Return the request of a row; raise RowRefusedError if there is none.

        A text as `row` is the reason why the row cannot be read.
        """
        if isinstance(row, str):
            raise RowRefusedError(row)
        if self.predicate is not None:
            # Only rows on which the filter is true or fails get here. If it fails, it raises its error again.
            self.predicate(row)
        media: tuple[PromptFile, ...] = ()
        if self._media is None:
            prompt = self._prompt_of(row)
        else:
            prompt, media = self._media.prompt(ref.row, row)
        sampling = self._sampling
        if isinstance(prompt, RequestBody):
            # The prompt is a whole request body with its own sampling parameters. Outside of the body, only
            # the limit of output tokens is needed.
            sampling = {"max_new_tokens": prompt.most_tokens}
            if prompt.most_thinking is not None:
                sampling[THINKING] = prompt.most_thinking
        if self._sampling_columns:
            sampling = {**sampling, **self._sampling_of(row)}
        if self._last_fields is not None:
            # `_make` is faster than keyword arguments. Most jobs render all their rows here.
            return Request._make((ref, self._request_kind, prompt, sampling, *self._last_fields))
        row_fields = {name: field.of(row[field.column]) for name, field in self._row_fields.items()}
        if self._expression_columns:
            row_fields["row"] = {name: row[name] for name in self._expression_columns}
        return Request(
            ref=ref,
            kind=self._request_kind,
            prompt=prompt,
            sampling=sampling,
            media=media,
            **self._shared_fields,
            **row_fields,
        )

    def _sampling_of(self, row: Row) -> dict[str, Any]:
        """Return the sampling parameters that come from columns of the row.

        A null means the default. So does an empty text, which CSV has in place of a null.
        """
        values = {name: row[column] for name, column in self._sampling_columns.items()}
        return {
            name: _parameter_in(name, value)
            for name, value in values.items()
            if value is not None and value != ""
        }


def _parameter_in(name: str, value: Any) -> Any:
    """Convert a column's value to a sampling parameter; raise RowRefusedError if it is unusable."""
    if not isinstance(value, float):
        return value
    is_integer_parameter = name in _INTEGER_PARAMETERS
    fits_into_64_bits = abs(value) < 1 << 63
    if is_integer_parameter and value.is_integer() and fits_into_64_bits:
        # pandas converts integer columns with nulls to floats.
        return int(value)
    if is_integer_parameter or not math.isfinite(value):
        raise RowRefusedError(f"sampling.{name}: {value} is not a valid value")
    return value


class PromptSource(NamedTuple):
    """Function that makes the prompts of rows, with the columns that it reads."""

    kind: PromptKind | None
    """Kind of all prompts; None if it may differ between rows."""
    prompt_of: Callable[[Row], Any]
    columns: Sequence[str]
    printed: frozenset[str] = frozenset()
    """Columns whose values a template prints into the prompt."""


def _carried_schema(source: InputSpec, dataset: ColumnSource, used: Sequence[str]) -> pa.Schema:
    """Return the schema of the columns that are copied into the results, with their names in the results.

    Raises InputError if one of these columns, or one in `used`, is missing or unusable.
    """
    fields, faults = [], Faults()
    for name in used:
        with faults.collect():
            dataset.field(name, where="prompt")
    for name, carried_name in zip(source.columns, source.carried_names, strict=True):
        with faults.collect():
            fields.append(dataset.field(name, where="input.columns").with_name(carried_name))
    faults.raise_all()
    return pa.schema(fields)


def _prompt_source(prompt: PromptSpec, dataset: ColumnSource, functions: HookPool | None) -> PromptSource:
    """Return the function that makes a job's prompts.

    Raises JobError or InputError for a bad template or column.
    """
    if prompt.rollout and functions:
        from batchrunner.input.python_prompts import columns_given  # noqa: PLC0415 - few jobs have one

        names = columns_given(functions.facts[ROLLOUT], dataset)
        # The function of a multi-turn rollout gets the whole row instead of messages.
        return PromptSource(
            kind=None, prompt_of=lambda row: [{name: row[name] for name in names}], columns=names
        )
    if isinstance(prompt.messages, str):
        column = prompt.messages
        expected = "lists of {role, content} or {from, value}, or JSON texts of such lists"
        _check_type(dataset, column, where="prompt.messages", fits=holds_messages, expected=expected)
        messages_of = partial(messages_in, column, continues=prompt.continues)
        return PromptSource(kind="messages", prompt_of=messages_of, columns=[column])
    if prompt.is_batch:
        return PromptSource(kind="body", prompt_of=request_of, columns=[URL, BODY])
    if prompt.input_ids is not None:
        column = prompt.input_ids
        _check_type(dataset, column, where="prompt.input_ids", fits=is_ids, expected="lists of integers")
        return PromptSource(kind="input_ids", prompt_of=partial(_prompt_in, column), columns=[column])
    if prompt.text is not None and not prompt.fields and not is_template(prompt.text):
        column = prompt.text
        _check_type(dataset, column, where="prompt.text", fits=is_text, expected="texts")
        return PromptSource(kind="text", prompt_of=partial(_prompt_in, column), columns=[column])
    return _from_templates(prompt, dataset)


def _prompt_in(column: str, row: Row) -> Any:
    """Return the prompt in a column; raise RowRefusedError if the value is null or empty."""
    value = row[column]
    if value is None:
        raise RowRefusedError(f"prompt: column {column!r} is null")
    if not value:
        raise RowRefusedError(f"prompt: column {column!r} is empty")
    return value


class _MessageSource(NamedTuple):
    """Jinja2 source of a message or of a whole prompt."""

    field: str
    """Key in the job's section `prompt` that has the source, such as `template`."""
    role: str
    source: str


def _message_sources(prompt: PromptSpec) -> list[_MessageSource]:
    if isinstance(prompt.messages, list):
        return [
            _MessageSource(field=f"messages.{index}.content", role=message.role, source=message.content)
            for index, message in enumerate(prompt.messages)
        ]
    sources = {role: getattr(prompt, role) for role in ("system", "user", "text")}
    return [
        _MessageSource(field=role, role=role, source=source)
        for role, source in sources.items()
        if source is not None
    ]


def _from_templates(prompt: PromptSpec, dataset: ColumnSource) -> PromptSource:
    """Compile the templates of a job's messages or whole prompt; one error names all faults."""
    sources = _message_sources(prompt)
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
        # The user may have written {column} instead of {{ column }}.
        _refuse_single_braces(str(sources), dataset)
    kind: PromptKind = "messages" if prompt.text is None else "text"
    prompt_of: Callable[[Row], Any] = partial(_messages, templates)
    if prompt.text is not None:
        # A prompt that is one text has a single template.
        ((_, text_template),) = templates
        prompt_of = text_template.render
    if prompt.fields:
        fields = prompt.fields.columns
        _check_fields(fields, dataset, columns)
        prompt_of = partial(with_fields, prompt_of, fields)
        # Templates do not name the columns in `prompt.fields`. They read all of them by the variable FIELDS.
        columns = columns - {FIELDS} | {*fields}
    printed = frozenset(name for _, template in templates for name in template.printed)
    return PromptSource(kind=kind, prompt_of=prompt_of, columns=sorted(columns), printed=printed)


def _refuse_single_braces(templates: str, dataset: ColumnSource) -> None:
    """Raise JobError if templates use no column but have a column's name in single braces, such as `{text}`.

    Otherwise all rows would have the same prompt.
    """
    for name in dataset.schema.names:
        if f"{{{name}}}" in templates:
            expression = f"{{{{ {template_of_column(name)} }}}}"
            raise JobError(f"prompt: {{{name}}} does not insert the column", hint=f"write {expression}")


def _check_fields(fields: list[str], dataset: ColumnSource, template_columns: set[str]) -> None:
    """Raise JobError or InputError if a template cannot print the columns in `prompt.fields`.

    `template_columns` are the variables that templates use. FIELDS is among them for `{{ fields }}`.
    """
    if FIELDS in dataset.schema.names:
        raise JobError(
            f"prompt.fields: the input has a column {FIELDS!r}, a name that templates use for prompt.fields",
            hint="rename that column in the input",
        )
    if FIELDS not in template_columns:
        raise JobError(
            "prompt.fields: no template uses {{ fields }}", hint="write {{ fields }} in the template"
        )
    for name in fields:
        _refuse_bytes(dataset, name, "prompt.fields")


def _messages(templates: Sequence[tuple[str, Template]], row: Row) -> list[dict[str, Any]]:
    return [{"role": role, "content": template.render(row)} for role, template in templates]


def _refuse_bytes(dataset: ColumnSource, name: str, where: str) -> None:
    """Raise InputError if a column holds bytes, which a template would print as "b'…'"."""
    kind = dataset.field(name, where=where).type
    if holds_bytes(kind):
        raise InputError(
            f"{where}: column {name!r} holds bytes ({kind}), not text",
            hint=f"write {{{{ {template_of_column(name)}.decode() }}}} if it is text in UTF-8",
        )


def _check_type(
    dataset: ColumnSource, name: str, *, where: str, fits: Callable[[pa.DataType], bool], expected: str
) -> None:
    """Raise InputError if a column is missing or has a wrong type; `expected` names the right types.

    A column with only nulls or empty lists passes, because its values are checked row by row.
    """
    kind = dataset.field(name, where=where).type
    item_kind = kind.value_type if is_list(kind) else kind
    if not (pt.is_null(item_kind) or fits(kind)):
        raise InputError(
            f"{where}: column {name!r} must hold {expected} (got {type_name(kind)})",
            hint="give the column of a CSV file a type in input.types" if is_text(kind) else None,
        )


class ByColumn(NamedTuple):
    """Request field whose value comes from a column."""

    column: str
    of: Callable[[Any], Any]
    """Converts the column's value into the field's value; may raise RowRefusedError."""


def _other_fields(job: Job, dataset: ColumnSource) -> dict[str, Any]:
    """Return the values of the request fields for LoRA adapter, tools and items.

    A field has one value for all rows, or is a ByColumn. One InputError names all faults.
    """
    # Each value is made by a function, so that one error does not hide the others.
    value_makers: dict[str, Callable[[], Any]] = {
        "lora_path": lambda: _lora_path(job.sampling),
        "tools": lambda: _tools(job.prompt, job.sampling, dataset),
        "items": lambda: _items(job.prompt, dataset),
    }
    fields, faults = {}, Faults()
    for field, make_value in value_makers.items():
        with faults.collect():
            fields[field] = make_value()
    faults.raise_all()
    return fields


def _lora_path(sampling: SamplingSpec) -> ByColumn | str | None:
    lora = sampling.lora_path
    if isinstance(lora, FromColumn):
        # An empty text means no adapter, like a null.
        return ByColumn(lora.column, lambda value: value or None)
    return lora


def _tools(prompt: PromptSpec, sampling: SamplingSpec, dataset: ColumnSource) -> ByColumn | Tools | None:
    """Return the tools of a chat, or the column that has the tools of each row."""
    choice = sampling.tool_choice
    if isinstance(prompt.tools, str):
        expected = "lists of tools, or JSON texts of such lists"
        _check_type(
            dataset,
            prompt.tools,
            where="prompt.tools",
            fits=lambda kind: is_text(kind) or is_list(kind),
            expected=expected,
        )
        return ByColumn(prompt.tools, partial(tools_in, prompt.tools, choice))
    # A `tool_choice` without tools is passed on to the server.
    has_tools = prompt.tools is not None or choice is not None
    return Tools(prompt.tools, choice) if has_tools else None


def _items(prompt: PromptSpec, dataset: ColumnSource) -> ByColumn | tuple[str, ...]:
    """Return the choices or documents for all prompts, or the column that has those of each row."""
    field = "choices" if prompt.documents is None else "documents"
    value = getattr(prompt, field) or ()
    if not isinstance(value, str):
        return tuple(value)
    expected = "texts or lists of texts"
    _check_type(dataset, value, where=f"prompt.{field}", fits=_is_text_or_texts, expected=expected)
    return ByColumn(value, partial(_items_in, f"prompt.{field}: column {value!r}"))


def _items_in(label: str, value: str | list[Any] | None) -> tuple[str, ...]:
    """Return the choices or documents in a column's value.

    Raises RowRefusedError, which names the column `label`, if one is missing.
    """
    items = (value,) if isinstance(value, str) else tuple(value or ())
    if not items or not all(items):
        raise RowRefusedError(f"{label} is null or empty, or has a null or empty item")
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
"""Required type of the column of a sampling parameter.

Each entry is a test of the type, and the type's name in messages. The columns of all other parameters must
hold numbers.
"""


def _repetition_to_stop(job: Job, answers: AnswerPlan) -> RepeatedText | None:
    """Return the text whose endless repetition ends an answer of a job; None if every answer goes on."""
    if answers.on_repetition == "keep":
        return None
    if answers.on_repetition != "auto":
        return "any"
    most_tokens = job.sampling.max_new_tokens
    # `on_length: longer` raises the limit of a row.
    has_room = isinstance(most_tokens, FromColumn) or most_tokens >= LEAST_ROOM or job.on_length == "longer"
    needs_whole_answer = answers.asks is not None and answers.asks.of_tokens
    # The function of a rollout trains on the answers, or judges them. It decides itself what to discard.
    is_rollout = job.prompt.rollout is not None
    return "prose" if has_room and not needs_whole_answer and not is_rollout else None


def _split_sampling(sampling: SamplingSpec, dataset: ColumnSource) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the sampling parameters that all rows share, and the column of each other parameter.

    Raises InputError if a column is missing or has a wrong type.
    """
    shared: dict[str, Any] = {}
    columns: dict[str, str] = {}
    faults = Faults()
    for name, field in type(sampling).model_fields.items():
        value = getattr(sampling, name)
        if isinstance(value, FromColumn):
            fits, expected = _COLUMN_TYPES.get(name, (_is_number, "numbers"))
            with faults.collect():
                _check_type(dataset, value.column, where=f"sampling.{name}", fits=fits, expected=expected)
        if name in {"lora_path", "tool_choice"}:
            # These fields of the job are not sampling parameters; `_other_fields` returns their values. Only
            # their columns are checked here.
            continue
        if isinstance(value, FromColumn):
            columns[name] = value.column
            # A row with a null in the column gets the default.
            value = field.default
        if value is not None:
            shared[name] = value
    faults.raise_all()
    if isinstance(shared.get("json_schema"), dict):
        # SGLang expects the schema as text.
        shared["json_schema"] = orjson.dumps(shared["json_schema"]).decode()
    if shared["n"] == 1:  # SGLang's own default
        del shared["n"]
    return shared, columns
