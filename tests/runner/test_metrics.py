"""`--metrics`: the state of a run for Prometheus."""

import socket
import urllib.request
from pathlib import Path

from prometheus_client.openmetrics.parser import text_string_to_metric_families

from tests.conftest import batchrun, eventually, job_of, started, write_job
from tests.support.fake_sglang import Behaviour, FakeSGLang, Sent


def figures_of(url: str) -> dict[str, float]:
    """Return the figures at an address, by name; those of schedulers by name and replica."""
    request = urllib.request.Request(url, headers={"Accept": "application/openmetrics-text; version=1.0.0"})
    with urllib.request.urlopen(request, timeout=10) as reply:
        families = [*text_string_to_metric_families(reply.read().decode())]  # type: ignore[no-untyped-call]
    figures = {}
    for family in families:
        for sample in family.samples:
            labels = [sample.labels[name] for name in ("outcome", "replica") if name in sample.labels]
            figures[" ".join([sample.name, *labels])] = sample.value
    return figures


def test_metrics_of_a_run(tmp_path: Path) -> None:
    """Rows, tokens, failures and the load of each replica can be read while the run works."""

    def script(sent: Sent) -> Behaviour:
        if sent.row == 0:
            return "too long"
        return "answer" if sent.row in {1, 2} else "hold"

    with FakeSGLang() as one, FakeSGLang() as two:
        one.script = two.script = script
        job = job_of(tmp_path, [one, two], rows=8, window=8, limits={"max_failed_rows": 1})
        with started(write_job(job, tmp_path), "--metrics", "localhost:0") as running:
            running.wait_for_line("metrics: http")
            url = running.lines[-1].partition("metrics: ")[2].strip()
            eventually(lambda: figures_of(url).get("batchrunner_rows_total ok") == 2)
            figures = figures_of(url)
            assert figures["batchrunner_rows_total failed"] == 1
            assert figures["batchrunner_rows_selected"] == 8
            assert figures["batchrunner_requests_in_flight"] == 5
            assert figures["batchrunner_output_tokens_total"] > 0
            assert figures["batchrunner_run_info"] == 1
            for server in (one, two):
                for name in ("running_requests", "queued_requests", "token_usage_ratio"):
                    assert f"batchrunner_{name} {server.url}" in figures, figures


def test_addresses_for_metrics(tmp_path: Path, server: FakeSGLang) -> None:
    """An address that is malformed or not free ends the command before a request is sent."""
    file = write_job(job_of(tmp_path, server), tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = f"127.0.0.1:{other.getsockname()[1]}"
        problems = {taken: "cannot listen: Address already in use", ":http": "not an address"}
        for address, problem in problems.items():
            done = batchrun("run", file, "--metrics", address)
            assert f"--metrics {address}: {problem}" in done.stderr
            assert done.exit_code == 2
    assert server.sent == []
