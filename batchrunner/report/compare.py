"""Compares several runs: their figures, the settings that differ, and the answers to the same rows."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.dataset as pads
import pyarrow.parquet as pq

from batchrunner.core.console import counted, duration
from batchrunner.core.errors import NoResultYetError, ResumeError, first_line
from batchrunner.output.merge import durable_results, work_directory
from batchrunner.output.run_dir import RunDir, look_at_run
from batchrunner.output.run_json import require_run_json
from batchrunner.report.report import Report, cause_lines, report_of_all

if TYPE_CHECKING:
    import duckdb

MEMORY = "256MB"
"""Limit of the memory that DuckDB may use. Above it, DuckDB writes temporary files."""
EXAMPLES = 3
"""Maximum number of rows with different answers that are shown for a pair of runs."""
SHOWN = 200
"""Maximum number of characters of an answer, and of a setting, in the comparison."""
_NOT_COMPARED = {"output.path", "limits.deadline"}
"""Fields of a job that say nothing about its results or its speed."""
_FIGURES = (
    "rows_total", "rows_ok", "rows_failed", "rows_cut", "rows_left", "starts", "wall_s", "rows_per_s",
    "output_tokens_per_s", "output_tokens", "prompt_tokens", "cached_tokens", "retries",
)  # fmt: skip
"""Fields of the report that the comparison shows."""


@dataclass(frozen=True, slots=True)
class AnswerComparison:
    """A comparison of the answers of two runs to the same rows."""

    first: str
    """Output path of the first run."""
    second: str
    """Output path of the second run."""
    not_compared: str | None = None
    """Reason why the answers cannot be compared; None if they are compared."""
    rows: int = 0
    """Number of rows that have a result in both runs."""
    same: int = 0
    """Number of rows with the same `output` in both runs."""
    different: int = 0
    """Number of rows that are ok in both runs, with different outputs."""
    failed_in_first_only: int = 0
    """Number of rows that failed in the first run and are ok in the second."""
    failed_in_second_only: int = 0
    """Number of rows that are ok in the first run and failed in the second."""
    failed_in_both: int = 0
    """Number of rows that failed in both runs."""
    examples: list[dict[str, Any]] = field(default_factory=list)
    """Some rows with different outputs, each with `row` and the shortened outputs `first` and
    `second`.
    """

    def lines(self) -> list[str]:
        """Return the lines that are printed for the two runs."""
        title = f"answers of {self.first} and {self.second}"
        if self.not_compared is not None:
            return [f"{title}: not compared: {self.not_compared}"]
        # Failures and examples get lines only if there are any.
        lines = [
            f"{title}: {counted(self.rows, 'row')} in both runs",
            f"same output: {self.same:,}, different output: {self.different:,}",
        ]
        if self.failed_in_first_only or self.failed_in_second_only or self.failed_in_both:
            lines.append(
                f"failed only in {self.first}: {self.failed_in_first_only:,}, "
                f"only in {self.second}: {self.failed_in_second_only:,}, in both: {self.failed_in_both:,}"
            )
        for example in self.examples:
            texts = (json.dumps(example[name], ensure_ascii=False) for name in ("first", "second"))
            lines.append(f"row {example['row']}: {' / '.join(texts)}")
        return lines


@dataclass(frozen=True, slots=True)
class RunComparison:
    """Figures, settings and answers of several runs side by side."""

    reports: list[Report]
    settings: dict[str, list[Any]]
    """Settings that differ, with the value in each run; None if a run does not set the field."""
    answers: list[AnswerComparison]
    """Answers of the first run compared with those of each other run."""

    def as_dict(self) -> dict[str, Any]:
        """Return the comparison as `--json` prints it."""
        return {
            "runs": [
                {name: getattr(report, name) for name in ("path", "simulated", *_FIGURES, "failures")}
                for report in self.reports
            ],
            "settings": self.settings,
            "answers": [asdict(pair) for pair in self.answers],
        }

    def lines(self) -> list[str]:
        """Return the lines that are printed: a table of the runs, then failures and answers."""
        table = [["", *(report.path for report in self.reports)]]
        for name in _FIGURES:
            figures = (_figure(name, getattr(report, name)) for report in self.reports)
            table.append([name, *figures])
        table.extend([name, *map(_setting, values)] for name, values in self.settings.items())
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = []
        for cells in table:
            # Each cell is padded to the widest cell of its column.
            padded = (cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
            lines.append("  ".join(padded).rstrip())
        for report in self.reports:
            lines += cause_lines(report.failures, f"failed in {report.path}")
            if report.simulated:
                lines.append(f"{report.path}: simulated, so its answers and times mean nothing")
        for pair in self.answers:
            lines += pair.lines()
        return lines


def compare(runs: Sequence[str | Path]) -> RunComparison:
    """Compare the figures and settings of runs, and the answers of the first run with each other run.

    The runs may be active. Raises OutputError for a path without a run, ResumeError and StorageError.
    """
    run_dirs = [look_at_run(run) for run in runs]
    contents = [require_run_json(run_dir) for run_dir in run_dirs]
    first, *others = range(len(run_dirs))
    return RunComparison(
        reports=[report_of_all(run_dir) for run_dir in run_dirs],
        settings=_different_settings(contents),
        answers=[
            _compare_answers([run_dirs[first], run_dirs[other]], [contents[first], contents[other]])
            for other in others
        ],
    )


def _figure(name: str, value: float) -> str:
    if name == "wall_s":
        return duration(value)
    return f"{value:,.1f}" if isinstance(value, float) else f"{value:,}"


def _setting(value: Any) -> str:
    """Return the value of a setting as text, shortened."""
    if value is None:
        return "unset"
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= SHOWN else text[: SHOWN - 1] + "…"


def _different_settings(contents: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return the settings that are not the same in all runs, from the contents of their run.json files."""
    settings_of_runs = []
    for content in contents:
        settings = _leaves("", content["job"])
        settings["model"] = content["engine"].get("model")
        settings |= _leaves("versions", content["versions"])
        settings_of_runs.append(settings)
    # `dict.fromkeys` keeps each name once, in the order in which the names first occur.
    different = {}
    for name in dict.fromkeys(name for settings in settings_of_runs for name in settings):
        values = [settings.get(name) for settings in settings_of_runs]
        if name not in _NOT_COMPARED and any(value != values[0] for value in values):
            different[name] = values
    return different


def _leaves(prefix: str, value: Any) -> dict[str, Any]:
    """Return the values in nested mappings by their path, such as `sampling.temperature`."""
    if not isinstance(value, Mapping):
        return {prefix: value}
    leaves: dict[str, Any] = {}
    for name, inner in value.items():
        leaves |= _leaves(f"{prefix}.{name}" if prefix else name, inner)
    return leaves


def _compare_answers(run_dirs: Sequence[RunDir], contents: Sequence[Mapping[str, Any]]) -> AnswerComparison:
    """Compare the outputs of two runs row by row. Raises ResumeError for a damaged result file."""
    import duckdb  # noqa: PLC0415 - 25 MB, which only a comparison needs

    first, second = run_dirs
    pair: dict[str, Any] = {"first": first.name, "second": second.name}
    # One input may be the other one with more files at its end. Rows of the common files have the same
    # positions, so only the common files must be equal.
    digests = [[file["digest"] for file in content["fingerprint"]["files"]] for content in contents]
    if any(before != after for before, after in zip(*digests, strict=False)):
        return AnswerComparison(**pair, not_compared="the runs have different input files")
    with tempfile.TemporaryDirectory(prefix="batchrunner-") as scratch:
        try:
            with duckdb.connect(config={"memory_limit": MEMORY, "temp_directory": scratch}) as connection:
                for name, run_dir in zip(pair, run_dirs, strict=True):
                    with work_directory(run_dir, Path(scratch)) as work:
                        if not _load(connection, name, durable_results(run_dir, work)):
                            reason = f"{run_dir.name} has no column `output`"
                            return AnswerComparison(**pair, not_compared=reason)
                return AnswerComparison(**pair, **_counts(connection), examples=_examples(connection))
        except NoResultYetError as nothing:
            return AnswerComparison(**pair, not_compared=nothing.message)
        except duckdb.Error as failure:
            raise ResumeError(
                f"{first.name}, {second.name}: cannot be compared: {first_line(failure)}"
            ) from None


def _load(connection: duckdb.DuckDBPyConnection, name: str, parts: Sequence[Path]) -> bool:
    """Load the outputs of a run into a table of DuckDB; return False if the run has no outputs.

    For each row, the table has the shortened output, a hash of the whole output, and whether the row is ok.
    Each row is loaded once, even if it has several results. All of them have the same output.
    """
    schema = pq.read_schema(parts[0])
    if "output" not in schema.names or "error" not in schema.names:
        return False
    columns = pa.schema([field for field in schema if field.name in {"row", "output", "error"}])
    connection.register(
        "parts", pads.dataset([str(part) for part in parts], schema=columns, format="parquet")
    )
    # GROUP BY loads each row once. All results of a row have the same output.
    connection.execute(
        f"""CREATE TABLE {name} AS
            SELECT row, any_value(hash(output)) AS digest,
                any_value(left(output::VARCHAR, {SHOWN})) AS shown, bool_and(error IS NULL) AS ok
            FROM parts GROUP BY row"""  # noqa: S608 - our own names
    )
    connection.unregister("parts")
    return True


def _counts(connection: duckdb.DuckDBPyConnection) -> dict[str, Any]:
    """Count the rows of the tables `first` and `second`, for the fields of AnswerComparison."""
    conditions = {
        "rows": "true",
        "same": "first.ok AND second.ok AND first.digest = second.digest",
        "different": "first.ok AND second.ok AND first.digest != second.digest",
        "failed_in_first_only": "NOT first.ok AND second.ok",
        "failed_in_second_only": "first.ok AND NOT second.ok",
        "failed_in_both": "NOT first.ok AND NOT second.ok",
    }
    # One query counts the rows for all conditions.
    counts = ", ".join(f"count(*) FILTER ({condition})" for condition in conditions.values())
    numbers = connection.execute(f"SELECT {counts} FROM first JOIN second USING (row)").fetchone()  # noqa: S608
    return dict(zip(conditions, numbers or (), strict=True))


def _examples(connection: duckdb.DuckDBPyConnection) -> list[dict[str, Any]]:
    """Return the first rows whose outputs differ."""
    rows = connection.execute(
        f"""SELECT row, first.shown, second.shown FROM first JOIN second USING (row)
            WHERE first.ok AND second.ok AND first.digest != second.digest
            ORDER BY row LIMIT {EXAMPLES}"""  # noqa: S608 - our own names
    ).fetchall()
    return [dict(zip(("row", "first", "second"), row, strict=True)) for row in rows]
