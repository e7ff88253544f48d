"""The page on report.json and on what `--json` prints."""

import inspect

from batchrunner.report.compare import AnswerComparison
from batchrunner.report.report import Report
from batchrunner.runner.check import Check
from batchrunner.tuning.rules import Advice
from docs.tools.reference.markdown import field_list, meanings

HEAD = """# report.json and --json

Read a run's figures in a program: `batchrun run --json` prints the contents of `RUN/report.json`, and other
commands print the objects below. The keys of `slurm` and `tune` are named as on the screen. An
[error](command-line.md) has `error` and `exit_code`, and the keys of report.json if the run had begun."""

LOAD = {
    "steady_s": "Seconds of steady time, summed over schedulers. Shares are relative to it; null without it.",
    "in_band_share, empty_queue_share": "Share of the time with the queue in its target range, and with "
    "an empty queue.",
    "corner_shares": "Share of the time in each [load state](../how-it-works/concurrency.md#load-states).",
    "mean_queue, mean_token_usage": "Waiting requests of a scheduler, and used fraction of its KV pool.",
    "tail_share": "Share of the whole time with too few rows left to fill the engine.",
    "retractions": "Requests put back into the queue because the KV pool was full.",
    "background": "In a [background run](../how-to/background.md): `our_share` and `users_share` of the "
    "engine's "
    "time, preempted rows (`rows_given_back`), and their `tokens_lost`; otherwise null.",
}
SHARING = {
    "expected_tokens": "Prompt tokens that rows share with an earlier row.",
    "found_tokens": "The part of them that came from the prefix cache.",
    "lead_tokens": "Last reuse distance: prefill tokens by which a row that computes a prefix runs ahead.",
}
FAILURES = {
    "rows": "Rows with this cause.",
    "example_row, example": "Position of one such row in the input, and its `error`.",
}
INCIDENTS = {
    "what": "`died`, `hangs`, `healed` (started with safer arguments), `recalled` (started with those of an "
    "earlier run), `adapts` (restarted with other flags), `adapted` (measured their gain), `lost` "
    "(given up).",
    "who, why": "Server, named as in log lines, and reason.",
    "kind": "Where memory ran out (`healed`).",
    "old, new": "Arguments before (`healed`, `adapts`) and now (also `recalled`, `adapted`).",
    "gain": "0.1 means 10 % more output tokens/s; -1 means that the server died (`adapted`).",
}
STATUS = {
    "path, simulated, rows_total, rows_failed, rows_cut, rows_reused, failures": "As in report.json.",
    "outputs_repeating": "Number of outputs that were stopped because they repeated themselves.",
    "running": "The process that works on the run; null if there is none.",
    "model": "Identity of the model.",
    "rows_on_disk": "Finished rows that are durable, including failed ones.",
    "output_tokens": "Generated tokens, including rejected answers.",
    "reason": "Why the last start ended; null while the run works, and after a kill.",
    "next_step": "What to do to go on; empty if `reason` says it.",
    "finished": "Whether all rows are on disk and no process works on the run.",
    "rows_per_s": "Rows per second, over all live workers.",
    "time_left_s": "Predicted seconds to the end; null while unknown.",
    "leases": "In a joined run: leases in `total`, `free`, `done`, and `held` by each worker; otherwise "
    "null.",
    "tasks": "The workers; one unless several share the run.",
}
TASK = {
    "task": "Name of the worker; `main` if it is the only one.",
    "running, rows_on_disk, rows_failed, rows_cut, output_tokens": "As above, for this worker.",
    "starting": "Before the first row: `what` it waits for (`input` or `engine`), and `since_s`; "
    "otherwise null.",
    "last_sample": "Latest [load sample](events.md#sample); null if the worker has ended.",
}
ADVISE = {
    "source": "The log, address or run that was read.",
    "healthy": "Whether there are enough load samples and no sign was found.",
    "enough": "Whether there are enough load samples.",
    "reading": "What the load samples show.",
    "version": "Version of SGLang; null if unknown.",
    "flags_known": "Whether the flags of this version are known, so that advice spells them correctly.",
    "advice": "List of advice, most important first; see below.",
}


MERGE = {
    "path": "Directory or file that was written.",
    "rows, rows_missing": "Rows written, and rows of the run that are missing.",
    "exit_code": "1 while rows are missing.",
    "report": "Report of the whole run.",
}


REPORT = {
    "page": "Path or URI of the page; only for a single run.",
    "runs": "Main figures of each run, named as in report.json; this key and the following are only for "
    "several runs.",
    "settings": "Settings that differ, by path in the job, with a list of their values in the runs.",
    "answers": "Answers of the first run compared with those of each other run; see below.",
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
        "## report --json": meanings(REPORT.items()),
        "### answers": field_list(AnswerComparison),
        "## advise --json": meanings(ADVISE.items()),
        "### advice": field_list(Advice),
    }
    return "\n\n".join([HEAD, *(f"{title}\n\n{rows}" for title, rows in tables.items())])
