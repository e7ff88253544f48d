"""The job of the README, and what is said of wrong ones."""

from collections.abc import Sequence

import pytest
import yaml

from batchrunner.core.errors import JobError
from batchrunner.job.load import load_job
from batchrunner.job.spec import Job

EXAMPLE = """\
input: {path: docs.parquet, columns: [id, title]}
prompt: {system: "You are terse.", user: "Summarise: {{ text }}"}
sampling: {max_new_tokens: 64, temperature: 0}
output: {path: out/run}
engine: {kind: attach, urls: ["http://127.0.0.1:30000"]}
limits: {max_failed_rows: 10}
"""


def example(overrides: Sequence[str] = ()) -> Job:
    return load_job(yaml.safe_load(EXAMPLE), overrides=overrides)


def refusal(*overrides: str) -> str:
    with pytest.raises(JobError) as caught:
        example(overrides)
    return str(caught.value)
