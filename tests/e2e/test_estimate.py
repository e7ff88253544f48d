"""`batchrun estimate`: a sample is answered and kept, and what it tells of the rest is true."""

import json
from pathlib import Path
from typing import Any

import pytest

import batchrunner
from batchrunner.core.errors import BatchrunError, JobError
from batchrunner.forecast import estimate
from batchrunner.output.run_dir import open_run
from batchrunner.output.task_lock import hold_task
from tests.conftest import (
    INSTANT,
    batchrun,
    job_of,
    log_of,
    printed,
    report_of,
    results_of,
    write_job,
    write_rows,
)
from tests.support.fake_sglang import FakeSGLang
from tests.support.launchable import with_slots

LOOSE = 1.4
"""How much slower a simulated engine may be on a machine that is busy with other tests."""
SIMULATED = {"kind": "simulated", "step_s": 0.004, "max_running": 32, "max_total_tokens": 40_000}


def test_the_sample_tells_the_rest_and_is_not_sent_again(tmp_path: Path) -> None:
    """The time is that of the run that follows; each row is answered once; a second estimate asks nothing."""
    words = [f"{number} " + "word " * (number * 7 % 60) for number in range(1000)]
    write_rows(tmp_path / "input.parquet", 1000, text=words)
    job = job_of(tmp_path, SIMULATED, sampling={"max_new_tokens": 200, "temperature": 0.5})
    path = write_job(job, tmp_path)
    first = printed("estimate", path, "--price", "3")
    sampled = results_of(job)
    assert 30 <= len(sampled) == first["rows_sampled"] <= 60
    assert first["rows_to_do"] == 1000 - len(sampled)
    rows = sorted(row["row"] for row in sampled)
    assert rows[0] < 100  # all over the input
    assert rows[-1] > 900
    again = printed("estimate", path, "--price", "3")
    assert len(results_of(job)) == len(sampled)
    assert again["seconds"]["median"] == pytest.approx(first["seconds"]["median"], rel=0.05)
    assert again["cost"]["high"] == pytest.approx(3 * again["gpu_hours"]["high"], rel=0.02)
    eight = printed("estimate", path, "--replicas", "4", "--workers", "2")
    assert eight["seconds"]["median"] < first["seconds"]["median"] / 4
    told = batchrun("estimate", path)
    assert "limited by: decode" in told.stdout
    state = batchrun("status", job["output"]["path"]).stdout
    assert state.endswith(
        "not running: the sample of an estimate is done; a run will not send the sampled rows again\n"
    )

    assert batchrun(path).exit_code == 0
    report = report_of(job)
    samples = log_of(job, "sample")
    assert any(each["time_left_s"] and each["rows_done"] < len(sampled) + 32 for each in samples)
    assert report["rows_ok"] == len({row["row"] for row in results_of(job)}) == 1000
    assert first["seconds"]["low"] / LOOSE < report["wall_s"] < first["seconds"]["high"] * LOOSE
    left = [row["completion_tokens"] for row in results_of(job) if row["row"] not in rows]
    assert first["tokens"]["output"]["low"] * 0.9 < sum(left) < first["tokens"]["output"]["high"] * 1.1
    assert batchrun("estimate", path).exit_code == 2  # nothing is left to do


def test_a_server_that_tells_no_load(server: FakeSGLang, tmp_path: Path) -> None:
    """The rows that the sample takes are the only ones asked; one that cannot be sent is counted."""
    job = job_of(tmp_path, server)
    write_rows(tmp_path / "input.parquet", 200, text=["", *(f"text {at}" for at in range(199))])
    found = batchrunner.estimate(job, rows=20)
    assert found.rows_not_sendable == 1
    assert len({row["row"] for row in results_of(job)}) == found.rows_sampled == 20
    assert 0 < found.seconds.low <= found.seconds.median <= found.seconds.high
    found = batchrunner.estimate(job)  # more rows are wanted than there are answers
    assert (found.rows_sampled, found.rows_to_do) == (30, 150)
    assert batchrunner.estimate(job, workers=4).passes == found.passes  # the server is the same
    assert len(results_of(job)) == 50


def test_the_window_of_the_sample(tmp_path: Path) -> None:
    """It is the estimate's own, and is not called the job's."""
    result = batchrun("estimate", write_job(job_of(tmp_path, INSTANT), tmp_path))
    assert "window 5 (for the sample)" in result.stderr


def test_few_rows_can_be_sent(tmp_path: Path) -> None:
    """What the sample has taken of them is not to do."""
    job = job_of(tmp_path, INSTANT, sampling={"max_new_tokens": 20})
    write_rows(tmp_path / "input.parquet", 200, text=[None if at % 5 else f"text {at}" for at in range(200)])
    found = batchrunner.estimate(job)
    assert (found.rows_sampled, found.rows_not_sendable) == (30, 160)
    assert 0 < found.tokens["output"].median <= 20 * 10


def test_a_part_of_the_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of the sample tell how many tokens the others have, also where these are read alone."""
    monkeypatch.setattr(estimate, "BLOCKS", 2)
    monkeypatch.setattr(estimate, "BLOCK_ROWS", 50)
    job = job_of(tmp_path, INSTANT, input={"limit": 300}, sampling={"max_new_tokens": 2})
    write_rows(tmp_path / "input.parquet", 600, text=["a, b; " * 30 + f"{at}" for at in range(600)])
    assert batchrunner.estimate(job).rows_read == 100
    batchrunner.run(job)
    more = batchrunner.estimate(job, overrides=["input.limit=600"])
    assert (more.rows_to_do, more.rows_read, more.rows_sampled) == (300, 130, 30)
    prompt = sum(row["prompt_tokens"] for row in results_of(job))
    assert more.tokens["prompt"].median == pytest.approx(prompt, rel=0.05)


def test_a_range_without_an_engine(tmp_path: Path) -> None:
    """It is told as one, and nothing is sent; an unknown card is one clear line."""
    model = tmp_path / "model"
    model.mkdir()
    shape = {"num_hidden_layers": 32, "num_attention_heads": 32, "hidden_size": 4096, "dtype": "bfloat16"}
    (model / "config.json").write_text(json.dumps(shape))
    with (model / "model.safetensors").open("wb") as weights:
        weights.truncate(16_000_000_000)  # a hole in a file, which takes no disk
    job = job_of(tmp_path, {"kind": "server", "model": str(model)}, sampling={"max_new_tokens": 100})
    path = write_job(job, tmp_path)
    found = printed("estimate", path, "--cold", "H100", "--price", "2")
    assert found["rows_sampled"] == 0
    assert found["seconds"]["low"] < found["seconds"]["median"] < found["seconds"]["high"]
    assert found["tokens"]["output"] == {"median": 300.0, "low": 100.0, "high": 1000.0}
    assert "a range from data sheets" in batchrun("estimate", path, "--cold", "h100").stdout
    samples = printed("estimate", path, "--cold", "H100", "--set", "sampling.n=4")
    assert samples["tokens"]["output"] == {"median": 1200.0, "low": 400.0, "high": 4000.0}
    assert samples["tokens"]["prompt"] == found["tokens"]["prompt"]
    assert samples["seconds"]["median"] > found["seconds"]["median"]
    four = printed("estimate", path, "--cold", "H100", "--set", "engine.tp=2", "--replicas", "2")
    assert four["seconds"]["median"] < found["seconds"]["median"]
    assert four["gpu_hours"]["median"] == pytest.approx(4 / 3600 * four["seconds"]["median"], rel=0.05)
    exact = printed("estimate", path, "--cold", "H100", "--set", "sampling.ignore_eos=true")
    assert exact["tokens"]["output"] == {"median": 1000.0, "low": 1000.0, "high": 1000.0}
    unknown = batchrun("estimate", path, "--cold", "H1000")
    assert unknown.exit_code == 2
    assert "H1000: unknown GPU: give one of A100, H100" in unknown.stderr
    elsewhere = batchrun("estimate", path, "--cold", "H100", "--set", "engine.model=somebody/else")
    assert "no model files on this machine (somebody/else)" in elsewhere.stderr
    assert not (tmp_path / "run" / "run.json").exists()


def test_rows_that_are_not_to_do(tmp_path: Path) -> None:
    """They are those that another run has answered, that fail, and that the sample itself has done."""
    write_rows(
        tmp_path / "input.parquet", 120, text=["word " * (9000 * (at % 2)) + f"{at}" for at in range(120)]
    )
    job = job_of(tmp_path, SIMULATED, sampling={"max_new_tokens": 20, "temperature": 0.5})
    half = batchrunner.estimate(job)  # of the rows that are too long
    assert half.rows_sampled == 15
    assert half.tokens["output"].high < 20 * (120 - 15) * 0.7
    assert "15 of 30 rows of the sample failed" in half.why
    assert batchrunner.estimate(job).rows_to_do == half.rows_to_do == 90
    assert len(results_of(job)) == 30
    batchrunner.run({**job, "limits": {"max_failed_rows": 120}})
    again = job_of(tmp_path / "again", SIMULATED, sampling=job["sampling"])
    again["input"] = job["input"]
    again["output"]["reuse"] = job["output"]["path"]
    with pytest.raises(BatchrunError, match="only 0 of 30 rows of the sample got an answer, too few"):
        batchrunner.estimate(again)  # those that failed are asked again
    assert report_of(again)["rows_ok"] == 60
    again["input"] = {**job["input"], "filter": "id % 2 == 0"}
    again["output"]["path"] += "-all"
    with pytest.raises(JobError, match="all rows are done"):
        batchrunner.estimate(again)
    few = batchrunner.estimate(
        {**again, "output": {"path": str(tmp_path / "few")}, "input": {**again["input"], "limit": 9}}
    )
    assert (few.rows_sampled, few.rows_to_do, few.seconds.high, few.tokens["prompt"].median) == (9, 0, 0, 0)


@pytest.mark.parametrize(
    "wrong", [{"rows": 1}, {"price": float("nan")}, {"price": -1.0}, {"workers": 0}, {"replicas": 0}]
)
def test_numbers_that_cannot_be(wrong: dict[str, Any], tmp_path: Path) -> None:
    """They are refused in one line, before anything is read."""
    name, value = next(iter(wrong.items()))
    with pytest.raises(JobError, match=rf"^{name} {value}: give a number of at least \d$"):
        batchrunner.estimate(job_of(tmp_path, SIMULATED), **wrong)
    told = batchrun("estimate", write_job(job_of(tmp_path, SIMULATED), tmp_path), f"--{name}", value)
    assert (told.exit_code, f"{name} {value}" in told.stderr) == (2, True)


def test_no_engine_starts_beside_a_run(tmp_path: Path) -> None:
    """An estimate waits for no run that goes on; more replicas, also by the job, are told without a start.

    The variables of the engine are not written down.
    """
    job = job_of(tmp_path, with_slots(tmp_path, TOKEN="sk-0123456789"), rows=100)
    with (
        hold_task(open_run(job["output"]["path"])),
        pytest.raises(BatchrunError, match="is writing this run"),
    ):
        batchrunner.estimate(job)
    assert not (tmp_path / "starts").exists()
    one = batchrunner.estimate(job)
    two = batchrunner.estimate(job, overrides=["engine.replicas=2"])
    assert (tmp_path / "starts").read_text() == "4\n"
    assert two == batchrunner.estimate(job, replicas=2)
    written = (path for path in Path(job["output"]["path"]).rglob("*") if path.is_file())
    assert not any(b"sk-0123456789" in path.read_bytes() for path in written)
    assert two.seconds.median < one.seconds.median
    assert two.gpu_hours.median == pytest.approx(2 / 3600 * two.seconds.median, rel=0.01)


def test_places_that_memory_does_not_allow_make_nothing_faster(tmp_path: Path) -> None:
    """A hybrid model whose state pool holds 4 requests runs no more, whatever the job asks for."""
    job = job_of(tmp_path, with_slots(tmp_path, STATES="4"), rows=100)
    job["engine"]["args"] = {**job["engine"].get("args", {}), "max-running-requests": 64}
    many = batchrunner.estimate(job)
    few = batchrunner.estimate(job, overrides=["engine.args.max-running-requests=4"])
    assert (tmp_path / "starts").read_text() == "4\n"
    assert many.seconds.median == pytest.approx(few.seconds.median, rel=0.01)


def test_rows_that_are_all_refused(server: FakeSGLang, tmp_path: Path) -> None:
    job = job_of(tmp_path, server, prompt={"text": "nowhere"})
    with pytest.raises(BatchrunError):
        batchrunner.estimate(job)
    with pytest.raises(JobError):
        batchrunner.estimate({**job, "prompt": {}})
