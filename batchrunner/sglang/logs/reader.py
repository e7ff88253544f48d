"""Reads whole logs of SGLang into load samples and facts about the server, in bounded memory."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Self

from batchrunner.core.errors import InputError
from batchrunner.sglang.flags import STATE_RATIO, StatePool, attention_ranks, number, slots_per_request
from batchrunner.sglang.logs.lines import (
    STEPS_A_LINE,
    Arguments,
    Died,
    LoggedBatch,
    OutOfMemory,
    Phase,
    PhaseBegins,
    PoolAllocated,
    Raised,
    Record,
    Retraction,
    RunningCapped,
    ServerReady,
    SGLangRecord,
    WeightsLoaded,
    clean,
    origin_of,
    record_in,
)
from batchrunner.sglang.logs.series import LoadSample, Prefills, Series
from batchrunner.sglang.model_files import has_experts, has_latent_attention, has_sparse_attention

Architecture = Literal["hopper", "blackwell", "ada", "ampere"]
"""Generation of an NVIDIA GPU."""
_CARDS: dict[Architecture, str] = {
    "hopper": "H100 H200 H800 H20 GH200",
    "blackwell": "B200 B300 GB200 GB300 B100",
    "ada": "L40S L40 L20 L4 4090 RTX_6000_ADA",
    "ampere": "A100 A800 A10G A10 A30 A40 A6000 3090",
}
"""Words in the names of GPUs, by generation."""
FP8: frozenset[Architecture] = frozenset({"hopper", "blackwell", "ada"})
"""Generations of NVIDIA GPUs that compute in 8-bit floats: compute capability 8.9 and higher."""
_KV_OF_16_BITS = (None, "auto", "bf16", "bfloat16")
"""Values of `--kv-cache-dtype` with which the KV pool holds 16-bit numbers."""
KNOWN_CARDS = " ".join(_CARDS.values()).replace(" ", ", ")
"""Names of the known GPUs, for messages."""
_MOE = re.compile(
    "Moe|MoE|Mixtral|Deepseek|GptOss|Kimi|MiniMax|Grok|Dbrx|Llama4|Qwen3Next|LongcatFlash|MiMoV2|Step3VL|Step3p5"
    "|MistralLarge3|Glm5Next|HYV3|HYV4"
)
"""Matches class names of mixture-of-experts models in SGLang 0.5.23, for models without a local
config.json."""
_MLA = re.compile(
    "DeepseekV2|DeepseekV3|Kimi|LongcatFlash|MistralLarge3|GlmMoeDsa|Glm5Next|Glm4MoeLite|SarvamMLA|MiniCPM3"
)
"""Matches class names of models with multi-head latent attention (MLA), for models without a local
config.json."""
_SPARSE = re.compile("DeepseekV32|GlmMoeDsa|Glm5Next")
"""Matches class names of models with sparse attention (DSA), for models without a local config.json."""


@dataclass(slots=True)
class Facts:
    """What is known about a server from its log or its replies. Unknown facts are None or empty."""

    version: str | None = None
    arguments: dict[str, Any] = field(default_factory=dict)
    """Server arguments by SGLang's own names, with underscores."""
    ready: ServerReady | None = None
    troubles: dict[Phase, OutOfMemory] = field(default_factory=dict)
    """Last out-of-memory record of each phase."""
    last_trouble: OutOfMemory | None = None
    """Last out-of-memory record since the last batch line. Earlier ones do not count, because the batch line
    shows that the server survived them."""
    died: Died | None = None
    """Log line that best explains why the server died: a SIGKILL, an exception or a crash."""
    card: str | None = None
    """Name of the GPU."""
    card_gb: float | None = None
    """Memory of one GPU in GB."""
    weights_gb: float | None = None
    """Memory in GB that the weights take on one rank."""
    quantised: str | None = None
    """Quantisation of the checkpoint; empty if it has none, None if unknown."""
    model: str | None = None
    """Class of the model, such as LlamaForCausalLM."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """The model's config.json (see `read_config`); empty if the file is not on this machine."""
    metrics: bool | None = None
    """Whether a live server answers at `/metrics`; None for a log."""
    mute: bool = False
    """Whether the server answers but does not report its load."""
    idle_gpus: int = 0
    """Number of GPUs that the server could see but did not use."""
    states: StatePool | None = None
    """State pool of a hybrid model; None for any other model."""

    def number(self, name: str) -> float | None:
        """Return the value of an argument if it is a number, else None."""
        return number(self.arguments.get(name))

    @property
    def sizes_states(self) -> bool:
        """Whether arguments set the number of slots for recurrent states (Mamba and such).

        If not, the state pool gets a fraction of the memory.
        """
        return bool(self.number("max_mamba_cache_size")) or self.states_follow_running

    @property
    def states_follow_running(self) -> bool:
        """Whether `max_running_requests` sets the number of state slots.

        Without a prefix cache, each running request has one slot.
        """
        names = ("disable_radix_cache", "max_running_requests")
        return all(map(self.arguments.get, names)) and not self.number("max_mamba_cache_size")

    @property
    def state_share(self) -> float | None:
        """Fraction of the memory of state pool and KV pool together that the state pool takes.

        Without sizes in the log, it is computed from `mamba_full_memory_ratio`. None if unknown.
        """
        pool = self.states
        if pool is None:
            return None
        if pool.gb and pool.kv_gb:
            return pool.gb / (pool.gb + pool.kv_gb)
        if self.sizes_states:
            # The number of slots is fixed, so the ratio has no effect.
            return None
        ratio = self.number("mamba_full_memory_ratio") or STATE_RATIO
        return ratio / (1 + ratio)

    @property
    def tp(self) -> int:
        """Number of GPUs over which tensor parallelism splits the weights of one replica."""
        return int(self.number("tp_size") or 1)

    @property
    def gpus(self) -> int:
        """Number of GPUs that the server uses."""
        replicas = 1 if self.attn_dp > 1 else self.number("dp_size") or 1
        return int(self.tp * (self.number("pp_size") or 1) * replicas)

    @property
    def in_16_bits(self) -> bool:
        """Whether the weights are known to be unquantised."""
        return self.quantised == "" and not self.arguments.get("quantization")

    @property
    def kv_in_16_bits(self) -> bool:
        """Whether the KV pool is known to hold 16-bit numbers."""
        return bool(self.arguments) and self.arguments.get("kv_cache_dtype") in _KV_OF_16_BITS

    @property
    def attn_dp(self) -> int:
        """Number of ranks among which DP attention divides a replica's requests; 1 without DP attention."""
        return attention_ranks(self.arguments)

    @property
    def max_running(self) -> int | None:
        """Maximum number of running requests of one scheduler, `max_running_requests`; None if unknown."""
        limit = self.ready.max_running_requests if self.ready else None
        return limit or int(self.number("max_running_requests") or 0) // self.attn_dp or None

    @property
    def steps_a_line(self) -> int:
        """Number of decode steps between two lines of the log, `--decode-log-interval`."""
        return max(0, int(self.number("decode_log_interval") or 0)) or STEPS_A_LINE

    @property
    def chunk(self) -> int | None:
        """Number of tokens in a prefill chunk of one scheduler, `chunked_prefill_size`."""
        size = self.ready.chunked_prefill_size if self.ready else None
        return size or int(self.number("chunked_prefill_size") or 0) or None

    @property
    def architecture(self) -> Architecture | None:
        """Generation of the GPU; None if its name is unknown."""
        return architecture_of(self.card or "")

    @property
    def on_cpu(self) -> bool:
        """Whether the server computes on a CPU."""
        return self.arguments.get("device") == "cpu"

    @property
    def is_moe(self) -> bool:
        """Whether the model is a mixture of experts.

        Read from config.json if that is known, else from the name of the model's class.
        """
        return has_experts(self.config) if self.config else self._class_has(_MOE)

    @property
    def is_mla(self) -> bool:
        """Whether the model has multi-head latent attention (MLA).

        Read from config.json if that is known, else from the name of the model's class.
        """
        return has_latent_attention(self.config) if self.config else self._class_has(_MLA)

    @property
    def is_sparse(self) -> bool:
        """Whether the model has sparse attention (DSA), in which an indexer selects the tokens.

        Read from config.json if that is known, else from the name of the model's class.
        """
        return has_sparse_attention(self.config) if self.config else self._class_has(_SPARSE)

    def _class_has(self, pattern: re.Pattern[str]) -> bool:
        return pattern.search(self.model or "") is not None

    @property
    def graph_disabled(self) -> bool:
        """Whether the arguments switch CUDA graphs off for decoding."""
        arguments = self.arguments
        backend = _phase(arguments, "decode").get("backend") or arguments.get("cuda_graph_backend_decode")
        return backend == "disabled" or bool(arguments.get("disable_cuda_graph"))

    @property
    def graph_max_bs(self) -> int | None:
        """The largest batch for which a CUDA graph was captured."""
        config = _phase(self.arguments, "decode").get("max_bs")
        names = ("cuda_graph_max_bs_decode", "cuda_graph_max_bs")
        largest = number(config or next(filter(None, map(self.arguments.get, names)), None))
        return int(largest) if largest else None


def architecture_of(card: str) -> Architecture | None:
    """Return the generation of a GPU from the words of its name; None for an unknown GPU."""
    # An underscore around each word makes sure that only whole words match: H20 is not found in H200.
    words = f"_{re.sub('[^A-Z0-9]+', '_', card.upper())}_"
    for generation, names in _CARDS.items():
        if any(f"_{name}_" in words for name in names.split()):
            return generation
    return None


def _phase(arguments: Mapping[str, Any], phase: str) -> Mapping[str, Any]:
    config = arguments.get("cuda_graph_config")
    settings = config.get(phase) if isinstance(config, dict) else None
    return settings if isinstance(settings, dict) else {}


def prefill_graph_off(arguments: Mapping[str, Any]) -> bool:
    """Tell whether the arguments switch CUDA graphs off for prefill passes."""
    backend = _phase(arguments, "prefill").get("backend") or arguments.get("cuda_graph_backend_prefill")
    return backend == "disabled" or arguments.get("enable_piecewise_cuda_graph") is False


LONGEST_LINE = 1 << 18
"""Maximum number of characters read as one line. Lines of SGLang are shorter."""
_TUNED = (
    "schedule_conservativeness", "mem_fraction_static", "max_running_requests", "chunked_prefill_size",
    "max_total_tokens", "model_path", "tp_size", "attention_backend", "kv_cache_dtype", "quantization",
    "max_prefill_tokens", "prefill_max_requests", "prefill_decode_interval", "enable_mixed_chunk",
    "page_size", "disable_radix_cache", "schedule_policy", "max_mamba_cache_size",
    "mamba_full_memory_ratio", "mamba_radix_cache_strategy", "mamba_ssm_dtype",
)  # fmt: skip
"""Arguments that change the load. If a restart changes one of them, earlier load samples are dropped."""
_FORWARD = {"prefill", "decode"}
"""Phases of forward passes. CUDA graph capture calls the same functions, so they may also be in its
tracebacks."""
_TRACEBACK = "Traceback (most recent call last):"


class LogReader:
    """Reads logs line by line, into one series of load samples and one set of facts."""

    def __init__(self) -> None:
        self.series = Series()
        self.facts = Facts()
        self.records = 0
        """Number of lines so far that only SGLang writes."""
        self.source = ""
        """Prefix of the schedulers' names, which differs from log to log, so that their schedulers stay
        apart."""
        self._speakers: dict[str, str] = {}
        """The rank of each scheduler whose lines count. With tensor parallelism, all ranks may log the same
        load."""
        self._phase: Phase = "general"
        """Phase of the server at the last line."""
        self._running = 0
        """Number of running requests in the last batch line."""
        self._memory_caps_running = False
        """Whether memory allows fewer running requests than the flags ask for, as logged since the last
        start."""
        self._old_death: Died | None = None
        """The death before the last restart. `facts` keeps it until the restarted server logs a batch."""

    def read(self, path: Path) -> Self:
        """Read a log to its end. Raises InputError for a file that cannot be read or is not an SGLang log."""
        # Arguments and failures of this log are read into empty facts. Afterwards `_add` copies those that
        # only earlier logs have.
        earlier = self.facts
        # This log has no restart yet, so it has no death before a restart.
        self._old_death = None
        self.facts = replace(earlier, arguments={}, troubles={}, last_trouble=None, died=None)
        try:
            # Invalid bytes are replaced, because all lines that matter are ASCII.
            with path.open(encoding="utf-8", errors="replace") as log:
                while line := log.readline(LONGEST_LINE):
                    self.take(line)
        except OSError as failure:
            raise InputError(f"{path}: cannot be read: {failure.strerror or failure}") from None
        finally:
            self._add(earlier)
        if not self.records:
            raise InputError(
                f"{path}: not an SGLang log: it has no line that SGLang writes, such as "
                "`Decode batch, #running-req: …` or `server_args=…`"
            )
        self.series.settle()
        return self

    def _add(self, earlier: Facts) -> None:
        """Copy the arguments and failures of `earlier` logs that this log lacks."""
        facts = self.facts
        facts.arguments = facts.arguments or earlier.arguments
        facts.troubles = earlier.troubles | facts.troubles
        if facts.died is None:
            facts.died, facts.last_trouble = earlier.died, earlier.last_trouble

    def take(self, line: str) -> None:
        """Read one line of a log."""
        line = clean(line)
        record = record_in(line)
        if record is not None:
            # The number of lines that only SGLang writes shows whether this is a log of SGLang.
            self.records += isinstance(record, SGLangRecord)
            self._take(record, line)

    def _take(self, record: Record, line: str) -> None:
        """Add the record of a log line to the load samples (`series`) or to the server's `facts`."""
        match record:
            case LoggedBatch():
                self._batch(record, line)
            case Retraction():
                scheduler, _ = self._speaker(line)
                if scheduler is not None:
                    self.series.retractions += 1
                    self.series.prefills.retracted_tokens += record.tokens
            case Arguments():
                self._started(record)
            case RunningCapped() | PoolAllocated():
                self._pool(record)
            case ServerReady():
                # An earlier line of this start has told whether memory limits the running requests.
                self.facts.ready = record._replace(memory_caps_running=self._memory_caps_running)
                self._phase = "general"
            case WeightsLoaded():
                self._weights(record)
            # While CUDA graphs are captured, a traceback names functions of forward passes too.
            case PhaseBegins(phase) if self._phase != "graph" or phase not in _FORWARD:
                self._phase = phase
            case OutOfMemory() | Died() | Raised():
                self._failed(record)

    def _pool(self, record: RunningCapped | PoolAllocated) -> None:
        """Record a line about the state pool or the KV pool in `facts.states`, if the model is hybrid."""
        # 0 slots means that no line has named the number yet.
        pool = self.facts.states or StatePool(0, slots_per_request(self.facts.arguments))
        if isinstance(record, RunningCapped):
            self._memory_caps_running = True
            # The record has no slots if the KV pool is the cause.
            if record.slots and record.per_request:
                self.facts.states = pool._replace(slots=record.slots, per_request=record.per_request)
            return
        # The allocation of this pool, which was a phase of its own, has ended.
        self._phase = "general"
        if record.slots is not None:
            self.facts.states = pool._replace(slots=record.slots, gb=record.gb)
        # The model is hybrid, because it has state slots. Only the first KV pool counts, because that of a
        # draft model may follow.
        elif pool.slots and pool.kv_gb is None:
            self.facts.states = pool._replace(kv_gb=record.gb)

    def _batch(self, batch: LoggedBatch, line: str) -> None:
        """Add the load in a `Decode batch` or `Prefill batch` line to the series.

        A scheduler may consist of several ranks, of which only one counts (see `_speaker`).
        """
        scheduler, at = self._speaker(line)
        if scheduler is None:
            return
        self._phase, self._running = "decode" if batch.decode else "prefill", batch.running
        # If the last death was before a restart, this batch shows that the restarted server works. Otherwise
        # it shows nothing, because other ranks go on for seconds after the death of one.
        if self.facts.died is self._old_death:
            self.facts.died = self._old_death = self.facts.last_trouble = None
        if not batch.decode:
            self.series.prefills.add(batch, self.facts.chunk or 0)
            return
        states = self.facts.states
        # The line may lack the usage of the state pool. The fraction that the running requests take is its
        # minimum.
        usage_by_requests = batch.running / states.most_running if states else 0.0
        sample = LoadSample(
            at=at,
            running=batch.running,
            queue=batch.queue,
            usage=batch.usage,
            max_running=self.facts.max_running,
            graph=batch.graph,
            rate=batch.throughput,
            state_usage=max(batch.state_usage, usage_by_requests),
        )
        self.series.add(scheduler, sample)

    def _speaker(self, line: str) -> tuple[str | None, float | None]:
        """Return the scheduler and the time of a line; the scheduler is None if the line does not count.

        All ranks of a scheduler log the same load, so only the lines of one rank count.
        """
        origin = origin_of(line)
        scheduler = f"{self.source} {origin.server} {origin.dp}"
        # The rank that logs the first line of a scheduler is the one whose lines count.
        is_first_rank = self._speakers.setdefault(scheduler, origin.rank) == origin.rank
        return scheduler if is_first_rank else None, origin.at

    def _started(self, record: Arguments) -> None:
        """Prepare the facts for a new start of the server, whose log lines follow.

        If an argument that changes the load is different, the samples and all facts except the GPU are
        dropped, because they belong to another configuration.
        """
        previous = self.facts.arguments
        if previous and any(previous.get(name) != record.values.get(name) for name in _TUNED):
            self._forget()
            self.facts = Facts(card=self.facts.card)
        self._old_death = self.facts.died
        self._memory_caps_running = False
        self.facts.states = None
        # A restart may change the names of the ranks.
        self._speakers.clear()
        self.facts.arguments = record.values
        self._phase = "load"

    def _forget(self) -> None:
        """Drop the samples of this log.

        The sums over prefill passes cover all logs, so they are dropped only when no log has samples left.
        """
        series = self.series
        tracks = series.tracks.items()
        series.tracks = {name: track for name, track in tracks if not name.startswith(f"{self.source} ")}
        if not series.tracks:
            series.prefills, series.retractions = Prefills(), 0

    def _weights(self, record: WeightsLoaded) -> None:
        """Store the size of the loaded weights and the memory of the GPU in the facts."""
        facts = self.facts
        # The line at the beginning of the loading has the free memory, the line at its end the used memory.
        self._phase = "load" if record.free_gb is not None else "general"
        if record.free_gb is not None and facts.card_gb is None:
            # Before the first weights are loaded, nearly all memory of the GPU is free.
            facts.card_gb = record.free_gb
        # The weights of a draft model are logged too. The larger weights are those of the main model.
        if record.used_gb is not None and record.used_gb > (facts.weights_gb or 0):
            facts.weights_gb, facts.model = record.used_gb, record.model
            facts.quantised = record.quantised

    def _failed(self, record: OutOfMemory | Died | Raised) -> None:
        """Keep each out-of-memory record, and the record that best explains the death of the server.

        The best explanation is a SIGKILL, else the first death. If the line of that death only announces a
        traceback, the exception in the next record takes its place.
        """
        # A death before the last restart is replaced by the first failure after it.
        death = None if self.facts.died is self._old_death else self.facts.died
        if isinstance(record, OutOfMemory):
            # If the line does not show the phase, the lines before it do.
            phase = self._phase if record.phase == "general" else record.phase
            trouble = record._replace(phase=phase, running=self._running)
            self.facts.last_trouble = trouble
            self.facts.troubles = {**self.facts.troubles, phase: trouble}
        elif isinstance(record, Died) and (death is None or (record.killed and not death.killed)):
            self.facts.died = record
        elif death is not None and death.text.endswith(_TRACEBACK):
            # The line of the death only announces a traceback, whose last line names the exception.
            self.facts.died = death._replace(text=record.text)
