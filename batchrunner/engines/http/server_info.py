"""Reports of servers on themselves: load, model, arguments, and a Model Gateway's workers.

The load is from `/v1/loads`. `/model_info` and `/server_info` make EngineInfo and TokenizerInfo.
"""

import contextlib
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any

import aiohttp
import msgspec
import orjson

from batchrunner.core.engine_info import EngineInfo, SchedulerLoad, TokenizerInfo
from batchrunner.core.errors import EngineAwayError, EngineDownError, EngineStartError
from batchrunner.core.timing import TIMING
from batchrunner.engines.http.guard import model_in
from batchrunner.engines.http.proxies import by_proxy, proxy_of
from batchrunner.engines.http.server import Model
from batchrunner.job.tasks import TASKS, TaskName
from batchrunner.sglang.flags import attention_ranks, slots_per_request
from batchrunner.sglang.model_files import model_identity, takes_mean

MODEL_INFO, SERVER_INFO = "/model_info", "/server_info"
"""Paths of the server's description of itself."""
MODELS = "/v1/models"
"""Path of the names that requests in OpenAI's form may ask for."""
LOADS, METRICS = "/v1/loads?include=core,queues", "/metrics"
"""Paths of the server's load, and of its counters."""
WORKERS = "/workers"
"""Path of a Model Gateway's list of workers."""
NO_SUCH_PATH = frozenset({404, 405})
"""Statuses of a path that a server does not have."""
KEY_REFUSED = frozenset({401, 403})
"""Statuses with which a server refuses the API key."""
PREFIX = "sglang:"
"""Beginning of the names of SGLang's metrics."""
MOST_BYTES = 8 << 20
"""Maximum bytes of a body that are read; `/metrics` of a large server has a tenth of that."""
MOST = 1 << 53
"""Largest value of a gauge or counter: up to there a double holds every integer."""
NOT_REACHED = (aiohttp.ClientError, TimeoutError, OSError)
"""Errors that every request here may raise if the server does not answer in time."""
NOT_SGLANG = (ValueError, KeyError, TypeError, msgspec.MsgspecError)
"""Errors that `load` raises too, for a reply that is not SGLang's."""


def in_words(failure: Exception) -> str:
    """Return the reason why a server gave no answer, in one line, which not all errors of aiohttp have."""
    if isinstance(failure, aiohttp.TooManyRedirects):
        return "its redirects form a loop"
    return " ".join(str(getattr(failure, "os_error", failure)).split()) or type(failure).__name__


class ServerStatus:
    """Questions to the server at `url`, each of which ends after its `timeout_s`."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self.url = url
        self._session = session
        proxy = proxy_of(url)
        self._options = proxy.options if proxy else {}

    async def get(self, path: str, timeout_s: float) -> tuple[int, bytes]:
        """Return the status and the body of a path; a body that is too long comes back empty."""
        return await self._ask("GET", path, timeout_s)

    async def post(self, path: str, fields: Mapping[str, Any], timeout_s: float) -> tuple[int, bytes]:
        """Post a JSON object to a path; return the status and the body, as `get` does."""
        return await self._ask("POST", path, timeout_s, json=fields)

    async def _ask(self, method: str, path: str, timeout_s: float, **content: Any) -> tuple[int, bytes]:
        options = {"timeout": aiohttp.ClientTimeout(total=timeout_s), **self._options, **content}
        try:
            async with self._session.request(method, self.url + path, **options) as response:
                body = bytearray()
                async for part in response.content.iter_any():
                    body += part
                    if len(body) > MOST_BYTES:
                        return response.status, b""
                return response.status, bytes(body)
        except NOT_REACHED:
            raise
        except Exception as failure:  # what no HTTP library foresaw
            raise aiohttp.ClientPayloadError(f"the answer cannot be read: {failure!r}") from failure

    async def mapping(self, path: str, timeout_s: float) -> tuple[int, dict[str, Any]]:
        """Return the status of a path and its JSON object, which is empty if the reply has none."""
        status, body = await self.get(path, timeout_s)
        with contextlib.suppress(orjson.JSONDecodeError):
            reply = orjson.loads(body) if status == 200 else None  # noqa: PLR2004
            if isinstance(reply, dict):
                return status, reply
        return status, {}

    async def load(self, timeout_s: float, running_by_states: int | None = None) -> list[SchedulerLoad]:
        """Return the load of each scheduler; empty if the server does not have the path LOADS.

        Any other refusal raises, since the server may answer later. For `running_by_states` see `load_in`.
        """
        status, body = await self.get(LOADS, timeout_s)
        if status in NO_SUCH_PATH:
            return []
        if status != 200:  # noqa: PLR2004
            raise aiohttp.ClientPayloadError(f"{LOADS}: status {status}")
        return load_in(body, self.url, running_by_states)

    async def is_alive(self) -> bool:
        """Tell whether the server answers within 2 s, with whatever status."""
        try:
            await self.get(MODEL_INFO, TIMING.status_timeout)
        except NOT_REACHED:
            return False
        return True


Requests = Annotated[int, msgspec.Meta(ge=0, le=1_000_000)]
"""Number of requests at one scheduler. The maximum is about sixteen times the number of ports of an
address."""
Tokens = Annotated[int, msgspec.Meta(ge=0, le=MOST)]
Amount = Annotated[float, msgspec.Meta(ge=0, le=MOST)]


class _Queues(msgspec.Struct):
    retracted: Requests | None = None


class _Scheduler(msgspec.Struct):
    """Load of a scheduler in `/v1/loads`; a gauge outside its range makes the whole load invalid."""

    num_running_reqs: Requests
    num_waiting_reqs: Requests
    token_usage: Annotated[float, msgspec.Meta(ge=0, le=10)]
    """Share of the KV pool; SGLang's is 1, or a little more while requests are moved."""
    num_used_tokens: Tokens | None = None
    max_total_num_tokens: Tokens | None = None
    max_running_requests: Requests | None = None
    dp_rank: int = 0
    timestamp: Any = None
    total_prefill_busy_us: Amount | None = None
    decode_moments: list[Amount] | None = None
    queues: _Queues | None = None


class _Loads(msgspec.Struct):
    loads: list[_Scheduler]


_read_loads = msgspec.json.Decoder(_Loads)


def load_in(body: bytes, url: str, running_by_states: int | None = None) -> list[SchedulerLoad]:
    """Read the load of each DP rank of the server at `url`; raises ValueError if `body` is no load.

    The load does not say how full the state pool of a hybrid model is. That pool holds the states of
    `running_by_states` requests. If this is also the load's limit of running requests, the number of running
    requests tells how full the pool is.
    """
    try:
        loads = _read_loads.decode(body).loads
    except Exception as failure:
        raise ValueError(f"no load: {type(failure).__name__}: {failure}") from failure
    return [
        SchedulerLoad(
            scheduler=url if len(loads) == 1 else f"{url}#dp{load.dp_rank}",
            source="loads",
            running=load.num_running_reqs,
            queue=load.num_waiting_reqs,
            token_usage=load.token_usage,
            used_tokens=load.num_used_tokens,
            max_total_tokens=load.max_total_num_tokens,
            max_running=load.max_running_requests,
            route=url,
            taken_at=load.timestamp if type(load.timestamp) in {int, float} else None,
            work=_work(load),
            retracted=load.queues.retracted if load.queues else None,
            state_usage=(
                load.num_running_reqs / running_by_states
                if running_by_states and running_by_states == load.max_running_requests
                else 0.0
            ),
        )
        for load in loads
    ]


def counters_in(text: str) -> dict[str, float]:
    """Return SGLang's numbers of `GET /metrics`, summed over schedulers, by their names without `sglang:`.

    Values that no counter or gauge has (infinite, not a number, negative) are left out. All pipeline stages
    and tensor-parallel ranks of a DP rank report the same values, so only the first rank counts. With DP
    attention the first rank is not always rank 0. Raises ValueError if the text is not in Prometheus's
    format.
    """
    from prometheus_client.parser import text_string_to_metric_families  # noqa: PLC0415 - only where needed

    samples = [
        (
            sample.labels.get("dp_rank", ""),
            (int(sample.labels.get("pp_rank") or 0), int(sample.labels.get("tp_rank") or 0)),
            sample,
        )
        for family in text_string_to_metric_families(text)
        if family.type in {"counter", "gauge"} and family.name.startswith(PREFIX)
        for sample in family.samples
    ]
    first: dict[str, tuple[int, int]] = {}
    for dp, rank, _ in samples:
        first[dp] = min(rank, first.get(dp, rank))
    sums: defaultdict[str, float] = defaultdict(float)
    for dp, rank, sample in samples:
        if rank == first[dp] and 0 <= sample.value <= MOST:
            sums[sample.name.removeprefix(PREFIX)] += sample.value
    return dict(sums)


def _work(load: _Scheduler) -> float | None:
    """Return the microseconds of prefill and decode steps so far; None before SGLang 0.5.23."""
    if load.total_prefill_busy_us is None:
        return None
    return load.total_prefill_busy_us + (load.decode_moments or [0])[0]


def check_does(task: TaskName, model: Mapping[str, Any], who: str) -> None:
    """Raise EngineStartError if a model cannot do a task, as far as its `/model_info` tells.

    `who` names the server and its model.
    """
    kind, generates = TASKS.get(task), model.get("is_generation")
    by_generation = kind is None or kind.by_generation
    if by_generation and generates is False:
        raise EngineStartError(f"{who}, which does not generate text")
    if generates is True and not by_generation:
        raise EngineStartError(
            f"{who}, which generates text", hint=f"start it with --is-embedding for task: {task}"
        )
    check_architecture(task, model.get("architectures"), who)


def check_architecture(task: TaskName, architectures: object, who: str) -> None:
    """Raise EngineStartError if a model's known architectures have no head for a task."""
    kind = TASKS.get(task)
    if kind is None or not kind.architectures or not isinstance(architectures, list) or not architectures:
        return
    names = ", ".join(map(str, architectures))
    if re.search(kind.architectures, names) is None:
        raise EngineStartError(f"{who}, whose architecture {names} has no head for task: {task}")


async def is_gateway(url: str, headers: Mapping[str, str]) -> bool:
    """Tell whether a Model Gateway is at an address; a server that does not answer soon counts as none.

    `/loads` is asked too, because it is open to a key that may not read the list of workers.
    """
    async with aiohttp.ClientSession(headers=headers) as session:
        status = ServerStatus(session, url)
        with contextlib.suppress(*NOT_REACHED):
            for path in (WORKERS, "/loads"):
                _, reply = await status.mapping(path, TIMING.status_timeout)
                if isinstance(reply.get("workers"), list) or str(reply.get("version")).startswith("smg"):
                    return True
    return False


class ServerQuestions:
    """Questions to servers about their model and arguments: at the start, and later in the run."""

    def __init__(self, session: aiohttp.ClientSession, remedy: str) -> None:
        """`remedy` is the advice to a user whose server does not answer."""
        self._session, self._remedy = session, remedy

    async def at_start(self, url: str, task: TaskName) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return what a server says of its model, and of its arguments and limits.

        Raises EngineAwayError if the server does not answer, EngineStartError if it is a gateway or its model
        cannot do the task.
        """
        try:
            model = await self._model_info(url, TIMING.server_open)
            server = await self._ask(url, SERVER_INFO, TIMING.server_open)
        except EngineDownError as failure:
            await self._refuse_gateway(url)
            hint = self._remedy if self._remedy in str(failure) else None
            raise EngineAwayError(str(failure), hint=hint) from None
        if not server:
            await self._refuse_gateway(url)
        check_does(task, model, f"{url}: serves {model['model_path']}")
        if server.get("skip_tokenizer_init"):
            raise EngineStartError(
                f"{url}: runs with --skip-tokenizer-init and returns no text",
                hint="start it without this flag",
            )
        return model, server

    async def _refuse_gateway(self, url: str) -> None:
        """Raise EngineStartError if a Model Gateway is at the address of a server."""
        reply = dict[str, Any]()
        with contextlib.suppress(EngineDownError):
            reply = await self._ask(url, WORKERS, TIMING.server_open)
        if isinstance(reply.get("workers"), list):
            raise EngineStartError(
                f"{url}: is a Model Gateway, not a server",
                hint=f"write `engine: {{kind: gateway, url: {url}}}`",
            )

    async def model(self, url: str, run_model: Model) -> dict[str, str]:
        """Return a server's description of its model now; raises EngineDownError if it gives none.

        The server's arguments are read only if the run's model has a field that `/model_info` lacks.
        """
        timeout_s = TIMING.server_open
        model_info = await self._model_info(url, timeout_s)
        missing = run_model.keys() - model_in(model_info).keys()
        server_info = await self._ask(url, SERVER_INFO, timeout_s) if missing else {}
        return model_in(model_info, server_info)

    async def adapters(self, url: str) -> frozenset[str]:
        """Return the names of the LoRA adapters that a server has loaded; raises EngineDownError."""
        listed = (await self._ask(url, MODELS, TIMING.server_open)).get("data")
        cards = [card for card in listed if isinstance(card, dict)] if isinstance(listed, list) else []
        return frozenset(str(card.get("id")) for card in cards if card.get("parent"))

    async def _model_info(self, url: str, timeout_s: float) -> dict[str, Any]:
        model_info = await self._ask(url, MODEL_INFO, timeout_s)
        if not model_info.get("model_path"):
            raise EngineDownError(
                f"{url}: something answers{by_proxy(url)}, but it is not SGLang (no {MODEL_INFO})"
            )
        return model_info

    async def _ask(self, url: str, path: str, timeout_s: float) -> dict[str, Any]:
        """Return a server's reply at a path; raises EngineDownError if it gives none or refuses the key."""
        try:
            status, reply = await ServerStatus(self._session, url).mapping(path, timeout_s)
        except NOT_REACHED as failure:
            raise EngineDownError(
                f"no connection to {url}{by_proxy(url)} ({in_words(failure)}): {self._remedy}"
            ) from None
        if status in KEY_REFUSED:
            raise EngineDownError(
                f"{url}: refuses the API key ({status}){by_proxy(url)}: see engine.api_key_env"
            )
        return reply


def _in_all(models: Sequence[Mapping[str, Any]], key: str) -> bool | None:
    values = [model.get(key) for model in models]
    return all(values) if all(isinstance(value, bool) for value in values) else None


# Server arguments that change the tokens of a chat, or its answer. Where all are unset, the chat endpoint
# does nothing that /generate would not do with the same token ids (serving_chat.py of SGLang 0.5.23).
_CHAT_ARGUMENTS = (
    *("reasoning_parser", "tool_call_parser", "chat_template", "hf_chat_template_name"),
    "default_chat_template_kwargs",
    "preferred_sampling_params",
)
OWN_CHAT_MODELS = {"gpt_oss", "gemma4", "gemma4_unified", "minimax_m3_vl"}
"""Models whose chats SGLang handles in its own way (special tokens in the answer, rules for messages)."""
_IN_PIECES = ("incremental_streaming_output", "stream_output")
"""Arguments with which an event has only the text since the last event; the second is the older name. With
them each row should be a request of its own."""


BUDGET_PARSERS = {
    *("deepseek-v3", "deepseek-v4", "deepseek-v41", "dots", "glm45", "interns1", "kimi_k2", "kimi_k3"),
    *("ling3", "mimo", "minimax", "nanbeige", "poolside_v1", "qwen3", "qwen3-thinking"),
}  # fmt: skip
"""Reasoning parsers with which SGLang 0.5.23 obeys a limit of thinking by itself: those whose detector has
`think_excluded_tokens` (parser/reasoning_parser.py, constrained/reasoner_grammar_backend.py)."""


def why_no_budget(server: Mapping[str, Any], *, any_parser: bool = False) -> str | None:
    """Say why a server would ignore or refuse a limit of thinking; None where it obeys.

    `any_parser`: it has a limit for all rows too (SGLANG_MAX_THINK_TOKENS), so that each parser obeys.
    """
    parser = server.get("reasoning_parser")
    if not parser:
        return "the server runs without --reasoning-parser"
    if not server.get("enable_strict_thinking"):
        return "the server runs without --enable-strict-thinking"
    if not any_parser and parser not in BUDGET_PARSERS:
        return f"the server would ignore it with --reasoning-parser {parser}"
    return None


def describe(
    models: Sequence[Mapping[str, Any]], servers: Sequence[Mapping[str, Any]], loads: Sequence[SchedulerLoad]
) -> EngineInfo:
    """Describe replicas of one model by the `/model_info` and `/server_info` of each, and their loads."""
    first = servers[0]
    version = first.get("version")
    takes_images = _in_all(models, "has_image_understanding")
    return EngineInfo(
        kind="attach",
        model=model_identity(str(models[0]["model_path"])),
        version=version if isinstance(version, str) else None,
        max_running=_sum(load.max_running for load in loads)
        or _sum(server.get("max_running_requests") for server in servers),
        max_total_tokens=_sum(load.max_total_tokens for load in loads)
        or _sum(server.get("max_total_num_tokens") for server in servers),
        memory_caps_running=any(map(memory_caps_running, servers)),
        context_length=limit_of(first.get("context_length")) or limit_of(first.get("max_req_input_len")),
        prefill_tokens=prefill_tokens(first),
        caches_prefixes=not first.get("disable_radix_cache"),
        tokenizing=_common_to([*map(tokenizer_info, models, servers)]),
        takes_images=takes_images,
        takes_audio=_in_all(models, "has_audio_understanding"),
        takes_videos=takes_images and None,  # a model that takes images may take videos
        no_thinking_budget=next(filter(None, map(why_no_budget, servers)), None),
        one_by_one=next(filter(None, map(sends_pieces, servers)), None),
    )


def prefill_tokens(arguments: Mapping[str, Any]) -> int | None:
    """Return the maximum number of prompt tokens in a prefill pass, by a server's resolved arguments."""
    limits = (limit_of(arguments.get(name)) for name in ("chunked_prefill_size", "max_prefill_tokens"))
    return min((limit for limit in limits if limit), default=None)


def limit_of(value: Any) -> int | None:
    """Return the reported value if it is a limit (an integer from 1 to MOST), else None."""
    return value if type(value) is int and 0 < value <= MOST else None


def scheduler_states(server: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return what each scheduler adds to `/server_info`: its limits in effect, its memory."""
    states = server.get("internal_states")
    return [state for state in states if isinstance(state, dict)] if isinstance(states, list) else []


def limit_in_effect(state: Mapping[str, Any], argument: str) -> Any:
    """Return one scheduler's limit; with DP attention `max_running_requests` is divided among the ranks."""
    limit = state.get(argument)
    if argument == "max_running_requests":
        return state.get("effective_max_running_requests_per_dp") or limit
    return limit


def running_by_states(server: Mapping[str, Any]) -> int | None:
    """Return how many requests have room for their states in the pool of a server's first scheduler.

    `server` is its `/server_info`. Return None if there is no state pool: only a hybrid model has one.
    """
    state = next(iter(scheduler_states(server)), {})
    slots = limit_of(state.get("max_mamba_cache_size"))
    return slots // slots_per_request({**server, **state}) if slots else None


LEAST_DEFAULT_RUNNING = 2048
"""Smallest `max_running_requests` that SGLang chooses if nothing caps it."""


def memory_caps_running(server: Mapping[str, Any]) -> bool:
    """Tell whether a server's first scheduler runs fewer requests than its arguments ask for.

    `server` is its `/server_info`. If the arguments set no limit, this tells whether a hybrid model (one with
    a `max_mamba_cache_size`) runs fewer requests than SGLang's default.
    """
    state = next(iter(scheduler_states(server)), {})
    in_effect = limit_of(state.get("effective_max_running_requests_per_dp"))
    argument = limit_of(server.get("max_running_requests"))
    if in_effect is None:
        return False
    if argument is None:
        return bool(state.get("max_mamba_cache_size")) and in_effect < LEAST_DEFAULT_RUNNING
    return in_effect < argument // attention_ranks(server)


def tokenizer_info(model: Mapping[str, Any], server: Mapping[str, Any]) -> TokenizerInfo:
    """Describe how a server tokenizes prompts."""
    return TokenizerInfo(
        tokenizer=str(server.get("tokenizer_path") or model["model_path"]),
        model=str(model["model_path"]),
        why_server=_why_server(model, server),
        why_server_chat=_why_server_chat(model, server),
        model_sampling=server.get("sampling_defaults") == "model",
        cuts=bool(server.get("allow_auto_truncate")),
        longest_prompt=limit_of(server.get("max_req_input_len")),
    )


def _sum(limits: Iterable[Any]) -> int | None:
    """Return the sum of a limit over all schedulers; None if one of them does not report it."""
    checked = [limit_of(limit) for limit in limits]
    return sum(limit or 0 for limit in checked) if checked and all(checked) else None


def _common_to(infos: Sequence[TokenizerInfo]) -> TokenizerInfo:
    """Return how all replicas tokenize; if their arguments differ, only the servers can tokenize."""
    first = infos[0]
    if any(info != first for info in infos):
        return TokenizerInfo(first.tokenizer, first.model, why_server="the replicas' arguments differ")
    return first


def sends_pieces(server: Mapping[str, Any]) -> str | None:
    """Return words for the argument by which a server sends only new text in each event, or None."""
    return _runs_with(server, _IN_PIECES)


def _runs_with(server: Mapping[str, Any], arguments: Iterable[str]) -> str | None:
    """Return a phrase with the first of these arguments that a server runs with; None if there is none."""
    argument = next((name for name in arguments if server.get(name)), None)
    return argument and f"the server runs with --{argument.replace('_', '-')}"


def _why_server(model: Mapping[str, Any], server: Mapping[str, Any]) -> str | None:
    """Return why only the server can tokenize prompts; None if the client can too."""
    if "sampling_defaults" not in server:
        return "the server does not report its arguments"
    for name, usual in (("tokenizer_mode", "auto"), ("tokenizer_backend", "huggingface")):
        if server.get(name, usual) != usual:
            return f"the server runs with {name} {server[name]}"
    if model.get("has_image_understanding") or model.get("has_audio_understanding"):
        return "the model takes more than text"
    return None


def _why_server_chat(model: Mapping[str, Any], server: Mapping[str, Any]) -> str | None:
    """Return why only the server can tokenize messages; None if the client can too."""
    if reason := _runs_with(server, _CHAT_ARGUMENTS):
        return reason
    if str(model.get("model_type")) in OWN_CHAT_MODELS:
        return f"SGLang has chat rules of its own for {model['model_type']}"
    return None


def pooling_note(model: Mapping[str, Any]) -> str | None:
    """Return a note for the user if a server pools vectors differently than the model's authors.

    `model` is its `/model_info`. None if they agree, or if either is unknown.
    """
    embedding, path = model.get("embedding"), str(model.get("model_path"))
    pooling = embedding.get("pooling") if isinstance(embedding, dict) else None
    if pooling not in ("cls", "last") or not takes_mean(path):
        return None
    return (
        f"the server makes vectors of the {'first' if pooling == 'cls' else 'last'} token, but the authors "
        f"of {path} make them of the mean over all tokens: the vectors will differ, unless the server was "
        "started with SGLANG_EXTERNAL_MODEL_PACKAGE=mean_pooling"
    )
