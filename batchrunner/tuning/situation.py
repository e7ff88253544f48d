"""What advice is based on: a server's load and setup and, for a run, the runner's activity."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

from batchrunner.core.media import KIND_OF_FIELD
from batchrunner.sglang.logs.lines import ServerReady
from batchrunner.sglang.logs.reader import Facts
from batchrunner.sglang.logs.series import Series
from batchrunner.sglang.model_files import kv_bytes
from batchrunner.tuning.flags import Server, in_effect
from batchrunner.tuning.signals import (
    GUIDES,
    admits_too_few,
    frequent,
    has_enough,
    retracts_often,
    share,
    span_in_words,
)

Certainty = Literal["high", "medium", "low"]

RESERVED = 0.8
"""If at least this fraction of the KV pool is reserved for outputs, the pool counts as the limit even if it
is not full."""
POOL_SHARE = 4
"""A KV pool on a CPU may grow by at most the machine's free memory, divided by this number."""
FLOAT32_BYTES = 4
"""Maximum number of bytes of a number in a CPU's KV pool (float32)."""
FEW_PROMPTS = 50
"""Minimum number of prompts for which the share of cached tokens is meaningful."""
LONGEST_LINE = 160
"""Maximum number of characters of a log line that advice shows."""


@dataclass(slots=True)
class ClientActivity:
    """The runner's settings, and what it did while the engine's queue was empty."""

    empty: int = 0
    """Number of load samples with an empty queue while rows were still unsent."""
    at_window: int = 0
    """Number of those samples (`empty`) in which the concurrency limit was reached to at least 90 %."""
    on_way: int = 0
    """Number of those samples (`at_window`) in which most requests were still on their way to the scheduler.
    """
    resting: int = 0
    """Number of samples with an empty queue (`empty`) in which more rows could be sent, but waited for a
    retry."""
    window: str | int = "auto"
    """The job's field `window`: the concurrency limit in requests, or "auto"."""
    connections: int | None = None
    """Maximum number of connections that the limit of open files allows."""
    widest: int = 0
    """Largest number of requests that were in flight at once."""
    tokenize: str | None = None
    """The side that tokenizes prompts: `client` or `server`; None if unknown."""
    max_new_tokens: int | None = None
    """The job's `max_new_tokens`; None if it comes from a column or is not set."""
    ignore_eos: bool = False
    """Whether every output has exactly `max_new_tokens` tokens."""
    output_tokens: int = 0
    """Number of tokens in the outputs whose lengths were read."""
    outputs: int = 0
    """Number of outputs whose lengths were read from the newest result files."""
    order: str = "auto"
    """The job's `order` of rows."""
    simulated: bool = False
    decodes: bool = True
    """Whether the job's task generates tokens. If not, token usage says nothing."""
    longest_output: int | None = None
    """99th percentile of the outputs' lengths, in tokens."""
    media: bool | None = None
    """Whether prompts have images, sounds or videos; None if unknown."""
    answers: int = 0
    """Number of answers on which n-gram speculation was replayed; 0 if it cannot gain anything."""
    repeated: float = 1.0
    """Mean number of tokens that a decode step would yield with n-gram speculation, by a replay of
    `answers`."""
    speculates_exactly: bool = False
    """Whether answers keep their distribution with speculation (`ngrams.is_exact`)."""
    possible_share: float | None = None
    """Fraction of the prompt tokens that the prefix cache could serve; None if unknown. It is estimated from
    a sample of the input rows, which the runner reads to choose their order."""

    @property
    def mean_output(self) -> float | None:
        """Mean number of tokens in an output; None if no output was read."""
        return self.output_tokens / self.outputs if self.outputs else None

    @property
    def output_share(self) -> float | None:
        """Mean output length as a fraction of `max_new_tokens`; None if either is unknown."""
        if not self.outputs or not self.max_new_tokens:
            return None
        return self.output_tokens / self.outputs / self.max_new_tokens


def has_media(prompt: Mapping[str, Any]) -> bool | None:
    """Tell whether prompts have images, sounds or videos; None if messages or a rollout may add some."""
    if any(prompt.get(field) for field in KIND_OF_FIELD):
        return True
    is_text = any(prompt.get(field) for field in ("user", "text", "input_ids"))
    return False if is_text and not prompt.get("rollout") else None


def sets_sampling(prompt: Mapping[str, Any]) -> bool:
    """Tell whether the job's section `sampling` applies to all requests; `prompt` is its section `prompt`.

    Lines of a batch file, and the requests of rollouts, have sampling parameters of their own.
    """
    has_template = any(prompt.get(name) for name in ("user", "messages", "text", "input_ids"))
    return has_template and not prompt.get("rollout")


@dataclass
class Situation:
    """A server and its load, as far as logs and polls have shown them."""

    load: Series
    """Load samples: queue, running requests and token usage over time."""
    log: Series
    """Load samples from the server's log, with CUDA graphs, prefill passes and retractions. May be the same
    as `load`."""
    facts: Facts = field(default_factory=Facts)
    """Facts about the server, from its log and its arguments."""
    client: ClientActivity | None = None
    """Activity of the runner; None if the server does not belong to a run."""
    raises_running: bool = True
    """Whether `--max-running-requests` may be raised. Flag tuning leaves the job's own flags as they are."""

    @property
    def is_judged(self) -> bool:
        """Whether advice is possible: a run needs a real engine (not simulated) and enough steady work."""
        return self.client is None or (has_enough(self.load) and not self.client.simulated)

    @property
    def decodes(self) -> bool:
        """Whether requests decode. Servers without a run are assumed to decode."""
        return self.client is None or self.client.decodes

    @cached_property
    def server(self) -> Server:
        """The server in the form that the table of flags takes, with its facts and the means of its load."""
        ready = self.facts.ready or ServerReady(max_running_requests=self.max_running)
        return Server(
            replace(self.facts, ready=ready),
            running=self.load.median("running"),
            usage=self.load.median("usage"),
            decodes=self.decodes,
            # The log has no output lengths, so the mean is the generated tokens per prompt.
            output_tokens=self.decoded / max(1, self.log.prefills.prompts),
            longest_output=self.client.longest_output if self.client else None,
            shared=self._shared,
            repeated=self.client.repeated if self.client else 1.0,
            speculates_exactly=self.client is not None and self.client.speculates_exactly,
            media=self.client.media if self.client else None,
            raises_running=self.raises_running,
            most_pool_tokens=self._most_pool_tokens,
        )

    @property
    def _shared(self) -> float | None:
        """Fraction of the prompt tokens that the prefix cache serves or could serve; None if unknown.

        The measured fraction counts only if there were enough prompts.
        """
        possible_share = self.client.possible_share if self.client else None
        prefills = self.log.prefills
        if prefills.prompts < FEW_PROMPTS:
            return possible_share
        return max(prefills.cached_share, possible_share or 0.0)

    @property
    def waits_for_states(self) -> bool:
        """Whether requests often wait for room in the state pool of a hybrid model."""
        return frequent(self.load, "states") or frequent(self.log, "states")

    @property
    def decode_steps(self) -> int:
        """Number of decode steps, estimated from the log, which has one line for several steps."""
        return self.log.counted * self.facts.steps_a_line

    @property
    def decoded(self) -> float:
        """Number of tokens that the decode steps generated, estimated from the median batch size."""
        return self.load.median("running") * self.decode_steps

    @property
    def _most_pool_tokens(self) -> float:
        """Largest KV pool worth trying on a CPU, in tokens.

        It is the present pool plus the tokens that fit into a quarter of the free memory. If the model is
        unknown, it is twice the present pool.
        """
        present = in_effect(self.facts, "max-total-tokens") or 0.0
        free_gb = self.facts.ready.cpu_gb if self.facts.ready else None
        free_tokens = pool_tokens(self.facts.config, (free_gb or 0.0) * (1 << 30))
        return 2 * present if free_tokens is None else present + free_tokens

    @property
    def max_running(self) -> int | None:
        """`max_running_requests` of one scheduler."""
        return self.facts.max_running or self.load.max_running or None

    @property
    def fills_up(self) -> bool:
        """Whether the KV pool is full again and again, maybe not all the time."""
        return share(self.load.samples, "full") >= GUIDES.peaks

    @property
    def reserved_share(self) -> float:
        """Fraction of the KV pool that SGLang reserves for outputs; 0 without `ignore_eos`, or if unknown."""
        pool_tokens = self.facts.ready.max_total_num_tokens if self.facts.ready else None
        if self.client is None or not self.client.ignore_eos or not pool_tokens:
            return 0.0
        # SGLang reserves one more page for each request that it admits.
        page = self.facts.number("page_size") or 1
        row_tokens = self.log.prefills.mean_prompt + (self.client.mean_output or 0.0) + page
        return self.load.median("running") * row_tokens / pool_tokens

    @property
    def short_of_pool(self) -> bool:
        """Whether requests wait for room in the KV pool rather than for `max_running_requests`."""
        return frequent(self.load, "kv_bound") or (
            self.reserved_share >= RESERVED and frequent(self.load, "conservative")
        )

    @property
    def retractions(self) -> int:
        """Number of retractions: the count in the log or in the load samples, whichever is larger."""
        return max(self.log.retractions, self.load.retractions)

    @property
    def retractions_per_min(self) -> float:
        """Mean number of retractions per minute of one scheduler's work."""
        return (self.log if self.log.retractions else self.load).retractions_per_min

    @property
    def retracts_often(self) -> bool:
        """Whether requests are retracted more often than SGLang's tuning guides call normal."""
        return has_enough(self.load) and retracts_often(self.retractions_per_min)

    @property
    def admits_too_few(self) -> bool:
        """Whether enough samples show that the server admits too few requests."""
        held = share(self.load.samples, "conservative")
        return has_enough(self.load) and admits_too_few(share_held=held, retracts=self.retracts_often)

    def often(self, sign: str) -> str:
        """Return a phrase with the share of the load samples that show a sign."""
        return f"in {share(self.load.samples, sign):.0%} of {span_in_words(self.load)}"

    def evidence(self, *signs: str) -> dict[str, Any]:
        """Return figures of the load, and the fraction of the samples that show each sign, for `--json`."""
        shares = {f"{sign}_share": round(share(self.load.samples, sign), 4) for sign in signs}
        return {
            "samples": self.load.counted,
            "span_s": round(self.load.busy_s, 1),
            **shares,
            "median_running": self.load.median("running"),
            "median_queue": self.load.median("queue"),
            "median_token_usage": self.load.median("usage"),
        }


def pool_tokens(config: Mapping[str, Any], free_bytes: float) -> int | None:
    """Return the number of KV pool tokens that fit into a quarter of the free memory, in bytes.

    None if the model is unknown.
    """
    token_bytes = kv_bytes(config, FLOAT32_BYTES)
    return int(free_bytes / POOL_SHARE / token_bytes) if token_bytes else None


@dataclass(frozen=True, slots=True)
class Finding:
    """What a rule of advice says about a server or a run: the observation, and the change to make."""

    sign: str
    """The observation in words."""
    args: dict[str, Any] | None = None
    """Server flags for `engine.args`; None means the next value of the rule's flag. Without flags and
    `change`, the rule gives no advice."""
    change: str = ""
    """The change in words; empty if `args` say it all."""
    evidence: dict[str, Any] = field(default_factory=dict)
    """The figures behind the observation, for `--json`."""
    certainty: Certainty | None = None
    """Certainty that the change helps, if it differs from the rule's."""
    fine: bool = False
    """Whether the finding says that nothing has to change."""
    env: dict[str, str] = field(default_factory=dict)
    """Variables for `engine.env`, which `change` also names."""
