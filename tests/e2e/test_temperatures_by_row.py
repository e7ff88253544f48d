"""`check.temperature` beside a sampling temperature that each row has of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

import batchrunner
from tests.conftest import job_of, results_of, write_rows
from tests.e2e.test_checked_answers import sampling_of, script

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.fake_sglang import FakeSGLang

pytestmark = pytest.mark.usefixtures("quick_retries")

TRIES: list[tuple[Any, list[list[float | None]]]] = [
    (0.6, [[0.3, 0.6, 0.6, 0.6], [None, 0.6, 0.6, 0.6], [0, 0.6, 0.6, 0.6]]),
    (None, [[0.3, 0.4, 0.8, 0.8], [None] * 4, [0, 0.4, 0.8, 0.8]]),
]


@pytest.mark.parametrize(("given", "expected"), TRIES)
@pytest.mark.parametrize("prompt", [{"text": "text"}, {"user": "{{ text }}"}])
def test_a_row_s_own_temperature_is_that_of_its_first_try(
    tmp_path: Path, server: FakeSGLang, prompt: Any, given: Any, expected: list[list[float | None]]
) -> None:
    """Where it is null, the engine's default holds."""
    write_rows(tmp_path / "input.parquet", 3, heat=[0.3, None, 0.0])
    server.script = script("bad")
    job = job_of(
        tmp_path, server, prompt=prompt, sampling={"temperature": {"column": "heat"}},
        check={"regex": "good", "tries": 4, "temperature": given},
        limits={"max_failed_rows": 3},
    )  # fmt: skip
    assert batchrunner.run(job).exit_code == 0
    for number, temperatures in enumerate(expected):
        sent = [sampling_of(sent) for sent in server.sent if sent.prompt == f"row {number}"]
        assert [sampling.get("temperature") for sampling in sent] == temperatures
    assert [row["attempts"] for row in results_of(job)] == [4, 4, 4]
    server.forget()
    rows = [{"text": f"row {number}", "heat": heat} for number, heat in enumerate((0.3, None, 0.0))]
    batchrunner.generate(
        rows, prompt=prompt, sampling=job["sampling"], check=job["check"], engine=server.url,
        limits={"max_failed_rows": 3},
    )  # fmt: skip
    first = {sent.prompt: sampling_of(sent).get("temperature") for sent in server.sent if sent.tries == 1}
    assert first == {f"row {number}": each[0] for number, each in enumerate(expected)}
