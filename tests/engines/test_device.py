"""Which GPUs are visible."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchrunner.engines.device import gpus

if TYPE_CHECKING:
    import pytest


def test_gpus_that_are_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    for value, seen in [("", []), ("-1", []), ("2, 3", ["2", "3"]), ("0,-1,1", ["0"])]:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
        assert gpus() == seen
