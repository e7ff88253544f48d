"""N-gram speculation: its gain on a job's answers, and when to load earlier answers as a corpus.

With `--speculative-algorithm NGRAM`, SGLang looks up the last tokens of an answer in earlier outputs of the
same scheduler, drafts the tokens that followed them there, and checks the whole draft in one decode step.
There is no draft model. The answers stay the same if the job samples as `is_exact` requires. The module does
no I/O.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

MOST_ANSWERS = 400
"""Maximum number of answers on which n-gram speculation is replayed."""
MOST_WORDS = 1000
"""Maximum number of words of an answer on which n-gram speculation is replayed."""
MOST_WORDS_IN_ALL = 100_000
"""Number of words after which a replay ends. So many words take about a second."""
CONTEXTS = (8, 4, 3, 2, 1)
"""Lengths in words of the n-grams by which the speculation finds a draft, the longest first."""
CHECKED = 12
"""Number of tokens that a decode step checks for each request: SGLang's default of
`--speculative-num-draft-tokens`. The first of them is the last token of the answer so far."""
DRAFT = CHECKED - 1
"""Maximum number of tokens that a decode step drafts."""
WORD = re.compile(r"\s?\w+|\s?[^\w\s]|\s")
"""Matches a word or a punctuation mark with the space before it, which is about one token."""


def words_a_step(answers: Iterable[str], earlier: Iterable[str] = ()) -> float:
    """Simulate SGLang's n-gram speculation on answers; return the mean number of words per decode step.

    The result is 1 if no draft is ever right. The speculation looks up the last words of an answer, and
    drafts the words that followed them when they last occurred in any answer. It does not learn from prompts,
    except for their last words (0.5.23, ngram_worker). It can also draft from `earlier`, the answers that the
    server generated before.
    """
    # Maps each n-gram to the word that last followed it.
    next_word: dict[tuple[str, ...], str] = {}
    for answer in earlier:
        words = WORD.findall(answer)[:MOST_WORDS]
        _learn(next_word, words, range(len(words)))
    all_words = steps = 0
    for answer in answers:
        words = WORD.findall(answer)[:MOST_WORDS]
        all_words += len(words)
        begin = 0
        while begin < len(words):
            steps += 1
            # A step yields the drafted words that are right, and one word that the model itself generates.
            end = min(len(words), begin + _drafted(next_word, words, begin) + 1)
            _learn(next_word, words, range(begin, end))
            begin = end
        if all_words >= MOST_WORDS_IN_ALL:
            break
    return all_words / steps if steps else 1.0


def _learn(next_word: dict[tuple[str, ...], str], words: Sequence[str], indices: Iterable[int]) -> None:
    """Store the words at some indices of an answer under the n-grams that precede them."""
    for index in indices:
        next_word |= dict.fromkeys(_contexts(words, index), words[index])


def _drafted(next_word: Mapping[tuple[str, ...], str], words: Sequence[str], begin: int) -> int:
    """Return the number of words from `begin` on that a draft would predict."""
    end = begin
    while end < min(len(words), begin + DRAFT) and words[end] == _expected(next_word, words, end):
        end += 1
    return end - begin


def _contexts(words: Sequence[str], index: int) -> list[tuple[str, ...]]:
    """Return the n-grams that precede the word at an index, the longest first."""
    return [tuple(words[index - size : index]) for size in CONTEXTS if size <= index]


def _expected(next_word: Mapping[tuple[str, ...], str], words: Sequence[str], index: int) -> str | None:
    """Return the word that last followed the longest known n-gram before an index; None if none is known."""
    contexts = _contexts(words, index)
    return next((next_word[context] for context in contexts if context in next_word), None)


COMPUTE_BOUND = 300
"""With more tokens than this in a pass, a dense model's matrix products take longer than reading its weights.
It is computing speed divided by memory bandwidth. By the data sheet of an H100, 989 TFLOP/s divided by 3.35
TB/s is 295 tokens for 16-bit weights. An A100 has 153, an L40S 419."""


def checking_cost(running: float, kv_share: float) -> float:
    """Return by what factor checking drafts makes a decode step longer.

    While `running` requests decode, the step reads the weights once, computes `CHECKED` tokens instead of one
    for each request, and reads the KV cache once as before. `kv_share` is the size of the KV cache in use
    divided by that of the weights. The result is calculated, not measured.
    """
    # In units of one read of the weights, below which the matrix products never fall.
    weights = max(1.0, running / COMPUTE_BOUND)
    weights_with_drafts = max(1.0, running * CHECKED / COMPUTE_BOUND)
    return (weights_with_drafts + kv_share) / (weights + kv_share)


INEXACT = ("min_p", "frequency_penalty", "presence_penalty", "repetition_penalty", "min_new_tokens")
"""Sampling parameters that SGLang 0.5.23 ignores (`min_p`) or applies only roughly (penalties) while it
checks drafts (`eagle_sample` in speculative/eagle_utils.py)."""
IGNORED = ("custom_params", "max_thinking_tokens")
"""Sampling parameters whose logit processors SGLang 0.5.23 does not call while it checks drafts."""


def is_exact(sampling: Mapping[str, Any] | None) -> bool:
    """Tell whether answers keep their distribution with n-gram speculation; False if `sampling` is None.

    `sampling` is the job's section of that name; None if unknown. With temperature, `top_p` and `top_k`,
    SGLang accepts a drafted token with exactly the probability that the model gives it.
    """
    return sampling is not None and all(sampling.get(name) is None for name in INEXACT + IGNORED)


CORPUS_BUDGET = 8
"""`--speculative-ngram-external-sam-budget`: number of drafted tokens that come from a corpus, if one is
loaded. SGLang's own test uses 8 of 12. With the default, 0, a corpus has no effect."""
LEAST_CORPUS, MOST_CORPUS = 50_000, 500_000
"""Minimum and maximum number of tokens in a corpus. SGLang's own memory of earlier outputs holds about as
many tokens as the maximum (10 million nodes, up to 18 for a token). A corpus takes about 400 bytes of the
server's memory for a token."""

LEAST_CORPUS_GAIN = 1.2
"""A corpus of earlier answers is loaded only if it raises the number of words per decode step by at least
this factor. Its drafts replace drafts from the answer itself. With SGLang's own matcher, a corpus lost 4 to
13 % on answers that repeat only themselves, and gained 50 % on answers made of common sentences."""


def corpus_gain(answers: Sequence[str]) -> float:
    """Return by what factor a corpus raises the number of words per decode step.

    The first half of the answers is the corpus for the second half.
    """
    half = len(answers) // 2
    return words_a_step(answers[half:], earlier=answers[:half]) / words_a_step(answers[half:])


CorpusStep = Literal["add", "remove", "keep"]


def corpus_step(available: int, generated: int, loaded: int) -> CorpusStep:
    """Return what to do about a server's corpus. All arguments are numbers of tokens.

    `available` counts the text of the run's answers, `generated` the part of this text that the server has
    generated since its start, and `loaded` the server's present corpus. SGLang drafts better from what a
    server generated itself. So a corpus helps only a server that has generated less than the corpus holds:
    after a start, or one of many replicas. A corpus cannot grow. It is replaced when a new one would be twice
    as large.
    """
    size = min(available, MOST_CORPUS)
    if generated >= size:
        return "remove" if loaded else "keep"
    if size >= max(LEAST_CORPUS, 2 * loaded):
        return "add"
    return "keep"
