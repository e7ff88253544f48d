"""One cluster for all tests on Ray: it takes 10 s to start."""

from collections.abc import Iterator

import pytest

from tests.support.ray_cluster import RayNodes, ray_nodes


@pytest.fixture(scope="session")
def nodes() -> Iterator[RayNodes]:
    """The nodes of a cluster that this process is connected to."""
    with ray_nodes() as started:
        yield started
