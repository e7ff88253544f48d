"""Polls the engine's load, shows it, and writes it to the event log."""

from __future__ import annotations

import asyncio
import time
from dataclasses import asdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from batchrunner.engines.base import Engine
    from batchrunner.events import EventLog
    from batchrunner.progress import Display, Snapshot
    from batchrunner.records import Signals

POLL_S = 0.5
"""`/v1/loads` reads shared memory and can be polled at 2-10 Hz."""
SAMPLE_S = 5.0
"""A sample a time in the event log: 17,000 lines a day."""


async def watch(
    engine: Engine,
    snapshot: Callable[[Sequence[Signals]], Snapshot],
    display: Display,
    events: EventLog,
    on_tick: Callable[[], None],
) -> None:
    """Poll until cancelled; `on_tick` is called after every poll."""
    next_sample = 0.0
    while True:
        signals = await engine.signals()
        state = snapshot(signals)
        display.show(state)
        now = time.monotonic()
        if now >= next_sample:
            next_sample = now + SAMPLE_S
            write_sample(events, state)
        on_tick()
        await asyncio.sleep(POLL_S)


def write_sample(events: EventLog, state: Snapshot) -> None:
    """Write one sample of the run's state to the event log."""
    events.write(
        "sample",
        rows_total=state.rows_total,
        rows_done=state.rows_done,
        rows_failed=state.rows_failed,
        rows_per_s=round(state.rows_per_s, 2),
        output_tokens_per_s=round(state.output_tokens_per_s, 1),
        window=state.window,
        in_flight=state.in_flight,
        resting=state.resting,
        signals=[asdict(signal) for signal in state.signals],
    )
