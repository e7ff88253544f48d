"""All pages of reference, as they should be."""

from pathlib import Path

from docs.tools.reference import (
    advice_rules,
    command_line,
    environment,
    exit_codes,
    job_file,
    json_output,
    library,
    run_files,
)

FOLDER = Path(__file__).parents[2] / "reference"
NOTE = "<!-- Made from the code by `make docs-reference`: change the code, not this page. -->"


def pages() -> dict[str, str]:
    """Return the text of each page by the name of its file."""
    texts = {
        "advice-rules.md": advice_rules.page(),
        "command-line.md": command_line.page(),
        "environment-variables.md": environment.page(),
        "exit-codes.md": exit_codes.page(),
        "job-file.md": job_file.page(),
        "json-output.md": json_output.page(),
        "library.md": library.page(),
        "result-columns.md": run_files.result_columns(),
    }
    return {name: f"{NOTE}\n\n{text.strip()}\n" for name, text in texts.items()}
