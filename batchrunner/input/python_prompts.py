"""Prompts that a Python function of the job makes (`prompt.python`), for many rows at a time."""

from collections.abc import Callable, Sequence
from typing import Any

from batchrunner.core.errors import RowRefusedError
from batchrunner.core.hook_pool import HookPool
from batchrunner.core.hook_protocol import HookFacts, HookResult
from batchrunner.core.types import PROMPT, Outcome, PromptKind, Request
from batchrunner.input.dataset import ColumnSource, usable_columns
from batchrunner.input.messages import ASSISTANT, conversation


def columns_given(facts: HookFacts, source: ColumnSource) -> list[str]:
    """Return the columns that a function of a row receives: those that it declares, else all usable ones.

    Raises InputError for a declared column that the input lacks, or that cannot be used.
    """
    if facts.reads is None:
        return [*usable_columns(source)]
    for name in facts.reads:
        source.field(name, where=f"{facts.where}: {facts.name}")
    return [*facts.reads]


def with_prompt(request: Request, label: str, kind: PromptKind, prompt: Any) -> Request:
    """Return the request with this prompt.

    Raises RowRefusedError, whose text begins with `label`, for an invalid conversation.
    """
    if kind != "messages":
        return request._replace(
            kind=kind, prompt=prompt, chat_template_kwargs=None, continues=False, tools=None
        )
    messages = conversation(label, prompt, continues=True)
    return request._replace(kind=kind, prompt=messages, continues=messages[-1]["role"] == ASSISTANT)


class PythonPrompts:
    """Fills in the prompts of requests. Until then, the `prompt` of a request holds its row."""

    def __init__(self, pool: HookPool, source: ColumnSource) -> None:
        """Choose the columns that the function receives; raises InputError, see `columns_given`."""
        self._pool = pool
        facts = pool.facts[PROMPT]
        self._label = f"{PROMPT}: {facts.name}"
        self.columns = columns_given(facts, source)

    def fill(
        self, items: Sequence[Request | Outcome], is_stopped: Callable[[], object]
    ) -> list[Request | Outcome]:
        """Return each request with its prompt, or an Outcome if it gets none; given outcomes stay unchanged.

        The last rows may be missing once `is_stopped` returns true. Raises HookLostError.
        """
        names = self.columns
        rows = [({n: item.prompt[n] for n in names},) for item in items if isinstance(item, Request)]
        results = iter(self._pool.call_many(PROMPT, rows, is_stopped))
        filled: list[Request | Outcome] = []
        for item in items:
            if isinstance(item, Outcome):
                filled.append(item)
                continue
            result = next(results, None)
            if result is None:
                break
            filled.append(self._filled(item, result))
        return filled

    def _filled(self, request: Request, result: HookResult) -> Request | Outcome:
        if result.error is not None or result.value is None:  # the function skips a row by None
            return Outcome.unsent(request.ref, result.error)
        try:
            return with_prompt(request, self._label, *result.value)
        except RowRefusedError as failure:
            return Outcome.unsent(request.ref, str(failure))
