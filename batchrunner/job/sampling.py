"""The `sampling` part of a job: SGLang's sampling parameters, fixed or from a column of each row."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Annotated, Any, TypeAlias, TypeVar

from pydantic import Field, field_validator, model_validator

from batchrunner.job.fields import Spec


class FromColumn(Spec):
    """A value that each row brings itself."""

    column: str
    """The input column that holds the value; a null leaves the engine's default."""


Value = TypeVar("Value")
PerRow: TypeAlias = Value | FromColumn


class SamplingSpec(Spec):
    """SGLang's sampling parameters, by SGLang's names. Each may be `{column: NAME}`."""

    max_new_tokens: PerRow[Annotated[int, Field(ge=1)]] = 1024
    """Longest output in tokens; of a null in a column the default. (SGLang's 128 cuts most answers short.)"""
    min_new_tokens: PerRow[Annotated[int, Field(ge=0)]] | None = None
    """Shortest output in tokens."""
    n: Annotated[int, Field(ge=1)] = 1
    """Samples a row; above 1 `output`, `finish_reason` and `completion_tokens` are lists."""
    temperature: PerRow[Annotated[float, Field(ge=0)]] | None = None
    """0 is greedy. Unset: the engine's default."""
    top_p: PerRow[Annotated[float, Field(gt=0, le=1)]] | None = None
    """Nucleus sampling."""
    top_k: PerRow[Annotated[int, Field(ge=-1)]] | None = None
    """Sample from the k likeliest tokens; -1 for all."""
    min_p: PerRow[Annotated[float, Field(ge=0, le=1)]] | None = None
    """Least probability, relative to the likeliest token."""
    frequency_penalty: PerRow[Annotated[float, Field(ge=-2, le=2)]] | None = None
    """Penalty on tokens by how often they were generated."""
    presence_penalty: PerRow[Annotated[float, Field(ge=-2, le=2)]] | None = None
    """Penalty on tokens that were generated at all."""
    repetition_penalty: PerRow[Annotated[float, Field(gt=0, le=2)]] | None = None
    """Multiplicative penalty on tokens that were seen; 1 is none."""
    stop: PerRow[str | list[str]] | None = None
    """Texts that end the output."""
    stop_token_ids: PerRow[list[int]] | None = None
    """Tokens that end the output."""
    stop_regex: PerRow[str | list[str]] | None = None
    """Regular expressions that end the output."""
    no_stop_trim: bool | None = None
    """Keep the stop text in the output."""
    ignore_eos: PerRow[bool] | None = None
    """Go on to max_new_tokens."""
    skip_special_tokens: bool | None = None
    """Leave special tokens out of the output text."""
    spaces_between_special_tokens: bool | None = None
    """Put spaces between special tokens in the output text."""
    sampling_seed: PerRow[int] | None = None
    """Seed of the sampler (SGLang honours it under --enable-deterministic-inference)."""
    json_schema: PerRow[dict[str, Any] | str] | None = None
    """The output must be JSON of this schema (a mapping, or its JSON text)."""
    regex: PerRow[str] | None = None
    """The output must match."""
    ebnf: PerRow[str] | None = None
    """The output must be in this grammar."""
    structural_tag: PerRow[str] | None = None
    """SGLang's structural tag, as JSON text."""
    logit_bias: dict[str, float] | None = None
    """Bias a token id's logit."""
    custom_params: dict[str, Any] | None = None
    """Passed to a custom logit processor."""
    lora_path: PerRow[str] | None = None
    """Name of a LoRA adapter that the engine has loaded."""

    @field_validator("json_schema", mode="before")
    @classmethod
    def _column_before_schema(cls, value: object) -> object:
        # {column: x} is also a mapping: without this it would pass as a (meaningless) schema
        if isinstance(value, Mapping) and set(value) == {"column"}:
            return FromColumn(column=str(value["column"]))
        if isinstance(value, str):
            _check_json_schema(value)
        return value

    @field_validator("regex")
    @classmethod
    def _compiles(cls, value: str | FromColumn | None) -> str | FromColumn | None:
        if isinstance(value, str):
            _check_regex(value)
        return value

    @model_validator(mode="after")
    def _one_grammar(self) -> SamplingSpec:
        given = [
            k for k in ("json_schema", "regex", "ebnf", "structural_tag") if getattr(self, k) is not None
        ]
        if len(given) > 1:
            raise ValueError(f"an output has one grammar: give one of {', '.join(given)}")
        return self


def _check_json_schema(text: str) -> None:
    try:
        schema = json.loads(text)
    except ValueError as failure:
        raise ValueError(f"not JSON: {failure}") from None
    if not isinstance(schema, dict):
        raise ValueError("a JSON Schema is a JSON object")  # noqa: TRY004 - pydantic takes ValueError only


def _check_regex(pattern: str) -> None:
    r"""Refuse what is no regular expression; the engine's dialect also has `\p{…}` and `(?<name>…)`."""
    try:
        re.compile(pattern)
    except re.error as failure:
        if not failure.msg.startswith(("bad escape", "unknown extension")):
            raise ValueError(f"not a regular expression: {failure}") from None
