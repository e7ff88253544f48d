"""The head node of a Ray cluster, which may die."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore")]


def test_a_head_node_that_dies(caplog: pytest.LogCaptureFixture) -> None:
    """That is said once, and again after it was back."""
    from batchrunner.ray.connection import HeadNode  # noqa: PLC0415 - imports Ray

    def told(look: Callable[[], None]) -> int:
        caplog.clear()
        look()
        look()
        return len(caplog.messages)

    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        head = HeadNode(address)
        assert told(head.look) == 0
    assert told(head.look) == 1
    assert caplog.messages[0].startswith(f"the head node of the Ray cluster, {address}, does not answer")
    with socket.create_server(("127.0.0.1", int(address.partition(":")[2]))):
        assert told(head.look) == 0
    assert told(head.look) == 1
