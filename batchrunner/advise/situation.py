"""All that the rules of advice look at: the load, the server, and where it is a run of ours, the client."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from batchrunner.engines.logs.facts import Facts
from batchrunner.engines.recovery.safer_args import in_effect

if TYPE_CHECKING:
    from collections.abc import Mapping

    from batchrunner.advise.advice import Certainty
    from batchrunner.engines.logs.series import Series
    from batchrunner.engines.logs.thresholds import Thresholds

WHOLE_CARD_GB = 40.0
"""The guides' figures are for cards from here on: a smaller one has smaller batches to leave memory for."""
USUAL_CHUNK = 8192
"""Their `--chunked-prefill-size`, in tokens: a larger one takes more memory."""
CHUNK_GB_A_TOKEN = 1.5 / 1024
"""What SGLang's memory_hook reserves for activations of a prefill chunk."""
LONGEST = 160
"""Characters of a log's line that are shown."""


class MemoryBand(NamedTuple):
    """What is to be left of a card when the server is ready, GB."""

    low: float
    good: float
    high: float


@dataclass(slots=True)
class ClientActivity:
    """What our own run did, and above all what it did while the engine's queue was empty."""

    dry: int = 0
    """Samples with an empty queue while rows were left to send; of these …"""
    at_window: int = 0
    """… the window was full (90 %),"""
    on_way: int = 0
    """… and most of what was in flight was neither running nor waiting at the scheduler,"""
    resting: int = 0
    """… or the window was not full, and rows waited for another try."""
    window: str | int = "auto"
    """The job's."""
    connections: int | None = None
    widest: int = 0
    """Most requests in flight."""
    tokenize: str | None = None
    """Where prompts become tokens: `client` or `server`."""
    max_new_tokens: int | None = None
    ignore_eos: bool = False
    """Whether every output has `max_new_tokens`."""
    output_tokens: int = 0
    outputs: int = 0
    order: str = "auto"
    kind: str = "attach"
    """The job's `engine.kind`."""
    simulated: bool = False
    longest_output: int | None = None
    """99 of 100 outputs are no longer, in tokens."""

    @property
    def output_share(self) -> float | None:
        """Mean output as a share of `max_new_tokens`, 0-1; None where one of them is not known."""
        if not self.outputs or not self.max_new_tokens:
            return None
        return self.output_tokens / self.outputs / self.max_new_tokens


@dataclass(slots=True)
class Situation:
    """What there is to judge."""

    load: Series
    """Queue, running and token usage over time."""
    log: Series
    """What only log lines tell: graphs, prefill passes, retractions. May be the same."""
    facts: Facts = field(default_factory=Facts)
    client: ClientActivity | None = None

    @property
    def limits(self) -> Thresholds:
        """The thresholds."""
        return self.load.limits

    @property
    def max_running(self) -> int | None:
        """`max_running_requests` of a scheduler."""
        return self.facts.max_running or self.load.largest("max_running") or None

    @property
    def memory_band(self) -> MemoryBand:
        """The guides' figures for this card and its prefill chunk."""
        return memory_band(self.facts, self.limits)

    @property
    def fills_up(self) -> bool:
        """Whether the KV pool is full again and again, be it in waves."""
        return self.load.share("full") >= self.limits.peaks

    @property
    def retractions(self) -> int:
        """How often the pool was full; requests taken back, where no log tells it."""
        return max(self.log.retractions, self.load.retractions)

    @property
    def retractions_per_min(self) -> float:
        """A minute of work, of the scheduler that has most."""
        told = self.log if self.log.retractions else self.load
        return told.retractions_per_min

    @property
    def retracts_often(self) -> bool:
        """Whether it is more than the guides call fine."""
        return self.load.enough and self.retractions_per_min > self.limits.retractions_per_min

    def often(self, sign: str) -> str:
        """Say how often a sign was seen."""
        return f"in {self.load.share(sign):.0%} of {self.load.over()}"

    def evidence(self, *signs: str) -> dict[str, Any]:
        """Return the figures behind signs, for machines."""
        shares = {f"{sign}_share": round(self.load.share(sign), 4) for sign in signs}
        return {
            "samples": self.load.counted,
            "span_s": round(self.load.busy_s, 1),
            **shares,
            "median_running": self.load.median("running"),
            "median_queue": self.load.median("queue"),
            "median_token_usage": self.load.median("usage"),
        }


@dataclass(frozen=True, slots=True)
class Finding:
    """What a rule found: a sign with its figures, and what is to be changed."""

    sign: str
    args: dict[str, Any] = field(default_factory=dict)
    """Server flags, as `engine.args` has them; a rule on flags that the version lacks says nothing."""
    change: str = ""
    """In words; of flags where it is more than they say."""
    evidence: dict[str, Any] = field(default_factory=dict)
    certainty: Certainty | None = None
    """Where it is not the rule's own."""
    fine: bool = False
    """It is as it should be."""


def command_line(args: Mapping[str, Any]) -> str:
    """Write `engine.args` as a person types it."""
    return " ".join(_option(name, value) for name, value in args.items())


def _option(name: str, value: Any) -> str:
    if value is None:
        return f"without --{name}"
    return f"--{name}" if value is True else f"--{name} {value}"


def memory_band(facts: Facts, limits: Thresholds) -> MemoryBand:
    """Return the guides' figures for a card and a prefill chunk."""
    chunk = in_effect(facts, "chunked-prefill-size") or 0
    scale = min(1.0, (facts.card_gb or WHOLE_CARD_GB) / WHOLE_CARD_GB)
    more = max(0.0, chunk - USUAL_CHUNK) * CHUNK_GB_A_TOKEN
    return MemoryBand(
        scale * limits.memory_low_gb, scale * limits.memory_good_gb + more,
        scale * limits.memory_high_gb + more,
    )  # fmt: skip
