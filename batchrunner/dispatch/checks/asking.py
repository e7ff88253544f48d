"""What is asked of the engine after an answer that is not good. Pure."""

import json
from typing import Any

from batchrunner.core.types import Completion, Request
from batchrunner.job.output import IDS_TO_CONTINUE, REASONING, TOOL_CALLS
from batchrunner.job.sampling import GRAMMARS
from batchrunner.job.spec import CheckSpec
from batchrunner.output.columns import OF_THE_PROMPT

SEED_STEP = 1_000_003
"""Difference between the seeds of two tries of a row."""
MOST_SEED = (1 << 31) - 1


def next_try(first: Request, check: CheckSpec, number: int) -> Request:
    """Return try `number` of a row, from 1 on: its first request with another seed and temperature."""
    sampling = {**first.sampling}
    seed = sampling.get("sampling_seed") or 0
    sampling["sampling_seed"] = (seed + number * SEED_STEP) & MOST_SEED
    temperature = check.temperature_of(number, sampling.get("temperature"))
    if temperature is not None:
        sampling["temperature"] = temperature
    return first._replace(sampling=sampling)


def with_complaint(request: Request, answer: Completion, complaint: str) -> Request:
    """Return a chat in which the model's answer is followed by what is wrong with it.

    Calls of tools stand there as text: chat templates want their results behind calls.
    """
    messages: list[dict[str, Any]] = list(request.prompt)
    text = "\n".join(filter(None, (answer.texts[0], _calls_in(answer))))
    if messages and messages[-1]["role"] == "assistant":  # the beginning of the answer
        text = f"{messages.pop()['content']}{text}"
    messages += [
        {"role": "assistant", "content": text},
        {"role": "user", "content": f"This answer is not good: {complaint}. Answer again."},
    ]
    return request._replace(prompt=messages)


def _calls_in(answer: Completion) -> str:
    """Return the calls of tools in an answer, as a line of JSON each."""
    calls = answer.columns.get(TOOL_CALLS, [None])[0] or []
    return "\n".join(json.dumps(call["function"], ensure_ascii=False) for call in calls)


def with_more_tokens(request: Request, times: int) -> Request | None:
    """Return a request with so many times the tokens; None where it has no limit."""
    most = request.sampling.get("max_new_tokens")
    if not most:
        return None
    return request._replace(sampling={**request.sampling, "max_new_tokens": most * times})


def continued(request: Request, answer: Completion) -> Request | None:
    """Return the request for the rest of an answer that was cut; None where it can only be asked for anew.

    A grammar would begin anew with the rest, and so would a call of a tool that the model has to make.
    Reasoning that was cut, or a call, is no beginning of a text. What came has `min_new_tokens` already.
    """
    others = (answer.columns.get(name, [None])[0] for name in (REASONING, TOOL_CALLS))
    has_grammar = any(request.sampling.get(name) for name in GRAMMARS)
    if any(others) or has_grammar or (request.tools is not None and request.tools.must_be_called):
        return None
    sampling = {name: value for name, value in request.sampling.items() if name != "min_new_tokens"}
    request = request._replace(sampling=sampling)
    text = answer.texts[0]
    if request.kind == "text":
        return request._replace(prompt=request.prompt + text)
    if request.kind == "input_ids":
        ids = answer.columns.get(IDS_TO_CONTINUE)
        return request._replace(prompt=[*request.prompt, *ids[0]]) if ids and ids[0] else None
    messages: list[dict[str, Any]] = list(request.prompt)
    if messages and messages[-1]["role"] == "assistant" and request.continues:
        last = messages.pop()
        text = f"{last['content']}{text}"
    if not text:
        return None
    messages.append({"role": "assistant", "content": text})
    return request._replace(prompt=messages, continues=True)


def joined(first: Completion, rest: Completion) -> Completion:
    """Return an answer and its continuation as one.

    Where the rest ends reasoning, all that came before was reasoning too: its beginning may be in the prompt.
    """
    begun, thoughts = first.texts[0], rest.columns.get(REASONING)
    columns = {name: _joined(first.columns.get(name), values) for name, values in rest.columns.items()}
    columns |= {name: first.columns[name] for name in OF_THE_PROMPT if name in first.columns}
    if thoughts and thoughts[0]:
        columns[REASONING] = [begun + thoughts[0]]
        begun = ""
    return rest._replace(
        texts=[begun + rest.texts[0]],
        completion_tokens=[first.output_tokens + rest.output_tokens],
        prompt_tokens=first.prompt_tokens,
        cached_tokens=first.cached_tokens,
        retractions=first.retractions + rest.retractions,
        columns=columns,
    )


def _joined(before: list[Any] | None, after: list[Any]) -> list[Any]:
    """Return lists one after the other; of other values the last one that there is."""
    if not before or before[0] is None:
        return after
    if after[0] is None:
        return before
    return [before[0] + after[0]] if isinstance(after[0], list) else after
