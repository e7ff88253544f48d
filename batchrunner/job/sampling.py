"""The section `sampling` of a job: SGLang's sampling parameters, fixed or from a column."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

from pydantic import AfterValidator, Field, field_validator, model_validator

from batchrunner.job.fields import Spec


class FromColumn(Spec):
    """A value from a column, which may differ from row to row."""

    column: str
    """Input column with the values; a null means the default."""


Value = TypeVar("Value")
PerRow: TypeAlias = Value | FromColumn
GRAMMARS = ("json_schema", "regex", "ebnf", "structural_tag")
"""Parameters that constrain an output to a grammar, of which a job may give one."""


ToolChoice: TypeAlias = Literal["auto", "none", "required"] | dict[str, Any]


def check_regex(pattern: Any) -> Any:
    r"""Return a pattern; raises ValueError if it is invalid.

    `\p{…}` and `(?<name>…)`, which only the engine's dialect knows, are valid.
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
    n: Annotated[int, Field(ge=1)] = 1
    """Number of completions of a row. Above 1, `output`, `finish_reason` and `completion_tokens` are
    lists."""
    temperature: PerRow[Annotated[float, Field(ge=0)]] | None = None
    """0 is greedy decoding. Unset: the engine's default."""
    top_p: PerRow[Annotated[float, Field(gt=0, le=1)]] | None = None
    """Sample only from the likeliest tokens, as many as have this total probability."""
    top_k: PerRow[Literal[-1] | Annotated[int, Field(ge=1)]] | None = None
    """Sample only from the k likeliest tokens; -1 means all."""
    min_p: PerRow[Annotated[float, Field(ge=0, le=1)]] | None = None
    """Sample only from tokens with at least this probability, relative to that of the likeliest token."""
    frequency_penalty: PerRow[Annotated[float, Field(ge=-2, le=2)]] | None = None
    """Penalty on a token for each time that it was generated."""
    presence_penalty: PerRow[Annotated[float, Field(ge=-2, le=2)]] | None = None
    """Penalty on tokens that were generated before."""
    repetition_penalty: PerRow[Annotated[float, Field(gt=0, le=2)]] | None = None
    """Factor that makes tokens of the prompt or output less likely to be repeated; 1 has no effect."""
    stop: PerRow[str | Annotated[list[str], Field(max_length=32)]] | None = None
    """Texts that end the output."""
    stop_token_ids: PerRow[list[int]] | None = None
    """Token ids that end the output."""
    stop_regex: PerRow[str | Annotated[list[str], Field(max_length=32)]] | None = None
    """Regular expressions that end the output."""
    no_stop_trim: bool | None = None
    """Keep the stop text in the output."""
    ignore_eos: PerRow[bool] | None = None
    """Generate up to `max_new_tokens`, past the model's end token."""
    skip_special_tokens: bool | None = None
    """Leave special tokens out of the output."""
    spaces_between_special_tokens: bool | None = None
    """Put spaces between special tokens."""
    sampling_seed: PerRow[int] | None = None
    """Seed; needs SGLang's `--enable-deterministic-inference`."""
    json_schema: PerRow[dict[str, Any] | str] | None = None
    """JSON Schema that the output follows."""
    regex: Annotated[PerRow[str] | None, AfterValidator(check_regex)] = None
    """Regular expression that the output matches."""
    ebnf: PerRow[str] | None = None
    """EBNF grammar that the output follows."""
    structural_tag: PerRow[str] | None = None
    """SGLang's structural tag, as JSON text: a grammar for parts of the output."""
    logit_bias: dict[Annotated[str, Field(pattern=r"^\d+$")], float] | None = None
    """Bias of logits, by token id."""
    custom_params: dict[str, Any] | None = None
    """Parameters of the engine's custom logit processor."""
    tool_choice: ToolChoice | None = None
    """Whether a chat calls `prompt.tools`; `{type: function, function: {name: NAME}}` demands that tool.
    Unset: `auto`."""
    lora_path: PerRow[str] | None = None
    """Name of a LoRA adapter that the engine has loaded."""

    @field_validator("json_schema", mode="before")
    @classmethod
    def _column_before_schema(cls, value: object) -> object:
        # {column: x} is a mapping too, and would otherwise be accepted as a schema
        if isinstance(value, Mapping) and set(value) == {"column"}:
            return FromColumn(column=str(value["column"]))
        return _schema_of_text(value) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _fit_together(self) -> SamplingSpec:
        least, most = self.min_new_tokens, self.max_new_tokens
        if isinstance(least, int) and isinstance(most, int) and least > most:
            raise ValueError(f"min_new_tokens ({least}) exceeds max_new_tokens ({most})")
        grammars = [name for name in GRAMMARS if getattr(self, name) is not None]
        if len(grammars) > 1:
            raise ValueError(f"give only one of {', '.join(grammars)}: an output follows one grammar")
        if grammars and self.tool_choice not in {None, "auto", "none"}:
            raise ValueError(f"{grammars[0]} excludes a tool_choice that demands a tool call")
        return self


def _schema_of_text(text: str) -> dict[str, Any]:
    try:
        schema = json.loads(text)
    except ValueError as failure:
        raise ValueError(f"not JSON: {failure}") from None
    if not isinstance(schema, dict):
        raise ValueError("a JSON Schema is a JSON object")  # noqa: TRY004 - pydantic takes ValueError only
    return schema
