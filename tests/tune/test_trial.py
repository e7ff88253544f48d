"""What is launched for a trial, and what its log tells."""

from __future__ import annotations

from pathlib import Path

import pytest

from batchrunner.core.errors import JobError
from batchrunner.engines.simulation.replica import PassWork
from batchrunner.job.load import load_job
from batchrunner.tune.trial import (
    LOG_INTERVAL,
    logged_passes,
    output_rate,
    signs_at_start,
    signs_of_passes,
    spans_of,
)
from batchrunner.tune.tuner import engine_to_tune
from tests.conftest import job_of
from tests.support.tuning_lab import LOG


def test_what_is_launched_for_a_job(tmp_path: Path) -> None:
    """One replica of a gateway is tuned, on the first cards; one that is not launched is not tuned."""
    args = {"mem-fraction-static": 0.8}
    gateway = {"kind": "gateway", "model": "org/name", "tp": 2, "args": args, "env": {"A": "b"}}
    replica = engine_to_tune(load_job(job_of(tmp_path, gateway)))
    assert replica.args == {**args, "tp-size": 2}
    assert replica.env == {"A": "b"}
    found = {"kind": "gateway", "url": "http://127.0.0.1:9"}
    with pytest.raises(
        JobError,
        match=r"engine\.kind gateway: tuning starts SGLang with other flags, and this job starts none",
    ):
        engine_to_tune(load_job(job_of(tmp_path, found)))


def test_the_log_tells_the_rest() -> None:
    """Passes, graphs and the card's spare memory are read from the lines of SGLang's own guides."""
    assert signs_at_start(LOG.splitlines()) == {
        "spare_gb": 13.5,
        "prefill_limit": 8192,
        "mem_fraction": 0.83,
        "attention_backend": "fa3",
        "model": "LlamaForCausalLM",
    }
    work = signs_of_passes(logged_passes(LOG.splitlines()), tokens=4200)
    assert work == {"tokens_per_pass": 200.0, "prefill_per_pass": 800.0, "graph_off_share": 0.5}
    rates = [line for line in LOG.splitlines() if "Decode" in line] * 3
    several = signs_of_passes(logged_passes(rates), tokens=0)
    assert (several["running"], several["usage"]) == (266.5, 0.82)
    faster = [line.replace("4594.01", "9188.02") for line in rates]
    idle = rates[0].replace("4594.01", "4.20")  # before the first rows there were none
    assert output_rate(logged_passes([idle, *rates])) == 4594.01
    by_time = output_rate(logged_passes([idle, *faster, *rates]))
    assert by_time == pytest.approx(4594.01 * 4 / 3, rel=0.01)
    assert output_rate(logged_passes(rates[:2])) is None
    on_cpu = signs_of_passes(logged_passes(LOG.replace("cuda graph", "cpu graph").splitlines()), tokens=0)
    assert on_cpu["graph_off_share"] is None


def test_what_passes_were_and_took() -> None:
    """Between two lines of decode passes lie ten of them and the prefills; the throughput tells the time."""
    prefill, decode = ([line for line in LOG.splitlines() if word in line] for word in ("Prefill", "Decode"))
    (span,) = spans_of(logged_passes([decode[0], prefill[0], prefill[0], decode[0]]))
    assert span.work == PassWork(LOG_INTERVAL + 2, 2330 + 4, 3709590, 1600, 2, 2330)
    assert span.seconds == pytest.approx(2330 / 4594.01, abs=1e-3)
    assert spans_of(logged_passes(prefill)) == ()
    many = spans_of(logged_passes(decode * 300))
    assert len(many) <= 80
    assert sum(span.work.passes for span in many) == 599 * LOG_INTERVAL
    other = [line.replace("17:18:05]", "17:18:05 DP1]") for line in decode]
    assert spans_of(logged_passes([*decode, *other])) == ()
