"""Does tune's replay of answers say what SGLang's own n-gram corpus would bring? Without a model.

The corpus is the C++ code of the installed SGLang, which is asked for a draft at each step and told what was
put out, as its ngram_worker does. Words stand for tokens. One set repeats each prompt word for word: the
corpus does not know prompts, so nothing is gained.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
from sglang.srt.speculative.cpp_ngram.ngram_corpus import NgramCorpus

from batchrunner.tune.trial import WORD, words_a_step
from benchmarks.measure import save

SEED = 3
DRAFT, DEPTH = 12, 18
"""SGLang's defaults of `--speculative-num-draft-tokens` and `--speculative-ngram-max-trie-depth`."""
REQUEST = " Repeat that, word for word, without any comment of yours and with nothing else after it:"


def sets() -> dict[str, list[tuple[str, str]]]:
    """Return prompts and answers."""
    made = random.Random(SEED)
    words = [f"w{number}" for number in range(2000)]

    def some(count: int) -> str:
        return " ".join(made.choice(words) for _ in range(count))

    pool = [some(12) for _ in range(40)]
    text = Path("docs/jobs.md").read_text()
    copied = [some(60) for _ in range(60)]
    return {
        "one template": [
            ("", f"The item {some(1)} is in a stable state, and {some(1)} too.") for _ in range(100)
        ],
        "JSON": [("", json.dumps({"name": some(1), "score": 5, "reason": some(8)})) for _ in range(80)],
        "sentences of 40": [("", ". ".join(made.choice(pool) for _ in range(5))) for _ in range(60)],
        "a manual": [("", text[at : at + 1500]) for at in range(0, 45_000, 1500)],
        "random words": [("", some(60)) for _ in range(60)],
        "copies of the prompt": [(answer + REQUEST, answer) for answer in copied],
    }


def by_sglang(rows: list[tuple[str, str]]) -> float:
    """Return the words that a step brings with the corpus of SGLang."""
    corpus = NgramCorpus(DEPTH, 1, 10, DRAFT, capacity=10_000_000)
    numbers: dict[str, int] = {}
    put_out = steps = 0
    for row, texts in enumerate(rows):
        prompt, answer = ([numbers.setdefault(w, len(numbers)) for w in WORD.findall(text)] for text in texts)
        at = 0
        put_out += len(answer)
        while at < len(answer):
            steps += 1
            if at:  # the first word comes with the prefill
                at += _right(corpus, row, prompt + answer[:at], answer[at:])
            at += 1
            corpus.batch_put([(prompt + answer[:at])[-DEPTH:]])
            corpus.synchronize()
    return put_out / steps


def _right(corpus: NgramCorpus, row: int, before: list[int], after: list[int]) -> int:
    """Return how many words of the proposed tree are right."""
    draft, flat = corpus.batch_get([str(row)], [before[-DEPTH:]], [len(before)])
    ancestors = np.tril(flat.reshape(DRAFT, DRAFT), -1)
    parents = [int(row.nonzero()[0].max(initial=0)) for row in ancestors]
    node = right = 0
    for word in after:
        node = next((n for n in range(1, DRAFT) if parents[n] == node and draft[n] == word), 0)
        if not node:
            break
        right += 1
    return right


def main() -> None:
    found = {
        name: {"sglang": round(by_sglang(rows), 2), "replay": round(words_a_step(a for _, a in rows), 2)}
        for name, rows in sets().items()
    }
    apart = max(abs(one["sglang"] - one["replay"]) for one in found.values())
    line = f"words a decode step by n-grams: the replay is within {apart:.2f} of SGLang's on {len(found)}"
    save("ngrams", line, {"sets": found}, ("sglang",))


if __name__ == "__main__":
    main()
