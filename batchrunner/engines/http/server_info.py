"""Reads what servers report about themselves: their load, model and arguments.

The load comes from `/v1/loads`. The model and the arguments come from `/model_info` and `/server_info`.
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

MODEL_INFO = "/model_info"
"""Path at which a server describes its model."""
SERVER_INFO = "/server_info"
"""Path at which a server reports its arguments and limits."""
MODELS = "/v1/models"
"""Path at which a server lists its model and its loaded LoRA adapters."""
LOADS = "/v1/loads?include=core,queues"
"""Path at which a server reports the load of its schedulers."""
METRICS = "/metrics"
"""Path at which a server reports its counters, in Prometheus's format."""
WORKERS = "/workers"
"""Path at which a Model Gateway lists its workers."""
NO_SUCH_PATH = frozenset({404, 405})
"""HTTP statuses of a path that a server does not have."""
KEY_REFUSED = frozenset({401, 403})
"""HTTP statuses with which a server refuses the API key."""
PREFIX = "sglang:"
"""Prefix of the names of SGLang's metrics."""
MOST_BYTES = 8 << 20
"""Maximum bytes of a reply that are read. The `/metrics` of a large server has a tenth of that."""
MOST = 1 << 53
"""Maximum of a gauge or counter. A double represents every integer up to this value exactly."""
NOT_REACHED = (aiohttp.ClientError, TimeoutError, OSError)
"""Errors of every request in this module if the server does not answer in time."""
NOT_SGLANG = (ValueError, KeyError, TypeError, msgspec.MsgspecError)
"""Errors that `ServerStatus.load` raises for a reply that does not come from SGLang. If there is no reply, it
raises an error of NOT_REACHED."""


def in_words(failure: Exception) -> str:
    """Return one line with the reason why a server gave no answer. Some errors of aiohttp have no text."""
    if isinstance(failure, aiohttp.TooManyRedirects):
        return "its redirects form a loop"
    words = " ".join(str(getattr(failure, "os_error", failure)).split()) or type(failure).__name__
    if isinstance(failure, aiohttp.ClientConnectorCertificateError):
        return f"{words}; to trust its certificate, set SSL_CERT_FILE"
    return words


class ServerStatus:
    """Requests to the server at `url`. Each request ends after its `timeout_s`."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self.url = url
        self._session = session
        proxy = proxy_of(url)
        self._options = proxy.options if proxy else {}

    async def get(self, path: str, timeout_s: float) -> tuple[int, bytes]:
        """Return the status and the body of a reply; a body of more than MOST_BYTES is returned empty."""
        return await self._ask("GET", path, timeout_s)

    async def post(self, path: str, fields: Mapping[str, Any], timeout_s: float) -> tuple[int, bytes]:
        """Post a JSON object to a path; return the status and the body, as `get` does."""
        return await self._ask("POST", path, timeout_s, json=fields)

    async def _ask(self, method: str, path: str, timeout_s: float, **content: Any) -> tuple[int, bytes]:
        """Send a request; return the status and the body, which is empty if it exceeds MOST_BYTES."""
        options = {"timeout": aiohttp.ClientTimeout(total=timeout_s), **self._options, **content}
        try:
            async with self._session.request(method, self.url + path, **options) as response:
                _check_redirects(response)
                body = bytearray()
                async for part in response.content.iter_any():
                    body += part
                    if len(body) > MOST_BYTES:
                        return response.status, b""
                return response.status, bytes(body)
        except NOT_REACHED:
            raise
        except Exception as failure:
            # Malformed bytes can raise errors that aiohttp does not document.
            raise aiohttp.ClientPayloadError(f"the answer cannot be read: {failure!r}") from failure

    async def mapping(self, path: str, timeout_s: float) -> tuple[int, dict[str, Any]]:
        """Return the status and the JSON object of a reply; the object is empty if the reply has none."""
        status, body = await self.get(path, timeout_s)
        with contextlib.suppress(orjson.JSONDecodeError):
            reply = orjson.loads(body) if status == 200 else None  # noqa: PLR2004
            if isinstance(reply, dict):
                return status, reply
        return status, {}

    async def load(self, timeout_s: float, running_by_states: int | None = None) -> list[SchedulerLoad]:
        """Return the load of each scheduler; empty if the server does not have the path LOADS.

        Any other status than 200 raises ClientPayloadError, because the server may answer later.
        `running_by_states` is the same as in `load_in`.
        """
        status, body = await self.get(LOADS, timeout_s)
        if status in NO_SUCH_PATH:
            return []
        if status != 200:  # noqa: PLR2004
            raise aiohttp.ClientPayloadError(f"{LOADS}: status {status}")
        return load_in(body, self.url, running_by_states)

    async def is_alive(self) -> bool:
        """Tell whether the server answers within 2 s, with any status."""
        try:
            await self.get(MODEL_INFO, TIMING.status_timeout)
        except NOT_REACHED:
            return False
        return True


def _check_redirects(response: aiohttp.ClientResponse) -> None:
    """Raise ClientPayloadError if a redirect is why the API key was refused.

    aiohttp follows redirects, but sends the API key to the first address only.
    """
    if response.history and response.status in KEY_REFUSED:
        raise aiohttp.ClientPayloadError(
            f"it redirects to {response.url.origin()}, which does not get the API key: give that address"
        )


Requests = Annotated[int, msgspec.Meta(ge=0, le=1_000_000)]
"""Number of requests at one scheduler. A reply with a larger number is invalid, because no server could have
so many."""
Tokens = Annotated[int, msgspec.Meta(ge=0, le=MOST)]
"""A number of tokens in the reply of a server."""
Amount = Annotated[float, msgspec.Meta(ge=0, le=MOST)]
"""Any other number in a reply of a server."""


class _Queues(msgspec.Struct):
    """The object `queues` in the entry of a scheduler in a reply of `/v1/loads`."""

    retracted: Requests | None = None


class _Scheduler(msgspec.Struct):
    """Load of a scheduler in `/v1/loads`. A value outside its range makes the whole reply invalid."""

    num_running_reqs: Requests
    num_waiting_reqs: Requests
    token_usage: Annotated[float, msgspec.Meta(ge=0, le=10)]
    """Fraction of the KV pool in use. SGLang reports up to 1, or a little more while it moves requests."""
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
    """Return the loads of the DP ranks of the server at `url`, as read from a reply's `body`.

    `running_by_states` is the number of requests whose states fit into the state pool of a hybrid model; None
    for a model without states. A reply does not say how full this pool is. If it is what limits the number of
    running requests, its usage is the number of running requests divided by this limit. Otherwise, its usage
    is set to 0. Raises ValueError if the body is not a load.
    """
    try:
        loads = _read_loads.decode(body).loads
    except Exception as failure:
        raise ValueError(f"not a load: {type(failure).__name__}: {failure}") from failure
    scheduler_loads = []
    for load in loads:
        # SGLang lowers the limit of running requests to the number whose states fit. So if the two numbers
        # are equal, the state pool is the limit.
        is_limited_by_states = running_by_states == load.max_running_requests
        state_usage = 0.0
        if running_by_states and is_limited_by_states:
            state_usage = load.num_running_reqs / running_by_states
        scheduler_loads.append(
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
                state_usage=state_usage,
            )
        )
    return scheduler_loads


def counters_in(text: str) -> dict[str, float]:
    """Return SGLang's counters and gauges in `/metrics`, by their names without `sglang:`.

    Each value is the sum over all schedulers (DP ranks). All pipeline stages and tensor-parallel ranks of a
    DP rank report the same value, so only the lowest rank counts. With DP attention, this is not always rank
    0. Invalid values (infinite, not a number, negative) are left out. Raises ValueError if the text is not in
    Prometheus's format.
    """
    from prometheus_client.parser import text_string_to_metric_families  # noqa: PLC0415 - only where needed

    # The samples of all ranks are collected first, because the lowest rank is known only at the end.
    samples = []
    for family in text_string_to_metric_families(text):
        if family.type in {"counter", "gauge"} and family.name.startswith(PREFIX):
            for sample in family.samples:
                labels = sample.labels
                rank = int(labels.get("pp_rank") or 0), int(labels.get("tp_rank") or 0)
                samples.append((labels.get("dp_rank", ""), rank, sample))
    lowest_ranks: dict[str, tuple[int, int]] = {}
    for dp_rank, rank, _ in samples:
        lowest_ranks[dp_rank] = min(rank, lowest_ranks.get(dp_rank, rank))
    sums: defaultdict[str, float] = defaultdict(float)
    for dp_rank, rank, sample in samples:
        if rank == lowest_ranks[dp_rank] and 0 <= sample.value <= MOST:
            sums[sample.name.removeprefix(PREFIX)] += sample.value
    return dict(sums)


def _work(load: _Scheduler) -> float | None:
    """Return the microseconds that a scheduler has computed so far; None before SGLang 0.5.23.

    They are the sum of all prefill and decode passes.
    """
    if load.total_prefill_busy_us is None:
        return None
    # The list begins with the total of all decode passes.
    decode_us = (load.decode_moments or [0])[0]
    return load.total_prefill_busy_us + decode_us


def check_does(task: TaskName, model: Mapping[str, Any], who: str) -> None:
    """Raise EngineStartError if the `/model_info` of a server shows that its model cannot do a task.

    `who` names the server and its model at the beginning of the message.
    """
    forward_task, generates = TASKS.get(task), model.get("is_generation")
    needs_generation = forward_task is None or forward_task.by_generation
    if needs_generation and generates is False:
        raise EngineStartError(f"{who}, which does not generate text")
    if generates is True and not needs_generation:
        raise EngineStartError(
            f"{who}, which generates text",
            hint=f"start the server with --is-embedding for task: {task}",
        )
    check_architecture(task, model.get("architectures"), who)


def check_architecture(task: TaskName, architectures: object, who: str) -> None:
    """Raise EngineStartError if the architectures in a model's config.json have no head for a task.

    `who` is the beginning of the message. Nothing is raised if the architectures are unknown.
    """
    forward_task = TASKS.get(task)
    if forward_task is None or not forward_task.architectures:
        # A task such as the generation of text requires no architecture: any model can do it.
        return
    if not isinstance(architectures, list) or not architectures:
        return
    names = ", ".join(map(str, architectures))
    if re.search(forward_task.architectures, names) is None:
        raise EngineStartError(f"{who}, whose architecture {names} has no head for task: {task}")


async def is_gateway(url: str, headers: Mapping[str, str]) -> bool:
    """Tell whether a Model Gateway answers at a URL within a few seconds.

    The path `/loads` is asked too, because a key that may not read the list of workers may read the loads.
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
    """Asks servers about their model and arguments, at the start of a run and later."""

    def __init__(self, session: aiohttp.ClientSession, remedy: str) -> None:
        """`remedy` is the advice to a user whose server does not answer."""
        self._session, self._remedy = session, remedy

    async def at_start(self, url: str, task: TaskName) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return a server's replies to `/model_info` and `/server_info`.

        Raises EngineAwayError if the server does not answer, EngineStartError if it is a gateway or its model
        cannot do the task.
        """
        try:
            model = await self._model_info(url, TIMING.server_open)
            server = await self._ask(url, SERVER_INFO, TIMING.server_open)
        except EngineDownError as failure:
            # A gateway does not answer `/model_info`. It gets a message of its own.
            await self._refuse_gateway(url)
            hint = self._remedy if self._remedy in str(failure) else None
            raise EngineAwayError(str(failure), hint=hint) from None
        if not server:
            await self._refuse_gateway(url)
        check_does(task, model, f"{url}: serves {model['model_path']}")
        if server.get("skip_tokenizer_init"):
            raise EngineStartError(
                f"{url}: the server runs with --skip-tokenizer-init, so it returns no text",
                hint="start the server without this flag",
            )
        return model, server

    async def _refuse_gateway(self, url: str) -> None:
        """Raise EngineStartError if a Model Gateway answers at the URL of a server."""
        reply = dict[str, Any]()
        with contextlib.suppress(EngineDownError):
            reply = await self._ask(url, WORKERS, TIMING.server_open)
        if isinstance(reply.get("workers"), list):
            raise EngineStartError(
                f"{url}: this is a Model Gateway, not a server",
                hint=f"write `engine: {{kind: gateway, url: {url}}}`",
            )

    async def model(self, url: str, run_model: Model) -> dict[str, str]:
        """Return the description of the model that a server serves now; raises EngineDownError.

        The server's arguments are read only if `run_model` has a field that `/model_info` lacks.
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
        """Return a server's reply to `/model_info`; raises EngineDownError if it is not SGLang's."""
        model_info = await self._ask(url, MODEL_INFO, timeout_s)
        if not model_info.get("model_path"):
            raise EngineDownError(
                f"{url}: something answers{by_proxy(url)}, but it is not SGLang (no {MODEL_INFO})"
            )
        return model_info

    async def _ask(self, url: str, path: str, timeout_s: float) -> dict[str, Any]:
        """Return the JSON object at a path of a server; empty if the reply has none.

        Raises EngineDownError if the server does not answer or refuses the API key.
        """
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
    """Return whether all replicas have a flag set in their `/model_info`; None if one lacks the flag."""
    values = [model.get(key) for model in models]
    return all(values) if all(isinstance(value, bool) for value in values) else None


_CHAT_ARGUMENTS = (
    *("reasoning_parser", "tool_call_parser", "chat_template", "hf_chat_template_name"),
    "default_chat_template_kwargs",
    "preferred_sampling_params",
)
"""Server arguments that change the token ids or the answer of a chat. If none of them is set, `/generate`
answers the token ids of a chat just as the chat endpoint answers its messages (serving_chat.py of SGLang
0.5.23)."""
OWN_CHAT_MODELS = {"gpt_oss", "gemma4", "gemma4_unified", "minimax_m3_vl"}
"""Model types whose chats SGLang treats specially, by special tokens in the answer or rules for the
messages."""
_IN_PIECES = ("incremental_streaming_output", "stream_output")
"""Arguments with which each event has only the text since the last event. The second is the older name. Each
row is sent to such a server in a request of its own."""
BUDGET_PARSERS = {
    *("deepseek-v3", "deepseek-v4", "deepseek-v41", "dots", "glm45", "interns1", "kimi_k2", "kimi_k3"),
    *("ling3", "mimo", "minimax", "nanbeige", "poolside_v1", "qwen3", "qwen3-thinking"),
}  # fmt: skip
"""Reasoning parsers with which SGLang 0.5.23 supports `max_thinking_tokens`. Their detectors have
`think_excluded_tokens` (parser/reasoning_parser.py, constrained/reasoner_grammar_backend.py)."""


def why_no_budget(server: Mapping[str, Any], *, any_parser: bool = False) -> str | None:
    """Return why a server would ignore or refuse `max_thinking_tokens`; None if it supports the budget.

    Usually only some reasoning parsers support it. `any_parser` tells that the server has a default budget
    (SGLANG_MAX_THINK_TOKENS), with which every parser supports it.
    """
    parser = server.get("reasoning_parser")
    if not parser:
        return "the server runs without --reasoning-parser"
    if not server.get("enable_strict_thinking"):
        return "the server runs without --enable-strict-thinking"
    if not any_parser and parser not in BUDGET_PARSERS:
        return f"the server would ignore the budget with --reasoning-parser {parser}"
    return None


def describe(
    models: Sequence[Mapping[str, Any]], servers: Sequence[Mapping[str, Any]], loads: Sequence[SchedulerLoad]
) -> EngineInfo:
    """Describe replicas of one model from the `/model_info` and `/server_info` of each, and their loads."""
    first = servers[0]
    version = first.get("version")
    takes_images = _in_all(models, "has_image_understanding")
    return EngineInfo(
        kind="attach",
        model=model_identity(str(models[0]["model_path"])),
        version=version if isinstance(version, str) else None,
        # The loads have the limits in effect. Without loads, the limits in the servers' arguments are used.
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
        # No server reports whether its model takes videos. A model that takes images may, so it is None
        # (unknown).
        takes_videos=takes_images and None,
        no_thinking_budget=next(filter(None, map(why_no_budget, servers)), None),
        one_by_one=next(filter(None, map(sends_pieces, servers)), None),
    )


def prefill_tokens(arguments: Mapping[str, Any]) -> int | None:
    """Return the maximum number of prompt tokens in a prefill pass, from a server's resolved arguments."""
    limits = (limit_of(arguments.get(name)) for name in ("chunked_prefill_size", "max_prefill_tokens"))
    return min((limit for limit in limits if limit), default=None)


def limit_of(value: Any) -> int | None:
    """Return a reported value if it is a valid limit (an integer from 1 to MOST), else None."""
    return value if type(value) is int and 0 < value <= MOST else None


def scheduler_states(server: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the state of each scheduler in `/server_info`, with its limits in effect and its memory."""
    states = server.get("internal_states")
    return [state for state in states if isinstance(state, dict)] if isinstance(states, list) else []


def limit_in_effect(state: Mapping[str, Any], argument: str) -> Any:
    """Return the limit that a scheduler applies for a server argument; None if unknown.

    With DP attention, SGLang divides `max_running_requests` among the DP ranks.
    """
    limit = state.get(argument)
    if argument == "max_running_requests":
        return state.get("effective_max_running_requests_per_dp") or limit
    return limit


def running_by_states(server: Mapping[str, Any]) -> int | None:
    """Return how many requests fit into the state pool of a server's first scheduler.

    `server` is the server's `/server_info`. Return None for a model without states; only hybrid models have a
    state pool.
    """
    state = next(iter(scheduler_states(server)), {})
    slots = limit_of(state.get("max_mamba_cache_size"))
    return slots // slots_per_request({**server, **state}) if slots else None


LEAST_DEFAULT_RUNNING = 2048
"""Minimum of SGLang's default for `max_running_requests`, unless memory allows fewer requests."""


def memory_caps_running(server: Mapping[str, Any]) -> bool:
    """Tell whether memory lets a server's first scheduler run fewer requests than its arguments ask for.

    `server` is the server's `/server_info`. If the arguments of a hybrid model (one with
    `max_mamba_cache_size`) set no limit, SGLang's default counts as the limit asked for.
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
    """Describe how a server tokenizes prompts, from its `/model_info` and `/server_info`."""
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
    """Return how all replicas tokenize prompts. If the replicas differ, only the servers can tokenize."""
    first = infos[0]
    if any(info != first for info in infos):
        return TokenizerInfo(first.tokenizer, first.model, why_server="the replicas' arguments differ")
    return first


def sends_pieces(server: Mapping[str, Any]) -> str | None:
    """Return "the server runs with --…" if each event of an answer has only the new text.

    The phrase names the argument that causes this. Return None if each event has the whole text so far.
    """
    return _runs_with(server, _IN_PIECES)


def _runs_with(server: Mapping[str, Any], arguments: Iterable[str]) -> str | None:
    """Return the phrase "the server runs with --…" for the first argument that is set; None if none is."""
    argument = next((name for name in arguments if server.get(name)), None)
    return argument and f"the server runs with --{argument.replace('_', '-')}"


def _why_server(model: Mapping[str, Any], server: Mapping[str, Any]) -> str | None:
    """Return why only the server can tokenize prompts; None if the run can tokenize them too."""
    if "sampling_defaults" not in server:
        return "the server does not report its arguments"
    for name, usual in (("tokenizer_mode", "auto"), ("tokenizer_backend", "huggingface")):
        if server.get(name, usual) != usual:
            return f"the server runs with {name} {server[name]}"
    if model.get("has_image_understanding") or model.get("has_audio_understanding"):
        return "the model accepts images or audio"
    return None


def _why_server_chat(model: Mapping[str, Any], server: Mapping[str, Any]) -> str | None:
    """Return why only the server can tokenize the messages of chats; None if the run can do it too."""
    if reason := _runs_with(server, _CHAT_ARGUMENTS):
        return reason
    if str(model.get("model_type")) in OWN_CHAT_MODELS:
        return f"SGLang treats the chats of model type {model['model_type']} specially"
    return None


def pooling_note(model: Mapping[str, Any]) -> str | None:
    """Return a note for the user if a server pools embeddings otherwise than the model's authors do.

    `model` is the server's `/model_info`. Return None if the two agree, or if one of them is unknown.
    """
    embedding, path = model.get("embedding"), str(model.get("model_path"))
    pooling = embedding.get("pooling") if isinstance(embedding, dict) else None
    if pooling not in ("cls", "last") or not takes_mean(path):
        return None
    token = "first" if pooling == "cls" else "last"
    return (
        f"the server takes the vector of the {token} token, but the authors of {path} take the mean over all "
        "tokens. So the vectors will differ, unless the server was started with "
        "SGLANG_EXTERNAL_MODEL_PACKAGE=mean_pooling"
    )
