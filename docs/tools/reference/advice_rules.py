"""The page on the rules of `batchrun advise`, from their table, and on the table of flags."""

from batchrunner.advise.rules import RULES, Rule
from batchrunner.engines.flag_table import FLAGS, SIGNS, Flag
from batchrunner.engines.flags import VARIABLES
from docs.tools.reference.markdown import table

HEAD = """# Rules of advice

What `batchrun advise` looks for, in this order, with the flag that it then proposes and what that costs.

*Often* means in 25% of at least 8 samples over at least 10 s of work. Where the guides give no number, it is
one of ours; `Thresholds` in the code has the source of each."""
FLAGS_HEAD = """## Flags

What is known of each flag of SGLang, and of each variable of its environment. Advice names the next value
that a sign calls for, [`batchrun tune`](../how-it-works/tuning.md) tries the values, and a server that ran
out of memory is started again with the next one of the sign *memory ran out*. G1 to G4 are SGLang's tuning
guides: the newest, its own of 2025, the oldest, and the Chinese one."""


def page() -> str:
    """Return the page."""
    rules = ([f"`{rule.name}`", rule.sign, _advice(rule), rule.tradeoff or "none"] for rule in RULES)
    flags = (row for flag in FLAGS.values() for row in _rows(flag))
    columns = ["flag", "needs", "memory", "sign", "value", "source"]
    return "\n\n".join([
        HEAD, table(["rule", "sign", "advice", "cost"], rules), FLAGS_HEAD, table(columns, flags),
    ])  # fmt: skip


def _advice(rule: Rule) -> str:
    named = [f"{_spelt(rule.flag)} {rule.move.rule}"] if rule.move else []
    return "; ".join([*named, *([rule.other] if rule.other else [])])


def _rows(flag: Flag) -> list[list[str]]:
    facts = [_spelt(flag.name), flag.needs or "", flag.memory]
    return [[*facts, SIGNS[sign], move.rule, move.source] for sign, move in flag.moves.items()]


def _spelt(name: str) -> str:
    return f"`{name}`" if name in VARIABLES else f"`--{name}`"
