"""Converts results of rows to Arrow tables with the columns of a part file (a Parquet file of results)."""

import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import msgspec
import pyarrow as pa

from batchrunner.core.types import LEFT_OUT, ColumnKind, Completion, Outcome, RowRef
from batchrunner.job.answers import AnswerPlan
from batchrunner.job.arrow_types import (
    arrow_type,
    common_kind,
    fit,
    innermost,
    kind_of_schema,
    kinds_of_value,
)
from batchrunner.job.output import (
    MADE_ROWS,
    OF_TEXTS,
    PARSED,
    REQUEST_DIGEST,
    RESPONSE,
    RESULT_COLUMNS,
    RETURNED,
)
from batchrunner.output.arrow_arrays import arrow_array

log = logging.getLogger(__name__)

NO_ANSWER = Completion(
    texts=[None],  # type: ignore[list-item]
    finish_reasons=[None],
    completion_tokens=[None],
    prompt_tokens=None,
    cached_tokens=None,
)
"""Stands for the completion of a row without an answer."""
_TOKEN = pa.struct([("id", pa.int32()), ("token", pa.string()), ("logprob", pa.float32())])
_FUNCTION = pa.struct([("name", pa.string()), ("arguments", pa.string())])
ANSWER_TYPES: dict[str, pa.DataType] = {
    "reasoning": pa.string(),
    "tool_calls": pa.list_(pa.struct([("id", pa.string()), ("type", pa.string()), ("function", _FUNCTION)])),
    "output_ids": pa.list_(pa.int32()),
    "logprobs": pa.list_(_TOKEN),
    "top_logprobs": pa.list_(pa.list_(_TOKEN)),
    "prompt_logprobs": pa.list_(_TOKEN),
    "matched_stop": pa.string(),
    "parsed": pa.string(),
    RESPONSE: pa.string(),
    "rollout": pa.int32(),
    "turns": pa.int32(),
    "conversation": pa.string(),
    RETURNED: pa.string(),
}
"""Arrow types of the optional result columns, for a row with a single completion."""
TASK = "task"
"""Metadata key in a part file of a job whose task generates no text, such as embedding.

Such a file lacks the text columns (OF_TEXTS), so an input column that is copied into the results may be
called `output`.
"""
OF_THE_PROMPT = {"prompt_logprobs"}
"""Columns of ANSWER_TYPES about the prompt. They have one value for all completions of a row."""


def schema_of_run(carried: pa.Schema, plan: AnswerPlan) -> pa.Schema:
    """Return the schema of this attempt's part files.

    The columns are `row`, the `carried` input columns, and the other result columns. If rows have several
    completions, a column about completions is a list with a value for each. A task without decoding has no
    text columns.
    """

    def per_completion(kind: pa.DataType) -> pa.DataType:
        return kind if plan.samples == 1 else pa.list_(kind)

    types: dict[str, pa.DataType] = {
        "row": pa.int64(),
        "output": per_completion(pa.string()),
        "finish_reason": per_completion(pa.string()),
        "prompt_tokens": pa.int32(),
        "cached_tokens": pa.int32(),
        "completion_tokens": per_completion(pa.int32()),
        "latency_s": pa.float64(),
        "attempts": pa.int32(),
        "error": pa.string(),
    }
    # The copied input columns come between `row` and the other result columns.
    row, *results = (name for name in RESULT_COLUMNS if plan.task is None or name not in OF_TEXTS)
    fields = [
        pa.field(row, types[row], nullable=False),
        *carried,
        *(pa.field(name, types[name]) for name in results),
    ]
    for name in plan.columns:
        kind = ANSWER_TYPES[name]
        if name == PARSED and plan.schema is not None:
            kind = arrow_type(kind_of_schema(plan.schema))
        fields.append(pa.field(name, kind if name in OF_THE_PROMPT else per_completion(kind)))
    fields += [pa.field(name, per_completion(arrow_type(kind))) for name, kind in plan.parsed]
    return pa.schema(fields, metadata={} if plan.task is None else {TASK: plan.task.name})


def has_texts(schema: pa.Schema) -> bool:
    """Tell whether a part file with this schema has the text columns (OF_TEXTS)."""
    return TASK.encode() not in (schema.metadata or {})


def rows_made(outcome: Outcome) -> list[Outcome]:
    """Return an outcome for each result row that a rollout function returned.

    If the function returned no rows, the result is `outcome` itself, in a list.
    """
    completion = outcome.completion
    values_of_rows = completion.columns.get(MADE_ROWS) if completion is not None else None
    if completion is None or not values_of_rows:
        return [outcome]
    rows = []
    for number, values in enumerate(values_of_rows):
        columns = {
            **completion.columns,
            RETURNED: [msgspec.json.encode(values).decode()],
            "rollout": [number],
            # The function's values come last, and so replace columns of the same names.
            **{name: [value] for name, value in values.items()},
        }
        rows.append(outcome._replace(completion=completion._replace(columns=columns)))
    return rows


def table_of(outcomes: Sequence[Outcome], schema: pa.Schema, plan: AnswerPlan) -> pa.Table:
    """Convert outcomes, in their order, to a table with the schema of a part file."""
    if plan.asked is not None:  # The job has multi-turn rollouts, each of which may return several rows.
        outcomes = [*chain.from_iterable(map(rows_made, outcomes))]
    is_single = plan.samples == 1
    # All outcomes are transposed at once: reading each field of each outcome takes four times as long.
    refs, completions, errors, latencies, attempts = zip(*outcomes, strict=True)
    answers = [NO_ANSWER if completion is None else completion for completion in completions]
    texts, reasons, output_tokens, prompt_tokens, cached_tokens, *_ = zip(*answers, strict=True)

    def of_completions(values: Sequence[Any]) -> list[Any]:
        if is_single:
            return [value[0] for value in values]
        # A row without an answer gets null instead of the values of NO_ANSWER.
        return [value if completion else None for value, completion in zip(values, completions, strict=True)]

    values: dict[str, Sequence[Any]] = {
        "row": [ref.row for ref in refs],
        "prompt_tokens": prompt_tokens,
        "cached_tokens": cached_tokens,
        "latency_s": latencies,
        "attempts": attempts,
        "error": errors,
    }
    if has_texts(schema):
        values["output"] = of_completions(texts)
        values["finish_reason"] = of_completions(reasons)
        values["completion_tokens"] = of_completions(output_tokens)
        # A row that `prompt.python` left out has no answer, but gets the finish reason LEFT_OUT.
        if None in values["finish_reason"]:
            left_out = LEFT_OUT if is_single else [LEFT_OUT] * plan.samples
            values["finish_reason"] = [
                left_out if outcome.is_left_out else reason
                for outcome, reason in zip(outcomes, values["finish_reason"], strict=True)
            ]
    if REQUEST_DIGEST in schema.names:
        values[REQUEST_DIGEST] = [ref.digests and ref.digests[ref.position] for ref in refs]
    for name in plan.names:
        # Each answer has a list with a value for each completion, or None if it lacks this column.
        lists = [answer.columns.get(name) for answer in answers]
        if is_single or name in OF_THE_PROMPT:
            values[name] = [None if items is None else items[0] for items in lists]
        else:
            values[name] = lists
    # All other columns of the schema are copied from the input.
    copies_columns = bool({*schema.names} - values.keys())
    carried = _carried(refs) if copies_columns else pa.table({})
    arrays = [
        arrow_array(values[field.name], field.type) if field.name in values else carried.column(field.name)
        for field in schema
    ]
    return pa.Table.from_arrays(arrays, schema=schema)


def kinds_returned(tables: Iterable[pa.Table]) -> dict[str, ColumnKind]:
    """Infer the names and types of result columns from all values that a rollout function returned.

    This is needed if the function does not declare its columns by annotations. Objects, such as chat
    messages, become structs. A column becomes JSON if its values have several types, or if a property of its
    objects has. Texts in such a column have quotes, so a warning is logged.
    """
    columns: dict[str, ColumnKind] = {}
    columns_with_texts: set[str] = set()
    for table in tables:
        for row in _returned(table):
            for name, value in row.items():
                kinds = kinds_of_value(value)
                # A new column starts with the kind "null", which any other kind replaces.
                columns[name] = common_kind([columns.get(name, "null"), *kinds])
                if "string" in map(innermost, kinds):
                    columns_with_texts.add(name)
    for name, kind in columns.items():
        if innermost(kind) == "json" and name in columns_with_texts:
            log.warning(
                "column %r of the rollouts' results mixes text with other types: every value is written as "
                "JSON, with text in quotes. To get one type, annotate the return type of the function",
                name,
            )
    return columns


def with_returned(table: pa.Table, kinds: Mapping[str, ColumnKind]) -> pa.Table:
    """Return a table in which the JSON column RETURNED is replaced by a column for each of its keys.

    `kinds` has the names and types of the new columns. They replace input columns of the same names.
    """
    rows = _returned(table)
    table = table.drop_columns([*{RETURNED, *kinds}.intersection(table.column_names)])
    for name, kind in kinds.items():
        values = [fit(row.get(name), kind) for row in rows]
        table = table.append_column(name, arrow_array(values, arrow_type(kind)))
    return table


def _returned(table: pa.Table) -> list[dict[str, Any]]:
    """Return the values that the rollout function returned for each row of a table, by column name."""
    return [msgspec.json.decode(text or "{}") for text in table.column(RETURNED).to_pylist()]


def _carried(refs: Sequence[RowRef]) -> pa.Table:
    """Return the input columns that are copied into the results of these rows, in the order of `refs`.

    All rows of a batch are taken in one call, which is much faster than one call per row. A final `take`
    restores the order.
    """
    batches: dict[int, pa.RecordBatch] = {}
    positions_in_batch: defaultdict[int, list[int]] = defaultdict(list)
    indices_of_refs: defaultdict[int, list[int]] = defaultdict(list)
    for index, ref in enumerate(refs):
        key = id(ref.carried)
        batches[key] = ref.carried
        positions_in_batch[key].append(ref.position)
        indices_of_refs[key].append(index)
    grouped = pa.Table.from_batches(
        [batch.take(arrow_array(positions_in_batch[key], pa.int64())) for key, batch in batches.items()]
    )
    grouped_position = [0] * len(refs)
    for position, index in enumerate(chain.from_iterable(indices_of_refs.values())):
        grouped_position[index] = position
    return grouped.take(arrow_array(grouped_position, pa.int64()))
