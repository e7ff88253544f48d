"""The gateway as a program that we start."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from batchrunner.core.errors import (
    EngineStartError,
)
from batchrunner.engines.base import IncidentQueue
from batchrunner.engines.launched.gateway import GatewayProcess
from batchrunner.job.engine import GatewayEngine
from batchrunner.job.spec import LimitsSpec
from tests.support.server_thread import PATIENCE_S

if TYPE_CHECKING:
    from pathlib import Path


def test_interpreter_without_a_gateway(tmp_path: Path) -> None:
    """It is told so by name, with what to install."""
    bare = tmp_path / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(bare)], check=True, timeout=PATIENCE_S)
    spec = GatewayEngine(kind="gateway", model="org/model", python=f"{bare}/bin/python")
    gateway = GatewayProcess(
        spec, IncidentQueue(), key="x", log_dir=tmp_path, limits=LimitsSpec(request_timeout=9)
    )
    with pytest.raises(EngineStartError, match=r"has no sglang_router: install batchrunner\[gateway\]"):
        asyncio.run(gateway.start())
