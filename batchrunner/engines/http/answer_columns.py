"""What a job asks of an answer besides its text: reasoning, tool calls, token ids, probabilities. Pure."""

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec

from batchrunner.core.errors import AttemptFailedError
from batchrunner.core.types import AskedColumns
from batchrunner.engines.http.reply_shapes import (
    ChatToken,
    Choice,
    FullChoice,
    FullMeta,
    FullSample,
    Meta,
    Reason,
    Sample,
    TokenLogprob,
    ToolCall,
)
from batchrunner.job.output import IDS_TO_CONTINUE

BEGIN, END = "<think>", "</think>"
"""What models write around their reasoning, unless their template writes the first."""
TAGS = "think>"
"""What both have in common: a text without it has no reasoning."""
NO_REASONING: Mapping[str, list[Any]] = MappingProxyType({"reasoning": [None]})
_END_ON_A_LINE = re.compile(r"(?:^|\n)[ \t]*</think>[ \t]*(?:\n|$)")
"""The end of reasoning whose beginning the template wrote: a line of its own, since an answer may name it."""


class Thoughts(NamedTuple):
    """A text, parted."""

    reasoning: str | None
    """What came before the answer; None where there was nothing."""
    answer: str


def part(text: str) -> Thoughts:
    """Part a text into reasoning and answer; reasoning without an end is reasoning to the end of the text.

    As SGLang's reasoning parsers do it, the parts are stripped. A text without reasoning is left as it is.
    """
    if text.lstrip().startswith(BEGIN):
        reasoning, _, answer = text.lstrip().removeprefix(BEGIN).partition(END)
        return Thoughts(reasoning.strip() or None, answer.strip())
    end = _END_ON_A_LINE.search(text) if END in text and BEGIN not in text else None
    if end is None:
        return Thoughts(None, text)
    return Thoughts(text[: end.start()].strip() or None, text[end.end() :].strip())


def columns_of_samples(
    asked: AskedColumns, samples: Sequence[Sample | FullSample], thoughts: Sequence[Thoughts]
) -> Mapping[str, list[Any]]:
    """Return the columns of answers of `/generate`.

    Raises AttemptFailedError where a token's id or probability was asked for and did not come.
    """
    found: dict[str, list[Any]] = {}
    names = asked.names
    if "reasoning" in names:
        found["reasoning"] = [thought.reasoning for thought in thoughts]
    if "tool_calls" in names:
        found["tool_calls"] = [None] * len(samples)
    if "matched_stop" in names:
        found["matched_stop"] = [_matched(_reason_of(sample.meta_info)) for sample in samples]
    if IDS_TO_CONTINUE in names:
        found[IDS_TO_CONTINUE] = [s.output_ids if isinstance(s, FullSample) else None for s in samples]
    if asked.of_tokens:
        full = [sample for sample in samples if isinstance(sample, FullSample)]
        if "output_ids" in names:
            found["output_ids"] = [_there(sample.output_ids, "output_ids") for sample in full]
        found |= _logprobs(names, [sample.meta_info for sample in full])
    return found


def columns_of_choices(
    asked: AskedColumns,
    choices: Sequence[Choice],
    thoughts: Sequence[Thoughts],
    ids: Sequence[list[int]] | None,
) -> Mapping[str, list[Any]]:
    """Return the columns of the answers of a chat, whose token ids are `ids`; raises AttemptFailedError."""
    found: dict[str, list[Any]] = {}
    names = asked.names
    if "reasoning" in names:
        given = [choice.message.reasoning_content for choice in choices]
        found["reasoning"] = [g or t.reasoning for g, t in zip(given, thoughts, strict=True)]
    if "tool_calls" in names:
        found["tool_calls"] = [_calls(choice.message.tool_calls) for choice in choices]
    if "matched_stop" in names:
        found["matched_stop"] = [_matched(choice.matched_stop) for choice in choices]
    if asked.of_tokens:
        if "output_ids" in names:
            if ids is None or len(ids) != len(choices):
                raise _missing("output_ids")
            found["output_ids"] = [ids[choice.index or 0] for choice in choices]
        full = [choice for choice in choices if isinstance(choice, FullChoice)]
        found |= _logprobs(names, [_meta_of(choice) for choice in full])
    return found


def _reason_of(meta: Meta) -> Any:
    return meta.finish_reason.matched if isinstance(meta.finish_reason, Reason) else None


def _matched(matched: Any) -> str | None:
    return None if matched is None else _text(matched)


def _text(value: Any) -> str:
    """Return a value of JSON as text: a text as it is."""
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def _calls(calls: Any) -> list[dict[str, Any]] | None:
    """Return calls of tools in OpenAI's form, with the arguments as JSON text."""
    if not calls:
        return None
    found = []
    for call in msgspec.convert(calls, list[ToolCall]):
        named = call.function.name if call.function else None
        given = call.function.arguments if call.function else None
        arguments = None if given is None else _text(given)
        function = {"name": named, "arguments": arguments}
        found.append({"id": call.id, "type": call.type, "function": function})
    return found


def _logprobs(names: frozenset[str], metas: Sequence[FullMeta]) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    if "logprobs" in names:
        found["logprobs"] = [_tokens(_there(meta.output_token_logprobs, "logprobs")) for meta in metas]
    if "top_logprobs" in names:
        tops = [_there(meta.output_top_logprobs, "top_logprobs") for meta in metas]
        found["top_logprobs"] = [[_tokens(tokens or []) for tokens in top] for top in tops]
    if "prompt_logprobs" in names:  # all samples have the same prompt
        found["prompt_logprobs"] = [_tokens(_there(metas[0].input_token_logprobs, "prompt_logprobs"))]
    return found


def _tokens(tokens: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
    return [{"id": number, "token": text, "logprob": logprob} for logprob, number, text in tokens]


def _meta_of(choice: FullChoice) -> FullMeta:
    """Return what is known of a choice's tokens; a gateway gives it in OpenAI's form, which has no ids."""
    meta = choice.meta_info or FullMeta()
    content = choice.logprobs.content if choice.logprobs else None
    if meta.output_token_logprobs is None and content is not None:
        return FullMeta(
            output_token_logprobs=[_triple(token) for token in content],
            output_top_logprobs=[[_triple(top) for top in token.top_logprobs or []] for token in content],
        )
    return meta


def _triple(token: ChatToken) -> Any:
    return token.logprob, None, token.token


def _there(value: Any, name: str) -> Any:
    if value is None:
        raise _missing(name)
    return value


def _missing(name: str) -> AttemptFailedError:
    return AttemptFailedError(f"the answer came without {name}, which output.columns asks for")
