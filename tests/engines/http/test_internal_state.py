"""A running server schedules less carefully, where its version can; what it answers is never an error."""

from __future__ import annotations

import asyncio
from typing import Literal

import pytest

from batchrunner.engines.http.internal_state import set_conservativeness
from tests.support.fake_sglang import FakeSGLang

Answer = Literal["refuses", "takes", "takes on each rank", "nonsense"]


@pytest.mark.parametrize(
    ("answer", "taken"),
    [("refuses", False), ("takes", True), ("takes on each rank", True), ("nonsense", False)],
)
def test_a_server_says_whether_it_does(answer: Answer, *, taken: bool) -> None:
    """SGLang 0.5.23 refuses; a later one may take it, and says so."""
    with FakeSGLang(api_key="secret") as server:
        server.internal_state = answer
        assert asyncio.run(set_conservativeness(server.url, "secret", 0.3)) is taken
        assert server.conservativeness == (0.3 if taken else 1.0)


def test_a_server_that_knows_no_such_thing() -> None:
    """Without the path, with another key, or gone: it is not changed, and nothing is raised."""
    with FakeSGLang(is_sglang=False) as other:
        assert asyncio.run(set_conservativeness(other.url, None, 0.3)) is False
    with FakeSGLang(api_key="secret") as server:
        server.internal_state = "takes"
        assert asyncio.run(set_conservativeness(server.url, "wrong", 0.3)) is False
    assert asyncio.run(set_conservativeness(server.url, "secret", 0.3)) is False
