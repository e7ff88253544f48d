"""The page on the rules of `batchrun advise`, from their table."""

from batchrunner.advise.rules import RULES
from batchrunner.engines.logs.series import Thresholds
from docs.tools.reference.markdown import field_docs, table

HEAD = """# Rules of advice

What `batchrun advise` looks for, in this order, with the flag that it then proposes and what that costs.

*Often* means in 25% of at least 8 samples over at least 10 s of work. Every number is a
[threshold](#thresholds)."""

LIMITS = "## Thresholds"


def page() -> str:
    """Return the page."""
    docs = field_docs(Thresholds)
    limits = ([f"`{name}`", f"{getattr(Thresholds(), name):g}", text] for name, text in docs.items())
    rules = ([f"`{rule.name}`", rule.sign, rule.advice, rule.tradeoff or "none"] for rule in RULES)
    return "\n\n".join(
        [HEAD, table(["rule", "sign", "advice", "cost"], rules),
         LIMITS, table(["threshold", "default", "meaning"], limits)]
    )  # fmt: skip
