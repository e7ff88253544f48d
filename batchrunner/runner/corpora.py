"""Gives servers with n-gram speculation the run's finished answers as a corpus to draft from.

SGLang drafts tokens from a server's own earlier outputs. A server that has just started has none, and each of
many replicas has only its part. So such a server gets the newest answers of the run as an external corpus. It
holds at most one at a time, and gets it only if a replay promises a gain (`tuning/ngrams.py`). A restarted
server has lost its corpus and gets a new one. A server that refuses a corpus gets no more. Answers never
depend on a corpus.
"""

import asyncio
import contextlib
import itertools
import logging
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from batchrunner.core.timing import TIMING
from batchrunner.core.types import BYTES_PER_TOKEN
from batchrunner.engines.http.client import HttpEngine
from batchrunner.engines.http.server_info import NOT_REACHED, ServerStatus
from batchrunner.output.columns import has_texts
from batchrunner.output.run_dir import RunDir
from batchrunner.output.samples import RunSample
from batchrunner.tuning.flags import takes_corpus
from batchrunner.tuning.from_run import texts_of
from batchrunner.tuning.ngrams import (
    LEAST_CORPUS_GAIN,
    MOST_ANSWERS,
    MOST_CORPUS,
    corpus_gain,
    corpus_step,
)

log = logging.getLogger(__name__)

LIST, ADD, REMOVE = "/list_external_corpora", "/add_external_corpus", "/remove_external_corpus"
"""SGLang's paths for corpora (entrypoints/http_server.py)."""
ROWS_AT_ONCE = 1000
"""Number of rows of a part file that are read at once."""
LONGEST_MESSAGE = 200
"""Maximum number of characters of a server's message in a log line."""


class CorpusRefusedError(Exception):
    """Raised when a server refuses to list, load or remove a corpus. The message is the server's."""


@dataclass(slots=True)
class ServerCorpus:
    """State of one server and of the corpus that was loaded into it."""

    start: int
    """Number of the server's start; see `HttpEngine.start_of`."""
    tokens_at_start: int
    """Number of output tokens of the run when the server's start was noticed."""
    is_confirmed: bool = False
    """Whether the server, since its last start, has confirmed that it holds a corpus of this run."""
    may_hold_corpora: bool = False
    """Whether the server was asked to load a corpus since its last start. It is set before the request, so
    that `close` also removes what a failed request may have loaded."""
    is_refused: bool = False
    """Whether the server gets no more corpora, not even after a restart."""


class CorpusFeeder:
    """Gives a run's servers earlier answers to draft from (n-gram speculation), and removes them."""

    def __init__(self, engine: HttpEngine, run_dir: RunDir) -> None:
        """Prepare to give the servers of `engine` answers from the run in `run_dir`; `take` gives them."""
        self._engine, self._run_dir = engine, run_dir
        self._servers: dict[str, ServerCorpus] = {}
        """State of each server that can get a corpus, by its URL."""
        self._next_look = 0.0
        """Time before which no server is looked at, in seconds of the monotonic clock."""
        self._prefix = f"batchrunner-{secrets.token_hex(4)}-"
        """Beginning of the names of this run's corpora."""
        self._names = itertools.count()
        self._judged_tokens, self._is_worth_it = 0, False
        """Result of the last replay, a simulation of n-gram speculation on the run's answers: the size of
        these answers in tokens (0 before the first replay), and whether a corpus would be worth loading."""

    async def take(self, sample: RunSample, now: float) -> None:
        """Load or replace the servers' corpora where needed, unless this was done shortly before `now`.

        The caller must await each call before it passes the next sample.
        """
        if now < self._next_look:
            return
        self._next_look = now + TIMING.corpus
        urls = [url for url in self._engine.replicas if self._takes_corpus(url)]
        for url in urls:
            self._note_start(url, sample.output_tokens)
        urls = [url for url in urls if not self._servers[url].is_refused]
        if not urls:
            return
        answers = await asyncio.to_thread(newest_answers, self._run_dir, MOST_CORPUS * BYTES_PER_TOKEN)
        for url in urls:
            try:
                await self._look_at(url, answers, sample)
            except CorpusRefusedError as refusal:
                self._servers[url].is_refused = True
                log.warning(
                    "%s refused a corpus for n-gram speculation, and gets no more answers: %s", url, refusal
                )
            except NOT_REACHED as failure:  # the next look tries again
                log.debug("%s: its corpora could not be changed: %r", url, failure)

    def _takes_corpus(self, url: str) -> bool:
        """Tell whether a server drafts from corpora, and can get one.

        A server behind a gateway gets none, because the gateway does not pass corpora on.
        """
        arguments = self._engine.arguments_of(url)
        has_budget = bool(arguments.get("speculative_ngram_external_sam_budget"))
        is_direct = self._engine.endpoints[url].address == url
        is_ngram = arguments.get("speculative_algorithm") == "NGRAM"
        return is_ngram and has_budget and is_direct and takes_corpus(arguments)

    def _note_start(self, url: str, output_tokens: int) -> None:
        """Note that the run started a server. A server that was just started holds no corpus."""
        start, server = self._engine.start_of(url), self._servers.get(url)
        if server is None:
            self._servers[url] = ServerCorpus(start, output_tokens)
        elif server.start != start:
            self._servers[url] = ServerCorpus(start, output_tokens, is_refused=server.is_refused)

    async def _look_at(self, url: str, answers: Sequence[str], sample: RunSample) -> None:
        """Add, replace or remove a server's corpus. Raises CorpusRefusedError or an error of NOT_REACHED."""
        status, server = self._engine.status_of(url), self._servers[url]
        corpora = await _corpora_of(status)
        own_corpora = [name for name in corpora if name.startswith(self._prefix)]
        if len(own_corpora) < len(corpora):
            raise CorpusRefusedError("it has other corpora, with which the answers would share the budget")
        if server.is_confirmed and not own_corpora:
            # The server has lost its corpus, so somebody has restarted it.
            server.tokens_at_start = sample.output_tokens
        server.is_confirmed = bool(own_corpora)
        # Each scheduler of a server drafts only from its own outputs, so its part of the run's output counts.
        # If no load is known, each server counts as one scheduler.
        schedulers = max(len(sample.signals), len(self._engine.replicas))
        generated = (sample.output_tokens - server.tokens_at_start) // schedulers
        available = sum(map(len, answers)) // BYTES_PER_TOKEN
        step = corpus_step(available, generated, loaded=sum(corpora[name] for name in own_corpora))
        if step == "add" and not await self._promises_gain(answers, available):
            return
        if step == "add":
            name = f"{self._prefix}{next(self._names)}"
            server.may_hold_corpora = True
            await _change(status, ADD, {"corpus_id": name, "documents": answers}, TIMING.corpus_load)
            server.is_confirmed = True
            log.info(
                "%s: about %s tokens of finished answers were loaded as a corpus for n-gram speculation",
                url, f"{available:,}",
            )  # fmt: skip
        if step == "remove":
            server.is_confirmed = False  # before the request, whose reply may be lost
        if step != "keep":  # a new corpus replaces the old one, because a corpus cannot grow
            await _remove(status, own_corpora)

    async def _promises_gain(self, answers: Sequence[str], tokens: int) -> bool:
        """Replay the answers to tell whether a corpus would speed the run up.

        `tokens` is the size of the answers. Each time that it has doubled, the replay is repeated.
        """
        if not self._judged_tokens or tokens >= 2 * self._judged_tokens:
            gain = await asyncio.to_thread(corpus_gain, answers[:MOST_ANSWERS])
            self._judged_tokens, self._is_worth_it = tokens, gain >= LEAST_CORPUS_GAIN
        return self._is_worth_it

    async def close(self) -> None:
        """Remove the corpora from servers that go on running after the run."""
        if self._engine.starts_servers:
            return
        for url in [url for url, server in self._servers.items() if server.may_hold_corpora]:
            with contextlib.suppress(CorpusRefusedError, *NOT_REACHED):
                status = self._engine.status_of(url)
                corpora = await _corpora_of(status)
                await _remove(status, [name for name in corpora if name.startswith(self._prefix)])


def newest_answers(run_dir: RunDir, most_characters: int) -> list[str]:
    """Return the newest answers of a run from its Parquet files, up to a total length in characters."""
    answers: list[str] = []
    characters_left = most_characters
    for path in reversed(run_dir.all_parts()):
        # A part file may be damaged, or may have been removed in the meantime.
        damaged = contextlib.suppress(pa.ArrowException, OSError, KeyError)
        with damaged, pq.ParquetFile(path) as part:
            if not has_texts(part.schema_arrow):
                continue
            for rows in part.iter_batches(ROWS_AT_ONCE, columns=["output"]):
                for text in texts_of(rows.column(0)):
                    characters_left -= len(text)
                    if characters_left < 0:
                        return answers
                    answers.append(text)
    return answers


async def _corpora_of(status: ServerStatus) -> dict[str, int]:
    """Return the number of tokens of each corpus of a server, by name."""
    reply = _accepted(*await status.get(LIST, TIMING.status_timeout))
    corpora = reply.get("corpus_token_counts")
    if not isinstance(corpora, dict):
        return {}
    return {name: tokens if isinstance(tokens, int) else 0 for name, tokens in corpora.items()}


async def _remove(status: ServerStatus, names: Sequence[str]) -> None:
    for name in names:
        await _change(status, REMOVE, {"corpus_id": name}, TIMING.status_timeout)


async def _change(status: ServerStatus, path: str, fields: Mapping[str, Any], timeout_s: float) -> None:
    """Post a request that loads or removes corpora. Raises CorpusRefusedError if the server refuses it."""
    _accepted(*await status.post(path, fields, timeout_s))


def _accepted(status: int, body: bytes) -> dict[str, Any]:
    """Return the JSON object of an accepted request. Raises CorpusRefusedError with the server's message."""
    try:
        reply = orjson.loads(body)
    except orjson.JSONDecodeError:
        reply = None
    if status == HTTPStatus.OK and isinstance(reply, dict):
        return reply
    message = reply.get("message") if isinstance(reply, dict) else None
    raise CorpusRefusedError(" ".join(str(message or f"status {status}").split())[:LONGEST_MESSAGE])
