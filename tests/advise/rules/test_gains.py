"""What a change would gain is estimated from the log's own pass times, and what gains most comes first."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from batchrunner.advise.rules.table import apply_all
from batchrunner.engines.flags import Flags
from tests.support.advice import changes, judged
from tests.support.sglang_logs import LogWriter

if TYPE_CHECKING:
    from pathlib import Path

    from batchrunner.advise.rules.rule import Advice

NEW_FLAGS = Flags(
    "0.5.23", frozenset({"prefill-decode-interval", "chunked-prefill-size", "max-running-requests"})
)


@dataclass(frozen=True)
class Server:
    """Seconds that a server takes for each kind of work."""

    step_s: float = 0.010
    decoded_s: float = 0.0001
    pass_s: float = 0.020
    token_s: float = 0.00002
    noise: float = 0.01

    def log(
        self, intervals: int, *, running: tuple[int, int], passes: tuple[int, int], new: tuple[int, int],
        most: int = 2048, chunk: int = 512, u: float = 0.5, **arguments: Any,
    ) -> tuple[LogWriter, dict[str, float]]:  # fmt: skip
        """Return the log of a random run, and the seconds of each kind of work in it.

        Each of `running`, `passes` (a decode line's) and `new` (tokens of a pass) is a range.
        """
        made = random.Random(7)
        log = LogWriter().started(most=most, chunk=chunk, max_running_requests=most, **arguments)
        spent = dict.fromkeys(("steps", "decoded", "passes", "full", "tokens"), 0.0)
        for _ in range(intervals):
            now, before = made.randint(*running), sum(spent[kind] for kind in spent if kind != "full")
            for _ in range(made.randint(*passes)):
                tokens = made.randint(*new)
                log.prefill(1, n=max(1, tokens // 60), new=tokens)
                spent["passes"] += self.pass_s
                spent["full"] += self.pass_s if tokens >= 0.9 * chunk else 0
                spent["tokens"] += self.token_s * tokens
            spent["steps"] += 40 * self.step_s
            spent["decoded"] += 40 * now * self.decoded_s
            seconds = sum(spent[kind] for kind in spent if kind != "full") - before
            seconds *= 1 + made.uniform(-self.noise, self.noise)
            log.decode(1, r=now, u=u, p=40 * now / seconds)
        return log, spent


def total(spent: dict[str, float]) -> float:
    return sum(seconds for kind, seconds in spent.items() if kind != "full")


def advice_of(log: LogWriter, directory: Path, flags: Flags = NEW_FLAGS) -> dict[str, Advice]:
    situation = judged(log.text(), directory).situation
    return {advice.rule: advice for advice in apply_all(situation, flags) if advice.change}


def test_a_small_chunk(tmp_path: Path) -> None:
    """Its full passes cost their fixed time too often: how often is known, and so is the gain."""
    server = Server(pass_s=0.05)
    log, spent = server.log(60, running=(200, 400), passes=(4, 40), new=(300, 560), chunk=512)
    found = advice_of(log, tmp_path)["prefill-full"]
    chunk = found.args["chunked-prefill-size"]
    factor = chunk / 512
    assert factor in {2, 4, 8}
    wanted = total(spent) / (total(spent) - spent["full"] * (1 - 1 / factor))
    assert found.estimated_gain == pytest.approx(wanted, rel=0.03)
    assert f"about {found.estimated_gain:.2f} times the throughput" in "\n".join(found.lines())


def test_a_chunk_that_costs_nothing(tmp_path: Path) -> None:
    """Full passes whose fixed time is small are as they should be, however small the chunk is."""
    log, _ = Server(pass_s=0.002, token_s=0.0002).log(
        60, running=(200, 400), passes=(4, 40), new=(10, 560), chunk=512
    )
    assert "prefill-full" not in advice_of(log, tmp_path)


def test_passes_that_are_all_alike(tmp_path: Path) -> None:
    """Then a prefill pass is taken to cost what a decode step costs beside its requests."""
    server = Server(step_s=0.02, pass_s=0.02)
    log, spent = server.log(60, running=(200, 400), passes=(10, 40), new=(512, 512), chunk=512)
    found = advice_of(log, tmp_path)["prefill-full"]
    wanted = total(spent) / (total(spent) - spent["full"] * (1 - 512 / found.args["chunked-prefill-size"]))
    assert found.estimated_gain == pytest.approx(wanted, rel=0.05)
    assert found.certainty == "low"


def test_too_few_places(tmp_path: Path) -> None:
    """More requests in a step share its fixed time."""
    server = Server(step_s=0.02)
    log, spent = server.log(60, running=(48, 64), passes=(0, 3), new=(30, 400), most=50, u=0.3)
    found = advice_of(log, tmp_path)["running-capped"]
    then = found.args["max-running-requests"]
    wanted = total(spent) / (total(spent) - spent["steps"] * (1 - 50 / then))
    assert found.estimated_gain == pytest.approx(wanted, rel=0.05)


def test_too_few_places_and_a_small_chunk(tmp_path: Path) -> None:
    """Both are named at once, and first the one that gains more."""
    for step_s, pass_s, first in ((0.08, 0.06, "running-capped"), (0.004, 0.05, "prefill-full")):
        server = Server(step_s=step_s, pass_s=pass_s)
        log, _ = server.log(60, running=(48, 64), passes=(4, 40), new=(40, 70), most=50, chunk=64, u=0.3)
        found = advice_of(log, tmp_path)
        assert next(iter(found)) == first
        assert set(found) == {"running-capped", "prefill-full"}
        assert all(advice.estimated_gain and advice.estimated_gain > 1.05 for advice in found.values())


def test_small_prefill_passes(tmp_path: Path) -> None:
    """Decoding that stops for a prompt or two at nearly every step may go on for some steps."""
    server = Server(pass_s=0.03)
    log, spent = server.log(60, running=(100, 200), passes=(8, 24), new=(50, 200), chunk=8192)
    found = advice_of(log, tmp_path)["small-prefills"]
    steps = found.args["prefill-decode-interval"]
    assert 2 < steps < 40
    assert 1.05 < (found.estimated_gain or 0) < total(spent) / (total(spent) - spent["passes"])
    assert "small-prefills" not in advice_of(log, tmp_path, Flags("0.4.1", frozenset({"tp-size"})))
    assert "small-prefills" not in advice_of(log, tmp_path, Flags())  # an old release may not have the flag
    rare, _ = server.log(60, running=(100, 200), passes=(0, 2), new=(50, 200), chunk=8192)
    assert "small-prefills" not in advice_of(rare, tmp_path)
    already, _ = server.log(
        60, running=(100, 200), passes=(8, 24), new=(50, 200), chunk=8192, prefill_decode_interval=8
    )
    assert "small-prefills" not in advice_of(already, tmp_path)


def test_pauses_do_not_count(tmp_path: Path) -> None:
    """An interval in which the server waited for requests says nothing of its passes."""
    server = Server(pass_s=0.05)
    log, spent = server.log(60, running=(200, 400), passes=(4, 40), new=(300, 560), chunk=512)
    for _ in range(3):
        log.prefill(2, new=400).decode(1, r=300, u=0.5, p=1.5)  # 8,000 s
    found = advice_of(log, tmp_path)["prefill-full"]
    wanted = total(spent) / (total(spent) - spent["full"] * (1 - 512 / found.args["chunked-prefill-size"]))
    assert found.estimated_gain == pytest.approx(wanted, rel=0.03)


@pytest.mark.parametrize(
    "broken", ["p=0", "p=1e300", "steps"], ids=["no throughput", "an absurd throughput", "an absurd interval"]
)
def test_odd_figures_are_no_estimate(broken: str, tmp_path: Path) -> None:
    """Whatever a log says, advice comes without a traceback."""
    interval = -3 if broken == "steps" else 10**30
    log = LogWriter().started(most=64, chunk=512, decode_log_interval=interval)
    log.mixed_prefill(30, n=1, new=512).decode(30, r=64, u=0.3, p=0 if broken == "p=0" else 1e14)
    assert set(changes(judged(log.text(), tmp_path))) >= {"running-capped"}
