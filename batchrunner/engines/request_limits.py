"""Checks by which SGLang 0.5.23 refuses a request for its fields alone, made here without a server."""

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


class _Question(BaseModel):
    role: Literal["user"]
    content: str | _Parts


class _Message(BaseModel):
    role: Annotated[
        str, Field(pattern="^(?i:system|assistant|tool|function|developer|latest_reminder|root)$")
    ]
    content: str | _Parts | None = None


class _Format(BaseModel):
    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: dict[str, Any] | None = None


class _Generating(SamplingSpec, extra="ignore"):
    """Sampling parameters of a job under the names, and with the types, of OpenAI's endpoints."""

    min_new_tokens: Annotated[int, Field(ge=0, alias="min_tokens")] = 0
    frequency_penalty: _Penalty = 0
    presence_penalty: _Penalty = 0
    sampling_seed: Annotated[int | None, Field(alias="seed")] = None
    structural_tag: Any = None
    lora_path: Any = None
    response_format: _Format | None = None


class _Chat(_Generating):
    messages: Annotated[list[_Question | _Message], Field(min_length=1)]
    max_new_tokens: _MostTokens = None  # type: ignore[assignment]
    tools: _Parts | None = None


class _TextCompletion(_Generating):
    prompt: _Texts
    max_new_tokens: Annotated[int, Field(ge=1, alias="max_tokens")] = 16
    temperature: Annotated[float, Field(ge=0)] = 1
    top_p: Annotated[float, Field(gt=0, le=1)] = 1


class _Embedding(BaseModel):
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
    """Raise RowRefusedError, with SGLang's status, for a request that SGLang refuses for its fields."""
    try:
        if isinstance(request.prompt, RequestBody):
            validated(_BODIES[request.prompt.path], orjson.loads(request.prompt.content), "400")
        else:
            validated(SamplingSpec, request.sampling, "400")
    except (JobError, ValueError) as failure:
        problem: str = getattr(failure, "message", str(failure))  # without a hint about YAML
        raise RowRefusedError(problem.replace(", or should be {column: NAME}", "")) from None
