"""What an external corpus adds to SGLang's n-gram speculation, by SGLang's own matcher, without a model.

The matcher is the C++ code of the installed SGLang. It is asked for a draft at each decode step and is told
the output, as SGLang's ngram_worker does. Words stand for tokens. The server generates the second half of
the answers. It knows nothing of the first half, or has it as a corpus, or has generated it before.
"""

import json
import random
from collections.abc import Sequence

import numpy as np
import pyarrow.parquet as pq
from sglang.srt.speculative.cpp_ngram.external_corpus import SEPARATOR_TOKEN
from sglang.srt.speculative.cpp_ngram.ngram_corpus import NgramCorpus

from batchrunner.tuning.ngrams import CHECKED, CORPUS_BUDGET, WORD
from benchmarks.measure import save

SEED = 3
DEPTH, BREADTH = 18, 10
"""SGLang's defaults of `--speculative-ngram-max-trie-depth` and `--speculative-ngram-max-bfs-breadth`."""
MOST_WORDS = 400
"""Maximum number of words of an answer."""
Answer = Sequence[int]
"""Numbers of the words of an answer."""


def answers_by_set() -> dict[str, list[str]]:
    """Return the sets of answers, by name."""
    generator = random.Random(SEED)
    words = [f"w{number}" for number in range(2000)]

    def some(count: int) -> str:
        return " ".join(generator.choice(words) for _ in range(count))

    sentences = [some(12) for _ in range(400)]
    docstrings = pq.read_table("data/docs.parquet", columns=["text"])["text"].to_pylist()
    return {
        "JSON": [json.dumps({"name": some(1), "score": 5, "reason": some(8)}) for _ in range(80)],
        "sentences": [". ".join(generator.choice(sentences) for _ in range(5)) for _ in range(90)],
        "docstrings": [text[:700] for text in docstrings[:60]],
    }


def words_a_step(
    answers: Sequence[Answer], *, generated: Sequence[Answer], corpus: Sequence[Answer]
) -> float:
    """Return the words per decode step of a server that has generated some answers and has a corpus."""
    matcher = NgramCorpus(
        DEPTH, 1, BREADTH, CHECKED, capacity=10_000_000, external_sam_budget=CORPUS_BUDGET if corpus else 0
    )
    if corpus:
        chunks = [[*corpus[0]], *([SEPARATOR_TOKEN, *answer] for answer in corpus[1:])]
        matcher.commit_external_corpus_load("corpus", matcher.load_external_corpus_named("corpus", chunks))
    for answer in generated:
        for end in range(1, len(answer) + 1):
            matcher.batch_put([[*answer[max(0, end - DEPTH) : end]]])
        matcher.synchronize()
    all_words = steps = 0
    for row, answer in enumerate(answers):
        all_words += len(answer)
        end = 0
        while end < len(answer):
            steps += 1
            if end:  # The prefill generates the first word.
                end += _right_words(matcher, row, answer, end)
            end += 1
            matcher.batch_put([[*answer[max(0, end - DEPTH) : end]]])
            matcher.synchronize()
    return all_words / steps


def _right_words(matcher: NgramCorpus, row: int, answer: Answer, end: int) -> int:
    """Return the number of words from `end` on that the drafted tree predicts."""
    draft, mask = matcher.batch_get([str(row)], [[*answer[max(0, end - DEPTH) : end]]], [end])
    ancestors = np.tril(mask.reshape(CHECKED, CHECKED), -1)
    parents = [int(nodes.nonzero()[0].max(initial=0)) for nodes in ancestors]
    node = right_words = 0
    for word in answer[end:]:
        children = (n for n in range(1, CHECKED) if parents[n] == node and draft[n] == word)
        node = next(children, 0)
        if not node:
            break
        right_words += 1
    return right_words


def main() -> None:
    """Measure all sets, and write benchmarks/results/corpora.json."""
    figures: dict[str, dict[str, float]] = {}
    for name, texts in answers_by_set().items():
        numbers: dict[str, int] = {}
        rows = [
            [numbers.setdefault(word, len(numbers)) for word in WORD.findall(text)][:MOST_WORDS]
            for text in texts
        ]
        rows = [row for row in rows if row]
        earlier, answers = rows[: len(rows) // 2], rows[len(rows) // 2 :]
        measured = {
            "new server": words_a_step(answers, generated=[], corpus=[]),
            "new server with a corpus": words_a_step(answers, generated=[], corpus=earlier),
            "server that generated them": words_a_step(answers, generated=earlier, corpus=[]),
            "the same with a corpus": words_a_step(answers, generated=earlier, corpus=earlier),
        }
        figures[name] = {case: round(words, 2) for case, words in measured.items()}
        print(name, figures[name])
    save("corpora", f"corpora: words a decode step {figures}", {"sets": figures}, ("batchrunner", "sglang"))


if __name__ == "__main__":
    main()
