"""The history of a run over time: downsampled, merged and drawn."""

import math
from collections.abc import Iterator
from typing import Any

import pytest

from batchrunner.report.html.history import MOST_CELLS, cell_width, history_of, make_timeline
from tests.support.page import sample


def test_a_long_log_stays_small() -> None:
    """The load samples of a day become a few hundred cells with their means."""
    events = (sample(1e9 + 2 * at, queue=5000 if at == 31_234 else at % 7) for at in range(43_200))
    story = history_of("main", events, cell_width(86_398, 1))
    timeline = make_timeline([story])
    (line,) = timeline.of_schedulers("queue").values()
    values = [value for value in line if value]
    assert MOST_CELLS / 2 <= len(values) <= MOST_CELLS + 1
    assert math.fsum(values) / len(values) == pytest.approx(3 + 5000 / 43_200, rel=0.02)
    assert not timeline.breaks


def test_pauses_take_no_room() -> None:
    """A pause takes no room on the time axis, and interrupts the lines."""

    def events() -> Iterator[dict[str, Any]]:
        for began in (1000.0, 90_000.0):
            yield {"event": "start", "time": began}
            yield from (sample(began + at) for at in range(100))

    timeline = make_timeline([history_of("main", events(), 0.5)])
    assert timeline.axis.length_s == 198
    assert timeline.axis.resumed() == [99]
    assert timeline.places == sorted(timeline.places)
    assert timeline.places[-1] <= 198
    assert len(timeline.breaks) == 1


def test_tasks_are_added_up() -> None:
    """Rates and windows of simultaneous tasks are summed; a task's pause adds nothing."""
    one = history_of(
        "a", (sample(1000 + 2 * at, output_tokens_per_s=100, window=10) for at in range(100)), 4.0
    )
    two = history_of("b", (sample(1101 + 2 * at, output_tokens_per_s=50, window=5) for at in range(100)), 4.0)
    timeline = make_timeline([one, two])
    rates = [value for value in timeline.total("output_tokens_per_s") or () if value]
    assert set(rates) == {100, 150, 50}
    assert timeline.axis.length_s == 1101 + 198 - 1000
    assert set(timeline.of_schedulers("queue")) == {"a s", "b s"}


def replicas(ports: list[int], began: float, most: int, log: str | None) -> Iterator[dict[str, Any]]:
    """Yield a start whose servers have these ports and run so many requests at most."""
    yield {"event": "start", "time": began, "engine": {"log": log}}
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    signals = [
        {"scheduler": f"{url}#dp1", "running": 8, "queue": 5, "token_usage": 0.5, "max_running": most}
        for url in urls
    ]
    for at in range(20):
        bands = {url: [most // 10, most] for url in urls}
        yield sample(began + at, signals=signals, bands=bands)
    yield {"event": "engine_died", "time": began + 20, "who": urls[-1]}


def test_servers_that_were_started_again_keep_their_lines() -> None:
    """Launched servers have new ports at each start, so they are numbered; the newest limits count."""
    starts = [*replicas([4001, 4002], 1000, 64, "a.log"), *replicas([5001, 5002], 2000, 320, "a.log")]
    starts.append({"event": "start", "time": 3000.0, "engine": {"log": "a.log"}})  # it dies at once
    story = history_of("main", starts, 0.5)
    timeline = make_timeline([story])
    assert list(timeline.of_schedulers("queue")) == ["replica 0#dp1", "replica 1#dp1"]
    assert [incident.who for incident in story.incidents] == ["replica 1", "replica 1"]
    assert [tuple(band) for band in story.bands.values()] == [(32, 320)] * 2
    assert set(story.max_running.values()) == {320}
    theirs = make_timeline([history_of("main", replicas([30_000], 1000, 64, None), 0.5)])
    assert list(theirs.of_schedulers("queue")) == ["http://127.0.0.1:30000#dp1"]


def test_a_damaged_load_sample_is_left_out() -> None:
    """A load sample that lacks a field extends its attempt, and its cells stay empty."""
    damaged = sample(1010.0)
    del damaged["in_flight"]
    story = history_of("main", [sample(1000.0), damaged], 0.5)
    assert len(story.attempts[0].cells) == 1
    assert story.attempts[0].ended == 1010.0
