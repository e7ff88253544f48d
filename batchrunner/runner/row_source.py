"""The rows that one task does alone, and how rows are read while others are in flight."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from typing import TYPE_CHECKING

from pyroaring import BitMap64

from batchrunner.core.errors import InputError, InputLostError
from batchrunner.input.sort.plan import order_at

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from batchrunner.core.types import Outcome, Request
    from batchrunner.input.dataset import RowBatch
    from batchrunner.input.row_reader import Order
    from batchrunner.input.sort.decide import OrderDecision
    from batchrunner.runner.prepare import PreparedJob

log = logging.getLogger(__name__)

READ_PAUSES_S = (1.0, 5.0, 20.0)
"""Before the tries that follow when rows cannot be read: a mount comes back, a store answers again."""


class RowReading:
    """Reads rows while others are in flight: what cannot be read now is tried again a few times."""

    def __init__(
        self, prepared: PreparedJob, copy: Path | None, stopped: threading.Event, *, leased: bool = False
    ) -> None:
        self._open = functools.partial(order_at, prepared, copy, leased=leased)
        self._order: Order | None = self._open()
        self._stopped = stopped

    def read(self, rows: BitMap64, places: range | None = None) -> Iterator[RowBatch]:
        """Yield the rows as an `Order` does, until it is stopped; raises InputLostError."""
        done = BitMap64()
        pauses = iter(READ_PAUSES_S)
        while not self._stopped.is_set():
            try:
                self._order = self._order or self._open()
                for batch in self._order.read(rows - done, places):
                    yield batch
                    done.update(batch.rows)
                    pauses = iter(READ_PAUSES_S)
            except InputError as failure:
                self.close()
                pause = next(pauses, None)
                if pause is None:
                    raise InputLostError(f"{failure}: run the same command again") from None
                log.warning("%s: tried again in %.0f s", failure, pause)
                self._stopped.wait(pause)
            else:
                return

    def close(self) -> None:
        """Close what is open."""
        if self._order is not None:
            self._order.close()
            self._order = None


class OwnRows:
    """Rows that nobody else does."""

    is_shared = False

    def __init__(
        self, prepared: PreparedJob, todo: BitMap64, total: int, copy: Path | None, choice: OrderDecision
    ) -> None:
        """`copy` is where the rows are in the order of the `choice`, unless the input has it."""
        self._prepared = prepared
        self._copy = copy
        self._choice = choice
        self._todo = todo
        self._left = todo
        self.total = total
        self.unread = len(todo)
        self._stopped = threading.Event()

    def batches(self) -> Iterator[list[Request | Outcome]]:
        """Read and render them."""
        with contextlib.closing(RowReading(self._prepared, self._copy, self._stopped)) as reading:
            for batch in reading.read(self._todo):
                yield self._prepared.renderer.render(batch)
                self.unread -= len(batch.rows)

    def landed(self, rows: BitMap64) -> None:
        """Take note of them: the copy goes with the last."""
        self._left = self._left - rows

    def begin(self, tell: Callable[..., None], unfinished: Callable[[], int]) -> None:
        """Tell of the order."""
        del unfinished
        tell_order(self._choice, tell)

    def stop(self) -> None:
        """Read no row any more."""
        self._stopped.set()

    def give_back(self) -> None:
        """Leave the copy to a later start, unless nothing is left to be done."""
        self.stop()
        if self._copy and not self._left:
            self._copy.unlink(missing_ok=True)


def tell_order(choice: OrderDecision, tell: Callable[..., None]) -> None:
    """Log the order decision and write it as an event."""
    log.info("%s", choice)
    tell("order", **choice.as_dict())
