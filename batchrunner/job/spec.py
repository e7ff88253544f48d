"""The job: which rows, as which prompts, on which engine. `batchrun schema` prints its JSON Schema.

The docstring under each field becomes its description in the schema. Relative paths are relative to the
current directory.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from batchrunner.job.engine import GATEWAY_DROPS, EngineSpec, GatewayEngine
from batchrunner.job.fields import CountOrShare, Duration, Share, Spec
from batchrunner.job.sampling import SamplingSpec

RESULT_COLUMNS = (
    "row",
    "output",
    "finish_reason",
    "prompt_tokens",
    "cached_tokens",
    "completion_tokens",
    "latency_s",
    "attempts",
    "error",
)
"""Names that a result row has of its own, in order after the carried columns (`row` comes first)."""


class InputSpec(Spec):
    """Where the rows come from."""

    path: str | Annotated[list[str], Field(min_length=1)]
    """A Parquet file, a list of them, a glob, or a directory (Hive partitions become columns where the files
    have none such); local or a URI that pyarrow knows (s3://, gs://, hdfs://; globs: `*`, `**/`)."""
    columns: list[str] = []
    """Input columns carried into the output."""
    rename: dict[str, str] = {}
    """New names for carried columns: `{input_name: output_name}`."""
    filter: str | None = None
    """A Jinja2 expression over the row's columns; only rows where it is true are sent."""
    limit: Annotated[int, Field(ge=1)] | None = None
    """Send only the first N rows (after `filter`)."""


class PromptSpec(Spec):
    """How a row becomes a prompt: `user` (with or without `system`), or one of the columns below."""

    system: str | None = None
    """Jinja2 template of the system message."""
    user: str | None = None
    """Jinja2 template of the user message; the model's chat template is applied."""
    messages: str | None = None
    """A column of lists of {role, content}; the model's chat template is applied."""
    text: str | None = None
    """A column with the whole prompt as it is, or a Jinja2 template of it (no chat template)."""
    input_ids: str | None = None
    """A column of lists of token ids."""
    truncate: Literal["head", "tail", "middle"] | None = None
    """What is cut off a prompt that leaves no room for `max_new_tokens`: its head, its tail or its middle; of
    messages only the last user message's text is cut. Unset: such a row fails. Chats that end with the
    assistant, or have tools, names, other roles or a `structural_tag`, are left to the server, uncut."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Passed to the chat template, such as `{enable_thinking: false}`."""

    @model_validator(mode="after")
    def _one_kind(self) -> PromptSpec:
        given = [
            name for name in ("user", "messages", "text", "input_ids") if getattr(self, name) is not None
        ]
        if len(given) != 1:
            raise ValueError(
                f"give exactly one of user, messages, text, input_ids (got {', '.join(given) or 'none'})"
            )
        if given != ["user"] and self.system is not None:
            raise ValueError(f"`system` goes with `user`, not with `{given[0]}`")
        if given[0] in {"text", "input_ids"} and self.chat_template_kwargs is not None:
            raise ValueError(
                f"`chat_template_kwargs` has no effect on `{given[0]}`: no chat template is applied"
            )
        return self


class OutputSpec(Spec):
    """Where the results go."""

    path: str
    """Directory of the run: parts/*.parquet, report.json, events.jsonl, the engine's log."""
    part_rows: Annotated[int, Field(ge=1)] = 10_000
    """Rows in a part, at most; a part is also written when 30 s have passed."""
    durable: Duration = 1.0
    """A finished row is on disk, in a journal if not in a part, within this time."""


class LimitsSpec(Spec):
    """When a run gives up, and when its result counts as failed."""

    deadline: Duration | None = None
    """Stop sending after this time, let the rows in flight end, exit 1 (resumable)."""
    max_failed_rows: CountOrShare = 0
    """Failed rows tolerated, a count or a share (0.01 or 1%); more make the exit code 3."""
    abort_failed_share: Share = 0.5
    """Stop (exit 1) when more than this share of at least 100 rows failed: the job is plainly wrong."""
    max_attempts: Annotated[int, Field(ge=1)] = 5
    """Tries of a row that the engine answers with an error which may be the row's fault."""
    request_timeout: Duration = 3600.0
    """Longest wait for one answer."""
    engine_wait: Duration = 300.0
    """How long an engine that takes no row at all is waited for before the run stops (exit 1)."""
    hang: Duration = 60.0
    """Shortest silence of an engine with rows in flight that counts as a hang: it learns how slow it is, and
    is given five times as long at the start. One that we launched is started again."""
    drain: Duration = 100.0
    """After SIGUSR1 (a time limit is near) rows in flight have so long to end; then they are cut, and done
    again at the next start. `batchrun slurm --grace` sets it. SIGTERM leaves 15 s, Ctrl-C what it takes."""
    disk_wait: Duration = 600.0
    """How long a disk that is full, or takes nothing, is waited for before the run stops (exit 1)."""


class Job(Spec):
    """A whole job."""

    input: InputSpec
    """Where the rows come from."""
    prompt: PromptSpec
    """How a row becomes a prompt."""
    sampling: SamplingSpec = SamplingSpec()
    """How the engine samples, by SGLang's names."""
    output: OutputSpec
    """Where the results go."""
    engine: EngineSpec
    """What answers: `kind` is attach, server, gateway, inprocess or simulated."""
    limits: LimitsSpec = LimitsSpec()
    """When a run gives up, and when its result counts as failed."""
    order: Literal["auto", "input", "prefix", "longest_first"] = "auto"
    """In which order rows are sent; results are merged in input order whatever it is. `prefix` puts rows that
    begin alike together, over the whole input, so that the engine computes their beginning once;
    `longest_first` those with the longest outputs (`max_new_tokens` by column) or prompts first; `input` is
    the order of the files. `auto` looks at a sample and says what it takes, and why."""
    dedupe: bool = True
    """At temperature 0, send rows that are alike once and write the answer to each of them."""
    window: Literal["auto"] | Annotated[int, Field(ge=1)] = "auto"
    """Requests in flight, over all replicas; `auto` lets them follow the live load of each. Leave it."""
    tokenize: Literal["auto", "client", "server"] = "auto"
    """Where prompts become token ids. `auto`: here, where the first rows show that the engine makes the same
    ones and nothing else would differ; else there, and the log says why. `client`: here, or not at all; a
    server that the run launches goes without a tokenizer then (`--skip-tokenizer-init`, texts are made of
    answers here), unless stop texts, a grammar, `min_new_tokens` or `prompt.messages` need it."""
    queue: Annotated[tuple[Annotated[int, Field(ge=1)], Annotated[int, Field(ge=4)]], Field()] = (100, 2000)
    """The band in which `#queue-req` of each scheduler is held; scaled down where it runs few at once."""

    @field_validator("queue", mode="before")
    @classmethod
    def _two_numbers(cls, queue: object) -> object:
        if not isinstance(queue, (list, tuple)) or len(queue) != len(("low", "high")):
            raise ValueError("should be two numbers: [low, high]")
        return queue

    @field_validator("queue")
    @classmethod
    def _band(cls, queue: tuple[int, int]) -> tuple[int, int]:
        if queue[1] < 4 * queue[0]:
            raise ValueError(f"the upper end must be at least 4 times the lower one (got {list(queue)})")
        return queue

    @model_validator(mode="after")
    def _passes_the_gateway(self) -> Job:
        if isinstance(self.engine, GatewayEngine):
            chat = self.prompt.user is not None or self.prompt.messages is not None
            given = {k for k in SamplingSpec.model_fields if getattr(self.sampling, k) is not None}
            dropped = sorted(given & GATEWAY_DROPS["chat" if chat else "generate"])
            if dropped:
                raise ValueError(
                    f"sampling.{dropped[0]}: the gateway leaves it out of what it passes on: "
                    "use engine.kind attach with the urls of the replicas, or server"
                )
        return self

    @model_validator(mode="after")
    def _tokens_to_cut(self) -> Job:
        if self.prompt.truncate is not None and self.tokenize == "server":
            raise ValueError("prompt.truncate counts tokens here: leave out `tokenize: server`")
        return self

    @model_validator(mode="after")
    def _result_names(self) -> Job:
        carried = {self.input.rename.get(name, name): name for name in self.input.columns}
        for name in self.input.rename:
            if name not in self.input.columns:
                raise ValueError(f"input.rename names {name!r}, which is not in input.columns")
        if len(carried) < len(self.input.columns):
            raise ValueError("input.columns, as renamed, has a name twice")
        for name in RESULT_COLUMNS:
            if name in carried:
                raise ValueError(
                    f"input.columns: a result has a column {name!r} of its own; "
                    f"carry yours under another name: input.rename: {{{carried[name]}: input_{name}}}"
                )
        return self
