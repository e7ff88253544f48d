"""What a forward pass holds, and the window and the queue that follow from it."""

from __future__ import annotations

import pytest

from batchrunner.core.engine_info import EngineInfo, QueueBand, SchedulerLoad
from batchrunner.dispatch.concurrency.limits import ConcurrencyLimits
from batchrunner.dispatch.concurrency.window import ForwardPasses

URL = "http://server"
HALF_MINUTE = 120


@pytest.mark.parametrize(
    ("tokens", "row_tokens", "max_running", "rows"),
    [
        (16_384, 64, 32, 32),
        (8192, 30_000, 256, 1),
        (None, 8, 4096, 1024),
        (100, 0, None, 100),
    ],
)
def test_rows_of_a_pass(tokens: int | None, row_tokens: int, max_running: int | None, rows: int) -> None:
    """Rows are counted by their tokens; the most requests that run at once limit a pass of short ones."""
    passes = ForwardPasses(tokens)
    for _ in range(100):
        passes.sent(row_tokens)
    assert passes.rows(max_running) == rows
    band = passes.band(max_running)
    assert max(8, rows) == band.low < band.high
    assert passes.first_window(max_running) >= 2 * rows


class Server:
    """A scheduler that computes a pass at a time, and tells its load after each, as SGLang does."""

    def __init__(self, tokens: int, max_running: int, *, passes_a_sample: int) -> None:
        self.passes = ForwardPasses(tokens)
        self.max_running, self.passes_a_sample = max_running, passes_a_sample
        info = EngineInfo("attach", "m", routes=(URL,), prefill_tokens=tokens)
        self.limits = ConcurrencyLimits(info, QueueBand(100, 2000), 256, most=10**5, passes=self.passes)
        self.now, self.waiting, self.starved = 0.0, 0, 0
        self.limits.begin([self._load()], self.now, unsent=10**6)

    def runs(self, samples: int, row_tokens: int) -> None:
        """Let rows come and go; what ended in one pass travels during the next one."""
        travelling = 0
        for _ in range(samples):
            for _ in range(self.passes_a_sample):
                window = self.limits.windows[URL]
                self.waiting += max(0, window - self.waiting - travelling)
                self.waiting = self.waiting or window  # without work the scheduler waits until they are back
                pass_rows = min(self.max_running, max(1, self.passes.tokens // row_tokens))
                self.starved += self.waiting < pass_rows
                travelling = min(self.waiting, pass_rows)
                self.waiting -= travelling
                for _ in range(travelling):
                    self.passes.sent(row_tokens)
                    self.limits.ended(URL, 0, self.now)
                self.now += 0.25 / self.passes_a_sample
            load = self._load()
            self.limits.observe([load], {URL: max(window, self.waiting)}, self.now, unsent=10**6)

    def _load(self) -> SchedulerLoad:
        return SchedulerLoad(
            URL, "loads", 0, self.waiting, 0.0, 0, 10**5, self.max_running, URL, taken_at=self.now
        )


@pytest.mark.parametrize(
    ("tokens", "max_running", "row_tokens", "passes_a_sample"),
    [(16_384, 32, 100, 1), (16_384, 4096, 16, 1), (8192, 4096, 500, 10)],
)
def test_the_window_neither_starves_nor_piles_up(
    tokens: int, max_running: int, row_tokens: int, passes_a_sample: int
) -> None:
    """After a short start each pass is full, a few more wait, and the server is never said to hold back."""
    server = Server(tokens, max_running, passes_a_sample=passes_a_sample)
    server.runs(40, row_tokens)
    server.starved = 0
    server.runs(HALF_MINUTE, row_tokens)
    rows = server.passes.rows(max_running)
    assert server.starved == 0
    assert 2 * rows <= server.limits.windows[URL] <= 10 * rows
    assert server.limits.corners == {}


def test_a_pass_may_take_long() -> None:
    """No load is told while a pass is computed: the window stays, so that the next pass is full too."""
    server = Server(16_384, 32, passes_a_sample=1)
    server.runs(20, 100)
    window = server.limits.windows[URL]
    for second in range(60):
        server.limits.observe([], {URL: window}, server.now + second, unsent=10**6)
    assert server.limits.states[URL] == "blind"
    assert server.limits.windows[URL] == window


def test_the_band_of_the_job_holds() -> None:
    """`queue` in a job is what its author wants, for passes too."""
    info = EngineInfo("attach", "m", routes=(URL,))
    limits = ConcurrencyLimits(
        info, QueueBand(7, 70), 256, most=10**5, passes=ForwardPasses(8192), own_band=True
    )
    limits.begin([SchedulerLoad(URL, "loads", 0, 0, 0.0, route=URL)], 0.0, unsent=10)
    assert limits.bands[URL] == QueueBand(7, 70)
