"""The page on report.json and on what `--json` prints."""

import inspect

from batchrunner.report.report import Report
from batchrunner.runner.check import Check
from batchrunner.tuning.rules import Advice
from docs.tools.reference.markdown import field_list, meanings

HEAD = """# report.json and --json

`batchrun run --json` prints what `RUN/report.json` holds; other commands print objects of their own. Keys
that are not here (of `slurm`, `tune`) are named as on the screen. An [error](command-line.md) has `error` and
`exit_code`, beside the keys of report.json where a run had begun."""

LOAD = {
    "steady_s": "Seconds of steady time, summed over schedulers. Shares are of it, and null without it.",
    "in_band_share, empty_queue_share": "Share with a healthy queue, and with none.",
    "corner_shares": "Share in each [corner](../how-it-works/concurrency.md#the-corners).",
    "mean_queue, mean_token_usage": "Waiting requests of a scheduler, and used fraction of its KV pool.",
    "tail_share": "Share of the whole time with too few rows left to fill the engine.",
    "retractions": "Requests put back into the queue because the KV pool was full.",
    "background": "[In the background](../how-to/background.md), else null: `our_share` and `users_share` of "
    "the engine's time, `rows_given_back`, and the `tokens_lost` by it.",
}
SHARING = {
    "expected_tokens": "Prompt tokens that rows share with an earlier row.",
    "found_tokens": "Those of them that came from the prefix cache.",
    "lead_tokens": "Last reuse distance: prefill tokens by which a row that computes a prefix runs ahead.",
}
FAILURES = {
    "rows": "Rows with this cause.",
    "example_row, example": "Position of one in the input, and its `error`.",
}
INCIDENTS = {
    "what": "`died`, `hangs`, `healed` (started with safer arguments), `recalled` (began with those of an "
    "earlier run), `adapts` (restarted with other flags), `adapted` (what these gained), `lost` (given up).",
    "who, why": "Server, as in log lines, and reason.",
    "kind": "Where memory ran out (`healed`).",
    "old, new": "Arguments before (`healed`, `adapts`) and now (also `recalled`, `adapted`).",
    "gain": "0.1 is a tenth more output tokens a second; -1 where the server died (`adapted`).",
}
STATUS = {
    "path, simulated, rows_total, rows_failed, rows_cut, rows_reused, failures": "As in report.json.",
    "running": "Who is at work; null for nobody.",
    "model": "Identity of the model.",
    "rows_on_disk": "Rows that ended and are safe, failed ones included.",
    "output_tokens": "Generated tokens, rejected answers included.",
    "reason": "Why the last start ended; null at work, and after a kill.",
    "finished": "Whether all rows are on disk and nobody is at work.",
    "rows_per_s": "Rows per second, of all tasks at work.",
    "time_left_s": "Seconds to the end; null while nobody can know.",
    "leases": "Of tasks that share rows: leases in `total`, `free`, `done`, and `held` by each; else null.",
    "tasks": "The tasks: one unless several share the run.",
}
TASK = {
    "task": "Its name; `main` if it is alone.",
    "running, rows_on_disk, rows_failed, rows_cut, output_tokens": "As above, of this task.",
    "starting": "Before the first row: `what` (`input` or `engine`) it waits for, and `since_s`; else null.",
    "last_sample": "Newest [sample](events.md#sample); null if not at work.",
}
ADVISE = {
    "source": "The log, address or run.",
    "healthy": "Whether there are enough samples and nothing is wrong.",
    "enough": "Whether there are enough samples.",
    "reading": "What the samples show.",
    "version": "Version of SGLang; null if unknown.",
    "flags_known": "Whether its flags are known, so that advice spells them right.",
    "advice": "Advice, the most important first: see below.",
}


MERGE = {
    "path": "Directory or file that was written.",
    "rows, rows_missing": "Rows in it, and rows of the run that are not.",
    "exit_code": "1 while rows are missing.",
    "report": "Report of the whole run.",
}


ROWS_LEFT = f"\n- `rows_left`: {inspect.getdoc(Report.rows_left)}"
"""The one key that is computed from the others."""


def page() -> str:
    """Return the page."""
    tables: dict[str, str] = {
        "## report.json": field_list(Report) + ROWS_LEFT,
        "### failures": meanings(FAILURES.items()),
        "### load": meanings(LOAD.items()),
        "### incidents": meanings(INCIDENTS.items()),
        "### sharing\n\nEmpty in input order, or without a prefix cache.": meanings(SHARING.items()),
        "## check --json": field_list(Check),
        "## status --json": meanings(STATUS.items()),
        "### tasks": meanings(TASK.items()),
        "## merge --json": meanings(MERGE.items()),
        "## advise --json": meanings(ADVISE.items()),
        "### advice": field_list(Advice),
    }
    return "\n\n".join([HEAD, *(f"{title}\n\n{rows}" for title, rows in tables.items())])
