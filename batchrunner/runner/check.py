"""`batchrun check`: validates a job, or a batch file, without an engine, and shows the first prompts."""

import contextlib
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

import orjson

from batchrunner.core.console import counted
from batchrunner.core.errors import (
    EXIT_DONE,
    EXIT_FAILED_ROWS,
    RowRefusedError,
)
from batchrunner.core.files import known_format
from batchrunner.core.types import CHAT_PATH, Outcome, Request, RequestBody
from batchrunner.engines.http import wire
from batchrunner.engines.registry import launched_model, model_of
from batchrunner.engines.request_limits import refuse_invalid
from batchrunner.input.order import OrderDecision
from batchrunner.input.order_sample import decide_order
from batchrunner.input.request_bodies import prompts_in
from batchrunner.job.call import job_of_batch
from batchrunner.job.load import load_job
from batchrunner.output.counts import Failures
from batchrunner.output.resume import read_done
from batchrunner.report.report import cause_lines
from batchrunner.runner.plan import RunState, StartOptions, plan_run
from batchrunner.runner.prepare import PreparedJob, check_resumes, prepare
from batchrunner.runner.prompt_check import PromptCheck
from batchrunner.sglang.model_files import check_model

PROMPTS_SHOWN = 3
ROWS_LOOKED_AT = 1000
"""Maximum number of rows for which the check builds the prompt, to find rows that cannot be sent. A batch
file has no maximum."""
PROMPT_CHARACTERS = 2000
"""Maximum number of characters of a prompt that `batchrun check` shows."""


@dataclass(frozen=True, slots=True)
class Check:
    """The rows that a run would send, and its first prompts."""

    files: int
    """Number of input files."""
    rows_in_input: int
    """Number of rows in the input files."""
    rows_total: int
    """Number of rows that `input.filter` and `input.limit` select."""
    rows_done: int
    """Number of rows that earlier starts of the run finished, including failed rows."""
    rows_failed: int
    """Number of rows in `rows_done` that ended with an error."""
    rows_to_do: int
    """Number of rows that a start of the run would send."""
    order: OrderDecision
    """Order in which rows are sent, and the reason for it."""
    prompts: list[dict[str, Any]]
    """First three prompts, each with `row`, `kind`, `prompt`, and `error` if the row cannot be sent."""
    rows_looked_at: int
    """Number of rows whose prompts were built as a trial: the first 1,000, or all rows of a batch file."""
    rows_not_sendable: int
    """Number of rows in `rows_looked_at` that cannot be sent, for example because the prompt is empty."""
    not_sendable: list[dict[str, Any]]
    """Reasons why rows cannot be sent, the most frequent first. Fields: `rows`, `example_row`, `example`."""
    not_looked_at: str | None
    """Part of the job that only a start can check, such as a model whose files are not on this machine; null
    if everything was checked."""
    warnings: list[str]
    """Warnings about prompts that can be sent but may give worse answers, because their first token comes
    twice."""

    def as_dict(self) -> dict[str, Any]:
        """Return the result for `--json`."""
        return asdict(self)

    def lines(self) -> list[str]:
        """Return the result as lines of text for a person."""
        rows = counted(self.rows_in_input, "row")
        lines = [
            f"input: {rows} in {counted(self.files, 'file')}, {self.rows_total:,} selected",
            f"done: {self.rows_done:,} ({self.rows_failed:,} failed); to do: {self.rows_to_do:,}",
            str(self.order),
        ]
        for prompt in self.prompts:
            text = prompt["error"] or prompt["prompt"] or ""
            if isinstance(text, str):
                prompt_lines = [text[:PROMPT_CHARACTERS]]
            else:
                as_json = orjson.dumps(text, option=orjson.OPT_INDENT_2, default=str).decode()
                prompt_lines = as_json[:PROMPT_CHARACTERS].split("\n")
            label = "cannot be sent" if prompt["error"] else prompt["kind"] or "left out by prompt.python"
            lines += [f"--- row {prompt['row']} ({label})", *prompt_lines]
        lines += cause_lines(self.not_sendable, "cannot be sent")
        lines += [f"not checked: {self.not_looked_at}"] if self.not_looked_at else []
        lines += [f"warning: {warning}" for warning in self.warnings]
        return [*lines, f"{self.verdict}; nothing was sent"]

    @property
    def exit_code(self) -> int:
        """Exit code of the command: 3 if no checked row can be sent, as if a run had failed all rows."""
        return EXIT_FAILED_ROWS if 0 < self.rows_looked_at == self.rows_not_sendable else EXIT_DONE

    @property
    def verdict(self) -> str:
        """Conclusion of the check in a few words."""
        if self.warnings and not self.rows_not_sendable:
            return "the rows can be sent, with a warning"
        if not self.rows_not_sendable:
            return "everything else is fine" if self.not_looked_at else "the job is fine"
        if self.exit_code:
            rows = f"the first {self.rows_looked_at:,} rows" if self.rows_looked_at > 1 else "the rows"
            return f"none of {rows} can be sent: correct the prompt or the data"
        return f"{self.rows_not_sendable} of the first {counted(self.rows_looked_at, 'row')} cannot be sent"


def check(job: str, overrides: Sequence[str]) -> Check:
    """Check a job file or a batch file. Raises BatchrunError, with a message of one line, if it is wrong."""
    file_format = known_format(job)
    # A .json file may be a job. A file with another ending of JSON Lines is a batch file.
    is_batch = file_format is not None and file_format.kind == "JSON Lines" and file_format.ending != ".json"
    with tempfile.TemporaryDirectory(prefix="batchrunner-") as scratch:
        if is_batch:  # a batch file names no engine, and a check sends nothing
            loaded = job_of_batch(job, f"{scratch}/run", engine=["simulated"], overrides=overrides)
        else:
            loaded = load_job(job, overrides=overrides)
        model = launched_model(loaded.engine)
        if model is not None:
            check_model(model)
        with contextlib.closing(prepare(loaded)) as prepared:
            return _check(prepared)


def _check(prepared: PreparedJob) -> Check:
    """Build the prompts of the first rows, or of all rows of a batch file; return the result of the check."""
    loaded = prepared.job
    check_resumes(prepared, model_of(loaded.engine))
    stored = read_done(prepared.run_dir)
    plan = plan_run(StartOptions(), RunState.of(prepared.selected(), stored))
    rows_to_render = plan.rows or plan.selected  # if all rows are done, their prompts are shown all the same
    items = (item for batch in prepared.batches(rows_to_render) for item in batch)
    model = PromptCheck(loaded)
    failures, first_prompts, looked_at = Failures(), list[dict[str, Any]](), 0
    for item in islice(items, None if loaded.prompt.is_batch else ROWS_LOOKED_AT):
        prompt = _prompt_of(item, model)
        if loaded.prompt.rollout:
            # The prompts of a rollout come from its function, which does not run here. So the row itself is
            # shown.
            prompt["kind"] = "row"
        looked_at += 1
        if prompt["error"] is not None:
            failures.add(item.ref.row, prompt["error"])
        if len(first_prompts) < PROMPTS_SHOWN:
            first_prompts.append(prompt)
    return Check(
        files=len(prepared.dataset.files),
        rows_in_input=prepared.dataset.total_rows,
        rows_total=len(plan.selected),
        rows_done=len(stored),
        rows_failed=len(stored.failed),
        rows_to_do=len(plan.rows),
        order=decide_order(prepared, plan.rows),
        prompts=first_prompts,
        rows_looked_at=looked_at,
        rows_not_sendable=sum(failures.rows.values()),
        not_sendable=failures.summary(),
        not_looked_at=model.unknown,
        warnings=model.warnings(),
    )


def _prompt_of(item: Request | Outcome, model: PromptCheck) -> dict[str, Any]:
    """Return the entry of a row for `Check.prompts`."""
    error = _refusal(item, model) if isinstance(item, Request) else item.error
    kind = prompt = None
    if isinstance(item, Request) and error is None:
        kind, prompt = item.kind, item.shown
        if isinstance(item.prompt, RequestBody):
            prompt = orjson.loads(item.prompt.content)
    return {"row": item.ref.row, "kind": kind, "prompt": prompt, "error": error}


def _refusal(request: Request, model: PromptCheck) -> str | None:
    """Return why a run would not send a row, or None.

    Reasons that only the engine knows are not found.
    """
    try:
        refuse_invalid(request)
        wire.refuse_deadly(request, None)  # some values would crash an SGLang server
        if isinstance(request.prompt, RequestBody):
            body = orjson.loads(request.prompt.content)
        else:
            body = wire.body_of(request)
            # Raises RowRefusedError if the body cannot be written as JSON. A simulated engine gets no JSON,
            # so it accepts every value.
            wire.bytes_of(body, default=str if model.engine == "simulated" else None)
        if wire.path_of(request) == CHAT_PATH:
            model.refuse_failing_chat(body)
        elif isinstance(request.prompt, RequestBody):
            for prompt in prompts_in(request.prompt):
                model.look_at_text(prompt)
        else:
            model.look_at_text(request.prompt)
    except RowRefusedError as failure:
        return str(failure)
    return None
