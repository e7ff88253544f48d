"""What the signs of a server mean, and what to change: from logs of every generation, each failure."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from batchrunner.runner.advise import advise
from batchrunner.sglang.flags import CHECK_HELP, parse_help
from batchrunner.tuning.signals import GUIDES as THRESHOLDS
from tests.conftest import ROOT, batchrun, printed
from tests.support.sglang_logs import GENERATIONS, GUIDES, RETRACTIONS, LogWriter, changes, judged, stamped

LOGS = ROOT / "tests" / "support" / "logs"


@pytest.mark.parametrize("guide", GUIDES)
def test_a_guides_line_is_a_sign_if_it_comes_often(guide: str, tmp_path: Path) -> None:
    """One line is read whole, and is no ground for advice; frequent, it means what the guides say."""
    line, reading = GUIDES[guide]
    found = judged(line, tmp_path)
    assert reading in found.lines()[0]
    assert "Too short for advice" in found.lines()[0]
    assert changes(found) == {}
    often = judged(stamped(*[line] * 40), tmp_path)
    assert set(changes(often)) == ({"conservative"} if guide != "G4" else set())


@pytest.mark.parametrize("guide", RETRACTIONS)
def test_a_guides_retraction_is_counted(guide: str, tmp_path: Path) -> None:
    """Occasional ones are said to be fine, frequent ones are advised on."""
    line = GUIDES["G4"][0]
    rare = judged(stamped(*[line] * 40, RETRACTIONS[guide]), tmp_path)
    assert changes(rare) == {}
    assert any("up to about one a minute is fine" in line for line in rare.lines())
    often = judged(stamped(*[line, line, RETRACTIONS[guide]] * 20), tmp_path)
    assert changes(often) == {"retractions": "--schedule-conservativeness 1.3"}


@pytest.mark.parametrize(("most", "change"), [(0.25, ""), (0.15, "--schedule-conservativeness 1.3")])
def test_what_retractions_cost_decides(monkeypatch: pytest.MonkeyPatch, most: float, change: str) -> None:
    """Newer releases say how many tokens the retracted requests had in the pool: often is not much."""
    log = LOGS / "real_retractions.log"
    gained = sum(map(int, re.findall(r"#new_tokens_gained: (\d+)", log.read_text())))
    monkeypatch.setattr(THRESHOLDS, "recomputed", most)
    judgement = advise(str(log))
    (found,) = (advice for advice in judgement.advice if advice.rule == "retractions")
    assert "9.1 a minute" in found.sign
    assert f"{gained:,} tokens are computed again, 16% of those generated" in found.sign
    assert found.change == change


REAL: dict[str, set[str]] = {
    "real_conservative.log": {"conservative"},
    "real_queue_empty.log": {"queue-empty"},
    "real_retractions.log": {"pool-small"},  # 8,000 tokens for 128 places, and the machine has memory left
    "real_after_advice.log": {"conservative"},  # 0.3 now, and max_new_tokens is still far above the outputs
    "real_waves.log": set(),  # outputs of one length: usage goes from 0.4 to 0.99 again and again
    "real_h200_small_model.log": {"cuda-graph"},  # 0.5.16: 4,096 rows of 135M, graphs up to 256
}
"""Thinned out logs of SGLang 0.5.23 on a CPU, each provoked by one wrong setting, and one of a card."""


@pytest.mark.parametrize("name", REAL)
def test_real_logs(name: str) -> None:
    """What was provoked on the real engine is found in what it wrote, and nothing else."""
    assert set(changes(advise(str(LOGS / name)))) == REAL[name]


def test_arguments_within_arguments() -> None:
    """SGLang 0.5.16 shows its graphs' sizes as objects within the server's arguments."""
    assert advise(str(LOGS / "real_h200_small_model.log")).situation.facts.graph_max_bs == 256


SIGNS: dict[str, tuple[Callable[[LogWriter], object], set[str]]] = {
    "healthy with its drain": (lambda log: log.decode(40).decode(18, q=0, r=90, u=0.4), set()),
    "healthy, rarely retracting": (lambda log: log.decode(20).retract().decode(40), set()),
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


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            "server_args={'cuda_graph_max_bs_decode': 256, 'enable_metrics': True}\n",
            {"cuda-graph": "--cuda-graph-max-bs-decode 512"},
        ),
        ("server_args={'enable_metrics': True}\n", {}),
        ("", {"cuda-graph": "--cuda-graph-max-bs 512"}),
    ],
    ids=["a newer release", "a release without it", "the installed release"],
)
def test_flags_are_those_of_the_version(
    arguments: str, expected: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The arguments in a log tell the flags, else the installed server does; else they are guessed."""
    text = arguments + LogWriter().decode(30, r=400, g=False).text()
    guessed = judged(text, tmp_path).lines()[-1] == f"({CHECK_HELP})"
    assert guessed is (not arguments)
    old = parse_help("  --cuda-graph-max-bs N", "0.5.2")
    monkeypatch.setattr("batchrunner.runner.advise.installed", lambda _: old)
    assert changes(judged(text, tmp_path)) == expected


def test_an_advice_is_whole(tmp_path: Path) -> None:
    """Each piece has its figures, share and span, the exact change, gain, cost and certainty."""
    path = LogWriter().started().decode(40, u=0.62).write(tmp_path)
    found = printed("advise", path)
    assert (found["healthy"], found["flags_known"]) == (False, True)
    assert found["reading"]["median_queue"] == 317
    advice = found["advice"][0]
    assert advice["rule"] == "conservative"
    assert "below 0.9 (median 0.62)" in advice["sign"]
    assert "in 100% of 40 samples over 78 s" in advice["sign"]
    assert advice["args"] == {"schedule-conservativeness": 0.3}
    job_change = "a max_new_tokens closer to real output lengths"
    assert advice["change"] == f"--schedule-conservativeness 0.3, or {job_change}"
    assert advice["effect"]
    assert advice["tradeoff"]
    assert advice["certainty"] == "medium"
    assert advice["evidence"]["conservative_share"] == 1.0


def test_healthy_is_an_answer(tmp_path: Path) -> None:
    """Where nothing is to be changed, that is said, with the figures."""
    lines = batchrun("advise", LogWriter().started().decode(40).write(tmp_path)).stdout.splitlines()
    assert lines[1:] == [
        (
            "healthy: median #running-req 233, #queue-req 317 (0 in 0% of samples), token usage 0.95, "
            "0 retractions, 4,594 tokens/s"
        ),
        "healthy: available_gpu_mem is 7.20 GB when the server is ready: 5-10 GB is good",
    ]
