"""Replicas get GPUs, ports and arguments of their own."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from batchrunner.core.errors import (
    EngineStartError,
)
from batchrunner.engines.launched.fleet import GatewayProcess, LaunchedFleet, gpu_slices
from batchrunner.engines.model_memory import with_tp
from batchrunner.job.engine import GatewayEngine
from batchrunner.job.spec import LimitsSpec

if TYPE_CHECKING:
    from pathlib import Path
import json
from typing import TYPE_CHECKING

import batchrunner
from tests.conftest import job_of
from tests.support.launchable import launchable
from tests.support.server_thread import PATIENCE_S


def test_gpus_are_dealt_out() -> None:
    assert gpu_slices([], 1, "auto") == [[]]
    assert gpu_slices([], 1, 2) == [[], []]
    assert gpu_slices(["0", "1", "2", "3"], 1, "auto") == [["0"], ["1"], ["2"], ["3"]]
    assert gpu_slices(["4", "5", "6"], 2, "auto") == [["4", "5"]]
    assert gpu_slices(["a", "b"], 1, 1) == [["a"]]
    with pytest.raises(EngineStartError, match="needs 2 GPUs: 1 there"):
        gpu_slices(["0"], 2, "auto")
    with pytest.raises(EngineStartError, match="needs 3 GPUs: 2 there"):
        gpu_slices(["0", "1"], 1, 3)


@pytest.mark.parametrize(
    ("args", "slices"),
    [
        ({}, ["4", "5", "6", "7"]),
        ({"pp-size": 2}, ["4,5", "6,7"]),
        ({"data-parallel-size": 2}, ["4,5", "6,7"]),
        ({"dp-size": 2, "enable-dp-attention": True}, ["4", "5", "6", "7"]),
        ({"dp_size": 2, "enable_dp_attention": True}, ["4", "5", "6", "7"]),
    ],
)
def test_the_jobs_own_gpus_are_dealt_out(
    args: dict[str, Any], slices: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every replica gets GPUs of its own from those that `env` leaves, as many as its arguments take."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7")
    env = {"CUDA_VISIBLE_DEVICES": "4,5,6,7"}
    spec = GatewayEngine(kind="gateway", model="org/model", args=args, env=env)
    servers = LaunchedFleet(spec, log_dir=tmp_path, limits=LimitsSpec())._make_servers("o/m", cpu=False)
    assert [server.process.environ["CUDA_VISIBLE_DEVICES"] for server in servers] == slices
    for server in servers:
        asyncio.run(server.close())  # gives its port back


def test_command_lines(tmp_path: Path) -> None:
    """The job's own arguments win over ours, and each replica has its own port, log and GPUs."""
    spec = GatewayEngine(
        kind="gateway", model="org/model", replicas=2, tp=2, gateway_args={"log_level": "info"}
    )
    fleet = LaunchedFleet(with_tp(spec), log_dir=tmp_path, limits=LimitsSpec())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
        made = fleet._make_servers("org/model", cpu=False)
    servers = [server.process for server in made]
    assert [server.environ["CUDA_VISIBLE_DEVICES"] for server in servers] == ["0,1", "2,3"]
    assert len({server.argv[server.argv.index("--port") + 1] for server in servers}) == 2
    assert [server.log_path.name for server in servers] == ["engine-replica-0.log", "engine-replica-1.log"]
    gateway = GatewayProcess(
        spec, [], key=fleet._key, log_dir=tmp_path, limits=LimitsSpec(request_timeout=90)
    )
    line = " ".join(gateway.process.argv)
    assert "--request-timeout-secs 150" in line
    assert "--log-level info" in line
    assert "--policy manual --assignment-mode min_load" in line
    assert fleet._key not in line
    for server in made:
        asyncio.run(server.close())  # gives its port back


ANSWERS = """
Path(os.environ["SEEN"]).write_text(json.dumps(sys.argv[1:]))
if int(dict(zip(sys.argv, sys.argv[1:])).get("--tokenizer-worker-num", 1)) > 1:
    assert "--api-key" not in sys.argv, "API key is not supported in multi-tokenizer mode"

class Handler(Server):
    known = {"/ready": {}, "/model_info": {"model_path": "answers"}, "/server_info": {"version": "0.5.23"}}
    def asked(self, body):
        self.answer("to " + body["text"])
"""


@pytest.mark.parametrize(
    ("args", "has_key"),
    [
        ({}, True),
        ({"tokenizer-worker-num": 1}, True),
        ({"tokenizer-worker-num": 4}, False),
        ({"--tokenizer_worker_num": "2"}, False),
    ],
)
def test_several_tokenizers_have_no_key(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, args: dict[str, object], *, has_key: bool
) -> None:
    """SGLang starts several tokenizers only without an API key: such a server has none, and that is said."""
    engine = launchable(tmp_path, "from pathlib import Path\n" + ANSWERS, SEEN=str(tmp_path / "seen"))
    assert batchrunner.run(job_of(tmp_path, {**engine, "args": args})).rows_ok == 10
    assert ("--api-key" in json.loads((tmp_path / "seen").read_text())) == has_key
    assert ("every user of this machine can use it" in caplog.text) != has_key


def test_interpreter_without_a_gateway(tmp_path: Path) -> None:
    """It is told so by name, with what to install."""
    bare = tmp_path / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(bare)], check=True, timeout=PATIENCE_S)
    spec = GatewayEngine(kind="gateway", model="org/model", python=f"{bare}/bin/python")
    gateway = GatewayProcess(spec, [], key="x", log_dir=tmp_path, limits=LimitsSpec(request_timeout=9))
    with pytest.raises(EngineStartError, match=r"has no sglang_router: install batchrunner\[gateway\]"):
        asyncio.run(gateway.start())
