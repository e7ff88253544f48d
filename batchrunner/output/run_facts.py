"""What run.json must hold for a run to be resumed, shown or reported, whoever wrote or edited it."""

import re
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from batchrunner.core.engine_info import EngineInfo


class _Facts(BaseModel):
    """A part of run.json; what a later version adds is ignored."""

    model_config = ConfigDict(extra="ignore", strict=True)


class _FileFacts(_Facts):
    path: str
    rows: int = Field(ge=0)
    digest: str


class _FingerprintFacts(_Facts):
    files: list[_FileFacts] = Field(min_length=1)
    filter: str | None
    limit: int | None
    columns: list[str]
    rename: dict[str, str]
    prompt: dict[str, Any]
    sampling: dict[str, Any]
    model: str


class _EngineOfJob(_Facts):
    kind: str
    args: dict[str, Any] | None = None
    gateway_args: dict[str, Any] | None = None


class _LimitsOfJob(_Facts):
    max_failed_rows: float = 0


class _JobFacts(_Facts):
    engine: _EngineOfJob
    limits: _LimitsOfJob = _LimitsOfJob()
    sampling: dict[str, Any] = {}
    prompt: dict[str, Any] = {}
    input: dict[str, Any] = {}
    output: dict[str, Any] = {}
    window: int | str = "auto"


class RunFacts(_Facts):
    """The parts of run.json that are read."""

    format: Literal[1]
    job: _JobFacts
    fingerprint: _FingerprintFacts
    rows_total: int = Field(ge=0)
    engine: dict[str, Any]
    versions: dict[str, str | None]


def problem_in(found: object) -> str | None:
    """Return what is wrong with the content of run.json, in a few words; None if nothing is."""
    try:
        facts = RunFacts.model_validate(found)
        TypeAdapter(EngineInfo).validate_python(facts.engine)
    except ValidationError as failure:
        first = failure.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"])) or "it"
        message = re.sub(r"^Input ", "", first["msg"])
        return f"{where}: {message[0].lower()}{message[1:]}"
    return None
