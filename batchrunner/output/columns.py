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

NO_ANSWER = Completion(
    texts=[None],  # type: ignore[list-item]
    finish_reasons=[None],
    completion_tokens=[None],
    prompt_tokens=None,
    cached_tokens=None,
)
"""Placeholder for the answer of a row that has none."""
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
"""Types of the optional result columns, for a row with one output."""
TASK = "task"
"""Key in a part's metadata for the name of a task without decoding. A part with this key lacks the columns of
texts, so a carried column may be called `output`."""
OF_THE_PROMPT = {"prompt_logprobs"}
"""Columns of ANSWER_TYPES that have one value for all outputs of a row."""


def schema_of_run(carried: pa.Schema, plan: AnswerPlan) -> pa.Schema:
    """Return the schema of the parts that this start of a run writes: `row`, carried columns, results.

    If a row has several completions, the columns of outputs are lists with a value for each completion. A
    task without decoding has no columns of texts.
    """

    def per_sample(kind: pa.DataType) -> pa.DataType:
        return kind if plan.samples == 1 else pa.list_(kind)

    types: dict[str, pa.DataType] = {
        "row": pa.int64(),
        "output": per_sample(pa.string()),
        "finish_reason": per_sample(pa.string()),
        "prompt_tokens": pa.int32(),
        "cached_tokens": pa.int32(),
        "completion_tokens": per_sample(pa.int32()),
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
        fields.append(pa.field(name, kind if name in OF_THE_PROMPT else per_sample(kind)))
    fields += [pa.field(name, per_sample(arrow_type(kind))) for name, kind in plan.parsed]
    return pa.schema(fields, metadata={} if plan.task is None else {TASK: plan.task.name})


def has_texts(schema: pa.Schema) -> bool:
    """Whether a part has the columns of texts (OF_TEXTS)."""
    return TASK.encode() not in (schema.metadata or {})


def rows_made(outcome: Outcome) -> list[Outcome]:
    """Return one outcome for each row that a rollout returned; return any other outcome alone."""
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
            **{name: [value] for name, value in values.items()},
        }
        rows.append(outcome._replace(completion=completion._replace(columns=columns)))
    return rows


def table_of(outcomes: Sequence[Outcome], schema: pa.Schema, plan: AnswerPlan) -> pa.Table:
    """Convert outcomes, in their order, to a table with the schema of a part."""
    if plan.asked is not None:
        outcomes = [*chain.from_iterable(map(rows_made, outcomes))]
    is_single = plan.samples == 1
    # Transpose all outcomes at once. Reading each field of each outcome takes four times as long.
    refs, completions, errors, latencies, attempts = zip(*outcomes, strict=True)
    answers = [NO_ANSWER if completion is None else completion for completion in completions]
    texts, reasons, counts, prompt_tokens, cached_tokens, *_ = zip(*answers, strict=True)

    def of_samples(values: Sequence[Any]) -> list[Any]:
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
        values["output"] = of_samples(texts)
        values["finish_reason"] = of_samples(reasons)
        values["completion_tokens"] = of_samples(counts)
        if None in values["finish_reason"]:
            left_out = LEFT_OUT if is_single else [LEFT_OUT] * plan.samples
            values["finish_reason"] = [
                left_out if outcome.is_left_out else reason
                for outcome, reason in zip(outcomes, values["finish_reason"], strict=True)
            ]
    if REQUEST_DIGEST in schema.names:
        values[REQUEST_DIGEST] = [ref.digests and ref.digests[ref.position] for ref in refs]
    for name in plan.names:
        lists = [answer.columns.get(name) for answer in answers]
        if is_single or name in OF_THE_PROMPT:
            values[name] = [outputs if outputs is None else outputs[0] for outputs in lists]
        else:
            values[name] = lists
    carried = _carried(refs) if {*schema.names} - values.keys() else pa.table({})
    arrays = [
        arrow_array(values[field.name], field.type) if field.name in values else carried.column(field.name)
        for field in schema
    ]
    return pa.Table.from_arrays(arrays, schema=schema)


def kinds_returned(tables: Iterable[pa.Table]) -> dict[str, ColumnKind]:
    """Infer the columns and types of the values that a rollout function without annotation returned.

    A column with texts and other values becomes JSON, in which texts are quoted. A warning is logged then.
    """
    kinds_of: defaultdict[str, set[ColumnKind]] = defaultdict(set)
    for table in tables:
        for row in _returned(table):
            for name, value in row.items():
                kinds_of[name].update(kinds_of_value(value))
    columns = {name: common_kind(kinds) for name, kinds in kinds_of.items()}
    for name, kind in columns.items():
        if _innermost(kind) == "json" and "string" in map(_innermost, kinds_of[name]):
            log.warning(
                "column %r of the rollouts' results mixes text with other types: every value is written as "
                "JSON, text in quotes. To get one type, annotate what the function returns",
                name,
            )
    return columns


def _innermost(kind: ColumnKind) -> ColumnKind:
    """Return the kind of the items of a list, however deeply nested; any other kind unchanged."""
    return kind if isinstance(kind, str) else _innermost(kind[1])


def with_returned(table: pa.Table, kinds: Mapping[str, ColumnKind]) -> pa.Table:
    """Return a table in which the values that the rollout returned are columns.

    Such a column replaces a carried column of the same name.
    """
    rows = _returned(table)
    table = table.drop_columns([*{RETURNED, *kinds}.intersection(table.column_names)])
    for name, kind in kinds.items():
        values = [fit(row.get(name), kind) for row in rows]
        table = table.append_column(name, arrow_array(values, arrow_type(kind)))
    return table


def _returned(table: pa.Table) -> list[dict[str, Any]]:
    return [msgspec.json.decode(text or "{}") for text in table.column(RETURNED).to_pylist()]


def _carried(refs: Sequence[RowRef]) -> pa.Table:
    """Collect the carried columns of these rows, in their order, from the batches that hold them."""
    groups: dict[int, tuple[pa.RecordBatch, list[int], list[int]]] = {}
    for at, ref in enumerate(refs):
        _, positions, indices = groups.setdefault(id(ref.carried), (ref.carried, [], []))
        positions.append(ref.position)
        indices.append(at)
    table = pa.Table.from_batches(
        [batch.take(arrow_array(positions, pa.int64())) for batch, positions, _ in groups.values()]
    )
    inverse = [0] * len(refs)
    for at, index in enumerate(chain.from_iterable(indices for _, _, indices in groups.values())):
        inverse[index] = at
    return table.take(arrow_array(inverse, pa.int64()))
