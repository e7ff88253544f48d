"""The page on the rules of `batchrun advise`, from their table, and on the table of flags."""

from collections import Counter

from batchrunner.sglang.flags import VARIABLES
from batchrunner.tuning.flags import FLAGS, Flag
from batchrunner.tuning.rules import RULES, Rule
from batchrunner.tuning.signals import FLAG_SIGNS
from docs.tools.reference.markdown import named

HEAD = """# Rules of advice

`batchrun advise` looks for these signs, in this order. Each line has the sign, the proposed change (its
values are in the [table below](#flags)), and the cost. *Often* means in 25% of at least 8 load samples over
at least 10 s of work. Numbers that SGLang's tuning guides do not give are our own."""
FLAGS_HEAD = """## Flags

These are the values of the flags that rules change. [Advice](../advice.md) proposes them,
[autotuning](../how-it-works/tuning.md) tries them, and a server that ran out of memory restarts with them.
A line has the flag, what it needs, the direction of the change, the new value, and its source. If the value
depends on the sign, the sign comes first, in italics. G1 to G4 are SGLang's tuning guides: the newest, the
one of 2025, the oldest, and the Chinese one."""


def page() -> str:
    """Return the page."""
    rules = named((f"`{rule.name}`", f"{rule.sign} → {_advice(rule)}{_cost(rule)}") for rule in RULES)
    flags = named((f"{_spelt(flag.name)}{_needs(flag)}", _values(flag)) for flag in FLAGS.values())
    return f"{HEAD}\n\n{rules}\n\n{FLAGS_HEAD}\n\n{flags}"


def _cost(rule: Rule) -> str:
    return f" (cost: {rule.tradeoff})" if rule.tradeoff else ""


def _advice(rule: Rule) -> str:
    """Return the flag and its direction, and what else may help."""
    how = rule.move.rule if rule.move else ""
    told = how if how.startswith("set") else how.partition(":")[0]
    moved = f"{_spelt(rule.flag)} {told}" if rule.move else ""
    return "; ".join(part for part in (moved, rule.other) if part)


def _needs(flag: Flag) -> str:
    needs = ", ".join(need for need in (flag.needs, flag.memory) if need)
    return f" (needs {needs})" if needs else ""


def _values(flag: Flag) -> str:
    """Return the values, each with its sign where the table of rules does not tell which one is meant."""
    ways = Counter(move.rule.partition(":")[0] for move in flag.moves.values())
    in_a_rule = any(rule.flag == flag.name for rule in RULES)
    values = []
    for sign, move in flag.moves.items():
        is_plain = in_a_rule and ways[move.rule.partition(":")[0]] == 1
        values.append(f"{'' if is_plain else f'*if {FLAG_SIGNS[sign]}*, '}{move.rule} ({move.source})")
    return "; ".join(values)


def _spelt(name: str) -> str:
    return f"`{name}`" if name in VARIABLES else f"`--{name}`"
