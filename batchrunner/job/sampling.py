"""Section `sampling` of a job: SGLang's sampling parameters, fixed or from a column."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

from pydantic import AfterValidator, Field, field_validator, model_validator

from batchrunner.job.fields import Spec


class FromColumn(Spec):
    """Value from an input column, which may differ between rows."""

    column: str
    """Input column with the values. A null means the default."""


Value = TypeVar("Value")
PerRow: TypeAlias = Value | FromColumn
"""A value for all rows, or the name of a column with the value of each row."""
GRAMMARS = ("json_schema", "regex", "ebnf", "structural_tag")
"""Sampling parameters that constrain an output to a grammar. A job may set only one of them."""
THINKING = "max_thinking_tokens"
"""Sampling parameter that limits the number of thinking tokens."""

ToolChoice: TypeAlias = Literal["auto", "none", "required"] | dict[str, Any]
"""Values of `tool_choice` in OpenAI's chat format."""


def check_regex(pattern: Any) -> Any:
    r"""Return a regular expression unchanged; raise ValueError if it is invalid.

    `\p{…}` and `(?<name>…)` count as valid: the engine supports them, although Python does not.
    """
    try:
        if isinstance(pattern, str):
            re.compile(pattern)
    except re.error as failure:
        if not failure.msg.startswith(("bad escape", "unknown extension")):
            raise ValueError(f"not a regular expression: {failure}") from None
    return pattern


class SamplingSpec(Spec):
    """SGLang's sampling parameters, by SGLang's names. Most accept `{column: NAME}` instead of a value."""

    max_new_tokens: PerRow[Annotated[int, Field(ge=1)]] = 1024
    """Maximum number of tokens of an output (SGLang's own default is 128)."""
    min_new_tokens: PerRow[Annotated[int, Field(ge=0)]] | None = None
    """Minimum number of tokens of an output."""
    max_thinking_tokens: PerRow[Annotated[int, Field(ge=0)]] | None = None
    """Maximum number of thinking tokens, after which the model must answer. Thinking tokens also count
    towards `max_new_tokens`. The limit needs a server with `--reasoning-parser` and
    `--enable-strict-thinking`. Servers that the run starts get these flags."""
    n: Annotated[int, Field(ge=1)] = 1
    """Number of completions of a row. Above 1, `output`, `finish_reason` and `completion_tokens` are
    lists."""
    temperature: PerRow[Annotated[float, Field(ge=0)]] | None = None
    """Sampling temperature. 0 is greedy decoding. Unset: the engine's default."""
    top_p: PerRow[Annotated[float, Field(gt=0, le=1)]] | None = None
    """Sample only from the smallest set of likeliest tokens whose total probability is at least this."""
    top_k: PerRow[Literal[-1] | Annotated[int, Field(ge=1)]] | None = None
    """Sample only from the k likeliest tokens. -1 means all tokens."""
    min_p: PerRow[Annotated[float, Field(ge=0, le=1)]] | None = None
    """Sample only from tokens that have at least this fraction of the likeliest token's probability."""
    frequency_penalty: PerRow[Annotated[float, Field(ge=-2, le=2)]] | None = None
    """Penalty on a token for each time that the token was generated before."""
    presence_penalty: PerRow[Annotated[float, Field(ge=-2, le=2)]] | None = None
    """Penalty on each token that was generated before."""
    repetition_penalty: PerRow[Annotated[float, Field(gt=0, le=2)]] | None = None
    """Factor that makes tokens of the prompt and the output less likely to be repeated. 1 has no effect."""
    stop: PerRow[str | Annotated[list[str], Field(max_length=32)]] | None = None
    """Texts that end the output."""
    stop_token_ids: PerRow[list[int]] | None = None
    """Token ids that end the output."""
    stop_regex: PerRow[str | Annotated[list[str], Field(max_length=32)]] | None = None
    """Regular expressions that end the output."""
    no_stop_trim: bool | None = None
    """Keep the stop text in the output."""
    ignore_eos: PerRow[bool] | None = None
    """Continue past the model's end token, up to `max_new_tokens`."""
    skip_special_tokens: bool | None = None
    """Leave special tokens out of the output."""
    spaces_between_special_tokens: bool | None = None
    """Put spaces between special tokens."""
    sampling_seed: PerRow[int] | None = None
    """Seed of sampling. It needs SGLang's `--enable-deterministic-inference`."""
    json_schema: PerRow[dict[str, Any] | str] | None = None
    """JSON Schema to which the output is constrained."""
    regex: Annotated[PerRow[str] | None, AfterValidator(check_regex)] = None
    """Regular expression to which the output is constrained."""
    ebnf: PerRow[str] | None = None
    """EBNF grammar to which the output is constrained."""
    structural_tag: PerRow[str] | None = None
    """SGLang's structural tag as JSON text, a grammar for parts of the output."""
    logit_bias: dict[Annotated[str, Field(pattern=r"^\d+$")], float] | None = None
    """Number to add to the logit of a token, by token id."""
    custom_params: dict[str, Any] | None = None
    """Parameters of a custom logit processor of the engine."""
    tool_choice: ToolChoice | None = None
    """Whether the model of a chat calls one of `prompt.tools`. `{type: function, function: {name: NAME}}`
    demands a call of the tool NAME. Unset: `auto`."""
    lora_path: PerRow[str] | None = None
    """Name of a LoRA adapter that is loaded in the engine."""

    @field_validator("json_schema", mode="before")
    @classmethod
    def _column_before_schema(cls, value: object) -> object:
        # {column: NAME} is a mapping, so pydantic would take it for a JSON Schema.
        if isinstance(value, Mapping) and set(value) == {"column"}:
            return FromColumn(column=str(value["column"]))
        return _schema_of_text(value) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _fit_together(self) -> SamplingSpec:
        """Raise ValueError for parameters that contradict each other."""
        least, most = self.min_new_tokens, self.max_new_tokens
        # A value from a column is not known yet.
        if isinstance(least, int) and isinstance(most, int) and least > most:
            raise ValueError(f"min_new_tokens ({least}) exceeds max_new_tokens ({most})")
        grammars = [name for name in GRAMMARS if getattr(self, name) is not None]
        if len(grammars) > 1:
            raise ValueError(f"give only one of {', '.join(grammars)}: an output follows one grammar")
        if grammars and self.tool_choice not in {None, "auto", "none"}:
            raise ValueError(
                f"{grammars[0]} cannot be combined with a tool_choice that demands a tool call: leave one out"
            )
        return self


def _schema_of_text(text: str) -> dict[str, Any]:
    """Return the JSON Schema in a JSON text; raise ValueError if there is none."""
    try:
        schema = json.loads(text)
    except ValueError as failure:
        raise ValueError(f"not JSON: {failure}") from None
    if not isinstance(schema, dict):
        raise ValueError("a JSON Schema must be a JSON object")  # noqa: TRY004 - pydantic takes ValueError only
    return schema
