"""Checks of answers against the job's conditions, and the next request after a rejected answer."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from itertools import chain, product
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import orjson
import regex

from batchrunner.core.errors import JobError, RowRefusedError
from batchrunner.core.types import CHECK, Completion, Request
from batchrunner.dispatch.queue import AnswerHistory, PendingRow
from batchrunner.dispatch.tokenize import RowTokenizer
from batchrunner.input.dataset import carried_of
from batchrunner.input.templates import AnswerExpression
from batchrunner.job.answers import AnswerPlan, of_sample
from batchrunner.job.arrow_types import fit, kind_of_schema
from batchrunner.job.output import CUT, PARSED, REASONING, REPETITION, TOOL_CALLS
from batchrunner.job.sampling import THINKING
from batchrunner.job.spec import Job
from batchrunner.output.counts import ASKED_AGAIN, AskedAgain, Rejected
from batchrunner.sglang.flags import MAX_BLANKS_FLAG, MOST_BLANKS

if TYPE_CHECKING:
    from batchrunner.core.hook_pool import HookPool

MOST_LENGTHENED = 3
"""Maximum number of retries of a truncated answer. Each retry doubles max_new_tokens."""
LONGEST_SEARCH_S = 0.2
"""Seconds after which the search for a regular expression in an answer is given up."""
KEPT_SCHEMAS = 256
"""Maximum number of compiled schemas in memory, if each row brings its own schema."""
BLANKS = rf"\s{{{MOST_BLANKS}}}"
"""`stop_regex` that ends a JSON answer which the model pads with blanks. SGLang matches it against every
output in each step, so it is sent only after an answer of the run was padded."""
PADDED = (
    "the answer was padded with blanks: JSON allows any number of blanks between values; "
    f"start the server with --{MAX_BLANKS_FLAG} {MOST_BLANKS}"
)
"""Complaint about a JSON answer that ends in nothing but blanks."""
_STOPS = {"stop", "stop_token_ids", "stop_regex"}
"""Sampling parameters that may end an answer before it matches its whole regular expression."""
LONGEST_COMPLAINT = 300
"""Maximum number of characters of an error about a JSON value or a schema; the rest is cut off."""
SEED_STEP = 1_000_003
"""Difference between the sampling seeds of two tries of a row."""
MOST_SEED = (1 << 31) - 1
"""Largest sampling seed."""


class Verdict(NamedTuple):
    """The result of a check: the answer, and its error or the row's next request."""

    completion: Completion
    error: str | None = None
    """Why the row failed; None if the answer is good, or if there is a next request."""
    next_request: Request | None = None
    """The row's next request; None if the row ends with this answer."""


class AnswerChecker:
    """Checks the answers of a run, and builds the next request of a row whose answer was rejected."""

    def __init__(
        self,
        job: Job,
        plan: AnswerPlan,
        columns: Collection[str],
        tokenizer: RowTokenizer,
        functions: HookPool | None,
    ) -> None:
        """Compile the conditions for rows with these columns; `functions` runs the job's `accept.python`."""
        self._conditions = AnswerConditions(job, plan, columns)
        self._check = job.accept
        self._tries = plan.tries
        """Maximum number of answers of a row, not counting those that are requested again with more tokens.
        """
        self._lengthens = plan.on_length == "longer"
        """Whether a truncated answer is requested again with more tokens."""
        self._tokenizer = tokenizer
        self._functions = functions if functions is not None and CHECK in functions.facts else None
        self._ends_padding = False
        """Whether the model padded a JSON answer with blanks. From then on, requests with a schema get a
        `stop_regex` against it."""
        self._thread = None if self._conditions.are_quick else ThreadPoolExecutor(1, "checks")
        """Thread for slow checks, which would block the event loop; None if all are quick."""

    def to_send(self, request: Request) -> Request:
        """Return the request as it is sent.

        Once the model has padded a JSON answer with blanks, requests with a schema get a `stop_regex` that
        ends such padding.
        """
        if self._ends_padding and request.sampling.get("json_schema") is not None:
            return _ending_padding(request)
        return request

    async def check(self, row: PendingRow, completion: Completion) -> Verdict:
        """Check an answer of a row; raises HookLostError.

        If the verdict has a next request, that request is ready to be sent.
        """
        history = row.answers = row.answers or AnswerHistory(row.request)

        # The job's Python function gets only answers that meet all other conditions of the job.
        if self._thread is None:
            answer, complaint = self._conditions.check(row.request, completion)
        else:
            loop = asyncio.get_running_loop()
            answer, complaint = await loop.run_in_executor(
                self._thread, self._conditions.check, row.request, completion
            )
        history.last = answer
        if complaint is None and self._functions is not None:
            complaint = await _python_complaint(self._functions, row.request, answer)

        if complaint is None:
            return Verdict(_with_history(history, is_good=True))
        history.rejected.append(Rejected(complaint, answer.output_tokens))
        next_request = await self._next_request(row, history, answer, complaint)
        if next_request is None:
            return Verdict(_with_history(history, is_good=False), error=complaint)
        return Verdict(answer, next_request=next_request)

    def last_answer(self, row: PendingRow) -> Completion | None:
        """Return the last answer of a row whose last attempt failed; None if the row had no answer."""
        history = row.answers
        if history is None or history.last is None:
            return None
        return _with_history(history, is_good=None)

    async def _next_request(
        self, row: PendingRow, history: AnswerHistory, answer: Completion, complaint: str
    ) -> Request | None:
        """Return the row's next request after a rejected answer; None if the row ends with this answer.

        A truncated answer is requested again with more tokens. Any other answer is requested again with
        another seed, and with the complaint in the chat if the job asks for feedback.
        """
        limit = row.request.sampling.get("max_new_tokens")
        is_padded = complaint.endswith(PADDED)  # more tokens would only bring more blanks
        self._ends_padding |= is_padded
        is_truncated = CUT in answer.finish_reasons or answer.thinking_cut
        needs_tokens = self._lengthens and is_truncated and not is_padded
        if needs_tokens and limit and history.lengthened < MOST_LENGTHENED:
            history.lengthened += 1
            sampling = {**row.request.sampling, "max_new_tokens": limit * 2}
            if answer.thinking_cut:
                sampling[THINKING] *= 2
            return row.request._replace(sampling=sampling)
        # Answers that were requested again with more tokens do not count against `accept.tries`.
        tries = len(history.rejected) - history.lengthened
        if tries >= self._tries:
            return None
        # The complaint is added to the chat as it was before its tokenization.
        original_chat = history.unencoded
        if not self._check.feedback or original_chat is None or original_chat.kind != "messages":
            return _next_try(history.first, tries)
        chat = _with_complaint(_next_try(original_chat, tries), answer, complaint)
        (request,) = await self._tokenizer.tokenize([chat])
        # If the chat is too long with the complaint, there is no next request.
        return request if isinstance(request, Request) else None


def _with_history(history: AnswerHistory, *, is_good: bool | None) -> Completion:
    """Return the last answer of a row, with a summary of all answers unless the first one was good.

    `is_good` is None if the row's last attempt had no answer that could be checked.
    """
    assert history.last is not None
    # Requests of the row: one for each rejected answer, and one more if the last answer was not rejected.
    asks = len(history.rejected) + (is_good is not False)
    if asks == 1 and is_good:
        return history.last
    totals = AskedAgain(asks, tuple(history.rejected), is_good, history.last.prompt_tokens or 0)
    return history.last._replace(columns={**history.last.columns, ASKED_AGAIN: [totals]})


async def _python_complaint(functions: HookPool, request: Request, completion: Completion) -> str | None:
    """Return the complaint of the job's Python function about an answer, or its error; else None.

    The function (`accept.python`) returns True for a good answer, and otherwise False or a complaint.
    """
    facts = functions.facts[CHECK]
    row = (carried_of(request.ref),) if facts.takes_row else ()
    for number, text in enumerate(completion.texts):
        try:
            verdict: bool | str = await functions.call(CHECK, text, *row)
        except RowRefusedError as failure:
            verdict = str(failure)
        if verdict is not True:
            return of_sample(verdict or f"{CHECK} {facts.name} rejected the answer", number, completion)
    return None


class AnswerConditions:
    """The job's conditions on an answer, except its Python function. Checking them has no side effects."""

    def __init__(self, job: Job, plan: AnswerPlan, columns: Collection[str]) -> None:
        """Compile the conditions for rows with these columns; raises JobError."""
        accept = job.accept
        self._fails_truncated = plan.on_length != "keep"
        """Whether an answer may fail because it was truncated at `max_new_tokens`."""
        self._fails_cut_thinking = job.on_length in {"fail", "longer"}
        """Whether an answer fails if its thinking was truncated. The job itself must say so: the default of
        `on_length` in the plan concerns only the answer."""
        self._fails_repetition = plan.on_repetition == "fail" or (
            # An answer that was stopped by default would otherwise have been truncated, and failed for that.
            plan.on_repetition == "auto" and job.on_length in {"fail", "longer"}
        )
        """Whether an answer fails if it repeats itself without end."""
        self._only_with_schema = job.on_length is None
        """Whether a truncated answer fails only if its request has a schema. This is so if the job sets no
        `on_length`."""
        self._wants_json = plan.checks_json
        self._adds_parsed = PARSED in plan.columns
        self._expression = None if accept.expression is None else AnswerExpression(accept.expression, columns)
        reads_parsed = self._expression is not None and self._expression.reads(PARSED)
        self._parses = self._wants_json or self._adds_parsed or reads_parsed
        """Whether answers are parsed as JSON, for a check or for the column `parsed`."""
        self._by_row = plan.schema_by_row
        """Whether each row may bring its own schema."""
        self._always_json = accept.json_ is True
        """Whether answers must be JSON even if the row has no schema."""
        self._validator = None
        if self._parses and plan.schema is not None:
            field = "accept.json" if isinstance(accept.json_, dict) else "sampling.json_schema"
            self._validator = _validator({**plan.schema}, field)
        self._kind = kind_of_schema(plan.schema)
        self._pattern = accept.regex
        conditions = (self._expression, self._pattern, plan.schema, job.sampling.regex)
        self.are_quick = not self._by_row and all(condition is None for condition in conditions)
        """Whether every check is quick: there is no expression, no regular expression and no schema."""

    def check(self, request: Request, completion: Completion) -> tuple[Completion, str | None]:
        """Return the answer (with its column `parsed`, if the run has one), and a complaint or None.

        If the answer has several completions, all of them must be good; the first complaint is returned.
        """
        first_complaint: str | None = None
        parsed_values: list[Any] = []
        # All completions are parsed for the column `parsed`. After the first complaint, no more are checked.
        for number, text in enumerate(completion.texts):
            value, column_value, json_error = None, None, None
            if self._parses:
                value, column_value, json_error = self._parse(request, text)
            parsed_values.append(column_value)
            if first_complaint is None:
                complaint = self._complaint(request, completion, number, value=value, json_error=json_error)
                if complaint is not None:
                    first_complaint = of_sample(complaint, number, completion)
        if self._adds_parsed:
            completion = completion._replace(columns={**completion.columns, PARSED: parsed_values})
        return completion, first_complaint

    def _complaint(
        self, request: Request, completion: Completion, number: int, *, value: Any, json_error: str | None
    ) -> str | None:
        """Return a complaint about completion `number` of an answer, or None.

        `value` is its JSON value, and `json_error` the reason why it is not as requested.
        """
        return (
            self._ending_complaint(request, completion, number, json_error=json_error)
            or self._regex_complaint(request, completion, number)
            or self._expression_complaint(request, completion, number, value=value)
        )

    def _ending_complaint(
        self, request: Request, completion: Completion, number: int, *, json_error: str | None
    ) -> str | None:
        """Return a complaint about how an answer ended, or about its JSON; None if it is good.

        A truncated or endless answer is rarely valid JSON. So the complaint names how it ended, which is the
        cause, rather than `json_error`.
        """
        reason = completion.finish_reasons[number]
        # If each row may bring its own schema, a row without one has only the checks that apply to all rows.
        has_schema = not self._by_row or request.sampling.get("json_schema") is not None
        is_bad_json = json_error is not None and self._wants_json and (has_schema or self._always_json)
        must_be_whole = self._fails_truncated and (has_schema or not self._only_with_schema)
        # Complete JSON may also end at the limit. Then it counts as truncated only if the job says so.
        is_truncated = reason == CUT and (is_bad_json or must_be_whole)
        may_be_padded = self._wants_json and (is_bad_json or is_truncated)
        if may_be_padded and _is_padded(request, completion.texts[number], reason):
            return PADDED
        if is_truncated:
            return "the answer was truncated at max_new_tokens"
        if reason == REPETITION and (is_bad_json or self._fails_repetition):
            return "the answer repeats itself without end"
        if completion.thinking_cut and self._fails_cut_thinking:
            return f"the thinking was truncated at {THINKING}"
        return json_error if is_bad_json else None

    def _expression_complaint(
        self, request: Request, completion: Completion, number: int, *, value: Any
    ) -> str | None:
        """Return a complaint if an answer fails `accept.expression`, else None."""
        if self._expression is None:
            return None
        thoughts = completion.columns.get(REASONING)
        answer = {
            "output": completion.texts[number],
            PARSED: value,
            "finish_reason": completion.finish_reasons[number],
            REASONING: thoughts[number] if thoughts else None,
        }
        return self._expression.complaint({**(request.row or {}), **answer})

    def _regex_complaint(self, request: Request, completion: Completion, number: int) -> str | None:
        """Return a complaint if the answer does not match a regular expression of the job, else None."""
        pattern = request.sampling.get("regex")
        if pattern and not _may_follow(pattern, request, completion, number):
            return f"the answer does not match sampling.regex {pattern!r}: the server seems to ignore it"
        if self._pattern is None:
            return None
        text = completion.texts[number]
        try:
            if regex.search(self._pattern, text, timeout=LONGEST_SEARCH_S, concurrent=True):
                return None
        except TimeoutError:
            return f"accept.regex {self._pattern!r} takes more than {LONGEST_SEARCH_S:g} s on the answer"
        return f"the answer has no match of accept.regex {self._pattern!r}"

    def _parse(self, request: Request, text: str) -> tuple[Any, Any, str | None]:
        """Return an answer's JSON value, its value in the column `parsed`, and a complaint or None."""
        try:
            value = msgspec.json.decode(text)
        except (msgspec.MsgspecError, RecursionError) as failure:
            why = "a code fence (```) surrounds it" if "```" in text else _short(str(failure))
            return None, None, f"the answer is not JSON: {why}"
        try:
            validator = self._validator_for(request)
            error = None if validator is None else next(validator.iter_errors(value), None)
        except JobError as failure:
            return value, None, str(failure)
        except Exception as failure:  # noqa: BLE001 - a schema may fail on a value in any way
            return value, None, f"the answer cannot be checked against its schema ({type(failure).__name__})"
        if error is not None:
            return value, None, f"the answer does not satisfy its schema: {_with_path(error)}"
        try:
            return value, fit(value, self._kind), None
        except ValueError as failure:
            return value, None, f"the answer does not fit the column `parsed`: {_short(str(failure))}"

    def _validator_for(self, request: Request) -> Any:
        """Return the validator of the row's own schema, or of the job's; None without a schema."""
        row_schema = request.sampling.get("json_schema")
        if not self._by_row or row_schema is None:
            return self._validator
        is_text = isinstance(row_schema, str)
        return _validator_of_text(row_schema if is_text else orjson.dumps(row_schema).decode())


def _may_follow(pattern: str, request: Request, completion: Completion, number: int) -> bool:
    """Tell whether an answer may match the regular expression of its request.

    The check is lenient, because the engine may read the expression differently than Python: a dot matches a
    line end too, word characters are either ASCII or of all scripts, and an expression that Python cannot
    parse allows any answer. A tokenizer may have dropped a space at the beginning. If the answer was
    truncated or stopped, the beginning of a match is enough.
    """
    calls = completion.columns.get(TOOL_CALLS)
    if calls and calls[number]:  # the text is only what is left without the tool calls
        return True
    text = completion.texts[number]
    is_whole = completion.finish_reasons[number] == "stop" and _STOPS.isdisjoint(request.sampling)
    variants = product((text, f" {text}"), (regex.DOTALL, regex.DOTALL | regex.ASCII))
    try:
        return any(
            regex.fullmatch(
                pattern, answer, flags, partial=not is_whole, timeout=LONGEST_SEARCH_S, concurrent=True
            )
            for answer, flags in variants
        )
    except (regex.error, TimeoutError):
        return True


def _validator(schema: dict[str, Any], field: str) -> Any:
    """Compile a schema; raises JobError, which names its `field`, if the schema is invalid.

    The validator limits backtracking in the schema's patterns, and fetches no other schemas.
    """
    import jsonschema_rs  # noqa: PLC0415 - only for jobs with a schema

    try:
        return jsonschema_rs.validator_for(schema, offline=True)
    except ValueError as failure:
        error: Any = failure
        while branches := getattr(getattr(error, "kind", None), "context", None):
            # No alternative of the schema fits. Report the one with the deepest error, which was probably
            # meant.
            error = max(chain(*branches), key=lambda branch_error: len(branch_error.instance_path))
        problem = f"not a JSON Schema that answers can be checked against: {_with_path(error)}"
        raise JobError(f"{field}: {problem}") from None


@lru_cache(KEPT_SCHEMAS)
def _validator_of_text(schema: str) -> Any:
    """Compile a row's own schema, given as JSON text; raises JobError."""
    try:
        return _validator(orjson.loads(schema), "the row's json_schema")
    except orjson.JSONDecodeError:
        raise JobError("the row's json_schema is not JSON") from None


def _with_path(failure: Any) -> str:
    """Return the error of a JSON value or a schema, after the path to the wrong value."""
    path = "".join(f"[{step!r}]" for step in getattr(failure, "instance_path", ()))
    return f"{path} {_short(getattr(failure, 'message', str(failure)))}".lstrip()


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= LONGEST_COMPLAINT else line[: LONGEST_COMPLAINT - 1] + "…"


RISING = (0.4, 0.8)
"""Minimum temperature of a row's second try, and of its later tries. At temperature 0 every try would give
the same answer."""


def _is_padded(request: Request, text: str, reason: str | None) -> bool:
    """Tell whether a JSON answer was truncated or stopped while the model padded it with blanks."""
    if reason == CUT:
        return len(text) - len(text.rstrip()) >= MOST_BLANKS
    # SGLang keeps the text that a `stop_regex` matched. The last token may have a few characters more.
    stops_at_blanks = reason == "stop" and BLANKS in (request.sampling.get("stop_regex") or ())
    return stops_at_blanks and re.search(BLANKS, text[-2 * MOST_BLANKS :]) is not None


def _ending_padding(request: Request) -> Request:
    """Return the request with a `stop_regex` that ends padding with blanks."""
    stops = request.sampling.get("stop_regex") or []
    stops = [stops] if isinstance(stops, str) else stops
    if BLANKS in stops:
        return request
    return request._replace(sampling={**request.sampling, "stop_regex": [*stops, BLANKS]})


def _next_try(first: Request, number: int) -> Request:
    """Return retry `number` (from 1) of a row: its first request with another seed and temperature."""
    sampling = {**first.sampling}
    seed = sampling.get("sampling_seed") or 0
    sampling["sampling_seed"] = (seed + number * SEED_STEP) & MOST_SEED
    if "temperature" in sampling:
        sampling["temperature"] = max(sampling["temperature"], RISING[min(number, len(RISING)) - 1])
    return first._replace(sampling=sampling)


def _with_complaint(request: Request, answer: Completion, complaint: str) -> Request:
    """Return the request with the model's answer and a complaint added to its chat.

    Tool calls are written as text, because chat templates expect a result after a real call.
    """
    messages: list[dict[str, Any]] = list(request.prompt)
    calls = answer.columns.get(TOOL_CALLS, [None])[0] or []
    calls_as_text = (json.dumps(call["function"], ensure_ascii=False) for call in calls)
    text = "\n".join(filter(None, (answer.texts[0], *calls_as_text)))
    if messages and messages[-1]["role"] == "assistant":  # the prompt already begins the answer
        text = f"{messages.pop()['content']}{text}"
    messages += [
        {"role": "assistant", "content": text},
        {"role": "user", "content": f"This answer is not good: {complaint}. Answer again."},
    ]
    return request._replace(prompt=messages)
