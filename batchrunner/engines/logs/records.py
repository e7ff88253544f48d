"""Records of the lines of an SGLang log: one type for each kind of line that matters."""

from typing import Any, Literal, NamedTuple, TypeAlias

Phase = Literal["load", "pool", "graph", "prefill-graph", "prefill", "decode", "requests", "general"]


class LoggedBatch(NamedTuple):
    """The load of one scheduler, as it logs it at a prefill pass or every 40 decode steps."""

    decode: bool
    running: int
    """`#running-req`."""
    queue: int
    """`#queue-req`."""
    usage: float
    """Fraction of the KV pool in use, `token usage`; of a hybrid model's two pools the fuller one's."""
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
    """Prompt tokens that it finds in the prefix cache."""
    accepted: float = 1.0
    """Tokens of a request in a decode step, `accept len`; above 1 with speculation."""


class Retraction(NamedTuple):
    """Retractions: the KV pool was full, and running requests went back to the queue."""

    tokens: int
    """Tokens that they had in the pool, to be computed again; 0 in releases that do not say."""


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


class WeightsLoaded(NamedTuple):
    """Loading of the weights begins (`free_gb` is known) or ends (`used_gb` and `model` are)."""

    free_gb: float | None
    """Free memory of the device in GB."""
    used_gb: float | None = None
    """Memory that the weights take in GB."""
    model: str | None = None
    """The model's class, such as LlamaForCausalLM."""
    quantised: str | None = None
    """The checkpoint's quantisation, empty if it has none; None if the release does not say."""


class OutOfMemory(NamedTuple):
    """Memory ran out, which ends an engine; `phase` is `general` where the line does not say which."""

    phase: Phase
    text: str
    total_gb: float | None = None
    """Memory of the card in GB, where torch says it."""


class Died(NamedTuple):
    """A process of the server ended unexpectedly."""

    killed: bool
    """Whether SIGKILL ended it: the kernel sends that when memory runs out, a person with `kill -9`."""
    text: str


class Raised(NamedTuple):
    """The last line of a traceback; other lines say whether a process died of it."""

    text: str


class PhaseBegins(NamedTuple):
    """A progress line or a traceback shows what the server does from here on."""

    phase: Phase


class Arguments(NamedTuple):
    """The server's resolved arguments, which it logs at its start."""

    values: dict[str, Any]


class LoggedCard(NamedTuple):
    """The card's name, as SGLang's files of kernel settings have it."""

    name: str


SGLangRecord: TypeAlias = LoggedBatch | Retraction | ServerReady | WeightsLoaded | Arguments
"""A record of a line that only SGLang writes."""
Record: TypeAlias = SGLangRecord | OutOfMemory | Died | Raised | PhaseBegins | LoggedCard
