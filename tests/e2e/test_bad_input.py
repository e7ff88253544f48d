"""What a user did wrong is one clear line and exit code 2: nothing is sent and nothing is written."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

import batchrunner
from batchrunner.core.errors import InputError, JobError, StorageError
from batchrunner.job.spec import Job
from batchrunner.runner.prepare import prepare
from tests.conftest import INSTANT, batchrun, job_of, report_of, results_of, write_job, write_rows
from tests.support.fake_sglang import FakeSGLang

if TYPE_CHECKING:
    from collections.abc import Iterator

AS_ROOT = os.geteuid() == 0


def refusal(job: dict[str, Any] | str, directory: Path, *arguments: str) -> str:
    """Run the command on a job that is wrong; return its one line without the command's name."""
    file = directory / "job.yaml"
    file.write_text(job if isinstance(job, str) else yaml.safe_dump(job))
    before = everything_in(directory)
    result = batchrun(file, *arguments)
    assert result.exit_code == 2, (result.stderr, result.exception)
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("batchrun: ")
    assert everything_in(directory) == before
    return line.removeprefix("batchrun: ")


def everything_in(directory: Path) -> dict[Path, bytes | None]:
    return {path: path.read_bytes() if path.is_file() else None for path in directory.rglob("*")}


def told(message: str, *parts: object) -> None:
    """Check that a message names all of these."""
    for part in parts:
        assert str(part) in message


# --- input files ---


def test_missing_input(tmp_path: Path, server: FakeSGLang) -> None:
    """A path that is not there is named."""
    path = tmp_path / "nowhere.parquet"
    told(
        refusal(job_of(tmp_path, server, input={"path": str(path)}), tmp_path),
        path,
        "no such file or directory",
    )
    assert server.sent == []


@pytest.mark.parametrize(
    ("path", "problem"), [("*.parquet", "no file matches"), ("", "no *.parquet file in this directory")]
)
def test_no_input_files(tmp_path: Path, path: str, problem: str) -> None:
    """A glob or a directory without a file is named as it was written."""
    (tmp_path / "in").mkdir()
    place = f"{tmp_path}/in/{path}"
    told(refusal(job_of(tmp_path, input={"path": place}), tmp_path), place, problem)


def test_empty_file(tmp_path: Path) -> None:
    """A file of 0 bytes, as a broken copy leaves it, is said to be one."""
    (tmp_path / "input.parquet").touch()
    told(refusal(job_of(tmp_path), tmp_path), tmp_path / "input.parquet", "is empty (0 bytes)")


def test_text_file(tmp_path: Path) -> None:
    """A file that is only called Parquet is not one."""
    (tmp_path / "input.parquet").write_text("id,text\n1,hello world\n")
    told(refusal(job_of(tmp_path), tmp_path), tmp_path / "input.parquet", "not a readable Parquet file")


@pytest.mark.parametrize("share", [0.3, 0.99])
def test_truncated_file(tmp_path: Path, share: float) -> None:
    """A file that was cut off is refused before anything is sent."""
    path = write_rows(tmp_path / "input.parquet", 100)
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])
    told(refusal(job_of(tmp_path), tmp_path), path, "not a readable Parquet file")


def test_one_bad_file_of_several(tmp_path: Path) -> None:
    """Of many files the one that is at fault is named."""
    for name in "abc":
        write_rows(tmp_path / "in" / f"{name}.parquet", 3)
    (tmp_path / "in" / "b.parquet").write_bytes(b"PAR1 and then nothing")
    message = refusal(job_of(tmp_path, input={"path": str(tmp_path / "in")}), tmp_path)
    told(message, tmp_path / "in" / "b.parquet", "not a readable Parquet file")


@pytest.mark.parametrize("path", ["in", "in/*/*.parquet"])
@pytest.mark.parametrize("name", [b"deep/bad\xff.parquet", b"bad\xff/a.parquet"])
def test_a_file_whose_name_is_no_text(tmp_path: Path, path: str, name: bytes) -> None:
    """A name on disk that is not UTF-8 is told in one line, as the bytes that it is; `check` does so too."""
    good = write_rows(tmp_path / "in" / "deep" / "good.parquet", 2)
    bad = tmp_path / "in" / os.fsdecode(name)
    bad.parent.mkdir(exist_ok=True)
    shutil.copy(good, bad)
    job = job_of(tmp_path, input={"path": f"{tmp_path}/{path}"})
    told(refusal(job, tmp_path), repr(os.fsencode(bad)), "not valid UTF-8")
    checked = batchrun("check", write_job(job, tmp_path))
    assert checked.exit_code == 2
    told(checked.stderr, repr(os.fsencode(bad)))


def test_no_rows(tmp_path: Path) -> None:
    """A file without a row is an error and not a run that is done at once."""
    told(refusal(job_of(tmp_path, rows=0), tmp_path), tmp_path / "input.parquet", "no rows")


def test_no_row_selected(tmp_path: Path, server: FakeSGLang) -> None:
    """A filter that is true for no row is a mistake, like a file without rows."""
    message = refusal(job_of(tmp_path, server, input={"filter": "id > 50"}), tmp_path)
    told(message, "input.filter: true for none of the 10 rows: id > 50")
    assert server.sent == []


def test_reading_the_filter_can_be_stopped(tmp_path: Path) -> None:
    """It may take half an hour: a signal is heard after every batch."""
    write_rows(tmp_path / "input.parquet", 3000)
    job = Job.model_validate(job_of(tmp_path, input={"filter": "id > 5"}))

    class StopError(Exception):
        pass

    def look() -> None:
        raise StopError

    with pytest.raises(StopError):
        prepare(job).selected(look)


def test_unreadable_file(tmp_path: Path) -> None:
    """A file that may not be read is named."""
    if AS_ROOT:
        pytest.skip("root may read everything")
    path = write_rows(tmp_path / "input.parquet", 3)
    path.chmod(0)
    file = write_job(job_of(tmp_path), tmp_path)
    result = batchrun(file)
    assert result.exit_code == 2
    told(result.stderr, path, "Permission denied")


def test_damage_inside_a_file(tmp_path: Path, server: FakeSGLang) -> None:
    """Damage that only reading the data shows ends the run in one line with the file's name."""
    path = write_rows(tmp_path / "input.parquet", 3000)
    content = bytearray(path.read_bytes())
    content[len(content) // 2 - 2000 : len(content) // 2 + 2000] = b"\xff" * 4000
    path.write_bytes(content)
    result = batchrun(write_job(job_of(tmp_path, server), tmp_path), "-q")
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    told(line, "batchrun: ", path, "cannot be read")


# --- columns ---


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"prompt": {"text": "txt"}}, "prompt.text"),
        ({"prompt": {"messages": "txt"}}, "prompt.messages"),
        ({"prompt": {"input_ids": "txt"}}, "prompt.input_ids"),
        ({"prompt": {"user": "Say {{ txt }}"}}, "prompt.user"),
        ({"prompt": {"system": "{{ txt }}", "user": "x"}}, "prompt.system"),
        ({"prompt": {"text": "{% if txt %}x{% endif %}"}}, "prompt.text"),
        ({"input": {"columns": ["txt"]}}, "input.columns"),
        ({"input": {"filter": "txt == 'x'"}}, "input.filter"),
        ({"sampling": {"temperature": {"column": "txt"}}}, "sampling.temperature"),
        ({"sampling": {"stop": {"column": "txt"}}}, "sampling.stop"),
        ({"sampling": {"lora_path": {"column": "txt"}}}, "sampling.lora_path"),
    ],
)
def test_unknown_columns(tmp_path: Path, server: FakeSGLang, change: dict[str, Any], where: str) -> None:
    """A column that is not there is named with its place in the job, the nearest one, and all there are."""
    message = refusal(job_of(tmp_path, server, **change), tmp_path)
    told(message, where, "unknown column 'txt'; did you mean 'text'?", "(the input has: id, text)")
    assert server.sent == []


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({"prompt": {"text": "id"}}, ["prompt.text", "'id'", "must be a string (got int64)"]),
        ({"prompt": {"messages": "text"}}, ["prompt.messages", "list of {role, content} (got string)"]),
        ({"prompt": {"input_ids": "text"}}, ["prompt.input_ids", "list of integers (got string)"]),
        ({"prompt": {"input_ids": "id"}}, ["prompt.input_ids", "list of integers (got int64)"]),
        (
            {"sampling": {"temperature": {"column": "text"}}},
            ["sampling.temperature", "numbers (got string)"],
        ),
        ({"sampling": {"stop": {"column": "id"}}}, ["sampling.stop", "(got int64)"]),
        ({"sampling": {"json_schema": {"column": "id"}}}, ["sampling.json_schema", "(got int64)"]),
        ({"sampling": {"regex": {"column": "id"}}}, ["sampling.regex", "(got int64)"]),
        ({"sampling": {"stop_token_ids": {"column": "id"}}}, ["sampling.stop_token_ids", "(got int64)"]),
        ({"sampling": {"ignore_eos": {"column": "text"}}}, ["sampling.ignore_eos", "(got string)"]),
        ({"sampling": {"lora_path": {"column": "id"}}}, ["sampling.lora_path", "(got int64)"]),
        ({"input": {"columns": ["id"], "rename": {"id": "row"}}}, ["'row'", "input.rename"]),
    ],
)
def test_columns_of_the_wrong_type(
    tmp_path: Path, server: FakeSGLang, change: dict[str, Any], parts: list[str]
) -> None:
    """A column that cannot be what the job wants it to be is refused before anything is sent."""
    told(refusal(job_of(tmp_path, server, **change), tmp_path), *parts)
    assert server.sent == []


def test_a_reserved_name(tmp_path: Path) -> None:
    """A carried column that a result has of its own is refused with the `rename` that helps."""
    write_rows(tmp_path / "input.parquet", 2, output=["a", "b"])
    message = refusal(job_of(tmp_path, input={"columns": ["output"]}), tmp_path)
    told(message, "'output'", "input.rename: {output: input_output}")


@pytest.mark.parametrize("extra", [{"more": [1, 2]}, {"text": [1, 2]}, {}])
def test_differing_schemas(tmp_path: Path, extra: dict[str, Any]) -> None:
    """Files that disagree on a column that the job uses are refused, both of them named."""
    for name in "ab":
        columns = extra if name == "b" else {"text": ["x", "y"]}
        (tmp_path / "in").mkdir(exist_ok=True)
        pq.write_table(pa.table({"id": [1, 2], **columns}), tmp_path / "in" / f"{name}.parquet")
    message = refusal(job_of(tmp_path, input={"path": str(tmp_path / "in")}), tmp_path)
    told(message, tmp_path / "in" / "b.parquet", tmp_path / "in" / "a.parquet", "'text'")


@pytest.mark.parametrize("name", ["a", "b"])
@pytest.mark.parametrize("prompt", [{"text": "tag"}, {"user": "{{ tag }}"}])
def test_a_name_of_two_columns(tmp_path: Path, name: str, prompt: dict[str, str]) -> None:
    """A column that a file has twice is refused where the job uses it, and only there."""
    for each in "ab":
        write_rows(tmp_path / "in" / f"{each}.parquet", 2, tag=["x", "y"])
    file = tmp_path / "in" / f"{name}.parquet"
    pq.write_table(pq.read_table(file).append_column("tag", [["z", "z"]]), file)
    job = job_of(tmp_path, input={"path": str(tmp_path / "in")})
    told(refusal({**job, "prompt": prompt}, tmp_path), file, "has 2 columns 'tag'")
    assert batchrunner.run(job).rows_ok == 4


def test_a_name_of_two_columns_in_a_table() -> None:
    """The library says the same of a table."""
    table = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["t", "t"])
    with pytest.raises(InputError, match="has 2 columns 't'"):
        batchrunner.generate(table, prompt="{{ t }}", engine=INSTANT)


def test_a_type_that_arrow_cannot_pick(tmp_path: Path, server: FakeSGLang) -> None:
    """A column whose values could not be written beside the answers is refused before there are any."""
    views = pa.array(["x", "y"], pa.string_view())
    odd = pa.ExtensionArray.from_storage(pa.opaque(pa.string_view(), "odd", "somebody"), views)
    pq.write_table(pa.table({"text": ["a", "b"], "odd": odd}), tmp_path / "input.parquet")
    message = refusal(job_of(tmp_path, server, input={"columns": ["odd"]}), tmp_path)
    told(message, "input.columns: column 'odd' has a type that Arrow cannot pick rows of: extension<")
    assert server.sent == []


# --- templates ---


@pytest.mark.parametrize(
    ("prompt", "where"),
    [
        ({"user": "Say {{ text"}, "prompt.user: line 1"),
        ({"user": "Say\n\n{% if text %}"}, "prompt.user: line 3"),
        ({"system": "{{ text | nonsense }}", "user": "x"}, "prompt.system: line 1"),
        ({"text": "{% for x in %}"}, "prompt.text: line 1"),
    ],
)
def test_template_syntax(tmp_path: Path, server: FakeSGLang, prompt: dict[str, str], where: str) -> None:
    """A template that cannot be read is refused with its place and line."""
    told(refusal(job_of(tmp_path, server, prompt=prompt), tmp_path), where)
    assert server.sent == []


def test_filter_syntax(tmp_path: Path) -> None:
    """A filter that cannot be read is refused with its place."""
    told(refusal(job_of(tmp_path, input={"filter": "id >"}), tmp_path), "input.filter")


@pytest.mark.parametrize(
    "template", ["{{ text.__class__ }}", "{{ text.__class__.__mro__ }}", "{{ ''.__class__ }}{{ text }}"]
)
def test_templates_are_sandboxed(tmp_path: Path, server: FakeSGLang, template: str) -> None:
    """A job file from elsewhere cannot reach Python through a template."""
    batchrunner.run(job_of(tmp_path, server, rows=1, prompt={"user": template}))
    assert server.sent == []


# --- the job file ---

GOOD = """\
input: {path: input.parquet}
prompt: {text: text}
output: {path: run}
engine: {kind: simulated}
"""


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("- a\n- list\n", ["a job is a mapping", "(got a list)"]),
        ("", ["a job is a mapping", "(got nothing)"]),
        ("input: [\n", ["not valid YAML", "line"]),
        (GOOD + "engine: {kind: simulated}\n", ["line 5", "'engine' is given twice"]),
        (GOOD.replace("text: text", "text: text, text: id"), ["line 2", "'text' is given twice"]),
        (GOOD + "limits: {deadline: 5 parsecs}\n", ["limits.deadline", "'5 parsecs'", "90s"]),
        (GOOD + "sampling: {temperature: hot}\n", ["sampling.temperature", "'hot'"]),
        (GOOD + "window: wide\n", ["window", "'wide'"]),
        (GOOD + "samplng: {top_k: 1}\n", ["'samplng'", "did you mean 'sampling'?"]),
        (GOOD.replace("prompt: {text: text}\n", ""), ["prompt is missing"]),
    ],
)
def test_job_files(tmp_path: Path, text: str, parts: list[str]) -> None:
    """A job file that is not a job is refused with its name, the place and what would be right."""
    told(refusal(text, tmp_path), tmp_path / "job.yaml", *parts)


def test_no_job_file(tmp_path: Path) -> None:
    """A job file that is not there is named."""
    result = batchrun(tmp_path / "jbo.yaml")
    assert (result.exit_code, result.stderr) == (2, f"batchrun: {tmp_path}/jbo.yaml: no such job file\n")


def test_bad_override(tmp_path: Path) -> None:
    """A wrong --set is refused as a wrong file is."""
    told(refusal(job_of(tmp_path), tmp_path, "--set", "limits.deadlin=3s"), "limits.deadlin", "deadline")


# --- the output path ---


@pytest.mark.parametrize("below", ["", "/run", "/deep/run"])
def test_output_is_a_file(tmp_path: Path, below: str) -> None:
    """An output path that is a file, or lies under one, is refused."""
    (tmp_path / "out").write_text("precious")
    job = job_of(tmp_path, output={"path": f"{tmp_path}/out{below}"})
    told(refusal(job, tmp_path), tmp_path / "out", "is a file: give a directory")


def test_output_is_not_writable(tmp_path: Path) -> None:
    """An output path under a directory that may not be written is refused."""
    if AS_ROOT:
        pytest.skip("root may write everywhere")
    (tmp_path / "out").mkdir(mode=0o500)
    told(refusal(job_of(tmp_path, output={"path": f"{tmp_path}/out/run"}), tmp_path), "is not writable")


def test_output_where_nothing_can_be_made(tmp_path: Path) -> None:
    """An output path where even root cannot make a directory is refused, and not for a full disk."""
    message = refusal(job_of(tmp_path, output={"path": "/proc/run"}), tmp_path)
    told(message, "output.path /proc/run", "cannot be written")


@pytest.mark.parametrize("name", ["x" * 300, "a\0b"])
@pytest.mark.parametrize("section", ["input", "output"])
def test_impossible_paths(tmp_path: Path, section: str, name: str) -> None:
    """A path that no file system takes is refused like any other."""
    write_rows(tmp_path / "input.parquet", 2)
    changes: dict[str, Any] = {section: {"path": f"{tmp_path}/{name}"}}
    job = job_of(tmp_path, **changes)
    assert refusal(job, tmp_path)


@pytest.mark.parametrize("section", ["input", "output"])
def test_a_path_that_is_no_text(tmp_path: Path, section: str) -> None:
    """A path of bytes that are no UTF-8, as a shell passes them on, is refused in one line."""
    changes: dict[str, Any] = {section: {"path": f"{tmp_path}/\udce9"}}
    with pytest.raises(JobError, match=f"{section}.path.*not valid UTF-8"):
        batchrunner.run(job_of(tmp_path, **changes))


def test_a_directory_in_the_logs_place(tmp_path: Path) -> None:
    """Where the event log cannot be written the run does not begin."""
    (tmp_path / "run" / "events.jsonl").mkdir(parents=True)
    with pytest.raises(StorageError, match=r"events\.jsonl: cannot be written: Is a directory"):
        batchrunner.run(job_of(tmp_path))


@contextlib.contextmanager
def tiny_disk(size: str) -> Iterator[Path]:
    """Mount a small disk, outside of pytest's directories: one that stayed there could not be removed."""
    if not AS_ROOT:
        pytest.skip("only root may mount a small disk")
    place = Path(tempfile.mkdtemp(prefix="batchrunner-disk-"))
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)]
    made = subprocess.run(mount, check=False, capture_output=True, text=True, timeout=30)
    if made.returncode:
        place.rmdir()
        pytest.skip(f"no small disk can be mounted here: {made.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True, timeout=30)
        place.rmdir()


def test_full_disk(tmp_path: Path, server: FakeSGLang) -> None:
    """A disk without room is refused before work is done for nothing."""
    with tiny_disk("1m") as disk:
        message = refusal(job_of(tmp_path, server, output={"path": str(disk / "run")}), tmp_path)
        told(message, disk / "run", "the disk is full")
    assert server.sent == []


def test_a_disk_that_fills_up(tmp_path: Path) -> None:
    """A disk that is full in mid-run ends it in one line, exit 1; with room again it goes on."""
    with tiny_disk("20m") as disk:
        with (disk / "ballast").open("wb", buffering=0) as ballast, FakeSGLang() as server:

            def fill(_: object) -> Any:
                if len(server.sent) == 30:
                    with contextlib.suppress(OSError):
                        while ballast.write(bytes(4096)):
                            pass
                return "answer"

            server.script = fill
            path = str(disk / "run")
            job = job_of(tmp_path, server, rows=100, output={"path": path, "part_rows": 10}, window=2)
            job["limits"] = {"disk_wait": 2}
            result = batchrun(write_job(job, tmp_path), "-q")
            assert result.exit_code == 1, result.stderr
            (line,) = [line for line in result.stderr.splitlines() if line.startswith("batchrun: ")]
            told(line, disk / "run" / "parts", "No space left", "run the same command again")
            assert result.stderr.count("Traceback") == 0
        (disk / "ballast").unlink()
        with FakeSGLang() as another:
            urls = f"engine.urls=[{another.url}]"
            assert batchrun(write_job(job, tmp_path), "--set", urls).exit_code == 0
        assert report_of(job)["rows_ok"] == 100
        assert 0 < report_of(job)["rows_resumed"] < 100


def test_a_disk_that_turns_read_only(tmp_path: Path, server: FakeSGLang) -> None:
    """While nothing can be created under the output path the run pauses, and goes on when it can again."""
    run = Path(tempfile.mkdtemp(prefix="batchrunner-disk-"))  # as for a small disk
    with mounted_read_only(run):
        pass  # or this test is skipped
    job = job_of(tmp_path, server, rows=100, output={"path": str(run), "part_rows": 10}, window=2)
    with contextlib.ExitStack() as stack:

        def turn_read_only(_: object) -> Any:
            if len(server.sent) == 30:
                stack.enter_context(mounted_read_only(run))
                threading.Timer(2.0, stack.close).start()
            return "answer"

        server.script = turn_read_only
        result = batchrun(write_job(job, tmp_path))
    assert result.exit_code == 0, result.stderr
    told(result.stderr, "Read-only file system: the run pauses until it can be written", "written after")
    assert [row["row"] for row in results_of(job)] == list(range(100))
    shutil.rmtree(run)


@contextlib.contextmanager
def mounted_read_only(place: Path) -> Iterator[None]:
    """Mount a directory over itself, read-only; skips where that is not allowed."""
    for options in (["--bind", str(place), str(place)], ["-o", "remount,ro,bind", str(place)]):
        made = subprocess.run(["mount", *options], check=False, capture_output=True, text=True, timeout=30)
        if made.returncode:
            pytest.skip(f"nothing can be mounted here: {made.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True, timeout=30)


# --- the engine ---


@pytest.mark.parametrize("kind", ["server", "inprocess"])
@pytest.mark.parametrize("model", ["/no/such/model", "./no-such-model", "~/no-such-model"])
def test_no_such_model(tmp_path: Path, kind: str, model: str) -> None:
    """A model path that is not there is refused before an engine is started for it."""
    told(refusal(job_of(tmp_path, {"kind": kind, "model": model}), tmp_path), "engine.model", model)


def test_not_a_model(tmp_path: Path) -> None:
    """A directory that is no model is said to be none."""
    (tmp_path / "model").mkdir()
    engine = {"kind": "server", "model": str(tmp_path / "model")}
    told(refusal(job_of(tmp_path, engine), tmp_path), tmp_path / "model", "config.json")


def test_nothing_listens(tmp_path: Path) -> None:
    """An address where nothing listens is named with what to do."""
    with socket.socket() as idle:
        idle.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{idle.getsockname()[1]}"
        message = refusal(job_of(tmp_path, {"kind": "attach", "urls": [url]}), tmp_path)
    told(message, url, "no connection", "start the server, or correct engine.urls")


def test_not_sglang(tmp_path: Path) -> None:
    """Something else that answers at the address is said not to be SGLang."""
    with FakeSGLang(is_sglang=False) as web:
        told(refusal(job_of(tmp_path, web), tmp_path), web.url, "not SGLang")


def test_not_http(tmp_path: Path) -> None:
    """A port that speaks another protocol is refused and does not hang the run."""
    with socket.create_server(("127.0.0.1", 0)) as other, other.dup() as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        job = write_job(job_of(tmp_path, {"kind": "attach", "urls": [url]}), tmp_path)
        import threading  # noqa: PLC0415

        def greet() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(b"220 mail.example.org ESMTP\r\n")

        thread = threading.Thread(target=greet)
        thread.start()
        result = batchrun(job)
        thread.join()
    assert result.exit_code == 2, result.stderr
    (line,) = result.stderr.splitlines()
    told(line, "batchrun: ", url)


@pytest.mark.parametrize("key", [None, "wrong"])
def test_api_key_wanted(
    tmp_path: Path, server: FakeSGLang, monkeypatch: pytest.MonkeyPatch, key: str | None
) -> None:
    """A server that wants an API key is answered with where the key comes from, and not with the key."""
    server.api_key = "right"
    monkeypatch.delenv("SGLANG_API_KEY", raising=False)
    if key:
        monkeypatch.setenv("SGLANG_API_KEY", key)
    message = refusal(job_of(tmp_path, server), tmp_path)
    told(message, server.url, "401", "engine.api_key_env")
    assert "wrong" not in message


def test_two_models(tmp_path: Path, server: FakeSGLang) -> None:
    """Addresses of different models are not one engine."""
    with FakeSGLang(model="other/model") as other:
        engine = {"kind": "attach", "urls": [server.url, other.url]}
        told(refusal(job_of(tmp_path, engine), tmp_path), "fake/model", "other/model")


# --- nothing happens ---


def test_check_refuses_the_same(tmp_path: Path) -> None:
    """`check` finds what a run would refuse."""
    file = write_job(job_of(tmp_path, prompt={"text": "txt"}), tmp_path)
    assert batchrun("check", file).stderr == batchrun(file).stderr


def test_an_existing_run_is_left_alone(tmp_path: Path) -> None:
    """A mistake in the job does not cost the results that are there, with --fresh neither."""
    job = job_of(tmp_path, INSTANT)
    batchrunner.run(job)
    refusal({**job, "prompt": {"text": "txt"}}, tmp_path, "--fresh")
    url = "http://127.0.0.1:9"
    refusal({**job, "engine": {"kind": "attach", "urls": [url]}}, tmp_path, "--fresh")


@pytest.mark.parametrize("rows", [[1, 2], "text", {"a": 1}, [{"a": 1}, {"a": "x"}]])
def test_rows_that_are_no_table(rows: Any) -> None:
    """The library refuses rows that make no table with the same kind of error."""
    with pytest.raises(InputError, match="rows: "):
        batchrunner.generate(rows, prompt="{{ a }}", engine=INSTANT)


@pytest.mark.parametrize(
    "name", ["parts", "tasks", "tasks/main", "leases", "merged", "events.jsonl", "engine.log"]
)
def test_links_in_the_output(tmp_path: Path, name: str) -> None:
    """A link that somebody planted in the output directory leads no file of ours elsewhere."""
    outside, planted = tmp_path / "outside", tmp_path / "run" / name
    outside.mkdir()
    planted.parent.mkdir(parents=True)
    planted.symlink_to(outside)
    for command in ([write_job(job_of(tmp_path), tmp_path)], ["merge", tmp_path / "run"]):
        refused = batchrun(*command)
        assert refused.exit_code == 2
        told(refused.stderr, str(planted), "is a symbolic link", "remove it")
    assert list(outside.iterdir()) == []


@pytest.mark.parametrize(
    "name", [".run.json.main.tmp", ".report.json.tmp", "parts/.part-main-000000.parquet.tmp"]
)
def test_links_instead_of_temporary_files(tmp_path: Path, name: str) -> None:
    """A link under the name of a temporary file is replaced and not followed."""
    victim, planted = tmp_path / "victim", tmp_path / "run" / name
    victim.write_text("mine")
    planted.parent.mkdir(parents=True, exist_ok=True)
    planted.symlink_to(victim)
    job = job_of(tmp_path)
    assert batchrun(write_job(job, tmp_path)).exit_code == 0
    assert victim.read_text() == "mine"
    assert len(results_of(job)) == 10
