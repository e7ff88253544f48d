"""The page on exit codes, from the constants."""

from batchrunner import __all__ as public
from batchrunner.core import errors
from batchrunner.core.errors import EXIT_MEANINGS
from docs.tools.reference.markdown import named, paragraphs

HEAD = """# Exit codes

Exit code 0 means that all rows are done, and nothing else. After any other code, finished rows are kept, and
the same command continues with the remaining rows."""

ERRORS = """## Errors of the library

The [library](library.md) raises one of these errors if the command would end with its code. There are two
exceptions, which only the report's `exit_code` shows: too many failed rows (3) and `limits.deadline` (1).
`error.report` is the report of the finished rows, or None if the run had not begun."""


def page() -> str:
    """Return the page."""
    codes = named((f"{code}", meaning) for code, meaning in EXIT_MEANINGS.items())
    kinds = [getattr(errors, name) for name in public if hasattr(errors, name)]
    raised = named((f"`{kind.__name__}` ({kind.exit_code})", paragraphs(kind.__doc__)) for kind in kinds)
    return f"{HEAD}\n\n{codes}\n\n{ERRORS}\n\n{raised}"
