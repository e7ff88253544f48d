"""What the signs of a server mean, and what to change: from logs of every generation, each failure."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

import pytest

from batchrunner.advise.advise import advise
from batchrunner.engines.flags import CHECK_HELP, parse_help
from batchrunner.engines.logs.series import Thresholds
from tests.conftest import ROOT, batchrun
from tests.support.advice import GUIDES, RETRACTIONS, changes, judged, stamped
from tests.support.sglang_logs import GENERATIONS, LogWriter

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
from pathlib import Path

LOGS = ROOT / "tests" / "support" / "logs"
READY = {  # verbatim
    "G2": (
        (
            "[2025-08-11 17:17:03] max_total_num_tokens=665690, chunked_prefill_size=8192, "
            "max_prefill_tokens=16384, max_running_requests=4096, context_len=65536, "
            "available_gpu_mem=13.50 GB"
        ),
        "memory-left",
    ),
    "G4": (
        (
            "[2025-11-11 13:01:09 TP0] max_total_num_tokens=1522816, chunked_prefill_size=1024, "
            "max_prefill_tokens=2048, max_running_requests=4096, context_len=32768, available_gpu_mem=4.64 GB"
        ),
        "memory-tight",
    ),
}


@pytest.mark.parametrize("guide", GUIDES)
def test_a_guides_line_is_a_reading(guide: str, tmp_path: Path) -> None:
    """One line of a guide is read whole, and is no ground for advice."""
    line, reading = GUIDES[guide]
    found = judged(line, tmp_path)
    assert reading in found.lines()[0]
    assert "A reading, not advice" in found.lines()[0]
    assert changes(found) == {}


def test_too_short_a_time_never_reads_as_long_enough(tmp_path: Path) -> None:
    """The time and the least time stand in one sentence."""
    path = tmp_path / "sglang.log"
    path.write_text(stamped(*[GUIDES["G4"][0]] * 3))
    limits = Thresholds(span_s=4.2, samples=2.5)
    reading = advise(str(path), limits).reading()
    assert reading.endswith("over 4 s, and advice needs 2.5 over 4.2 s")


@pytest.mark.parametrize("guide", GUIDES)
def test_a_guides_line_again_and_again_is_a_sign(guide: str, tmp_path: Path) -> None:
    """Frequent, the guides' own examples mean what the guides say: too conservative, or fine."""
    found = judged(stamped(*[GUIDES[guide][0]] * 40), tmp_path)
    assert set(changes(found)) == ({"conservative"} if guide != "G4" else set())


@pytest.mark.parametrize("guide", READY)
def test_a_guides_ready_line_is_judged_by_its_memory(guide: str, tmp_path: Path) -> None:
    """13.50 GB is too much and 4.64 GB too little; without the card's memory the step is the guides'."""
    line, rule = READY[guide]
    found = changes(judged(line, tmp_path))
    assert set(found) == {rule}
    assert "in steps of 0.01" in found[rule]


@pytest.mark.parametrize("guide", RETRACTIONS)
def test_a_guides_retraction_is_counted(guide: str, tmp_path: Path) -> None:
    """Occasional ones are said to be fine, frequent ones are advised on."""
    line = GUIDES["G4"][0]
    rare = judged(stamped(*[line] * 40, RETRACTIONS[guide]), tmp_path)
    assert changes(rare) == {}
    assert any("up to about one a minute is fine" in line for line in rare.lines())
    often = judged(stamped(*[line, line, RETRACTIONS[guide]] * 20), tmp_path)
    assert changes(often) == {"retractions": "--schedule-conservativeness 1.3"}


def test_what_retractions_cost_decides() -> None:
    """Newer releases say how many tokens the retracted requests had in the pool: often is not much."""
    log = LOGS / "real_retractions.log"
    gained = sum(map(int, re.findall(r"#new_tokens_gained: (\d+)", log.read_text())))
    cost = f"{gained:,} tokens are computed again, 16% of those generated"
    for most, change in ((0.25, ""), (0.15, "--schedule-conservativeness 1.3")):
        judgement = advise(str(log), Thresholds(recomputed=most))
        found = next(advice for advice in judgement.advice if advice.rule == "retractions")
        assert "9.1 a minute" in found.sign
        assert cost in found.sign
        assert found.change == change
    assert Thresholds().recomputed == 0.25


def test_few_samples_are_no_verdict_on_retractions(tmp_path: Path) -> None:
    """Ten a line are not fine because there are few lines: the reading counts them, and that is all."""
    log = LogWriter(step_s=30)
    for _ in range(7):
        log.decode(1, u=0.99)
        for _ in range(10):
            log.retract()
    found = judged(log.text(), tmp_path)
    assert "70 retractions" in found.lines()[0]
    assert [advice.rule for advice in found.advice] == []


REAL: dict[str, set[str]] = {
    "real_conservative.log": {"conservative"},
    "real_queue_empty.log": {"queue-empty"},
    "real_retractions.log": {"pool-small"},  # 8,000 tokens for 128 places, and the machine has memory left
    "real_after_advice.log": {"conservative"},  # 0.3 now, and max_new_tokens is still far above the outputs
    "real_waves.log": set(),  # outputs of one length: usage goes from 0.4 to 0.99 again and again
}
"""Thinned out logs of SGLang 0.5.23 on a CPU, each provoked by one wrong setting (benchmarks/advice.py)."""


@pytest.mark.parametrize("name", [path.name for path in LOGS.glob("*.log")])
def test_real_logs(name: str) -> None:
    """What was provoked on the real engine is found in what it wrote, and nothing else."""
    assert set(changes(advise(str(LOGS / name)))) == REAL[name]


SIGNS: dict[str, tuple[Callable[[LogWriter], object], set[str]]] = {
    "healthy": (lambda log: log.decode(40), set()),
    "healthy with its drain": (lambda log: log.decode(40).decode(18, q=0, r=90, u=0.4), set()),
    "healthy, rarely retracting": (lambda log: log.decode(20).retract().decode(40), set()),
    "empty queue": (lambda log: log.decode(40, q=0, u=0.5), {"queue-empty"}),
    "empty at times": (
        lambda log: [log.decode(2, q=0).decode(3, q=300) for _ in range(8)],
        {"queue-empty"},
    ),
    "deep queue": (lambda log: log.decode(40, q=2600), {"queue-deep"}),
    "too conservative": (lambda log: log.decode(40, u=0.62), {"conservative"}),
    "retracting": (lambda log: [log.decode(4, u=0.99).retract() for _ in range(9)], {"retractions"}),
}  # fmt: skip


@pytest.mark.parametrize("sign", SIGNS)
@pytest.mark.parametrize("generation", GENERATIONS)
def test_each_generation_shows_the_signs(generation: str, sign: str, tmp_path: Path) -> None:
    """The same load gives the same advice, however the release writes it; a healthy one gives none."""
    load, expected = SIGNS[sign]
    log = LogWriter(generation)
    load(log)
    found = judged(log.text(), tmp_path)
    assert set(changes(found)) == expected
    assert found.healthy == (not expected)


def test_a_flag_that_the_version_lacks_is_not_named(tmp_path: Path) -> None:
    """A server tells its flags by its arguments: advice uses those names, or says nothing."""
    load = LogWriter().decode(30, r=400, g=False).text()
    new = "server_args={'cuda_graph_max_bs_decode': 256, 'enable_metrics': True}\n"
    none = "server_args={'enable_metrics': True}\n"
    assert changes(judged(new + load, tmp_path)) == {"cuda-graph": "--cuda-graph-max-bs-decode 512"}
    assert changes(judged(none + load, tmp_path)) == {}


def test_a_log_without_arguments_asks_the_installed_sglang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What does not tell its flags is given the installed server's, or the warning that they are guessed."""
    load = LogWriter().decode(30, r=400, g=False).text()
    assert judged(load, tmp_path).lines()[-1] == f"({CHECK_HELP})"
    old = parse_help("  --cuda-graph-max-bs N", "0.5.2")
    monkeypatch.setattr("batchrunner.advise.advise.installed", lambda _: old)
    assert changes(judged(load, tmp_path)) == {"cuda-graph": "--cuda-graph-max-bs 512"}
    assert CHECK_HELP not in judged(load, tmp_path).lines()[-1]


def test_an_advice_is_whole(tmp_path: Path) -> None:
    """Each piece has its figures, share and span, the exact change, gain, cost and certainty."""
    (advice,) = judged(LogWriter().started().decode(40, u=0.62).text(), tmp_path).advice[:1]
    assert "below 0.9 (median 0.62)" in advice.sign
    assert "in 100% of 40 samples over 78 s" in advice.sign
    assert advice.args == {"schedule-conservativeness": 0.3}
    assert advice.change == "--schedule-conservativeness 0.3, or a max_new_tokens nearer to real outputs"
    assert advice.effect
    assert advice.tradeoff
    assert advice.certainty == "medium"
    assert advice.evidence["conservative_share"] == 1.0


def test_what_is_not_there_is_said(tmp_path: Path) -> None:
    """A path that is not there, a directory that is no run, a file that may not be read."""
    for source, words in [(tmp_path / "no", "no such file"), (tmp_path, "no run.json")]:
        result = batchrun("advise", source)
        assert result.exit_code == 2
        assert words in result.stderr


def test_a_card_that_is_not_known_is_said(tmp_path: Path) -> None:
    """A slip in --card would leave its advice away: one line says which names there are."""
    path = LogWriter().started(attention_backend="triton").decode(40).write(tmp_path)
    for name in ("RTX4090", "bogus"):
        wrong = batchrun("advise", path, "--card", name)
        assert wrong.exit_code == 2
        assert f"--card {name}: not known here; known are H100, H200" in wrong.stderr
    assert "attention-backend" in changes(advise(str(path), card="NVIDIA RTX 6000 Ada Generation"))


def test_json_is_for_machines(tmp_path: Path) -> None:
    """The same as data: what was read, whether it is healthy, each piece of advice with its flags."""
    path = LogWriter().started().decode(40, u=0.62).write(tmp_path)
    found = json.loads(batchrun("advise", path, "--json").stdout)
    assert found["healthy"] is False
    assert found["flags_known"] is True
    assert found["reading"]["median_queue"] == 317
    assert found["advice"][0]["rule"] == "conservative"
    assert found["advice"][0]["args"] == {"schedule-conservativeness": 0.3}


def test_healthy_is_an_answer(tmp_path: Path) -> None:
    """Where nothing is to be changed, that is said, with the figures."""
    lines = batchrun("advise", LogWriter().started().decode(40).write(tmp_path)).stdout.splitlines()
    assert lines[1:] == [
        (
            "healthy: median #running-req 233, #queue-req 317 (0 in 0%), token usage 0.95, 0 retractions, "
            "4,594 tokens/s"
        ),
        "healthy: available_gpu_mem is 7.20 GB when the server is ready: 5-10 GB is good",
    ]


def test_one_sample_is_one_sample(tmp_path: Path) -> None:
    """A single line of a log is no `1 samples`, and a single retraction no `1 retractions`."""
    log = LogWriter().started().decode(1, r=10, u=0.5)
    said = judged(log.text(), tmp_path).lines()[0]
    assert "1 sample over" in said
    assert "1 samples" not in said
