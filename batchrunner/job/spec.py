"""The job: rows, prompts, engine and results. `batchrun schema` prints its JSON Schema.

The docstring under each field becomes its description in the schema. Relative paths are relative to the
current directory; a leading `~`, `~user` or `$HOME` is a home directory.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from operator import attrgetter
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from batchrunner.core.media import KIND_OF_FIELD
from batchrunner.core.types import ForwardTask
from batchrunner.job.engine import EngineSpec
from batchrunner.job.fields import (
    CountOrShare,
    Duration,
    Off,
    PythonFunction,
    Share,
    Spec,
    UserPath,
    refuse,
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
    "sampling", "parse", "accept", "on_length", "on_repetition", "output.columns", "output.top_logprobs",
    "prompt.user", "prompt.system", "prompt.messages", "prompt.continue", "prompt.chat_template_kwargs",
    "prompt.tools", "prompt.rollout", *(f"prompt.{field}" for field in KIND_OF_FIELD),
)  # fmt: skip
"""Fields and sections that tasks without decoding do not have, except sampling.lora_path."""
WHOLE_PROMPTS = ("prompt.input_ids", "prompt.python", "prompt.truncate")
"""Fields that exclude choices and documents, which are tokenized together with a text."""


def given_fields(job: BaseModel) -> list[str]:
    """Return the fields that a job sets to another value than the default, by names like `sampling.n`."""
    names = []
    for name, field in type(job).model_fields.items():
        value = getattr(job, name)
        if name in job.model_fields_set and value != field.get_default(call_default_factory=True):
            below = given_fields(value) if isinstance(value, BaseModel) else []
            names += [f"{field.alias or name}.{key}" for key in below] or [field.alias or name]
    return names


def task_faults(task: TaskName, fields: Collection[str]) -> Iterator[str]:
    """Yield a fault for each field that the task does not have, and for required fields that are missing."""
    refused = [] if task == GENERATE else [*OF_GENERATING]
    if CHOICES in fields:
        refused += [*WHOLE_PROMPTS, "output.softmax"]
    if task == RerankTask.name:
        refused += [*WHOLE_PROMPTS, "tokenize"]
    for field in fields:
        owners = [name for name, kind in TASKS.items() if field in kind.takes]
        if owners and task not in owners:
            yield f"{field}: goes with task: {' or '.join(owners)}"
        is_refused = any(f"{field}.".startswith(f"{other}.") for other in refused)
        if is_refused and not field.startswith("sampling.lora_path"):
            beside = f" with {CHOICES}" if CHOICES in fields else ""
            yield f"{field}: does not go with task: {task}{beside}"
    if task == RerankTask.name and DOCUMENTS not in fields:
        yield f"task: rerank: {DOCUMENTS} is missing: name the column with documents of each query"
    if task == ScoreTask.name and ("labels" in fields) == (CHOICES in fields):
        yield f"task: score: takes either labels, which are single tokens, or {CHOICES}"


OnLength: TypeAlias = Literal["keep", "fail", "longer"]
OnRepetition: TypeAlias = Literal["keep", "stop", "fail"]


class AcceptSpec(Spec):
    """When an answer is good. A row with a bad answer is sent again; in the end it fails with that answer."""

    json_: Annotated[bool | dict[str, Any] | None, Field(alias="json")] = None
    """`true`: an answer must be JSON. Or a JSON Schema that it must satisfy. `sampling.json_schema` is
    checked without this; `false` lets any answer pass."""
    regex: Annotated[str | None, AfterValidator(check_regex)] = None
    """Regular expression to find in an answer; `^…$` matches the whole."""
    expression: str | None = None
    """Jinja2 expression that must be true, over `output` (the text), `parsed` (its JSON, else null),
    `reasoning`, `finish_reason` and the row's columns."""
    python: PythonFunction | None = None
    """Function of the answer, or of the answer and a dict of `input.columns`. It returns true, false, or a
    text that says what is wrong."""
    tries: Annotated[int, Field(ge=1, le=100)] | None = None
    """Maximum number of answers of a row, including the first. Default: 3; without a section `accept` 1. The
    second answer has a temperature of at least 0.4, later answers have at least 0.8."""
    feedback: bool = False
    """Show a chat its bad answer and what is wrong with it in the next try."""

    @property
    def has_condition(self) -> bool:
        """Whether the section itself has a condition on answers."""
        requires_json = self.json_ is not None and self.json_ is not False
        conditions = (self.regex, self.expression, self.python)
        return requires_json or any(condition is not None for condition in conditions)


TRIES = 3
"""Default of `accept.tries`."""

ColumnType: TypeAlias = Literal["string", "bool", "int32", "int64", "float32", "float64", "date", "timestamp"]


def _one_character(text: str) -> str:
    if len(text) != 1 or text in '"\r\n':
        raise ValueError('give one character, such as ";", or "\\t" in double quotes for a tab')
    return text


def _known_encoding(name: str) -> str:
    try:
        "".encode(name)
    except LookupError:
        raise ValueError(
            f"{name!r} is not an encoding of Python: give utf-8, cp1252, latin-1 or utf-16, for example"
        ) from None
    return name


class InputSpec(Spec):
    """Where the rows come from."""

    path: UserPath | Annotated[list[UserPath], Field(min_length=1)]
    """File, directory, glob or list of these: Parquet, or by their ending CSV, JSON Lines or Arrow, also
    compressed. Local, or a URI (`s3://`, `gs://`, `az://`, `hf://`, `hdfs://`) with `*` and `**/`. The
    `output.path` of a finished run means its results."""
    columns: list[str] = []
    """Columns to copy into the results."""
    types: dict[str, ColumnType] = {}
    """Types of CSV and JSON Lines columns: `string`, `bool`, `int32`, `int64`, `float32`, `float64`, `date`
    or `timestamp`. Other CSV columns are texts. A value that does not fit fails its row."""
    delimiter: Annotated[str, AfterValidator(_one_character)] | None = None
    """Separator of CSV files. Default: a comma, in `.tsv` a tab."""
    encoding: Annotated[str, AfterValidator(_known_encoding)] = "utf-8"
    """Encoding of CSV files, by Python's name. Excel in Western Europe writes `cp1252`."""
    rename: dict[str, str] = {}
    """New names for copied columns: `{old: new}`."""
    filter: str | None = None
    """Jinja2 expression over a row's columns, true for the rows to send."""
    limit: Annotated[int, Field(ge=1)] | None = None
    """Maximum number of rows to send, counted after `filter`. Default: all."""

    @property
    def carried_names(self) -> list[str]:
        """Names of the copied columns in the results, in the order of `columns`."""
        return [self.rename.get(name, name) for name in self.columns]


class LimitsSpec(Spec):
    """When a row fails, when a run gives up, and when it counts as failed."""

    deadline: Duration | None = None
    """Stop sending after this time. Rows in flight end; exit code 1."""
    max_failed_rows: CountOrShare = 0
    """Failed rows to tolerate: a count, or a share (0.01 or `1%`). If more rows fail, the exit code is 3."""
    abort_failed_share: Share = 0.5
    """Stop (exit code 1) when at least 100 rows were sent and more than this share of them failed. Rows that
    cannot be sent do not count."""
    max_attempts: Annotated[int, Field(ge=1)] = 5
    """Maximum number of attempts of a row that may itself be the cause of its failures."""
    python: Duration = 30.0
    """Maximum time of a call of a Python function (of `prompt.rollout`: between two awaits), or of reading a
    row's files."""
    python_memory_gb: Annotated[float, Field(gt=0)] = 2.0
    """GiB of memory that each process of Python functions and files may take beyond its imports."""
    python_processes: Annotated[int, Field(ge=1)] | None = None
    """Maximum number of processes for Python functions and files. Default: one per core, up to 8."""
    rollout: Duration = 3600.0
    """Maximum time of a call of `prompt.rollout`, including its waits for answers."""
    turns: Annotated[int, Field(ge=1)] = 100
    """Maximum number of answers for one row of `prompt.rollout`."""
    request_timeout: Duration = 3600.0
    """Maximum wait for one answer."""
    engine_wait: Duration = 300.0
    """Stop (exit code 1) when the engine accepts no row for this long."""
    hang: Duration = 60.0
    """An engine that has rows but makes no progress for this time counts as hung. A slow engine gets a longer
    time, and an engine that has just started gets five times this time."""
    drain: Duration = 100.0
    """Time that rows in flight have to end after SIGUSR1 (SIGTERM: 15 s; Ctrl-C: no limit). The next start
    does the rest. `batchrun slurm --grace` sets it."""
    disk_wait: Duration = 600.0
    """Stop (exit code 1) when results cannot be written, or an object store is unreachable, for this long."""


Label: TypeAlias = Annotated[str, Field(min_length=1)] | Annotated[int, Field(ge=0, strict=True)]
"""A token, by its text or its id."""


class Job(Spec):
    """A batch-inference job. Keys at the top that begin with `x-` are ignored: they hold YAML anchors."""

    model_config = ConfigDict(json_schema_extra={"patternProperties": {"^x-": {}}})

    task: TaskName = "generate"
    """`generate`: write a text. `embed`: make a vector. `score`: tell how probable `labels` or
    `prompt.choices` are. `rerank`: tell how relevant `prompt.documents` are. `reward`, `classify`: score by a
    model made for it."""
    input: InputSpec
    """Where the rows come from."""
    prompt: PromptSpec
    """How a row becomes a prompt."""
    labels: Annotated[list[Label], Field(min_length=1)] | None = None
    """With `task: score`: tokens whose probabilities the column `scores` has, in this order. A text must be
    one token; a number is a token id."""
    sampling: SamplingSpec = SamplingSpec()
    """Sampling parameters, by SGLang's names."""
    parse: PythonFunction | None = None
    """Function of the answer, or of the answer and a dict of `input.columns`, that returns a dict of columns.
    Its return type (TypedDict, dataclass, NamedTuple or pydantic model) names them."""
    output: OutputSpec
    """Where the results are written."""
    storage: StorageSpec = StorageSpec()
    """How object stores (`s3://`, `gs://`, `az://`) are reached."""
    engine: EngineSpec
    """The engine: `kind` is attach, server, gateway or simulated."""
    accept: AcceptSpec = AcceptSpec()
    """When an answer is good. A row with a bad answer is sent again; in the end it fails with that answer."""
    on_length: OnLength | None = None
    """What happens to an answer that was truncated at `max_new_tokens`. `keep` accepts it; `fail` rejects it;
    `longer` sends the row again with twice the tokens, at most three times. Default: `fail` if a JSON Schema
    is checked, else `keep`."""
    on_repetition: OnRepetition = "keep"
    """What happens to an answer that repeats itself without end. `keep` lets it go on to `max_new_tokens`;
    `stop` ends it and keeps its text up to the first repeat (`finish_reason` repetition); `fail` ends and
    rejects it, so that `accept.tries` applies."""
    limits: LimitsSpec = LimitsSpec()
    """When a run gives up, and when it counts as failed."""
    order: Literal["auto", "input", "prefix", "longest_first"] = "auto"
    """Order of sending. `prefix` sorts by prompt, so that a common prefix is computed once. `longest_first`:
    the rows with the largest `max_new_tokens` first, if it is a column, else those with the longest prompts.
    `input`: as in the files. `auto`: `prefix` or `input`, by a sample."""
    dedupe: bool = True
    """At temperature 0, send equal rows once and share the answer."""
    window: Literal["auto"] | Annotated[int, Field(ge=1)] = "auto"
    """Maximum number of requests in flight over all replicas. `auto` follows the load of each replica."""
    bundle: Literal["auto"] | Off | Annotated[int, Field(ge=1, le=64)] = "auto"
    """Number of rows in one request. Each row is answered as soon as it ends. `auto`: 1 to 64, chosen so that
    they end together. `off`: one."""
    tokenize: Literal["auto", "client", "server"] = "auto"
    """Who tokenizes prompts. `auto`: batchrunner, if the answers cannot differ. `client`: batchrunner; the
    run does not begin if it cannot. `server`: the engine."""

    python_path: list[UserPath] = []
    """Where modules of Python functions are looked up first. Default: the job file's directory."""

    @property
    def forward(self) -> ForwardTask | None:
        """The task, if it is one without decoding; None for generating."""
        if self.task == GENERATE:
            return None
        task = TASKS[self.task] if self.prompt.choices is None else ChoiceTask
        field_names = {field.name for field in dataclasses.fields(task)}
        options: dict[str, Any] = {}
        for place in task.takes:  # such as output.softmax
            value = attrgetter(place)(self)
            name = place.rpartition(".")[2]
            if name in field_names and value is not None:
                options[name] = value
        if self.labels:
            options["labels"] = tuple(self.labels)
        return task(**options)

    @model_validator(mode="before")
    @classmethod
    def _without_anchors(cls, tree: Any) -> Any:
        if not isinstance(tree, Mapping):
            return tree
        return {key: value for key, value in tree.items() if not str(key).startswith("x-")}

    @model_validator(mode="after")
    def _fields_go_together(self) -> Job:
        faults = [*task_faults(self.task, given_fields(self))]
        if not faults:  # else the columns of the results are not known
            faults += self._name_faults()
        refuse([*faults, *self._rule_faults()])
        return self

    def _rule_faults(self) -> Iterator[str]:
        """Yield a fault for each rule between sections that the job breaks."""
        prompt, sampling, accept = self.prompt, self.sampling, self.accept
        is_rollout = prompt.rollout is not None
        is_background = getattr(self.engine, "background", False)
        has_samples = sampling.n > 1
        has_tools = prompt.tools is not None
        asks_tool_calls = TOOL_CALLS in self.output.asked
        asks_prompt_logprobs = "prompt_logprobs" in self.output.asked
        needs_chat = accept.feedback or sampling.tool_choice is not None or asks_tool_calls

        if prompt.truncate is not None and self.tokenize == "server":
            yield "prompt.truncate counts tokens here: leave out `tokenize: server`"
        if self.tokenize == "client" and (has_tools or prompt.media):
            yield "tokenize: the server tokenizes prompts with tools or files: leave out `tokenize: client`"
        if self.has_check and not self._has_criterion:
            yield "accept: nothing is checked: give json, regex, expression or python"
        if needs_chat and not prompt.is_chat:
            yield "accept.feedback, sampling.tool_choice and the column tool_calls go with chats only"
        if has_samples and accept.feedback:
            yield "accept.feedback goes with one output of a row, not with sampling.n"
        if is_rollout and (has_samples or self.parse is not None or self.output.reuse):
            yield "prompt.rollout goes without sampling.n, parse and output.reuse"
        if is_background and (has_samples or self.window != "auto"):
            yield "engine.background goes without sampling.n and window"
        if asks_prompt_logprobs and (asks_tool_calls or has_tools):
            yield (
                "output.columns: SGLang returns tool_calls for chats only, prompt_logprobs for others only"
            )

    @property
    def has_check(self) -> bool:
        """Whether the job says how answers are checked."""
        return self.accept != AcceptSpec()

    @property
    def _has_criterion(self) -> bool:
        """Whether there is something to check answers by; `accept.json: false` counts as such."""
        fails_truncated = self.on_length in {"fail", "longer"}
        fails_repetition = self.on_repetition == "fail"
        return (
            self.accept.has_condition
            or self.accept.json_ is False
            or self.sampling.json_schema is not None
            or fails_truncated
            or fails_repetition
            or self.prompt.rollout is not None  # its requests may have schemas
        )

    def _name_faults(self) -> Iterator[str]:
        """Yield the faults of the names of carried columns in the results."""
        carried = dict(zip(self.input.carried_names, self.input.columns, strict=True))
        for name in self.input.rename:
            if name not in self.input.columns:
                yield f"input.rename names {name!r}, which is not in input.columns"
        for name, times in Counter(self.input.carried_names).items():
            if times > 1:
                yield f"input.columns, as renamed, has {name!r} twice"
        more = [REQUEST_DIGEST, *([RESPONSE] if self.prompt.is_batch else [])]
        for name in (*result_columns(self.forward), *self.output.asked, *more):
            if name in carried:
                yield (
                    f"input.columns: a result has a column {name!r} of its own: carry yours under another "
                    f"name: input.rename: {{{carried[name]}: input_{name}}}"
                )
