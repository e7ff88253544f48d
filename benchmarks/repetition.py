"""False alarms of `on_repetition` in texts, and endless repetitions in answers of models.

Each text is cut into pieces of 16,000 characters, about 4,000 tokens, and each piece is checked after every
1,024 characters, as if a model had written it. Equal pieces and pieces of fewer than 2,048 characters do not
count. An alarm in the text of a file is a false one. Binary files are read as base64.

Answers of models are counted apart, because their alarms may be right: `ends` is the number of alarms after
which the text only repeats until its end. Each answer is one text. Answers are recognised in the files of
AlpacaEval, ZeroEval, WildBench, Arena-Hard and MT-bench.
"""

import argparse
import base64
import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from batchrunner.core.console import tell
from batchrunner.engines.repetition import LEAST_CHARACTERS, find_repetition, is_prose
from benchmarks.measure import save

PIECE = 16_000
STEP = 1024
"""Number of characters between two checks: 256 tokens of four characters."""
MOST_BYTES = 24 << 20
"""Number of bytes that are read of a file."""
MOST_BINARY_BYTES = 400_000
"""Number of bytes that are read of a binary file, so that a few large files do not outweigh all others."""
COMPILED_SHARE = 10
"""Of this number of compiled files, one is read."""
ANSWERS = "answers of models"
COMPILED = "base64 of compiled code"
EXTENSIONS = {
    "Python": "py pyi pyx",
    "C, C++ and CUDA": "c h cpp cc cxx hpp hh inl cu cuh",
    "JavaScript and CSS": "js ts jsx tsx mjs css",
    "other code": "go rs java rb pl pm sh bash lua swift kt scala php vim el tcl cmake mk m4 yml yaml toml",
    "HTML and XML": "html htm xml svg xhtml",
    "documentation and prose": "md rst txt texi adoc pod po",
    "tables": "csv tsv",
    "JSON": "json jsonl ipynb geojson",
    "SQL": "sql test",
    "logs": "log",
    "base64": "png jpg jpeg gif gz bz2 xz zip pdf woff woff2 ttf otf ico parquet",
    COMPILED: "so a o pyc",
}
KINDS = {extension: kind for kind, names in EXTENSIONS.items() for extension in names.split()}


class Alarm(NamedTuple):
    """A repetition that was found in a piece."""

    period: str
    length: int
    """Number of characters from the first period to the place in the text at which the repetition ends."""
    next_text: str
    """Beginning of the text after the repetition."""


def texts_of(path: Path, number: int) -> Iterator[tuple[str, str]]:
    """Yield the kind and the text of each text in a file; `number` is the number of files before it."""
    extension = path.suffix[1:].lower()
    kind = KINDS.get(extension, "plain text")
    if kind == COMPILED and number % COMPILED_SHARE:
        return
    with path.open("rb") as file:
        content = file.read(MOST_BYTES)
    if kind in {"base64", COMPILED}:
        yield kind, base64.b64encode(content[:MOST_BINARY_BYTES]).decode()
        return
    if b"\0" in content:
        return
    text = content.decode(errors="replace")
    key = answer_key(text)
    if path.suffix == ".jsonl" and "model_answer" in path.parts:
        rows = [json.loads(line) for line in text.splitlines()]
        turns = [turn for row in rows for choice in row.get("choices", ()) for turn in choice["turns"]]
        yield from ((ANSWERS, turn if isinstance(turn, str) else turn["content"]) for turn in turns)
    elif path.suffix == ".json" and key is not None:
        answers = [row[key] for row in json.loads(text)]
        lists = [answer if isinstance(answer, list) else [answer] for answer in answers]
        yield from ((ANSWERS, answer) for outputs in lists for answer in outputs if answer)
    else:
        yield kind, text


def answer_key(text: str) -> str | None:
    """Return the name of the field with the answer in a JSON file of answers; None for another text."""
    beginning = text[:100_000]
    if '"model_output":' in beginning:
        return "model_output"
    return "output" if '"generator":' in beginning and '"output":' in beginning else None


def first_alarms(text: str, start: int, end: int) -> dict[str, Alarm]:
    """Return the first alarm of `on_repetition: stop` and of `auto` in a piece of a text, by mode."""
    alarms: dict[str, Alarm] = {}
    lengths = [*range(LEAST_CHARACTERS, end - start, STEP), end - start]
    for length in lengths:
        repetition = find_repetition(text[start : start + length])
        if repetition is None:
            continue
        first, period = start + repetition.start, repetition.period
        last = start + length
        while last < len(text) and text[last] == text[last - period]:
            last += 1
        alarm = Alarm(text[first : first + period], last - first, text[last : last + 60])
        alarms.setdefault("stop", alarm)
        if is_prose(alarm.period):
            return {**alarms, "auto": alarm}
    return alarms


def files_in(root: Path) -> Iterator[Path]:
    """Yield the files below a directory, without links and without git's own."""
    for directory, names, file_names in os.walk(root):
        names[:] = sorted(name for name in names if name != ".git")
        for name in sorted(file_names):
            path = Path(directory, name)
            if path.is_file() and not path.is_symlink():
                yield path


def count_alarms(roots: list[Path]) -> dict[str, Any]:
    """Return the numbers of pieces, characters and alarms by kind of text, and the alarms of `auto`."""
    hashes: set[int] = set()
    counts: dict[str, Counter[str]] = {}
    examples = []
    for number, path in enumerate(path for root in roots for path in files_in(root)):
        try:
            texts = [*texts_of(path, number)]
        except (OSError, ValueError, KeyError, TypeError) as failure:
            tell(f"  left out: {path}: {failure!r:.120}")
            continue
        for kind, text in texts:
            for start in range(0, len(text), PIECE):
                end = min(len(text), start + PIECE)
                piece_hash = hash(text[start:end])
                if end - start < LEAST_CHARACTERS or piece_hash in hashes:
                    continue
                hashes.add(piece_hash)
                of_kind = counts.setdefault(kind, Counter())
                of_kind["pieces"] += 1
                of_kind["characters"] += end - start
                for mode, alarm in first_alarms(text, start, end).items():
                    of_kind[mode] += 1
                    of_kind[f"{mode}_ends"] += not alarm.next_text
                    if mode == "auto" and kind != ANSWERS:
                        example = {**alarm._asdict(), "period": alarm.period[:120], "kind": kind}
                        examples.append({**example, "file": path.name})
                        tell(f"  {example} {path}")
    return {"kinds": dict(sorted(counts.items())), "examples": examples}


def main() -> None:
    """Count the alarms below some directories, and write benchmarks/results/repetition.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("roots", type=Path, nargs="+")
    figures = count_alarms(parser.parse_args().roots)
    texts = [kind for name, kind in figures["kinds"].items() if name not in {ANSWERS, COMPILED}]
    pieces, stop, auto = (sum(kind[name] for kind in texts) for name in ("pieces", "stop", "auto"))
    line = f"repetition: false alarms in {pieces:,} pieces of texts: stop {stop:,}, auto {auto:,}"
    save("repetition", line, figures, ("batchrunner",))


if __name__ == "__main__":
    main()
