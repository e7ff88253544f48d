"""The job's `check.python`: a Python function that judges answers, in a process of its own."""

from __future__ import annotations

from batchrunner.core.errors import RowRefusedError
from batchrunner.core.hook_pool import HookPool
from batchrunner.core.types import Completion, RowRef
from batchrunner.dispatch.checks.checker import of_sample
from batchrunner.input.dataset import carried_of
from batchrunner.job.python_functions import CHECK


class PythonCheck:
    """Asks the function what is wrong with an answer."""

    def __init__(self, functions: HookPool) -> None:
        self._functions = functions
        self._name = functions.facts[CHECK].name
        self._takes_row = functions.facts[CHECK].takes_row

    async def complaint(self, ref: RowRef, completion: Completion) -> str | None:
        """Say what is wrong with an answer, in a sentence; None for nothing. Raises HookLostError.

        A function that fails with an answer says so by that.
        """
        row = (carried_of(ref),) if self._takes_row else ()
        for number, text in enumerate(completion.texts):
            try:
                found: bool | str = await self._functions.call(CHECK, text, *row)
            except RowRefusedError as failure:
                found = str(failure)
            if found is not True:
                said = found or f"{CHECK} {self._name} does not take the answer"
                return of_sample(said, number, completion)
        return None


def judges_by_row(functions: HookPool | None) -> bool:
    """Tell whether a job's function may judge the same answer to equal rows in different ways."""
    return functions is not None and CHECK in functions.facts and functions.facts[CHECK].takes_row


def python_check(functions: HookPool | None) -> PythonCheck | None:
    """Return the check of a job; None where it has none."""
    return PythonCheck(functions) if functions is not None and CHECK in functions.facts else None
