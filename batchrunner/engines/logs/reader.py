"""A log of any size → the load over time and facts about its server, in bounded memory."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Self

from batchrunner.core.errors import InputError
from batchrunner.engines.logs.facts import Facts, Trouble
from batchrunner.engines.logs.lines import (
    Arguments,
    Died,
    LoggedBatch,
    LoggedCard,
    OutOfMemory,
    Phase,
    PhaseBegins,
    Raised,
    Record,
    Retraction,
    ServerReady,
    SGLangRecord,
    WeightsLoaded,
    clean,
    origin_of,
    record_in,
)
from batchrunner.engines.logs.series import LoadSample, Prefills, Series, Thresholds

LONGEST_LINE = 1 << 18
"""Most characters that are read as one line: SGLang writes no longer ones."""
_TUNED = (
    "schedule_conservativeness", "mem_fraction_static", "max_running_requests", "chunked_prefill_size",
    "max_total_tokens", "model_path", "tp_size", "attention_backend", "kv_cache_dtype", "quantization",
    "max_prefill_tokens", "prefill_max_requests", "prefill_decode_interval", "enable_mixed_chunk",
    "page_size", "disable_radix_cache", "schedule_policy",
)  # fmt: skip
"""Arguments that change the load: when a server restarts with others, what was read before is dropped."""
_CAPTURES, _FORWARD = {"graph", "prefill-graph"}, {"prefill", "decode"}
"""Phases that capture graphs, and those of forward passes, which in a traceback may belong to a capture."""
_TRACEBACK = "Traceback (most recent call last):"


class LogReader:
    """Reads logs line by line into one series of loads and one set of facts."""

    def __init__(self, limits: Thresholds) -> None:
        self.series = Series(limits)
        self.facts = Facts()
        self.records = 0
        """Number of lines that only SGLang writes."""
        self.source = ""
        """Prefix of the schedulers' names, where several logs are read."""
        self._speakers: dict[str, str] = {}
        """The rank whose lines count, by scheduler: with tensor parallelism all ranks may log the same."""
        self._phase: Phase = "general"
        self._running = 0
        self._old_death: Died | None = None
        """A death before the last restart: it counts until the server logs a batch again."""

    def read(self, path: Path) -> Self:
        """Read a file to its end; raises InputError where it is not an SGLang log."""
        others, self._old_death = self.facts, None
        self.facts = replace(others, arguments={}, troubles=[], last_trouble=None, died=None)
        try:
            for line in lines_of(path):
                self.take(line)
        except OSError as failure:
            raise InputError(f"{path}: cannot be read: {failure.strerror or failure}") from None
        finally:
            self._add(others)
        if not self.records:
            raise InputError(
                f"{path}: not a log of SGLang: no line of it is one that SGLang writes "
                "(such as `Decode batch, #running-req: …` or `server_args=…`)"
            )
        self.series.settle()
        return self

    def _add(self, others: Facts) -> None:
        """Add the troubles of the servers of other logs."""
        facts = self.facts
        facts.arguments = facts.arguments or others.arguments
        facts.troubles = others.troubles + facts.troubles
        if facts.died is None:
            facts.died, facts.last_trouble = others.died, others.last_trouble

    def take(self, line: str) -> None:
        """Take one line."""
        line = clean(line)
        record = record_in(line)
        if record is not None:
            self.records += isinstance(record, SGLangRecord)
            self._take(record, line)

    def _take(self, record: Record, line: str) -> None:
        match record:
            case LoggedBatch():
                self._batch(record, line)
            case Retraction():
                scheduler, _ = self._speaker(line)
                if scheduler is not None:
                    self.series.track(scheduler).retractions += 1
                    self.series.prefills.retracted_tokens += record.tokens
            case Arguments():
                self._started(record)
            case ServerReady():
                self.facts.ready = record
                self._phase = "general"
            case WeightsLoaded():
                self._weights(record)
            case PhaseBegins(phase) if self._phase not in _CAPTURES or phase not in _FORWARD:
                self._phase = phase
            case LoggedCard():
                self.facts.card = record.name
            case OutOfMemory() | Died() | Raised():
                self._failed(record)

    def _batch(self, batch: LoggedBatch, line: str) -> None:
        scheduler, at = self._speaker(line)
        if scheduler is None:
            return
        self._phase, self._running = "decode" if batch.decode else "prefill", batch.running
        if self.facts.died is self._old_death:  # after a new death other ranks log on for seconds
            self.facts.died = self._old_death = self.facts.last_trouble = None
        most = self.facts.max_running
        if batch.decode:
            sample = LoadSample(
                at, batch.running, batch.queue, batch.usage, most, batch.graph, batch.throughput
            )
            self.series.add(scheduler, sample)
        else:
            self.series.prefills.add(batch, self.facts.chunk or 0)

    def _speaker(self, line: str) -> tuple[str | None, float | None]:
        """Return a line's scheduler and time; no scheduler where another rank's lines count for it."""
        origin = origin_of(line)
        scheduler = f"{self.source} {origin.server} {origin.dp}"
        speaks = self._speakers.setdefault(scheduler, origin.rank) == origin.rank
        return scheduler if speaks else None, origin.at

    def _started(self, record: Arguments) -> None:
        """Drop what was read if the server restarted with other arguments: only its card is the same."""
        before = self.facts.arguments
        if before and any(before.get(name) != record.values.get(name) for name in _TUNED):
            self._forget()
            self.facts = Facts(card=self.facts.card)
        self._old_death = self.facts.died
        self._speakers.clear()  # a restart may have changed the names of the ranks
        self.facts.arguments = record.values
        self._phase = "load"

    def _forget(self) -> None:
        """Drop this log's schedulers, and the prefill passes, which all logs share, with the last of them."""
        series = self.series
        tracks = series.tracks.items()
        series.tracks = {name: track for name, track in tracks if not name.startswith(f"{self.source} ")}
        if not series.tracks:
            series.prefills = Prefills()

    def _weights(self, record: WeightsLoaded) -> None:
        facts = self.facts
        self._phase = "load" if record.free_gb is not None else "general"
        if record.free_gb is not None and facts.card_gb is None:
            facts.card_gb = record.free_gb
        if record.used_gb is not None and record.used_gb > (facts.weights_gb or 0):  # a draft model follows
            facts.weights_gb, facts.model = record.used_gb, record.model
            facts.quantised = record.quantised

    def _failed(self, record: OutOfMemory | Died | Raised) -> None:
        """Keep the record that explains a death best: a SIGKILL, or else the first exception."""
        known = None if self.facts.died is self._old_death else self.facts.died
        if isinstance(record, OutOfMemory):
            self._trouble(record)
        elif isinstance(record, Died) and (known is None or (record.killed and not known.killed)):
            self.facts.died = record
        elif known is not None and known.text.endswith(_TRACEBACK):
            self.facts.died = known._replace(text=record.text)

    def _trouble(self, record: OutOfMemory) -> None:
        phase = self._phase if record.phase == "general" or self._phase == "prefill-graph" else record.phase
        self.facts.card_gb = record.total_gb or self.facts.card_gb
        self.facts.last_trouble = new = Trouble(phase, record, self._running)
        last = self.facts.troubles[-1] if self.facts.troubles else None
        if last is None or (last.phase, last.what.text) != (phase, record.text):
            self.facts.troubles = [*self.facts.troubles[-7:], new]


def lines_of(path: Path) -> Iterator[str]:
    """Return a file's lines, in bounded memory even if it has no line ends. Raises OSError.

    In another encoding than UTF-8 only the ASCII is right, which is all that matters.
    """
    with path.open(encoding="utf-8", errors="replace") as log:
        while line := log.readline(LONGEST_LINE):
            yield line
