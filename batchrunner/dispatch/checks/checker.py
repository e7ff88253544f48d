"""Says what is wrong with an answer, by the conditions of the job. Pure."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

from batchrunner.core.types import Completion, Request
from batchrunner.dispatch.checks.json_check import JsonCheck, ParsedText
from batchrunner.dispatch.checks.patterns import LONGEST_S, Pattern, PatternTimeoutError
from batchrunner.input.templates import AnswerExpression
from batchrunner.job.answers import AnswerPlan
from batchrunner.job.output import CUT, PARSED, REASONING
from batchrunner.job.spec import Job


class Checked(NamedTuple):
    """An answer that was looked at."""

    completion: Completion
    """The answer, with its column `parsed` where the run has one."""
    complaint: str | None
    """What is wrong with it, in a sentence; None for nothing."""
    is_cut: bool
    """Whether it was cut at `max_new_tokens`."""


class AnswerChecker:
    """The conditions of a job."""

    def __init__(self, job: Job, plan: AnswerPlan, columns: Collection[str]) -> None:
        """Compile the conditions for rows with these columns; raises JobError."""
        self._fails_cut = plan.on_length != "keep"
        self._wants_json = plan.checks_json
        self._adds_parsed = PARSED in plan.columns
        self._json: JsonCheck | None = None
        expression = job.check.expression
        self._expression = None if expression is None else AnswerExpression(expression, columns)
        reads_parsed = self._expression is not None and self._expression.reads(PARSED)
        if self._wants_json or self._adds_parsed or reads_parsed:
            where = "check.json" if isinstance(job.check.json_, dict) else "sampling.json_schema"
            self._json = JsonCheck(plan.schema, by_row=plan.schema_by_row, where=where)
        self._schema_by_row = plan.schema_by_row
        self._pattern = None if job.check.regex is None else Pattern(job.check.regex)
        self.is_quick = (
            self._expression is None
            and (self._pattern is None or self._pattern.is_linear)
            and plan.schema is None
            and not plan.schema_by_row
        )
        """Whether a check takes no longer than reading the answer does, whatever the answer."""

    def look_at(self, request: Request, completion: Completion) -> Checked:
        """Check an answer; of several samples each must be good, and the first complaint is told."""
        first: str | None = None
        fitted: list[Any] = []
        for number, text in enumerate(completion.texts):
            parsed = self._parsed(request, text)
            fitted.append(parsed.fitted)
            complaint = self._complaint(request, completion, number, parsed)
            if first is None and complaint is not None:
                first = of_sample(complaint, number, completion)
        if self._adds_parsed:
            completion = completion._replace(columns={**completion.columns, PARSED: fitted})
        is_cut = CUT in completion.finish_reasons
        return Checked(completion, first, is_cut)

    def _parsed(self, request: Request, text: str) -> ParsedText:
        if self._json is None:
            return ParsedText(None, None, None)
        own = request.sampling.get("json_schema")
        found = self._json.parse(text, own)
        must_be_json = self._wants_json and (own is not None or not self._schema_by_row)
        return found if must_be_json else found._replace(complaint=None)

    def _complaint(
        self, request: Request, completion: Completion, number: int, parsed: ParsedText
    ) -> str | None:
        text, reason = completion.texts[number], completion.finish_reasons[number]
        if self._fails_cut and reason == CUT:
            return "the answer was cut at max_new_tokens"
        if parsed.complaint is not None:
            return parsed.complaint
        if self._pattern is not None:
            try:
                if not self._pattern.is_in(text):
                    return f"the answer has no match of check.regex {self._pattern.text!r}"
            except PatternTimeoutError:
                return f"check.regex {self._pattern.text!r} takes more than {LONGEST_S:g} s on the answer"
        if self._expression is not None:
            thoughts = completion.columns.get(REASONING)
            answer = {
                "output": text,
                PARSED: parsed.value,
                "finish_reason": reason,
                REASONING: thoughts[number] if thoughts else None,
            }
            return self._expression.complaint({**(request.row or {}), **answer})
        return None


def of_sample(complaint: str, number: int, completion: Completion) -> str:
    """Return a complaint about sample `number` of an answer; it names the sample where there are several."""
    return complaint if len(completion.texts) == 1 else f"sample {number}: {complaint}"
