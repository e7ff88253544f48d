"""Decides whether an answer is the result of its row, or the row is asked again."""

from __future__ import annotations

from typing import NamedTuple

from batchrunner.core.types import Completion, Outcome, Request
from batchrunner.dispatch.checks.asking import (
    continued,
    joined,
    next_try,
    with_complaint,
    with_more_tokens,
)
from batchrunner.dispatch.checks.checker import AnswerChecker
from batchrunner.dispatch.checks.python_check import PythonCheck
from batchrunner.dispatch.checks.totals import CheckTotals
from batchrunner.dispatch.pending_row import Asking, PendingRow
from batchrunner.dispatch.tokenizers import RowTokenizer
from batchrunner.job.answers import AnswerPlan
from batchrunner.job.check import CheckSpec

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
        totals: CheckTotals,
        python: PythonCheck | None = None,
    ) -> None:
        """Take the parts; `python` is the condition that a Python function is."""
        self._checker = checker
        self._check = check
        self._tries = plan.tries
        self._continues = plan.on_length == "continue"
        self._tokenizer = tokenizer
        self._totals = totals
        self._python = python

    async def examine(self, row: PendingRow, completion: Completion) -> Verdict:
        """Look at an answer of a row, and count it; what is asked next is tokenised where prompts are."""
        asking = row.asking = row.asking or Asking(row.request)
        whole = completion if asking.begun is None else joined(asking.begun, completion)
        checked = self._checker.look_at(row.request, whole)
        asking.last = checked.completion
        if checked.complaint is None and self._python is not None:
            complaint = await self._python.complaint(row.request.ref, checked.completion)
            checked = checked._replace(complaint=complaint)
        if checked.complaint is None:
            self._totals.ended(checked.completion, asks=asking.asks, good=True)
            return Verdict(checked.completion, None)
        if checked.is_cut and self._continues and asking.continued < MOST_CONTINUED:
            longer = with_more_tokens(row.request, 2)
            if longer is not None:
                return self._go_on(asking, longer, completion, whole)
        return await self._reject(row, asking, checked.completion, checked.complaint)

    def _go_on(self, asking: Asking, longer: Request, part: Completion, whole: Completion) -> Verdict:
        """Ask for the rest of an answer that was cut, or for its last part anew with more tokens."""
        rest = continued(longer, part)
        if rest is not None:
            asking.begun = whole
        self._totals.again(is_first=asking.asks == 1, continues=True)
        asking.continued += 1
        return Verdict(whole, None, longer if rest is None else rest)

    async def _reject(self, row: PendingRow, asking: Asking, answer: Completion, complaint: str) -> Verdict:
        self._totals.reject(row.request.ref.row, answer, complaint)
        asking.rejected += 1
        asking.begun = None
        again: Request | Outcome | None = None
        if asking.rejected < self._tries:
            again = next_try(asking.first, self._check, asking.rejected)
            if self._check.feedback and row.unencoded is not None and row.unencoded.kind == "messages":
                told = next_try(row.unencoded, self._check, asking.rejected)
                (again,) = await self._tokenizer.tokenize([with_complaint(told, answer, complaint)])
        if not isinstance(again, Request):
            self._totals.ended(answer, asks=asking.asks, good=False)
            return Verdict(answer, complaint)
        self._totals.again(is_first=asking.asks == 2, continues=False)  # noqa: PLR2004 - this one is counted
        return Verdict(answer, None, again)
