"""Rows that begin alike: what the benchmarks of the order send, as named parts of so many tokens.

Parts of one name are the same tokens, of two names differ from the first token on. Without tokens that is
all that a simulated scheduler needs to know; `Words` makes text of it for a real one.
"""

import json
import random
import re
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import NamedTuple

Parts = tuple[tuple[str, int], ...]
"""(name, tokens) from the start of a prompt to its end."""


class Row(NamedTuple):
    """A prompt and how many tokens are put out for it."""

    parts: Parts
    outputs: int

    @property
    def tokens(self) -> int:
        """Length of the prompt."""
        return sum(tokens for _, tokens in self.parts)


def least_tokens(rows: Iterable[Row]) -> int:
    """Return the fewest tokens that an engine must compute in prefills, however the rows are ordered.

    Each different beginning is computed once, and of each row the last token, which puts out the first
    new one: a prompt that comes m times costs m - 1 tokens more. Shorter prompts first, it can be reached.
    """
    beginnings: dict[Parts, int] = {}
    ends: dict[Parts, int] = {}
    for row in rows:
        for count in range(1, len(row.parts) + 1):
            beginnings[row.parts[:count]] = row.parts[count - 1][1]
        ends[row.parts] = ends.get(row.parts, 0) + 1
    return sum(beginnings.values()) + sum(count - 1 for count in ends.values())


def shuffled(rows: Sequence[Row], seed: int = 1) -> list[Row]:
    """Put rows in no order."""
    mixed = list(rows)
    random.Random(seed).shuffle(mixed)
    return mixed


def groups(made: random.Random, count: int, each: int, head: int, own: int, outputs: int) -> list[Row]:
    """Make documents, each asked some questions, one document after the other."""
    return [
        Row(((f"d{group:06}", head), (f"q{group:06}.{row:03}", _about(made, own))), _about(made, outputs))
        for group in range(count)
        for row in range(each)
    ]


def few_shot(made: random.Random, count: int, head: int, own: int, outputs: int) -> list[Row]:
    """Make rows with the same examples before them."""
    return groups(made, 1, count, head, own, outputs)


def conversations(made: random.Random, count: int, longest: int, turn: int, outputs: int) -> list[Row]:
    """Make conversations of 1 to `longest` turns; there is a row for each turn, with all that was before."""
    rows = []
    for number in range(count):
        parts: Parts = ()
        for turn_number in range(made.randint(1, longest)):
            parts = (*parts, (f"c{number:06}.{turn_number:02}", _about(made, turn)))
            rows.append(Row(parts, _about(made, outputs)))
    return rows


def interleaved(made: random.Random, rows: Sequence[Row]) -> list[Row]:
    """Mix conversations; each keeps the order of its turns."""
    turns: dict[str, list[Row]] = {}
    for row in reversed(rows):
        turns.setdefault(row.parts[0][0], []).append(row)
    names = [row.parts[0][0] for row in rows]
    made.shuffle(names)
    return [turns[name].pop() for name in names]


def paired(made: random.Random, count: int, tokens: int, outputs: int) -> list[Row]:
    """Make a prompt of each two of so many texts: the first may come from the cache, the second not."""
    lengths = [(f"t{text:04}", _about(made, tokens)) for text in range(count)]
    return [
        Row((one, other), _about(made, outputs)) for one in lengths for other in lengths if one is not other
    ]


def skewed(made: random.Random, count: int, heads: int, own: int, outputs: int) -> list[Row]:
    """Make rows under a few prefixes of 100 to 3,200 tokens, each half as frequent as the one before."""
    lengths = [(f"h{head:02}", 100 << (5 * head + 2) % 6) for head in range(heads)]
    picked = made.choices(lengths, [0.5**head for head in range(heads)], k=count)
    return [
        Row((head, (f"o{row:06}", _about(made, own))), _about(made, outputs))
        for row, head in enumerate(picked)
    ]


def nested(
    made: random.Random, counts: tuple[int, int, int], tokens: tuple[int, int, int, int], outputs: int
) -> list[Row]:
    """Make questions on documents under examples under one system prompt.

    `counts`: blocks of examples, documents under each, questions to each; `tokens`: of the system prompt,
    the examples, the document and the question.
    """
    return [
        Row(
            (
                ("system", tokens[0]),
                (f"e{block:04}", tokens[1]),
                (f"d{block:04}.{document:04}", tokens[2]),
                (f"q{block:04}.{document:04}.{question:03}", _about(made, tokens[3])),
            ),
            _about(made, outputs),
        )
        for block in range(counts[0])
        for document in range(counts[1])
        for question in range(counts[2])
    ]


def unrelated(lengths: Iterable[tuple[int, int]]) -> list[Row]:
    """Make prompts of these lengths (prompt, outputs) that share nothing."""
    return [Row(((f"u{row:06}", prompt),), outputs) for row, (prompt, outputs) in enumerate(lengths)]


def _about(made: random.Random, tokens: int) -> int:
    """Return a length between a half and one and a half times as much."""
    return made.randint(max(1, tokens // 2), max(1, tokens + tokens // 2))


WORD = re.compile(r"Ġ([a-z]{2,})")
"""A token of the tokenizer that is a space and a word: prompts of these have one token a word."""


class Words:
    """Words of one token each, as frequent as in a text; a part's are always the same ones."""

    def __init__(self, tokenizer: Path) -> None:
        vocabulary = json.loads((tokenizer / "tokenizer.json").read_text())["model"]["vocab"]
        by_rank = sorted(vocabulary, key=vocabulary.__getitem__)  # the tokenizer's frequent tokens come first
        self._words = [match[1] for token in by_rank if (match := WORD.fullmatch(token))]
        self._weights = list(accumulate(1 / rank for rank in range(1, len(self._words) + 1)))
        self._parts: dict[tuple[str, int], list[str]] = {}

    def of(self, row: Row) -> list[str]:
        """Return the prompt, word by word; a space before each makes it the text."""
        return [word for part in row.parts for word in self._part(part)]

    def _part(self, part: tuple[str, int]) -> list[str]:
        if part not in self._parts:
            self._parts[part] = random.Random(part[0]).choices(
                self._words, cum_weights=self._weights, k=part[1]
            )
        return self._parts[part]


def nodes(prompts: Iterable[Sequence[str]]) -> int:
    """Return the tokens of the trie of all different prompts: what must be computed of them at least."""
    ordered = sorted({tuple(prompt) for prompt in prompts})
    shared = sum(
        next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), len(one))
        for one, other in pairwise(ordered)
    )
    return sum(map(len, ordered)) - shared
