"""Fixtures of the tests of tokenizing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.tiny_tokenizer import make_tokenizer

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer") / "model")
