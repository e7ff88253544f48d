"""The job: which rows, as which prompts, on which engine. `batchrun schema` prints its JSON Schema.

The docstring under each field becomes its description in the schema. Relative paths are relative to the
current directory; a leading `~`, `~user` or `$HOME` is a home directory.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from operator import attrgetter
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, Field, field_validator, model_validator

from batchrunner.core.errors import WrongValueError
from batchrunner.core.media import KIND_OF_FIELD
from batchrunner.core.types import ForwardTask
from batchrunner.job.engine import GATEWAY_DROPS, EngineSpec, GatewayEngine
from batchrunner.job.fields import (
    CountOrShare,
    Duration,
    PythonFunction,
    Share,
    Spec,
    UserPath,
    refuse_equal,
)
from batchrunner.job.output import RESPONSE, SAMPLE, OutputSpec, StorageSpec, name_clash, result_columns
from batchrunner.job.prompt import PromptSpec
from batchrunner.job.sampling import SamplingSpec, check_regex
from batchrunner.job.scores import RerankTask, ScoreTask
from batchrunner.job.tasks import GENERATE, TASKS, TaskName, goes_past_gateways, last_part, task_of

OF_DECODING = (
    "sampling", "parse", "check", "on_length", "output.columns", "output.explode", "output.top_logprobs",
)  # fmt: skip
"""Fields about texts that a model writes; of a section, all fields in it."""
OF_CHATS = (
    "prompt.user",
    "prompt.system",
    "prompt.messages",
    "prompt.continue",
    "prompt.chat_template_kwargs",
)
"""Fields of prompts that a chat template makes."""
OF_MEDIA = {f"prompt.{field}": kind.field for field, kind in KIND_OF_FIELD.items()}
"""Fields that bring files, which no task without decoding takes yet, and what they bring."""
KEPT = {"sampling.lora_path"}
"""Fields of these that every task takes."""
CHOICES = "prompt.choices"
DOCUMENTS = "prompt.documents"
_PAIR = "the engine tokenizes query and document as a pair: give prompt.text alone"
_TOGETHER = "give prompt.text: a choice is tokenized together with its prompt"
_NOT_WITH_CHOICES = {
    "output.softmax": "it is about labels: leave it out",
    "prompt.input_ids": _TOGETHER,
    "prompt.python": _TOGETHER,
    "prompt.truncate": "a choice goes on after the end of its prompt: cut the prompts in their template",
}
"""Fields that have no place beside choices, and what to do instead."""
OF_TASKS = sorted({field for kind in TASKS.values() for field in kind.takes})
"""Fields that only tasks without decoding have."""


def given_fields(job: BaseModel) -> list[str]:
    """Return the fields that a job gives, in two levels, such as `sampling.n`."""
    found = []
    for name in _given(job):
        found.append(name)
        section = getattr(job, name)
        if isinstance(section, BaseModel):
            fields = type(section).model_fields
            found += [f"{name}.{fields[key].alias or key}" for key in _given(section)]
    return found


def _given(section: BaseModel) -> list[str]:
    """Return the fields that a section gives and that are not as without them."""
    fields = type(section).model_fields
    return [
        name
        for name in fields
        if name in section.model_fields_set
        and getattr(section, name) != fields[name].get_default(call_default_factory=True)
    ]


def check_task_fields(task: TaskName, given: Collection[str]) -> None:
    """Raise WrongValueError where a field has no effect on the task, or one that it needs is missing."""
    kind = TASKS.get(task)
    for field in given:
        if field in OF_TASKS and (kind is None or field not in kind.takes):
            names = " or ".join(name for name, other in TASKS.items() if field in other.takes)
            raise WrongValueError(
                f"{field}: goes with task: {names}", hint=f"leave it out, or set task (it is {task})"
            )
    if kind is None:
        return
    for field in given:
        if field in OF_CHATS:
            raise WrongValueError(
                f"{field}: task: {task} takes no chat",
                hint="give prompt.text, a template or a column, or prompt.input_ids",
            )
        if field in OF_MEDIA:
            raise WrongValueError(f"{field}: task: {task} takes no {OF_MEDIA[field]}", hint="leave it out")
        if field == "prompt.batch":
            raise WrongValueError(
                f"prompt.batch: the requests of a batch file go as they are, and task is {task}",
                hint=f"leave out the task ({GENERATE})",
            )
        section = field.partition(".")[0]
        has_parts = any(other.startswith(f"{field}.") for other in given)
        if field not in KEPT and not has_parts and (field in OF_DECODING or section in OF_DECODING):
            raise WrongValueError(f"{field}: task: {task} writes no text", hint="leave it out")
    if task in _CHECKS:
        _CHECKS[task](given)


def _check_rerank_fields(given: Collection[str]) -> None:
    """Raise WrongValueError where a job does not say which documents, or its query cannot stand in a pair."""
    if DOCUMENTS not in given:
        raise WrongValueError(
            f"task: rerank: {DOCUMENTS} is missing", hint="name the column with the documents of each query"
        )
    for field in ("prompt.input_ids", "prompt.python", "prompt.truncate", "tokenize"):
        if field in given:
            raise WrongValueError(f"{field}: does not go with {DOCUMENTS}", hint=_PAIR)


def _check_score_fields(given: Collection[str]) -> None:
    """Raise WrongValueError where a job does not say what is scored, or says it twice."""
    if ("labels" in given) == (CHOICES in given):
        both = "got both" if CHOICES in given else "got neither"
        raise WrongValueError(
            f"task: score: takes either labels or {CHOICES} ({both})",
            hint='give one: labels, such as [" yes", " no"], are single tokens',
        )
    if CHOICES not in given:
        return
    for field, hint in _NOT_WITH_CHOICES.items():
        if field in given:
            raise WrongValueError(f"{field}: does not go with {CHOICES}", hint=hint)


_CHECKS = {ScoreTask.name: _check_score_fields, RerankTask.name: _check_rerank_fields}
"""What a task needs besides, by its name."""


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


ColumnType: TypeAlias = Literal["string", "bool", "int32", "int64", "float32", "float64", "date", "timestamp"]


class InputSpec(Spec):
    """Where the rows come from."""

    path: UserPath | Annotated[list[UserPath], Field(min_length=1)]
    """A file, a directory, a glob, or a list of these. Files are Parquet, or by their ending CSV (`.csv`,
    `.tsv`), JSON Lines (`.jsonl`, `.ndjson`, `.json`) or Arrow (`.arrow`, `.feather`, `.ipc`), which may be
    compressed (`.gz`, `.zst`). Directory names such as `year=2024` become
    columns, unless the files have a column of that name. Paths are local, or URIs of object stores (s3://,
    gs://, az://) or of what else pyarrow can open (hdfs://), whose globs may contain `*` and `**/`."""
    columns: list[str] = []
    """Input columns that are copied to the results."""
    types: dict[str, ColumnType] = {}
    """Types of columns of CSV and JSON Lines files. In CSV any other column is a text, as it stands in the
    file; in JSON Lines it has the type of its values. A value that does not fit fails its row."""
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


ParsedType: TypeAlias = ColumnType | Literal["json"]


class ParseSpec(Spec):
    """How an answer becomes columns of its result."""

    python: PythonFunction
    """Python function that makes the columns, as `module:function`. It is called with the answer, a text, or
    with the answer and the row, a dict of `input.columns`, and returns a dict. It runs in processes of its
    own."""
    columns: dict[str, ParsedType] = {}
    """Names and types of the columns. Not needed where the function's return type is annotated as a
    TypedDict, a dataclass or a pydantic model. `json` holds any value, as a JSON text."""


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
    """Time of one call of a Python function (`prompt.python`, `parse`, `check.python`), and of reading the
    files of a row. A row whose call takes longer fails."""
    python_memory_gb: Annotated[float, Field(gt=0)] = 2.0
    """Memory in GiB that each process of the Python functions, which also read images and other files, may
    take beyond what it has when its modules are imported. A row whose call needs more fails."""
    python_processes: Annotated[int, Field(ge=1)] | None = None
    """Processes that run the Python functions and read images and other files, at most; by default one for
    each core, up to 8."""
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
    for example."""


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
    parse: ParseSpec | PythonFunction | None = None
    """Python function that makes columns of an answer, as `module:function`, or with the names of its
    `columns`. A row whose answer it cannot parse fails, and keeps its answer."""
    output: OutputSpec
    """Where the results are written."""
    storage: StorageSpec = StorageSpec()
    """How object stores (`s3://`, `gs://`, `az://`) are reached."""
    engine: EngineSpec
    """Engine that answers. `kind` is attach, server, gateway or simulated."""
    check: CheckSpec = CheckSpec()
    """When an answer is good. One that is not is asked for again, and then fails its row, which keeps it."""
    on_length: OnLength | None = None
    """What becomes of an answer that was cut at `max_new_tokens`. `keep`: it is the row's. `fail`: it is not
    good, as if by `check`. `continue`: the rest is asked for, with twice the tokens, three times at most;
    with a grammar, the whole answer. By default `fail` where answers are checked against a JSON Schema, else
    `keep`."""
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
    rows and no other behaviour would differ; else by the engine, and the log gives the reason. `client`: by
    batchrunner, or the run does not begin; a server that the run starts then gets no tokenizer
    (`--skip-tokenizer-init`) unless it needs one for stop texts, grammars, `min_new_tokens` or
    `prompt.messages`. `server`: by the engine."""
    queue: Annotated[tuple[Annotated[int, Field(ge=1)], Annotated[int, Field(ge=4)]], Field()] = (100, 2000)
    """Range [low, high] in which the number of waiting requests of each scheduler (SGLang's `#queue-req`) is
    kept. It is scaled down for a scheduler that runs few requests at once."""

    python_path: list[UserPath] = []
    """Directories in which the modules of Python functions are looked up first, before the current directory
    and the installed packages. By default the directory of the job file."""

    @property
    def forward(self) -> ForwardTask | None:
        """The task, if it is one without decoding."""
        takes = TASKS[self.task].takes if self.task in TASKS else ()
        return task_of(self.task, {last_part(field): attrgetter(field)(self) for field in takes})

    @model_validator(mode="after")
    def _fields_of_task(self) -> Job:
        check_task_fields(self.task, given_fields(self))
        if goes_past_gateways(self.task) and isinstance(self.engine, GatewayEngine) and self.engine.url:
            raise WrongValueError(
                f"engine.url: the gateway {self.engine.url} does not pass on requests of task: {self.task}",
                hint="name its workers: engine: {kind: attach, urls: [...]}",
            )
        return self

    @field_validator("labels")
    @classmethod
    def _unlike_labels(cls, labels: list[Label] | None) -> list[Label] | None:
        refuse_equal(labels or ())
        return labels

    @property
    def parsing(self) -> ParseSpec | None:
        """How an answer becomes columns."""
        return (
            self.parse
            if self.parse is None or isinstance(self.parse, ParseSpec)
            else ParseSpec(python=self.parse)
        )

    @field_validator("bundle", mode="before")
    @classmethod
    def _off(cls, bundle: object) -> object:
        if bundle is True:
            raise ValueError("should be auto, off, or a number from 1 to 64 (got true)")
        return "off" if bundle is False else bundle  # YAML reads off as false

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
            chat = self.prompt.is_chat
            given = {k for k in SamplingSpec.model_fields if getattr(self.sampling, k) is not None}
            drops = GATEWAY_DROPS["chat" if chat else "generate"]
            if self.prompt.python is not None:  # it may make both; a row whose own kind is not served fails
                drops = GATEWAY_DROPS["chat"] & GATEWAY_DROPS["generate"]
            if chat and self.prompt.audio is not None:
                raise WrongValueError(
                    "prompt.audio: the gateway refuses chats with audio",
                    hint="use engine.kind attach with the urls of the replicas, or server",
                )
            dropped = sorted(given & drops)
            if dropped:
                raise WrongValueError(
                    f"sampling.{dropped[0]}: the gateway leaves it out of what it passes on",
                    hint="use engine.kind attach with the urls of the replicas, or server",
                )
        return self

    @model_validator(mode="after")
    def _tokens_made_here(self) -> Job:
        if self.prompt.truncate is not None and self.tokenize == "server":
            raise WrongValueError("prompt.truncate counts tokens here", hint="leave out `tokenize: server`")
        if self.prompt.tools is not None and self.tokenize == "client":
            raise WrongValueError(
                "prompt.tools: the server writes them into the prompt", hint="leave out `tokenize: client`"
            )
        if self.prompt.has_media and self.tokenize == "client":
            raise WrongValueError(
                f"tokenize: the server tokenizes prompts with {self.prompt.media_names}",
                hint="leave out `tokenize: client`",
            )
        return self

    @property
    def has_check(self) -> bool:
        """Whether the job says how answers are checked."""
        return self.check != CheckSpec()

    @property
    def first_sampling(self) -> SamplingSpec:
        """The sampling parameters of the first try of a row."""
        first = self.check.first_temperature
        if first is None or self.sampling.temperature is not None:
            return self.sampling
        return self.sampling.model_copy(update={"temperature": first})

    @model_validator(mode="after")
    def _checks_something(self) -> Job:
        check, sampled = self.check, self.sampling.temperature
        fails_cut = self.on_length in {"fail", "continue"}
        has_schema = self.sampling.json_schema is not None and check.json_ is not False
        if (
            self.has_check
            and check.json_ is not False
            and not (check.has_condition or fails_cut or has_schema)
        ):
            raise WrongValueError("check: nothing is checked", hint="give json, regex, expression or python")
        first = check.first_temperature
        if first is not None and isinstance(sampled, float) and sampled != first:
            raise WrongValueError(
                f"check.temperature begins with {first:g}, and sampling.temperature is {sampled:g}",
                hint="leave one of them out",
            )
        if check.feedback and not self.prompt.is_chat:
            raise WrongValueError(
                "check.feedback: only a chat can be told what was wrong",
                hint="give prompt.user or prompt.messages",
            )
        if self.sampling.n > 1 and (check.feedback or self.on_length == "continue"):
            name = "check.feedback" if check.feedback else "on_length: continue"
            raise ValueError(f"{name} goes with one output of a row, not with sampling.n {self.sampling.n}")
        return self

    @model_validator(mode="after")
    def _columns_of_chats(self) -> Job:
        asked = self.output.asked
        if self.sampling.tool_choice is not None and not self.prompt.is_chat:
            raise WrongValueError(
                "sampling.tool_choice: tools are called in chats", hint="give prompt.user or prompt.messages"
            )
        if "tool_calls" in asked and not self.prompt.is_chat:
            raise WrongValueError(
                "output.columns: tool_calls need a chat", hint="give prompt.user or prompt.messages"
            )
        has_tools = "tool_calls" in asked or self.prompt.tools is not None
        if has_tools and "prompt_logprobs" in asked:
            raise WrongValueError(
                "output.columns: SGLang's chat endpoint has tool_calls, and /generate has prompt_logprobs",
                hint="give one of them",
            )
        return self

    @model_validator(mode="after")
    def _whole_requests(self) -> Job:
        if self.prompt.batch is None:
            return self
        if self.sampling.model_fields_set:
            name = min(self.sampling.model_fields_set)
            raise WrongValueError(
                f"sampling.{name}: each line of a batch file has parameters of its own", hint="leave it out"
            )
        of_texts = {
            "parse": self.parse is not None,
            "check": self.has_check,
            "on_length": self.on_length is not None,
            "output.columns": bool(self.output.asked),
            "output.explode": self.output.explode,
        }
        for name in (name for name, is_given in of_texts.items() if is_given):
            raise WrongValueError(f"{name}: the answers of a batch file stay whole", hint="leave it out")
        if self.tokenize == "client":
            raise WrongValueError(
                "tokenize: the server tokenizes the requests of a batch file", hint="leave it out"
            )
        if self.input.types:
            raise WrongValueError("input.types: the columns of a batch file are texts", hint="leave it out")
        return self

    @model_validator(mode="after")
    def _result_names(self) -> Job:
        carried = dict(zip(self.input.carried_names, self.input.columns, strict=True))
        for name in self.input.rename:
            if name not in self.input.columns:
                raise ValueError(f"input.rename names {name!r}, which is not in input.columns")
        if len(carried) < len(self.input.columns):
            twice = next(name for name in carried if self.input.carried_names.count(name) > 1)
            raise ValueError(f"input.columns, as renamed, has {twice!r} twice")
        more = [*([SAMPLE] if self.output.explode else []), *([RESPONSE] if self.prompt.batch else [])]
        for name in (*result_columns(self.forward), *self.output.asked, *more):
            if name in carried:
                raise name_clash(carried, name)
        return self
