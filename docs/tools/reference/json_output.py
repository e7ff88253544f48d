"""The page on report.json and on what `--json` prints."""

import inspect

from batchrunner.advise.rules import Advice
from batchrunner.report.report import Report
from batchrunner.runner.check import Check
from docs.tools.reference.markdown import field_table, table

HEAD = """# report.json and --json

`batchrun run --json` prints what `RUN/report.json` holds; the other commands print objects of their own on
standard output, and `schema` the JSON Schema of jobs. Log lines go to standard error. Keys that are not here
(of `engine`, and of `init`, `slurm` and `tune`) are named as on the screen."""

LOAD = {
    "steady_s": "Seconds of steady time, summed over schedulers; the shares below are of it, and null "
    "without it.",
    "in_band_share": "Share with a healthy number of waiting requests (the job's `queue`, scaled).",
    "corner_shares": "Share in each [corner](../how-it-works/concurrency.md#the-corners), by its name.",
    "empty_queue_share": "Share in which no request waited.",
    "mean_queue": "Mean number of waiting requests of a scheduler.",
    "mean_token_usage": "Mean fraction of the KV pool in use, 0 to 1.",
    "tail_share": "Share of the whole time in which too few rows were left to fill the engine.",
    "imbalance": "How much less the idlest scheduler ran than the busiest, as a share of the latter; "
    "null for one.",
    "retractions": "Requests that SGLang put back into its queue because the KV pool was full.",
    "window_min": "Fewest requests that might be in flight.",
    "window_max": "Most requests that might be in flight.",
}
SHARING = {
    "expected_tokens": "Prompt tokens that rows share with a row sent before.",
    "found_tokens": "Those of them that were in the engine's prefix cache.",
    "lead_tokens": "Reuse distance at the end: prefill tokens by which a row that computes a prefix runs "
    "ahead.",
}
FAILURES = {
    "rows": "Number of rows with this cause.",
    "example_row": "Position of one of them in the input.",
    "example": "Its `error`.",
}
INCIDENTS = {
    "what": "`died`, `hangs`, `healed` (started with safer arguments), `recalled` (began with those of "
    "an earlier run)"
    ", `adapts` (restarted with other flags), `adapted` (what these gained) or `lost` (not started again).",
    "who": "Name of the server in log lines, or its address.",
    "why": "Reason, in a sentence.",
    "kind": "Where memory ran out; with `healed` only.",
    "old": "Arguments before; with `healed` and `adapts` only.",
    "new": "Arguments now; with `healed`, `recalled`, `adapts` and `adapted` only.",
    "gain": "With `adapted` only: 0.1 is a tenth more output tokens a second; -1 where the server died.",
}
STATUS = {
    "path": "Output path of the run.",
    "running": "Who is at work, in words; null if nobody is.",
    "model": "Identity of the model.",
    "simulated": "Whether the answers are invented.",
    "rows_total": "Rows that the job selects.",
    "rows_on_disk": "Rows that ended, failed ones included, and are safe on disk.",
    "rows_failed": "Rows that have an `error`.",
    "rows_cut": "Rows that succeeded, of which an output was cut at `max_new_tokens`.",
    "rows_reused": "Rows that have the answer of an equal request of another run (`output.reuse`).",
    "failures": "Failed rows by cause, largest group first: `rows`, `example_row`, `example`.",
    "reason": "Why the last attempt ended; null while somebody is at work, and after a kill.",
    "output_tokens": "Generated tokens of the rows on disk, also of their rejected answers.",
    "finished": "Whether all rows are on disk and nobody is at work.",
    "rows_per_s": "Rows per second of all tasks that are at work.",
    "time_left_s": "Seconds to the end, by the pace of the rows that ended; null where that is not known.",
    "leases": "Where tasks share the rows: numbers of leases, as `total`, `free`, `done`, and `held` by "
    "each task; else "
    "null.",
    "tasks": "The tasks, one for a run that nothing shares.",
}
TASK = {
    "task": "Name of the task; `main` for a run that nothing shares.",
    "running": "Who is at work, in words; null if nobody is.",
    "rows_on_disk": "Rows that the task ended.",
    "rows_failed": "Those of them that have an `error`.",
    "rows_cut": "Those of them of which an output was cut at `max_new_tokens`.",
    "output_tokens": "Generated tokens of its rows.",
    "starting": "Its step before the first row: `what` (`input` while the input is read and sorted, `engine` "
    "while the engine starts) and `since_s`, the seconds since it began; null afterwards.",
    "last_sample": "Its newest [sample](events.md#sample); null if it is not at work.",
}
ADVISE = {
    "source": "The log, address or run.",
    "healthy": "Whether there are enough samples and nothing is wrong.",
    "enough": "Whether there are enough samples for advice.",
    "reading": "What the samples show.",
    "version": "Version of SGLang; null if unknown.",
    "flags_known": "Whether the flags of that version are known, so that advice spells them as it does.",
    "advice": "Pieces of advice, the most important first.",
}


ERROR = {
    "error": "What went wrong: `type` (the class of the error), `message`, and `hint` (what to do).",
    "exit_code": "Exit code of the command.",
}
MERGE = {
    "path": "Directory of the merged files, or the file.",
    "rows": "Rows in these files.",
    "rows_missing": "Rows of the run that are not in them.",
    "is_at_work": "Whether a task of the run is at work.",
    "exit_code": "Exit code of the command: 1 while rows are missing.",
    "report": "Report of the whole run, as report.json has it.",
}


ROWS_LEFT = f"\n| `rows_left` | integer | {inspect.getdoc(Report.rows_left)} |"
"""The one key that is computed from the others."""


def page() -> str:
    """Return the page."""
    tables: dict[str, str] = {
        "## report.json": field_table(Report) + ROWS_LEFT,
        "### failures": _keys(FAILURES),
        "### load": _keys(LOAD),
        "### incidents": _keys(INCIDENTS),
        "### sharing\n\nEmpty where rows are sent in input order, or the engine has no prefix cache.": _keys(
            SHARING
        ),
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
