"""`open_engine`, and what an engine may be given as."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest

import batchrunner
from batchrunner.core.errors import BatchrunError, EngineStartError, JobError
from tests.conftest import INSTANT, job_of
from tests.support.fake_sglang import FakeSGLang

if TYPE_CHECKING:
    from pathlib import Path


def test_one_engine_serves_several_jobs(tmp_path: Path, server: FakeSGLang) -> None:
    """An engine that takes minutes to load is opened once for all jobs of a script."""
    with batchrunner.open_engine({"kind": "attach", "urls": [server.url]}) as engine:
        assert engine.info.model == "fake/model"
        for name in ("one", "two"):
            (tmp_path / name).mkdir()
            assert batchrunner.run(job_of(tmp_path / name, INSTANT), engine=engine).rows_ok == 10
        table = batchrunner.generate([{"a": "hello"}], prompt={"text": "{{ a }}"}, engine=engine)
    assert table.column("output").to_pylist() == ["answer 0 to hello"]
    assert len(server.sent) == 21


def test_an_engine_that_cannot_open(tmp_path: Path) -> None:
    """`open_engine` raises what a run would."""
    with (
        pytest.raises(EngineStartError),
        batchrunner.open_engine({"kind": "attach", "urls": ["http://127.0.0.1:9"]}),
    ):
        pass
    with pytest.raises(JobError), batchrunner.open_engine({"kind": "attached"}):
        pass


def test_an_open_engine_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The directory of its log is its own, and stays only where an error sends people there."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with batchrunner.open_engine(INSTANT):
        (logs,) = tmp_path.iterdir()
        assert logs.stat().st_mode & 0o077 == 0
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(KeyError), batchrunner.open_engine(INSTANT):
        raise KeyError
    assert len(list(tmp_path.iterdir())) == 1


def test_an_engine_by_its_address(server: FakeSGLang) -> None:
    """An address, or a list of addresses, is enough to name servers that run."""
    assert batchrunner.generate(["a"], engine=server.url).num_rows == 1
    with FakeSGLang() as second:
        assert batchrunner.generate(["a", "b"], engine=[server.url, second.url]).num_rows == 2
        with batchrunner.open_engine((server.url, second.url)) as engine:
            assert set(engine.info.routes) == {server.url, second.url}


def test_an_engine_by_its_name() -> None:
    """A text is the model of a server that the run starts, except for `simulated`."""
    with batchrunner.open_engine("simulated") as engine:
        assert engine.info.simulated
    with pytest.raises(BatchrunError, match="no/such-model"):
        batchrunner.generate(["a"], engine="/no/such-model")


@pytest.mark.parametrize(
    ("engine", "told"),
    [
        ("127.0.0.1:30000", "an address starts with http://"),
        ("localhost:30000/v1", "an address starts with http://"),
        ("ftp://host", "an address starts with http://"),
        ("http://[::1", "nvalid IPv6 URL"),
        ("http://host:99999999", "ort out of range 0-65535"),
        ("http://host:port", "ort could not be cast to integer value"),
        (["host"], "an address starts with http://"),
        ([], "urls"),
        ("", "engine: give an open engine"),
        ("server", "'server' needs more than its name"),
        ("simulatd", "engine: 'simulatd' is no engine: give 'simulated', an address or a model"),
        ("Simulated", "engine: 'Simulated' is no engine: give 'simulated', an address or a model"),
        ("simulation", "engine: 'simulation' is no engine"),
        ("Server", "engine: 'Server' is no engine"),
        ("http:/host", "an address starts with http://"),
        ("http//host:30000", "an address starts with http://"),
        ("https:host", "an address starts with http://"),
        ("[::1]:30000", "an address starts with http://"),
        ("localhost", "an address starts with http://"),
        ("10.0.0.7", "an address starts with http://"),
        ("Qwen/Qwen3 8B", "engine: model: no model is named so: give a folder (./NAME), a name on the Hub"),
        ("Qwen/Qwen3-8B ", "(got 'Qwen/Qwen3-8B ')"),
        ("Qwen\\Qwen3-8B", "no model is named so"),
        ("user@host:30000", "no model is named so"),
        ("Qwen/Qwen3--8B", "no model is named so"),
        (
            "https://huggingface.co/Qwen/Qwen3-8B",
            "a page of the Hub is no model: give the model's name, Q",
        ),
        (7, "engine: give an open engine"),
    ],
)
def test_wrong_engines_are_explained(engine: Any, told: str) -> None:
    """What is no engine is a JobError in one line."""
    with pytest.raises(JobError, match=re.escape(told)) as caught:
        batchrunner.generate(["a"], engine=engine)
    assert len(str(caught.value).splitlines()) == 1
