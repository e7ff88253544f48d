"""The parts of SGLang's replies that are read: the rest is skipped without being made into Python values.

The shapes whose names begin with `Full` also have what a job may ask for, token by token.
"""

from typing import Annotated, Any

import msgspec

MOST_COUNT = (1 << 31) - 1
"""Largest count of tokens, and largest token id: the columns of the results have 32 bits."""
REASON_CHARACTERS = 100
"""Most characters of a finish reason; SGLang's have ten."""

Count = Annotated[int, msgspec.Meta(ge=0, le=MOST_COUNT)]
Word = Annotated[str, msgspec.Meta(max_length=REASON_CHARACTERS)]
TokenLogprob = tuple[float | None, Count, str | None]
"""A token: the logarithm of its probability, its id and its text."""


class Reason(msgspec.Struct):
    """Why an output ended."""

    type: Word
    matched: Any = None
    message: Any = None
    status_code: Any = None


class Meta(msgspec.Struct):
    """The `meta_info` of a sample."""

    finish_reason: Reason | Word | None = None
    prompt_tokens: Count | None = None
    completion_tokens: Count | None = None
    cached_tokens: Count | None = None
    num_retractions: Count | None = None
    weight_version: Any = None


class FullMeta(Meta):
    """A Meta with what is known of each token."""

    output_token_logprobs: list[TokenLogprob] | None = None
    output_top_logprobs: list[list[TokenLogprob] | None] | None = None
    input_token_logprobs: list[TokenLogprob] | None = None


class Sample(msgspec.Struct):
    """An answer of `/generate`."""

    text: str
    meta_info: Meta


class EndOfRow(Sample):
    """The event with which a row of a bundle ends: a sample with the row's index."""

    index: int
    error: None = None


class FullSample(msgspec.Struct):
    """A Sample with its tokens."""

    text: str
    meta_info: FullMeta
    output_ids: list[Count] | None = None


class IdsSample(msgspec.Struct):
    """An answer of a server without a tokenizer."""

    output_ids: list[Count]
    meta_info: FullMeta


class Function(msgspec.Struct):
    """The function that a model calls."""

    name: str | None = None
    arguments: Any = None


class ToolCall(msgspec.Struct):
    """A call of a tool."""

    id: str | None = None
    type: str | None = None
    function: Function | None = None


class Message(msgspec.Struct):
    """The answer of a chat."""

    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: Any = None

    @property
    def has_more(self) -> bool:
        """Whether there is an answer besides the text: thoughts, or calls of tools."""
        return bool(self.reasoning_content or self.tool_calls)


class Choice(msgspec.Struct):
    """A sample of a chat."""

    message: Message
    index: int | None = None
    finish_reason: Word | None = None
    meta_info: Meta | None = None
    matched_stop: Any = None


class ChatToken(msgspec.Struct):
    """A token of a chat in OpenAI's form, which has no ids."""

    token: str | None = None
    logprob: float | None = None
    top_logprobs: list["ChatToken"] | None = None


class ChatLogprobs(msgspec.Struct):
    """The tokens of a chat."""

    content: list[ChatToken] | None = None


class FullChoice(Choice):
    """A Choice with what is known of each token."""

    meta_info: FullMeta | None = None
    logprobs: ChatLogprobs | None = None


class CachedTokens(msgspec.Struct):
    """The details of a chat's prompt."""

    cached_tokens: Count | None = None


class Usage(msgspec.Struct):
    """The counts of a chat."""

    prompt_tokens: Count | None = None
    completion_tokens: Count | None = None
    prompt_tokens_details: CachedTokens | None = None


class ChatReply(msgspec.Struct):
    """The answer to a chat."""

    choices: Annotated[list[Choice], msgspec.Meta(min_length=1)]
    usage: Usage


class ChatTokens(msgspec.Struct):
    """What SGLang adds to a chat."""

    output_ids: list[list[Count]] | None = None


class FullChatReply(msgspec.Struct):
    """A ChatReply with its tokens."""

    choices: Annotated[list[FullChoice], msgspec.Meta(min_length=1)]
    usage: Usage
    sglext: ChatTokens | None = None


class TokensReply(msgspec.Struct):
    """The answer of `/v1/tokenize`."""

    tokens: list[Count]


GenerateReply = Sample | Annotated[list[Sample], msgspec.Meta(min_length=1)]
FullGenerateReply = FullSample | Annotated[list[FullSample], msgspec.Meta(min_length=1)]
IdsReply = IdsSample | Annotated[list[IdsSample], msgspec.Meta(min_length=1)]
read_chat = msgspec.json.Decoder(ChatReply)
read_full_chat = msgspec.json.Decoder(FullChatReply)
read_generate = msgspec.json.Decoder(GenerateReply)
read_full_generate = msgspec.json.Decoder(FullGenerateReply)
read_end_of_row = msgspec.json.Decoder(EndOfRow)
read_ids = msgspec.json.Decoder(IdsReply)
read_tokens = msgspec.json.Decoder(TokensReply)
