"""Decides whether an answer is the result of its row, or the row is asked again."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from batchrunner.core.types import Completion, Outcome, Request
from batchrunner.dispatch.checks.asking import (
    continued,
    joined,
    next_try,
    with_complaint,
    with_more_tokens,
)
from batchrunner.dispatch.checks.checker import AnswerChecker, Checked
from batchrunner.dispatch.checks.python_check import PythonCheck
from batchrunner.dispatch.pending_row import Asking, PendingRow
from batchrunner.dispatch.tokenize import RowTokenizer
from batchrunner.job.answers import AnswerPlan
from batchrunner.job.spec import CheckSpec
from batchrunner.output.check_counts import ASKED_AGAIN, AskedAgain, Rejected

MOST_CONTINUED = 3
"""Times that a cut answer is continued, or asked for with more tokens: twice as many each time."""


class Verdict(NamedTuple):
    """What becomes of a row after an answer."""

    completion: Completion
    error: str | None
    """Why the row failed; None where it succeeded."""
    again: Request | None = None
    """What is asked next; None where the row has ended."""


class AnswerExaminer:
    """Examines the answers of a run."""

    def __init__(
        self,
        checker: AnswerChecker,
        plan: AnswerPlan,
        check: CheckSpec,
        tokenizer: RowTokenizer,
        python: PythonCheck | None = None,
    ) -> None:
        """Take the parts; `python` is the condition that a Python function is."""
        self._checker = checker
        self._check = check
        self._tries = plan.tries
        self._continues = plan.on_length == "continue"
        self._tokenizer = tokenizer
        self._python = python
        self._thread = None if checker.is_quick else ThreadPoolExecutor(1, "checks")
        """Where answers are checked that may take long: the event loop goes on meanwhile."""

    async def examine(self, row: PendingRow, completion: Completion) -> Verdict:
        """Look at an answer of a row; what is asked next is tokenised where prompts are."""
        asking = row.asking = row.asking or Asking(row.request)
        whole = completion if asking.begun is None else joined(asking.begun, completion)
        checked = await self._look_at(row.request, whole)
        asking.last = checked.completion
        if checked.complaint is None and self._python is not None:
            complaint = await self._python.complaint(row.request.ref, checked.completion)
            checked = checked._replace(complaint=complaint)
        if checked.complaint is None:
            return Verdict(_with_asks(asking, is_good=True), None)
        if checked.is_cut and self._continues and asking.continued < MOST_CONTINUED:
            longer = with_more_tokens(row.request, 2)
            if longer is not None:
                return self._go_on(asking, longer, completion, whole)
        return await self._reject(row, asking, checked.completion, checked.complaint)

    def last_answer(self, row: PendingRow) -> Completion | None:
        """Return the last answer of a row that ends without a further one; None where it had none."""
        asking = row.asking
        return None if asking is None or asking.last is None else _with_asks(asking, is_good=None)

    async def _look_at(self, request: Request, answer: Completion) -> Checked:
        if self._thread is None:
            return self._checker.look_at(request, answer)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, self._checker.look_at, request, answer)

    def _go_on(self, asking: Asking, longer: Request, part: Completion, whole: Completion) -> Verdict:
        """Ask for the rest of an answer that was cut, or for its last part anew with more tokens."""
        rest = continued(longer, part)
        if rest is not None:
            asking.begun = whole
        asking.continued += 1
        return Verdict(whole, None, longer if rest is None else rest)

    async def _reject(self, row: PendingRow, asking: Asking, answer: Completion, complaint: str) -> Verdict:
        asking.rejected.append(Rejected(complaint, answer.output_tokens))
        asking.begun = None
        again: Request | Outcome | None = None
        number = len(asking.rejected)
        if number < self._tries:
            again = next_try(asking.first, self._check, number)
            if self._check.feedback and row.unencoded is not None and row.unencoded.kind == "messages":
                told = next_try(row.unencoded, self._check, number)
                (again,) = await self._tokenizer.tokenize([with_complaint(told, answer, complaint)])
        if not isinstance(again, Request):
            return Verdict(_with_asks(asking, is_good=False), complaint)
        return Verdict(answer, None, again)


def _with_asks(asking: Asking, *, is_good: bool | None) -> Completion:
    """Return the last answer of a row, with what its others came to where it had others or is not good."""
    assert asking.last is not None
    asks = asking.asks - (is_good is False)  # the last one was rejected, and nothing was asked after it
    if asks == 1 and is_good:
        return asking.last
    asked = AskedAgain(asks, asking.continued, tuple(asking.rejected), is_good)
    return asking.last._replace(columns={**asking.last.columns, ASKED_AGAIN: [asked]})
