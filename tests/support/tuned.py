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
LOG = """
[2025-08-11 17:17:03] server_args=ServerArgs(mem_fraction_static=0.83, attention_backend='fa3', tp_size=1)
[2025-08-11 17:17:03] Load weight end. type=LlamaForCausalLM, dtype=torch.bfloat16, avail mem=63.50 GB, \
mem usage=15.00 GB.
[2025-08-11 17:17:03] max_total_num_tokens=665690, chunked_prefill_size=8192, max_prefill_tokens=16384, \
max_running_requests=4096, context_len=65536, available_gpu_mem=13.50 GB
[2025-08-11 17:18:03] Prefill batch, #new-seq: 2, #new-token: 800, #cached-token: 0, token usage: 0.10, \
#running-req: 30, #queue-req: 117
[2025-08-11 17:18:04] Decode batch, #running-req: 233, #token: 370959, token usage: 0.82, cuda graph: True, \
gen throughput (token/s): 4594.01, #queue-req: 317
[2025-08-11 17:18:05] Decode batch, #running-req: 300, #token: 370959, token usage: 0.82, cuda graph: False, \
gen throughput (token/s): 4594.01, #queue-req: 317
"""
"""The log of a trial."""
