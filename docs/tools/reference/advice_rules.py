"""The page on the rules of `batchrun advise`, from their table."""

from batchrunner.advise.rules import RULES, Rule
from batchrunner.engines.logs.series import Thresholds
from docs.tools.reference.markdown import field_docs, table

HEAD = """# Rules of advice

What `batchrun advise` looks for, with the flag that it then proposes. Each rule has a test under its
name. The sources are SGLang's tuning guides: G1 (the newest), G2 (SGLang's own of 2025), G3 (the oldest)
and G4 (Chinese).

*Often* means in 25% of at least 8 samples over at least 10 s of work. Every number is a
[threshold](#thresholds)."""

LIMITS = "## Thresholds"


def page() -> str:
    """Return the page."""
    docs = field_docs(Thresholds)
    limits = ([f"`{name}`", f"{getattr(Thresholds(), name):g}", text] for name, text in docs.items())
    return "\n\n".join(
        [HEAD, *(_rule(rule) for rule in RULES), LIMITS, table(["threshold", "default", "meaning"], limits)]
    )


def _rule(rule: Rule) -> str:
    facts = {
        "Sign": rule.sign,
        "Advice": rule.advice,
        "Gain": rule.effect,
        "Cost": rule.tradeoff,
        "Certainty": rule.certainty + (" (an option: nothing is wrong)" if rule.option else ""),
        "Source": rule.source,
    }
    lines = [f"- **{name}**: {text}" for name, text in facts.items() if text]
    return f"## {rule.name}\n\n" + "\n".join(lines)
