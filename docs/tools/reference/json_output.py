"""The page on report.json and on what `--json` prints."""

import inspect

from batchrunner.advise.rules.table import Advice
from batchrunner.core.engine_info import EngineInfo, TokenizerInfo
from batchrunner.input.sort.decide import OrderDecision
from batchrunner.report.report import Report
from batchrunner.runner.check import Check
from batchrunner.tune.measurement import TrialSigns
from batchrunner.tune.tuner import TuningSummary
from docs.tools.reference.markdown import field_table, table

HEAD = """# report.json and --json

`batchrun run --json` prints what `RUN/report.json` holds; the other commands print objects of their own,
and `schema` the JSON Schema of jobs, on standard output; log lines go to standard error. New keys may come
with any version, and none goes."""

LOAD = {
    "steady_s": "Seconds of steady time, summed over schedulers; the shares below are of it, and null "
    "without it.",
    "in_band_share": "Share with a healthy number of waiting requests (the job's `queue`, scaled).",
    "corner_shares": "Share in each [corner](../how-it-works/concurrency.md#token-usage), by its name.",
    "empty_queue_share": "Share in which no request waited.",
    "mean_queue": "Mean number of waiting requests of a scheduler.",
    "mean_token_usage": "Mean fraction of the KV pool in use, 0 to 1.",
    "tail_share": "Share of the whole time in which too few rows were left to fill the engine.",
    "imbalance": "How much less the idlest scheduler ran than the busiest, as a share of the latter; "
    "null for one.",
    "retractions": "Requests that SGLang put back into its queue because the KV pool was full.",
    "window_min": "Fewest requests that might be in flight.",
    "window_max": "Most requests that might be in flight.",
    "window_over_time": "Up to 200 points [seconds since the start, requests that might be in flight].",
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
    "an earlier run) "
    "or `lost` (not started again).",
    "who": "Name of the server in log lines, or its address.",
    "why": "Reason, in a sentence.",
    "kind": "Where memory ran out; with `healed` only.",
    "old": "Arguments before; with `healed` only.",
    "new": "Arguments now; with `healed` and `recalled` only.",
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
    "failures": "Failed rows by cause, largest group first: `rows`, `example_row`, `example`.",
    "reason": "Why the last attempt ended; null while somebody is at work, and after a kill.",
    "output_tokens": "Generated tokens of the rows on disk.",
    "finished": "Whether all rows are on disk and nobody is at work.",
    "rows_per_s": "Rows per second of all tasks that are at work.",
    "time_left_s": "Seconds to the end at this rate; null without one.",
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
    "thresholds": "Where each sign begins: the [thresholds](advice-rules.md#thresholds) in effect.",
}
READING = {
    "samples": "Samples in which requests ran.",
    "span_s": "Seconds of work that they cover.",
    "empty_share": "Share with an empty queue.",
    "in_band_share": "Share with a healthy number of waiting requests.",
    "deep_share": "Share with too many waiting requests.",
    "conservative_share": "Share with waiting requests and an unused KV pool.",
    "full_share": "Share with a well used KV pool.",
    "no_graph_share": "Share of decode passes without a CUDA graph, of those that could have one.",
    "median_running": "Median of running requests, `#running-req`.",
    "median_queue": "Median of waiting requests, `#queue-req`.",
    "median_token_usage": "Median fraction of the KV pool in use.",
    "schedulers": "Number of schedulers.",
    "retractions": "Number of retractions.",
    "retractions_per_min": "Retractions per minute.",
}
TRIAL = {
    "args": "Flags that differ from the job's.",
    "tokens_per_s": "Output tokens per second of each trial with these flags.",
    "ended": "How the newest trial ended: `measured`, `behind`, `died` or `cut`.",
    "verdict": "How these flags compare with the best ones, in words.",
    "cost_s": "Seconds that these trials took.",
    "signs": "What limited the newest trial.",
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
    "pushed": "URL of the commit on the Hugging Face Hub that has the files; null without `output.push`, "
    "while rows are missing, and with FILE.",
    "exit_code": "Exit code of the command: 1 while rows are missing.",
    "report": "Report of the whole run, as report.json has it.",
}
PAGE = {"page": "Path of report.html."}
SLURM = {
    "script": "Script of the array.",
    "file": "Where it was written; null where it was not.",
    "run": "Output path of the run.",
    "logs": "Directory of the tasks' logs.",
    "submitted": "What `--submit` submitted, in sentences; else empty.",
}
INIT = {
    "job": "Where the job was written; null with `-o -`.",
    "text": "The job file.",
    "prompt_column": "Column that the prompt is made of.",
    "columns": "Types of the data's columns, by their names.",
}


ROWS_LEFT = f"\n| `rows_left` | integer | {inspect.getdoc(Report.rows_left)} |"
"""The one key that is computed from the others."""


def page() -> str:
    """Return the page."""
    tables: dict[str, str] = {
        "## report.json": field_table(Report) + ROWS_LEFT,
        "### failures": _keys(FAILURES),
        "### engine": field_table(EngineInfo),
        "### engine.tokenizing": field_table(TokenizerInfo),
        "### load": _keys(LOAD),
        "### incidents": _keys(INCIDENTS),
        "### sharing\n\nEmpty where rows are sent in input order, or the engine has no prefix cache.": _keys(
            SHARING
        ),
        "## Errors\n\nAny command with `--json`. A run that began has the keys of report.json too.": _keys(
            ERROR
        ),
        "## init --json": _keys(INIT),
        "## check --json": field_table(Check),
        "### order": field_table(OrderDecision),
        "## status --json": _keys(STATUS),
        "### tasks": _keys(TASK),
        "## merge --json": _keys(MERGE),
        "## report --json": _keys(PAGE),
        "## slurm --json": _keys(SLURM),
        "## advise --json": _keys(ADVISE),
        "### reading": _keys(READING),
        "### advice": field_table(Advice),
        "## tune --json": field_table(TuningSummary),
        "### trials": _keys(TRIAL),
        "### signs": field_table(TrialSigns),
    }
    return "\n\n".join([HEAD, *(f"{title}\n\n{rows}" for title, rows in tables.items())])


def _keys(meanings: dict[str, str]) -> str:
    return table(["key", "meaning"], ([f"`{name}`", text] for name, text in meanings.items()))
