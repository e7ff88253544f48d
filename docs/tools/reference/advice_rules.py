"""The page on the rules of `batchrun advise`, from their table."""

from batchrunner.advise.rules import RULES
from docs.tools.reference.markdown import table

HEAD = """# Rules of advice

What `batchrun advise` looks for, in this order, with the flag that it then proposes and what that costs.

*Often* means in 25% of at least 8 samples over at least 10 s of work. Where the guides give no number, it is
one of ours; `Thresholds` in the code has the source of each."""


def page() -> str:
    """Return the page."""
    rules = ([f"`{rule.name}`", rule.sign, rule.advice, rule.tradeoff or "none"] for rule in RULES)
    return "\n\n".join([HEAD, table(["rule", "sign", "advice", "cost"], rules)])
