"""`batchrun init`: a commented job for a data file, which is good as it stands."""

import gzip
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from tests.conftest import batchrun, printed

TALK = [[{"role": "user", "content": "hello"}]]
TURNS = [[{"from": "human", "value": "hello there"}]]


@pytest.fixture(autouse=True)
def _in_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def batchrunner_init(file: str) -> str:
    made = batchrun("init", file, "--engine", "simulated")
    assert made.exit_code == 0, made.output
    return made.stdout


def prompts_of(columns: dict[str, Any], *, file: str = "data.parquet") -> list[Any]:
    """Return the prompts that `check` shows of the job that `init` made, as it is."""
    pq.write_table(pa.table(columns), file)
    Path("new.yaml").write_text(batchrunner_init(file))
    found = printed("check", "new.yaml")
    assert found["rows_not_sendable"] == 0
    return [prompt["prompt"] for prompt in found["prompts"]]


@pytest.mark.parametrize(
    ("columns", "sent"),
    [
        ({"id": [1], "text": ["a"]}, "a"),
        ({"title": ["t"], "question": ["q"], "answer": ["a long answer"]}, "q"),
        ({"text": ["a"], "messages": TALK}, "hello"),
        ({"id": [1], "conversations": TURNS}, "hello there"),
        ({"n": [7]}, "7"),
        ({'a "b": {{ c }} # }}': ["odd"]}, "odd"),
        ({"true": ["yes"], "is": [1]}, "yes"),
    ],
)
def test_the_prompt_is_the_likeliest_column(columns: dict[str, Any], sent: str) -> None:
    """Messages come first, then texts by their names, then other texts, then what there is."""
    (prompt,) = prompts_of(columns)
    assert prompt[-1]["content"] == sent


@pytest.mark.parametrize("name", ["#1: x.parquet", "naïve 'q' \"p\".parquet"])
def test_any_file_name(name: str) -> None:
    """The name of the data is one that YAML may take for something else."""
    assert len(prompts_of({"text": ["a", "b"]}, file=name)) == 2


def test_what_the_job_says() -> None:
    """A newcomer reads the columns, what to fill in, and the other kind of engine."""
    Path("in").mkdir()
    Path("in/q.csv").write_text("user_id,question,row\n7,why?,1\n")
    text = batchrun("init", "in/q.csv").stdout
    assert '#   "question": string\n' in text
    assert "# engine: {kind: simulated}" in text
    job = yaml.safe_load(text)
    assert job["engine"]["kind"] == "server"
    assert "model" in job["engine"]
    read = {"delimiter": ",", "encoding": "utf-8"}
    assert job["input"] == {"path": "in/q.csv", "columns": ["user_id"], **read}


@pytest.mark.parametrize(("encoding", "delimiter"), [("cp1252", ";"), ("utf-16", "\t"), ("utf-8", ",")])
def test_a_csv_of_another_kind(encoding: str, delimiter: str) -> None:
    """Delimiter and encoding are found out, and with them the job is good as it stands."""
    rows = [["Datum", "SKU", "Preis", "PLZ", "Rückmeldung"]]
    rows += [["2024-01-02", f"a{n}", f'"{n},5"', f"0{n}", f'"Sehr gut,{delimiter}\n{n}"'] for n in range(20)]
    Path("q.csv").write_bytes("\n".join(map(delimiter.join, rows)).encode(encoding))
    text = batchrunner_init("q.csv")
    job = yaml.safe_load(text)
    read = {"delimiter": delimiter, "encoding": encoding}
    assert job["input"] == {"path": "q.csv", "columns": ["SKU"], **read}
    Path("new.yaml").write_text(text)
    first, *_ = printed("check", "new.yaml")["prompts"]
    assert first["prompt"][-1]["content"] == f"Sehr gut,{delimiter}\n0"


def test_a_csv_with_its_delimiter_on_the_first_line() -> None:
    """The delimiter that Excel is told there is taken, and a name without the compression does not matter."""
    Path("q.csv").write_bytes(gzip.compress(b"sep=|\nid|text, with commas\n1|a\n"))
    text = batchrunner_init("q.csv")
    assert yaml.safe_load(text)["input"]["delimiter"] == "|"
    assert '"text, with commas": string' in text


def test_what_tells_rows_apart() -> None:
    """Columns whose names say so are copied into the results."""
    columns: dict[str, Any] = {
        "user_id": [1, 1],
        "text": ["a", "b"],
        "ref": ["x", "y"],
        "orderId": [[1], [2]],
    }
    pq.write_table(pa.table(columns), "d.parquet")
    assert yaml.safe_load(batchrunner_init("d.parquet"))["input"]["columns"] == ["user_id"]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["nothing.csv"], "no such file or directory: relative paths are looked up in /"),
        (["empty.parquet"], "no rows"),
        (["d.parquet", "--engine", "gpu"], "--engine gpu: unknown kind of engine: give server or simulated"),
    ],
)
def test_what_is_refused(arguments: list[str], told: str) -> None:
    """Each is one line and exit code 2."""
    pq.write_table(pa.table({"text": ["a"]}), "d.parquet")
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), "empty.parquet")
    refused = batchrun("init", *arguments)
    assert refused.exit_code == 2
    assert told in refused.stderr
    assert len(refused.stderr.splitlines()) == 1
