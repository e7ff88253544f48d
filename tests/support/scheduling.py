"""Which tests pytest-xdist gives to one worker, and which groups begin first.

The tests of a group share an engine, a cluster or an import that takes 10 s. The marks of
`--dist loadgroup` would say the same, but pytest-xdist 3.8 ignores them under pytest 9.2.
"""

import pytest
from xdist.scheduler import LoadScopeScheduling

GROUPS = {
    "replicas": ("test_real_replicas.py",),
    "answers": (
        "test_real_engine.py",
        "tests/tuning/test_rules.py::test_the_installed_server_takes_every_flag",
        "tests/sglang/test_flags.py::test_the_real_help_is_read",
    ),
    "deaths": ("test_real_engine_starts.py",),
    "slurm": ("test_slurm.py",),
    "ray": ("tests/ray/test_stages.py", "tests/ray/test_whole_job.py"),
    "gateway": ("test_gateway.py", "test_through_gateway.py"),
    "browser": ("test_page_in_browser.py",),
    "wheel": ("test_wheel.py",),
    "site": ("tests/test_site.py",),
    "transformers": (
        "test_tokens_made_here.py",
        "tests/input/tokenize/test_encoder.py",
    ),
}
"""How the node IDs of each group's tests begin, without `tests/e2e/`; the first group that fits counts.

The groups that take longest come first. The first three start the real engine several times each, and run
side by side: a fourth of them would need more than the 16 GB of memory that a small machine has.
"""
REAL = "test_real_"
"""Beginning of the names of files whose tests start a real engine. Files of no group join the first."""


def group_of(nodeid: str) -> str | None:
    """Return the group of a test; None for one that shares nothing."""
    name = nodeid.removeprefix("tests/e2e/")
    other = next(iter(GROUPS)) if name.startswith(REAL) else None
    return next((group for group, beginnings in GROUPS.items() if name.startswith(beginnings)), other)


def by_group(items: list[pytest.Item]) -> list[pytest.Item]:
    """Return the tests in the order of their groups, and then those of no group."""
    order = [*GROUPS, None]
    return sorted(items, key=lambda item: order.index(group_of(item.nodeid)))


class GroupScheduling(LoadScopeScheduling):  # type: ignore[misc]
    """Gives the tests of a group to one worker, in the order in which the workers have collected them."""

    def __init__(self, config: pytest.Config, log: object) -> None:
        config.option.loadscopereorder = False  # by the number of tests, which says little
        super().__init__(config, log)

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid) or nodeid
