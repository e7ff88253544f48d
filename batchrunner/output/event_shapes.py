"""The types that the values of an event must have to be read; a damaged line is skipped, like a torn one."""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

Count = Annotated[int, Field(ge=0, le=10**15)]
Amount = Annotated[float, Field(ge=0, le=1e15)]
Moment = Annotated[float, Field(ge=0, le=4e9)]
"""A time in seconds since 1970, before 2096."""


class _SignalShape(BaseModel):
    model_config = ConfigDict(strict=True)
    scheduler: str
    running: Count
    queue: Count
    token_usage: Amount
    max_running: Count | None = None
    window: Amount | None = None
    corner: str | None = None
    retractions: Amount | None = None
    output_tokens_per_s: Amount | None = None


class EventShape(BaseModel):
    """Values that are read of events of any kind, where they are there."""

    model_config = ConfigDict(strict=True)
    event: str
    time: Moment = 0.0
    elapsed_s: Amount = 0.0
    engine: dict[str, Any] | None = None
    rows_total: Count = 0
    rows_done: Count = 0
    rows_failed: Count = 0
    rows_per_s: Amount = 0.0
    output_tokens_per_s: Amount = 0.0
    prompt_tokens_per_s: Amount = 0.0
    cached_tokens_per_s: Amount = 0.0
    output_tokens: Count = 0
    prompt_tokens: Count = 0
    cached_tokens: Count = 0
    window: Amount = 0
    in_flight: Count = 0
    resting: Count = 0
    retractions: Count = 0
    signals: list[_SignalShape] = []
    task: str = ""
    bands: dict[str, Annotated[list[Amount], Field(min_length=2, max_length=2)]] = {}


_SHAPE = TypeAdapter(EventShape)


def is_event(found: object) -> bool:
    """Tell whether the content of a line can be read as an event."""
    try:
        _SHAPE.validate_python(found)
    except ValidationError:
        return False
    return True
