"""Reads what servers report about themselves: their load, model and arguments.

The load comes from `/v1/loads`. The model and the arguments come from `/model_info` and `/server_info`; a
parameter `model_info` or `server_info` is the reply of that path.
"""

import contextlib
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from http import HTTPStatus
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
GATEWAY_WORKERS = "/workers"
"""Path at which a Model Gateway lists its workers."""
GATEWAY_LOADS = "/loads"
"""Path at which a Model Gateway returns the load reports of its workers."""
NO_SUCH_PATH = frozenset({404, 405})
"""HTTP statuses of a path that a server does not have."""
KEY_REFUSED = frozenset({401, 403})
"""HTTP statuses with which a server refuses the API key."""
METRIC_PREFIX = "sglang:"
"""Prefix of the names of SGLang's metrics."""
LONGEST_REPLY_BYTES = 8 << 20
"""Maximum bytes of a reply that are read. The `/metrics` of a large server has a tenth of that."""
LARGEST_NUMBER = 1 << 53
"""Maximum of a number in a reply. A double represents every integer up to this value exactly."""
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
        """Return the status and the body of a reply.

        A body of more than LONGEST_REPLY_BYTES is returned empty.
        """
        return await self._ask("GET", path, timeout_s)

    async def post(self, path: str, fields: Mapping[str, Any], timeout_s: float) -> tuple[int, bytes]:
        """Post a JSON object to a path; return the status and the body, as `get` does."""
        return await self._ask("POST", path, timeout_s, json=fields)

    async def _ask(self, method: str, path: str, timeout_s: float, **content: Any) -> tuple[int, bytes]:
        """Send a request; return the status and the body, as `get` does."""
        options = {"timeout": aiohttp.ClientTimeout(total=timeout_s), **self._options, **content}
        try:
            async with self._session.request(method, self.url + path, **options) as response:
                _check_redirects(response)
                body = bytearray()
                async for part in response.content.iter_any():
                    body += part
                    if len(body) > LONGEST_REPLY_BYTES:
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
            reply = orjson.loads(body) if status == HTTPStatus.OK else None
            if isinstance(reply, dict):
                return status, reply
        return status, {}

    async def load(self, timeout_s: float, running_by_states: int | None = None) -> list[SchedulerLoad]:
        """Return the load of each scheduler; empty if the server does not have the path LOADS.

        `running_by_states` is the same as in `loads_in`. Any other status raises ClientPayloadError, because
        the server may answer later.
        """
        status, body = await self.get(LOADS, timeout_s)
        if status in NO_SUCH_PATH:
            return []
        if status != HTTPStatus.OK:
            raise aiohttp.ClientPayloadError(f"{LOADS}: status {status}")
        return loads_in(body, self.url, running_by_states)

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
Tokens = Annotated[int, msgspec.Meta(ge=0, le=LARGEST_NUMBER)]
"""A number of tokens in the reply of a server."""
Amount = Annotated[float, msgspec.Meta(ge=0, le=LARGEST_NUMBER)]
"""A number in the reply of a server that counts neither requests nor tokens, such as a time."""


class _Queues(msgspec.Struct):
    """The object `queues` in the entry of a scheduler in a reply of `/v1/loads`."""

    retracted: Requests | None = None
    """Number of requests that were retracted between the scheduler's last two reports."""


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


def loads_in(body: bytes, url: str, running_by_states: int | None = None) -> list[SchedulerLoad]:
    """Return the loads of the DP ranks of the server at `url`, as read from a reply's `body`.

    `running_by_states` is the number of requests whose states fit into the state pool of a hybrid model; None
    for a model without states. A reply does not say how full this pool is. If the pool limits the number of
    running requests, its usage is the number of running requests divided by this limit. Otherwise, its usage
    is set to 0. Raises ValueError if the body is not a load.
    """
    try:
        loads = _read_loads.decode(body).loads
    except Exception as failure:
        raise ValueError(f"not a load: {type(failure).__name__}: {failure}") from failure
    scheduler_loads = []
    for load in loads:
        state_usage = 0.0
        # SGLang lowers the limit of running requests to the number whose states fit. So if the two numbers
        # are equal, the state pool is the limit.
        if running_by_states and running_by_states == load.max_running_requests:
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
        if family.type in {"counter", "gauge"} and family.name.startswith(METRIC_PREFIX):
            for sample in family.samples:
                labels = sample.labels
                rank = int(labels.get("pp_rank") or 0), int(labels.get("tp_rank") or 0)
                samples.append((labels.get("dp_rank", ""), rank, sample))
    lowest_ranks: dict[str, tuple[int, int]] = {}
    for dp_rank, rank, _ in samples:
        lowest_ranks[dp_rank] = min(rank, lowest_ranks.get(dp_rank, rank))
    sums: defaultdict[str, float] = defaultdict(float)
    for dp_rank, rank, sample in samples:
        if rank == lowest_ranks[dp_rank] and 0 <= sample.value <= LARGEST_NUMBER:
            sums[sample.name.removeprefix(METRIC_PREFIX)] += sample.value
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


def check_task(task: TaskName, model_info: Mapping[str, Any], *, subject: str) -> None:
    """Raise EngineStartError if the `/model_info` of a server shows that its model cannot do a task.

    `subject` begins the message. It names the server and its model.
    """
    # If the reply lacks this field, only the architecture is checked.
    generates = model_info.get("is_generation")
    forward_task = TASKS.get(task)
    needs_generation = forward_task is None or forward_task.by_generation
    if needs_generation and generates is False:
        raise EngineStartError(f"{subject}, which does not generate text")
    if generates is True and not needs_generation:
        raise EngineStartError(
            f"{subject}, which generates text",
            hint=f"start the server with --is-embedding for task: {task}",
        )
    check_architecture(task, model_info.get("architectures"), subject=subject)


def check_architecture(task: TaskName, architectures: object, *, subject: str) -> None:
    """Raise EngineStartError if the architectures in a model's config.json have no head for a task.

    `subject` begins the message. Nothing is raised if the architectures are unknown.
    """
    forward_task = TASKS.get(task)
    if forward_task is None or not forward_task.architectures:
        # A task such as the generation of text requires no architecture: any model can do it.
        return
    if not isinstance(architectures, list) or not architectures:
        return
    names = ", ".join(map(str, architectures))
    if re.search(forward_task.architectures, names) is None:
        raise EngineStartError(f"{subject}, whose architecture {names} has no head for task: {task}")


async def is_gateway(url: str, headers: Mapping[str, str]) -> bool:
    """Tell whether a Model Gateway answers at a URL within a few seconds.

    `headers` has the API key. A key that may not read the list of workers may still read the loads.
    """
    async with aiohttp.ClientSession(headers=headers) as session:
        status = ServerStatus(session, url)
        with contextlib.suppress(*NOT_REACHED):
            for path in (GATEWAY_WORKERS, GATEWAY_LOADS):
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
            model_info = await self._model_info(url, TIMING.server_open)
            server_info = await self._ask(url, SERVER_INFO, TIMING.server_open)
        except EngineDownError as failure:
            # A gateway does not answer `/model_info`. It gets a message of its own.
            await self._refuse_gateway(url)
            # A hint that the message contains is not added to it, but is reported as a field with `--json`.
            hint = self._remedy if self._remedy in str(failure) else None
            raise EngineAwayError(str(failure), hint=hint) from None
        if not server_info:
            await self._refuse_gateway(url)
        check_task(task, model_info, subject=f"{url}: serves {model_info['model_path']}")
        if server_info.get("skip_tokenizer_init"):
            raise EngineStartError(
                f"{url}: the server runs with --skip-tokenizer-init, so it returns no text",
                hint="start the server without this flag",
            )
        return model_info, server_info

    async def _refuse_gateway(self, url: str) -> None:
        """Raise EngineStartError if a Model Gateway answers at the URL of a server."""
        try:
            reply = await self._ask(url, GATEWAY_WORKERS, TIMING.server_open)
        except EngineDownError:
            return
        if isinstance(reply.get("workers"), list):
            raise EngineStartError(
                f"{url}: this is a Model Gateway, not a server",
                hint=f"write `engine: {{kind: gateway, url: {url}}}`",
            )

    async def model(self, url: str, run_model: Model) -> dict[str, str]:
        """Return the description of the model that a server serves now; raises EngineDownError.

        `/server_info` is read only if `run_model` has a field that `/model_info` lacks.
        """
        timeout_s = TIMING.server_open
        model_info = await self._model_info(url, timeout_s)
        missing = run_model.keys() - model_in(model_info).keys()
        server_info = await self._ask(url, SERVER_INFO, timeout_s) if missing else {}
        return model_in(model_info, server_info)

    async def adapters(self, url: str) -> frozenset[str]:
        """Return the names of the LoRA adapters that a server has loaded; raises EngineDownError."""
        reply = await self._ask(url, MODELS, TIMING.server_open)
        cards = reply.get("data")
        if not isinstance(cards, list):
            return frozenset()
        # Only the card of an adapter has a parent: the base model.
        adapters = [card for card in cards if isinstance(card, dict) and card.get("parent")]
        return frozenset(str(card.get("id")) for card in adapters)

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


def _are_all_set(model_infos: Sequence[Mapping[str, Any]], flag: str) -> bool | None:
    """Return whether all replicas have a flag set in their `/model_info`; None if one lacks the flag."""
    values = [model_info.get(flag) for model_info in model_infos]
    return all(values) if all(isinstance(value, bool) for value in values) else None


_CHAT_ARGUMENTS = (
    "reasoning_parser",
    "tool_call_parser",
    "chat_template",
    "hf_chat_template_name",
    "default_chat_template_kwargs",
    "preferred_sampling_params",
)
"""Server arguments that change the token ids or the answer of a chat. If none of them is set, `/generate`
answers the token ids of a chat just as the chat endpoint answers its messages (serving_chat.py of SGLang
0.5.23)."""
OWN_CHAT_MODELS = {"gpt_oss", "gemma4", "gemma4_unified", "minimax_m3_vl"}
"""Model types whose chats SGLang treats specially, by special tokens in the answer or rules for the
messages."""
_INCREMENTAL_ARGUMENTS = ("incremental_streaming_output", "stream_output")
"""Arguments with which each event has only the text since the last event. The second is the older name. Each
row is sent to such a server in a request of its own."""
BUDGET_PARSERS = {
    "deepseek-v3", "deepseek-v4", "deepseek-v41", "dots", "glm45", "interns1", "kimi_k2", "kimi_k3",
    "ling3", "mimo", "minimax", "nanbeige", "poolside_v1", "qwen3", "qwen3-thinking",
}  # fmt: skip
"""Reasoning parsers with which SGLang 0.5.23 supports `max_thinking_tokens`. Their detectors have
`think_excluded_tokens` (parser/reasoning_parser.py, constrained/reasoner_grammar_backend.py)."""


def why_no_budget(server_info: Mapping[str, Any], *, has_default_budget: bool = False) -> str | None:
    """Return why a server would ignore or refuse `max_thinking_tokens`; None if it supports the budget.

    Usually only some reasoning parsers support it. With a default budget (SGLANG_MAX_THINK_TOKENS), every
    parser supports it.
    """
    parser = server_info.get("reasoning_parser")
    if not parser:
        return "the server runs without --reasoning-parser"
    if not server_info.get("enable_strict_thinking"):
        return "the server runs without --enable-strict-thinking"
    if not has_default_budget and parser not in BUDGET_PARSERS:
        return f"the server would ignore the budget with --reasoning-parser {parser}"
    return None


def describe(
    *,
    model_infos: Sequence[Mapping[str, Any]],
    server_infos: Sequence[Mapping[str, Any]],
    loads: Sequence[SchedulerLoad],
) -> EngineInfo:
    """Describe replicas of one model from the `/model_info` and `/server_info` of each, and their loads."""
    # The loads have the limits in effect. Without loads, the limits in the servers' arguments are used.
    max_running = _sum_of_limits(load.max_running for load in loads)
    if max_running is None:
        max_running = _sum_of_limits(info.get("max_running_requests") for info in server_infos)
    max_total_tokens = _sum_of_limits(load.max_total_tokens for load in loads)
    if max_total_tokens is None:
        max_total_tokens = _sum_of_limits(info.get("max_total_num_tokens") for info in server_infos)
    # Replicas share all other properties, so the first one stands for all.
    first = server_infos[0]
    version = first.get("version")
    takes_images = _are_all_set(model_infos, "has_image_understanding")
    return EngineInfo(
        kind="attach",
        model=model_identity(str(model_infos[0]["model_path"])),
        version=version if isinstance(version, str) else None,
        max_running=max_running,
        max_total_tokens=max_total_tokens,
        memory_caps_running=any(map(memory_caps_running, server_infos)),
        context_length=limit_of(first.get("context_length")) or limit_of(first.get("max_req_input_len")),
        prefill_tokens=prefill_tokens(first),
        caches_prefixes=not first.get("disable_radix_cache"),
        tokenizing=_common_tokenizer([*map(tokenizer_info, model_infos, server_infos)]),
        takes_images=takes_images,
        takes_audio=_are_all_set(model_infos, "has_audio_understanding"),
        # No server reports whether its model takes videos. A model that takes images may take them, so that
        # is unknown (None). Any other model takes none.
        takes_videos=False if takes_images is False else None,
        no_thinking_budget=next(filter(None, map(why_no_budget, server_infos)), None),
        one_by_one=next(filter(None, map(why_incremental, server_infos)), None),
    )


def prefill_tokens(server_info: Mapping[str, Any]) -> int | None:
    """Return the maximum number of prompt tokens in a prefill pass, from a server's resolved arguments."""
    limits = (limit_of(server_info.get(name)) for name in ("chunked_prefill_size", "max_prefill_tokens"))
    return min((limit for limit in limits if limit), default=None)


def limit_of(value: Any) -> int | None:
    """Return a reported value if it is a valid limit (an integer from 1 to LARGEST_NUMBER), else None."""
    return value if type(value) is int and 0 < value <= LARGEST_NUMBER else None


def first_scheduler_state(server_info: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of a server's first scheduler, with its limits in effect and its memory.

    Empty if `/server_info` has no such state. All schedulers of a server have the same limits.
    """
    states = server_info.get("internal_states")
    if not isinstance(states, list):
        return {}
    return next((state for state in states if isinstance(state, dict)), {})


def limit_in_effect(state: Mapping[str, Any], argument: str) -> Any:
    """Return the limit that a scheduler applies for a server argument, from its `state`; None if unknown.

    With DP attention, SGLang divides `max_running_requests` among the DP ranks.
    """
    limit = state.get(argument)
    if argument == "max_running_requests":
        return state.get("effective_max_running_requests_per_dp") or limit
    return limit


def running_by_states(server_info: Mapping[str, Any]) -> int | None:
    """Return how many requests fit into the state pool of a server's first scheduler.

    Return None for a model without states; only hybrid models have a state pool.
    """
    state = first_scheduler_state(server_info)
    slots = limit_of(state.get("max_mamba_cache_size"))
    return slots // slots_per_request({**server_info, **state}) if slots else None


LEAST_DEFAULT_RUNNING = 2048
"""Minimum of SGLang's default for `max_running_requests`, unless memory allows fewer requests."""


def memory_caps_running(server_info: Mapping[str, Any]) -> bool:
    """Tell whether memory lets a server's first scheduler run fewer requests than its arguments ask for.

    If the arguments of a hybrid model (one with `max_mamba_cache_size`) set no limit, SGLang's default counts
    as the limit asked for.
    """
    state = first_scheduler_state(server_info)
    limit_in_use = limit_of(state.get("effective_max_running_requests_per_dp"))
    requested_limit = limit_of(server_info.get("max_running_requests"))
    if limit_in_use is None:
        return False
    if requested_limit is None:
        return bool(state.get("max_mamba_cache_size")) and limit_in_use < LEAST_DEFAULT_RUNNING
    # The argument is for the whole server, whose ranks divide it.
    return limit_in_use < requested_limit // attention_ranks(server_info)


def tokenizer_info(model_info: Mapping[str, Any], server_info: Mapping[str, Any]) -> TokenizerInfo:
    """Describe how a server tokenizes prompts, from its `/model_info` and `/server_info`."""
    return TokenizerInfo(
        tokenizer=str(server_info.get("tokenizer_path") or model_info["model_path"]),
        model=str(model_info["model_path"]),
        why_server=_why_server(model_info, server_info),
        why_server_chat=_why_server_chat(model_info, server_info),
        model_sampling=server_info.get("sampling_defaults") == "model",
        cuts=bool(server_info.get("allow_auto_truncate")),
        longest_prompt=limit_of(server_info.get("max_req_input_len")),
    )


def _sum_of_limits(values: Iterable[Any]) -> int | None:
    """Return the sum of a limit over all schedulers; None if one of them, or none at all, reports it."""
    limits = [limit_of(value) for value in values]
    return sum(limit or 0 for limit in limits) if limits and all(limits) else None


def _common_tokenizer(infos: Sequence[TokenizerInfo]) -> TokenizerInfo:
    """Return how all replicas tokenize prompts. If the replicas differ, only the servers can tokenize."""
    first = infos[0]
    if any(info != first for info in infos):
        return TokenizerInfo(
            tokenizer=first.tokenizer, model=first.model, why_server="the replicas' arguments differ"
        )
    return first


def why_incremental(server_info: Mapping[str, Any]) -> str | None:
    """Return "the server runs with --…" if each event of an answer has only the new text.

    The phrase names the argument that causes this. Return None if each event has the whole text so far.
    """
    return _runs_with(server_info, _INCREMENTAL_ARGUMENTS)


def _runs_with(server_info: Mapping[str, Any], arguments: Iterable[str]) -> str | None:
    """Return the phrase "the server runs with --…" for the first argument that is set; None if none is."""
    for argument in arguments:
        if server_info.get(argument):
            return f"the server runs with --{argument.replace('_', '-')}"
    return None


def _why_server(model_info: Mapping[str, Any], server_info: Mapping[str, Any]) -> str | None:
    """Return why only the server can tokenize prompts; None if the run can tokenize them too."""
    # Every server that reports its arguments reports this one.
    if "sampling_defaults" not in server_info:
        return "the server does not report its arguments"
    for name, usual in (("tokenizer_mode", "auto"), ("tokenizer_backend", "huggingface")):
        if server_info.get(name, usual) != usual:
            return f"the server runs with {name} {server_info[name]}"
    if model_info.get("has_image_understanding") or model_info.get("has_audio_understanding"):
        return "the model accepts images or audio"
    return None


def _why_server_chat(model_info: Mapping[str, Any], server_info: Mapping[str, Any]) -> str | None:
    """Return why only the server can tokenize the messages of chats; None if the run can do it too."""
    if reason := _runs_with(server_info, _CHAT_ARGUMENTS):
        return reason
    if str(model_info.get("model_type")) in OWN_CHAT_MODELS:
        return f"SGLang treats the chats of model type {model_info['model_type']} specially"
    return None


def pooling_note(model_info: Mapping[str, Any]) -> str | None:
    """Return a note for the user if a server pools embeddings otherwise than the model's authors do.

    Return None if the two agree, or if one of them is unknown.
    """
    path = str(model_info.get("model_path"))
    embedding = model_info.get("embedding")
    pooling = embedding.get("pooling") if isinstance(embedding, dict) else None
    if pooling not in ("cls", "last") or not takes_mean(path):
        return None
    token = "first" if pooling == "cls" else "last"
    return (
        f"the server takes the vector of the {token} token, but the authors of {path} take the mean over all "
        "tokens. So the vectors will differ, unless the server was started with "
        "SGLANG_EXTERNAL_MODEL_PACKAGE=mean_pooling"
    )
