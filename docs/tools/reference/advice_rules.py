"""The page on the rules of `batchrun advise`, from their table, and on the table of flags."""

from batchrunner.advise.rules import RULES, Rule
from batchrunner.engines.flag_table import FLAGS, SIGNS, Flag
from batchrunner.engines.flags import VARIABLES
from docs.tools.reference.markdown import table

HEAD = """# Rules of advice

What `batchrun advise` looks for, in this order, what it then proposes, and what that costs. The value of a
flag is in the [table below](#flags).

*Often* means in 25% of at least 8 samples over at least 10 s of work. Where the guides give no number, it is
one of ours."""
FLAGS_HEAD = """## Flags

What SGLang's flags and variables need, and which value a sign calls for. [Advice](../advice.md) names it,
[tuning](../how-it-works/tuning.md) tries it, and a server whose memory ran out starts with it. G1 to G4 are
SGLang's tuning guides: the newest, its own of 2025, the oldest, and the Chinese one."""


def page() -> str:
    """Return the page."""
    rules = ([f"`{rule.name}`", rule.sign, _advice(rule), rule.tradeoff or "none"] for rule in RULES)
    flags = ([_spelt(flag.name), _needs(flag), _values(flag)] for flag in FLAGS.values())
    return "\n\n".join([
        HEAD, table(["rule", "sign", "advice", "cost"], rules),
        FLAGS_HEAD, table(["flag", "needs", "*sign*: value (source)"], flags),
    ])  # fmt: skip


def _advice(rule: Rule) -> str:
    """Return the flag and its direction, and what else may help."""
    how = rule.move.rule if rule.move else ""
    told = how if how.startswith("set") else how.partition(":")[0]
    named = [f"{_spelt(rule.flag)} {told}"] if rule.move else []
    return "; ".join([*named, *([rule.other] if rule.other else [])])


def _needs(flag: Flag) -> str:
    return ", ".join(need for need in (flag.needs, flag.memory) if need) or "nothing"


def _values(flag: Flag) -> str:
    return "<br>".join(f"*{SIGNS[sign]}*: {move.rule} ({move.source})" for sign, move in flag.moves.items())


def _spelt(name: str) -> str:
    return f"`{name}`" if name in VARIABLES else f"`--{name}`"
