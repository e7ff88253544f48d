"""`--metrics-port` serves the state of a run to Prometheus, and the dashboard asks for nothing else."""

from __future__ import annotations

import re
import socket
import urllib.request
from typing import TYPE_CHECKING

import pytest
from prometheus_client.parser import text_string_to_metric_families

from batchrunner.core.types import MetricsAddress
from batchrunner.runner.metrics import PREFIX, SCHEDULER, metrics_server
from tests.conftest import ROOT, batchrun, eventually, job_of, results_of, started, write_job

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.fake_sglang import FakeSGLang

ADDRESS = re.compile(r"metrics: (http://\S+)")
Values = dict[tuple[str, str], float]
"""Values by the name of a sample and its scheduler, "" for the whole run."""


def read(url: str) -> Values:
    with urllib.request.urlopen(url) as answer:
        families = text_string_to_metric_families(answer.read().decode())
    return {
        (sample.name, sample.labels.get("scheduler", "")): sample.value
        for family in families
        for sample in family.samples
    }


def test_a_run_at_work(tmp_path: Path, server: FakeSGLang) -> None:
    """While rows are at the engine the page says what ended, failed, is left and in flight, by scheduler."""

    held = [f"row {number}" for number in range(8, 12)]
    server.script = lambda sent: (
        "bad schema" if sent.prompt == "row 3" else "hold" if sent.prompt in held else "answer"
    )
    job = job_of(tmp_path, server, rows=12, window=4, limits={"max_failed_rows": 1})
    with started(write_job(job, tmp_path), "--metrics-port", "0") as process:
        process.wait_for_line("metrics: http://127.0.0.1:")
        found = ADDRESS.search(process.lines[-1])
        assert found
        url = found[1]
        told = ("batchrunner_rows_done", ""), ("batchrunner_in_flight", "")
        eventually(lambda: [read(url).get(name) for name in told] == [8, 4])
        values = read(url)
        expected = {
            "running": 1, "rows_total": 12, "rows_failed": 1, "window": 4, "resting": 0, "retractions": 0,
            "output_tokens": 7 * 5,
        }  # fmt: skip
        assert {name: values[PREFIX + name, ""] for name in expected} == expected
        cached, prompt = (values[f"batchrunner_{name}", ""] for name in ("cached_tokens", "prompt_tokens"))
        assert 0 < cached <= prompt
        for name in ("running", "queue", "token_usage"):
            assert (SCHEDULER + name, server.url) in values
        dashboard = (ROOT / "docs" / "assets" / "grafana-dashboard.json").read_text()
        asked = set(re.findall(r"batchrunner_\w+", dashboard)) - {f"{SCHEDULER}window"}  # it is fixed
        assert asked <= {name for name, _ in values}
        server.answer_held()
        assert process.end() == 0
    assert len(results_of(job)) == 12


STATE = {
    "rows_per_request": 2.5,
    "time_left_s": None,
    "signals": [
        {"scheduler": "http://a:30000", "queue": 20, "window": 32, "retractions": 4, "corner": "good"},
        {"scheduler": "http://a:30001", "queue": 21},
    ],
    "bands": {"http://a:30000": (100, 2000)},
}


def test_each_figure_of_the_display_is_there(caplog: pytest.LogCaptureFixture) -> None:
    """What is not known is absent and not 0."""
    with caplog.at_level("INFO", "batchrunner"), metrics_server(MetricsAddress(0)) as page:
        url = caplog.messages[-1].removeprefix("metrics: ")
        before = read(url)
        page.show(STATE)
        values = read(url)
        page.close()
        after = read(url)
    assert before == {("batchrunner_running", ""): 0}
    assert (values["batchrunner_running", ""], after["batchrunner_running", ""]) == (1, 0)
    assert values["batchrunner_rows_per_request", ""] == 2.5
    first, second = "http://a:30000", "http://a:30001"
    assert values["batchrunner_scheduler_queue", second] == 21
    assert values["batchrunner_scheduler_queue_high", first] == 2000
    assert values["batchrunner_scheduler_retractions", first] == 4
    assert ("batchrunner_scheduler_window", second) not in values


def test_a_port_in_use(tmp_path: Path) -> None:
    """Another program has it: one line says so and what to do, and no row was sent."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        refused = batchrun(write_job(job_of(tmp_path), tmp_path), "--metrics-port", port)
    assert refused.exit_code == 2
    assert f"--metrics-port {port}: cannot listen at 127.0.0.1: Address already in use" in refused.stderr
    assert not (tmp_path / "run").exists()
