"""The parser of single lines of an SGLang log (0.5.16 or newer) into records. Pure.

SGLang writes `Decode batch` and `Prefill batch` lines of `name: value` pairs. Their choice and order change
with nearly every release, so each pair is found by its name and never by its position.
"""

import ast
import re
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any, Literal, NamedTuple, TypeAlias

STEPS_A_LINE = 40
"""Decode steps between two lines of the log: SGLang's default of `--decode-log-interval`."""
Phase = Literal["load", "pool", "states", "graph", "prefill", "decode", "general"]


class LoggedBatch(NamedTuple):
    """The load of one scheduler, logged at each prefill pass and every 40 decode steps."""

    decode: bool
    running: int
    """`#running-req`."""
    queue: int
    """`#queue-req`."""
    usage: float
    """Fraction of the KV pool in use, `token usage`; with sliding windows, of the fuller of its two parts."""
    tokens: int | None = None
    """Tokens in the KV pool, `#token`."""
    graph: bool | None = None
    """Whether a CUDA graph ran; None where the line does not say, as on a CPU."""
    throughput: float | None = None
    """Tokens per second: generated ones in a decode line, prompt tokens in a prefill line."""
    new_seqs: int = 0
    """Requests in a prefill pass."""
    new_tokens: int = 0
    """Prompt tokens that the pass computes."""
    cached_tokens: int = 0
    """Prompt tokens that hit the prefix cache."""
    accepted: float = 1.0
    """Tokens of a request in a decode step, `accept len`; above 1 with speculation."""
    state_usage: float = 0.0
    """Fraction of the state pool in use, `mamba usage`; 0 for a model without states."""


class Retraction(NamedTuple):
    """Retractions: the KV pool was full, and running requests went back to the queue."""

    tokens: int
    """Tokens lost from the pool, to be computed again; 0 in releases that do not log them."""


class ServerReady(NamedTuple):
    """Limits of a scheduler, logged before it takes requests."""

    max_total_num_tokens: int | None = None
    chunked_prefill_size: int | None = None
    max_running_requests: int | None = None
    context_len: int | None = None
    gpu_gb: float | None = None
    """Free memory of the GPU in GB, `available_gpu_mem`; None on a CPU."""
    cpu_gb: float | None = None
    """Free memory of the machine in GB, `available_cpu_mem`; None on a GPU."""
    memory_caps_running: bool = False
    """Whether memory allows fewer running requests than `--max-running-requests` asks for."""


class RunningCapped(NamedTuple):
    """The state pool of a hybrid model, or the KV pool, allows fewer running requests than were asked for.

    The fields are known where it is the state pool.
    """

    slots: int | None = None
    """`max_mamba_cache_size`."""
    per_request: int | None = None
    """State slots of a running request."""


class PoolAllocated(NamedTuple):
    """The KV pool, or the state pool of a hybrid model (`slots` is known), has its memory."""

    gb: float
    slots: int | None = None


class WeightsLoaded(NamedTuple):
    """Loading of the weights begins (`free_gb` is known) or ends (`used_gb` and `model` are)."""

    free_gb: float | None
    """Free memory of the device in GB."""
    used_gb: float | None = None
    """Memory that the weights take in GB."""
    model: str | None = None
    """The model's class, such as LlamaForCausalLM."""
    quantised: str | None = None
    """The checkpoint's quantisation, empty if it has none; None if the release does not log it."""


class OutOfMemory(NamedTuple):
    """Memory ran out, which ends an engine; `phase` is `general` where the line does not name it."""

    phase: Phase
    text: str
    """The log line."""
    running: int = 0
    """Requests that ran just before, `#running-req`, filled in by a reader of the whole log."""


class Died(NamedTuple):
    """A process of the server ended unexpectedly."""

    killed: bool
    """Whether SIGKILL ended it: the kernel sends that when memory runs out, a person with `kill -9`."""
    text: str


class Raised(NamedTuple):
    """The last line of a traceback; only other lines show whether a process died of it."""

    text: str


class PhaseBegins(NamedTuple):
    """The phase that the server enters, by a progress line or a traceback."""

    phase: Phase


class Arguments(NamedTuple):
    """The server's resolved arguments, which it logs at its start."""

    values: dict[str, Any]


SGLangRecord: TypeAlias = (
    LoggedBatch | Retraction | RunningCapped | PoolAllocated | ServerReady | WeightsLoaded | Arguments
)
"""A record of a line that only SGLang writes."""
Record: TypeAlias = SGLangRecord | OutOfMemory | Died | Raised | PhaseBegins


class Origin(NamedTuple):
    """The time of a line, and the process and server that wrote it."""

    at: float | None
    """Seconds since an unknown time; only differences have a meaning."""
    server: str
    """Label that `srun --label`, Docker, Kubernetes or journalctl put before the line; empty without one."""
    dp: str
    """The DP rank's number; empty where there is none."""
    rank: str
    """All ranks of the process, such as `DP0 TP0`."""


_LABEL = (
    r"(?:(?:[A-Z][a-z]{2} [ \d]\d [\d:]{8}|\d{4}-\S+) (?P<unit>[\w.-]+ [^\s\[]+)\[\d+\]: )?"  # journalctl
    r"(?:(?P<server>\d{1,5}:|[\w.-]+ +\||\[pod/[^\]]*\]) ?)?(?:\d{4}-\S+ )?\s*"
)
_ORIGIN = re.compile(
    _LABEL + r"\[(?P<time>\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)?[.,\d]*"
    r"(?P<rank>(?: ?(?:DP|PP|ATTN_CP|MOE_DP|TP|EP)\d+)*)\s*\]"
)
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_COUNT, _NUMBER = r"(\d{1,15})(?!\d)", r"(\d{1,15}(?:\.\d{1,15})?)"
"""At most 15 digits: a longer number is from a damaged line, which does not count."""
_RUNNING, _QUEUE, _TOKENS = (
    re.compile(rf"#{name}: *{_COUNT}") for name in ("running-req", "queue-req", "token")
)
_PREFILLED = [re.compile(rf"#{name}: *{_COUNT}") for name in ("new-seq", "new-token", "cached-token")]
_USAGE = re.compile(rf"token usage: *{_NUMBER}")
_STATE_USAGE = re.compile(rf"mamba usage: *{_NUMBER}")
_RATE = re.compile(rf"throughput \(token/s\): *{_NUMBER}")
_ACCEPTED = re.compile(rf"(?<!block )accept len: *{_NUMBER}")
_READY = re.compile(
    r"\b(max_total_num_tokens|chunked_prefill_size|max_running_requests|context_len)=(-?\d{1,15})(?!\d)"
)
_RUNNING_CAPPED = re.compile(
    r"max_running_requests (?:is capped to .* by the mamba state cache"
    rf"(?: \(max_mamba_cache_size={_COUNT}, {_COUNT} state slots per request)?"
    r"|was reduced from the requested )"
)
_STATES_ALLOCATED = re.compile(
    rf"Mamba Cache is allocated\. max_mamba_cache_size: {_COUNT}, "
    rf"conv_state size: {_NUMBER}GB, ssm_state size: {_NUMBER}GB"
)
_KV_ALLOCATED = re.compile(
    rf"KV [Cc]ache (?:is )?allocated\..*?\bKV? size: {_NUMBER} GB(?:, V size: {_NUMBER} GB)?"
)
_FREE_GB = re.compile(rf"available_([gc]pu)_mem={_NUMBER}")
_RETRACTED = re.compile(rf"#retracted_reqs: {_COUNT}")
_GAINED = re.compile(rf"#new_tokens_gained: {_COUNT}")
_WEIGHTS = re.compile(rf"Load weight (begin|end)\.(?:.*?\btype=(\w+))?.*?avail mem={_NUMBER} ?GB")
_QUANTISED = re.compile(r"\bquant=([\w-]+)")
_USED = re.compile(rf"mem usage=(-?{_NUMBER}) ?GB")
_ARGUMENT = re.compile(r"\b(\w+)=('(?:[^'\\]|\\.)*'|\[[^\]]{0,4096}\]|[^,()\s]+)")
_RAISED = re.compile(_LABEL + r"(?:\[[^\]]*\]:? *)?(?:[A-Z]+:? +)?(?P<error>[\w.]*(?:Error|Exception)\b: .*)")
_KILLED = re.compile(
    r"exit ?code[:=]? ?-9\b|unexpectedly failed with (?:an )?exit ?code[ =]9\b|"  # 9: a status of waitpid
    r"Out of memory: Killed process|killed by the OOM killer|\bKilled(?:$| {4})"
)
_CRASHED = re.compile(
    "hit an exception: |Received sigquit|SIGQUIT received|crashed with exit code|scheduler died during"
    "|unexpectedly failed with|Fatal Python error: |CUDA error: an illegal memory access|graph failed: "
)
_OUT_OF_MEMORY: dict[Phase, re.Pattern[str]] = {
    "prefill": re.compile("Prefill out of memory"),
    "states": re.compile("Not enough space for mamba|state cache is too small to serve"),
    "decode": re.compile("Decode out of memory|alloc_req_slots runs out of memory"),
    "pool": re.compile(
        "Not enough memory. Please|leave no GPU memory for the KV cache|Not enough GPU memory for hybrid"
    ),
    "general": re.compile(
        "(CUDA|CUDA error:|CUDA driver error:|HIP|Triton Error .CUDA.:) out of memory"
        "|CUBLAS_STATUS_ALLOC_FAILED|Cuda failure 2 'out of memory'|can't allocate memory"
        "|Out of memory. Try to lower"
    ),
}
_WITHOUT_ERROR = ("Try to lower", "Cuda failure", "what(): ")
"""Signs of running out of memory that also count where the line does not begin with an error's name."""
_ACCESS = ' HTTP/1.1" '
"""Part of a line in which uvicorn logs a request."""
_REQUESTS = ("Receive: obj=", "Finish: obj=", '"request.received"', '"request.finished"')
"""Parts of the lines of `--log-requests`, which quote prompts and answers instead of SGLang's messages."""
_PHASES: dict[Phase, re.Pattern[str]] = {
    "prefill": re.compile("in forward_extend|in _execute_extend"),  # the second of each: 0.5.23
    "decode": re.compile("in forward_decode|in _execute_decode"),
    "graph": re.compile("apture cuda graph begin|CUDA graph begin"),
    "general": re.compile("apture cuda graph end|CUDA graph end|KV Cache is allocated"),
}
_STEPS = {
    "copying the model": re.compile("^copying "),
    "starting its processes": re.compile("server_args="),
    "downloading the model": re.compile(r"[Ww]ill (?:attempt )?download|Fetching \d+ files"),
    "loading the weights": re.compile(
        "Load weight begin|skipping download|[Ll]oading .*(?:shards|safetensors)"
    ),
    "making the KV pool": re.compile("Load weight end"),
    "capturing graphs": re.compile("Capture .* begin|Capturing "),
    "compiling": re.compile("Compiling |DeepGEMM JIT Pre-Compile|DeepGEMM warmup"),
    "warming up": re.compile("Capture .* end|Engine startup timings|Application startup complete"),
}
"""Steps of a starting server, with the lines that announce them (0.5.23)."""
_OF_ALL = re.compile(r"\| *(\d+)/(\d+) \[")
"""Position of a progress bar."""
_RARE = (
    "mem", "forward_", "_execute_", "raph", "server_args=", "Mamba Cache", "KV Cache",
    "rror: ", "xception: ", "exit", "illed", "child failed",
)  # fmt: skip
"""Parts of all other lines that matter, for a quick test of the many that do not."""


def record_in(line: str) -> Record | None:
    """Return the record of a line; None for the many without one. Never raises."""
    record = _record(line)
    quotes_request = "obj" in line and any(sign in line for sign in _REQUESTS)
    return None if quotes_request else record


def _record(line: str) -> Record | None:
    if _ACCESS in line:  # nine of ten lines of a large log
        return None
    if " batch" in line and (record := _batch(line)):
        return record
    if "etract" in line and _RETRACTED.search(line) and "#running-req" not in line:
        return Retraction(_count(_GAINED, line))
    if "max_total_num_tokens=" in line and "server_args=" not in line:
        return _ready(line)
    if "max_running_requests " in line and (capped := _RUNNING_CAPPED.search(line)):
        return RunningCapped(*(int(count) if count else None for count in capped.groups()))
    return _rare(line) if any(word in line for word in _RARE) else None


def step_in(line: str) -> str:
    """Return the step of a starting server that a line announces; empty without one."""
    step = next((step for step, signs in _STEPS.items() if signs.search(line)), "")
    count = _OF_ALL.search(line)
    return f"{step}, {count[1]} of {count[2]}" if step and count else step


def origin_of(line: str) -> Origin:
    """Return the origin of a line, as far as its first words name it."""
    match = _ORIGIN.match(line)
    if match is None:
        return Origin(None, "", "", "")
    server, time, rank = match["server"] or match["unit"] or "", match["time"], match["rank"].strip()
    dp = next((part[2:] for part in rank.split() if part.startswith("DP")), "") if rank else ""
    return Origin(_seconds(time) if time else None, server.strip(" :|[]"), dp, rank)


def clean(line: str) -> str:
    """Return a line without colours, and without a progress bar before it."""
    if "\x1b" in line:
        line = _COLOUR.sub("", line)
    return line.rstrip().rpartition("\r")[2]


def _batch(line: str) -> LoggedBatch | None:
    """Read a batch line; None for any other line, or one that is truncated before its queue."""
    start = line.find("Decode batch")
    decode = start >= 0
    start = start if decode else line.find("Prefill batch")
    running, queue = _RUNNING.search(line, start), _QUEUE.search(line, start)
    if start < 0 or not running or not queue:
        return None
    usages = _USAGE.findall(line, start)
    tokens, rate = _TOKENS.search(line, start), _RATE.search(line, start)
    accepted = _ACCEPTED.search(line, start)
    batch = LoggedBatch(
        decode,
        int(running[1]),
        int(queue[1]),
        float(usages[0] if len(usages) == 1 else max(map(float, usages), default=0.0)),
        int(tokens[1]) if tokens else None,
        None if "cuda graph: " not in line else "cuda graph: True" in line,
        float(rate[1]) if rate else None,
        *(() if decode else (_count(pattern, line) for pattern in _PREFILLED)),
    )
    if states := "mamba usage" in line and _STATE_USAGE.search(line, start):
        batch = batch._replace(state_usage=float(states[1]))
    return batch._replace(accepted=float(accepted[1])) if accepted else batch


def _count(pattern: re.Pattern[str], line: str) -> int:
    match = pattern.search(line)
    return int(match[1]) if match else 0


def _ready(line: str) -> ServerReady | None:
    limits: dict[str, Any] = {name: int(value) for name, value in _READY.findall(line)}
    free_gb = {device: float(gb) for device, gb in _FREE_GB.findall(line)}
    return ServerReady(**limits, gpu_gb=free_gb.get("gpu"), cpu_gb=free_gb.get("cpu"))


def _rare(line: str) -> Record | None:
    if failure := _failure(line):
        return failure
    if weights := _WEIGHTS.search(line):
        used = _USED.search(line)
        free = float(weights[3]) if weights[1] == "begin" else None
        return WeightsLoaded(free, float(used[1]) if used else None, weights[2], _quantised(line))
    if pool := _STATES_ALLOCATED.search(line):
        return PoolAllocated(float(pool[2]) + float(pool[3]), slots=int(pool[1]))
    if pool := _KV_ALLOCATED.search(line):
        return PoolAllocated(float(pool[1]) + float(pool[2] or 0))
    if "server_args=" in line:
        return _arguments(line.partition("server_args=")[2].strip())
    return next((PhaseBegins(phase) for phase, signs in _PHASES.items() if signs.search(line)), None)


def _failure(line: str) -> OutOfMemory | Died | Raised | None:
    if _KILLED.search(line):
        return Died(killed=True, text=line.strip())
    raised = _RAISED.match(line)
    if (raised or any(sign in line for sign in _WITHOUT_ERROR)) and (record := _out_of_memory(line)):
        return record
    if _CRASHED.search(line):
        return Died(killed=False, text=line.strip())
    return Raised(raised["error"]) if raised else None


def _out_of_memory(line: str) -> OutOfMemory | None:
    phase = next((phase for phase, signs in _OUT_OF_MEMORY.items() if signs.search(line)), None)
    if phase is None:
        return None
    return OutOfMemory("graph" if "graph failed: " in line else phase, line.strip())


def _quantised(line: str) -> str | None:
    """Read `quant=fp8`. Older releases log `dtype=` instead, for quantised weights too: then None."""
    match = _QUANTISED.search(line)
    if match:
        return match[1]
    is_unquantised = "type=" in line and "dtype=" not in line
    return "" if is_unquantised else None


def _arguments(text: str) -> Arguments:
    """Read a dict (SGLang ≥ 0.5.2x) or `ServerArgs(name=value, …)`; if it is cut off, read what is there."""
    if isinstance(values := _literal(text), dict):
        return Arguments({str(name): value for name, value in values.items()})
    text = re.sub(r"'(\w+)': ", r"\1=", text)
    return Arguments({name: _literal(value) for name, value in _ARGUMENT.findall(text)})


def _literal(text: str) -> Any:
    """Read a literal, or the `repr` of a dataclass, possibly nested, as a dict."""
    try:
        return _value(ast.parse(text, mode="eval").body)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return text


def _value(shown: ast.expr) -> Any:
    if isinstance(shown, ast.Call):
        return {field.arg: _value(field.value) for field in shown.keywords}
    return ast.literal_eval(shown)


@lru_cache(maxsize=64)  # lines of one second stand together
def _seconds(time: str) -> float | None:
    """Return a time stamp in seconds; None for a damaged one."""
    try:
        return datetime.fromisoformat(time).replace(tzinfo=UTC).timestamp()
    except ValueError:
        return None
