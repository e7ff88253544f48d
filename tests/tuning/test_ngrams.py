"""N-gram speculation: replay, cost of the check, exactness, and the steps of a corpus."""

from typing import Any

import pytest

from batchrunner.tuning.ngrams import (
    LEAST_CORPUS,
    LEAST_CORPUS_GAIN,
    MOST_CORPUS,
    checking_cost,
    corpus_gain,
    corpus_step,
    is_exact,
    words_a_step,
)

COMMON = [" ".join(f"w{17 * sentence + word}" for word in range(12)) + "." for sentence in range(300)]
"""Sentences, of which each answer has some."""


def of_sentences(answers: int) -> list[str]:
    """Return answers of five of the common sentences each, in an order that does not repeat itself."""
    return [
        " ".join(COMMON[(7 * answer + 61 * part) % len(COMMON)] for part in range(5))
        for answer in range(answers)
    ]


def test_words_of_a_step_with_n_grams() -> None:
    """Outputs that say what others said are foreseen; those that differ are not."""
    reports = [f"The patient has a stable condition and number {n}." for n in range(50)]
    assert words_a_step(reports) > 3
    assert words_a_step([" ".join(f"w{n * 100 + k}" for k in range(40)) for n in range(20)]) < 2.1
    assert words_a_step([f"{n}{n}x" for n in range(20)]) == 1
    assert words_a_step([]) == 1


def test_a_corpus_pays_only_if_answers_repeat_each_other() -> None:
    """Common sentences are worth a corpus; an answer that repeats itself, or nothing, is not."""
    alone = [f"a{n} b{n} c{n} d{n} " * 20 for n in range(40)]
    assert corpus_gain(of_sentences(80)) >= LEAST_CORPUS_GAIN
    assert corpus_gain(alone) < LEAST_CORPUS_GAIN
    assert corpus_gain([]) == 1


@pytest.mark.parametrize(
    ("running", "kv_share", "cost"),
    [
        (1, 0.0, 1.0),  # reading the weights takes all the time
        (25, 0.0, 1.0),
        (100, 0.0, 4.0),
        (300, 0.0, 12.0),  # computing takes all the time
        (3000, 0.0, 12.0),
        (100, 5.0, 1.5),  # a long context is read once for all drafted tokens
    ],
)
def test_checks_are_free_only_for_small_batches(running: float, kv_share: float, cost: float) -> None:
    """Up to the tokens for which memory is the limit; then they cost what computing costs."""
    assert checking_cost(running, kv_share) == pytest.approx(cost)


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        ({"temperature": 0.7, "top_p": 0.9, "top_k": 40, "max_new_tokens": 9}, True),
        ({"min_p": 0.1}, False),
        ({"repetition_penalty": 1.1}, False),
        ({"presence_penalty": {"column": "p"}}, False),
        ({"custom_params": {"a": 1}}, False),
        (None, False),
    ],
)
def test_answers_keep_their_distribution(sampling: dict[str, Any] | None, *, expected: bool) -> None:
    """Where SGLang checks drafts by the probabilities that it samples from; unknown sampling is not."""
    assert is_exact(sampling) == expected


def test_the_life_of_a_corpus() -> None:
    """It is loaded once it is large enough, replaced when it doubles, removed when it is of no use."""
    assert corpus_step(LEAST_CORPUS - 1, 0, 0) == "keep"
    assert corpus_step(LEAST_CORPUS, 0, 0) == "add"
    assert corpus_step(2 * LEAST_CORPUS - 1, 9, LEAST_CORPUS) == "keep"
    assert corpus_step(2 * LEAST_CORPUS, 9, LEAST_CORPUS) == "add"
    assert corpus_step(10 * MOST_CORPUS, 9, MOST_CORPUS) == "keep"
    assert corpus_step(10 * MOST_CORPUS, MOST_CORPUS, MOST_CORPUS) == "remove"
    assert corpus_step(2 * LEAST_CORPUS, 2 * LEAST_CORPUS, 0) == "keep"
