"""The recipes of docs/how-to/track-experiments.md, run in the offline modes of the two packages."""

import threading
from pathlib import Path
from typing import Any

import pytest
import yaml

import batchrunner
from tests.conftest import INSTANT, ROOT, job_of
from tests.support.blocks import blocks_of

PAGE = ROOT / "docs" / "how-to" / "track-experiments.md"


def run_recipe(package: str, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the page's code for a package in a directory with a job of ten rows."""
    monkeypatch.chdir(directory)
    job = job_of(directory, INSTANT)
    (directory / "job.yaml").write_text(yaml.safe_dump(job))
    blocks = [block.text for block in blocks_of(PAGE) if block.language == "python"]
    figures, recipe = blocks[0], next(block for block in blocks if f"import {package}\n" in block)
    namespace: dict[str, Any] = {}
    exec(figures, namespace)
    exec(recipe, namespace)


@pytest.mark.filterwarnings("ignore")  # of MLflow and of SQLAlchemy below it
def test_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One run of MLflow has the figures of all rows, the parameters and the job."""
    mlflow = pytest.importorskip("mlflow", reason="mlflow is not installed")
    run_recipe("mlflow", tmp_path, monkeypatch)
    (run,) = mlflow.MlflowClient("sqlite:///mlflow.db").search_runs(["0"])
    assert run.info.status == "FINISHED"
    assert run.data.params == {"model": "simulated", "simulated": "True"}
    assert (run.data.metrics["rows_done"], run.data.metrics["rows_ok"]) == (10, 10)


@pytest.mark.filterwarnings("ignore")
def test_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run is written below the directory `wandb`, with the job as its configuration."""
    wandb = pytest.importorskip("wandb", reason="wandb is not installed")
    runs: list[Any] = []
    figures: list[dict[str, Any]] = []
    init = wandb.init

    def recorded_init(**options: Any) -> Any:
        runs.append(init(**options))
        log = runs[-1].log

        def recorded_log(each: dict[str, Any]) -> None:
            figures.append(each)
            log(each)

        runs[-1].log = recorded_log
        return runs[-1]

    monkeypatch.setattr(wandb, "init", recorded_init)
    run_recipe("wandb", tmp_path, monkeypatch)
    (run,) = runs
    assert figures[-1]["rows_done"] == 10
    assert run.config["output"] == {"path": str(tmp_path / "run")}
    assert [*tmp_path.glob("wandb/offline-run-*/*.wandb")]


def test_progress_comes_in_another_thread(tmp_path: Path) -> None:
    """The recipe for MLflow gives the ID of its run, because on_progress has not the program's thread."""
    threads = set[threading.Thread]()
    batchrunner.run(job_of(tmp_path, INSTANT), on_progress=lambda _: threads.add(threading.current_thread()))
    assert threads
    assert threading.current_thread() not in threads
