"""The input of a job: the job, its dataset and the renderer of its prompts."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from pyroaring import BitMap64

from batchrunner.core.errors import InputError
from batchrunner.core.types import Outcome, Request
from batchrunner.input.dataset import Dataset
from batchrunner.input.render import Renderer
from batchrunner.input.select import selected_rows
from batchrunner.job.spec import Job


@dataclass(frozen=True, slots=True)
class JobInput:
    """A job whose input and templates were checked."""

    job: Job
    dataset: Dataset
    renderer: Renderer

    def batches(self, rows: BitMap64) -> Iterator[list[Request | Outcome]]:
        """Read and render rows in input order, a bounded batch at a time; raises InputError."""
        for batch in self.dataset.read(rows, self.renderer.columns):
            yield self.renderer.render(batch)

    def selected(self, check_stop: Callable[[], None] = lambda: None) -> BitMap64:
        """Return the rows that `input.filter` and `input.limit` select; raises InputError if there are none.

        `check_stop` is called after each batch; what it raises ends the search.
        """
        selected = selected_rows(self.dataset, self.renderer.predicate, self.job.input.limit, check_stop)
        if not selected:
            raise InputError(
                f"input.filter: true for none of the {self.dataset.total_rows} rows: {self.job.input.filter}"
            )
        return selected
