"""Job files: what is accepted, what overrides what, and errors that a person can act on."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jsonschema
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from batchrunner.core.errors import JobError
from batchrunner.job.load import load_job, parse_engine
from batchrunner.job.spec import RESULT_COLUMNS, AttachEngine, FromColumn, Job, ServerEngine, SimulatedEngine
from tests.conftest import ROOT

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

patient = settings(deadline=None)  # files take their time on a busy machine

EXAMPLE = """\
input: {path: docs.parquet, columns: [id, title]}
prompt: {system: "You are terse.", user: "Summarise: {{ text }}"}
sampling: {max_new_tokens: 64, temperature: 0}
output: {path: out/run}
engine: {kind: attach, urls: ["http://127.0.0.1:30000"]}
limits: {max_failed_rows: 10}
"""


def example(overrides: Sequence[str] = (), environ: Mapping[str, str] | None = None) -> Job:
    return load_job(yaml.safe_load(EXAMPLE), overrides=overrides, environ=environ or {})


def refusal(*overrides: str) -> str:
    with pytest.raises(JobError) as caught:
        example(overrides)
    return str(caught.value)


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


def complaint(path: Path) -> str | None:
    try:
        load_job(path, environ={})
    except JobError as refused:
        return str(refused)
    return None


# --- what is accepted ---


def test_the_example_works_as_it_stands(tmp_path: Path) -> None:
    """The job file that users are shown first loads and means what it says."""
    path = tmp_path / "job.yaml"
    path.write_text(EXAMPLE)
    job = load_job(path, environ={})
    assert (job.input.path, job.input.columns) == ("docs.parquet", ["id", "title"])
    assert (job.prompt.system, job.prompt.user) == ("You are terse.", "Summarise: {{ text }}")
    assert (job.sampling.max_new_tokens, job.sampling.temperature) == (64, 0)
    assert isinstance(job.engine, AttachEngine)
    assert job.engine.urls == ["http://127.0.0.1:30000"]
    assert job.limits.max_failed_rows == 10
    assert job.window == "auto"


names = st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"]), min_size=1, max_size=8)
texts = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=20)
columns = st.builds(lambda name: {"column": name}, names)
shares = st.floats(0, 1, exclude_min=True, exclude_max=True)
inputs = st.fixed_dictionaries(
    {"path": names | st.lists(names, min_size=1, max_size=3)},
    optional={"columns": st.just(["id", "title"]), "filter": names, "limit": st.integers(1, 10**9)},
)
prompts = st.one_of(
    st.fixed_dictionaries({"user": texts}, optional={"system": texts}),
    st.fixed_dictionaries({"messages": names}, optional={"chat_template_kwargs": st.just({"a": [1, None]})}),
    st.fixed_dictionaries({"text": texts}),
    st.fixed_dictionaries({"input_ids": names}),
)
samplings = st.fixed_dictionaries(
    {},
    optional={
        "max_new_tokens": st.integers(1, 10**6) | columns,
        "n": st.integers(1, 9),
        "temperature": st.integers(0, 2) | st.floats(0, 2) | columns,
        "top_p": shares | columns,
        "stop": texts | st.lists(texts) | columns,
        "stop_token_ids": st.lists(st.integers(0, 99)) | columns,
        "ignore_eos": st.booleans() | columns,
        "json_schema": st.sampled_from([{"type": "object"}, '{"type": "string"}']) | columns,
        "logit_bias": st.dictionaries(st.sampled_from(["1", "2"]), st.floats(-1, 1)),
        "lora_path": texts | columns,
    },
)
engines = st.one_of(
    st.fixed_dictionaries({"kind": st.just("attach"), "urls": st.just(["http://a:1/", "https://b"])}),
    st.fixed_dictionaries(
        {"kind": st.just("server"), "model": names},
        optional={
            "args": st.just({"--mem_fraction_static": 0.5}),
            "env": st.dictionaries(names, texts, max_size=2),
            "start_timeout": st.sampled_from([1, "90s", "2h30m", "1d"]),
        },
    ),
    st.fixed_dictionaries({"kind": st.just("inprocess"), "model": names}),
    st.fixed_dictionaries({"kind": st.just("simulated")}, optional={"step_s": st.floats(0, 1)}),
)
limits = st.fixed_dictionaries(
    {},
    optional={
        "deadline": st.floats(0.1, 1e6) | st.sampled_from(["90s", "1h"]),
        "max_failed_rows": st.integers(0, 10**9) | shares | st.just("1%"),
        "abort_failed_share": shares | st.just("100%"),
    },
)
jobs = st.fixed_dictionaries(
    {
        "input": inputs,
        "prompt": prompts,
        "output": st.fixed_dictionaries({"path": names}),
        "engine": engines,
    },
    optional={"sampling": samplings, "limits": limits, "window": st.just("auto") | st.integers(1, 10**6)},
)


@patient
@given(tree=jobs)
def test_a_job_survives_a_round_trip(tree: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> None:
    """A job written down, as a report or a resume does, loads as the very same job."""
    job = load_job(tree, environ={})
    path = tmp_path_factory.getbasetemp() / "round-trip.yaml"
    path.write_text(yaml.safe_dump(job.model_dump(mode="json")), encoding="utf-8")
    assert load_job(job.model_dump(), environ={}) == job
    assert load_job(json.loads(job.model_dump_json(exclude_unset=True)), environ={}) == job
    assert load_job(path, environ={}) == job
    assert load_job(job, environ={}) == job


@patient
@given(tree=jobs)
def test_a_callers_mapping_is_left_alone(tree: dict[str, Any]) -> None:
    """Overrides change the job and not the mapping that a caller passed."""
    before = json.dumps(tree)
    load_job(tree, overrides=["output.path=elsewhere"], environ={"BATCHRUN__INPUT__PATH": "x"})
    assert json.dumps(tree) == before


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 90), ("90s", 90), ("1.5m", 90), ("2h30m", 9000), ("1d", 86400)]
)
def test_durations(text: str, seconds: float) -> None:
    """A duration may be written with units."""
    assert example([f"limits.deadline={text}"]).limits.deadline == seconds


@pytest.mark.parametrize(("text", "value"), [("3", 3), ("0", 0), ("0.01", 0.01), ("1%", 0.01)])
def test_counts_and_shares(text: str, value: float) -> None:
    """Failed rows may be tolerated as a count or as a share, and the two are not mixed up."""
    assert example([f"limits.max_failed_rows={text}"]).limits.max_failed_rows == pytest.approx(value)


@pytest.mark.parametrize("field", ["temperature", "max_new_tokens", "stop", "json_schema", "lora_path"])
def test_values_from_columns(field: str) -> None:
    """A sampling value that each row brings itself is told from a value that is a mapping."""
    sampling = example([f"sampling.{field}={{column: x}}"]).sampling
    assert getattr(sampling, field) == FromColumn(column="x")


def test_a_schema_is_not_a_column() -> None:
    """A JSON schema is a mapping too, and stays one."""
    schema = {"type": "object", "properties": {"column": {"type": "string"}}}
    assert example([f"sampling.json_schema={json.dumps(schema)}"]).sampling.json_schema == schema


def test_values_that_json_has_not() -> None:
    """A date, which YAML makes of 2024-07-26, is the text that the engine gets, in the job already."""
    job = example(
        ["prompt.chat_template_kwargs={date: 2024-07-26}", "sampling.json_schema={const: 2024-07-26}"]
    )
    assert job.prompt.chat_template_kwargs == {"date": "2024-07-26"}
    assert job.sampling.json_schema == {"const": "2024-07-26"}
    assert example(["limits.deadline=.inf"]).limits.deadline == float("inf")


def test_yaml_anchors_merge(tmp_path: Path) -> None:
    """Shared parts of a job file may be merged with `<<`, and their own keys win."""
    path = tmp_path / "job.yaml"
    merged = "sampling: {temperature: 1, <<: {temperature: 0, top_k: 5}}"
    path.write_text(re.sub("sampling: .*", merged, EXAMPLE))
    sampling = load_job(path, environ={}).sampling
    assert (sampling.temperature, sampling.top_k) == (1, 5)


def test_every_field_is_documented() -> None:
    """Editors and `batchrun schema` explain every key that a job can have."""
    schema = Job.model_json_schema()
    specs: dict[str, Any] = {"Job": schema, **schema["$defs"]}
    bare = [
        f"{spec}.{name}"
        for spec, node in specs.items()
        for name, field in node["properties"].items()
        # pydantic leaves a field's text out where the spec it refers to says the same
        if "description" not in field and "$ref" not in field
    ]
    assert bare == []
    assert [spec for spec, node in specs.items() if "description" not in node] == []


# --- what overrides what ---


def test_precedence() -> None:
    """--set beats the environment, which beats the file; of two --set the last one wins."""
    environ = {"BATCHRUN__SAMPLING__TOP_K": "2", "BATCHRUN__SAMPLING__MAX_NEW_TOKENS": "2", "PATH": "/bin"}
    sampling = example(["sampling.top_k=3", "sampling.top_k=4"], environ).sampling
    assert (sampling.temperature, sampling.max_new_tokens, sampling.top_k) == (0, 2, 4)


def test_the_process_environment_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cluster's job script overrides a job file without editing it."""
    monkeypatch.setenv("BATCHRUN__OUTPUT__PATH", "/scratch/run")
    assert load_job(yaml.safe_load(EXAMPLE)).output.path == "/scratch/run"


@patient
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


def test_names_that_are_not_ours_keep_their_case() -> None:
    """A server's environment variables are as it knows them."""
    values = {"BATCHRUN__ENGINE": "{kind: server, model: m}", "BATCHRUN__ENGINE__ENV__HF_HOME": "/x"}
    engine = example(environ=values).engine
    assert isinstance(engine, ServerEngine)
    assert engine.env == {"HF_HOME": "/x"}


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


@pytest.mark.parametrize("text", ["", "null", " ~"])
def test_overrides_that_are_nothing(text: str) -> None:
    """Nothing takes a value away."""
    assert example([f"prompt.system={text}"]).prompt.system is None


@pytest.mark.parametrize("override", ["output.path", "=3", "window=[", "window={a", "output.path.deep=3"])
def test_bad_overrides_are_named(override: str) -> None:
    """A wrong --set is shown as it was written, so that it is found in a long command."""
    message = refusal(override)
    assert message.startswith(f"--set {override.partition('=')[0]}")
    assert len(message.splitlines()) == 1


# --- errors that a person can act on ---


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


def test_unknown_keys_name_all_where_none_is_near() -> None:
    """A key that is like no other is answered with those that exist, of the engine's own kind."""
    message = refusal("engine={kind: simulated, zzz: 1}")
    assert all(name in message for name in ("max_running", "context_length", "step_s"))
    assert "urls" not in message


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "(got nothing)"),
        ("- input", "(got a list)"),
        ("just words", "(got a text)"),
        (EXAMPLE + "input: {path: x}\n", "line 7: not valid YAML: the key 'input' is given twice"),
        (EXAMPLE.replace("64,", "64, max_new_tokens: 65,"), "the key 'max_new_tokens' is given twice"),
        ("input: [", "line 1: not valid YAML"),
        ("input: !!int x", "not valid YAML"),
        ("input: 2024-13-45", "not valid YAML: month must be in 1..12"),
        ("? !!set {a}\n: 1", "not valid YAML: found unhashable key"),
        (b"\xff\xfe\xfa", "cannot be read as a job file"),
        (EXAMPLE.replace("output: {path: out/run}\n", ""), "output is missing"),
        (EXAMPLE.replace("64", "many"), "sampling.max_new_tokens: should be a valid integer"),
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
        (
            EXAMPLE.replace("max_failed_rows: 10", "deadline: [1]"),
            "limits.deadline: should be a valid number",
        ),
        (EXAMPLE.replace("max_failed_rows: 10", "deadline: -3"), "should be greater than 0 (got -3)"),
        (EXAMPLE.replace("max_failed_rows: 10", "max_failed_rows: 1.5"), "(got 1.5)"),
        (EXAMPLE + "queue: 5\n", "queue: should be two numbers: [low, high] (got 5)"),
        (EXAMPLE + "queue: [500, 100]\n", "queue: the upper end must be at least 4 times the lower one"),
        (EXAMPLE.replace("temperature: 0", "json_schema: '{not json'"), "sampling.json_schema: not JSON:"),
        (EXAMPLE.replace("temperature: 0", "json_schema: '[1]'"), "a JSON Schema is a JSON object"),
        (EXAMPLE.replace("temperature: 0", "regex: '(a'"), "sampling.regex: not a regular expression"),
        (
            EXAMPLE.replace("temperature: 0", "json_schema: {properties: {on: {}}}"),
            "sampling.json_schema: no JSON can hold it: Dict key must be str; quote what YAML",
        ),
        (
            EXAMPLE.replace("temperature: 0", f"sampling_seed: {10**23}"),
            "Integer exceeds 64-bit range (got 1",
        ),
        (EXAMPLE.replace("temperature: 0", f"stop_token_ids: [{10**23}]"), "Integer exceeds 64-bit range"),
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


def test_the_engines_dialect_of_regex() -> None:
    """What Python's `re` does not know and the engine's grammar does is let through."""
    for pattern in (r"\p{L}+", r"(?<year>\d{4})"):
        assert example([f"sampling.regex='{pattern}'"]).sampling.regex == pattern


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    """A wrong path is told from a wrong job."""
    path = tmp_path / "jbo.yaml"
    with pytest.raises(JobError, match="no such job file") as caught:
        load_job(path, environ={})
    assert str(caught.value).startswith(str(path))


@pytest.mark.parametrize("name", RESULT_COLUMNS)
def test_result_names_are_reserved(name: str) -> None:
    """A carried column never hides a result; the message's own remedy works."""
    message = refusal(f"input.columns=[{name}]")
    remedy = re.search(r"(input\.rename): (\{.*\})", message)
    assert remedy is not None
    job = example([f"input.columns=[{name}]", f"{remedy[1]}={remedy[2]}"])
    assert job.input.rename == {name: f"input_{name}"}


@pytest.mark.parametrize("rename", ["{id: title}", "{id: output}", "{other: x}"])
def test_renames_are_checked(rename: str) -> None:
    """A rename that makes two columns one, hides a result or renames nothing is refused before the run."""
    assert "input." in refusal(f"input.rename={rename}")


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | texts | st.dates(),
    lambda below: st.lists(below, max_size=3) | st.dictionaries(texts | st.integers(), below, max_size=3),
    max_leaves=6,
)
places = st.sampled_from(
    [
        (section, *below)
        for section, fields in yaml.safe_load(EXAMPLE).items()
        for below in [(), *((field,) for field in fields), ("new key",)]
    ]
)


@patient
@given(place=places, value=values)
def test_no_value_breaks_the_explanation(
    place: tuple[str, ...], value: object, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Whatever stands anywhere in a job, it loads or is refused in one line with the file's name."""
    tree = yaml.safe_load(EXAMPLE)
    node = tree
    for step in place[:-1]:
        node = node[step]
    node[place[-1]] = value
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    path.write_text(yaml.safe_dump(tree, allow_unicode=True), encoding="utf-8")
    message = complaint(path)
    assert message is None or (message.startswith(f"{path}: ") and len(message.splitlines()) == 1)


@patient
@given(content=st.binary(max_size=60) | texts.map(str.encode))
def test_no_file_breaks_the_reader(content: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    """A file that is no job at all is refused in one line with its name."""
    file_refusal(tmp_path_factory.getbasetemp() / "none.yaml", content)


# --- engines alone ---


def test_engines_are_read_alone() -> None:
    """A caller of the library may give an engine as a mapping or as a spec."""
    spec = SimulatedEngine(kind="simulated", step_s=0)
    assert parse_engine({"kind": "simulated", "step_s": 0}) == spec
    assert parse_engine(spec) is spec
    server = parse_engine({"kind": "server", "model": Path("m"), "args": {"chat-template": Path("c")}})
    assert isinstance(server, ServerEngine)
    assert (server.model, server.args) == ("m", {"chat-template": "c"})


@pytest.mark.parametrize(
    ("engine", "told"),
    [
        ({"kind": "attach", "url": ["http://a"]}, "unknown key 'url'; did you mean 'urls'?"),
        ({"kind": "server"}, "model is missing"),
        ({}, "kind is missing"),
        ({"kind": "server", "model": "m", "args": {"port": 1}}, "batchrunner sets --port itself"),
    ],
)
def test_wrong_engines_are_explained(engine: dict[str, Any], told: str) -> None:
    """An engine read alone is explained as in a job file."""
    with pytest.raises(JobError, match=re.escape(told)) as caught:
        parse_engine(engine)
    assert str(caught.value).startswith("engine: ")
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("file", sorted(p.name for p in (ROOT / "jobs").glob("*.yaml")))
def test_the_schema_accepts_the_jobs_that_we_ship(file: str) -> None:
    """An editor that checks job files by `batchrun schema` finds no fault with ours."""
    job = yaml.safe_load((ROOT / "jobs" / file).read_text())
    jsonschema.validate(job, Job.model_json_schema())
