"""Parses single lines of an SGLang log (0.5.16 or newer) into records, without I/O.

SGLang's `Decode batch` and `Prefill batch` lines consist of `name: value` pairs. The pairs and their order
change with nearly every release, so each pair is found by its name and never by its position.
"""

import ast
import re
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any, Literal, NamedTuple, TypeAlias

STEPS_A_LINE = 40
"""Number of decode steps between two lines of the log: SGLang's default of `--decode-log-interval`."""
Phase = Literal["load", "pool", "states", "graph", "prefill", "decode", "general"]
"""Phase of a server in which memory may run out: loading the weights, allocating the KV pool or the state
pool, capturing CUDA graphs, prefill, decode, or any other."""


class LoggedBatch(NamedTuple):
    """The load of one scheduler, logged at each prefill pass and every 40 decode steps."""

    decode: bool
    """Whether the line is about decode passes; if not, it is about a prefill pass."""
    running: int
    """Number of running requests, `#running-req`."""
    queue: int
    """Number of queued requests, `#queue-req`."""
    usage: float
    """Fraction of the KV pool in use, `token usage`. With sliding windows, there are two pools, and the
    fuller one counts."""
    tokens: int | None = None
    """Number of tokens in the KV pool, `#token`."""
    graph: bool | None = None
    """Whether a CUDA graph ran; None if the line does not say so, as on a CPU."""
    throughput: float | None = None
    """Tokens per second: generated tokens in a decode line, prompt tokens in a prefill line."""
    new_seqs: int = 0
    """Number of requests in a prefill pass."""
    new_tokens: int = 0
    """Number of prompt tokens that a prefill pass computes."""
    cached_tokens: int = 0
    """Number of prompt tokens that hit the prefix cache."""
    accepted: float = 1.0
    """Mean number of tokens that a decode step yields per request, `accept len`; above 1 with speculation."""
    state_usage: float = 0.0
    """Fraction of the state pool in use, `mamba usage`; 0 for a model without states."""


class Retraction(NamedTuple):
    """The KV pool was full, so running requests went back to the queue."""

    tokens: int
    """Number of tokens that were freed and must be computed again; 0 if the release does not log it."""


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
    """Memory allows fewer running requests than the flags ask for.

    The fields are known if the state pool of a hybrid model is the cause, and None if the KV pool is.
    """

    slots: int | None = None
    """Number of state slots in the pool, `max_mamba_cache_size`."""
    per_request: int | None = None
    """Number of state slots that a running request takes."""


class PoolAllocated(NamedTuple):
    """Memory was allocated for the KV pool, or for the state pool of a hybrid model."""

    gb: float
    """Memory in GB that the KV pool or state pool takes."""
    slots: int | None = None
    """Number of state slots; None for a KV pool."""


class WeightsLoaded(NamedTuple):
    """The loading of the weights begins (`free_gb` is known) or ends (`used_gb` and `model` are known)."""

    free_gb: float | None
    """Free memory of the device in GB before the weights are loaded."""
    used_gb: float | None = None
    """Memory in GB that the weights take."""
    model: str | None = None
    """Class of the model, such as LlamaForCausalLM."""
    quantised: str | None = None
    """Quantisation of the checkpoint; empty if it has none, None if the release does not log it."""


class OutOfMemory(NamedTuple):
    """Memory ran out, which ends a server."""

    phase: Phase
    """Phase in which memory ran out; `general` if the line does not name it."""
    text: str
    """The log line."""
    running: int = 0
    """Number of requests that ran just before, from earlier lines. LogReader sets it."""


class Died(NamedTuple):
    """A process of the server ended unexpectedly."""

    killed: bool
    """Whether SIGKILL ended the process. It comes from the kernel when memory runs out, or from `kill -9`."""
    text: str
    """The log line."""


class Raised(NamedTuple):
    """Last line of a traceback: an exception. Only other lines show whether a process died of it."""

    text: str
    """The name of the exception and its message."""


class PhaseBegins(NamedTuple):
    """A progress line or a traceback shows that the server is in `phase`."""

    phase: Phase


class Arguments(NamedTuple):
    """The server's resolved arguments, which it logs at its start."""

    values: dict[str, Any]
    """Values of the arguments, by SGLang's own names with underscores."""


SGLangRecord: TypeAlias = (
    LoggedBatch | Retraction | RunningCapped | PoolAllocated | ServerReady | WeightsLoaded | Arguments
)
"""Records of lines that only SGLang writes."""
Record: TypeAlias = SGLangRecord | OutOfMemory | Died | Raised | PhaseBegins
"""Records of all lines. Those that are not in SGLangRecord may also come from other programs."""


class Origin(NamedTuple):
    """The time of a line, and the server and the process that wrote the line."""

    at: float | None
    """Time of the line in seconds; None if it has no valid time. Only differences have a meaning, because the
    time zone is unknown."""
    server: str
    """Label that `srun --label`, Docker, Kubernetes or journalctl put before the line; empty if there is
    none."""
    dp: str
    """Number of the DP rank; empty if the line names none."""
    rank: str
    """All ranks of the process, such as `DP0 TP0`; empty if the line names none."""


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
"""Patterns for numbers of at most 15 digits. Longer numbers come from damaged lines, which are ignored."""
_RUNNING, _QUEUE, _TOKENS = (
    re.compile(rf"#{name}: *{_COUNT}") for name in ("running-req", "queue-req", "token")
)
_NEW_SEQS, _NEW_TOKENS, _CACHED_TOKENS = (
    re.compile(rf"#{name}: *{_COUNT}") for name in ("new-seq", "new-token", "cached-token")
)
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
    rf"Mamba Cache is allocated\. max_mamba_cache_size: {_COUNT}, conv_state size: "
)
_STATES_GB = re.compile(rf"_(?:state|cache) size: {_NUMBER} ?GB")
"""Matches the sizes of all parts of a state pool. With speculative decoding, the states of drafted tokens are
parts of it (`intermediate_ssm_state_cache size`)."""
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
    # Some releases log 9, the raw status of waitpid, instead of the exit code -9.
    r"exit ?code[:=]? ?-9\b|unexpectedly failed with (?:an )?exit ?code[ =]9\b|"
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
"""Texts in lines about a lack of memory that do not begin with an error's name."""
_ACCESS = ' HTTP/1.1" '
"""Text in each line in which uvicorn logs a request."""
_REQUESTS = ("Receive: obj=", "Finish: obj=", '"request.received"', '"request.finished"')
"""Texts in the lines of `--log-requests`. Such lines quote prompts and answers, which could be mistaken for
messages of SGLang."""
_PHASES: dict[Phase, re.Pattern[str]] = {
    # The second of the two function names is that of SGLang 0.5.23.
    "prefill": re.compile("in forward_extend|in _execute_extend"),
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
"""Steps of a starting server, by the lines that announce them (SGLang 0.5.23)."""
_OF_ALL = re.compile(r"\| *(\d+)/(\d+) \[")
"""Matches the count in a progress bar, such as `| 3/8 [`."""
_RARE = (
    "mem", "forward_", "_execute_", "raph", "server_args=", "Mamba Cache", "KV Cache",
    "rror: ", "xception: ", "exit", "illed", "child failed",
)  # fmt: skip
"""A line is passed to `_rare` only if it has one of these words, so most lines are skipped quickly."""


def record_in(line: str) -> Record | None:
    """Return the record of a line; None for most lines, which have no record. Never raises."""
    record = _record(line)
    quotes_request = "obj" in line and any(sign in line for sign in _REQUESTS)
    return None if quotes_request else record


def _record(line: str) -> Record | None:
    """Parse a log line into a record. `record_in` rejects lines that only quote a request."""
    # A regular expression is tried only if a fixed word is in the line, because that test is fast.
    if _ACCESS in line:
        # uvicorn logs a line for each request: nine of ten lines in a large log.
        return None
    if " batch" in line and (record := _batch(line)):
        return record
    # "etract" finds both "Retract" and "retract". A line with "#running-req" is about a batch, even if
    # it is damaged, and no retraction.
    if "etract" in line and _RETRACTED.search(line) and "#running-req" not in line:
        return Retraction(_count(_GAINED, line))
    # A line with the server's arguments may name the same limits; `_rare` reads it.
    if "max_total_num_tokens=" in line and "server_args=" not in line:
        return _ready(line)
    if "max_running_requests " in line and (match := _RUNNING_CAPPED.search(line)):
        slots, per_request = (int(count) if count else None for count in match.groups())
        return RunningCapped(slots=slots, per_request=per_request)
    return _rare(line) if any(word in line for word in _RARE) else None


def step_in(line: str) -> str:
    """Return the step of a starting server that a line announces; empty if it announces none."""
    step = next((step for step, signs in _STEPS.items() if signs.search(line)), "")
    count = _OF_ALL.search(line)
    return f"{step}, {count[1]} of {count[2]}" if step and count else step


def origin_of(line: str) -> Origin:
    """Return the time, server and process that the beginning of a line names."""
    match = _ORIGIN.match(line)
    if match is None:
        return Origin(at=None, server="", dp="", rank="")
    server, time, ranks = match["server"] or match["unit"] or "", match["time"], match["rank"].strip()
    dp = next((rank.removeprefix("DP") for rank in ranks.split() if rank.startswith("DP")), "")
    return Origin(at=_seconds(time) if time else None, server=server.strip(" :|[]"), dp=dp, rank=ranks)


def clean(line: str) -> str:
    """Return a line without colours, and without a progress bar (text up to a carriage return)."""
    if "\x1b" in line:
        line = _COLOUR.sub("", line)
    return line.rstrip().rpartition("\r")[2]


def _batch(line: str) -> LoggedBatch | None:
    """Return the record of a `Decode batch` or `Prefill batch` line; None for any other line.

    Return None also for a line that is damaged before the end of `#queue-req`.
    """
    # The search begins at the message, because labels before it could contain the same names.
    start = line.find("Decode batch")
    is_decode = start >= 0
    if not is_decode:
        start = line.find("Prefill batch")
    running, queue = _RUNNING.search(line, start), _QUEUE.search(line, start)
    if start < 0 or not running or not queue:
        return None
    tokens, rate = _TOKENS.search(line, start), _RATE.search(line, start)
    accepted = _ACCEPTED.search(line, start)
    states = _STATE_USAGE.search(line, start) if "mamba usage" in line else None
    return LoggedBatch(
        decode=is_decode,
        running=int(running[1]),
        queue=int(queue[1]),
        # With sliding windows, the line has the usage of two pools.
        usage=max(map(float, _USAGE.findall(line, start)), default=0.0),
        tokens=int(tokens[1]) if tokens else None,
        graph=None if "cuda graph: " not in line else "cuda graph: True" in line,
        throughput=float(rate[1]) if rate else None,
        new_seqs=0 if is_decode else _count(_NEW_SEQS, line),
        new_tokens=0 if is_decode else _count(_NEW_TOKENS, line),
        cached_tokens=0 if is_decode else _count(_CACHED_TOKENS, line),
        accepted=float(accepted[1]) if accepted else 1.0,
        state_usage=float(states[1]) if states else 0.0,
    )


def _count(pattern: re.Pattern[str], line: str) -> int:
    """Return the number that a pattern finds in a line; 0 if it finds none."""
    match = pattern.search(line)
    return int(match[1]) if match else 0


def _ready(line: str) -> ServerReady:
    """Parse the line with a scheduler's limits, which is logged before the scheduler takes requests."""
    limits: dict[str, Any] = {name: int(value) for name, value in _READY.findall(line)}
    free_gb = {device: float(gb) for device, gb in _FREE_GB.findall(line)}
    return ServerReady(**limits, gpu_gb=free_gb.get("gpu"), cpu_gb=free_gb.get("cpu"))


def _rare(line: str) -> Record | None:
    """Return the record of a line from the start or the end of a server; None for any other line."""
    if failure := _failure(line):
        # Failures come first, because their lines may also match a pattern below.
        return failure
    if weights := _WEIGHTS.search(line):
        used = _USED.search(line)
        return WeightsLoaded(
            free_gb=float(weights[3]) if weights[1] == "begin" else None,
            used_gb=float(used[1]) if used else None,
            model=weights[2],
            quantised=_quantised(line),
        )
    if pool := _STATES_ALLOCATED.search(line):
        return PoolAllocated(gb=sum(map(float, _STATES_GB.findall(line))), slots=int(pool[1]))
    if pool := _KV_ALLOCATED.search(line):
        return PoolAllocated(gb=float(pool[1]) + float(pool[2] or 0))
    if "server_args=" in line:
        return _arguments(line.partition("server_args=")[2].strip())
    return next((PhaseBegins(phase) for phase, pattern in _PHASES.items() if pattern.search(line)), None)


def _failure(line: str) -> OutOfMemory | Died | Raised | None:
    """Return the record of a line about a failure; None for any other line."""
    if _KILLED.search(line):
        return Died(killed=True, text=line.strip())
    raised = _RAISED.match(line)
    # A line that only mentions memory, such as a hint, does not count.
    is_error = raised is not None or any(sign in line for sign in _WITHOUT_ERROR)
    if is_error and (record := _out_of_memory(line)):
        return record
    if _CRASHED.search(line):
        return Died(killed=False, text=line.strip())
    return Raised(raised["error"]) if raised else None


def _out_of_memory(line: str) -> OutOfMemory | None:
    """Return the record of a line that says that memory ran out; None for any other line."""
    phase = next((phase for phase, pattern in _OUT_OF_MEMORY.items() if pattern.search(line)), None)
    if phase is None:
        return None
    if "graph failed: " in line:
        # Whatever else the line says, memory ran out during the capture of CUDA graphs.
        phase = "graph"
    return OutOfMemory(phase, line.strip())


def _quantised(line: str) -> str | None:
    """Return the checkpoint's quantisation in a line, such as `fp8` for `quant=fp8`; empty if it has none.

    Return None for a line of an older release, which has `dtype=` and names no quantisation.
    """
    match = _QUANTISED.search(line)
    if match:
        return match[1]
    # Newer releases log the model's class as `type=`, and `quant=` only for a quantised checkpoint.
    is_unquantised = "type=" in line and "dtype=" not in line
    return "" if is_unquantised else None


def _arguments(text: str) -> Arguments:
    """Read a server's arguments: a dict in SGLang 0.5.20 or newer, else `ServerArgs(name=value, …)`.

    If the line is truncated, all arguments before its end are still read.
    """
    if isinstance(values := _literal(text), dict):
        return Arguments({str(name): value for name, value in values.items()})
    # A truncated dict cannot be parsed as a whole, so its items are rewritten as name=value.
    text = re.sub(r"'(\w+)': ", r"\1=", text)
    return Arguments({name: _literal(value) for name, value in _ARGUMENT.findall(text)})


def _literal(text: str) -> Any:
    """Return the value of a Python literal, or a dict for the `repr` of a dataclass; else the text itself."""
    try:
        return _value(ast.parse(text, mode="eval").body)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return text


def _value(expression: ast.expr) -> Any:
    """Return the value of a parsed literal, or a dict for a call with keyword arguments."""
    if isinstance(expression, ast.Call):
        return {keyword.arg: _value(keyword.value) for keyword in expression.keywords}
    return ast.literal_eval(expression)


# A cache helps, because consecutive lines often have the same time.
@lru_cache(maxsize=64)
def _seconds(time: str) -> float | None:
    """Return a time stamp in seconds, as if its time zone were UTC; None for a damaged time stamp."""
    try:
        return datetime.fromisoformat(time).replace(tzinfo=UTC).timestamp()
    except ValueError:
        return None
