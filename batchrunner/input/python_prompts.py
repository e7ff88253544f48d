"""Calls the job's Python function `prompt.python`, which makes prompts, for many rows at a time."""

from collections.abc import Callable, Sequence
from typing import Any

from batchrunner.core.errors import RowRefusedError
from batchrunner.core.hook_pool import HookPool
from batchrunner.core.hook_protocol import HookFacts, HookResult
from batchrunner.core.types import PROMPT, Outcome, PromptKind, Request
from batchrunner.input.dataset import ColumnSource, usable_columns
from batchrunner.input.messages import ASSISTANT, conversation


def columns_given(facts: HookFacts, source: ColumnSource) -> list[str]:
    """Return the columns that a Python function of a row receives: those that it declares, else all.

    Columns that a job cannot use are left out. Raises InputError for a declared column that the input lacks
    or that a job cannot use.
    """
    if facts.reads is None:
        return [*usable_columns(source)]
    # `field` raises for a column that is missing or unusable.
    for name in facts.reads:
        source.field(name, where=f"{facts.where}: {facts.name}")
    return [*facts.reads]


def with_prompt(request: Request, label: str, kind: PromptKind, prompt: Any) -> Request:
    """Return a request with `prompt` in place of its prompt; `kind` is the kind of the new prompt.

    Raises RowRefusedError, whose text begins with `label`, for an invalid conversation.
    """
    if kind != "messages":
        # Clear the fields that only a chat can have.
        return request._replace(
            kind=kind, prompt=prompt, chat_template_kwargs=None, continues=False, tools=None
        )
    # An assistant message at the end is kept, because the function puts it there for the model to continue.
    messages = conversation(label, prompt, continues=True)
    return request._replace(kind=kind, prompt=messages, continues=messages[-1]["role"] == ASSISTANT)


class PythonPrompts:
    """Fills in the prompts of requests with the job's Python function `prompt.python`.

    Until then, the field `prompt` of a request holds the row that the function receives.
    """

    def __init__(self, pool: HookPool, source: ColumnSource) -> None:
        """Choose the columns that the function receives; raise InputError for an unusable column."""
        self._pool = pool
        facts = pool.facts[PROMPT]
        self._label = f"{PROMPT}: {facts.name}"
        self.columns = columns_given(facts, source)

    def fill(
        self, items: Sequence[Request | Outcome], is_stopped: Callable[[], object]
    ) -> list[Request | Outcome]:
        """Return each request with its prompt, or an Outcome if the function makes no prompt.

        An Outcome among `items` stays unchanged. The last rows may be missing once `is_stopped` returns true.
        Raises HookLostError.
        """
        requests = [item for item in items if isinstance(item, Request)]
        arguments = [({name: request.prompt[name] for name in self.columns},) for request in requests]
        results = iter(self._pool.call_many(PROMPT, arguments, is_stopped))
        items_with_prompts: list[Request | Outcome] = []
        for item in items:
            if isinstance(item, Outcome):
                items_with_prompts.append(item)
                continue
            result = next(results, None)
            if result is None:
                # `is_stopped` returned true, so there are no further results.
                break
            items_with_prompts.append(self._with_result(item, result))
        return items_with_prompts

    def _with_result(self, request: Request, result: HookResult) -> Request | Outcome:
        """Return a request with the prompt that the function returned, or the Outcome of its row."""
        if result.error is not None or result.value is None:
            # A function returns None to leave a row out.
            return Outcome.unsent(request.ref, result.error)
        try:
            # The value is a pair: the kind of the prompt, and the prompt.
            return with_prompt(request, self._label, *result.value)
        except RowRefusedError as failure:
            return Outcome.unsent(request.ref, str(failure))
