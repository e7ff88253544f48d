"""The `output` and `storage` parts of a job: where results are written, how object stores are reached."""

from __future__ import annotations

import os
from typing import Annotated, Literal, TypeAlias

from pydantic import Field, model_validator

from batchrunner.core.errors import JobError
from batchrunner.core.types import ForwardTask
from batchrunner.job.fields import Duration, Spec, UserPath
from batchrunner.job.tasks import Dtype

RESULT_COLUMNS = {
    "row": "Position of the row in the input, from 0.",
    "output": "The text that the model generated; null if the row failed, unless it failed by its answer "
    "alone.",
    "finish_reason": "Why the output ended: `stop` (the model's end, or a stop text), `length` "
    "(`max_new_tokens`, "
    "or the context is full), `tool_calls`, or another of SGLang's reasons; `left_out` for a row that "
    "`prompt.python` left out.",
    "prompt_tokens": "Tokens of the prompt, as the engine counted them.",
    "cached_tokens": "Tokens of the prompt that the engine had in its prefix cache.",
    "completion_tokens": "Tokens of the output, those of reasoning included.",
    "latency_s": "Seconds from sending the request to its answer, waiting in the engine's queue included.",
    "attempts": "How often the row was sent; 0 for a row that has the answer of an equal row.",
    "error": "Why the row failed, in a sentence; null if it succeeded.",
}
"""Columns of a result besides the carried ones, with their meanings: `row` comes first, the others after the
carried columns."""
OF_TEXTS = frozenset({"output", "finish_reason", "completion_tokens"})
"""Columns of RESULT_COLUMNS that a task without decoding lacks."""
REASONING = "reasoning"
TOOL_CALLS = "tool_calls"
ANSWER_COLUMNS = {
    REASONING: "What the model thought before its answer; null if it did not. It is there by itself where "
    "prompts are chats, unless a carried column has this name.",
    TOOL_CALLS: "The calls of tools that the server's `--tool-call-parser` found in a chat's answer; null "
    "if there are none. It is there by itself where the job has `prompt.tools`, unless a carried column has "
    "this name.",
    "output_ids": "The token ids of the output, as the engine gives them.",
    "logprobs": "Each token of the output: its id, its text, and the logarithm of its probability.",
    "top_logprobs": "The likeliest tokens at each position of the output, as many as `output.top_logprobs` "
    "says, in the form of `logprobs`.",
    "prompt_logprobs": "Each token of the prompt, in the form of `logprobs`; the first has no `logprob`.",
    "matched_stop": "The stop text, or the id of the end token, that ended the output; null if none did.",
    "parsed": "The output as JSON: of the type that the JSON Schema gives it, else JSON text; null if it is "
    "none. It is there by itself where the job has a schema, unless a carried column has this name.",
}
"""Columns that a job can ask for, with their meanings. They come after those of every result."""
PARSED = "parsed"
CUT = "length"
"""The finish reason of an output that was cut at `max_new_tokens`."""
RESPONSE = "response"
"""Column of a result, the last one, where the input is a batch file: the whole answer of the endpoint, as
JSON."""
REQUEST_DIGEST = "request_digest"
"""Column of a part, the last one: by it `output.reuse` of another run finds equal requests. Merged results
lack it."""
TURNS, CONVERSATION, RETURNED = "turns", "conversation", "returned"
ROLLOUT_COLUMNS = {
    "rollout": "Number of the row among those that the function returned for an input row, from 0.",
    TURNS: "How often the function was answered.",
    CONVERSATION: "What the function of a row that failed asked last, as JSON; null for other rows. Its last "
    "answer is `output`.",
    RETURNED: "What the function returned, as JSON, where it has no annotation. Merged results have it as "
    "columns.",
}
"""Columns of rows that `prompt.rollout` made, with their meanings."""
MADE_ROWS = "made_rows"
"""Name under which the answer of a rollout brings what its function returned; no column of a result."""
OF_TOKENS = frozenset({"logprobs", "top_logprobs", "prompt_logprobs"})
"""Columns for which the engine is asked for probabilities."""

AnswerColumn: TypeAlias = Literal[
    "reasoning", "tool_calls", "output_ids", "logprobs", "top_logprobs", "prompt_logprobs", "matched_stop",
    "parsed", "row", "output", "finish_reason", "prompt_tokens", "cached_tokens", "completion_tokens",
    "latency_s", "attempts", "error",
]  # fmt: skip
MOST_TOP_LOGPROBS = 100
STORE_DURABLE_S = 10.0
"""Seconds within which a row is in an object store, unless the job says otherwise: 360 requests an hour."""


class OutputSpec(Spec):
    """Where the results are written, and what they have besides the columns of every result."""

    path: UserPath
    """Directory of the run, with parts/*.parquet, report.json, events.jsonl and the engine's log. Or a URI
    of an object store (s3://, gs://, az://)."""
    columns: list[AnswerColumn] = []
    """Further columns of the answers: `reasoning`, `tool_calls`, `output_ids`, `logprobs`, `top_logprobs`,
    `prompt_logprobs`, `matched_stop`, `parsed`. The columns of every result are always there, and may be
    named too. Starts of a run may differ in it: once merged, rows of starts without a column have nulls."""
    reuse: UserPath | None = None
    """Output path of another run, whose answers are taken for rows that ask for the same: whose prompt is
    equal once it is rendered, and `sampling`, `columns`, model and checks too. Only good answers are taken,
    and `parse` is called with them again. These rows are not sent, and add no tokens."""
    top_logprobs: Annotated[int, Field(ge=1, le=MOST_TOP_LOGPROBS)] = 5
    """Likeliest tokens that the column `top_logprobs` has for each position."""
    part_rows: Annotated[int, Field(ge=1)] = 10_000
    """Most rows of the input in a result file (part), each with all its samples. A part is also written
    every 30 s, in an object store as often as `durable` says."""
    durable: Duration = 1.0
    """Time within which a finished row is safe on disk, in a journal or in a part; in an object store, where
    it is in a part, 10 s by default."""
    dtype: Dtype = "float32"
    """With `task: embed`: type of the numbers of a vector."""
    normalize: bool = False
    """With `task: embed`: whether each vector is divided by its length. Many models do so themselves."""
    dimensions: Annotated[int, Field(ge=1)] | None = None
    """With `task: embed`: length of the vectors, for a model that was trained to give shorter ones too
    (Matryoshka; `matryoshka_dimensions` or `is_matryoshka` in its config.json). Unset: the model's own."""

    softmax: bool = False
    """With `task: score` and `labels`: whether the probabilities are those among the labels, whose sum is 1.
    Without it they are those among all tokens of the model. With `task: classify`: whether scores are
    probabilities of the classes."""

    @property
    def uploaded_within_s(self) -> float:
        """Seconds within which a row is in the store, where `path` is a URI of one."""
        return self.durable if "durable" in self.model_fields_set else STORE_DURABLE_S

    @property
    def asked(self) -> list[str]:
        """The columns that the job asks for, beyond those of every result, in the order of the results."""
        return [name for name in ANSWER_COLUMNS if name in self.columns]


def result_columns(task: ForwardTask | None) -> list[str]:
    """Return the columns of every result, without the carried ones; `task` is None for generating."""
    if task is None:
        return [*RESULT_COLUMNS]
    own = (name for name, _ in task.columns)
    return [*(name for name in RESULT_COLUMNS if name not in OF_TEXTS), *own]


Secret: TypeAlias = Literal[
    "access_key_id", "secret_access_key", "session_token", "account_key", "sas_token", "service_account_key"
]


class StorageSpec(Spec):
    """How object stores are reached. What is left out is found as the cloud's own tools find it."""

    endpoint: Annotated[str, Field(pattern=r"^https?://[^/\s]+")] | None = None
    """Address of a store that is not the cloud's own, such as MinIO's: `http://host:9000`."""
    region: str | None = None
    """Region of the bucket, such as `eu-central-1`."""
    anonymous: bool = False
    """Whether requests go without credentials, as public buckets allow."""
    account: Annotated[str, Field(min_length=1)] | None = None
    """Account of an Azure store; by default that of the variable `AZURE_STORAGE_ACCOUNT_NAME`."""
    secrets: dict[Secret, Annotated[str, Field(min_length=1)]] = {}
    """Names of the environment variables that hold credentials, by what they are: `access_key_id`,
    `secret_access_key` and `session_token` of S3, `account_key` or `sas_token` of Azure,
    `service_account_key` of Google (its JSON). The job file holds no secret itself."""

    copies: UserPath | None = None
    """Directory for the working copy of a run whose `output.path` is in a store, as large as its results; by
    default the cache directory. Keep it: rows that a killed run had not uploaded are there."""

    @model_validator(mode="after")
    def _one_way(self) -> StorageSpec:
        if self.anonymous and self.secrets:
            raise ValueError("`anonymous` goes without credentials, and `secrets` names some")
        return self

    def secret_values(self) -> dict[str, str]:
        """Return the credentials; raises JobError where a variable is not set."""
        found: dict[str, str] = {}
        for name, variable in self.secrets.items():
            value = os.environ.get(variable)
            if not value:  # the name, which may be the secret itself, is not shown
                raise JobError(
                    f"storage.secrets.{name}: no environment variable of this name is set",
                    hint="export the secret as a variable, and give the variable's name",
                )
            found[name] = value
        return found
