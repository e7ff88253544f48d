"""Checks the fields of a request like SGLang 0.5.23, for the simulated engine.

The classes below have only the fields whose values SGLang restricts.
"""

from typing import Annotated, Any, Literal

import orjson
from pydantic import AliasChoices, BaseModel, Field

from batchrunner.core.errors import JobError, RowRefusedError
from batchrunner.core.types import (
    CHAT_PATH,
    CLASSIFY_PATH,
    COMPLETIONS_PATH,
    EMBEDDINGS_PATH,
    RERANK_PATH,
    RESPONSES_PATH,
    SCORE_PATH,
    Request,
    RequestBody,
)
from batchrunner.job.load import validated
from batchrunner.job.sampling import SamplingSpec

_Texts = str | list[str] | list[int] | list[list[int]]
_Parts = list[dict[str, Any]]
_MostTokens = Annotated[
    Annotated[int, Field(ge=0)] | None,
    Field(validation_alias=AliasChoices("max_completion_tokens", "max_tokens")),
]
_MostOutput = Annotated[Annotated[int, Field(ge=1)] | None, Field(alias="max_output_tokens")]
_Penalty = Annotated[float, Field(ge=-2, le=2)]


class _UserMessage(BaseModel):
    """A user's message, which must have a content."""

    role: Literal["user"]
    content: str | _Parts


class _Message(BaseModel):
    """A message of any other role, which may have no content."""

    role: Annotated[
        str, Field(pattern="^(?i:system|assistant|tool|function|developer|latest_reminder|root)$")
    ]
    content: str | _Parts | None = None


class _Format(BaseModel):
    """The `response_format` of a request."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: dict[str, Any] | None = None


class _Generating(SamplingSpec, extra="ignore"):
    """Sampling parameters with the names and types of OpenAI's endpoints."""

    min_new_tokens: Annotated[int, Field(ge=0, alias="min_tokens")] = 0
    frequency_penalty: _Penalty = 0
    presence_penalty: _Penalty = 0
    sampling_seed: Annotated[int | None, Field(alias="seed")] = None
    structural_tag: Any = None
    lora_path: Any = None
    response_format: _Format | None = None


class _Chat(_Generating):
    """The body of a request to `/v1/chat/completions`."""

    messages: Annotated[list[_UserMessage | _Message], Field(min_length=1)]
    max_new_tokens: _MostTokens = None  # type: ignore[assignment]
    tools: _Parts | None = None


class _TextCompletion(_Generating):
    """The body of a request to `/v1/completions`."""

    prompt: _Texts
    max_new_tokens: Annotated[int, Field(ge=1, alias="max_tokens")] = 16
    temperature: Annotated[float, Field(ge=0)] = 1
    top_p: Annotated[float, Field(gt=0, le=1)] = 1


class _Embedding(BaseModel):
    """The body of a request to `/v1/embeddings`."""

    input: Annotated[_Texts, Field(min_length=1)]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None


class _Response(_Generating):
    input: str | _Parts
    instructions: str | None = None
    max_new_tokens: _MostOutput = None  # type: ignore[assignment]


class _Score(BaseModel):
    query: str | list[int] | None = None
    items: str | list[str] | list[list[int]]
    label_token_ids: list[int] | list[list[int]] | None = None


class _Rerank(BaseModel):
    query: str | _Parts
    documents: list[str | _Parts]
    top_n: Annotated[int, Field(ge=1)] | None = None
    return_documents: bool = True


class _Classify(BaseModel):
    input: Annotated[_Texts, Field(min_length=1)]


_BODIES = {
    CHAT_PATH: _Chat,
    COMPLETIONS_PATH: _TextCompletion,
    RESPONSES_PATH: _Response,
    EMBEDDINGS_PATH: _Embedding,
    SCORE_PATH: _Score,
    RERANK_PATH: _Rerank,
    CLASSIFY_PATH: _Classify,
}


def refuse_invalid(request: Request) -> None:
    """Raise RowRefusedError, with SGLang's status 400, for a request with an invalid field."""
    try:
        if isinstance(request.prompt, RequestBody):
            validated(_BODIES[request.prompt.path], orjson.loads(request.prompt.content), "400")
        else:
            validated(SamplingSpec, request.sampling, "400")
    except (JobError, ValueError) as failure:
        # The message is written for job files. It suggests `{column: NAME}`, which a request cannot have.
        problem: str = getattr(failure, "message", str(failure))
        raise RowRefusedError(problem.replace(", or should be {column: NAME}", "")) from None
