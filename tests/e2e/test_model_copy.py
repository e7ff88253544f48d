"""`engine.cache_dir`: the model is copied to the machine's disk once, and loaded from there."""

from pathlib import Path
from typing import Any

import pytest

from tests.conftest import batchrun, job_of, results_of, write_job
from tests.support.launchable import launchable

NAMES_ITS_MODEL = """
model = sys.argv[sys.argv.index("--model-path") + 1]
with open(os.environ["STARTS"], "a") as starts:
    print(model, file=starts)

class Handler(Server):
    known = {
        "/ready": {}, "/health": {}, "/model_info": {"model_path": model},
        "/server_info": {"version": "0.5.23", "max_running_requests": 8},
    }
    def asked(self, body):
        self.answer("to " + body["text"])
"""


def a_job(directory: Path, **engine: Any) -> dict[str, Any]:
    """Return a job on two replicas whose model has a file that is a link, as in the Hub's cache."""
    made = launchable(directory, NAMES_ITS_MODEL, STARTS=str(directory / "starts"))
    model = directory / "model"
    (directory / "blob").write_text("weights")
    (model / "model.safetensors").symlink_to("../blob")
    for folder in ("1_Pooling", "checkpoint-500", ".git"):
        (model / folder).mkdir()
        (model / folder / "config.json").write_text("{}")
    changed = {**made, "replicas": 2, "cache_dir": str(directory / "disk"), **engine}
    return job_of(directory, changed)


def loaded(directory: Path) -> Path:
    """Return the directory that both replicas of the last run loaded."""
    one, other = (directory / "starts").read_text().splitlines()
    assert one == other
    (directory / "starts").unlink()
    return Path(one)


def run(job: dict[str, Any], directory: Path, name: str) -> None:
    """Do the job in a run of its own."""
    job["output"]["path"] = str(directory / name)
    done = batchrun(write_job(job, directory))
    assert done.exit_code == 0, done.stderr
    assert len(results_of(job)) == 10


def test_a_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All servers load one copy. One that was cut off goes on; a model that changes has another one."""
    monkeypatch.setenv("DISK", str(tmp_path / "disk"))
    job = a_job(tmp_path, cache_dir="$DISK/models")
    run(job, tmp_path, "first")
    copy = loaded(tmp_path)
    assert copy.is_relative_to(tmp_path / "disk" / "models")
    assert copy.name == "model"
    there = {str(path.relative_to(copy)) for path in copy.rglob("*")}
    assert there == {"config.json", "model.safetensors", "1_Pooling", "1_Pooling/config.json"}
    assert not (copy / "model.safetensors").is_symlink()
    logs = "".join(log.read_text() for log in (tmp_path / "first").rglob("engine-replica-*.log"))
    assert logs.count("copying") == 1

    part, made = copy.with_name("model.part"), (copy / "config.json").stat().st_ino
    copy.rename(part)
    (part / "model.safetensors").write_text("weig")
    run(job, tmp_path, "second")
    assert loaded(tmp_path) == copy
    assert (copy / "model.safetensors").read_text() == "weights"
    assert (copy / "config.json").stat().st_ino == made  # was there whole
    assert not part.exists()

    (tmp_path / "blob").write_text("others!")
    run(job, tmp_path, "third")
    other = loaded(tmp_path)
    assert other != copy
    assert (other / "model.safetensors").read_text() == "others!"


@pytest.mark.parametrize(
    ("engine", "told"),
    [
        (
            {"cache_dir": "$NO_DISK/models"},
            "engine.cache_dir $NO_DISK/models: an environment variable in the path is not set",
        ),
        (
            {"cache_dir": "/dev/null/models"},
            "cannot copy {here}/model: [Errno 20] Not a directory",
        ),
        ({}, "cannot copy {here}/model: the copy needs 8192.0 GiB, but only "),
        (
            {"model": "nobody/nothing"},
            "engine.cache_dir: the files of nobody/nothing are not on this machine",
        ),
    ],
)
def test_no_copy(tmp_path: Path, engine: dict[str, Any], told: str) -> None:
    """The command ends with one line that says what is wrong."""
    job = a_job(tmp_path, **engine)
    if not engine:
        with (tmp_path / "model" / "huge.safetensors").open("wb") as file:
            file.truncate(1 << 43)
    done = batchrun(write_job(job, tmp_path))
    assert done.exit_code == 2, done.stderr
    assert told.format(here=tmp_path) in " ".join(done.stderr.split())
