"""Answers on their way to the results: a vector whose length is not that of the first one fails its row."""

from batchrunner.core.types import Outcome
from batchrunner.job.answers import AnswerPlan
from batchrunner.output.columns import RunSchema
from batchrunner.runner.sending import Results


class FittingResults:
    """Compares answers with the columns of the run, and passes their outcomes on."""

    def __init__(self, results: Results, schema: RunSchema) -> None:
        """Pass outcomes on to `results`, which are stored with this schema."""
        self._results = results
        self._schema = schema

    async def put(self, outcome: Outcome) -> None:
        """Pass an outcome on, as a failed one where its answer does not fit; raises as `Results.put`."""
        if outcome.completion is not None and outcome.error is None:
            misfit = self._schema.misfit(outcome.completion)
            if misfit is not None:
                outcome = outcome._replace(completion=None, error=misfit)
        await self._results.put(outcome)

    def check(self) -> None:
        """Raise the StorageError of what failed in the background."""
        self._results.check()


def fitting(results: Results, schema: RunSchema, plan: AnswerPlan) -> Results:
    """Return what takes outcomes for `results`: what compares them first, where the task has vectors."""
    return results if plan.task is None else FittingResults(results, schema)
