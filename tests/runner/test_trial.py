"""What is launched for a trial, and what its log tells."""

from pathlib import Path

import pytest

from batchrunner.core.errors import JobError
from batchrunner.job.load import load_job
from batchrunner.runner.trial import (
    logged_passes,
    output_rate,
    output_tokens,
    server_facts,
    signs_of_passes,
)
from batchrunner.runner.tune import engine_to_tune
from tests.conftest import job_of
from tests.support.tuning_lab import LOG


def test_what_is_launched_for_a_job(tmp_path: Path) -> None:
    """One replica is tuned, on the first cards; one that is not launched is not tuned."""
    args = {"mem-fraction-static": 0.8}
    fleet = {"kind": "server", "replicas": 2, "model": "org/name", "tp": 2, "args": args, "env": {"A": "b"}}
    replica = engine_to_tune(load_job(job_of(tmp_path, fleet)))
    assert replica.replicas == 1
    assert replica.args == {**args, "tp-size": 2}
    assert replica.env == {"A": "b"}
    found = {"kind": "gateway", "url": "http://127.0.0.1:9"}
    with pytest.raises(
        JobError,
        match=r"engine\.kind gateway: tuning restarts SGLang, but this job starts no server",
    ):
        engine_to_tune(load_job(job_of(tmp_path, found)))


def test_the_log_tells_the_rest() -> None:
    """Passes, graphs and the card's spare memory are read from the lines of SGLang's own guides."""
    facts = server_facts(LOG.splitlines(), {"tp-size": 2, "max-running-requests": 8, "api-key": "secret"})
    assert facts.arguments == {
        "mem_fraction_static": 0.83, "attention_backend": "fa3", "tp_size": 1, "max_running_requests": 8,
    }  # fmt: skip
    assert facts.ready
    assert (facts.ready.gpu_gb, facts.chunk, facts.weights_gb) == (13.5, 8192, 15.0)
    assert facts.model == "LlamaForCausalLM"
    assert output_tokens(logged_passes(LOG.splitlines())) == 10 * (233 + 300) + 2
    work = signs_of_passes(logged_passes(LOG.splitlines()), tokens=4200)
    assert work == {
        "tokens_per_pass": 200.0, "prefill_per_pass": 800.0, "decodes_per_prefill": 20.0,
        "graph_off_share": 0.5,
    }  # fmt: skip
    rates = [line for line in LOG.splitlines() if "Decode" in line] * 3
    faster = [line.replace("4594.01", "9188.02") for line in rates]
    idle = rates[0].replace("4594.01", "4.20")  # before the first rows there were none
    assert output_rate(logged_passes([idle, *rates])) == 4594.01
    by_time = output_rate(logged_passes([idle, *faster, *rates]))
    assert by_time == pytest.approx(4594.01 * 4 / 3, rel=0.01)
