"""Rows that come while a run goes on → requests; their columns and types may change on the way."""

from collections.abc import Callable

import pyarrow as pa
import pyarrow.types as pt

from batchrunner.core.errors import BatchrunError, InputError
from batchrunner.core.hook_pool import HookPool
from batchrunner.core.types import Outcome, Request, RowRef
from batchrunner.input.columns_read import unknown_column
from batchrunner.input.dataset import Dataset, RowBatch
from batchrunner.input.parquet_copy import PROBLEM, normalize, normalized
from batchrunner.input.render import Renderer
from batchrunner.job.answers import plan_answers
from batchrunner.job.spec import Job

MOST_RENDERERS = 64
"""Schemas whose renderers are kept."""


class LiveColumns:
    """The columns of one batch."""

    def __init__(self, schema: pa.Schema, files: Dataset | None = None) -> None:
        """`files` have the rows, if these are not a program's."""
        self._schema = schema
        self._files = files

    @property
    def schema(self) -> pa.Schema:
        """All columns."""
        return self._schema

    @property
    def problems(self) -> tuple[str, ...]:
        """Columns that say why a record of a file cannot be read."""
        return (PROBLEM,) if PROBLEM in self._schema.names else ()

    def field(self, name: str, *, where: str) -> pa.Field:
        """Return the field of a column; raises InputError where there is none, or several."""
        found = self._schema.get_all_field_indices(name)
        if not found:
            unknown, hint = unknown_column(where, name, self._schema.names)
            raise InputError(unknown, hint=hint)
        if len(found) > 1:
            raise InputError(f"{where}: the rows have {len(found)} columns {name!r}", hint="give one only")
        return self._schema.field(found[0])

    def directory_of(self, row: int) -> str | None:
        """Return the directory of the file that has this row; None for a program's rows."""
        return None if self._files is None else self._files.directory_of(row)


class LiveRenderer:
    """Renders batches by prompt, sampling and columns of a job; the first batch tells the columns.

    A later batch may lack a column, which is null there, or have another type in it. Rows whose types do not
    fit the job fail; columns that the job does not use do not matter.
    """

    def __init__(
        self, job: Job, first: pa.Schema, functions: HookPool | None = None, files: Dataset | None = None
    ) -> None:
        """Check the job against the columns of the first batch; raises JobError or InputError.

        `functions` are the job's Python functions; `files` have the rows, if these are not a program's.
        """
        self._job = job
        self._files = files
        self._functions = functions
        self._first = normalized(first)
        self.names: list[str] = list(self._first.names)
        """Names of the columns of the first batch."""
        renderer = self._make(self._first)
        self.kind = renderer.kind
        self.columns = renderer.columns
        self._carried_schema = renderer.carried_schema
        self._renderers: dict[pa.Schema, Renderer] = {}

    def render(
        self, rows: range, data: pa.RecordBatch, is_stopped: Callable[[], bool]
    ) -> list[Request | Outcome]:
        """Return a request for each row, or an Outcome where it cannot be rendered.

        `rows` are the ordinals of the rows of `data`.
        """
        data = self._used(data)
        try:
            renderer = self._renderer_of(data.schema)
        except BatchrunError as failure:
            return self.failed(rows, str(failure))
        return renderer.render(RowBatch(list(rows), data), is_stopped)

    def failed(self, rows: range, error: str) -> list[Request | Outcome]:
        """Return rows of which nothing is known but the error; their carried columns are null."""
        carried = pa.RecordBatch.from_arrays(
            [pa.nulls(len(rows), field.type) for field in self._carried_schema], schema=self._carried_schema
        )
        return [Outcome(RowRef(row, carried, at), None, error, None, 0) for at, row in enumerate(rows)]

    def _used(self, data: pa.RecordBatch) -> pa.RecordBatch:
        """Return the columns that the job uses; one that is missing or has nulls only gets the first type."""
        columns = {}
        for name in self.columns:
            found = data.column(name) if name in data.schema.names else pa.nulls(data.num_rows)
            columns[name] = (
                pa.nulls(data.num_rows, self._first.field(name).type) if pt.is_null(found.type) else found
            )
        if not columns:  # a prompt without a column: the number of rows matters
            return data.select([])
        return normalize(pa.RecordBatch.from_pydict(columns))

    def _renderer_of(self, schema: pa.Schema) -> Renderer:
        if schema not in self._renderers:
            if len(self._renderers) >= MOST_RENDERERS:
                self._renderers.clear()
            self._renderers[schema] = self._make(schema)
        return self._renderers[schema]

    def _make(self, schema: pa.Schema) -> Renderer:
        job = self._job
        return Renderer(
            LiveColumns(schema, self._files),
            job.input,
            job.prompt,
            job.first_sampling,
            asks=plan_answers(job, self._functions).asks,
            functions=self._functions,
            expression=job.check.expression,
            task=job.forward,
            first_temperature=job.check.first_temperature,
        )
