"""Reads a run's results for its page: counts of rows, distributions of lengths, and a few answers.

DuckDB reads only the numeric columns, once for each distribution, so that memory does not grow with the rows.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.dataset as pads
import pyarrow.parquet as pq

from batchrunner.core.errors import ResumeError, first_line
from batchrunner.input.dataset import values_of
from batchrunner.output.columns import has_texts
from batchrunner.output.counts import RowCounts
from batchrunner.output.resume import DoneRows, read_done
from batchrunner.output.run_dir import RunDir

if TYPE_CHECKING:
    import duckdb

MEMORY = "256MB"
"""Limit of the memory that DuckDB may use."""
THREADS = 1
"""Number of threads that DuckDB may use, so that the page does not slow down a run on the same machine."""
ANSWERS = 5
"""Number of rows that the page shows with their answers."""
SHOWN = 400
"""Maximum number of characters of an answer's text on the page."""
_LEFT_OUT = {"finish_reason", "prompt_tokens", "completion_tokens", "latency_s", "attempts"}
"""Result columns that the page does not show beside answers."""
_SENT = "FROM results WHERE attempts > 0"
"""SQL clause that selects the rows that were sent to the engine."""
_LENGTHS = (
    ("Prompts", "tokens", "prompt_tokens"),
    ("Outputs", "tokens", "unnest(output_tokens)"),
    ("Latency", "s", "latency_s"),
)
"""Title, unit and SQL expression of each distribution on the page."""


@dataclass(frozen=True, slots=True)
class RunResults:
    """Counts, distributions and examples from the results of a run that are on disk."""

    counts: RowCounts = field(default_factory=RowCounts)
    """Counts of all rows that have a result."""
    lengths: list[tuple[Any, ...]] = field(default_factory=list)
    """Name, unit, mean, median, 90th and 99th percentile and maximum of each distribution."""
    answers: list[dict[str, Any]] = field(default_factory=list)
    """A few rows with shortened texts by column; `row` is the ordinal of the row in the input."""


def read_results(workers: Sequence[RunDir]) -> RunResults:
    """Read the results of these workers of a run; raises ResumeError for a damaged result file.

    Rows of the last half minute may still be in a journal. They are counted, but are not in the
    distributions.
    """
    import duckdb  # noqa: PLC0415 - 25 MB, which only a page needs

    done = DoneRows()
    parts = [part for worker in workers for part in worker.own_parts()]
    try:
        for worker in workers:
            done.include(read_done(worker))
        if not parts:
            return RunResults(done.counts)
        with (
            tempfile.TemporaryDirectory(prefix="batchrunner-") as scratch,
            duckdb.connect(
                config={"memory_limit": MEMORY, "threads": THREADS, "temp_directory": scratch}
            ) as connection,
        ):
            _register(connection, parts)
            lengths = list(filter(None, (_length(connection, *length) for length in _LENGTHS)))
            # The examples come from the newest result file.
            return RunResults(done.counts, lengths, _answers(parts[-1]))
    except (duckdb.Error, pa.ArrowException, OSError, KeyError, UnicodeError) as failure:
        raise ResumeError(f"{workers[0].path}: results cannot be read: {first_line(failure)}") from None


def _register(connection: duckdb.DuckDBPyConnection, parts: Sequence[Path]) -> None:
    """Define the view `results` of the numeric columns in the result files.

    In the view, `output_tokens` is always a list with the output tokens of each completion.
    """
    schema = pq.read_schema(parts[0])
    names = ["attempts", "latency_s", "prompt_tokens"]
    if not has_texts(schema):
        # A task without decoding, such as embedding, has no output tokens.
        tokens = "[]::INTEGER[]"
    else:
        names.append("completion_tokens")
        has_several = pa.types.is_list(schema.field("completion_tokens").type)
        tokens = "completion_tokens" if has_several else "[completion_tokens]"
    lengths = pa.schema([schema.field(name) for name in names])
    paths = [str(part) for part in parts]
    connection.register("parts", pads.dataset(paths, schema=lengths, format="parquet"))
    connection.execute(f"CREATE VIEW results AS SELECT *, {tokens} AS output_tokens FROM parts")  # noqa: S608


def _length(
    connection: duckdb.DuckDBPyConnection, name: str, unit: str, value: str
) -> tuple[Any, ...] | None:
    """Compute the statistics of one distribution, as in `RunResults.lengths`; None if no row has a value.

    `value` is an SQL expression on a row of the view `results`.
    """
    query = f"""SELECT
            avg(v), approx_quantile(v, 0.5), approx_quantile(v, 0.9), approx_quantile(v, 0.99), max(v)
        FROM (SELECT {value} AS v {_SENT})"""  # noqa: S608 - our own names
    statistics = connection.execute(query).fetchone()
    return (name, unit, *statistics) if statistics and statistics[0] is not None else None


def _answers(part: Path) -> list[dict[str, Any]]:
    """Return the first rows of a result file, each as shortened texts by column."""
    with pq.ParquetFile(part) as file:
        names = [name for name in file.schema_arrow.names if name not in _LEFT_OUT]
        batch = next(file.iter_batches(batch_size=ANSWERS, columns=names, use_threads=False), None)
    if batch is None:
        return []
    columns = []
    for name in names:
        values, unreadable = values_of(batch.column(name))
        # If Python cannot represent a value, the reason is shown instead.
        columns.append([unreadable.get(index, value) for index, value in enumerate(values)])
    return [
        {name: str(value)[:SHOWN] for name, value in zip(names, values, strict=True) if value is not None}
        for values in zip(*columns, strict=True)
    ]
