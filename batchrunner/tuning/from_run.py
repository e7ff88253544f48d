"""Reads the load and the servers' setup of a run, finished or not, from its events and server logs."""

import contextlib
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from batchrunner.core.errors import InputError
from batchrunner.job.tasks import GENERATE
from batchrunner.output.columns import has_texts
from batchrunner.output.events import read_events
from batchrunner.output.run_dir import RunDir, look_at_run
from batchrunner.output.run_json import require_run_json
from batchrunner.output.samples import RunSample, sample_of
from batchrunner.sglang.flags import number, of_arguments
from batchrunner.sglang.logs.lines import ServerReady
from batchrunner.sglang.logs.reader import LogReader
from batchrunner.sglang.logs.series import Prefills, Series, sample_of_load
from batchrunner.sglang.model_files import read_config
from batchrunner.tuning.flags import NGRAM, next_setting
from batchrunner.tuning.ngrams import CHECKED, MOST_ANSWERS, is_exact, words_a_step
from batchrunner.tuning.signals import has_enough
from batchrunner.tuning.situation import ClientActivity, Situation, has_media, sets_sampling

MOST_PARTS = 20
"""Maximum number of result files that are read for the lengths of outputs, the newest first."""
MOST_CHARACTERS = 5000
"""Maximum number of characters of an answer that are kept: about 1,000 words."""
FEWEST_PASSES = 4
"""A span of steady work is judged only if it has at least this many logged decode passes."""
FULL = 0.9
"""The runner's concurrency limit counts as reached if at least this fraction of it is in flight."""
SAME_FLAGS = ("version", "card", "max_running", "prefill_tokens")
"""Facts in the event `start` that are equal if the servers had the same flags at two starts of a run."""
SAME_POOL = 0.02
"""Maximum relative difference between the KV pools of servers with the same flags. They differ a little,
because each server takes the memory that is free when it starts."""


def read_run(run: Path | RunDir) -> Situation:
    """Read the load and the setup of a run from the logs of all its workers.

    Raises OutputError if there is no run.
    """
    run_dir = look_at_run(run)
    facts = require_run_json(run_dir)
    client = _client(facts)
    load, log = Series(), LogReader()
    # A worker may be listed twice, with the same directory.
    directories = {worker.log_directory: worker for worker in (run_dir, *run_dir.all_tasks())}
    for worker_dir in directories.values():
        worker = _WorkerReader(worker_dir.task, load, client)
        worker.read(worker_dir.events)
        client = worker.client
        for path in sorted(worker_dir.log_directory.glob("engine*.log")):
            log.source = f"{worker_dir.task} {path.stem}"
            # A server that never started has an empty log, which cannot be read.
            with contextlib.suppress(InputError):
                log.read(path)
    load.settle()
    _read_lengths(run_dir, client)
    # With too few steady load samples, those of the server's log are dropped too, because they include the
    # start and the end of the run.
    if not has_enough(load):
        log.series.tracks, log.series.prefills = {}, Prefills()
    server = log.facts
    server.version = facts["engine"].get("version")
    server.card = server.card or facts["engine"].get("card")
    # If the run did not start this server, there is no log of it. run.json has the most important fact.
    if server.ready is None and facts["engine"].get("memory_caps_running"):
        server.ready = ServerReady(memory_caps_running=True)
    gpus = facts["engine"].get("gpus")
    if gpus and server.arguments:
        server.idle_gpus = max(0, gpus - server.gpus)
    situation = Situation(load, log.series, server, client)
    _replay(run_dir, situation)
    # The copy drops `Situation.server`, which was cached before the replay.
    return replace(situation)


def _client(facts: Mapping[str, Any]) -> ClientActivity:
    """Return the runner's settings from a run.json. All counts are still zero."""
    job, sampling = facts["job"], facts["fingerprint"].get("sampling", {})
    prompt = facts["fingerprint"].get("prompt", {})
    # The value is not a number if the limit comes from a column.
    most = sampling.get("max_new_tokens")
    # Lines of a batch file, and the requests of rollouts, have sampling parameters of their own, with which
    # speculation may not be exact.
    speculates_exactly = is_exact(sampling) and sets_sampling(prompt)
    return ClientActivity(
        window=job.get("window", "auto"),
        connections=facts["engine"].get("connections"),
        max_new_tokens=most if isinstance(most, int) else None,
        ignore_eos=sampling.get("ignore_eos") is True,
        order=job.get("order", "auto"),
        media=has_media(prompt),
        speculates_exactly=speculates_exactly,
        simulated=bool(facts["engine"].get("simulated")),
        decodes=job.get("task", GENERATE) == GENERATE,
    )


class _WorkerReader:
    """Adds the steady load of one worker to a series, beginning at the last change of its servers' flags.

    Load samples of three phases are skipped, because they say nothing about the flags: the start, until as
    many rows have ended as ran at once; the time after a stop; and the end, when too few rows remain to fill
    the concurrency limit.
    """

    def __init__(self, name: str, load: Series, client: ClientActivity) -> None:
        self.client = client
        """Activity of the runner, summed over all workers that were read so far."""
        self._name = name
        """Name of the worker, with which the names of its schedulers begin."""
        self._load = load
        self._before = dict(load.tracks), load.retractions, replace(client)
        """State before this worker's events, to which `_restart` returns."""
        self._start: Mapping[str, Any] | None = None
        """The last event `start`, which begins each start of the run; None before the first."""
        self._learned: dict[str, Any] = {}
        """Flags that the runner gave the servers in addition to the job's own."""
        self._tracks: dict[str, str] = {}
        """Name of each scheduler in the series, by its own name. Numbers replace ports, which change at each
        start of the run."""
        self._retractions = 0
        """Retractions since the last start of the run."""
        self._began: int | None = None
        """Rows done at the first sample since the servers started; None before that sample."""
        self._peak = 0
        """Maximum number of requests that have run at once since the first load sample."""

    def read(self, path: Path) -> None:
        """Read the worker's event log. If the servers' flags changed, discard the load before the change."""
        for event in read_events(path):
            if (sample := sample_of(event)) is not None:
                self.add(sample, at=sample.time)
            match event["event"]:
                case "start":
                    if self._start and not _have_same_flags(self._start, event):
                        self._restart()
                    self._start = event
                    # At each start of the run, ports may change and counts begin at 0.
                    self._tracks, self._retractions, self._began = {}, 0, None
                case "engine_died" | "engine_hangs":
                    # A restarted server first fills up again.
                    self._began = None
                case "engine_adapts":
                    self._restart()
                # Several servers report the same change of flags. Only after the first report, the load so
                # far is discarded.
                case "engine_recalled" | "engine_healed" if (
                    not _new_args(event).items() <= self._learned.items()
                ):
                    self._learned |= _new_args(event)
                    self._restart()
                case "tokenize":
                    self.client.tokenize = event.get("where")
                case "order":
                    self.client.possible_share = _possible_share(event)

    def _restart(self) -> None:
        """Discard this worker's load so far, because its servers had other flags."""
        tracks, self._load.retractions, client = self._before
        self._load.tracks = dict(tracks)
        self.client = replace(
            client, tokenize=self.client.tokenize, possible_share=self.client.possible_share
        )

    def _track(self, scheduler: str) -> str:
        """Return a name for a scheduler that is unique among all workers of the run."""
        return self._tracks.setdefault(scheduler, f"{self._name} {len(self._tracks)}")

    def add(self, sample: RunSample, at: float, server: str | None = None) -> None:
        """Add a load sample of all schedulers, or of one `server`; `at` is the sample's time."""
        client, signals = self.client, sample.signals
        new_retractions = sample.retractions - self._retractions
        self._retractions = sample.retractions
        client.widest = max(client.widest, sample.in_flight)
        if self._began is None:
            self._began, self._peak = sample.rows_done, 0
        running = sum(load.running for load in signals)
        self._peak = max(self._peak, running)
        # The first rows end together, and the last rows do not fill the limit. Neither is steady work.
        is_start = sample.rows_done - self._began <= self._peak
        is_tail = sample.unsent + sample.in_flight <= sample.window
        if not sample.in_flight or not signals or is_start or is_tail:
            return
        self._load.retractions += new_retractions
        for load in signals:
            if server not in {None, load.scheduler.partition("#")[0]}:
                continue
            rate = sample.output_tokens_per_s / len(signals)
            load_sample = sample_of_load(load, at=at, rate=rate, unsent=sample.unsent)
            self._load.add(self._track(load.scheduler), load_sample)
        if not any(load.queue for load in signals):
            # The queue is empty. Count the possible reason.
            client.empty += 1
            if sample.in_flight >= FULL * sample.window:
                client.at_window += 1
                # The limit is reached, but most requests have not arrived at the scheduler.
                if 2 * running < sample.in_flight:
                    client.on_way += 1
            elif sample.resting > 0:
                client.resting += 1


class ServerWatch:
    """Measures the load of one server in a span of steady work. `begin` starts a new span."""

    def __init__(self, run_dir: RunDir, url: str, log: Path, since: int) -> None:
        """Watch the server at `url`; its log file is read from the byte `since` on."""
        self._run_dir, self._url, self._log_path, self._at = run_dir, url, log, since
        self._log = LogReader()
        self.begin()

    def begin(self) -> None:
        """Begin a new span. Its steady work begins once as many rows have ended as run at once."""
        self._load = Series()
        self._reader: _WorkerReader | None = None
        self._first: RunSample | None = None
        """Last load sample before the steady work."""

    def take(self, sample: RunSample, now: float) -> None:
        """Add a load sample, read at `now`, and the server's log lines since the last sample.

        The server's log is read at each call, run.json once per span, and the result files as soon as there
        is enough work to judge.
        """
        # The first load sample comes after run.json is written, so the file can be read now.
        if self._reader is None:
            facts = require_run_json(self._run_dir)
            client = _client(facts)
            # The log does not name the GPU, so its name comes from run.json.
            self._log.facts.card = facts["engine"].get("card")
            self._reader = _WorkerReader("", self._load, client)
        self._reader.add(sample, now, self._url)
        # Until steady work begins, the span starts anew with each load sample.
        if self._first is None or not self._load.counted:
            self._first, self._log.series = sample, Series()
        self._last = sample
        with contextlib.suppress(OSError), self._log_path.open("rb") as file:
            file.seek(self._at)
            for line in file:
                # A last line without a newline is still being written. The next call reads it.
                if line.endswith(b"\n"):
                    self._at += len(line)
                    self._log.take(line.decode(errors="replace"))
        if self.busy_s and not self._reader.client.outputs:
            _read_lengths(self._run_dir, self._reader.client)
            _replay(self._run_dir, self.situation)

    @property
    def busy_s(self) -> float:
        """Seconds of steady work in the span; 0 as long as there is too little work to judge."""
        enough = has_enough(self._load) and self._log.series.counted >= FEWEST_PASSES and all(self.rates)
        return self._load.busy_s if enough else 0.0

    @property
    def rates(self) -> tuple[float, float]:
        """Output tokens/s from the server's log, and output plus prompt tokens/s; zeros if unknown.

        The ratio of prompt to output tokens comes from ended rows, so that tokens that the server computed
        twice count once.
        """
        passes = [(sample.running, sample.rate) for sample in self._log.series.samples if sample.rate]
        # A pass yields one token per running request, so it takes running / rate seconds.
        seconds = sum(running / rate for running, rate in passes)
        if not seconds or self._first is None or self._last.output_tokens == self._first.output_tokens:
            return 0.0, 0.0
        output = self._last.output_tokens - self._first.output_tokens
        prompt = self._last.prompt_tokens - self._first.prompt_tokens
        rate = sum(running for running, _ in passes) / seconds
        return rate, rate * (1 + prompt / output)

    @property
    def situation(self) -> Situation:
        """The server's load and setup in this span of steady work, as the rules of advice judge them."""
        client = self._reader.client if self._reader else None
        return Situation(self._load, self._log.series, self._log.facts, client)


def _have_same_flags(start: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Tell from two events `start` whether the servers had the same flags at both starts of the run."""
    first, second = start.get("engine") or {}, other.get("engine") or {}
    if start.get("args") != other.get("args"):
        return False
    if any(first.get(name) != second.get(name) for name in SAME_FLAGS):
        return False
    pools = [engine.get("max_total_tokens") or 0 for engine in (first, second)]
    return math.isclose(*pools, rel_tol=SAME_POOL)


def _read_lengths(run_dir: RunDir, client: ClientActivity) -> None:
    """Set the lengths of outputs in `client`, from the newest result files."""
    chunks: list[pa.Array] = []
    for path in run_dir.all_parts()[-MOST_PARTS:]:
        # A part file may be damaged, or removed in the meantime. The others suffice.
        unreadable = contextlib.suppress(pa.ArrowException, OSError, KeyError)
        with unreadable, pq.ParquetFile(path) as part:
            if has_texts(part.schema_arrow):
                tokens = part.read(columns=["completion_tokens"]).column(0)
                # A row with several completions has a list of lengths.
                if pa.types.is_list(tokens.type):
                    tokens = pc.list_flatten(tokens)
                chunks += tokens.chunks
    if not chunks:
        return
    lengths = pa.chunked_array(chunks).drop_null()
    client.outputs, client.output_tokens = len(lengths), pc.sum(lengths).as_py() or 0
    if client.outputs:
        client.longest_output = int(pc.quantile(lengths, 0.99)[0].as_py())


def _replay(run_dir: RunDir, situation: Situation) -> None:
    """Predict how many tokens a decode step would yield with n-gram speculation, if it could pay here."""
    client, facts = situation.client, situation.facts
    if facts.architecture is None or facts.on_cpu:
        return
    model, revision = facts.arguments.get("model_path"), facts.arguments.get("revision")
    facts.config = facts.config or (read_config(str(model), revision) if model else {})
    flags = of_arguments(facts.version, facts.arguments)
    # Reading the answers takes time. It is done only if n-gram speculation would pay with every drafted token
    # right.
    best_case = replace(situation.server, repeated=float(CHECKED))
    if client is None or not next_setting("repeated", NGRAM, best_case, flags):
        return
    answers = some_answers(run_dir)
    client.answers, client.repeated = len(answers), words_a_step(answers)


def some_answers(run_dir: RunDir) -> list[str]:
    """Return the beginnings of up to MOST_ANSWERS answers from the newest result file that has texts."""
    for path in reversed(run_dir.all_parts()[-MOST_PARTS:]):
        # A part file may be damaged, or removed after the listing. Then the next one is read.
        damaged = contextlib.suppress(pa.ArrowException, OSError, KeyError)
        with damaged, pq.ParquetFile(path) as part:
            if has_texts(part.schema_arrow):
                rows = next(part.iter_batches(MOST_ANSWERS, columns=["output"]), None)
                texts = texts_of(rows.column(0)) if rows is not None else []
                return [text[:MOST_CHARACTERS] for text in texts]
    return []


def texts_of(column: pa.Array) -> list[str]:
    """Return the texts of a column `output`, in which several completions of a row are a list."""
    texts = column.flatten() if pa.types.is_list(column.type) else column
    return [text for text in texts.to_pylist() if isinstance(text, str) and text]


def _possible_share(event: Mapping[str, Any]) -> float | None:
    """Return the fraction of prompt tokens that a prefix cache could serve, or None if unknown.

    The runner estimated it for the rows in input order and in sorted order. The larger one counts.
    """
    shares = [number(event.get(name)) for name in ("input_share", "sorted_share")]
    return max((share for share in shares if share is not None), default=None)


def _new_args(event: Mapping[str, Any]) -> dict[str, Any]:
    """Return the new arguments of an event; empty if the event is damaged."""
    new = event.get("new")
    return new if isinstance(new, dict) else {}
