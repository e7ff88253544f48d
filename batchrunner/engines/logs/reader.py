"""A log of any size and encoding → the load over time and facts about its server, in bounded memory."""

import codecs
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Self

from batchrunner.core.engine_info import SchedulerLoad
from batchrunner.core.errors import InputError
from batchrunner.engines.logs import records
from batchrunner.engines.logs.facts import Facts, Trouble
from batchrunner.engines.logs.lines import clean, origin_of, record_in
from batchrunner.engines.logs.prefills import Prefills
from batchrunner.engines.logs.records import LoggedBatch, Phase, Record, ServerReady
from batchrunner.engines.logs.series import LoadSample, Series
from batchrunner.engines.logs.thresholds import Thresholds

BLOCK_BYTES = 1 << 20
MOST_POLLED_BYTES = 4 << 20
"""Most bytes of a growing log that one poll reads."""
LONGEST_LINE = 1 << 18
"""Most characters of a line: SGLang writes no longer ones, and they are not kept."""
SILENT_S = 2.0
"""Seconds of reading after which a progress bar appears, on a terminal."""
_MARKS = {codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16", codecs.BOM_UTF8: "utf-8-sig"}
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
        self._old_death: records.Died | None = None
        """A death before the last restart: it counts until the server logs a batch again."""
        self._prefills = Series(limits)

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
        self.series.complete(self._prefills)  # a server that scores or embeds logs no decode batches
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
            self.records += isinstance(record, records.SGLangRecord)
            self._take(record, line)

    def _take(self, record: Record, line: str) -> None:
        match record:
            case records.LoggedBatch():
                self._batch(record, line)
            case records.Retraction():
                scheduler, _ = self._speaker(line)
                if scheduler is not None:
                    self.series.track(scheduler).retractions += 1
                    self.series.prefills.retracted_tokens += record.tokens
            case records.Arguments():
                self._started(record)
            case records.ServerReady():
                self.facts.ready = record
                self._phase = "general"
            case records.WeightsLoaded():
                self._weights(record)
            case records.PhaseBegins(phase) if self._phase not in _CAPTURES or phase not in _FORWARD:
                self._phase = phase
            case records.LoggedCard():
                self.facts.card = record.name
            case records.OutOfMemory() | records.Died() | records.Raised():
                self._failed(record)

    def _batch(self, batch: records.LoggedBatch, line: str) -> None:
        scheduler, at = self._speaker(line)
        if scheduler is None:
            return
        self._phase, self._running = "decode" if batch.decode else "prefill", batch.running
        if self.facts.died is self._old_death:  # after a new death other ranks log on for seconds
            self.facts.died = self._old_death = self.facts.last_trouble = None
        most = self.facts.max_running
        clock = self.series.track(scheduler).clock
        if batch.decode:
            clock.decoded(batch, self.facts.steps_a_line)
            sample = LoadSample(
                at, batch.running, batch.queue, batch.usage, most, batch.graph, batch.throughput
            )
            self.series.add(scheduler, sample)
        else:
            self._prefills.add(
                scheduler, LoadSample(at, batch.running, batch.queue, batch.usage, most, prefill=True)
            )
            limits = self.facts.pass_limits
            clock.prefilled(batch, full=limits.is_full(batch))
            self.series.prefills.add(batch, limits, scheduler)

    def _speaker(self, line: str) -> tuple[str | None, float | None]:
        """Return a line's scheduler and time; no scheduler where another rank's lines count for it."""
        origin = origin_of(line)
        scheduler = f"{self.source} {origin.server} {origin.dp}"
        speaks = self._speakers.setdefault(scheduler, origin.rank) == origin.rank
        return scheduler if speaks else None, origin.at

    def _started(self, record: records.Arguments) -> None:
        """Drop what was read if the server restarted with other arguments: only its card is the same."""
        before = self.facts.arguments
        if before and any(before.get(name) != record.values.get(name) for name in _TUNED):
            self._forget(self.series)
            self._forget(self._prefills)
            self.facts = Facts(card=self.facts.card)
        self._old_death = self.facts.died
        self._speakers.clear()  # a restart may have changed the names of the ranks
        self.facts.arguments = record.values
        self._phase = "load"

    def _forget(self, series: Series) -> None:
        """Drop this log's schedulers, and the prefill passes, which all logs share, with the last of them."""
        tracks = series.tracks.items()
        series.tracks = {name: track for name, track in tracks if not name.startswith(f"{self.source} ")}
        if not series.tracks:
            series.prefills = Prefills()

    def _weights(self, record: records.WeightsLoaded) -> None:
        facts = self.facts
        self._phase = "load" if record.free_gb is not None else "general"
        if record.free_gb is not None and facts.card_gb is None:
            facts.card_gb = record.free_gb
        if record.used_gb is not None and record.used_gb > (facts.weights_gb or 0):  # a draft model follows
            facts.weights_gb, facts.model = record.used_gb, record.model
            facts.quantised = record.quantised

    def _failed(self, record: records.OutOfMemory | records.Died | records.Raised) -> None:
        """Keep the record that explains a death best: a SIGKILL, or else the first exception."""
        known = None if self.facts.died is self._old_death else self.facts.died
        if isinstance(record, records.OutOfMemory):
            self._trouble(record)
        elif isinstance(record, records.Died) and (known is None or (record.killed and not known.killed)):
            self.facts.died = record
        elif known is not None and known.text.endswith(_TRACEBACK):
            self.facts.died = known._replace(text=record.text)

    def _trouble(self, record: records.OutOfMemory) -> None:
        phase = self._phase if record.phase == "general" or self._phase == "prefill-graph" else record.phase
        self.facts.card_gb = record.total_gb or self.facts.card_gb
        self.facts.last_trouble = new = Trouble(phase, record, self._running)
        last = self.facts.troubles[-1] if self.facts.troubles else None
        if last is None or (last.phase, last.what.text) != (phase, record.text):
            self.facts.troubles = [*self.facts.troubles[-7:], new]


def lines_of(path: Path) -> Iterator[str]:
    """Return a file's lines. In an unknown encoding only the ASCII is right, which is all that matters.

    Memory is bounded, even if the file has no line ends. Raises OSError.
    """
    from tqdm import tqdm  # noqa: PLC0415 - only where a log is read

    size = path.stat().st_size
    with (
        path.open("rb") as log,
        tqdm.wrapattr(log, "read", size, desc=path.name, disable=None, delay=SILENT_S, leave=False) as file,
    ):
        block = file.read(BLOCK_BYTES)
        decoder = codecs.getincrementaldecoder(_encoding(block))(errors="replace")
        rest = ""
        while block:
            first, *others = (rest + decoder.decode(block)).split("\n")
            if others:
                yield first
                rest = others.pop()
                yield from others
            else:
                rest = first
            rest = rest[-LONGEST_LINE:]
            block = file.read(BLOCK_BYTES)
        yield rest


def _encoding(head: bytes) -> str:
    """Guess the encoding by its mark or by zero bytes; others (GB18030, Latin-1) contain ASCII as it is."""
    marked = next((name for mark, name in _MARKS.items() if head.startswith(mark)), None)
    if marked:
        return marked
    big, little = head[:4096:2].count(0), head[1:4096:2].count(0)
    if big + little > len(head[:4096]) // 4:
        return "utf-16-le" if little > big else "utf-16-be"
    return "utf-8"


class LogLoad:
    """The newest load of each scheduler in the lines of a log, for releases that report it nowhere else."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._limits = ServerReady()
        self._newest: dict[str, tuple[LoggedBatch, int]] = {}
        self._batches = 0

    def read(self, lines: Iterable[str]) -> None:
        """Take the next lines of the log."""
        for line in lines:
            record = record_in(line)
            if isinstance(record, ServerReady):
                self._limits = record
            elif isinstance(record, LoggedBatch):
                self._batches += 1
                self._newest[origin_of(line).dp] = record, self._batches

    def loads(self) -> list[SchedulerLoad]:
        """Return the newest load of each scheduler."""
        return [
            SchedulerLoad(
                scheduler=f"{self._url}#dp{rank}" if rank else self._url,
                source="log",
                running=batch.running,
                queue=batch.queue,
                token_usage=batch.usage,
                used_tokens=batch.tokens,
                max_total_tokens=self._limits.max_total_num_tokens,
                max_running=self._limits.max_running_requests,
                route=self._url,
                taken_at=number,
                work=number,
            )
            for rank, (batch, number) in sorted(self._newest.items())
        ]


class LogFollower:
    """Reads what is added to a log from now on."""

    def __init__(self, url: str, path: Path) -> None:
        self._path = path
        self._read_bytes = path.stat().st_size if path.exists() else 0
        self._load = LogLoad(url)

    def poll(self) -> list[SchedulerLoad]:
        """Read the whole lines that were added; return the newest load of each scheduler."""
        with self._path.open("rb") as log:
            log.seek(self._read_bytes)
            block = log.read(MOST_POLLED_BYTES)
        whole = block[: block.rfind(b"\n") + 1]
        self._read_bytes += len(whole)
        self._load.read(whole.decode(errors="replace").splitlines())
        return self._load.loads()
