"""The page on report.json and on what `--json` prints."""

import inspect

from batchrunner.advise.rules import Advice
from batchrunner.report.report import Report
from batchrunner.runner.check import Check
from docs.tools.reference.markdown import field_table, table

HEAD = """# report.json and --json

`batchrun run --json` prints what `RUN/report.json` holds; other commands print objects of their own, and
`schema` the JSON Schema of jobs. Log lines go to standard error. Keys that are not here (of `engine`, `init`,
`slurm`, `tune`) are named as on the screen."""

LOAD = {
    "steady_s": "Seconds of steady time, summed over schedulers. Shares are of it, and null without it.",
    "in_band_share": "Share with a healthy queue (the job's `queue`, scaled).",
    "corner_shares": "Share in each [corner](../how-it-works/concurrency.md#the-corners).",
    "empty_queue_share": "Share without waiting requests.",
    "mean_queue": "Waiting requests of a scheduler, on average.",
    "mean_token_usage": "Used fraction of the KV pool, on average.",
    "tail_share": "Share of the whole time with too few rows left to fill the engine.",
    "imbalance": "How much less the idlest scheduler ran than the busiest, as a share; null for one.",
    "retractions": "Requests put back into the queue because the KV pool was full.",
    "window_min": "Fewest requests that might be in flight.",
    "window_max": "Most of them.",
}
SHARING = {
    "expected_tokens": "Prompt tokens that rows share with an earlier row.",
    "found_tokens": "Those of them that came from the prefix cache.",
    "lead_tokens": "Last reuse distance: prefill tokens by which a row that computes a prefix runs ahead.",
}
FAILURES = {
    "rows": "Rows with this cause.",
    "example_row": "Position of one in the input.",
    "example": "Its `error`.",
}
INCIDENTS = {
    "what": "`died`, `hangs`, `healed` (started with safer arguments), `recalled` (began with those of an "
    "earlier run), `adapts` (restarted with other flags), `adapted` (what these gained), `lost` (given up).",
    "who": "Server, as in log lines.",
    "why": "Reason.",
    "kind": "Where memory ran out (`healed`).",
    "old": "Arguments before (`healed`, `adapts`).",
    "new": "Arguments now (`healed`, `recalled`, `adapts`, `adapted`).",
    "gain": "0.1 is a tenth more output tokens a second; -1 where the server died (`adapted`).",
}
STATUS = {
    "path": "Output path.",
    "running": "Who is at work; null for nobody.",
    "model": "Identity of the model.",
    "simulated": "Whether the answers are made up.",
    "rows_total": "Rows that the job selects.",
    "rows_on_disk": "Rows that ended and are safe, failed ones included.",
    "rows_failed": "Those of them with an `error`.",
    "rows_cut": "Those without, with an output cut at `max_new_tokens`.",
    "rows_reused": "Those with an answer of another run.",
    "failures": "Failed rows by cause, as in report.json.",
    "reason": "Why the last start ended; null at work, and after a kill.",
    "output_tokens": "Generated tokens, rejected answers included.",
    "finished": "Whether all rows are on disk and nobody is at work.",
    "rows_per_s": "Rows per second, of all tasks at work.",
    "time_left_s": "Seconds to the end; null while nobody can know.",
    "leases": "Of tasks that share rows: leases in `total`, `free`, `done`, and `held` by each; else null.",
    "tasks": "The tasks: one unless several share the run.",
}
TASK = {
    "task": "Its name; `main` if it is alone.",
    "running": "Who is at work; null for nobody.",
    "rows_on_disk": "Rows that it ended.",
    "rows_failed": "Those of them with an `error`.",
    "rows_cut": "Those with an output cut at `max_new_tokens`.",
    "output_tokens": "Generated tokens.",
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


ERROR = {
    "error": "`type` (class of the error), `message`, and `hint` (what to do).",
    "exit_code": "Exit code of the command.",
}
MERGE = {
    "path": "Directory or file that was written.",
    "rows": "Rows in it.",
    "rows_missing": "Rows of the run that are not.",
    "is_at_work": "Whether a task of the run is at work.",
    "exit_code": "Exit code: 1 while rows are missing.",
    "report": "Report of the whole run.",
}


ROWS_LEFT = f"\n| `rows_left` | {inspect.getdoc(Report.rows_left)} |"
"""The one key that is computed from the others."""


def page() -> str:
    """Return the page."""
    tables: dict[str, str] = {
        "## report.json": field_table(Report) + ROWS_LEFT,
        "### failures": _keys(FAILURES),
        "### load": _keys(LOAD),
        "### incidents": _keys(INCIDENTS),
        "### sharing\n\nEmpty in input order, or without a prefix cache.": _keys(SHARING),
        "## Errors\n\nAny command with `--json`. A run that began has the keys of report.json too.": _keys(
            ERROR
        ),
        "## check --json": field_table(Check),
        "## status --json": _keys(STATUS),
        "### tasks": _keys(TASK),
        "## merge --json": _keys(MERGE),
        "## advise --json": _keys(ADVISE),
        "### advice": field_table(Advice),
    }
    return "\n\n".join([HEAD, *(f"{title}\n\n{rows}" for title, rows in tables.items())])


def _keys(meanings: dict[str, str]) -> str:
    return table(["key", "meaning"], ([f"`{name}`", text] for name, text in meanings.items()))
