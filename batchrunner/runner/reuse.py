"""Copies another run's answers to equal requests (`output.reuse`) before any row is sent.

duckdb joins the digests of both runs' requests, and sorts the answers into the order of the new input, in
bounded memory. They are written as Parquet files of the new run, so their rows are not sent. The job's
`parse` function is called on them again.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyroaring import BitMap64

from batchrunner.core.errors import JobError
from batchrunner.core.types import CHECK, PARSE, Request, rows_of_column
from batchrunner.input.dataset import BATCH_BYTES, DatasetReader
from batchrunner.input.prompt_bytes import RequestDigests, is_repeatable, prompt_bytes
from batchrunner.input.sorted_copy import COPY_PREFIX, allow_memory_to_sort, connect, insert
from batchrunner.job.answers import judges_by_row
from batchrunner.job.output import CUT, REPETITION
from batchrunner.output.arrow_arrays import arrow_array, shown_values
from batchrunner.output.counts import RowCounts, TableCounts, with_counts
from batchrunner.output.files import make_directory, writing
from batchrunner.output.parts import write_part
from batchrunner.output.run_dir import RunDir, look_at_run
from batchrunner.output.run_json import (
    CODE,
    describe_difference,
    raise_total,
    read_run_json,
    require_run_json,
    write_run_json,
)
from batchrunner.output.task_lock import TaskLock
from batchrunner.runner.control import Control
from batchrunner.runner.prepare import PreparedJob

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

log = logging.getLogger(__name__)

CHUNK_ROWS = 1024
"""Maximum number of answers that are read at once."""
_ASKED = {"digest": pa.binary(), "new_row": pa.int64(), "shares": pa.bool_(), "is_wanted": pa.bool_()}
"""Columns of the duckdb table `asked`, which has a row for each request of this run. `shares` tells whether
the request may get the same answer as an equal request. `is_wanted` tells whether the row of the request has
no result yet."""
_ALL = "TRUE"
"""SQL condition for stored answers that may be reused: all of them."""
_UNCUT = f"NOT regexp_matches(coalesce(finish_reason::VARCHAR, ''), '{CUT}|{REPETITION}')"
"""SQL condition for stored answers that may be reused: those that were neither truncated nor stopped."""
_JOIN = """
CREATE TABLE equal AS
WITH good AS (
    SELECT DISTINCT ON (row) request_digest AS digest, row, filename, file_row_number
    FROM stored WHERE error IS NULL AND request_digest IS NOT NULL AND {good}
), old AS (
    SELECT *, row_number() OVER (PARTITION BY digest ORDER BY row) AS nth FROM good
), new AS (
    SELECT *, CASE WHEN shares THEN 1 ELSE row_number() OVER (PARTITION BY digest ORDER BY new_row) END AS nth
    FROM asked
)
SELECT new_row, filename, file_row_number FROM new JOIN old USING (digest, nth) WHERE is_wanted
"""
"""SQL that finds a stored answer for each request. Equal requests that may share an answer all get the first
stored answer. Equal requests that may not share get different stored answers: the nth request in input order
gets the nth answer."""
_ANSWERS = """
SELECT stored.* REPLACE (new_row AS row, NULL AS latency_s, 0::INTEGER AS attempts)
FROM equal JOIN stored USING (filename, file_row_number) ORDER BY new_row
"""


def _uncompressed_bytes(part: str) -> int:
    """Return the size of a Parquet file's data without compression."""
    metadata = pq.read_metadata(part)
    sizes = (metadata.row_group(group).total_byte_size for group in range(metadata.num_row_groups))
    return sum(sizes)


class Reuse:
    """The answers that a run takes over from another run."""

    def __init__(
        self, prepared: PreparedJob, control: Control, model: str | None, weights: str | None = None
    ) -> None:
        """Open the other run. Raises JobError if this run cannot use any of its answers.

        `model` and the version of its `weights` are compared if they are known.
        """
        job, self._prepared, self._control = prepared.job, prepared, control
        self.counts = RowCounts()
        """Counts of the rows that got an answer of the other run."""
        assert job.output.reuse is not None
        self._run = look_at_run(job.output.reuse, job.storage)
        """Directory of the other run."""
        self._facts = require_run_json(self._run)
        """Content of the other run's run.json."""
        problem = self._problem(model, weights)
        if problem is not None:
            message = f"output.reuse: {self._run.name}: {problem}"
            raise JobError(message, hint="leave out output.reuse, or give both jobs the same settings")

    def _problem(self, model: str | None, weights: str | None) -> str | None:
        """Return why no answer of the other run can be used; None if some can be used."""
        prepared = self._prepared
        if self._run.path.resolve() == prepared.run_dir.path.resolve():
            return "is the output path of this job itself"
        if judges_by_row(prepared.functions):
            return (
                "accept.python depends on the row, but requests of two runs are compared without their rows"
            )
        difference = self._difference(model, weights)
        if difference is not None:
            return difference
        # run.json lists all versions of the function's code. Answers that another version accepted cannot be
        # used.
        check_digest = prepared.code_digests.get(CHECK)
        digests = [check_digest] if check_digest else None
        if self._facts.get(CODE, {}).get(CHECK) != digests:
            return "the code of accept.python has changed since that run"
        return None

    def _difference(self, model: str | None, weights: str | None) -> str | None:
        """Describe the first setting that differs, so that the answers cannot be used; None if none does."""
        prepared, old = self._prepared, self._facts["fingerprint"]
        new = prepared.fingerprint(model or old["model"])
        # With "longer", the other run may have longer answers than this job allows. Other values of
        # `on_length` may differ.
        if old["accept"]["on_length"] != "longer":
            new["accept"]["on_length"] = old["accept"]["on_length"]
        pairs = {name: (old[name], new[name]) for name in ("task", "model", "accept")}
        pairs["prompt.truncate"] = old["prompt"].get("truncate"), prepared.job.prompt.truncate
        # Versions of the weights are compared only if both are known.
        old_weights = self._facts["engine"].get("weights")
        if old_weights and weights:
            pairs["weight_version"] = old_weights, weights
        # Stored columns of a task such as embedding must have the same types. A generate job has only columns
        # of `parse`, which is called again.
        if prepared.answers.task is not None:
            for name, _ in prepared.answers.parsed:
                pairs[name] = old["columns"].get(name), new["columns"].get(name)
        for name, (before, after) in pairs.items():
            if before != after:
                return describe_difference(name, before, after)
        return None

    def take(
        self,
        run_dir: RunDir,
        lock: TaskLock,
        selected: BitMap64,
        missing: BitMap64,
        *,
        before_first: Callable[[], None] = lambda: None,
    ) -> BitMap64:
        """Write stored answers for the rows that are `missing`; return the rows that got an answer.

        `selected` are all rows of this run. The answers are written to `run_dir`, as part files of this
        worker. The caller must hold the worker's `lock`. `before_first` is called before the first answer is
        written. Raises InputError or StorageError.
        """
        reused = BitMap64()
        part_rows = self._prepared.job.output.part_rows
        chunk_rows = min(CHUNK_ROWS, part_rows)
        # If this process is killed, the name of the directory makes the next sort of rows delete it.
        work = run_dir.task_directory / f"{COPY_PREFIX}reuse"
        shutil.rmtree(work, ignore_errors=True)
        with writing(work), ExitStack() as stack:
            make_directory(work)
            stack.callback(shutil.rmtree, work, ignore_errors=True)
            database = stack.enter_context(connect(work))
            all_tables = self._answers(database, selected, missing, chunk_rows)
            for tables in _tables_of_parts(all_tables, part_rows):
                if not reused:
                    before_first()
                    lock.verify()
                    self._begin(run_dir, len(selected))
                write_part(run_dir, run_dir.next_number(), tables, lock)
                reused |= BitMap64().union(*(rows_of_column(table.column("row")) for table in tables))
        rows = f"{len(reused):,} of {len(missing):,} rows"
        log.info("%s have the answer of an equal request in %s", rows, self._run.name)
        return reused

    def _begin(self, run_dir: RunDir, rows_total: int) -> None:
        """Write the model that generated the answers, and the fingerprint of the input, to run.json.

        Later starts then refuse an engine with another model, or an input that has changed.
        """
        run_dir.discard_merged()
        make_directory(run_dir.parts)
        fingerprint = self._prepared.fingerprint(self._facts["fingerprint"]["model"])
        digests = self._prepared.code_digests
        if read_run_json(run_dir) is None:
            write_run_json(
                run_dir,
                self._prepared.job,
                digests,
                fingerprint=fingerprint,
                rows_total=rows_total,
                engine=self._facts["engine"],
                versions=self._facts["versions"],
            )
        else:
            raise_total(run_dir, rows_total, fingerprint, digests)

    def _answers(
        self, database: DuckDBPyConnection, selected: BitMap64, missing: BitMap64, chunk_rows: int
    ) -> Iterator[pa.Table]:
        """Yield stored answers for the missing rows in input order, as tables for part files.

        A table has at most `chunk_rows` rows. Yield nothing if the stored part files lack a column.
        """
        prepared, parts = self._prepared, [str(path) for path in self._run.all_parts()]
        stored_schemas = [pq.read_schema(part) for part in parts]
        schema = prepared.results_schema
        # Columns that come from this run's input, or that its `parse` makes anew, need not be stored.
        computed_names = {*prepared.renderer.carried_schema.names}
        if prepared.answers.task is None:
            computed_names |= {name for name, _ in prepared.answers.parsed}
        names = {*schema.names} - computed_names
        stored_names = {name for stored_schema in stored_schemas for name in stored_schema.names}
        # An earlier version of batchrunner wrote the other run, without some of the columns.
        if not stored_names.issuperset(names):
            return
        # The metadata names the model that made the answers.
        schema = schema.with_metadata(stored_schemas[0].metadata)
        stored = database.read_parquet(
            parts, union_by_name=True, hive_partitioning=False, filename=True, file_row_number=True
        )
        stored.create_view("stored")
        # Join the requests of this run with the stored answers of equal requests. Truncated answers are left
        # out, unless this job keeps them.
        insert(database, "asked", _ASKED, self._requests(selected, missing))
        condition = _ALL if prepared.answers.on_length == "keep" else _UNCUT
        database.execute(_JOIN.format(good=condition))
        # The answers themselves are sorted, so that they come in the order of this run's rows.
        allow_memory_to_sort(database, sum(map(_uncompressed_bytes, parts)))
        with closing(DatasetReader(prepared.dataset, prepared.renderer.columns)) as reader:
            for answers in database.sql(_ANSWERS).to_arrow_reader(chunk_rows):
                position = 0
                # Read the rows again, for the columns that are copied from the input.
                for batch in reader.read(rows_of_column(pa.chunked_array([answers.column("row")]))):
                    self._control.check()
                    carried = prepared.renderer.carried(batch)
                    answers_of_batch = answers.slice(position, len(carried))
                    position += len(carried)
                    table = self._table(answers_of_batch, carried, names, schema)
                    counts = _counts_of(table)
                    self.counts += counts.ok + counts.failed
                    yield with_counts(table, counts)

    def _table(
        self, answers: pa.RecordBatch, carried: pa.RecordBatch, stored_names: set[str], schema: pa.Schema
    ) -> pa.Table:
        """Return a table of results with this schema: stored columns, input columns, and columns of `parse`.

        `answers` has the stored columns `stored_names`. `carried` has the columns that are copied from the
        input, for the same rows.
        """
        columns = {name: answers.column(name) for name in stored_names}
        columns |= {name: carried.column(name) for name in carried.schema.names}
        for name, values in self._parsed(answers, carried).items():
            columns[name] = arrow_array(values, schema.field(name).type)
        return pa.Table.from_arrays([columns[field.name].cast(field.type) for field in schema], schema=schema)

    def _parsed(self, answers: pa.Table, carried: pa.RecordBatch) -> dict[str, list[Any]]:
        """Return the columns that `parse` makes of answers, and the column `error`; {} without `parse`.

        `carried` are the input columns that are copied into the results. A row whose answer cannot be parsed
        fails and keeps its answer, like a row that was sent.
        """
        functions, samples = self._prepared.functions, self._prepared.answers.samples
        if functions is None or PARSE not in functions.facts:
            return {}
        facts = functions.facts[PARSE]
        outputs = answers.column("output").to_pylist()
        # The column `output` has a text for each row, or a list of texts if a row has several completions.
        texts_of_rows = [[text] for text in outputs] if samples == 1 else outputs
        rows: list[dict[str, Any]] = [{} for _ in outputs]
        for name, column in zip(carried.schema.names, carried.columns, strict=True):
            for row, value in zip(rows, shown_values(column), strict=True):
                row[name] = value
        # Call `parse` once for each text, with the row if the function takes it.
        calls: list[tuple[Any, ...]] = []
        for texts, row in zip(texts_of_rows, rows, strict=True):
            calls += [(text, row) if facts.takes_row else (text,) for text in texts]
        results = iter(functions.call_many(PARSE, calls, self._control.check))

        # Group the results by row again. The value of a column is a list if a row has several completions.
        columns: dict[str, list[Any]] = {"error": [], **{name: [] for name, _ in facts.columns}}
        for texts in texts_of_rows:
            results_of_row = [next(results) for _ in texts]
            errors = [
                result.error if samples == 1 else f"sample {number}: {result.error}"
                for number, result in enumerate(results_of_row)
                if result.error is not None
            ]
            columns["error"].append(errors[0] if errors else None)
            for name, _ in facts.columns:
                if errors:  # a row fails if one of its completions cannot be parsed
                    columns[name].append(None)
                elif samples == 1:
                    columns[name].append(results_of_row[0].value[name])
                else:
                    columns[name].append([result.value[name] for result in results_of_row])
        return columns

    def _requests(self, selected: BitMap64, missing: BitMap64) -> Iterator[tuple[Any, ...]]:
        """Yield the rows of the duckdb table `asked` (see _ASKED), one for each request of this run."""
        digests = RequestDigests()
        for items in self._prepared.batches(selected, self._control.check):
            for item in items:
                row, _, position, digests_of_batch = item.ref
                # A row that cannot be sent has no request, and gets no stored answer.
                if isinstance(item, Request) and digests_of_batch:
                    digests.write(item, prompt_bytes(item))
                    # Equal requests share an answer only if it is deterministic and the job allows it.
                    shares = is_repeatable(item) and self._prepared.dedupes
                    yield digests_of_batch[position], row, shares, row in missing


def _tables_of_parts(tables: Iterator[pa.Table], part_rows: int) -> Iterator[list[pa.Table]]:
    """Yield the tables of each part file: at most `part_rows` rows, and about BATCH_BYTES.

    A table has at most `part_rows` rows, and often far fewer, because the input is read in small batches.
    """
    part: list[pa.Table] = []
    rows = size = 0
    for table in tables:
        if part and (rows + table.num_rows > part_rows or size > BATCH_BYTES):
            yield part
            part, rows, size = [], 0, 0
        part.append(table)
        rows += table.num_rows
        size += table.nbytes
    if part:
        yield part


def _counts_of(table: pa.Table) -> TableCounts:
    """Return the counts of rows that got the answers of another run."""
    counts = TableCounts(ok=RowCounts(), failed=RowCounts())
    has_texts = "finish_reason" in table.schema.names
    reasons = table.column("finish_reason").to_pylist() if has_texts else [None] * table.num_rows
    rows, errors = table.column("row").to_pylist(), table.column("error").to_pylist()
    for row, error, reason in zip(rows, errors, reasons, strict=True):
        if error is None:
            counts.ok.ok += 1
            counts.ok.reused += 1
            counts.ok.cut += CUT in (reason or "")
        else:
            counts.failed.failed += 1
            counts.failed.reused += 1
            counts.failed.failures.add(row, error)
    return counts
