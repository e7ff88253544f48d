"""Whatever starts of a run do, with any options: no row is lost, doubled or answered from an old text."""

from pathlib import Path

import pytest

from tests.support.fake_sglang import FakeSGLang
from tests.support.run_scenarios import Scenario, telling
from tests.support.store_server import StoreBucket


@pytest.mark.parametrize("seed", range(8))
def test_a_run(tmp_path: Path, cache: Path, server: FakeSGLang, seed: int) -> None:
    """Starts of one job are killed, stopped and put to sleep, while its input grows and is corrected."""
    del cache
    scenario = Scenario(tmp_path, seed, server)
    with telling(scenario):
        scenario.play()


def test_a_run_in_a_store(tmp_path: Path, cache: Path, server: FakeSGLang, store_bucket: StoreBucket) -> None:
    """The same holds in an object store."""
    del cache
    scenario = Scenario(tmp_path, 1, server, store_bucket)
    with telling(scenario):
        scenario.play()
