"""The job (`Job`), with its sections `input`, `accept` and `limits`.

`batchrun schema` prints its JSON Schema. The docstring under each field becomes the field's description in
the schema. Relative paths begin in the current directory. A leading `~`, `~user` or `$HOME` stands for a home
directory.
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
"""Fields and sections that only the task `generate` has.

`sampling.lora_path` is the exception: all tasks have it.
"""
WHOLE_PROMPTS = ("prompt.input_ids", "prompt.python", "prompt.truncate")
"""Fields that cannot be combined with choices or documents.

Each choice or document is tokenized together with the prompt's text.
"""


def given_fields(job: BaseModel) -> list[str]:
    """Return the names, such as `sampling.n`, of the fields that differ from their defaults.

    Of a section, the fields in it are named.
    """
    names = []
    for name, field in type(job).model_fields.items():
        value = getattr(job, name)
        if name in job.model_fields_set and value != field.get_default(call_default_factory=True):
            key = field.alias or name
            keys_below = given_fields(value) if isinstance(value, BaseModel) else []
            # A value that is not a section, or a section without such fields, is named itself.
            names += [f"{key}.{key_below}" for key_below in keys_below] or [key]
    return names


def task_faults(task: TaskName, fields: Collection[str]) -> Iterator[str]:
    """Yield a fault for each field that a job's task does not allow, and for each missing field.

    `fields` are the names of the fields that the job sets.
    """
    refused_fields = [] if task == GENERATE else [*OF_GENERATING]
    if CHOICES in fields:
        refused_fields += [*WHOLE_PROMPTS, "output.softmax"]
    if task == RerankTask.name:  # The server tokenizes each pair of query and document.
        refused_fields += [*WHOLE_PROMPTS, "tokenize"]
    for field in fields:
        owners = [name for name, task_class in TASKS.items() if field in task_class.takes]
        if owners and task not in owners:
            yield f"{field}: needs task: {' or '.join(owners)}"
        # With the dots, the name of a section matches its fields, but not a longer name that begins alike.
        is_refused = any(f"{field}.".startswith(f"{refused}.") for refused in refused_fields)
        if is_refused and not field.startswith("sampling.lora_path"):
            with_choices = f" with {CHOICES}" if CHOICES in fields else ""
            yield f"{field}: cannot be used for task: {task}{with_choices}"
    if task == RerankTask.name and DOCUMENTS not in fields:
        yield f"task: rerank: {DOCUMENTS} is missing: name the column with documents of each query"
    has_labels, has_choices = "labels" in fields, CHOICES in fields
    if task == ScoreTask.name and has_labels == has_choices:  # A job must have either labels or choices.
        yield f"task: score: needs either labels, which are single tokens, or {CHOICES}"


OnLength: TypeAlias = Literal["keep", "fail", "longer"]
OnRepetition: TypeAlias = Literal["auto", "keep", "stop", "fail"]


class AcceptSpec(Spec):
    """Conditions on answers. A row with a bad answer is sent again. It fails after the last try."""

    json_: Annotated[bool | dict[str, Any] | None, Field(alias="json")] = None
    """`true`: an answer must be JSON. A JSON Schema: an answer must satisfy the schema. `false`: an answer
    need not be JSON. Unset: an answer must satisfy `sampling.json_schema`, if the job has one."""
    regex: Annotated[str | None, AfterValidator(check_regex)] = None
    """Regular expression that an answer must contain. `^…$` stands for the whole answer."""
    expression: str | None = None
    """Jinja2 expression that must be true. It may use `output` (the answer's text), `parsed` (its JSON, else
    null), `reasoning`, `finish_reason` and the row's columns."""
    python: PythonFunction | None = None
    """Function of the answer, or of the answer and a dict of `input.columns`.

    For a good answer, it returns true. For a bad one, it returns false or a complaint (a text).
    """
    tries: Annotated[int, Field(ge=1, le=100)] | None = None
    """Maximum number of answers of a row, including the first. Default: 3, or 1 without a section `accept`.
    The second answer has a temperature of at least 0.4, and later answers have at least 0.8."""
    feedback: bool = False
    """In the next try of a chat, show the model its bad answer and the complaint about it."""

    @property
    def has_condition(self) -> bool:
        """Whether the section has a condition on answers."""
        requires_json = self.json_ is not None and self.json_ is not False
        conditions = (self.regex, self.expression, self.python)
        return requires_json or any(condition is not None for condition in conditions)


TRIES = 3
"""Default of `accept.tries`."""

ColumnType: TypeAlias = Literal["string", "bool", "int32", "int64", "float32", "float64", "date", "timestamp"]


def _one_character(text: str) -> str:
    """Return a delimiter unchanged; raise ValueError if it is not a single character that CSV allows."""
    if len(text) != 1 or text in '"\r\n':
        raise ValueError('give one character, such as ";", or "\\t" in double quotes for a tab')
    return text


def _known_encoding(name: str) -> str:
    """Return the name of an encoding unchanged; raise ValueError if Python does not know it."""
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
    """File, directory, glob, or a list of these. The ending of a file's name tells its format: CSV, JSON
    Lines, Arrow (all also compressed), or Parquet for any other ending. Paths are local, or URIs (`s3://`,
    `gs://`, `az://`, `hf://`, `hdfs://`), and may contain `*` and `**/`. The `output.path` of a finished run
    stands for its results."""
    columns: list[str] = []
    """Columns to copy into the results."""
    types: dict[str, ColumnType] = {}
    """Types of CSV and JSON Lines columns: `string`, `bool`, `int32`, `int64`, `float32`, `float64`, `date`
    or `timestamp`. Other CSV columns are texts. A value that does not fit its type fails its row."""
    delimiter: Annotated[str, AfterValidator(_one_character)] | None = None
    """Delimiter of CSV files. Default: a tab in `.tsv` files, else a comma."""
    encoding: Annotated[str, AfterValidator(_known_encoding)] = "utf-8"
    """Encoding of CSV files, by Python's name. Excel in Western Europe writes `cp1252`."""
    rename: dict[str, str] = {}
    """New names for copied columns: `{old: new}`."""
    filter: str | None = None
    """Jinja2 expression over a row's columns. Only rows for which it is true are sent."""
    limit: Annotated[int, Field(ge=1)] | None = None
    """Maximum number of rows to send, counted after `filter`. Default: all."""

    @property
    def carried_names(self) -> list[str]:
        """Names of the copied columns in the results, in the order of `columns`."""
        return [self.rename.get(name, name) for name in self.columns]


class LimitsSpec(Spec):
    """Limits at which a row fails, a run stops, or a run counts as failed."""

    deadline: Duration | None = None
    """Stop sending rows after this time. Rows in flight still end, and the exit code is 1."""
    max_failed_rows: CountOrShare = 0
    """Number of failed rows to tolerate, as a count or as a share (0.01 or `1%`).

    If more rows fail, the exit code is 3.
    """
    abort_failed_share: Share = 0.5
    """Stop (exit code 1) when at least 100 rows were sent and more than this share of them failed. Rows that
    cannot be sent do not count."""
    max_attempts: Annotated[int, Field(ge=1)] = 5
    """Maximum number of attempts at a row whose failures may be caused by the row itself."""
    python: Duration = 30.0
    """Maximum time of a call of a Python function, or of reading the files of a row. For `prompt.rollout`, it
    is the maximum time between two awaits."""
    python_memory_gb: Annotated[float, Field(gt=0)] = 2.0
    """Memory in GiB that each process for Python functions and files may use in addition to its imports."""
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
    """Maximum time for rows in flight to end after SIGUSR1 (SIGTERM: 15 s; Ctrl-C: no limit). The next start
    of the run sends the remaining rows. `batchrun slurm --grace` sets this field."""
    disk_wait: Duration = 600.0
    """Stop (exit code 1) when results cannot be written, or an object store is unreachable, for this long."""


Label: TypeAlias = Annotated[str, Field(min_length=1)] | Annotated[int, Field(ge=0, strict=True)]
"""A token, as its text or its id."""


class Job(Spec):
    """A batch-inference job. Top-level keys that begin with `x-` are ignored; they may hold YAML anchors."""

    model_config = ConfigDict(json_schema_extra={"patternProperties": {"^x-": {}}})

    task: TaskName = "generate"
    """`generate`: write a text. `embed`: make a vector. `score`: tell how probable `labels` or
    `prompt.choices` are. `rerank`: tell how relevant `prompt.documents` are. `reward`, `classify`: score a
    text with a reward model or a classification model."""
    input: InputSpec
    """Where the rows come from."""
    prompt: PromptSpec
    """Prompt of each row."""
    labels: Annotated[list[Label], Field(min_length=1)] | None = None
    """With `task: score`: tokens whose probabilities the column `scores` has, in this order. A text must be a
    single token, and a number is a token id."""
    sampling: SamplingSpec = SamplingSpec()
    """Sampling parameters, by SGLang's names."""
    parse: PythonFunction | None = None
    """Function of the answer, or of the answer and a dict of `input.columns`, that returns a dict of columns.
    Its return type (TypedDict, dataclass, NamedTuple or pydantic model) declares these columns."""
    output: OutputSpec
    """Where the results are written."""
    storage: StorageSpec = StorageSpec()
    """Access to object stores (`s3://`, `gs://`, `az://`)."""
    engine: EngineSpec
    """The engine. Its `kind` is attach, server, gateway or simulated."""
    accept: AcceptSpec = AcceptSpec()
    """Conditions on answers. A row with a bad answer is sent again. After the last try, the row fails, and
    its result has the bad answer."""
    on_length: OnLength | None = None
    """Treatment of an answer that was truncated at `max_new_tokens`. `keep`: accept the answer. `fail`:
    reject it. `longer`: send the row again with twice the tokens, at most three times. Default: `fail` if a
    JSON Schema is checked, else `keep`."""
    on_repetition: OnRepetition = "auto"
    """Treatment of an answer that repeats itself without end. `keep`: let it continue to `max_new_tokens`.
    `stop`: end it, and keep its text up to the first repeat (`finish_reason` repetition). `fail`: end and
    reject it, so that `accept.tries` applies. `auto`: as `stop`, but only for prose, and only in rows that
    have 2,048 or more new tokens and nothing that may demand repetition."""
    limits: LimitsSpec = LimitsSpec()
    """Limits at which a row fails, a run stops, or a run counts as failed."""
    order: Literal["auto", "input", "prefix", "longest_first"] = "auto"
    """Order of sending. `prefix`: sorted by prompt, so that a common prefix is computed once.
    `longest_first`: if `max_new_tokens` comes from a column, rows with the largest value first, else rows
    with the longest prompts first. `input`: as in the files. `auto`: `prefix` or `input`, decided from a
    sample of the rows."""
    dedupe: bool = True
    """At temperature 0, send equal rows once and share the answer."""
    window: Literal["auto"] | Annotated[int, Field(ge=1)] = "auto"
    """Maximum number of requests in flight over all replicas. `auto` follows the load of each replica."""
    bundle: Literal["auto"] | Off | Annotated[int, Field(ge=1, le=64)] = "auto"
    """Number of rows in one HTTP request. Each row is answered as soon as it ends. `auto`: 1 to 64 rows that
    probably end at about the same time. `off`: 1."""
    tokenize: Literal["auto", "client", "server"] = "auto"
    """Who tokenizes prompts. `auto`: batchrunner, if the answers cannot differ, else the engine. `client`:
    batchrunner; the run does not begin if that is impossible. `server`: the engine."""

    python_path: list[UserPath] = []
    """Directories in which modules of Python functions are looked up first. Default: the job file's
    directory."""

    @property
    def forward(self) -> ForwardTask | None:
        """Task without decoding, with its options; None if the model generates text."""
        if self.task == GENERATE:
            return None
        task_class = TASKS[self.task] if self.prompt.choices is None else ChoiceTask
        option_names = {field.name for field in dataclasses.fields(task_class)}
        options: dict[str, Any] = {}
        # The last part of a field's name is the name of the option: `output.softmax` sets `softmax`. A field
        # that is no option of the task, such as `prompt.documents`, is read elsewhere.
        for field_name in task_class.takes:
            value = attrgetter(field_name)(self)
            option = field_name.rpartition(".")[2]
            if option in option_names and value is not None:
                options[option] = value
        if self.labels:
            options["labels"] = tuple(self.labels)
        return task_class(**options)

    @model_validator(mode="before")
    @classmethod
    def _without_anchors(cls, tree: Any) -> Any:
        if not isinstance(tree, Mapping):
            return tree
        return {key: value for key, value in tree.items() if not str(key).startswith("x-")}

    @model_validator(mode="after")
    def _fields_go_together(self) -> Job:
        faults = [*task_faults(self.task, given_fields(self))]
        if not faults:  # The columns of the results are only known for a valid task.
            faults += self._name_faults()
        refuse([*faults, *self._rule_faults()])
        return self

    def _rule_faults(self) -> Iterator[str]:
        """Yield a fault for each rule between sections that the job breaks."""
        prompt, sampling, accept = self.prompt, self.sampling, self.accept
        is_rollout = prompt.rollout is not None
        is_background = getattr(self.engine, "background", False)
        has_several_completions = sampling.n > 1
        has_tools = prompt.tools is not None
        asks_tool_calls = TOOL_CALLS in self.output.asked
        asks_prompt_logprobs = "prompt_logprobs" in self.output.asked
        needs_chat = accept.feedback or sampling.tool_choice is not None or asks_tool_calls

        thinking, most = sampling.max_thinking_tokens, sampling.max_new_tokens
        if isinstance(thinking, int) and isinstance(most, int) and thinking >= most:
            yield (
                f"sampling: max_thinking_tokens ({thinking}) leaves no room for an answer in max_new_tokens "
                f"({most}), which also counts the thinking: raise max_new_tokens"
            )
        if prompt.truncate is not None and self.tokenize == "server":
            yield "prompt.truncate needs prompts that batchrunner tokenizes: leave out `tokenize: server`"
        if self.tokenize == "client" and (has_tools or prompt.media):
            yield "tokenize: the server tokenizes prompts with tools or files: leave out `tokenize: client`"
        if self.has_check and not self._has_criterion:
            yield "accept: has no condition on answers: give json, regex, expression or python"
        if needs_chat and not prompt.is_chat:
            yield "accept.feedback, sampling.tool_choice and the column tool_calls need a chat prompt"
        if has_several_completions and accept.feedback:
            yield "accept.feedback cannot be combined with sampling.n above 1: leave one out"
        if is_rollout and (has_several_completions or self.parse is not None or self.output.reuse):
            yield "prompt.rollout cannot be combined with sampling.n, parse or output.reuse: leave them out"
        if is_background and (has_several_completions or self.window != "auto"):
            yield "engine.background cannot be combined with sampling.n or window: leave them out"
        if asks_prompt_logprobs and (asks_tool_calls or has_tools):
            yield (
                "output.columns: SGLang returns tool_calls only for chats, "
                "and prompt_logprobs only for other requests: leave one out"
            )

    @property
    def has_check(self) -> bool:
        """Whether the job sets a field of the section `accept`."""
        return self.accept != AcceptSpec()

    @property
    def _has_criterion(self) -> bool:
        """Whether anything can reject an answer, or `accept.json: false` says that nothing shall."""
        fails_truncated = self.on_length in {"fail", "longer"}
        fails_repetition = self.on_repetition == "fail"
        return (
            self.accept.has_condition
            or self.accept.json_ is False
            or self.sampling.json_schema is not None
            or fails_truncated
            or fails_repetition
            or self.prompt.rollout is not None  # Each request of a rollout may have a JSON Schema.
        )

    def _name_faults(self) -> Iterator[str]:
        """Yield a fault for each copied column whose name is unknown, or not unique in the results."""
        carried = dict(zip(self.input.carried_names, self.input.columns, strict=True))
        for name in self.input.rename:
            if name not in self.input.columns:
                yield f"input.rename names {name!r}, which is not in input.columns"
        for name, times in Counter(self.input.carried_names).items():
            if times > 1:
                yield f"input.columns: has {name!r} twice, after input.rename"
        other_columns = [REQUEST_DIGEST, *([RESPONSE] if self.prompt.is_batch else [])]
        for name in (*result_columns(self.forward), *self.output.asked, *other_columns):
            if name in carried:
                yield (
                    f"input.columns: the results already have a column {name!r}: rename yours, for example "
                    f"input.rename: {{{carried[name]}: input_{name}}}"
                )
