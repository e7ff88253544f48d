"""The calls of `batchrun serve` for operators: `/health`, `/ready` and `/metrics`."""

import contextlib
import json
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from batchrunner.serve.metrics_api import BatchTally
from batchrunner.serve.state import BATCHES, Record, State
from tests.conftest import eventually
from tests.e2e.test_serve import FAST, Server, requests_of, serving
from tests.e2e.test_serve_owners import KEYS, client_of, write_keys
from tests.support.fake_sglang import FakeSGLang

OPENMETRICS = "application/openmetrics-text; version=1.0.0"


def get(server: Server, path: str, **headers: str) -> httpx.Response:
    """Call the server without its API."""
    return httpx.get(server.url.removesuffix("/v1") + path, headers=headers, trust_env=False)


def metrics_of(server: Server, key: str = KEYS["root"]) -> dict[str, float]:
    """Return the values of all metrics, by name and values of the labels. Each metric has a help text."""
    reply = get(server, "/metrics", Authorization=f"Bearer {key}", Accept=OPENMETRICS)
    assert reply.headers["Content-Type"].startswith("application/openmetrics-text")
    values = {}
    for family in text_string_to_metric_families(reply.text):  # type: ignore[no-untyped-call]
        assert family.documentation
        assert family.type in {"counter", "gauge", "info"}
        for sample in family.samples:
            values[" ".join([sample.name, *(sample.labels[name] for name in sorted(sample.labels))])] = (
                sample.value
            )
    return values


def test_metrics_of_a_server(tmp_path: Path) -> None:
    """Batches, requests, tokens and files are counted by owner; no key and nothing uploaded is in them."""
    keys = write_keys(tmp_path / "keys.yaml", anna={"max_tokens_per_day": 5000})
    with serving(tmp_path / "state", "--keys", keys, *FAST) as server:
        anna = client_of(server, "anna")
        file = anna.files.create(file=("secret-name.jsonl", requests_of(4, max_tokens=5)), purpose="batch")
        batch = anna.ended(
            anna.batches.create(
                input_file_id=file.id,
                endpoint="/v1/chat/completions",
                completion_window="24h",
                metadata={"project": "secret-project"},
            )
        )
        usage = anna.batches.retrieve(batch.id).usage
        assert usage is not None
        values = metrics_of(server)
        expected = {
            "batchrunner_serve_batches anna completed": 1,
            "batchrunner_serve_requests_total completed anna": 4,
            "batchrunner_serve_requests_total failed anna": 0,
            "batchrunner_serve_tokens_total input anna": usage.input_tokens,
            "batchrunner_serve_tokens_total output anna": usage.output_tokens,
            "batchrunner_serve_day_tokens anna": usage.total_tokens,
            "batchrunner_serve_day_tokens_limit anna": 5000,
            "batchrunner_serve_files anna": 2,
            "batchrunner_serve_ready": 1,
        }
        assert {name: values[name] for name in expected} == expected
        text = get(server, "/metrics", Authorization=f"Bearer {KEYS['root']}").text
        for secret in (*KEYS.values(), "secret-", "request-", file.id, batch.id):
            assert secret not in text
        server.kill()
        server.start()
        values = metrics_of(server)
        assert values["batchrunner_serve_batches anna completed"] == 1
        # The counters begin at 0, because Prometheus cannot see an increase from a missing value.
        for name in KEYS:
            for labels in (f"requests_total completed {name}", f"tokens_total output {name}"):
                assert values[f"batchrunner_serve_{labels}"] == 0


def test_live_and_ready(tmp_path: Path) -> None:
    """A server lives while it handles calls; it is ready while records can be read and the engine answers."""
    state = tmp_path / "state"

    def problem() -> str | None:
        reply = get(server, "/ready")
        return None if reply.status_code == 200 else str(reply.json()["error"]["message"])

    with contextlib.ExitStack() as stack:
        with FakeSGLang() as engine:
            server = stack.enter_context(serving(state, engine=engine.url, key="secret-key"))
            assert problem() is None
            (state / "files").rename(state / "elsewhere")
            eventually(lambda: problem() == "The records of the server cannot be read.")
            assert metrics_of(server, "secret-key")["batchrunner_serve_ready"] == 0
            (state / "elsewhere").rename(state / "files")
            eventually(lambda: problem() is None)
        eventually(lambda: problem() == "The engine does not answer.")
        assert get(server, "/ready").status_code == 503
        assert get(server, "/health").json() == {"status": "ok"}


class CountedReads(dict[str, Any]):
    """Records that count how often one is read."""

    reads = 0

    def __getitem__(self, name: str) -> Any:
        self.reads += 1
        return super().__getitem__(name)


def batch_of(status: str, completed: int = 0) -> Record:
    """Return a record of a batch with ten requests."""
    counts = {"total": 10, "completed": completed, "failed": 0}
    return {"status": status, "request_counts": counts, "usage": None, "owner": "anna"}


def test_a_scrape_reads_only_batches_that_change(tmp_path: Path) -> None:
    """However many batches have ended, a scrape reads the unfinished and the new ones."""
    state = State(tmp_path)
    state.records[BATCHES] = CountedReads({f"{number:05}": batch_of("completed") for number in range(5000)})
    batches = state.records[BATCHES]
    batches["05000"] = batch_of("in_progress")
    tally = BatchTally(state)
    batches.reads = 0  # type: ignore[attr-defined]
    batches["05001"] = batch_of("validating")
    batches["05002"] = batch_of("failed")
    assert len(tally.update()) == 2
    assert batches.reads < 10  # type: ignore[attr-defined]
    assert tally.ended_batches == {("anna", "completed"): 5000, ("anna", "failed"): 1}


def test_requests_of_an_earlier_process_do_not_count(tmp_path: Path) -> None:
    """A batch that resumes begins with the requests that were done before, which the counter skips."""
    (tmp_path / "batches").mkdir()
    record = json.dumps({**batch_of("in_progress", completed=0), "id": "batch_" + "0" * 48})
    (tmp_path / "batches" / ("batch_" + "0" * 48 + ".json")).write_text(record)
    state = State(tmp_path)
    tally = BatchTally(state)
    (batch,) = tally.update()
    for completed, ended in ((6, 0), (8, 2), (9, 3)):
        batch["request_counts"] = {"total": 10, "completed": completed, "failed": 0}
        tally.update()
        assert tally.ended_requests["anna", "completed"] == ended
    batch["status"] = "completed"
    assert tally.update() == []
    assert tally.ended_batches == {("anna", "completed"): 1}
