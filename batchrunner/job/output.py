"""Sections `output` and `storage` of a job: the results, and the access to object stores."""

from __future__ import annotations

import os
from typing import Annotated, Literal, TypeAlias

from pydantic import Field, model_validator

from batchrunner.core.errors import JobError
from batchrunner.core.types import ForwardTask
from batchrunner.job.fields import Duration, Spec, UserPath
from batchrunner.job.tasks import Dtype

RESULT_COLUMNS = {
    "row": "Position in the input, from 0.",
    "output": "The generated text. For a failed row: null, or the last rejected answer.",
    "finish_reason": "Why the output ended: `stop`, `length` (truncated at `max_new_tokens`, or by a full "
    "context), `tool_calls`, another of SGLang's reasons, or `left_out` by `prompt.python`.",
    "prompt_tokens": "Tokens of the prompt, counted by the engine.",
    "cached_tokens": "Prompt tokens that came from the prefix cache.",
    "completion_tokens": "Tokens of the output, reasoning included.",
    "latency_s": "Seconds from sending to the answer, including the engine's queue.",
    "attempts": "Number of times that the row was sent; 0 if it shares the answer of an equal row.",
    "error": "Why the row failed; null if it did not.",
}
"""Columns that every result has, with their meanings.

In the results, `row` comes first, then the columns copied from the input, then all other columns.
"""
OF_TEXTS = frozenset({"output", "finish_reason", "completion_tokens"})
"""Result columns that tasks without decoding do not have."""
REASONING = "reasoning"
TOOL_CALLS = "tool_calls"
ANSWER_COLUMNS = {
    REASONING: "The model's reasoning before the answer, else null. Chats always have this column.",
    TOOL_CALLS: "Tool calls in OpenAI's form, as the server's `--tool-call-parser` parses them, else null. "
    "Jobs with `prompt.tools` always have this column.",
    "output_ids": "Token ids of the output.",
    "logprobs": "Each token of the output, with the logarithm of its probability.",
    "top_logprobs": "The `output.top_logprobs` likeliest tokens at each position.",
    "prompt_logprobs": "Each token of the prompt, with the logarithm of its probability (not the first).",
    "matched_stop": "Stop text, or id of the end token, that ended the output, else null.",
    "parsed": "The output as JSON: a value of the schema's type, or a JSON text if there is no schema; null "
    "if the output is not JSON. Jobs with a schema always have this column.",
}
"""Columns that a job can ask for, with their meanings. In the results they come after RESULT_COLUMNS."""
PARSED = "parsed"
CUT = "length"
"""Finish reason of an output that was truncated at `max_new_tokens`."""
REPETITION = "repetition"
"""Finish reason of an output that was stopped because it repeated itself (`on_repetition`)."""
RESPONSE = "response"
"""Last result column if the input is a batch file: the endpoint's whole answer, as JSON."""
REQUEST_DIGEST = "request_digest"
"""Last column of a part file (a Parquet file of results): a digest of each row's request.

With it, another run finds equal requests for its `output.reuse`. Merged results do not have this column.
"""
TURNS, CONVERSATION, RETURNED = "turns", "conversation", "returned"
ROLLOUT_COLUMNS = {
    "rollout": "Number of the row among those that the function returned for one input row, from 0.",
    TURNS: "Number of answers that the function got from `generate`.",
    CONVERSATION: "For a row that failed: its last request, as JSON. The last answer is `output`.",
    RETURNED: "Result of a function without an annotation, as JSON; merging turns it into columns.",
}
"""Additional columns in the results of `prompt.rollout`, with their meanings."""
MADE_ROWS = "made_rows"
"""Key in `Completion.columns` for the rows that a rollout function returned.

It is not a result column.
"""
OF_TOKENS = frozenset({"logprobs", "top_logprobs", "prompt_logprobs"})
"""Columns for which the engine computes log probabilities."""

AnswerColumn: TypeAlias = Literal[
    "reasoning", "tool_calls", "output_ids", "logprobs", "top_logprobs", "prompt_logprobs", "matched_stop",
    "parsed", "row", "output", "finish_reason", "prompt_tokens", "cached_tokens", "completion_tokens",
    "latency_s", "attempts", "error",
]  # fmt: skip
MOST_TOP_LOGPROBS = 100
"""Upper limit of `output.top_logprobs`."""
STORE_DURABLE_S = 10.0
"""Default of `output.durable` in seconds, for results in an object store.

An upload every 10 s makes 360 requests an hour.
"""


class OutputSpec(Spec):
    """Where results are written, and their columns."""

    path: UserPath
    """Directory of the run, or a URI of an object store (`s3://`, `gs://`, `az://`)."""
    columns: list[AnswerColumn] = []
    """Additional columns: `reasoning`, `tool_calls`, `output_ids`, `logprobs`, `top_logprobs`,
    `prompt_logprobs`, `matched_stop`, `parsed`. Columns that every result has may be named too."""
    reuse: UserPath | None = None
    """Path of another run. A row whose request equals one of that run gets the accepted answer from there."""
    top_logprobs: Annotated[int, Field(ge=1, le=MOST_TOP_LOGPROBS)] = 5
    """Number of tokens for each position in the column `top_logprobs`."""
    part_rows: Annotated[int, Field(ge=1)] = 10_000
    """Maximum number of input rows in a result file. A file with fewer rows is written after 30 s. Once the
    run is older than ten minutes, this time is a twentieth of the run's age (at most 30 min). In an object
    store, this time is always `durable`."""
    durable: Duration = 1.0
    """Maximum time until a finished row is safe on disk, or uploaded to an object store. The default for an
    object store is 10 s."""
    dtype: Dtype = "float32"
    """With `task: embed`: type of a vector's numbers."""
    normalize: bool = False
    """With `task: embed`: divide each vector by its L2 norm, so that its length is 1."""
    dimensions: Annotated[int, Field(ge=1)] | None = None
    """With `task: embed`: number of dimensions of the vectors, for a model that is also trained for shorter
    vectors (Matryoshka). Unset: the model's own number."""

    softmax: bool = False
    """With `labels`: probabilities among the labels instead of among all tokens. With `task: classify`:
    probabilities of the classes instead of scores."""

    @property
    def uploaded_within_s(self) -> float:
        """Maximum time in seconds until a finished row is uploaded, for a run in an object store."""
        return self.durable if "durable" in self.model_fields_set else STORE_DURABLE_S

    @property
    def asked(self) -> list[str]:
        """Columns of ANSWER_COLUMNS that the job asks for, in the order of the results."""
        return [name for name in ANSWER_COLUMNS if name in self.columns]


def result_columns(task: ForwardTask | None) -> list[str]:
    """Return the columns that every result has, without the columns copied from the input.

    `task` is None if the model generates text.
    """
    if task is None:
        return [*RESULT_COLUMNS]
    task_columns = (name for name, _ in task.columns)
    return [*(name for name in RESULT_COLUMNS if name not in OF_TEXTS), *task_columns]


Secret: TypeAlias = Literal[
    "access_key_id", "secret_access_key", "session_token", "account_key", "sas_token", "service_account_key"
]


class StorageSpec(Spec):
    """Access to object stores. By default, the address and credentials are those of the cloud's own tools."""

    endpoint: Annotated[str, Field(pattern=r"^https?://[^/\s]+")] | None = None
    """Address of an object store outside of the cloud, such as MinIO: `http://host:9000`."""
    region: str | None = None
    """Region of the bucket."""
    anonymous: bool = False
    """Send no credentials, for public buckets."""
    account: Annotated[str, Field(min_length=1)] | None = None
    """Name of the Azure storage account. Default: the variable `AZURE_STORAGE_ACCOUNT_NAME`."""
    secrets: dict[Secret, Annotated[str, Field(min_length=1)]] = {}
    """Names of the environment variables that hold `access_key_id`, `secret_access_key`, `session_token`
    (S3), `account_key` or `sas_token` (Azure), `service_account_key` (Google, JSON). The job file holds no
    secret."""

    @model_validator(mode="after")
    def _one_way(self) -> StorageSpec:
        if self.anonymous and self.secrets:
            raise ValueError("`anonymous` sends no credentials, but `secrets` names some: leave out one")
        return self

    def secret_values(self) -> dict[str, str]:
        """Return the credentials by name; raise JobError if an environment variable is not set."""
        values: dict[str, str] = {}
        for name, variable in self.secrets.items():
            value = os.environ.get(variable)
            if not value:
                # `variable` is left out of the message: it may be the secret itself, by mistake.
                raise JobError(
                    f"storage.secrets.{name}: the environment variable that it names is not set",
                    hint="export the secret as a variable, and give the variable's name",
                )
            values[name] = value
        return values
