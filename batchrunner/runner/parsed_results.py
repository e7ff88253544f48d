"""Answers on their way to the results: a Python function of the job makes columns of each."""

import asyncio
from typing import Any

from batchrunner.core.errors import RowRefusedError
from batchrunner.core.hook_pool import HookPool
from batchrunner.core.types import Completion, Outcome
from batchrunner.input.dataset import carried_of
from batchrunner.job.answers import of_sample
from batchrunner.job.python_functions import PARSE
from batchrunner.runner.sending import Results


class ParsedResults:
    """Parses answers, and passes their outcomes on; a row that cannot be parsed keeps its answer."""

    def __init__(self, results: Results, functions: HookPool) -> None:
        """Pass outcomes on to `results`."""
        self._results = results
        self._functions = functions
        facts = functions.facts[PARSE]
        self._takes_row = facts.takes_row
        self._names = [name for name, _ in facts.columns]
        self._last: tuple[Completion, Completion, str | None] | None = None

    async def put(self, outcome: Outcome) -> None:
        """Parse the answer of a row and pass it on; raises what `Results.put` does, and HookLostError."""
        completion = outcome.completion
        if completion is not None and outcome.error is None:
            last = self._last
            if last is None or last[0] is not completion or self._takes_row:  # else that of an equal row
                parsed, error = await self._parsed(outcome, completion)
                last = self._last = completion, parsed, error
            outcome = outcome._replace(completion=last[1], error=last[2])
        await self._results.put(outcome)

    def check(self) -> None:
        """Raise the StorageError of what failed in the background."""
        self._results.check()

    async def _parsed(self, outcome: Outcome, completion: Completion) -> tuple[Completion, str | None]:
        """Return the answer with the values of the columns, or as it is with an error."""
        row = (carried_of(outcome.ref),) if self._takes_row else ()
        calls = (self._functions.call(PARSE, text, *row) for text in completion.texts)
        samples: list[Any] = await asyncio.gather(*calls, return_exceptions=True)
        failures = {number: each for number, each in enumerate(samples) if isinstance(each, BaseException)}
        for failure in failures.values():
            if not isinstance(failure, RowRefusedError):
                raise failure
        for number, failure in failures.items():
            return completion, of_sample(str(failure), number, completion)
        made = {name: [sample[name] for sample in samples] for name in self._names}
        return completion._replace(columns={**completion.columns, **made}), None


def parsing(results: Results, functions: HookPool | None) -> Results:
    """Return what takes outcomes for `results`: what parses them first, where the job says so."""
    if functions is None or PARSE not in functions.facts:
        return results
    return ParsedResults(results, functions)
