"""Makes prompts with the job's Python function `prompt.python`, for many rows at a time."""

from collections.abc import Callable, Sequence
from typing import Any

from batchrunner.core.errors import RowRefusedError
from batchrunner.core.hook_pool import HookPool
from batchrunner.core.hook_protocol import HookFacts, HookResult
from batchrunner.core.types import PROMPT, Outcome, PromptKind, Request
from batchrunner.input.dataset import ColumnSource, usable_columns
from batchrunner.input.messages import ASSISTANT, conversation


def columns_given(facts: HookFacts, source: ColumnSource) -> list[str]:
    """Return the columns that a Python function of a row receives: the declared ones, or all usable ones.

    Raises InputError if a declared column is missing or unusable.
    """
    if facts.reads is None:
        return [*usable_columns(source)]
    # `field` raises InputError for a missing or unusable column.
    for name in facts.reads:
        source.field(name, where=f"{facts.where}: {facts.name}")
    return [*facts.reads]


def with_prompt(request: Request, label: str, kind: PromptKind, prompt: Any) -> Request:
    """Return a copy of a request with another prompt; `kind` is the kind of the prompt.

    Raises RowRefusedError, whose text begins with `label`, for an invalid conversation.
    """
    if kind != "messages":
        # Only chats have these fields.
        return request._replace(
            kind=kind, prompt=prompt, chat_template_kwargs=None, continues=False, tools=None
        )
    # An assistant message at the end is kept: the model continues it.
    messages = conversation(label, prompt, continues=True)
    return request._replace(kind=kind, prompt=messages, continues=messages[-1]["role"] == ASSISTANT)


class PythonPrompts:
    """Makes the prompts of requests with the job's Python function `prompt.python`.

    Before that, the field `prompt` of a request holds the whole row.
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
        """Return each request with its prompt, or an Outcome if the function returned None or failed.

        An Outcome among `items` is returned unchanged. Once `is_stopped` returns true, the remaining rows are
        left out. Raises HookLostError.
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
                # Results end early if `is_stopped` returned true.
                break
            items_with_prompts.append(self._with_result(item, result))
        return items_with_prompts

    def _with_result(self, request: Request, result: HookResult) -> Request | Outcome:
        """Return a request with the prompt that the function returned, or the Outcome of its row."""
        if result.error is not None or result.value is None:
            # The function returned None or failed.
            return Outcome.unsent(request.ref, result.error)
        try:
            # The value is a pair of the prompt's kind and the prompt.
            return with_prompt(request, self._label, *result.value)
        except RowRefusedError as failure:
            return Outcome.unsent(request.ref, str(failure))
