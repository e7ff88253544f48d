"""What is shown of a run while it goes on."""

from __future__ import annotations

import io

from batchrunner.dispatch.progress import Snapshot
from batchrunner.runner.progress import ProgressBar


def test_the_bar_follows_the_total() -> None:
    """A run that others join has more rows than at the start, and the bar has them too."""
    stream = io.StringIO()
    bar = ProgressBar(stream)
    for total, done in [(500, 100), (1200, 700)]:
        bar.show(Snapshot(total, done, 0, 10, 0, 0, 0, 1, 1, 0, 0, (), {}, {}, simulated=False))
    bar.close()
    assert "700/1200" in stream.getvalue()
