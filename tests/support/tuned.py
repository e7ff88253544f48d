"""A search for the fastest flags in virtual time."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from typing import TYPE_CHECKING

from batchrunner.engines.flags import Flags
from batchrunner.tune.search import Search, key_of
from batchrunner.tune.space import Machine
from batchrunner.tune.tuner import TrialHistory, TuningSummary, run_search, summarize
from tests.support.tuning_lab import CPU, Lab, chat_rows

if TYPE_CHECKING:
    from batchrunner.tune.measurement import TrialResult
    from batchrunner.tune.space import Args

WRONG = {"schedule-conservativeness": 3, "max-running-requests": 8}
ROWS = chat_rows(4000)


class Kept(TrialHistory):
    """Finished trials in memory, without a file."""

    def __init__(self) -> None:
        self.results: defaultdict[bytes, list[TrialResult]] = defaultdict(list)

    def find(self, args: Args, turn: int) -> TrialResult | None:
        found = self.results[key_of(args)]
        return found[turn] if turn < len(found) else None

    def add(self, args: Args, result: TrialResult) -> None:
        self.results[key_of(args)].append(result)


def tuned(
    lab: Lab,
    args: Args = WRONG,
    *,
    machine: Machine = CPU,
    budget_s: float = 1800,
    kept: Kept | None = None,
) -> tuple[TuningSummary, Search]:
    search = Search(args, machine)
    spent_s = asyncio.run(run_search(search, kept or Kept(), lab.run, budget_s))
    return summarize(search, "job.yaml", "all rows", spent_s), search


CARD = Machine(Flags(), cpu=False, cards=1, card="NVIDIA H100 80GB HBM3", card_gb=80)
