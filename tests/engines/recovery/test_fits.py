"""Whether weights fit into the memory of a card or a machine."""

from __future__ import annotations

import json
import os
import shutil
from typing import TYPE_CHECKING, Any

import pytest

from batchrunner.core.timing import TIMING
from tests.conftest import batchrun, job_of, write_job
from tests.support.hungry_engine import hungry

if TYPE_CHECKING:
    from pathlib import Path

    from typer.testing import Result


@pytest.fixture(autouse=True)
def _quick_restarts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Restarts without the pauses that are for real engines; nothing learned from another test."""
    monkeypatch.setattr(TIMING, "first_restart", 0.01)
    monkeypatch.setattr(TIMING, "first_retry", 0.01)
    monkeypatch.setattr(TIMING, "launch_poll", 0.02)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def run(job: dict[str, Any], directory: Path) -> Result:
    return batchrun(write_job(job, directory), "--fresh")


def with_weights(directory: Path, total_bytes: float, **config: Any) -> dict[str, Any]:
    """Return an engine whose model says that it has so many bytes of weights."""
    engine = hungry(directory, "")
    model = directory / "model"
    index = {"metadata": {"total_size": total_bytes}, "weight_map": {}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    (model / "config.json").write_text(json.dumps({"torch_dtype": "bfloat16", **config}))
    return engine


def give_card(directory: Path, monkeypatch: pytest.MonkeyPatch, mib: int) -> None:
    """Put an `nvidia-smi` first on the path that tells of one card."""
    tool = directory / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    tool.write_text(f"#!/bin/sh\necho 'NVIDIA H100 80GB HBM3, {mib}'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}{os.pathsep}{os.environ['PATH']}")


@pytest.mark.parametrize(
    ("args", "config", "fits"),
    [
        ({}, {}, False),
        ({"tp-size": 2}, {}, True),
        ({"pipeline-parallel-size": 2}, {}, True),
        ({"quantization": "fp8"}, {}, True),
        ({"quantization": "fp8"}, {"quantization_config": {"quant_method": "fp8"}}, False),  # it is already
        (
            {"quantization": "fp8"},
            {"quantization_config": {"quant_method": "fp8"}, "text_config": {"torch_dtype": "bfloat16"}},
            False,
        ),
        ({"dtype": "float32", "tp-size": 2}, {}, False),
        ({}, {"torch_dtype": "float32"}, True),  # SGLang loads it in 16 bits
        ({"dtype": "float32"}, {"torch_dtype": "float32"}, False),
        ({"cpu-offload-gb": 100}, {}, True),
        ({"quantization": "bitsandbytes"}, {}, True),  # nobody knows: the server is asked
    ],
)
def test_weights_that_do_not_fit_are_refused_at_once(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    args: dict[str, Any],
    config: dict[str, Any],
    *,
    fits: bool,
) -> None:
    """Before the first launch, with the arithmetic and what would help; what is not certain is launched."""
    give_card(tmp_path, monkeypatch, 81559)
    engine = {**with_weights(tmp_path, 141.1e9, **config), "args": args}
    result = run(job_of(tmp_path, engine, rows=5), tmp_path)
    assert (result.exit_code == 0) == fits, result.stderr
    if not fits:
        assert result.exit_code == 2
        assert not (tmp_path / "starts").exists()
        assert "its weights do not fit: " in result.stderr
        assert "and NVIDIA H100 80GB HBM3 has 79.6 GiB: set tp-size to " in result.stderr


@pytest.mark.parametrize("revision", [None, "pinned", "0123abc"])
def test_weights_in_the_hubs_cache_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, revision: str | None
) -> None:
    """A hub's name is looked up in Hugging Face's cache: the snapshot of `main`, a branch or a commit."""
    give_card(tmp_path, monkeypatch, 81559)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    engine = with_weights(tmp_path, 141.1e9)
    repository = tmp_path / "hf" / "hub" / "models--org--name"
    (repository / "refs").mkdir(parents=True)
    for name in ("main", "pinned"):
        (repository / "refs" / name).write_text("0123abc" if name == (revision or "main") else "456def")
    shutil.copytree(tmp_path / "model", repository / "snapshots" / "0123abc")
    engine |= {"model": "org/name", "args": {"revision": revision} if revision else {}}
    result = run(job_of(tmp_path, engine, rows=5), tmp_path)
    assert result.exit_code == 2
    assert "its weights do not fit: 131.4 GiB" in result.stderr


def test_weights_without_files_are_counted_by_their_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `--load-format dummy` there are no files: config.json's parameters are counted (Llama 3 70B)."""
    give_card(tmp_path, monkeypatch, 81559)
    llama = {
        "hidden_size": 8192, "num_hidden_layers": 80, "vocab_size": 128256, "num_attention_heads": 64,
        "num_key_value_heads": 8, "intermediate_size": 28672, "torch_dtype": "bfloat16",
    }  # fmt: skip
    engine = hungry(tmp_path, "")
    (tmp_path / "model" / "config.json").write_text(json.dumps(llama))
    result = run(job_of(tmp_path, engine, rows=5), tmp_path)
    assert result.exit_code == 2
    assert "131.4 GiB (70.6 billion parameters by config.json) over 1 rank is 131.4 GiB each" in result.stderr
    assert "set tp-size to 2" in result.stderr


def test_weights_are_measured_against_a_machine_without_a_card(tmp_path: Path) -> None:
    """On a CPU the machine's memory counts, its cgroup's limit included."""
    engine = {**with_weights(tmp_path, 1e15), "device": "cpu"}
    result = run(job_of(tmp_path, engine, rows=5), tmp_path)
    assert result.exit_code == 2
    assert "this machine has" in result.stderr
    shutil.rmtree(tmp_path / "run", ignore_errors=True)
