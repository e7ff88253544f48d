"""Job files, environment and overrides: which wins, and what wrong ones are told."""

import json
import re
from pathlib import Path
from shlex import quote

import hypothesis
import jsonschema_rs
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from batchrunner.core.errors import JobError
from batchrunner.job.engine import ServerEngine
from batchrunner.job.load import load_job
from batchrunner.job.spec import Job
from tests.support.example_job import EXAMPLE, example, refusal


def file_refusal(path: Path, text: str | bytes) -> str:
    """Return the part of the message behind the file's name."""
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(JobError) as caught:
        load_job(path)
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
    sampling = load_job(path).sampling
    assert (sampling.temperature, sampling.top_k) == (1, 5)


def test_the_last_override_wins() -> None:
    """--set beats the file; of two --set the last one wins."""
    sampling = example(["sampling.top_k=3", "sampling.top_k=4"]).sampling
    assert (sampling.temperature, sampling.max_new_tokens, sampling.top_k) == (0, 64, 4)


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
                "args": {"chat-template": f"{home}/c.jinja", "lora_paths": [f"{home}/a"], "tp-size": 2},
                "env": {"HF_HOME": f"{home}/hf"},
            },
        },
        overrides=[f"engine.model={home}/model", f"output.path={home}/run"],
    )
    assert isinstance(job.engine, ServerEngine)
    assert job.input.path == [f"{at}/in/*.parquet", f"s3://bucket/{home}", f"in/{home}"]
    assert (job.prompt.text, job.output.path) == (f"{home}/text {{{{ x }}}}", f"{at}/run")
    assert (job.engine.model, job.engine.python) == (f"{at}/model", f"{at}/bin/python")
    assert job.engine.args["chat-template"] == f"{at}/c.jinja"
    assert job.engine.args["lora-paths"] == [f"{at}/a"]
    assert job.engine.env == {"HF_HOME": f"{at}/hf"}


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
    quoted = example(["prompt.user='a # b'", "sampling.top_k=4 # not 3"])
    assert (quoted.prompt.user, quoted.sampling.top_k) == ("a # b", 4)


def test_overrides_make_sections() -> None:
    """A section that the file leaves out can be set."""
    assert example(["limits={}", "limits.max_attempts=7"]).limits.max_attempts == 7
    tree = yaml.safe_load(EXAMPLE)
    del tree["limits"]
    assert load_job(tree, overrides=["limits.max_attempts=7"]).limits.max_attempts == 7


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


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        ("windw=1", "unknown key 'windw': did you mean 'window'?"),
        ("sampling.max_tokens=1", "did you mean 'max_new_tokens'?"),
        ("sampling.seed=1", "did you mean 'sampling_seed'?"),
        ("prompt.template=x", "unknown key 'prompt.template': known: audio, chat_template_kwargs, choices, "),
        ("sampling.top_p.colum=1", "did you mean 'column'?"),
        ("engine={kind: server, model: m, ep: 2}", "(arguments of SGLang go into engine.args)"),
        (
            "engine={kind: gateway, url: 'http://a', tp: 2}",
            "'engine.tp': this key belongs to another kind of engine",
        ),
        ("labels=[]", "labels: list should have at least 1 item (got [])"),
        ("limits.max_failed_rows=1 percent", "such as 1%, or a number such as 0.01 (got '1 percent')"),
        ("input.columns=[a, b, a]", "input.columns: has 'a' twice, after input.rename"),
        ("prompt.choices=[1]", "prompt.choices.0: should be a valid string (got 1)"),
        ("prompt.user=on", "YAML reads yes, no, on and off as true and false: put quotes around a text"),
        ("output={}", "output.path is missing"),
        ("sampling.temperature=hot", "{column: NAME} (got 'hot')"),
        ("engine.kind=attached", "engine.kind: unknown kind of engine 'attached': did you mean 'attach'?"),
        ("engine=simulted", "engine: simulted: no model has this name: did you mean kind: simulated?"),
        ("engine.urls=[ftp://a]", "an address is http://HOST:PORT"),
        ("prompt={text: a, system: b}", "`system` has no effect together with `text`"),
        ("limits.deadline=3 weeks", "limits.deadline: a duration is a number of seconds"),
        ("sampling.json_schema={not json", "--set sampling.json_schema: line 1: not valid YAML"),
        ("sampling.json_schema='{not json'", "sampling.json_schema: not JSON:"),
        ("sampling.regex=(a", "sampling.regex: not a regular expression"),
        ("sampling.json_schema={properties: {on: {}}}", "cannot be written as JSON: Dict key must be str"),
        (f"sampling.sampling_seed={10**23}", "Integer exceeds 64-bit range (got 1"),
        ("engine=[]", "engine.urls: list should have at least 1 item"),
        ("output.path.deep=3", "--set output.path.deep: 'path' is not a section"),
        ("output.path", "--set output.path: is not of the form a.b=value: write --set a.b=value"),
    ],
)
def test_wrong_jobs_are_explained(overrides: str, told: str) -> None:
    """What is wrong is said in one line, with the place in the job and what may be meant."""
    message = refusal(overrides)
    assert told in message
    assert len(message.splitlines()) == 1


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "(got None)"),
        ("- input", "(got ['input'])"),
        (EXAMPLE + "input: {path: x}\n", "line 7: not valid YAML: the key 'input' is given twice"),
        ("input: 2024-13-45", "not valid YAML: month must be in 1..12"),
        ("prompt:\n  user: {{ text }}", ": put quotes around a text that begins with {{"),
        (
            "prompt:\n\tuser: a",
            "line 2: not valid YAML: found character '\\t' that cannot start any token: indent",
        ),
        (b"\xff\xfe\xfa", "cannot be read as a job file"),
    ],
)
def test_wrong_files_are_explained(tmp_path: Path, text: str | bytes, told: str) -> None:
    """A file that is no job is refused with its name and the line."""
    assert told in file_refusal(tmp_path / "job.yaml", text)


def test_all_faults_in_one_go(tmp_path: Path) -> None:
    """A file with several faults gets a line for each."""
    path = tmp_path / "job.yaml"
    path.write_text(
        "input: {pth: docs.parquet, limit: 0}\n"
        "prompt: {user: hello, input_ids: ids, messages: [{role: boss}, {role: user, contnt: x}]}\n"
        "sampling: {temperature: hot, top_p: {colum: p}, n: 3, max_tokens: 1}\n"
        "output: {}\n"
        "windw: 3\n"
    )
    with pytest.raises(JobError) as caught:
        load_job(path)
    lines = [line.removeprefix(f"{path}: ") for line in str(caught.value).splitlines()]
    assert lines[:-2] == [
        "input.limit: should be greater than or equal to 1 (got 0)",
        "unknown key 'input.pth': did you mean 'path'?",
        "prompt.messages.0.role: should be 'system', 'user' or 'assistant' (got 'boss')",
        "prompt.messages.0.content is missing",
        "unknown key 'prompt.messages.1.contnt': did you mean 'content'?",
        "sampling.temperature: should be a valid number, or should be {column: NAME} (got 'hot')",
        "unknown key 'sampling.top_p.colum': did you mean 'column'?",
        "unknown key 'sampling.max_tokens': did you mean 'max_new_tokens'?",
        "output.path is missing",
    ]
    assert lines[-2].startswith("engine is missing: for example engine: ")
    assert lines[-1] == "unknown key 'windw': did you mean 'window'?"


def test_all_rules_in_one_go() -> None:
    """Fields that are right, each alone, and do not go together get a line for each rule."""
    assert refusal("prompt={text: a, system: b, tools: c}").splitlines() == [
        "job: prompt: `system` has no effect together with `text`: leave it out",
        "job: prompt: `tools` has no effect together with `text`: leave it out",
    ]
    lines = refusal("accept={feedback: true}", "input.columns=[error, row]", "sampling.n=2").splitlines()
    assert lines == [
        (
            "job: input.columns: the results already have a column 'row': rename yours, for example "
            "input.rename: {row: input_row}"
        ),
        (
            "job: input.columns: the results already have a column 'error': rename yours, for example "
            "input.rename: {error: input_error}"
        ),
        "job: accept: has no condition on answers: give json, regex, expression or python",
        "job: accept.feedback cannot be combined with sampling.n above 1: leave one out",
    ]


def test_all_overrides_in_one_go() -> None:
    """Each --set that is wrong gets a line."""
    lines = refusal("output.path", "input=[", "engine=simulted").splitlines()
    beginnings = ["--set output.path: ", "--set input: line 1: ", "engine: simulted: "]
    assert [line.startswith(begin) for line, begin in zip(lines, beginnings, strict=True)] == [True] * 3


def test_keys_that_hold_anchors(tmp_path: Path) -> None:
    """Keys at the top that begin with `x-` are the user's own, for parts that `<<` or `*` uses below."""
    path = tmp_path / "job.yaml"
    anchored = "x-quiet: &quiet {temperature: 0}\n" + re.sub(
        "sampling: .*", "sampling: {<<: *quiet, n: 2}", EXAMPLE
    )
    path.write_text(anchored)
    sampling = load_job(path).sampling
    assert (sampling.temperature, sampling.n) == (0, 2)
    jsonschema_rs.validate(Job.model_json_schema(), yaml.safe_load(anchored))
    assert "unknown key 'sampling.x-a'" in refusal("sampling.x-a=1")


@pytest.mark.parametrize("section", ["input", "prompt", "output", "engine"])
def test_a_missing_section_is_shown(section: str) -> None:
    """Who leaves out a section sees one, which is right as it stands."""
    tree = yaml.safe_load(EXAMPLE)
    del tree[section]
    with pytest.raises(JobError, match=f"^job: {section} is missing: for example {section}: ") as caught:
        load_job(tree)
    written = str(caught.value).partition("for example ")[2].partition(", to start")[0]
    assert load_job(tree | yaml.safe_load(written))


@given(content=st.binary(max_size=60) | texts.map(str.encode))
@hypothesis.example(content=b"?")
@hypothesis.example(content=b"{}")
def test_no_file_breaks_the_reader(content: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    """A file that is no job is refused in one line with its name; a mapping has a line for each fault."""
    path = tmp_path_factory.getbasetemp() / "none.yaml"
    path.write_bytes(content)
    with pytest.raises(JobError) as caught:
        load_job(path)
    lines = str(caught.value).splitlines()
    assert all(line.startswith(f"{path}: ") for line in lines)
    # A mapping is a job, whose faults have a line each.
    assert len(lines) == 1 or isinstance(yaml.safe_load(content), dict)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("name", "content"),
    [("d.csv", b"id,text\n1,a\n"), ("a b.jsonl.gz", b"\x1f\x8b")],
)
def test_data_instead_of_a_job(tmp_path: Path, name: str, content: bytes) -> None:
    """Who gives a data file learns how to make a job for it."""
    told = file_refusal(tmp_path / name, content)
    assert (
        f"is a data file, not a job: write a job for these data: batchrun init {quote(str(tmp_path / name))}"
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
    """What a library call takes as its engine a job takes too, from its file and by --set."""
    tree = yaml.safe_load(EXAMPLE)
    assert load_job({**tree, "engine": short}).engine.kind == kind
    assert load_job(tree, overrides=[f"engine={json.dumps(short)}"]).engine.kind == kind


def test_a_field_of_a_short_form_can_be_set() -> None:
    """The short form stands for a mapping, of which --set changes a field."""
    tree = {**yaml.safe_load(EXAMPLE), "engine": "simulated"}
    engine = load_job(tree, overrides=["engine.step_s=0"]).engine
    assert engine.model_dump()["step_s"] == 0
