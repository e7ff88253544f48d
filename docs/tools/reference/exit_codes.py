"""The page on exit codes, from the constants."""

from batchrunner import __all__ as public
from batchrunner.core import errors
from batchrunner.core.errors import EXIT_MEANINGS
from docs.tools.reference.markdown import named, paragraphs

HEAD = """# Exit codes

Exit code 0 means that all rows are done, and nothing else. After any other code, finished rows are kept, and
the same command goes on with the rest."""

ERRORS = """## Errors of the library

The [library](library.md) raises these where the command would end with the code, but for too many failed rows
(3) and `limits.deadline` (1), which `exit_code` of the report tells. `error.report` is the report of the rows
done, None where the run had not begun."""


def page() -> str:
    """Return the page."""
    codes = named((f"{code}", meaning) for code, meaning in EXIT_MEANINGS.items())
    kinds = [getattr(errors, name) for name in public if hasattr(errors, name)]
    raised = named((f"`{kind.__name__}` ({kind.exit_code})", paragraphs(kind.__doc__)) for kind in kinds)
    return f"{HEAD}\n\n{codes}\n\n{ERRORS}\n\n{raised}"
