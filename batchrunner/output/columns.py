"""Converts outcomes into Arrow tables with the columns of a part."""

import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import msgspec
import pyarrow as pa

from batchrunner.core.types import LEFT_OUT, ColumnKind, Completion, Outcome, RowRef
from batchrunner.job.answers import AnswerPlan
from batchrunner.job.arrow_types import arrow_type, common_kind, fit, kind_of_schema, kinds_of_value
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

NO_ANSWER = Completion([None], [None], [None], None, None)  # type: ignore[list-item]
"""Stands for the answer of a row without one."""
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
"""Types of the columns that a job can ask for, or that come by themselves, of one output."""
TASK = "task"
"""Key of a part's metadata that names a task without decoding: a carried column may be called `output`."""
OF_THE_PROMPT = {"prompt_logprobs"}
"""Those of ANSWER_TYPES that all outputs of a row have in common."""


def schema_of_run(carried: pa.Schema, plan: AnswerPlan) -> pa.Schema:
    """Return the schema of the parts that this start of a run writes: `row`, carried columns, results.

    With several samples some of all these are lists, with one value for each. A task without decoding has no
    columns of texts.
    """

    def each(kind: pa.DataType) -> pa.DataType:
        return kind if plan.samples == 1 else pa.list_(kind)

    types: dict[str, pa.DataType] = {
        "row": pa.int64(),
        "output": each(pa.string()),
        "finish_reason": each(pa.string()),
        "prompt_tokens": pa.int32(),
        "cached_tokens": pa.int32(),
        "completion_tokens": each(pa.int32()),
        "latency_s": pa.float64(),
        "attempts": pa.int32(),
        "error": pa.string(),
    }
    first, *rest = (name for name in RESULT_COLUMNS if plan.task is None or name not in OF_TEXTS)
    fields = [
        pa.field(first, types[first], nullable=False),
        *carried,
        *(pa.field(name, types[name]) for name in rest),
    ]
    for name in plan.columns:
        kind = ANSWER_TYPES[name]
        if name == PARSED and plan.schema is not None:
            kind = arrow_type(kind_of_schema(plan.schema))
        fields.append(pa.field(name, kind if name in OF_THE_PROMPT else each(kind)))
    fields += [pa.field(name, each(arrow_type(kind))) for name, kind in plan.parsed]
    return pa.schema(fields, metadata={} if plan.task is None else {TASK: plan.task.name})


def has_texts(schema: pa.Schema) -> bool:
    """Tell whether a part has the columns of texts."""
    return TASK.encode() not in (schema.metadata or {})


def rows_made(outcome: Outcome) -> list[Outcome]:
    """Return an outcome for each row that a rollout has made; another outcome alone."""
    completion = outcome.completion
    made = completion.columns.get(MADE_ROWS) if completion is not None else None
    if completion is None or not made:
        return [outcome]
    rows = []
    for number, values in enumerate(made):
        columns = {
            **completion.columns,
            RETURNED: [msgspec.json.encode(values).decode()],
            "rollout": [number],
            **{name: [value] for name, value in values.items()},
        }
        rows.append(outcome._replace(completion=completion._replace(columns=columns)))
    return rows


def table_of(outcomes: Sequence[Outcome], schema: pa.Schema, plan: AnswerPlan) -> pa.Table:
    """Return outcomes as a table of the schema of a part, in the given order."""
    if plan.asked is not None:
        outcomes = [*chain.from_iterable(map(rows_made, outcomes))]
    is_single = plan.samples == 1
    # transposed: to take each value from each row takes four times as long
    refs, completions, errors, latencies, attempts = zip(*outcomes, strict=True)
    answers = [NO_ANSWER if completion is None else completion for completion in completions]
    texts, reasons, counts, prompt_tokens, cached_tokens, *_ = zip(*answers, strict=True)

    def per_sample(values: Sequence[Any]) -> list[Any]:
        if is_single:
            return [value[0] for value in values]
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
        for name, given in (("output", texts), ("finish_reason", reasons), ("completion_tokens", counts)):
            values[name] = per_sample(given)
        if None in values["finish_reason"]:
            left_out = LEFT_OUT if is_single else [LEFT_OUT] * plan.samples
            told = zip(outcomes, values["finish_reason"], strict=True)
            values["finish_reason"] = [
                left_out if outcome.is_left_out else reason for outcome, reason in told
            ]
    if REQUEST_DIGEST in schema.names:
        values[REQUEST_DIGEST] = [ref.digests and ref.digests[ref.position] for ref in refs]
    for name in plan.names:
        found = [answer.columns.get(name) for answer in answers]
        is_one = is_single or name in OF_THE_PROMPT
        values[name] = [each[0] if each is not None and is_one else each for each in found]
    carried = _carried(refs) if {*schema.names} - values.keys() else pa.table({})
    arrays = [
        arrow_array(values[field.name], field.type) if field.name in values else carried.column(field.name)
        for field in schema
    ]
    return pa.Table.from_arrays(arrays, schema=schema)


def kinds_returned(tables: Iterable[pa.Table]) -> dict[str, ColumnKind]:
    """Return the columns of all that a function without annotation returned, by its values in tables.

    A column of texts beside other values holds JSON, in which texts are quoted: a warning says so.
    """
    found: defaultdict[str, set[ColumnKind]] = defaultdict(set)
    for table in tables:
        for row in _returned(table):
            for name, value in row.items():
                found[name].update(kinds_of_value(value))
    columns = {name: common_kind(kinds) for name, kinds in found.items()}
    for name, kind in columns.items():
        if _innermost(kind) == "json" and "string" in map(_innermost, found[name]):
            log.warning(
                "column %r of what the rollouts returned holds texts and other values: each is JSON, with "
                "texts in quotes. To have one type, annotate what the function returns",
                name,
            )
    return columns


def _innermost(kind: ColumnKind) -> ColumnKind:
    """Return the kind of the items of a list, or of lists in it; another kind as it is."""
    return kind if isinstance(kind, str) else _innermost(kind[1])


def with_returned(table: pa.Table, kinds: Mapping[str, ColumnKind]) -> pa.Table:
    """Return a table with what the function returned as columns, in place of others of their names."""
    rows = _returned(table)
    table = table.drop_columns([*{RETURNED, *kinds}.intersection(table.column_names)])
    for name, kind in kinds.items():
        fitted = [fit(row.get(name), kind) for row in rows]
        table = table.append_column(name, arrow_array(fitted, arrow_type(kind)))
    return table


def _returned(table: pa.Table) -> list[dict[str, Any]]:
    return [msgspec.json.decode(text or "{}") for text in table.column(RETURNED).to_pylist()]


def _carried(refs: Sequence[RowRef]) -> pa.Table:
    """Return the carried columns of these rows, in their order, from the batches that hold them."""
    groups: dict[int, tuple[pa.RecordBatch, list[int], list[int]]] = {}
    for at, ref in enumerate(refs):
        _, positions, indices = groups.setdefault(id(ref.carried), (ref.carried, [], []))
        positions.append(ref.position)
        indices.append(at)
    taken = [batch.take(arrow_array(positions, pa.int64())) for batch, positions, _ in groups.values()]
    table = pa.Table.from_batches(taken)
    inverse = [0] * len(refs)
    for at, index in enumerate(chain.from_iterable(indices for _, _, indices in groups.values())):
        inverse[index] = at
    return table.take(arrow_array(inverse, pa.int64()))
