"""The job: what to run, on what, with which engine. `batchrun schema` prints it for editors.

Every field is documented under it, and the text goes into the schema. Relative paths are relative to the
current directory.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

import orjson
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    WithJsonSchema,
    field_validator,
    model_validator,
)

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

_DURATION = re.compile(
    r"(?:(\d+(?:\.\d+)?)d)?(?:(\d+(?:\.\d+)?)h)?(?:(\d+(?:\.\d+)?)m)?(?:(\d+(?:\.\d+)?)s)?"
)
_UNITS_S = (86400.0, 3600.0, 60.0, 1.0)


def _seconds(value: object) -> object:
    if not isinstance(value, str):
        return value
    match = _DURATION.fullmatch(value.strip().replace(" ", ""))
    if not match or not any(match.groups()):
        raise ValueError("a duration is seconds or a text such as 90s, 30m, 2h30m or 1d")
    return sum(float(part) * unit for part, unit in zip(match.groups(), _UNITS_S, strict=True) if part)


def _share(value: object) -> object:
    if isinstance(value, str) and value.strip().endswith("%"):
        return float(value.strip()[:-1]) / 100
    return value


_SHARE_TEXT = {"type": "string", "pattern": r"^\s*\d+(\.\d+)?\s*%\s*$"}
Duration: TypeAlias = Annotated[
    float,
    Field(gt=0, allow_inf_nan=True),
    BeforeValidator(_seconds),
    WithJsonSchema(
        {"anyOf": [{"type": "number", "exclusiveMinimum": 0}, {"type": "string", "minLength": 1}]}
    ),
]
Share: TypeAlias = Annotated[
    float,
    BeforeValidator(_share),
    Field(gt=0, le=1),
    WithJsonSchema({"anyOf": [{"type": "number", "exclusiveMinimum": 0, "maximum": 1}, _SHARE_TEXT]}),
]
CountOrShare: TypeAlias = Annotated[
    Annotated[int, Field(ge=0, strict=True)] | Annotated[float, Field(ge=0, le=1)],
    BeforeValidator(_share),
    WithJsonSchema({"anyOf": [{"type": "number", "minimum": 0}, _SHARE_TEXT]}),
]


class _Spec(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)

    @field_validator("*")
    @classmethod
    def _as_json(cls, value: Any) -> Any:
        """Take what JSON makes of a value: run.json keeps it, and the engine gets it."""
        if isinstance(value, BaseModel):
            return value
        try:
            if not isinstance(value, dict):
                orjson.dumps(value)  # 64 bits an integer, and texts in UTF-8
                return value
            json.dumps(value, allow_nan=False, default=str)  # orjson makes null of what it has not
            return orjson.loads(orjson.dumps(value))
        except (TypeError, ValueError, RecursionError) as failure:
            keys = "; quote what YAML takes for no text, such as on or 1" if "key" in str(failure) else ""
            raise ValueError(f"no JSON can hold it: {failure}{keys}") from None


class FromColumn(_Spec):
    """A value that each row brings itself."""

    column: str
    """The input column that holds the value; a null leaves the engine's default."""


Value = TypeVar("Value")
PerRow: TypeAlias = Value | FromColumn


class InputSpec(_Spec):
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


class PromptSpec(_Spec):
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


class SamplingSpec(_Spec):
    """SGLang's sampling parameters, by SGLang's names. Each may be `{column: NAME}`."""

    max_new_tokens: PerRow[Annotated[int, Field(ge=1)]] = 1024
    """Longest output in tokens; of a null in a column the default. (SGLang's 128 cuts most answers short.)"""
    min_new_tokens: PerRow[Annotated[int, Field(ge=0)]] | None = None
    """Shortest output in tokens."""
    n: Annotated[int, Field(ge=1)] = 1
    """Samples a row; above 1 `output`, `finish_reason` and `completion_tokens` are lists."""
    temperature: PerRow[Annotated[float, Field(ge=0)]] | None = None
    """0 is greedy. Unset: the engine's default."""
    top_p: PerRow[Annotated[float, Field(gt=0, le=1)]] | None = None
    """Nucleus sampling."""
    top_k: PerRow[Annotated[int, Field(ge=-1)]] | None = None
    """Sample from the k likeliest tokens; -1 for all."""
    min_p: PerRow[Annotated[float, Field(ge=0, le=1)]] | None = None
    """Least probability, relative to the likeliest token."""
    frequency_penalty: PerRow[Annotated[float, Field(ge=-2, le=2)]] | None = None
    """Penalty on tokens by how often they were generated."""
    presence_penalty: PerRow[Annotated[float, Field(ge=-2, le=2)]] | None = None
    """Penalty on tokens that were generated at all."""
    repetition_penalty: PerRow[Annotated[float, Field(gt=0, le=2)]] | None = None
    """Multiplicative penalty on tokens that were seen; 1 is none."""
    stop: PerRow[str | list[str]] | None = None
    """Texts that end the output."""
    stop_token_ids: PerRow[list[int]] | None = None
    """Tokens that end the output."""
    stop_regex: PerRow[str | list[str]] | None = None
    """Regular expressions that end the output."""
    no_stop_trim: bool | None = None
    """Keep the stop text in the output."""
    ignore_eos: PerRow[bool] | None = None
    """Go on to max_new_tokens."""
    skip_special_tokens: bool | None = None
    """Leave special tokens out of the output text."""
    spaces_between_special_tokens: bool | None = None
    """Put spaces between special tokens in the output text."""
    sampling_seed: PerRow[int] | None = None
    """Seed of the sampler (SGLang honours it under --enable-deterministic-inference)."""
    json_schema: PerRow[dict[str, Any] | str] | None = None
    """The output must be JSON of this schema (a mapping, or its JSON text)."""
    regex: PerRow[str] | None = None
    """The output must match."""
    ebnf: PerRow[str] | None = None
    """The output must be in this grammar."""
    structural_tag: PerRow[str] | None = None
    """SGLang's structural tag, as JSON text."""
    logit_bias: dict[str, float] | None = None
    """Bias a token id's logit."""
    custom_params: dict[str, Any] | None = None
    """Passed to a custom logit processor."""
    lora_path: PerRow[str] | None = None
    """Name of a LoRA adapter that the engine has loaded."""

    @field_validator("json_schema", mode="before")
    @classmethod
    def _column_before_schema(cls, value: object) -> object:
        # {column: x} is also a mapping: without this it would pass as a (meaningless) schema
        if isinstance(value, Mapping) and set(value) == {"column"}:
            return FromColumn(column=str(value["column"]))
        if isinstance(value, str):
            _check_json_schema(value)
        return value

    @field_validator("regex")
    @classmethod
    def _compiles(cls, value: str | FromColumn | None) -> str | FromColumn | None:
        if isinstance(value, str):
            _check_regex(value)
        return value

    @model_validator(mode="after")
    def _one_grammar(self) -> SamplingSpec:
        given = [
            k for k in ("json_schema", "regex", "ebnf", "structural_tag") if getattr(self, k) is not None
        ]
        if len(given) > 1:
            raise ValueError(f"an output has one grammar: give one of {', '.join(given)}")
        return self


def _check_json_schema(text: str) -> None:
    try:
        schema = json.loads(text)
    except ValueError as failure:
        raise ValueError(f"not JSON: {failure}") from None
    if not isinstance(schema, dict):
        raise ValueError("a JSON Schema is a JSON object")  # noqa: TRY004 - pydantic takes ValueError only


def _check_regex(pattern: str) -> None:
    r"""Refuse what is no regular expression; the engine's dialect also has `\p{…}` and `(?<name>…)`."""
    try:
        re.compile(pattern)
    except re.error as failure:
        if not failure.msg.startswith(("bad escape", "unknown extension")):
            raise ValueError(f"not a regular expression: {failure}") from None


class OutputSpec(_Spec):
    """Where the results go."""

    path: str
    """Directory of the run: parts/*.parquet, report.json, events.jsonl, the engine's log."""
    part_rows: Annotated[int, Field(ge=1)] = 10_000
    """Rows in a part, at most; a part is also written when 30 s have passed."""
    durable: Duration = 1.0
    """A finished row is on disk, in a journal if not in a part, within this time."""


class AttachEngine(_Spec):
    """A server that runs already."""

    kind: Literal["attach"]
    """`attach`: the server runs already."""
    urls: Annotated[list[str], Field(min_length=1)]
    """One or more addresses of replicas of one model; rows go where there is room."""
    api_key_env: str = "SGLANG_API_KEY"
    """Environment variable that holds the server's API key; unset means no key."""

    @field_validator("urls")
    @classmethod
    def _http(cls, urls: list[str]) -> list[str]:
        return [_checked_url(url) for url in urls]


def _checked_url(url: str) -> str:
    if not re.match(r"https?://[^/]+", url):
        raise ValueError(f"an address starts with http:// or https:// (got {url!r})")
    if "@" in url.split("/")[2]:
        raise ValueError("an address has no user and password in it: name the key's variable in api_key_env")
    return url.rstrip("/")


class _LocalEngine(_Spec):
    args: dict[str, Any] = {}
    """SGLang's server arguments, such as `{mem-fraction-static: 0.88, enable-metrics: true}`."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """`auto` takes the GPU where there is one, else SGLang's CPU engine, which is for trying and testing."""

    @field_validator("args")
    @classmethod
    def _own_arguments(cls, args: dict[str, Any]) -> dict[str, Any]:
        return _checked_args(args, ("model-path", "model", "host", "port", "api-key", "device"), "args")


def _checked_args(args: Mapping[str, Any], own: tuple[str, ...], field: str) -> dict[str, Any]:
    """Return arguments by their names on a command line, without `--`; those in `own` are refused."""
    clean = {name.lstrip("-").replace("_", "-"): value for name, value in args.items()}
    for name in own:
        if name in clean:
            raise ValueError(f"batchrunner sets --{name} itself: leave it out of engine.{field}")
    return clean


class LaunchedEngine(_LocalEngine):
    """What servers that the run starts have in common."""

    python: str | None = None
    """The interpreter that has SGLang, where it is not this one."""
    env: dict[str, str] = {}
    """Environment variables for the server."""
    start_timeout: Duration = 1800.0
    """How long loading may take."""
    heal: bool = True
    """A server that dies for want of memory is started again with safer arguments, which the next run of this
    model, card and version starts with; `false` leaves `args` as they are, and an earlier run's alone."""


class ServerEngine(LaunchedEngine):
    """A server that the run starts on a free loopback port and ends."""

    kind: Literal["server"]
    """`server`: the run starts it and ends it."""
    model: str
    """A model directory, or a name that SGLang can load."""


class GatewayEngine(LaunchedEngine):
    """Replicas of one model behind SGLang's Model Gateway: the run starts both, or finds them at `url`.

    A launched replica that dies is taken out, started again and put back, and so is the gateway.
    """

    kind: Literal["gateway"]
    """`gateway`: replicas behind SGLang's Model Gateway, launched (`model`) or running already (`url`)."""
    model: str | None = None
    """A model directory, or a name that SGLang can load: the run starts and ends replicas and gateway."""
    url: str | None = None
    """The address of a gateway that runs already; its workers must be within reach too, for their load."""
    api_key_env: str = "SGLANG_API_KEY"
    """With `url`: environment variable that holds the API key of gateway and workers; unset means none."""
    replicas: Literal["auto"] | Annotated[int, Field(ge=1)] = "auto"
    """How many; `auto` is one for every `tp` GPUs that CUDA_VISIBLE_DEVICES leaves, and one on a CPU."""
    tp: Annotated[int, Field(ge=1)] = 1
    """GPUs a replica (`--tp-size`)."""
    policy: Literal["auto", "cache_aware", "round_robin", "random", "power_of_two"] = "auto"
    """How the gateway chooses a replica. `auto` is its policy `manual` with keys that the runner sends: rows
    that share a beginning go to one replica, all others to the one with the fewest requests. (cache_aware
    keeps similar prompts on one replica until it has 64 requests more than another: a batch with one system
    prompt fills one first.)"""
    gateway_args: dict[str, Any] = {}
    """More arguments of sglang_router, such as `{log-level: info}`."""

    @field_validator("url")
    @classmethod
    def _http(cls, url: str | None) -> str | None:
        return url if url is None else _checked_url(url)

    @field_validator("gateway_args")
    @classmethod
    def _own_gateway_arguments(cls, args: dict[str, Any]) -> dict[str, Any]:
        own = ("host", "port", "prometheus-host", "prometheus-port", "api-key", "worker-urls", "policy")
        return _checked_args(args, own, "gateway_args")

    @model_validator(mode="after")
    def _launched_or_found(self) -> GatewayEngine:
        if (self.model is None) == (self.url is None):
            raise ValueError("give `model` (the run starts replicas and gateway) or `url` (they run already)")
        launch_only = type(self).model_fields.keys() - {"kind", "model", "url", "api_key_env"}
        if self.url is not None and self.model_fields_set & launch_only:
            names = ", ".join(sorted(self.model_fields_set & launch_only))
            raise ValueError(f"{names}: goes with `model`, not with `url`, where everything runs already")
        for name in ("tp", "tp-size", "tensor-parallel-size"):
            if name in self.args:
                raise ValueError(f"say engine.tp instead of --{name}: it also decides the number of replicas")
        return self


GATEWAY_DROPS: dict[str, frozenset[str]] = {
    "chat": frozenset({"stop_regex", "structural_tag", "custom_params"}),
    "generate": frozenset(
        {"stop_regex", "structural_tag", "custom_params", "logit_bias", "spaces_between_special_tokens"}
    ),
}
"""Sampling parameters that sglang_router 0.3.2 leaves out of the body it passes on, without a word (or, for
a chat's `structural_tag`, refuses), by the endpoint: a row that has them must not be sent through it."""


class InprocessEngine(_LocalEngine):
    """`sglang.Engine` in this process."""

    kind: Literal["inprocess"]
    """`inprocess`: `sglang.Engine` in this process."""
    model: str
    """A model directory, or a name that SGLang can load."""


class SimulatedEngine(_Spec):
    """No engine at all: made-up answers at a made-up speed, to see the screen and to test. Always marked."""

    kind: Literal["simulated"]
    """`simulated`: answers are made up."""
    max_running: Annotated[int, Field(ge=1)] = 256
    """Requests that decode together."""
    max_total_tokens: Annotated[int, Field(ge=1)] = 400_000
    """KV pool in tokens."""
    context_length: Annotated[int, Field(ge=1)] = 8192
    """Longest prompt and output together, in tokens; longer rows are refused."""
    step_s: Annotated[float, Field(ge=0)] = 0.02
    """Time of a decode step; 0 answers at once."""


EngineSpec: TypeAlias = Annotated[
    AttachEngine | ServerEngine | GatewayEngine | InprocessEngine | SimulatedEngine,
    Field(discriminator="kind"),
]


class LimitsSpec(_Spec):
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


class Job(_Spec):
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
