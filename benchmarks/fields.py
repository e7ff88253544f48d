"""Prompt tokens from the prefix cache with `prompt.fields` in the written order and in the chosen one.

Three made-up tables, each with the columns in an order in which people write them (the key, or the long text
of a row, first). The order is chosen as a run does it, from a sample of the file. The prompts are then sent
in the order of the file, and sorted (`order: prefix`), one by one through SGLang's radix cache as
`engines/simulation` has it, with a large and a small KV pool. A token is four bytes, and a line that
differs counts as new from its beginning. The tables are no data of users: the gain depends on how much rows
repeat.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from batchrunner.engines.simulation.radix import RadixCache
from batchrunner.input.dataset import Dataset
from batchrunner.input.field_sample import decide_fields
from batchrunner.input.fields_block import field_line
from batchrunner.job.spec import InputSpec
from benchmarks.measure import save

if TYPE_CHECKING:
    from collections.abc import Sequence

SEED = 11
BYTES_A_TOKEN = 4
POOLS = {"440,000 tokens": 440_000, "60,000 tokens": 60_000}
"""KV pools: of an 8B model on an H100, and a small one."""
INSTRUCTION = ("instruction", 40)
"""Tokens before the fields, which all rows share."""
Table = dict[str, list[Any]]


def words(dice: random.Random, count: int) -> str:
    return " ".join("".join(dice.choices("abcdefghijklmnopqrstuvwxyz", k=6)) for _ in range(count))


def reviews(rows: int, dice: random.Random) -> Table:
    """Film reviews: the film decides title and plot, few outlets, a text of each review."""
    films = [
        (f"Film {n}", words(dice, 90), dice.choice(["drama", "comedy", "crime"])) for n in range(rows // 60)
    ]
    chosen = [dice.choices(films, weights=range(len(films), 0, -1))[0] for _ in range(rows)]
    return {
        "review": [words(dice, 40) for _ in range(rows)],
        "outlet": [f"Outlet {dice.randrange(30)}" for _ in range(rows)],
        "stars": [dice.randrange(1, 6) for _ in range(rows)],
        "title": [title for title, _, _ in chosen],
        "genre": [genre for _, _, genre in chosen],
        "plot": [plot for _, plot, _ in chosen],
    }


def tickets(rows: int, dice: random.Random) -> Table:
    """Support tickets: a key, a time, a product with its description, a plan, a country, and what is said."""
    products = [(f"Product {n}", words(dice, 60)) for n in range(40)]
    chosen = [dice.choice(products) for _ in range(rows)]
    return {
        "ticket": [f"T-{100_000 + n}" for n in range(rows)],
        "opened": [f"2026-{dice.randrange(1, 13):02}-{dice.randrange(1, 29):02}" for _ in range(rows)],
        "message": [words(dice, 50) for _ in range(rows)],
        "product": [name for name, _ in chosen],
        "description": [text for _, text in chosen],
        "plan": [dice.choice(["free", "team", "company"]) for _ in range(rows)],
        "country": [dice.choice(["DE", "US", "FR", "IN", "BR"]) for _ in range(rows)],
    }


def offers(rows: int, dice: random.Random) -> Table:
    """Offers of a shop: nearly each row has an article of its own; the terms of a few sellers repeat."""
    sellers = [(f"Seller {n}", words(dice, 30)) for n in range(200)]
    chosen = [dice.choice(sellers) for _ in range(rows)]
    return {
        "article": [words(dice, 8) for _ in range(rows)],
        "price": [round(dice.uniform(1, 900), 2) for _ in range(rows)],
        "category": [f"Category {dice.randrange(300)}" for _ in range(rows)],
        "seller": [name for name, _ in chosen],
        "terms": [text for _, text in chosen],
        "text": [words(dice, 60) for _ in range(rows)],
    }


TABLES = {"reviews": reviews, "tickets": tickets, "offers": offers}


def prompts_of(table: Table, order: Sequence[str]) -> list[tuple[tuple[str, int], ...]]:
    """Return each row's prompt as named segments with their tokens."""
    rows = len(next(iter(table.values())))
    found = []
    for row in range(rows):
        lines = [field_line(name, table[name][row]) for name in order]
        segments = tuple((line, max(1, len(line) // BYTES_A_TOKEN)) for line in lines)
        found.append((INSTRUCTION, *segments))
    return found


def hit_rate(prompts: Sequence[tuple[tuple[str, int], ...]], pool: int) -> float:
    """Return the share of prompt tokens that the cache has when each prompt comes after the one before."""
    cache, whole, cached = RadixCache(), 0, 0
    for prompt in prompts:
        tokens = sum(size for _, size in prompt)
        _, found = cache.match(prompt, tokens)
        too_many = cache.evictable_tokens + tokens - found - pool
        if too_many > 0:
            cache.evict(too_many)
        node, _ = cache.insert(prompt, tokens)
        cache.lock(node)
        cache.unlock(node)  # from now on it may be evicted
        whole, cached = whole + tokens, cached + found
    return cached / whole


def one(name: str, rows: int) -> dict[str, Any]:
    """Return the hit rates of one table."""
    table = TABLES[name](rows, random.Random(SEED))
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "table.parquet"
        pq.write_table(pa.table(table), path, row_group_size=5000)
        dataset = Dataset(str(path))
        chosen = decide_fields(dataset, InputSpec(path=str(path)), [*table], None)
    found: dict[str, Any] = {
        "written": [*table], "chosen": [*chosen.columns], "rows": rows,
        "predicted_share": round(chosen.share, 4), "predicted_written_share": round(chosen.written_share, 4),
    }  # fmt: skip
    for order, columns in (("written", [*table]), ("chosen", [*chosen.columns])):
        prompts = prompts_of(table, columns)
        for sent, sequence in (("input order", prompts), ("sorted", sorted(prompts))):
            for pool, tokens in POOLS.items():
                found[f"{order}, {sent}, pool of {pool}"] = round(hit_rate(sequence, tokens), 4)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=20_000, help="of each table")
    rows = parser.parse_args().rows
    figures = {name: one(name, rows) for name in TABLES}
    pool = next(iter(POOLS))
    told = "; ".join(
        f"{name} {found[f'chosen, sorted, pool of {pool}']:.2f} beside "
        f"{found[f'written, sorted, pool of {pool}']:.2f}"
        for name, found in figures.items()
    )
    line = (
        f"prompt.fields, share of prompt tokens from the cache, chosen order beside the written one: {told}"
    )
    save("fields", line, {"tables": figures}, ("batchrunner",))


if __name__ == "__main__":
    main()
