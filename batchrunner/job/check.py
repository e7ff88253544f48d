"""The `check` part of a job: when an answer is good, and how one that is not is asked for again."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field, field_validator

from batchrunner.job.fields import PythonFunction, Spec
from batchrunner.job.sampling import check_regex

OnLength: TypeAlias = Literal["keep", "fail", "continue"]
_Temperature: TypeAlias = Annotated[float, Field(ge=0)]


class CheckSpec(Spec):
    """When an answer is good. One that is not is asked for again, and then fails its row, which keeps it."""

    json_: Annotated[bool | dict[str, Any] | None, Field(alias="json")] = None
    """Whether an answer must be JSON: `true`, or a JSON Schema that it must satisfy. Where
    `sampling.json_schema` is set, an answer must satisfy that by itself; `false` lets any answer pass."""
    regex: str | None = None
    """Regular expression that an answer must contain; `^` and `$` stand for its beginning and end."""
    expression: str | None = None
    """Jinja2 expression that must be true, over `output` (the text), `parsed` (its JSON, else null),
    `reasoning`, `finish_reason`, and the columns of the row."""
    python: PythonFunction | None = None
    """Python function that judges an answer, as `module:function`. It is called with the answer, a text, or
    with the answer and the row, a dict of `input.columns`, and returns true, false, or a text that says what
    is wrong. It runs in processes of its own."""
    tries: Annotated[int, Field(ge=1, le=100)] | None = None
    """Most answers of a row that are checked, the first included; then the row fails, with the last one. By
    default 3, and 1 where the job has no section `check`."""
    temperature: _Temperature | Annotated[list[_Temperature], Field(min_length=1)] | None = None
    """Temperature of each try, the last one also for all further tries; or that of all tries but the first.
    Unset: a row that was sampled at a lower one is tried again at 0.4, then at 0.8. Where
    `sampling.temperature` is a column, that says the first try's, and the list the others'; a null in it
    stands for the first of the list."""
    feedback: bool = False
    """Whether a chat is told what was wrong: the answer and the complaint stand in the next try's
    conversation."""

    @field_validator("json_")
    @classmethod
    def _is_a_schema(cls, value: object) -> object:
        return json.loads(json.dumps(value)) if isinstance(value, dict) else value

    @field_validator("regex")
    @classmethod
    def _compiles(cls, value: str | None) -> str | None:
        if value is not None:
            check_regex(value)
        return value

    @property
    def has_condition(self) -> bool:
        """Whether the section itself says what an answer must be."""
        given = (self.regex, self.expression, self.python)
        return bool(self.json_) or any(condition is not None for condition in given)

    @property
    def first_temperature(self) -> float | None:
        """Temperature of the first try; None where `sampling` says it."""
        return self.temperature[0] if isinstance(self.temperature, list) else None

    def temperature_of(self, number: int, sampled: float | None) -> float | None:
        """Return the temperature of try `number`, from 1 on, of a row that `sampling` gives one, or none."""
        if isinstance(self.temperature, list):
            return self.temperature[min(number, len(self.temperature) - 1)]
        if self.temperature is not None:
            return self.temperature
        least = RISING[min(number, len(RISING)) - 1]
        return sampled if sampled is None else max(sampled, least)


TRIES = 3
"""Answers of a row that are checked unless the job says otherwise."""
RISING = (0.4, 0.8)
"""Least temperatures of the second and of all further tries: at 0 the same answer would come again."""
