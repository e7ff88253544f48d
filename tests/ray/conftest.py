"""One cluster for all tests on Ray: it takes 10 s to start."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.ray_cluster import RayNodes, ray_nodes

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="session")
def nodes() -> Iterator[RayNodes]:
    """The nodes of a cluster that this process is connected to."""
    with ray_nodes() as started:
        yield started
