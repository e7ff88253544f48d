"""Renders rows into requests: fills in templates, takes prompts and sampling parameters from columns."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import orjson
import pyarrow as pa
import pyarrow.types as pt

from batchrunner.core.errors import InputError, RowRefusedError
from batchrunner.core.media import PromptFile
from batchrunner.core.types import (
    AskedColumns,
    ForwardTask,
    Outcome,
    PromptKind,
    Request,
    RequestBody,
    RowRef,
)
from batchrunner.input.columns_read import written
from batchrunner.input.dataset import ColumnSource, Row, RowBatch, UnreadableValue, rows_of
from batchrunner.input.fields_block import FieldsBlock, names_made, not_shown, with_block
from batchrunner.input.items import ItemSource
from batchrunner.input.messages import WANTED as MESSAGES_WANTED
from batchrunner.input.messages import MessagesColumn, MessageTemplates, from_list, holds_messages
from batchrunner.input.prompt_types import holds_bytes, is_bytes, is_ids, is_list, is_text
from batchrunner.input.request_bodies import RequestBodies
from batchrunner.input.row_tools import RowTools
from batchrunner.input.templates import AnswerExpression, Predicate, Template, is_template
from batchrunner.job.prompt import PromptSpec
from batchrunner.job.sampling import GRAMMARS, FromColumn, SamplingSpec
from batchrunner.job.spec import InputSpec

if TYPE_CHECKING:
    from batchrunner.core.hook_pool import HookPool
    from batchrunner.input.python_prompts import PythonPrompts


_WHOLE = {"max_new_tokens", "min_new_tokens", "top_k", "sampling_seed"}
_NUMBERS = {
    *_WHOLE, "temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty",
}  # fmt: skip
"""Names of sampling parameters by the type of their values."""


class Renderer:
    """Renders the rows of a job: `columns` are the input columns that it reads, `kind` is its prompt kind.

    The kind is None where a Python function makes prompts, which may be of any kind.
    """

    def __init__(
        self,
        dataset: ColumnSource,
        source: InputSpec,
        prompt: PromptSpec,
        sampling: SamplingSpec,
        *,
        asks: AskedColumns | None = None,
        functions: HookPool | None = None,
        expression: str | None = None,
        task: ForwardTask | None = None,
        first_temperature: float | None = None,
    ) -> None:
        """Compile the templates and check the columns.

        `asks` is what its answer is asked for besides the text; `functions` are the job's Python functions,
        for a job with `prompt.python`; `expression` is the condition of good answers, whose columns go along
        with each request; `task` is one without decoding, whose requests have no sampling parameters;
        `first_temperature` is that of rows to which `sampling` gives none. Raises JobError for a bad
        template, InputError for a missing column or one of a wrong type.
        """
        self._python: PythonPrompts | None = None
        if prompt.python and functions:
            from batchrunner.input.python_prompts import PythonPrompts  # noqa: PLC0415 - only for such prompts

            self._python = PythonPrompts(functions, dataset)
        made = _prompt_source(prompt, dataset, self._python)
        self.kind, self._prompt_of, used = made.kind, made.prompt_of, made.columns
        self._media: MediaPrompts | None = None
        if prompt.has_media:
            from batchrunner.input.media.prompts import MediaPrompts  # noqa: PLC0415 - only where there are files

            self._media = MediaPrompts(prompt, dataset, made.prompt_of, made.printed)
            used = [*used, *self._media.columns]
        self._request_kind: PromptKind = self.kind or "messages"  # until the prompt is filled in
        self._chat_template_kwargs = prompt.chat_template_kwargs
        self._continues = prompt.continues
        has_tools = prompt.tools is not None or sampling.tool_choice is not None
        self._tools = RowTools(prompt, sampling, dataset) if has_tools else None
        self._asks = asks
        self.predicate = None
        self._fixed, self._per_row, self._lora = _split_sampling(sampling, dataset, first_temperature)
        self._task = task
        if task is not None:
            self._fixed, self._per_row = {}, {}
        self._items = ItemSource(prompt, dataset)
        names = {*used, *self._per_row.values(), *(self._tools.columns if self._tools else ())}
        names |= {*self._items.columns}
        if isinstance(self._lora, FromColumn):
            names.add(self._lora.column)
        if source.filter is not None:
            self.predicate = Predicate(source.filter, where="input.filter", available=dataset.schema.names)
            names |= set(self.predicate.columns)
        self._for_check = AnswerExpression(expression, dataset.schema.names).columns if expression else []
        names |= {*self._for_check}
        self._used = sorted(names)
        self._carried = list(source.columns)
        self._carried_names = source.carried_names
        self._problems = dataset.problems
        per_row = (self._tools, self._media, self._for_check, self._items.columns)
        is_same = not (any(per_row) or isinstance(self._lora, FromColumn))
        self._same = self._rest({}) if is_same else None  # for all rows: made once, not for each
        self.columns = sorted({*self._used, *self._carried, *self._problems})
        for name in self._used:
            dataset.field(name, where="prompt")
        self.carried_schema = pa.schema(
            [
                dataset.field(name, where="input.columns").with_name(new)
                for name, new in zip(self._carried, self._carried_names, strict=True)
            ]
        )

    def render(
        self, batch: RowBatch, is_stopped: Callable[[], object] = lambda: False
    ) -> list[Request | Outcome]:
        """Return a request for each row of a batch, in order, or an Outcome where it cannot be rendered.

        Once `is_stopped`, which may raise, returns true, the rest of the batch is left out.
        """
        carried = batch.data.select(self._carried).rename_columns(self._carried_names)
        items: list[Request | Outcome] = []
        used = [*self._used, *self._problems]
        for position, (row, values) in enumerate(zip(batch.rows, rows_of(batch, used), strict=True)):
            if is_stopped():
                break
            ref = RowRef(row, carried, position)
            try:
                items.append(self._request(ref, values))
            except RowRefusedError as failure:
                items.append(Outcome(ref, None, str(failure), None, 0))
        return items if self._python is None else self._python.fill(items, is_stopped)

    def _request(self, ref: RowRef, row: Row) -> Request:
        for name in self._problems:
            if problem := row.pop(name):
                raise RowRefusedError(problem)
        for value in row.values():
            if type(value) is UnreadableValue:
                raise RowRefusedError(value.reason)
        if self.predicate is not None:
            self.predicate(row)  # raises the error of a row on which the filter fails: such rows are selected
        media: tuple[PromptFile, ...] = ()
        if self._media is None:
            prompt = self._prompt_of(row)
        else:
            prompt, media = self._media.prompt(ref.row, row)
        sampling = self._fixed
        if isinstance(prompt, RequestBody):
            sampling = {"max_new_tokens": prompt.most_tokens}
        if self._per_row:
            own = {name: row[column] for name, column in self._per_row.items() if row[column] is not None}
            sampling = {**sampling, **{name: _sendable(name, value) for name, value in own.items()}}
        rest = self._rest(row, media) if self._same is None else self._same
        return Request(ref, self._request_kind, prompt, sampling, *rest)

    def _rest(self, row: Row, media: tuple[PromptFile, ...] = ()) -> tuple[Any, ...]:
        """Return the fields of a request after its sampling, in order."""
        lora = row[self._lora.column] if isinstance(self._lora, FromColumn) else self._lora
        for_check = {name: row[name] for name in self._for_check} if self._for_check else None
        tools = None if self._tools is None else self._tools.of(row)
        return (
            *(lora, self._chat_template_kwargs, None, self._continues, self._asks, for_check),
            *(self._task, tools, media, self._items.of(row)),
        )


def _sendable(name: str, value: Any) -> Any:
    """Return a value from a column as it is sent; raises RowRefusedError for an unusable number."""
    if not isinstance(value, float):
        return value
    if not math.isfinite(value) or (name in _WHOLE and abs(value) >= 1 << 63):  # JSON cannot express it
        raise RowRefusedError(f"sampling.{name}: {value} is not a number that can be sent")
    if name not in _WHOLE:
        return value
    if not value.is_integer():
        raise RowRefusedError(f"sampling.{name}: {value} is not a whole number")
    return int(value)  # pandas turns a column of whole numbers with a null into floats


class PromptSource(NamedTuple):
    """Where prompts come from."""

    kind: PromptKind | None
    prompt_of: Callable[[Row], Any]
    """Makes the prompt of a row."""
    columns: list[str]
    """Columns that it reads."""
    printed: frozenset[str] = frozenset()
    """Columns of them that a template shows as they are."""


def _prompt_source(prompt: PromptSpec, dataset: ColumnSource, python: PythonPrompts | None) -> PromptSource:
    if python is not None:
        return PromptSource(None, dict, python.columns)  # the row stands for its prompt until it is filled in
    block = FieldsBlock(prompt.fields, dataset) if prompt.fields else None
    available = [*dataset.schema.names, *names_made(block)]
    if prompt.user is not None or isinstance(prompt.messages, list):
        templates = MessageTemplates(_templates_of(prompt), available)
        for where, each in templates.templates.items():
            _refuse_bytes(each, dataset, where, [*prompt.media_columns, *names_made(block)])
        printed = frozenset(name for each in templates.templates.values() for name in each.printed)
        make, columns = with_block(block, templates.prompt, templates.columns)
        return PromptSource("messages", make, columns, printed)
    if prompt.messages is not None:
        found = dataset.field(prompt.messages, where="prompt.messages").type
        if not holds_messages(found):
            raise InputError(
                f"prompt.messages: column {prompt.messages!r} must be {MESSAGES_WANTED} (got {found})"
            )
        talk = MessagesColumn(prompt.messages, continues=prompt.continues)
        return PromptSource("messages", talk.prompt, talk.columns)
    if prompt.batch is not None:
        requests = RequestBodies()
        return PromptSource("body", requests.prompt, list(requests.columns))
    if prompt.text is not None and is_template(prompt.text):
        template = Template(prompt.text, where="prompt.text", available=available)
        _refuse_bytes(template, dataset, "prompt.text", [*prompt.media_columns, *names_made(block)])
        make, columns = with_block(block, template.render, template.columns)
        return PromptSource("text", make, columns, frozenset(template.printed))
    if block is not None:
        raise not_shown("text")
    return _prompt_column(prompt, dataset)


def _prompt_column(prompt: PromptSpec, dataset: ColumnSource) -> PromptSource:
    """Return what takes the prompts from a column as they stand."""
    for kind, fits, wanted in _PROMPT_TYPES:
        column = getattr(prompt, kind)
        if column is not None:
            stored = dataset.field(column, where=f"prompt.{kind}").type
            if not fits(stored):
                raise InputError(f"prompt.{kind}: column {column!r} must be {wanted} (got {stored})")
            return PromptSource(kind, partial(_prompt_in, column), [column])
    raise AssertionError("a job has a prompt")


def _refuse_bytes(template: Template, dataset: ColumnSource, where: str, files: Collection[str]) -> None:
    """Raise InputError where a template prints a column of bytes, which would read "b'…'" in the prompt.

    A column of `files` stands for these; so may other names that are left out.
    """
    for name in template.printed:
        if name in files:
            continue
        kind = dataset.field(name, where=where).type
        if holds_bytes(kind):
            text = written(name, in_template=True).strip("'")
            hint = f"write {{{{ {text}.decode() }}}} if it is text in UTF-8"
            raise InputError(
                f"{where}: column {name!r} holds bytes ({kind}), which are no text",
                hint=hint if is_bytes(kind) else None,
            )


def _prompt_in(column: str, row: Row) -> Any:
    value = row[column]
    if value is None:
        raise RowRefusedError(f"prompt: column {column!r} is null")
    if not value:
        raise RowRefusedError(f"prompt: column {column!r} is empty")
    return value


def _templates_of(prompt: PromptSpec) -> list[tuple[str, str, str]]:
    """Return the place in the job, the role and the template of each message."""
    if isinstance(prompt.messages, list):
        return from_list(prompt.messages)
    given = (("prompt.system", "system", prompt.system), ("prompt.user", "user", prompt.user))
    return [(where, role, template) for where, role, template in given if template is not None]


_PROMPT_TYPES: tuple[tuple[PromptKind, Callable[[pa.DataType], bool], str], ...] = (
    ("text", is_text, "a string"),
    ("input_ids", is_ids, "a list of integers"),
)


def _check_value(name: str, field: pa.Field[Any]) -> None:
    """Raise InputError for a column whose type does not fit this sampling parameter."""
    for is_kind, names, wanted in _COLUMN_TYPES:
        if name in names and not is_kind(field.type):
            hint = "a column of CSV gets a type in input.types" if is_text(field.type) else None
            raise InputError(
                f"sampling.{name}: column {field.name!r} must hold {wanted} (got {field.type})", hint=hint
            )


def _is_number(kind: pa.DataType) -> bool:
    return bool(pt.is_integer(kind) or pt.is_floating(kind))


_COLUMN_TYPES: tuple[tuple[Callable[[pa.DataType], bool], set[str], str], ...] = (
    (_is_number, _NUMBERS, "numbers"),
    (is_text, {*GRAMMARS, "lora_path"}, "texts"),
    (
        lambda kind: is_text(kind) or (is_list(kind) and is_text(kind.value_type)),
        {"stop", "stop_regex"},
        "texts or lists of texts",
    ),
    (is_ids, {"stop_token_ids"}, "lists of integers"),
    (pt.is_boolean, {"ignore_eos"}, "booleans"),
)


def _split_sampling(
    sampling: SamplingSpec, dataset: ColumnSource, first_temperature: float | None
) -> tuple[dict[str, Any], dict[str, str], str | FromColumn | None]:
    """Return the parameters that all rows share, the column of each other one, and the LoRA adapter."""
    fixed: dict[str, Any] = {}
    per_row: dict[str, str] = {}
    for name, field in type(sampling).model_fields.items():
        value = getattr(sampling, name)
        if isinstance(value, FromColumn):
            _check_value(name, dataset.field(value.column, where=f"sampling.{name}"))
        if name in {"lora_path", "tool_choice"}:  # no parameters of the sampler
            continue
        if isinstance(value, FromColumn):
            per_row[name] = value.column
            value = field.default  # the value for a null
        if name == "temperature" and value is None:
            value = first_temperature
        if value is not None:
            fixed[name] = value
    if isinstance(fixed.get("json_schema"), dict):
        fixed["json_schema"] = orjson.dumps(fixed["json_schema"]).decode()
    if fixed["n"] == 1:
        del fixed["n"]
    return fixed, per_row, sampling.lora_path
