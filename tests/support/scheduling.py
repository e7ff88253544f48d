"""Tests that pytest-xdist gives to one worker: they share an engine, a cluster or an import that takes 10 s.

The marks of `--dist loadgroup` would say the same, but pytest-xdist 3.8 ignores them under pytest 9.2.
"""

from __future__ import annotations

from xdist.scheduler import LoadScopeScheduling

GROUPS = {
    "test_gateway.py": "gateway",
    "test_page_in_browser.py": "browser",
    "test_real_engine.py": "engine",
    "test_real_engine_out_of_memory.py": "replicas",
    "test_real_engine_starts.py": "engine starts",
    "test_real_replicas.py": "replicas",
    "test_slurm.py": "slurm",
    "tests/test_site.py": "site",
    "test_tokens_made_here.py": "transformers",
    "tests/input/tokenize/test_chat_template.py": "transformers",
    "tests/input/tokenize/test_encoder.py": "transformers",
}
"""The group of each file, in tests/e2e unless it has its path; every other test is a group of its own."""


class GroupScheduling(LoadScopeScheduling):  # type: ignore[misc]
    """Gives the tests of a group to one worker, and the largest groups first."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return GROUPS.get(file.removeprefix("tests/e2e/"), nodeid)
