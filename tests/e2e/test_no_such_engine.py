"""A model or a server that is not there, or is not what the job says."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from tests.conftest import batchrun, job_of, write_job
from tests.support.fake_sglang import FakeSGLang
from tests.support.refusals import refusal, told


@pytest.mark.parametrize("kind", ["server", "gateway"])
@pytest.mark.parametrize("model", ["/no/such/model", "./no-such-model", "~/no-such-model"])
def test_no_such_model(tmp_path: Path, kind: str, model: str) -> None:
    """A model path that is not there is refused before an engine is started for it."""
    found = str(Path(model).expanduser()) if model.startswith("~") else model
    told(refusal(job_of(tmp_path, {"kind": kind, "model": model}), tmp_path), "engine.model", found)


def test_not_a_model(tmp_path: Path) -> None:
    """A directory that is no model is said to be none."""
    (tmp_path / "model").mkdir()
    engine = {"kind": "server", "model": str(tmp_path / "model")}
    told(refusal(job_of(tmp_path, engine), tmp_path), tmp_path / "model", "config.json")


def test_nothing_listens(tmp_path: Path) -> None:
    """An address where nothing listens is named with what to do."""
    with socket.socket() as idle:
        idle.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{idle.getsockname()[1]}"
        message = refusal(job_of(tmp_path, {"kind": "attach", "urls": [url]}), tmp_path)
    told(message, url, "no connection", "start the server, or correct engine.urls")


def test_not_sglang(tmp_path: Path) -> None:
    """Something else that answers at the address is said not to be SGLang."""
    with FakeSGLang(is_sglang=False) as web:
        told(refusal(job_of(tmp_path, web), tmp_path), web.url, "not SGLang")


def test_not_http(tmp_path: Path) -> None:
    """A port that speaks another protocol is refused and does not hang the run."""
    with socket.create_server(("127.0.0.1", 0)) as other, other.dup() as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        job = write_job(job_of(tmp_path, {"kind": "attach", "urls": [url]}), tmp_path)
        import threading  # noqa: PLC0415

        def greet() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(b"220 mail.example.org ESMTP\r\n")

        thread = threading.Thread(target=greet)
        thread.start()
        result = batchrun(job)
        thread.join()
    assert result.exit_code == 2, result.stderr
    (line,) = result.stderr.splitlines()
    told(line, "batchrun: ", url)


@pytest.mark.parametrize("key", [None, "wrong"])
def test_api_key_wanted(
    tmp_path: Path, server: FakeSGLang, monkeypatch: pytest.MonkeyPatch, key: str | None
) -> None:
    """A server that wants an API key is answered with where the key comes from, and not with the key."""
    server.api_key = "right"
    monkeypatch.delenv("SGLANG_API_KEY", raising=False)
    if key:
        monkeypatch.setenv("SGLANG_API_KEY", key)
    message = refusal(job_of(tmp_path, server), tmp_path)
    told(message, server.url, "401", "engine.api_key_env")
    assert "wrong" not in message


def test_two_models(tmp_path: Path, server: FakeSGLang) -> None:
    """Addresses of different models are not one engine."""
    with FakeSGLang(model="other/model") as other:
        engine = {"kind": "attach", "urls": [server.url, other.url]}
        told(refusal(job_of(tmp_path, engine), tmp_path), "fake/model", "other/model")
