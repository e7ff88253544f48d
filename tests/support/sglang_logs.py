"""Logs as each generation of SGLang writes them, and the advice that they lead to."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from batchrunner.job.spec import Job
from batchrunner.runner.advise import advise
from batchrunner.sglang.flags import of_arguments
from batchrunner.sglang.logs.reader import LogReader
from batchrunner.tuning.advise import AdviceReport
from batchrunner.tuning.rules import Advice, apply_all
from batchrunner.tuning.situation import ClientActivity, Situation
from tests.conftest import ROOT

RETRACT = (
    "KV cache pool is full. Retract requests. #retracted_reqs: 1, #new_tokens_gained: 206, "
    "#new_token_ratio: 0.0980 -> 1.0000"
)


@dataclass(frozen=True)
class Generation:
    """How a release writes: `r` running, `q` queue, `t` tokens, `u` usage, `g` graph, `p` tokens/s."""

    decode: str
    prefill: str
    retraction: str
    rank: str = " TP0"


_PREFILL = (
    "Prefill batch, #new-seq: {n}, #new-token: {new}, #cached-token: {hit}, token usage: {u:.2f}, "
    "#running-req: {r}, #queue-req: {q}, #pending-token: 0, cuda graph: False, "
    "input throughput (token/s): 812.10"
)
GENERATIONS = {
    "0.5.16": Generation(
        "Decode batch, #running-req: {r}, #token: {t}, token usage: {u:.2f}, accept len: 2.31, "
        "accept rate: 0.77, cuda graph: {g}, gen throughput (token/s): {p:.2f}, #queue-req: {q}",
        _PREFILL,
        RETRACT,
        " DP0 TP0",
    ),
    "0.5.23": Generation(
        "Decode batch [417], #running-req: {r}, #token: {t}, token usage: {u:.2f}, cuda graph: {g}, "
        "gen throughput (token/s): {p:.2f}, #queue-req: {q}, est. decode TFLOPS/s (per GPU): 81.20",
        _PREFILL,
        RETRACT,
        "",
    ),
    "hybrid": Generation(
        "Decode batch, #running-req: {r}, #full token: {t}, full token usage: 0.11, #swa token: 90, "
        "swa token usage: {u:.2f}, mamba num: 9, mamba usage: 0.20, cuda graph: {g}, "
        "gen throughput (token/s): {p:.2f}, #queue-req: {q}",
        _PREFILL.replace("token usage", "full token usage"),
        RETRACT.replace("gained: 206", "gained: 206, #mamba_num_gained: 3"),
        " TP0 EP0",
    ),
}


class LogWriter:
    """Writes a log of one generation, a line every `step_s` seconds."""

    def __init__(self, generation: str = "0.5.23", step_s: float = 2.0) -> None:
        self.form = GENERATIONS[generation]
        self.lines: list[str] = []
        self.now = datetime(2026, 3, 1, 23, 59, 30, tzinfo=UTC)
        self.step_s = step_s

    def say(self, text: str) -> LogWriter:
        """Write a line."""
        self.lines.append(f"[{self.now:%Y-%m-%d %H:%M:%S}{self.form.rank}] {text}")
        return self

    def decode(
        self, lines: int = 20, *, r: int = 233, q: int = 317, u: float = 0.95, g: bool = True, p: float = 4594
    ) -> LogWriter:
        """Write decode lines, and between them what every log is full of."""
        for _ in range(lines):
            self.say(self.form.decode.format(r=r, q=q, u=u, t=round(u * 450_000), g=g, p=p))
            self.say('INFO:     127.0.0.1:50000 - "POST /generate HTTP/1.1" 200 OK')
            self.now += timedelta(seconds=self.step_s)
        return self

    def prefill(self, passes: int = 20, *, n: int = 8, new: int = 4000, hit: int = 0) -> LogWriter:
        """Write prefill lines."""
        for _ in range(passes):
            self.say(self.form.prefill.format(n=n, new=new, hit=hit, u=0.5, r=100, q=300))
        return self

    def retract(self, lost: int = 20_600) -> LogWriter:
        """Write that the pool was full, and the tokens that this lost where the release tells."""
        return self.say(re.sub(r"(?<=gained: )\d+", str(lost), self.form.retraction))

    def started(
        self, *, gpu_gb: float = 7.2, most: int = 2048, chunk: int = 8192,
        card_gb: float = 78.5, weights_gb: float = 15.1, before_ready: Sequence[str] = (),
        **arguments: object,
    ) -> LogWriter:  # fmt: skip
        """Write what a server says when it starts."""
        values = {
            "model_path": "/models/llama", "tp_size": 1, "mem_fraction_static": 0.83,
            "cuda_graph_max_bs": 256,
            "schedule_conservativeness": 1.0, "chunked_prefill_size": chunk, "max_running_requests": None,
            "schedule_policy": "fcfs", "enable_metrics": True, "enable_cache_report": True, "device": "cuda",
            "attention_backend": "fa3", "kv_cache_dtype": "auto", "quantization": None, "dp_size": 1,
            "max_total_tokens": None, "enable_hierarchical_cache": False, "ep_size": 1,
            "moe_dense_tp_size": None,
            "decode_attention_backend": None, "enable_torch_compile": False, "disable_cuda_graph": False,
            "enable_dp_attention": False, **arguments,
        }  # fmt: skip
        self.say(
            f"server_args=ServerArgs({', '.join(f'{name}={value!r}' for name, value in values.items())})"
        )
        self.say(f"Load weight begin. avail mem={card_gb:.2f} GB")
        self.say(
            "Load weight end. elapsed=3.11 s, type=LlamaForCausalLM, "
            f"avail mem={card_gb - weights_gb:.2f} GB, mem usage={weights_gb:.2f} GB."
        )
        for line in before_ready:
            self.say(line)
        return self.say(
            f"max_total_num_tokens=450000, chunked_prefill_size={chunk}, max_prefill_tokens=16384, "
            f"max_running_requests={most}, context_len=8192, available_gpu_mem={gpu_gb:.2f} GB"
        )

    def text(self) -> str:
        """Return the log."""
        return "\n".join(self.lines) + "\n"

    def write(self, directory: Path, name: str = "server.log") -> Path:
        """Write it to a file."""
        path = directory / name
        path.write_text(self.text())
        return path


def interleaved(*logs: LogWriter) -> Iterator[str]:
    """Return the lines of several logs in turn, as `srun --label` mixes them."""
    for lines in zip(*(log.lines for log in logs), strict=True):
        for number, line in enumerate(lines):
            yield f"{number}: {line}"


GUIDES = {  # verbatim: which guide, its line, what it reads
    "G2": (
        (
            "Decode batch. #running-req: 233, #token: 370959, token usage: 0.82, cuda graph: True, "
            "gen throughput (token/s): 4594.01, #queue-req: 317"
        ),
        "median #running-req 233, #queue-req 317 (0 in 0% of samples), token usage 0.82",
    ),
    "G3": (
        (
            "Decode batch. #running-req: 233, #token: 370959, token usage: 0.82, "
            "gen throughput (token/s): 4594.01, #queue-req: 417"
        ),
        "median #running-req 233, #queue-req 417 (0 in 0% of samples), token usage 0.82",
    ),
    "G4": (
        (
            "Decode batch. #running-req: 229, #token: 1320576, token usage: 1.00, cuda graph: True, "
            "gen throughput (token/s): 2498.69, #queue-req: 27,"
        ),
        "median #running-req 229, #queue-req 27 (0 in 0% of samples), token usage 1.00",
    ),
}
RETRACTIONS = {  # verbatim
    "G2": "KV cache pool is full. Retract requests. #retracted_reqs: 1, #new_token_ratio: 0.9998 -> 1.0000",
    "G3": "decode out of memory happened, #retracted_reqs: 1, #new_token_ratio: 0.9998 -> 1.0000",
}

FLAG_LOGS = ROOT / "tests" / "support" / "logs" / "flags"
"""Lines from the middle of runs of the real engine (0.5.23, CPU, tiny model), each with one bad flag."""


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
    """Return what is to be changed, by the rule that says so; each field of the job in it has to exist."""
    by_rule = {advice.rule: advice.change for advice in judgement.advice if advice.change}
    for change in by_rule.values():
        for quoted in re.findall("`([^`]*)`", change):
            assert quoted in PROGRAMS or _first_key(quoted) in Job.model_fields, change
    return by_rule


PROGRAMS = {"ulimit -n", "dmesg", "oom-kill"}
"""What advice quotes and is no field of a job."""


def _first_key(setting: str) -> str:
    """Return the job's field that a setting such as `engine.replicas` or `window: auto` begins with."""
    return re.split("[.:]", setting)[0]


def cuda_oom(frame: str) -> str:
    return (
        "Scheduler hit an exception: Traceback (most recent call last):\n"
        f'  File "/sglang/srt/model_executor/model_runner.py", line 1790, in {frame}\n'
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.96 GiB. "
        "GPU 0 has a total capacity of 79.11 GiB of which 1.50 GiB is free."
    )


def advice_of(log: LogReader, **client: Any) -> list[Advice]:
    """Return what to change after a run of a launched server, by its log and what its client did."""
    situation = Situation(log.series, log.series, log.facts, ClientActivity(**client))
    flags = of_arguments("0.5.23", log.facts.arguments)
    return [advice for advice in apply_all(situation, flags) if advice.change]
