"""Runs whose prompts, columns of answers, or judges are Python functions of the job."""

import json
import signal
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import batchrunner
from tests.conftest import (
    INSTANT,
    batchrun,
    column_of,
    ended,
    eventually,
    job_of,
    merged_table,
    parts_of,
    report_of,
    results_of,
    run_job,
    started,
    write_job,
    write_rows,
)
from tests.support.engine_processes import command_line, descendants_of
from tests.support.fake_sglang import FakeSGLang
from tests.support.functions import LABEL, write_module
from tests.support.runs import held_from, rows_once

pytestmark = pytest.mark.usefixtures("quick_retries")
PROMPT = {"python": "hooks:prompt"}
ECHO = "def prompt(row): return row['text']\n"


def errors_of(job: dict[str, Any]) -> dict[int, str]:
    """Return the errors of the rows that failed."""
    rows = [
        row for part in parts_of(job["output"]["path"]) for row in part.select(["row", "error"]).to_pylist()
    ]
    return {row["row"]: row["error"] for row in rows if row["error"] is not None}


def test_prompts_of_every_kind(tmp_path: Path, server: FakeSGLang) -> None:
    """A function returns a conversation, a text, token ids or nothing, row by row."""
    write_module(
        tmp_path,
        """
        def prompt(row):
            kind = row["id"] % 4
            if kind == 0:
                return [{"role": "system", "content": "Be terse."}, {"role": "user", "content": row["text"]}]
            if kind == 1:
                return "Say " + row["text"]
            return [1, 2, row["id"]] if kind == 2 else None
        """,
    )
    job = job_of(tmp_path, server, rows=8, prompt=PROMPT, input={"columns": ["id"]})
    done = run_job(job, tmp_path)
    assert "8 of 8 rows ok (2 left out by prompt.python)" in done.stderr
    sent = [sent.body for sent in server.sent]
    assert sorted(body["messages"][1]["content"] for body in sent if "messages" in body) == ["row 0", "row 4"]
    assert sorted(body["text"] for body in sent if "text" in body) == ["Say row 1", "Say row 5"]
    assert sorted(body["input_ids"] for body in sent if "input_ids" in body) == [[1, 2, 2], [1, 2, 6]]
    left_out = [row for row in results_of(job) if row["finish_reason"] == "left_out"]
    assert [row["id"] for row in left_out] == [3, 7]
    assert {(row["output"], row["error"], row["attempts"]) for row in left_out} == {(None, None, 0)}
    run_job(job, tmp_path)
    assert (len(server.sent), report_of(job)["rows_left_out"]) == (6, 2)


def test_columns_of_an_answer(tmp_path: Path, server: FakeSGLang) -> None:
    """They are typed by the annotation, stand behind the others, and are merged like these."""
    write_module(tmp_path, LABEL)
    job = job_of(tmp_path, server, rows=6, parse="hooks:label", input={"columns": ["id"]})
    run_job(job, tmp_path)
    merged = merged_table(tmp_path / "run")
    assert merged.schema.names[-4:] == ["error", "first", "length", "words"]
    assert merged.schema.field("length").type == pa.int64()
    assert merged.schema.field("words").type == pa.list_(pa.string())
    for row in merged.to_pylist():
        assert (row["first"], row["length"]) == ("answer", len(row["output"]))
        assert row["words"] == row["output"].split()


def test_only_the_row_fails(tmp_path: Path, server: FakeSGLang) -> None:
    """Whatever a function does with a row, the others are done, and the error names the user's own line."""
    write_module(
        tmp_path,
        """
        import os, sys, time, ctypes

        def prompt(row):
            match row["id"]:
                case 1: raise ValueError("no such row")
                case 2: sys.exit(3)
                case 3: os._exit(3)
                case 4: ctypes.string_at(0)
                case 5: time.sleep(1000)
                case 6:
                    while True:
                        try: time.sleep(1000)
                        except BaseException: pass
                case 7: return "x" * (1 << 40)
                case 8: return {"role": "user"}
                case 9: return [{"role": "nobody", "content": "?"}]
                case 10: return [1, "two"]
                case 11: return ""
            return row["text"]
        """,
    )
    limits = {"python": 3, "max_failed_rows": 11}
    job = job_of(tmp_path, server, rows=40, prompt=PROMPT, limits=limits)
    run_job(job, tmp_path)
    place = "prompt.python: hooks.py"
    assert errors_of(job) == {
        1: f"{place}:6: ValueError: no such row",
        2: f"{place}:7: SystemExit: 3",
        3: "prompt.python: hooks:prompt: ended its process (exit code 3)",
        4: "prompt.python: hooks:prompt: ended its process (SIGSEGV)",
        5: f"{place}:10: took more than 3 s (limits.python)",
        6: "prompt.python: hooks:prompt: took more than 3 s (limits.python)",
        7: f"{place}:15: MemoryError (limits.python_memory_gb)",
        8: "prompt.python: hooks:prompt: a dict is not a prompt: give messages, a text or token ids",
        9: "prompt.python: hooks:prompt: message 1 has the unknown role 'nobody'",
        10: "prompt.python: hooks:prompt: a list is not a prompt: give messages, a text or token ids",
        11: "prompt.python: hooks:prompt: a str is not a prompt: give messages, a text or token ids",
    }
    assert sorted(server.prompts) == sorted(f"row {n}" for n in (0, *range(12, 40)))


def test_an_answer_that_cannot_be_parsed_is_kept(tmp_path: Path, server: FakeSGLang) -> None:
    """The row fails, its answer stays; once the function is corrected, the row is sent again."""
    module = """
        from typing import TypedDict
        class Found(TypedDict):
            n: int
        def parse(answer) -> Found:
            number = int(answer.split()[-1])
            assert number != 2, "two"
            return {3: {"n": "three"}, 4: None}.get(number, {"n": number})
        """
    write_module(tmp_path, module)
    job = job_of(tmp_path, server, rows=6, parse="hooks:parse", limits={"max_failed_rows": 3})
    run_job(job, tmp_path)
    assert errors_of(job) == {
        2: "parse: hooks.py:7: AssertionError: two",
        3: "parse: hooks:parse: n: 'three' is not a whole number",
        4: "parse: hooks:parse: returned None: return a dict",
    }
    assert column_of(job, "output") == [f"answer 0 to row {n}" for n in range(6)]
    assert column_of(job, "n") == [0, 1, None, None, None, 5]
    write_module(tmp_path, COLUMN.format("n: int").replace("pass", "return {'n': int(answer.split()[-1])}"))
    run_job(job, tmp_path, "--retry-failed")
    assert column_of(job, "n") == list(range(6))
    assert len(server.sent) == 9


def test_samples_and_equal_rows(tmp_path: Path) -> None:
    """With several samples the columns are lists; equal rows are parsed with their own carried columns."""
    write_module(
        tmp_path,
        """
        from typing import TypedDict
        class Found(TypedDict):
            twice: int
        def parse(answer, row) -> Found:
            return {"twice": 2 * row["id"]}
        """,
    )
    pq.write_table(pa.table({"id": list(range(8)), "text": ["same"] * 8}), tmp_path / "input.parquet")
    sampling = {"n": 2, "temperature": 0}
    job = job_of(tmp_path, INSTANT, parse="hooks:parse", sampling=sampling, input={"columns": ["id"]})
    run_job(job, tmp_path)
    assert column_of(job, "twice") == [[2 * n, 2 * n] for n in range(8)]
    assert report_of(job)["rows_deduplicated"] == 7


def test_what_functions_print_is_in_the_log(tmp_path: Path, server: FakeSGLang) -> None:
    """Standard output has the result of the command and nothing else."""
    write_module(
        tmp_path,
        """
        import os, sys

        print("imported")

        def prompt(row):
            print("looking at", row["id"])
            os.write(1, b"and so on\\n")
            sys.stderr.write("an error\\n")
            return row["text"]
        """,
    )
    done = batchrun(write_job(job_of(tmp_path, server, rows=2, prompt=PROMPT), tmp_path), "--json")
    assert json.loads(done.stdout)["rows_ok"] == 2
    checked = batchrun("check", tmp_path / "job.yaml", "--json")
    assert json.loads(checked.stdout)["rows_total"] == 2
    for line in ("imported", "looking at 1", "and so on", "an error"):
        assert f"python: {line}\n" in done.stderr
        assert f"python: {line}\n" in checked.stderr


COLUMN = "from typing import TypedDict\nclass C(TypedDict):\n  {}\ndef parse(answer) -> C: pass"
ROW = "from typing import TypedDict\nclass R(TypedDict):\n  txt: str\ndef prompt(row: R): pass"
PARSE = {"parse": "hooks:parse"}
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("import nowhere", {"prompt": PROMPT}, "hooks.py:1: ModuleNotFoundError: No module named 'nowhere'"),
    ("import os; os._exit(4)", {"prompt": PROMPT}, "the import ended its process (exit code 4)"),
    ("", {"prompt": {"python": "hooks.prompt"}}, "should be a Python function: write it as module:function"),
    (ROW, {"prompt": PROMPT}, "unknown column 'txt'; did you mean 'text'?"),
    ("def parse(answer): pass", PARSE, "hooks:parse does not declare the columns that it returns"),
    (COLUMN.format("id: str"), PARSE, "the results already have a column 'id'"),
]


@pytest.mark.parametrize(("code", "fields", "says"), REFUSED)
def test_a_function_that_cannot_be_called_is_refused(
    tmp_path: Path, code: str, fields: dict[str, Any], says: str
) -> None:
    """`check` says so in one line: also that its columns are not known, or do not fit beside the others."""
    write_module(tmp_path, code)
    done = batchrun("check", write_job(job_of(tmp_path, input={"columns": ["id"]}, **fields), tmp_path))
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("batchrun: ")]
    assert (done.exit_code, says in line) == (2, True), line


def test_where_modules_are_looked_up(
    tmp_path: Path, server: FakeSGLang, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside the job file, then in the current directory; `python_path` comes instead of the first."""
    for place in ("beside", "here", "given"):
        write_module(tmp_path / place, f"def prompt(row): return '{place}'")
    write_module(tmp_path / "here", "def prompt(row): return 'only here'", "other")
    monkeypatch.chdir(tmp_path / "here")
    job = job_of(tmp_path, server, rows=1, prompt=PROMPT)
    beside = tmp_path / "beside"
    run_job(job, beside)
    run_job(job, beside, "--fresh", "--set", "prompt.python=other:prompt")
    run_job(job, beside, "--fresh", "--set", f"python_path=[{tmp_path / 'given'}]")
    assert server.prompts == ["beside", "only here", "given"]


def test_functions_are_part_of_the_run(tmp_path: Path, server: FakeSGLang) -> None:
    """Another function, or other columns, are refused; a corrected one is not."""
    write_module(tmp_path, LABEL)
    job = job_of(tmp_path, server, rows=4, parse="hooks:label")
    run_job(job, tmp_path, "--limit", "2")
    run_job(job, tmp_path, "--set", "parse=hooks:other", code=2)
    write_module(tmp_path, LABEL.replace("length: int", "length: float"))
    typed = run_job(job, tmp_path, code=2)
    assert "holds another run: columns.length was 'int64' and is 'float64'" in typed.stderr
    write_module(tmp_path, "# changed\n" + LABEL)
    run_job(job, tmp_path)
    assert len(server.sent) == 4


HELPED = """
UNIT = 1

def size_of(text):
    return len(text) * UNIT
"""
"""What stands beside a function and belongs to its code."""
CHANGED = "parse: the code has changed since the last start: finished rows keep the results of the old code"


@pytest.mark.parametrize("options", [[], ["--join"]], ids=["alone", "join"])
def test_code_that_changes_between_starts(tmp_path: Path, server: FakeSGLang, options: list[str]) -> None:
    """A start whose rows come of other code than earlier ones says so, once; a comment is no code."""
    label = LABEL.replace("len(answer)", "size_of(answer)")
    job = job_of(tmp_path, server, rows=10, parse="hooks:label")

    def start(code: str, limit: int) -> str:
        write_module(tmp_path, code)
        return run_job(job, tmp_path, "--limit", limit, *options).stderr

    def lengths() -> list[bool]:
        """Tell for each row whether its length is that of its answer."""
        return [row["length"] == len(row["output"]) for row in results_of(job)]

    assert CHANGED not in start(HELPED + label, 2)
    assert CHANGED not in start("# Columns of an answer\n" + HELPED + "\n\n" + label, 4)
    changed = HELPED.replace("UNIT = 1", "UNIT = 2") + label
    assert start(changed, 6).count(CHANGED) == 1
    assert CHANGED not in start(changed, 8)
    assert lengths() == [True] * 4 + [False] * 4
    assert start(HELPED + label, 8).count(CHANGED) == 1  # it finds nothing to do
    if not options:
        assert CHANGED not in run_job(job, tmp_path, "--fresh").stderr
        assert lengths() == [True] * 10


PROGRAM = """
import sys
from typing import TypedDict

import batchrunner

class Size(TypedDict):
    length: int

def size(answer) -> Size:
    return {"length": len(answer)}

batchrunner.run(sys.argv[1], overrides=[f"input.limit={sys.argv[2]}"])
"""


def test_code_of_a_program_that_changes(tmp_path: Path, server: FakeSGLang) -> None:
    """The same holds for a function that a program gives; its other lines may change."""
    job = job_of(tmp_path, server, rows=10)
    program = PROGRAM.replace("sys.argv[1]", f"{{**{job!r}, 'parse': size}}")
    changed = program.replace("len(answer)", "2 * len(answer)")

    def start(code: str, limit: int) -> str:
        file = write_module(tmp_path, code, "program")
        done = ended(sys.executable, file, "", limit)
        assert done.returncode == 0, done.stderr
        return done.stderr

    assert CHANGED not in start(program, 2)
    assert CHANGED not in start("# A program\n" + program + "\nprint('done')\n", 4)
    assert CHANGED in start(changed, 6)
    assert len(server.sent) == 6


def test_a_kill_in_the_midst(tmp_path: Path, server: FakeSGLang) -> None:
    """The processes of the functions end with the run, and every row is there once."""
    write_module(tmp_path, ECHO + LABEL)
    server.script = held_from(60)
    job = job_of(tmp_path, server, rows=200, window=8, prompt=PROMPT, parse="hooks:label")
    file = write_job(job, tmp_path)
    with started(file) as running:
        eventually(lambda: len(server.sent) >= 68)
        children = descendants_of(running.process.pid)
        assert children
        running.kill()
        eventually(lambda: not any(map(command_line, children)))
    server.answer_held()
    run_job(job, tmp_path)
    assert column_of(job, "length") == [len(f"answer 0 to row {n}") for n in range(200)]


def test_a_stop_does_not_wait_for_a_function(tmp_path: Path, server: FakeSGLang) -> None:
    """A drain ends a call that hangs; its row is done by the next start."""
    write_module(
        tmp_path,
        f"""
        import os, time

        def prompt(row):
            if row["id"] == 300 and not os.path.exists({str(tmp_path / "go on")!r}):
                print("hanging")
                time.sleep(10000)
            return row["text"]
        """,
    )
    job = job_of(tmp_path, server, rows=400, prompt=PROMPT, limits={"python": 9000}, order="input")
    file = write_job(job, tmp_path)
    with started(file) as running:
        running.wait_for_line("python: hanging")
        running.process.send_signal(signal.SIGINT)
        assert running.end() == 130
    (tmp_path / "go on").touch()
    run_job(job, tmp_path)
    rows_once(job, 400)


def test_what_a_dead_process_leaves_behind(tmp_path: Path, server: FakeSGLang) -> None:
    """A process that dies with a living child is seen to be dead, and its children end with the run."""
    write_module(
        tmp_path,
        f"""
        import os, subprocess, time

        def prompt(row):
            if row["id"] == 2:
                child = subprocess.Popen(["sleep", "1000"])
                open({str(tmp_path / "child")!r}, "w").write(str(child.pid))
            if row["id"] == 4:
                if os.fork():
                    os._exit(7)
                time.sleep(1000)
            return row["text"]
        """,
    )
    limits = {"python_processes": 1, "python": 600, "max_failed_rows": 1}
    job = job_of(tmp_path, server, prompt=PROMPT, limits=limits, order="input")
    run_job(job, tmp_path)
    assert errors_of(job) == {4: "prompt.python: hooks:prompt: ended its process (exit code 7)"}
    child = int((tmp_path / "child").read_text())
    eventually(lambda: not command_line(child))  # a SIGKILL takes its time


def test_a_function_judges_answers(tmp_path: Path, server: FakeSGLang) -> None:
    """True is good, false is not, a text says why not, an exception too; the last answer is kept."""
    write_module(
        tmp_path,
        """
        def judge(answer):
            number = int(answer.split()[-1])
            if number == 1:
                return False
            if number == 2:
                return "two is too few"
            if number == 3:
                raise KeyError("three")
            return None if number == 4 else True
        """,
    )
    job = job_of(
        tmp_path, server, rows=8, accept={"python": "hooks:judge", "tries": 2}, limits={"max_failed_rows": 4}
    )
    run_job(job, tmp_path)
    rows = results_of(job)
    assert {row["row"]: row["error"] for row in rows if row["error"]} == {
        1: "accept.python hooks:judge rejected the answer",
        2: "two is too few",
        3: "accept.python: hooks.py:9: KeyError: 'three'",
        4: "accept.python: hooks:judge: returned None: return True, False, or a text that says what is wrong",
    }
    assert all(row["output"].endswith(f"to row {row['row']}") for row in rows)
    assert sorted(server.prompts) == sorted(f"row {n}" for n in (*range(8), 1, 2, 3, 4))
    assert report_of(job)["rows_failed"] == 4


def test_a_program_gives_its_judge(server: FakeSGLang) -> None:
    """`generate` takes the function itself."""
    table = batchrunner.generate(
        ["Ada", "Bob"],
        accept={"python": lambda answer: "Ada" in answer or "who?", "tries": 1},
        engine=server.url,
    )
    assert table.column("error").to_pylist() == [None, "who?"]


@pytest.mark.parametrize("end", ["return {'number': -1}", "raise ValueError('no')", "raise SystemExit"])
def test_a_child_that_comes_back_from_the_function(tmp_path: Path, end: str) -> None:
    """It ends there: its answers would be taken for those of other rows."""
    write_module(
        tmp_path,
        f"""
        import os
        from typing import TypedDict

        class Number(TypedDict):
            number: int

        def parse(answer, row) -> Number:
            if os.fork() == 0:
                {end}
            return {{"number": row["id"]}}
        """,
    )
    job = job_of(
        tmp_path, rows=60, parse="hooks:parse", input={"columns": ["id"]}, limits={"python_processes": 1}
    )
    run_job(job, tmp_path)
    assert column_of(job, "number") == list(range(60))


UNREADABLE: dict[str, tuple[Any, str]] = {
    "zone": (
        pa.array([0, None, 0], pa.timestamp("us", "Mars/Phobos")),
        "the time zone is unknown on this machine",
    ),
    "year": (pa.array([0, 400_000_000_000, None], pa.timestamp("s")), "date value out of range"),
    "text": (pa.array([b"\xff", b"a", None]).view(pa.string()), "can't decode byte 0xff"),
    "list": (pa.array([[400_000_000_000], [], None], pa.list_(pa.timestamp("s"))), "date value out of range"),
}
"""Columns with values that Python cannot represent, and the reason that is given."""


@pytest.mark.parametrize("field", ["parse", "accept"])
@pytest.mark.parametrize("column", UNREADABLE)
def test_a_value_that_python_cannot_represent(
    tmp_path: Path, server: FakeSGLang, column: str, field: str
) -> None:
    """A function that takes the row never sees None for a value: the row fails by name and is not sent."""
    values, why = UNREADABLE[column]
    write_module(
        tmp_path,
        """
        from typing import TypedDict

        class Seen(TypedDict):
            seen: bool

        def parse(answer, row) -> Seen:
            return {"seen": next(iter(row.values())) is not None}

        def accept(answer, row):
            return True
        """,
    )
    write_rows(tmp_path / "input.parquet", 3, odd=values)
    function = {"parse": "hooks:parse"} if field == "parse" else {"accept": {"python": "hooks:accept"}}
    job = job_of(tmp_path, server, input={"columns": ["odd"]}, limits={"max_failed_rows": 3}, **function)
    run_job(job, tmp_path)
    bad = [row for row, value in enumerate(values) if value.is_valid and not is_readable(value)]
    errors = errors_of(job)
    assert sorted(errors) == bad
    assert all(
        error.startswith("column 'odd': unreadable value: ") and why in error for error in errors.values()
    )
    assert len(server.sent) == 3 - len(bad)
    if field == "parse":
        rows = {row["row"]: row["seen"] for row in parts_without(job, "odd")}
        assert rows == {row: None if row in bad else values[row].is_valid for row in range(3)}


def is_readable(value: Any) -> bool:
    """Tell whether Python can represent a value."""
    try:
        value.as_py()
    except (ValueError, OverflowError):
        return False
    return True


def parts_without(job: dict[str, Any], column: str) -> list[dict[str, Any]]:
    """Return the result rows of a job without a column that Python cannot read."""
    tables = [part.drop_columns(column) for part in parts_of(job["output"]["path"])]
    return [row for table in tables for row in table.to_pylist()]
