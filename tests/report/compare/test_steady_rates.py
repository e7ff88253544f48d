"""The rates of a run while its engine is full."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import orjson
import pytest

from batchrunner.report.compare.steady_rates import steady_rates

if TYPE_CHECKING:
    from pathlib import Path


def tell(path: Path, *attempts: list[dict[str, Any]]) -> Path:
    """Write an event log of these attempts."""
    lines = []
    for samples in attempts:
        lines.append({"time": samples[0]["time"], "event": "start"})
        lines += [{"rows_total": 10_000, "in_flight": 100, "event": "sample", **values} for values in samples]
    path.write_bytes(b"".join(orjson.dumps({"elapsed_s": 0.0, **line}) + b"\n" for line in lines))
    return path


def attempt(began: float, seconds: int, rate: int, *, ramp: int = 0) -> list[dict[str, Any]]:
    """Return a sample a second: `rate` tokens are generated in each, and a tenth of it before `ramp`."""
    tokens = [sum(rate // 10 if at < ramp else rate for at in range(now)) for now in range(seconds + 1)]
    return [
        {"time": began + at, "rows_done": at, "output_tokens": done, "prompt_tokens": 5 * done}
        for at, done in enumerate(tokens)
    ]


def test_filling_the_engine_is_not_steady(tmp_path: Path) -> None:
    """The first tenth of an attempt does not count, whatever is done in it."""
    found = steady_rates([tell(tmp_path / "log", attempt(1000, 100, 300, ramp=10))], 1.0)
    assert found.length_s == pytest.approx(90)
    assert found.by_stretch["output_tokens_per_s"] == pytest.approx([300] * 20)
    assert found.mean("prompt_tokens_per_s") == pytest.approx(1500)
    assert found.mean("rows_per_s") == pytest.approx(1)


def test_the_last_rows_are_not_steady(tmp_path: Path) -> None:
    """When all rows that are left are in flight, the engine empties."""
    busy, last = attempt(1000, 50, 200), attempt(1051, 50, 20)
    last = [{**values, "rows_total": 0, "output_tokens": 10_000 + values["output_tokens"]} for values in last]
    found = steady_rates([tell(tmp_path / "log", [*busy, *last])], 1.0)
    assert found.length_s == pytest.approx(50 - 0.1 * 101, abs=1)
    assert found.mean("output_tokens_per_s") == pytest.approx(200)


def test_pauses_between_attempts_take_no_time(tmp_path: Path) -> None:
    """A run that was resumed a day later is as fast as one that was not; counters begin again."""
    found = steady_rates([tell(tmp_path / "log", attempt(1000, 50, 200), attempt(90_000, 50, 400))], 1.0)
    assert found.length_s == pytest.approx(90)
    assert found.mean("output_tokens_per_s") == pytest.approx(300)
    assert min(found.by_stretch["output_tokens_per_s"]) == pytest.approx(200)


def test_tasks_at_work_together_add_up(tmp_path: Path) -> None:
    """Two tasks in the same time are one run that is twice as fast."""
    logs = [tell(tmp_path / f"log-{n}", attempt(1000, 100, 200)) for n in range(2)]
    found = steady_rates(logs, 1.0)
    assert found.length_s == pytest.approx(90)
    assert found.mean("output_tokens_per_s") == pytest.approx(400)


def test_a_run_of_an_earlier_version(tmp_path: Path) -> None:
    """Its samples count rows only, and that is all that is told."""
    samples = [{"time": values["time"], "rows_done": values["rows_done"]} for values in attempt(1000, 60, 9)]
    assert set(steady_rates([tell(tmp_path / "log", samples)], 1.0).by_stretch) == {"rows_per_s"}


@pytest.mark.parametrize("row_s", [1.0, 60.0])
def test_too_short(tmp_path: Path, row_s: float) -> None:
    """A few seconds, or a few rows' time, make no stretches: nothing is said then."""
    log = tell(tmp_path / "log", attempt(1000, 5 if row_s < 2 else 100, 200))
    assert steady_rates([log, tmp_path / "missing"], row_s).by_stretch == {}
