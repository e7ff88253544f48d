"""Finished answers become a corpus for n-gram speculation, on servers that take one."""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest
from aiohttp import web

from batchrunner.api import run
from batchrunner.core.timing import TIMING
from batchrunner.runner import send
from batchrunner.runner.corpora import ADD, LIST, REMOVE
from batchrunner.tuning import ngrams
from tests.conftest import job_of, report_of
from tests.support.answers import Body, Said
from tests.support.fake_sglang import Behaviour, FakeSGLang, Sent, answer
from tests.support.launchable import launchable
from tests.support.runs import rows_once

ROWS, FIRST = 90, 60
"""Number of rows, and of those that are answered before a corpus is added."""
NGRAM = {"speculative_algorithm": "NGRAM", "speculative_ngram_external_sam_budget": 8}
SENTENCES = [" ".join(f"expression{13 * n + word}" for word in range(11)) + "." for n in range(20)]


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write answers at once, look at the corpora often, and be content with small ones."""
    for name, value in {"part": 0.05, "corpus": 0.01, "load_poll": 0.02}.items():
        monkeypatch.setattr(TIMING, name, value)
    monkeypatch.setattr(send, "LOGGED_EVERY_S", 0.01)
    monkeypatch.setattr(ngrams, "LEAST_CORPUS", 500)


def answer_of(sent: Sent) -> str:
    """Return an answer of three sentences that other answers have too."""
    return " ".join(SENTENCES[(3 * sent.row + 7 * part) % len(SENTENCES)] for part in range(3))


class Speculating(FakeSGLang):
    """A server that holds the last rows until `is_done` is true of its corpora."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(self.reply, arguments=NGRAM | arguments, max_running=64)
        self.holds = True
        self.corpora = dict[str, list[str]]()
        """Documents of the corpora that are loaded, by name."""
        self.corpus_calls = list[str]()
        """Paths that were asked for corpora, in order."""
        self.refusal: str | None = None
        """Why no corpus can be added; None if one can."""
        self.on_corpus: Callable[[], object] = self.release
        """Called in the server's own thread after a corpus was added or refused."""

    def add_routes(self, app: web.Application) -> None:
        super().add_routes(app)
        app.router.add_get(LIST, self._list)
        app.router.add_post(ADD, self._add)
        app.router.add_post(REMOVE, self._remove)

    async def _list(self, request: web.Request) -> web.Response:
        self.corpus_calls.append(LIST)
        counts = {name: sum(map(len, texts)) // 4 for name, texts in self.corpora.items()}
        return web.json_response({"success": True, "corpus_token_counts": counts, "message": ""})

    async def _add(self, request: web.Request) -> web.Response:
        self.corpus_calls.append(ADD)
        body, why = await request.json(), self.refusal
        if why is None:
            self.corpora[body["corpus_id"]] = body["documents"]
        self.on_corpus()
        fields = {"corpus_id": body["corpus_id"], "loaded_token_count": 0, "message": why or "Loaded."}
        return web.json_response({"success": why is None, **fields}, status=400 if why else 200)

    async def _remove(self, request: web.Request) -> web.Response:
        self.corpus_calls.append(REMOVE)
        del self.corpora[(await request.json())["corpus_id"]]
        return web.json_response({"success": True, "message": "Removed."})

    def reply(self, sent: Sent) -> Behaviour | Body | Said:
        """Hold the last rows; a released row is asked for again."""
        return "hold" if self.holds and sent.row >= FIRST else Said(answer_of(sent))

    def release(self) -> None:
        """Answer all rows from now on."""
        self.holds = False
        self.wake_held()


class FailingToLoad(Speculating):
    """A server that has generated more than the run's answers hold when it fails to load a corpus.

    Rows from `FIRST` on are held until it is asked for a corpus, five more have very many output tokens, and
    the last five are held until the corpora were listed three times after the failure.
    """

    LONG, LAST, ALL = 2 * FIRST, 2 * FIRST + 5, 2 * FIRST + 10

    def __init__(self) -> None:
        super().__init__()
        self.has_failed = False
        self.lists_to_come, self.polls_to_come = 3, 5
        self.counted = asyncio.Event()
        """Set once the run has counted the long outputs: the load was asked for five times since then."""
        self.on_poll = self.note_poll

    def note_poll(self) -> None:
        """Count the polls since all rows were sent."""
        if self.sent and max(sent.row for sent in self.sent) == self.ALL - 1:
            self.polls_to_come -= 1
        if self.polls_to_come == 0:
            self.counted.set()

    def reply(self, sent: Sent) -> Behaviour | Body | Said:
        if sent.row < self.LONG:
            return super().reply(sent)
        if sent.row >= self.LAST:
            return "hold" if self.lists_to_come else Said(answer_of(sent))
        reply = answer(sent, answer_of(sent))
        reply["meta_info"]["completion_tokens"] = 1_000_000
        return Body(orjson.dumps(reply))

    async def _list(self, request: web.Request) -> web.Response:
        if self.has_failed and self.lists_to_come:
            self.lists_to_come -= 1
            self.wake_held()
        return await super()._list(request)

    async def _add(self, request: web.Request) -> web.Response:
        self.corpus_calls.append(ADD)
        if not self.has_failed:
            self.release()
            await self.counted.wait()
        self.has_failed = True
        assert request.transport is not None
        request.transport.abort()
        return web.Response()


def job_on(directory: Path, server: FakeSGLang) -> dict[str, Any]:
    """Return a job whose rows all run at once."""
    return job_of(directory, server, rows=ROWS, window=ROWS, bundle="off")


def test_answers_become_a_corpus_and_leave_with_the_run(tmp_path: Path) -> None:
    """The server gets the texts of finished answers; after the run it is as before."""
    documents = list[str]()
    with Speculating() as server:

        def note() -> None:
            documents.extend(*server.corpora.values())
            server.release()

        server.on_corpus = note
        job = job_on(tmp_path, server)
        run(job)
        assert server.corpora == {}
    rows_once(job, ROWS)
    assert len(documents) >= FIRST / 2
    assert set(documents) <= {answer_of(Sent("", f"{row}", {}, 1)) for row in range(ROWS)}


def test_a_server_that_was_started_again_gets_a_new_corpus(tmp_path: Path) -> None:
    """Its corpora ended with it, which their list tells."""
    names = list[str]()
    with Speculating() as server:

        def restart_once() -> None:
            names.extend(server.corpora)
            if len(names) > 1:
                server.release()
            else:
                server.corpora.clear()

        server.on_corpus = restart_once
        job = job_on(tmp_path, server)
        run(job)
    rows_once(job, ROWS)
    assert len(set(names)) == len(names) == 2


def test_a_failed_load_is_no_restart(tmp_path: Path) -> None:
    """A server that has generated enough itself by then is not asked again."""
    with FailingToLoad() as server:
        job = job_of(tmp_path, server, rows=server.ALL, window=FIRST, bundle="off", order="input")
        run(job)
        assert server.corpus_calls.count(ADD) == 1
    rows_once(job, server.ALL)


def test_a_refusal_ends_the_corpora_of_a_server(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """In one line; no row is lost."""
    with Speculating() as server:
        server.refusal = "External corpus is empty."
        job = job_on(tmp_path, server)
        with caplog.at_level(logging.WARNING):
            run(job)
        assert server.corpus_calls.count(ADD) == 1
    rows_once(job, ROWS)
    assert report_of(job)["rows_ok"] == ROWS
    lines = [record.getMessage() for record in caplog.records if "speculation" in record.getMessage()]
    refused = f"{server.url} refused a corpus for n-gram speculation, and gets no more answers"
    assert lines == [f"{refused}: External corpus is empty."]


def test_the_corpora_of_others_are_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """They would have to share the budget for drafts with ours."""
    with Speculating() as server:
        server.corpora["theirs"] = ["text"]
        server.on_poll = lambda: server.release() if LIST in server.corpus_calls else None
        job = job_on(tmp_path, server)
        with caplog.at_level(logging.WARNING):
            run(job)
        assert server.corpora == {"theirs": ["text"]}
        assert ADD not in server.corpus_calls
    assert "it has other corpora, with which the answers would share the budget" in caplog.text


@pytest.mark.parametrize(
    "arguments",
    [
        {"speculative_algorithm": None},
        {"speculative_ngram_external_sam_budget": 0},
        {"tp_size": 2},  # its ranks load a corpus at different times, and draft differently meanwhile
        {"pp_size": 2},
    ],
)
def test_servers_that_take_no_corpus_are_not_asked(arguments: dict[str, Any], tmp_path: Path) -> None:
    """Without a budget for it, or with ranks whose drafts could differ."""
    with Speculating(**arguments) as server:
        server.on_poll = lambda: server.release() if server.polled > 20 else None
        job = job_on(tmp_path, server)
        run(job)
        assert server.corpus_calls == []
    rows_once(job, ROWS)


LAUNCHED = """
import pathlib, re
FOLDER = pathlib.Path(os.environ["FOLDER"])
REFUSES = "REFUSES" in os.environ
REFUSAL = {"success": False, "message": "No more memory."}
SENTENCES = [" ".join(f"expression{13 * n + word}" for word in range(11)) + "." for n in range(20)]
print("The run tells starts by their places in the log.", flush=True)

def starts():
    return sorted(FOLDER.glob("corpus-*"))

class Handler(Server):
    known = {
        "/ready": {}, "/health": {}, "/model_info": {"model_path": "m"},
        "/server_info": {
            "version": "0.5.23", "max_running_requests": 64, "speculative_algorithm": "NGRAM",
            "speculative_ngram_external_sam_budget": 8,
        },
        "/list_external_corpora": {"success": True, "corpus_token_counts": {}},
        "/v1/loads": {"loads": [{"num_running_reqs": 1, "num_waiting_reqs": 0, "token_usage": 0.5}]},
    }
    polls = 0
    def do_GET(self):
        Handler.polls += self.path.startswith("/v1/loads")
        super().do_GET()
    def may_end(self):
        was_started_again = starts() not in ([], [FOLDER / f"corpus-{os.getpid()}"])
        return len(starts()) == 2 or (REFUSES and was_started_again and Handler.polls > 60)
    def asked(self, body):
        if self.path == "/add_external_corpus":
            (FOLDER / f"corpus-{os.getpid()}").touch()
            is_first = len(starts()) == 1
            if REFUSES or not is_first:
                self.reply(*((400, REFUSAL) if REFUSES else (200, {"success": True, "message": "Loaded."})))
            if is_first:
                os._exit(1)
            return
        row = int(re.findall("[0-9]+", body["text"])[0])
        while row >= 60 and not self.may_end():
            time.sleep(0.02)
        self.answer(" ".join(SENTENCES[(3 * row + 7 * part) % 20] for part in range(3)))
"""


@pytest.fixture
def _quick_restarts(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    """Start servers again at once."""
    for name, value in {"launch_poll": 0.02, "first_restart": 0.01, "first_retry": 0.01}.items():
        monkeypatch.setattr(TIMING, name, value)


@pytest.mark.usefixtures("_quick_restarts")
def test_a_server_that_the_run_starts_again_gets_a_new_corpus(tmp_path: Path) -> None:
    """A launched server that dies with its corpus gets one in its next start too; no row is lost."""
    server = launchable(tmp_path, LAUNCHED, FOLDER=str(tmp_path))
    job = job_of(tmp_path, server, rows=ROWS, window=ROWS, bundle="off")
    run(job)
    rows_once(job, ROWS)
    assert len([*tmp_path.glob("corpus-*")]) == 2


@pytest.mark.usefixtures("_quick_restarts")
def test_a_refusal_outlives_a_restart(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A launched server that refuses a corpus and dies is not asked again in its next start."""
    server = launchable(tmp_path, LAUNCHED, FOLDER=str(tmp_path), REFUSES="1")
    job = job_of(tmp_path, server, rows=ROWS, window=ROWS, bundle="off")
    with caplog.at_level(logging.WARNING):
        run(job)
    rows_once(job, ROWS)
    assert "refused a corpus for n-gram speculation, and gets no more answers: No more memory." in caplog.text
    assert len([*tmp_path.glob("corpus-*")]) == 1
