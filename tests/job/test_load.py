"""Job files, environment and overrides: which wins, and what wrong ones are told."""

from __future__ import annotations

import json
import re
from pathlib import Path
from shlex import quote

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from batchrunner.core.errors import JobError
from batchrunner.job.engine import ServerEngine
from batchrunner.job.load import load_job
from tests.support.example_job import EXAMPLE, example, refusal


def file_refusal(path: Path, text: str | bytes) -> str:
    """Return the part of the message behind the file's name."""
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(JobError) as caught:
        load_job(path, environ={})
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert len(message.splitlines()) == 1
    assert caught.value.exit_code == 2
    return message.removeprefix(f"{path}: ")


texts = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=20)


def test_yaml_anchors_merge(tmp_path: Path) -> None:
    """Shared parts of a job file may be merged with `<<`, and their own keys win."""
    path = tmp_path / "job.yaml"
    merged = "sampling: {temperature: 1, <<: {temperature: 0, top_k: 5}}"
    path.write_text(re.sub("sampling: .*", merged, EXAMPLE))
    sampling = load_job(path, environ={}).sampling
    assert (sampling.temperature, sampling.top_k) == (1, 5)


def test_precedence() -> None:
    """--set beats the environment, which beats the file; of two --set the last one wins."""
    environ = {"BATCHRUN__SAMPLING__TOP_K": "2", "BATCHRUN__SAMPLING__MAX_NEW_TOKENS": "2", "PATH": "/bin"}
    sampling = example(["sampling.top_k=3", "sampling.top_k=4"], environ).sampling
    assert (sampling.temperature, sampling.max_new_tokens, sampling.top_k) == (0, 2, 4)


def test_the_process_environment_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cluster's job script overrides a job file without editing it."""
    monkeypatch.setenv("BATCHRUN__OUTPUT__PATH", "/scratch/run")
    assert load_job(yaml.safe_load(EXAMPLE)).output.path == "/scratch/run"


@pytest.mark.parametrize("home", ["~", "$HOME", "${HOME}", "~root"])
def test_home_directories(home: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`~`, `~user` and `$HOME` are home directories in every path of a job, wherever it is given."""
    monkeypatch.setenv("HOME", str(Path("~root").expanduser()))
    at = str(Path("~root").expanduser())
    job = load_job(
        {
            "input": {"path": [f"{home}/in/*.parquet", f"s3://bucket/{home}", f"in/{home}"]},
            "prompt": {"text": f"{home}/text {{{{ x }}}}"},
            "output": {"path": f"{home}/out"},
            "engine": {
                "kind": "server",
                "model": "org/name",
                "python": f"{home}/bin/python",
                "args": {"chat-template": f"{home}/c.jinja", "lora_paths": [f"a={home}/a"], "tp-size": 2},
                "env": {"HF_HOME": f"{home}/hf"},
            },
        },
        overrides=[f"engine.model={home}/model", "engine.args.stream-output=~nobody-of-that-name/x"],
        environ={"BATCHRUN__OUTPUT__PATH": f"{home}/run"},
    )
    assert isinstance(job.engine, ServerEngine)
    assert job.input.path == [f"{at}/in/*.parquet", f"s3://bucket/{home}", f"in/{home}"]
    assert (job.prompt.text, job.output.path) == (f"{home}/text {{{{ x }}}}", f"{at}/run")
    assert (job.engine.model, job.engine.python) == (f"{at}/model", f"{at}/bin/python")
    assert job.engine.args["chat-template"] == f"{at}/c.jinja"
    assert job.engine.args["lora-paths"] == [f"a={at}/a"]
    assert job.engine.args["stream-output"] == "~nobody-of-that-name/x"
    assert job.engine.env == {"HF_HOME": f"{at}/hf"}


@pytest.mark.parametrize("field", ["input.path", "output.path"])
def test_a_user_without_a_home(field: str) -> None:
    """A user whom nobody knows is one line, which says how a file of that name is written."""
    message = refusal(f"{field}=~nobody-of-that-name/x")
    assert f"{field}: no home directory for ~nobody-of-that-name: write ./~nobody-of-that-name" in message


@given(
    order=st.permutations(["BATCHRUN__ENGINE", "BATCHRUN__ENGINE__ARGS", "BATCHRUN__ENGINE__ARGS__TP_SIZE"])
)
def test_the_order_of_variables_is_nothing(order: list[str]) -> None:
    """A whole and its parts may both be given, in the random order that an environment has."""
    values = {
        "BATCHRUN__ENGINE": "{kind: server, model: m}",
        "BATCHRUN__ENGINE__ARGS": "{enable-metrics: true}",
        "BATCHRUN__ENGINE__ARGS__TP_SIZE": "2",
    }
    engine = example(environ={name: values[name] for name in order}).engine
    assert isinstance(engine, ServerEngine)
    assert engine.args == {"enable-metrics": True, "tp-size": 2}


@pytest.mark.parametrize(
    "text",
    [
        "Summarise.\nIn one line.\n# {{ text }}",
        "Answer #yes or #no: {{ text }}",
        "Answer in French.\n\n{{ text }}\n",
    ],
)
def test_a_text_stays_what_it_is(text: str) -> None:
    """YAML would fold its lines and cut it at a comment: `--set "prompt.user=$(cat prompt.txt)"`."""
    assert example([f"prompt.user={text}"]).prompt.user == text
    assert example(environ={"BATCHRUN__PROMPT__USER": text}).prompt.user == text
    quoted = example(["prompt.user='a # b'", "sampling.top_k=4 # not 3"])
    assert (quoted.prompt.user, quoted.sampling.top_k) == ("a # b", 4)


def test_overrides_make_sections() -> None:
    """A section that the file leaves out can be set."""
    assert example(["limits={}", "limits.max_attempts=7"]).limits.max_attempts == 7
    tree = yaml.safe_load(EXAMPLE)
    del tree["limits"]
    assert load_job(tree, overrides=["limits.max_attempts=7"], environ={}).limits.max_attempts == 7


@pytest.mark.parametrize(
    "text",
    [
        "Question: {{ text }}",
        "# {{ text }}",
        "- {{ text }}",
        "{# why #} {{ text }}",
        '"a" in text',
        "2024-13-01",
    ],
)
def test_overrides_that_are_no_yaml(text: str) -> None:
    """Templates and expressions need no quotes of YAML's around them, whatever it would make of them."""
    assert example([f"prompt.user={text}"]).prompt.user == text


@pytest.mark.parametrize("override", ["output.path", "=3", "window=[", "window={a", "output.path.deep=3"])
def test_bad_overrides_are_named(override: str) -> None:
    """A wrong --set is shown as it was written, so that it is found in a long command."""
    message = refusal(override)
    assert message.startswith(f"--set {override.partition('=')[0]}")
    assert len(message.splitlines()) == 1


@pytest.mark.parametrize(
    ("key", "near"),
    [
        ("inputs", "input"),
        ("windw", "window"),
        ("input.colums", "columns"),
        ("sampling.max_tokens", "max_new_tokens"),
        ("sampling.temprature", "temperature"),
        ("sampling.top_p.colum", "column"),
        ("limits.dedline", "deadline"),
        ("engine.url", "urls"),
        ("sampling.seed", "sampling_seed"),
    ],
)
def test_unknown_keys_name_the_nearest(key: str, near: str) -> None:
    """A misspelt key is an error that says what was meant."""
    message = refusal(f"{key}=1")
    assert f"unknown key {key!r}" in message
    assert f"did you mean {near!r}?" in message


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("model", "engine.model"),
        ("sampling.response_format", "sampling.json_schema"),
        ("sampling.logprobs", "output.columns: [logprobs]"),
        ("sampling.stop_sequences", "sampling.stop"),
    ],
)
def test_names_of_other_tools_are_told_ours(key: str, meant: str) -> None:
    """A field of OpenAI's or vLLM's is not taken for the one that looks like it."""
    assert f"did you mean {meant!r}?" in refusal(f"{key}=1")


@pytest.mark.parametrize(
    ("key", "near"),
    [("choices", "'prompt.choices'"), ("dtype", "'output.dtype'"), ("path", "'input.path' or 'output.path'")],
)
def test_a_key_of_a_section_at_the_top_is_told_its_section(key: str, near: str) -> None:
    """The field is there, one level below."""
    assert refusal(f"{key}=1").endswith(f"unknown key '{key}'; did you mean {near}?")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("labels=[]", "labels: list should have at least 1 item (got [])"),
        ("limits.max_failed_rows=1 percent", "such as 1%, or a number such as 0.01 (got '1 percent')"),
        ("input.columns=[a, b, a]", "input.columns, as renamed, has 'a' twice"),
        ("output.dimensions=ten", "output.dimensions: should be a valid integer (got 'ten')"),
        ("prompt.choices=[1, 2]", "prompt.choices.0: should be a valid string (got 1) (and 1 more)"),
    ],
)
def test_what_pydantic_says_twice_is_said_once(override: str, message: str) -> None:
    """Nor are the branches of a union counted as values of their own."""
    assert refusal(override).endswith(message)


@pytest.mark.parametrize("override", ["labels=[yes]", "prompt.choices=[yes]", "prompt.user=on"])
def test_a_word_that_yaml_takes_for_a_boolean_wants_quotes(override: str) -> None:
    """Who writes `yes` means the word."""
    assert "YAML reads yes, no, on and off as true and false: put quotes around a text" in refusal(override)


def test_unknown_keys_name_all_where_none_is_near() -> None:
    """A key that is like no other is answered with those that exist, of the engine's own kind."""
    message = refusal("engine={kind: simulated, zzz: 1}")
    assert all(name in message for name in ("max_running", "context_length", "step_s"))
    assert "urls" not in message


@pytest.mark.parametrize(
    ("engine", "argument"),
    [
        ("kind: server, model: m, ep: 2", "ep-size: 2"),
        ("kind: server, model: m, mem_fraction_static: 0.8", "mem-fraction-static: 0.8"),
        ("kind: gateway, model: m, chunked-prefill-size: 512", "chunked-prefill-size: 512"),
    ],
)
def test_an_argument_beside_the_fields_of_an_engine_is_told_where_it_goes(engine: str, argument: str) -> None:
    """SGLang's arguments stand in engine.args, as they are written there; a server elsewhere takes none."""
    told = f"an argument of SGLang goes into engine.args: {{{argument}}}"
    assert told in refusal(f"engine={{{engine}}}")
    example([f"engine={{kind: server, model: m, args: {{{argument}}}}}"])
    assert "engine.args" not in refusal("engine={kind: attach, urls: ['http://a'], tp: 2}")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "(got nothing)"),
        ("- input", "(got a list)"),
        ("just words", "(got a text)"),
        (EXAMPLE + "input: {path: x}\n", "line 7: not valid YAML: the key 'input' is given twice"),
        ("input: [", "line 1: not valid YAML"),
        ("input: 2024-13-45", "not valid YAML: month must be in 1..12"),
        ("prompt:\n  user: {{ text }}", "; put quotes around a text that begins with {{"),
        ("prompt: {user: {{ text }} is it?}", "; put quotes around a text that begins with {{"),
        (
            'prompt:\n  user: "a {{ row["b"] }}"',
            "; let the keys of one level begin in one column; write a text",
        ),
        ("input:\n  path: x\n columns: [a]", "; let the keys of one level begin in one column"),
        ("input:\n\tpath: x", "; indent with spaces, not with tabs"),
        ("prompt:\n  user: Topic: x", "; put quotes around a text that has a colon and a space in it"),
        ("prompt:\n  user: %d", "; put quotes around a text that begins with this character"),
        ("prompt:\n  user: *bold* words", "; put quotes around a text that begins with this character"),
        ('prompt:\n  user: "not closed\noutput: x', "; close the quotes"),
        ("input: {path: x, filter: row[1]}", "; close the brackets, and put quotes around a text"),
        (b"\xff\xfe\xfa", "cannot be read as a job file"),
        (EXAMPLE.replace("output: {path: out/run}\n", ""), "output is missing"),
        (EXAMPLE.replace("temperature: 0", "temperature: hot"), "{column: NAME} (got 'hot')"),
        (EXAMPLE.replace("docs.parquet", "{a: 1}"), "input.path: should be a valid string"),
        (EXAMPLE.replace("attach", "attached"), "kind should be one of 'attach', 'server'"),
        (EXAMPLE.replace("kind: attach, ", ""), "engine: kind is missing"),
        (EXAMPLE.replace("http:", "ftp:"), "an address starts with http:// or https://"),
        (EXAMPLE.replace("user:", "text:"), "`system` goes with `user`"),
        (
            EXAMPLE.replace("max_failed_rows: 10", "deadline: 3 weeks"),
            "limits.deadline: a duration is seconds",
        ),
        (EXAMPLE + "queue: [500, 100]\n", "queue: the upper end must be at least 4 times the lower one"),
        (EXAMPLE.replace("temperature: 0", "json_schema: '{not json'"), "sampling.json_schema: not JSON:"),
        (EXAMPLE.replace("temperature: 0", "regex: '(a'"), "sampling.regex: not a regular expression"),
        (
            EXAMPLE.replace("temperature: 0", "json_schema: {properties: {on: {}}}"),
            "sampling.json_schema: no JSON can hold it: Dict key must be str; quote what YAML",
        ),
        (
            EXAMPLE.replace("temperature: 0", f"sampling_seed: {10**23}"),
            "Integer exceeds 64-bit range (got 1",
        ),
        (EXAMPLE.replace("temperature: 0", "temperature: .inf"), "temperature: should be a finite number"),
        (
            EXAMPLE.replace("temperature: 0", "custom_params: {a: [.nan]}"),
            "custom_params: no JSON can hold it",
        ),
    ],
)
def test_wrong_files_are_explained(tmp_path: Path, text: str | bytes, told: str) -> None:
    """What is wrong in a file is said in one line with the file's name and the place in it."""
    assert told in file_refusal(tmp_path / "job.yaml", text)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    """A wrong path is told from a wrong job."""
    path = tmp_path / "jbo.yaml"
    with pytest.raises(JobError, match="no such job file") as caught:
        load_job(path, environ={})
    assert str(caught.value).startswith(str(path))


@given(content=st.binary(max_size=60) | texts.map(str.encode))
def test_no_file_breaks_the_reader(content: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    """A file that is no job at all is refused in one line with its name."""
    file_refusal(tmp_path_factory.getbasetemp() / "none.yaml", content)


def test_columns_in_the_environment_keep_their_case() -> None:
    """A column's name is the user's own."""
    job = example(environ={"BATCHRUN__INPUT__TYPES__Score": "int64"})
    assert job.input.types == {"Score": "int64"}


@pytest.mark.parametrize(
    ("name", "content"),
    [("d.csv", b"id,text\n1,a\n"), ("d.parquet", b"PAR1\xff"), ("a b.jsonl.gz", b"\x1f\x8b")],
)
def test_data_instead_of_a_job(tmp_path: Path, name: str, content: bytes) -> None:
    """Who gives a data file learns how to make a job for it."""
    told = file_refusal(tmp_path / name, content)
    assert (
        f"is a data file and no job: this writes a job for it: batchrun init {quote(str(tmp_path / name))}"
        in told
    )


@pytest.mark.parametrize(
    ("short", "kind"),
    [
        ("simulated", "simulated"),
        ("http://host:30000", "attach"),
        (["http://a:1", "http://b:2"], "attach"),
        ("Qwen/Qwen3-8B", "server"),
    ],
)
def test_short_forms_of_an_engine(short: str | list[str], kind: str) -> None:
    """What a library call takes as its engine a job takes too, from its file, by --set and by a variable."""
    tree = yaml.safe_load(EXAMPLE)
    assert load_job({**tree, "engine": short}, environ={}).engine.kind == kind
    assert load_job(tree, overrides=[f"engine={json.dumps(short)}"], environ={}).engine.kind == kind
    assert load_job(tree, environ={"BATCHRUN__ENGINE": json.dumps(short)}).engine.kind == kind


def test_a_field_of_a_short_form_can_be_set() -> None:
    """The short form stands for a mapping, of which --set changes a field."""
    tree = {**yaml.safe_load(EXAMPLE), "engine": "simulated"}
    engine = load_job(tree, overrides=["engine.step_s=0"], environ={}).engine
    assert engine.model_dump()["step_s"] == 0


@pytest.mark.parametrize("wrong", ["simulatd", "server", "host:30000", " "])
def test_a_short_form_that_is_none(wrong: str) -> None:
    """A text that is no engine is refused as a library call refuses it."""
    with pytest.raises(JobError, match="engine"):
        load_job({**yaml.safe_load(EXAMPLE), "engine": wrong}, environ={})
