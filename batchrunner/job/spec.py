"""The job: which rows, as which prompts, on which engine. `batchrun schema` prints its JSON Schema.

The docstring under each field becomes its description in the schema. Relative paths are relative to the
current directory; a leading `~`, `~user` or `$HOME` is a home directory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from operator import attrgetter
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import AfterValidator, BaseModel, Field, field_validator, model_validator

from batchrunner.core.media import KIND_OF_FIELD
from batchrunner.core.types import ForwardTask
from batchrunner.job.engine import EngineSpec
from batchrunner.job.fields import (
    CountOrShare,
    Duration,
    PythonFunction,
    Share,
    Spec,
    UserPath,
)
from batchrunner.job.output import (
    REQUEST_DIGEST,
    RESPONSE,
    TOOL_CALLS,
    OutputSpec,
    StorageSpec,
    result_columns,
)
from batchrunner.job.prompt import PromptSpec
from batchrunner.job.sampling import SamplingSpec, check_regex
from batchrunner.job.tasks import GENERATE, TASKS, ChoiceTask, RerankTask, ScoreTask, TaskName

CHOICES = "prompt.choices"
DOCUMENTS = "prompt.documents"
OF_GENERATING = (
    "sampling", "parse", "accept", "on_length", "output.columns", "output.top_logprobs",
    "prompt.user", "prompt.system", "prompt.messages", "prompt.continue", "prompt.chat_template_kwargs",
    "prompt.tools", "prompt.rollout", *(f"prompt.{field}" for field in KIND_OF_FIELD),
)  # fmt: skip
"""Fields, and whole sections, that tasks without decoding do not take, but for sampling.lora_path."""
WHOLE_PROMPTS = ("prompt.input_ids", "prompt.python", "prompt.truncate")
"""Fields that do not go with choices or documents, which are tokenized together with a text."""


def given_fields(job: BaseModel) -> list[str]:
    """Return the fields that a job gives and that are not as without them, such as `sampling.n`."""
    found = []
    for name, field in type(job).model_fields.items():
        value = getattr(job, name)
        if name in job.model_fields_set and value != field.get_default(call_default_factory=True):
            below = given_fields(value) if isinstance(value, BaseModel) else []
            found += [f"{field.alias or name}.{key}" for key in below] or [field.alias or name]
    return found


def check_task_fields(task: TaskName, given: Collection[str]) -> None:
    """Raise ValueError where a field does not go with the task, or one that it needs is missing."""
    refused = [] if task == GENERATE else [*OF_GENERATING]
    if CHOICES in given:
        refused += [*WHOLE_PROMPTS, "output.softmax"]
    if task == RerankTask.name:
        refused += [*WHOLE_PROMPTS, "tokenize"]
    for field in given:
        owners = [name for name, kind in TASKS.items() if field in kind.takes]
        if owners and task not in owners:
            raise ValueError(f"{field}: goes with task: {' or '.join(owners)}")
        is_refused = any(f"{field}.".startswith(f"{other}.") for other in refused)
        if is_refused and not field.startswith("sampling.lora_path"):
            beside = f" with {CHOICES}" if CHOICES in given else ""
            raise ValueError(f"{field}: does not go with task: {task}{beside}")
    if task == RerankTask.name and DOCUMENTS not in given:
        raise ValueError(
            f"task: rerank: {DOCUMENTS} is missing: name the column with documents of each query"
        )
    if task == ScoreTask.name and ("labels" in given) == (CHOICES in given):
        raise ValueError(f"task: score: takes either labels, which are single tokens, or {CHOICES}")


OnLength: TypeAlias = Literal["keep", "fail", "longer"]


class AcceptSpec(Spec):
    """When an answer is good. One that is not is asked for again, and then fails its row, which keeps it."""

    json_: Annotated[bool | dict[str, Any] | None, Field(alias="json")] = None
    """Whether an answer must be JSON: `true`, or a JSON Schema that it must satisfy. Where
    `sampling.json_schema` is set, an answer must satisfy that by itself; `false` lets any answer pass."""
    regex: Annotated[str | None, AfterValidator(check_regex)] = None
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
    default 3, and 1 where the job has no section `accept`."""
    temperature: Annotated[float, Field(ge=0)] | None = None
    """Temperature of all tries but the first. Unset: a row that was sampled at a lower one is tried again at
    0.4, then at 0.8."""
    feedback: bool = False
    """Whether a chat is told what was wrong: the answer and the complaint stand in the next try's
    conversation."""

    @property
    def has_condition(self) -> bool:
        """Whether the section itself says what an answer must be."""
        given = (self.regex, self.expression, self.python)
        return bool(self.json_) or any(condition is not None for condition in given)

    def temperature_of(self, number: int, sampled: float | None) -> float | None:
        """Return the temperature of try `number`, from 1 on, of a row that `sampling` gives one, or none."""
        if self.temperature is not None:
            return self.temperature
        least = RISING[min(number, len(RISING)) - 1]
        return sampled if sampled is None else max(sampled, least)


TRIES = 3
"""Answers of a row that are checked unless the job says otherwise."""
RISING = (0.4, 0.8)
"""Least temperatures of the second and of all further tries: at 0 the same answer would come again."""


ColumnType: TypeAlias = Literal["string", "bool", "int32", "int64", "float32", "float64", "date", "timestamp"]


def _one_character(text: str) -> str:
    if len(text) != 1 or text in '"\r\n':
        raise ValueError('give one character, such as ";", or "\\t" in double quotes for a tab')
    return text


def _known_encoding(name: str) -> str:
    try:
        "".encode(name)
    except LookupError:
        raise ValueError(f"{name!r} is none: utf-8, cp1252, latin-1 and utf-16, for example, are") from None
    return name


class InputSpec(Spec):
    """Where the rows come from."""

    path: UserPath | Annotated[list[UserPath], Field(min_length=1)]
    """A file, a directory, a glob, or a list of these. Files are Parquet, or by their ending CSV (`.csv`,
    `.tsv`), JSON Lines (`.jsonl`, `.ndjson`, `.json`) or Arrow (`.arrow`, `.feather`, `.ipc`), which may be
    compressed (`.gz`, `.zst`). Directory names such as `year=2024` become
    columns, unless the files have a column of that name. The `output.path` of a run that is done means its
    merged results. Paths are local, or URIs of object stores (s3://, gs://, az://) or of what else pyarrow
    can open (hdfs://), whose globs may contain `*` and `**/`."""
    columns: list[str] = []
    """Input columns that are copied to the results."""
    types: dict[str, ColumnType] = {}
    """Types of columns of CSV and JSON Lines files. In CSV any other column is a text, as it stands in the
    file; in JSON Lines it has the type of its values. A value that does not fit fails its row."""
    delimiter: Annotated[str, AfterValidator(_one_character)] | None = None
    """Character between the values of CSV files; by default a comma, in `.tsv` a tab."""
    encoding: Annotated[str, AfterValidator(_known_encoding)] = "utf-8"
    """Encoding of CSV files by Python's name: `cp1252` is that of Excel in Western Europe."""
    decimal: Literal[".", ","] = "."
    """What stands before the decimals of numbers in CSV files, in columns of type float32 or float64."""
    rename: dict[str, str] = {}
    """New names for copied columns: `{input_name: output_name}`."""
    filter: str | None = None
    """Jinja2 expression over the columns of a row; only rows for which it is true are sent."""
    limit: Annotated[int, Field(ge=1)] | None = None
    """Number of rows to send, counted after `filter`; by default all."""

    @property
    def carried_names(self) -> list[str]:
        """Names of the copied columns in the results, in the order of `columns`."""
        return [self.rename.get(name, name) for name in self.columns]


class LimitsSpec(Spec):
    """When a run gives up, and when it counts as failed."""

    deadline: Duration | None = None
    """Time after which no more rows are sent. Rows in flight finish, the exit code is 1, the run can be
    resumed."""
    max_failed_rows: CountOrShare = 0
    """Failed rows that are tolerated, as a count or a fraction (0.01 or 1%). With more the exit code is 3."""
    abort_failed_share: Share = 0.5
    """The run stops (exit code 1) when more than this fraction of the rows that were sent failed, of at least
    100. Rows that cannot be sent, such as those with a null prompt, do not count here."""
    max_attempts: Annotated[int, Field(ge=1)] = 5
    """Most tries of a row whose tries fail possibly because of the row itself."""
    python: Duration = 30.0
    """Time of one call of a Python function (`prompt.python`, `parse`, `accept.python`), of `prompt.rollout`
    between two awaits, and of reading the files of a row. A row whose call takes longer fails."""
    python_memory_gb: Annotated[float, Field(gt=0)] = 2.0
    """Memory in GiB that each process of the Python functions, which also read images and other files, may
    take beyond what it has when its modules are imported. A row whose call needs more fails."""
    python_processes: Annotated[int, Field(ge=1)] | None = None
    """Processes that run the Python functions and read images and other files, at most; by default one for
    each core, up to 8."""
    rollout: Duration = 3600.0
    """Time of one row of `prompt.rollout`, its answers included. A row that takes longer fails."""
    turns: Annotated[int, Field(ge=1)] = 100
    """Most answers that `prompt.rollout` asks for, for one row. A row that asks for more fails."""
    request_timeout: Duration = 3600.0
    """Longest wait for the answer to one request."""
    engine_wait: Duration = 300.0
    """Time without any accepted row after which the run stops (exit code 1)."""
    hang: Duration = 60.0
    """Minimum time without progress after which an engine with rows in flight counts as hung; for slow
    engines it becomes longer, and before the first progress it is five times as long. A hung server that the
    run started is restarted."""
    drain: Duration = 100.0
    """Time for rows in flight to finish after SIGUSR1, which announces the end of a time limit. Unfinished
    rows are done by the next attempt. `batchrun slurm --grace` sets it. After SIGTERM it is 15 s, after
    Ctrl-C there is no limit."""
    disk_wait: Duration = 600.0
    """Time after which the run stops (exit code 1) while results cannot be written, because the disk is full
    for example, or while an object store is away at its start."""


Label: TypeAlias = Annotated[str, Field(min_length=1)] | Annotated[int, Field(ge=0, strict=True)]
"""A token, by its text or its id."""


class Job(Spec):
    """A batch-inference job."""

    task: TaskName = "generate"
    """What the model does with each prompt. `generate`: it writes a text. `embed`: it makes a vector, in the
    column `embedding`; prompts are texts or token ids. `score`: it tells how probable `labels` or
    `prompt.choices` are after the prompt. `rerank`: it tells how relevant `prompt.documents` are to
    the prompt. `reward`, `classify`: a reward or classification model scores the prompt."""
    input: InputSpec
    """Where the rows come from."""
    prompt: PromptSpec
    """How a row becomes a prompt."""
    labels: Annotated[list[Label], Field(min_length=1)] | None = None
    """With `task: score`: tokens whose probabilities after the prompt are the column `scores`, in this order.
    A text must be a single token, a number is the token's id."""
    sampling: SamplingSpec = SamplingSpec()
    """Sampling parameters, by SGLang's names."""
    parse: PythonFunction | None = None
    """Python function that makes columns of an answer, as `module:function`. It is called with the answer, a
    text, or with the answer and the row, a dict of `input.columns`, and returns a dict. Its return type, a
    TypedDict, a dataclass or a pydantic model, says the columns. A row whose answer it cannot parse fails and
    keeps its answer. It runs in processes of its own."""
    output: OutputSpec
    """Where the results are written."""
    storage: StorageSpec = StorageSpec()
    """How object stores (`s3://`, `gs://`, `az://`) are reached."""
    engine: EngineSpec
    """Engine that answers. `kind` is attach, server, gateway or simulated."""
    accept: AcceptSpec = AcceptSpec()
    """When an answer is good. One that is not is asked for again, and then fails its row, which keeps it."""
    on_length: OnLength | None = None
    """What becomes of an answer that was cut at `max_new_tokens`. `keep`: it is the row's. `fail`: it is not
    good, as if by `accept`. `longer`: it is asked for again, with twice the tokens, three times at most;
    then it is not good. By default `fail` where answers are checked against a JSON Schema, else `keep`."""
    limits: LimitsSpec = LimitsSpec()
    """When a run gives up, and when it counts as failed."""
    order: Literal["auto", "input", "prefix", "longest_first"] = "auto"
    """Order in which rows are sent; merged results are in input order in any case. `prefix` sorts rows by
    prompt, so that the engine computes a common prefix once. `longest_first` sends rows with the longest
    outputs (where `max_new_tokens` is a column), else with the longest prompts, first. `input` is the order
    of the files. `auto` chooses `prefix` or `input` by a sample, and logs the reason."""
    dedupe: bool = True
    """Whether rows with equal requests are sent only once at temperature 0, and share the answer."""
    window: Literal["auto"] | Annotated[int, Field(ge=1)] = "auto"
    """Requests in flight over all replicas. `auto`, recommended, adapts the number to the load of each
    replica."""
    bundle: Literal["auto", "off"] | Annotated[int, Field(ge=1, le=64)] = "auto"
    """Rows that share a request where prompts are tokenized by batchrunner; each is answered when it ends.
    `auto` follows the rows that end together, from 1 row to 64. A number is the size in any case. `off`:
    each row is a request of its own."""
    tokenize: Literal["auto", "client", "server"] = "auto"
    """Where prompts are tokenized. `auto`: by batchrunner if the engine makes the same tokens of the first
    rows and no other behaviour would differ; else by the engine; `-v` shows the reason. `client`: by
    batchrunner, or the run does not begin. `server`: by the engine."""
    queue: Annotated[tuple[Annotated[int, Field(ge=1)], Annotated[int, Field(ge=4)]], Field()] = (100, 2000)
    """Range [low, high] in which the number of waiting requests of each scheduler (SGLang's `#queue-req`) is
    kept. It is scaled down for a scheduler that runs few requests at once."""

    python_path: list[UserPath] = []
    """Directories in which the modules of Python functions are looked up first, before the current directory
    and the installed packages. By default the directory of the job file."""

    @property
    def forward(self) -> ForwardTask | None:
        """The task, if it is one without decoding."""
        if self.task == GENERATE:
            return None
        kind = TASKS[self.task] if self.prompt.choices is None else ChoiceTask
        known = {field.name for field in dataclasses.fields(kind)}
        given = {place.rpartition(".")[2]: attrgetter(place)(self) for place in kind.takes}
        values = {name: given[name] for name in known & given.keys() if given[name] is not None}
        return kind(**values | {"labels": tuple(self.labels)} if self.labels else values)

    @field_validator("bundle", mode="before")
    @classmethod
    def _off(cls, bundle: object) -> object:
        return "off" if bundle is False else bundle  # YAML reads off as false

    @field_validator("queue")
    @classmethod
    def _band(cls, queue: tuple[int, int]) -> tuple[int, int]:
        if queue[1] < 4 * queue[0]:
            raise ValueError("the upper end must be at least 4 times the lower one")
        return queue

    @model_validator(mode="after")
    def _fields_go_together(self) -> Job:
        check_task_fields(self.task, given_fields(self))
        prompt, sampling, accept, asked = self.prompt, self.sampling, self.accept, self.output.asked
        fails_cut = self.on_length in {"fail", "longer"}
        has_schema = sampling.json_schema is not None and accept.json_ is not False
        is_checked = accept.has_condition or fails_cut or has_schema or accept.json_ is False
        is_checked = is_checked or prompt.rollout is not None  # whose calls may have schemas
        rules = (
            (
                prompt.truncate is not None and self.tokenize == "server",
                "prompt.truncate counts tokens here: leave out `tokenize: server`",
            ),
            (
                self.tokenize == "client" and (prompt.tools is not None or prompt.media),
                "tokenize: the server tokenizes prompts with tools or files: leave out `tokenize: client`",
            ),
            (
                self.has_check and not is_checked,
                "accept: nothing is checked: give json, regex, expression or python",
            ),
            (
                not prompt.is_chat
                and (accept.feedback or sampling.tool_choice is not None or TOOL_CALLS in asked),
                "accept.feedback, sampling.tool_choice and the column tool_calls go with chats only",
            ),
            (
                sampling.n > 1 and accept.feedback,
                "accept.feedback goes with one output of a row, not with sampling.n",
            ),
            (
                prompt.rollout is not None
                and (sampling.n > 1 or self.parse is not None or self.output.reuse),
                "prompt.rollout goes without sampling.n, parse and output.reuse",
            ),
            (
                "prompt_logprobs" in asked and (TOOL_CALLS in asked or prompt.tools is not None),
                "output.columns: SGLang gives tool_calls of chats only, and prompt_logprobs of other prompts",
            ),
        )
        for is_wrong, message in rules:
            if is_wrong:
                raise ValueError(message)
        return self

    @property
    def has_check(self) -> bool:
        """Whether the job says how answers are checked."""
        return self.accept != AcceptSpec()

    @model_validator(mode="after")
    def _result_names(self) -> Job:
        carried = dict(zip(self.input.carried_names, self.input.columns, strict=True))
        for name in self.input.rename:
            if name not in self.input.columns:
                raise ValueError(f"input.rename names {name!r}, which is not in input.columns")
        if len(carried) < len(self.input.columns):
            twice = next(name for name in carried if self.input.carried_names.count(name) > 1)
            raise ValueError(f"input.columns, as renamed, has {twice!r} twice")
        more = [REQUEST_DIGEST, *([RESPONSE] if self.prompt.is_batch else [])]
        for name in (*result_columns(self.forward), *self.output.asked, *more):
            if name in carried:
                raise ValueError(
                    f"input.columns: a result has a column {name!r} of its own: carry yours under another "
                    f"name: input.rename: {{{carried[name]}: input_{name}}}"
                )
        return self
