"""Ask for advice on the text of a log, and look at what is to be changed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from batchrunner.advise.advise import AdviceReport, advise
from batchrunner.advise.rules import apply_all
from batchrunner.advise.situation import ClientActivity, Situation
from batchrunner.engines.flags import of_arguments
from batchrunner.engines.logs.series import Thresholds
from tests.conftest import ROOT

if TYPE_CHECKING:
    from pathlib import Path

    from batchrunner.advise.rules import Advice
    from batchrunner.engines.logs.reader import LogReader

GUIDES = {  # verbatim: which guide, its line, what it reads
    "G2": (
        (
            "Decode batch. #running-req: 233, #token: 370959, token usage: 0.82, cuda graph: True, "
            "gen throughput (token/s): 4594.01, #queue-req: 317"
        ),
        "median #running-req 233, #queue-req 317 (0 in 0%), token usage 0.82",
    ),
    "G3": (
        (
            "Decode batch. #running-req: 233, #token: 370959, token usage: 0.82, "
            "gen throughput (token/s): 4594.01, #queue-req: 417"
        ),
        "median #running-req 233, #queue-req 417 (0 in 0%), token usage 0.82",
    ),
    "G4": (
        (
            "Decode batch. #running-req: 229, #token: 1320576, token usage: 1.00, cuda graph: True, "
            "gen throughput (token/s): 2498.69, #queue-req: 27,"
        ),
        "median #running-req 229, #queue-req 27 (0 in 0%), token usage 1.00",
    ),
}
RETRACTIONS = {  # verbatim
    "G2": "KV cache pool is full. Retract requests. #retracted_reqs: 1, #new_token_ratio: 0.9998 -> 1.0000",
    "G3": "decode out of memory happened, #retracted_reqs: 1, #new_token_ratio: 0.9998 -> 1.0000",
}

FLAG_LOGS = ROOT / "tests" / "support" / "logs" / "flags"
"""Lines from the middle of runs of the real engine (0.5.23, CPU, tiny model), each with one bad flag."""
QUICK = Thresholds(span_s=0.2, samples=3)
"""Thresholds for a server that a test watches for a fraction of a second."""


def stamped(*lines: str) -> str:
    """Return lines of a log, two seconds apart."""
    return "".join(
        f"[2026-03-01 12:{2 * n // 60:02}:{2 * n % 60:02}] {line}\n" for n, line in enumerate(lines)
    )


def judged(text: str, directory: Path, **options: Any) -> AdviceReport:
    path = directory / "server.log"
    path.write_text(text)
    return advise(str(path), **options)


def changes(judgement: AdviceReport) -> dict[str, str]:
    """Return what is to be changed, by the rule that says so."""
    return {advice.rule: advice.change for advice in judgement.advice if advice.change}


def cuda_oom(frame: str) -> str:
    return (
        "Scheduler hit an exception: Traceback (most recent call last):\n"
        f'  File "/sglang/srt/model_executor/model_runner.py", line 1790, in {frame}\n'
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.96 GiB. "
        "GPU 0 has a total capacity of 79.11 GiB of which 1.50 GiB is free."
    )


def advice_of(log: LogReader, **client: Any) -> list[Advice]:
    """Return what to change after a run of a launched server, by its log and what its client did."""
    situation = Situation(log.series, log.series, log.facts, ClientActivity(kind="server", **client))
    flags = of_arguments("0.5.23", log.facts.arguments)
    return [advice for advice in apply_all(situation, flags) if advice.change]
