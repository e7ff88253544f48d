"""What a call of `generate`, `embed` or the like returns: the table of its run."""

import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from batchrunner.api.runs import run_blocking
from batchrunner.core.errors import BatchrunError
from batchrunner.dispatch.checks import AnswerConditions
from batchrunner.input.dataset import Dataset
from batchrunner.input.parquet_copy import about_rows, write_rows
from batchrunner.input.render import Renderer
from batchrunner.input.tables import Data, batches_of, paths_of
from batchrunner.job.answers import plan_answers
from batchrunner.job.call import LibraryCall
from batchrunner.job.python_functions import open_functions
from batchrunner.job.spec import Job
from batchrunner.output.columns import schema_of_run
from batchrunner.output.merge import merge
from batchrunner.runner.open_engine import OpenEngine
from batchrunner.runner.progress import Display


def results_of(rows: Data, call: LibraryCall, opened: OpenEngine | None, display: Display) -> pa.Table:
    """Run the job of a call and return its results, which stay nowhere else."""
    with _rows_and_run() as (source, out):
        paths = paths_of(rows)
        if paths is None:
            write_rows(batches_of(rows), source)
        dataset = Dataset(paths or str(source))
        job = call.job(dataset.schema, paths or [str(source)], out)
        if not dataset.total_rows:
            return _no_results(job, dataset)
        report = run_blocking(job, opened, page=False, display=display)
        if report.rows_left:
            raise BatchrunError(
                f"{report.reason}: {report.rows_left} of {report.rows_total} rows were not sent"
            )
        merged = merge(out)
        return pa.concat_tables(pq.read_table(file) for file in sorted(merged.path.glob("*.parquet")))


@contextmanager
def _rows_and_run() -> Iterator[tuple[Path, Path]]:
    """Give the paths of a file for the rows of a call and of its run directory, which are deleted."""
    with tempfile.TemporaryDirectory(prefix="batchrunner-") as scratch:
        source = Path(scratch) / "input.parquet"
        with about_rows(source):
            yield source, Path(scratch) / "run"


def _no_results(job: Job, dataset: Dataset) -> pa.Table:
    """Return the results of an input without rows, which pipelines have; the job is checked."""
    functions = open_functions(job)
    with closing(functions) if functions else nullcontext():
        renderer = Renderer(
            dataset, job.input, job.prompt, job.sampling, functions=functions, task=job.forward
        )
        plan = plan_answers(job, functions)
        AnswerConditions(job, plan, dataset.schema.names)  # raises what is wrong with the checks
    return schema_of_run(renderer.carried_schema, plan, {}, job.output.dimensions or 0).empty_table()
