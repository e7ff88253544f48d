"""Job files: what is accepted, what overrides what, and errors that a person can act on."""

import json
import re
from pathlib import Path

import jsonschema_rs
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from batchrunner.core.errors import JobError
from batchrunner.job.engine import ServerEngine, SimulatedEngine
from batchrunner.job.load import load_job, parse_engine
from batchrunner.job.sampling import FromColumn
from batchrunner.job.spec import Job
from tests.conftest import ROOT
from tests.support.example_job import EXAMPLE, example, refusal


def complaint(path: Path) -> str | None:
    try:
        load_job(path)
    except JobError as refused:
        return str(refused)
    return None


texts = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=20)


SHIPPED = sorted((ROOT / "jobs").glob("*.yaml"))


@pytest.mark.parametrize("file", SHIPPED, ids=lambda path: path.name)
def test_the_jobs_that_we_ship(file: Path, tmp_path: Path) -> None:
    """The schema, by which editors check job files, accepts them; written down, they load as the same job."""
    tree = yaml.safe_load(file.read_text())
    jsonschema_rs.validate(Job.model_json_schema(), tree)
    job = load_job(tree)
    path = tmp_path / "round-trip.yaml"
    path.write_text(yaml.safe_dump(job.model_dump(mode="json")), encoding="utf-8")
    assert load_job(job.model_dump()) == job
    assert load_job(json.loads(job.model_dump_json(exclude_unset=True))) == job
    assert load_job(path) == job
    assert load_job(job) == job


def test_a_callers_mapping_is_left_alone() -> None:
    """Overrides change the job and not the mapping that a caller passed."""
    tree = yaml.safe_load(EXAMPLE)
    load_job(tree, overrides=["output.path=elsewhere"])
    assert tree == yaml.safe_load(EXAMPLE)


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


def test_the_engines_dialect_of_regex() -> None:
    """What Python's `re` does not know and the engine's grammar does is let through."""
    for pattern in (r"\p{L}+", r"(?<year>\d{4})"):
        assert example([f"sampling.regex='{pattern}'"]).sampling.regex == pattern


def test_result_names_are_reserved() -> None:
    """A carried column never hides a result; the message's own remedy works."""
    message = refusal("input.columns=[output]")
    remedy = re.search(r"(input\.rename): (\{.*\})", message)
    assert remedy is not None
    assert example(["input.columns=[output]", f"{remedy[1]}={remedy[2]}"]).input.rename == {
        "output": "input_output"
    }


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


@given(place=places, value=values)
def test_no_value_breaks_the_explanation(
    place: tuple[str, ...], value: object, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Whatever stands anywhere in a job, it loads or is refused, in lines with the file's name."""
    tree = yaml.safe_load(EXAMPLE)
    node = tree
    for step in place[:-1]:
        node = node[step]
    node[place[-1]] = value
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    path.write_text(yaml.safe_dump(tree, allow_unicode=True), encoding="utf-8")
    message = complaint(path)
    assert message is None or all(line.startswith(f"{path}: ") for line in message.splitlines())


def test_engines_are_read_alone() -> None:
    """A caller of the library may give an engine as a mapping or as a spec."""
    spec = SimulatedEngine(kind="simulated", step_s=0)
    assert parse_engine({"kind": "simulated", "step_s": 0}) == spec
    assert parse_engine(spec) is spec
    server = parse_engine({"kind": "server", "model": Path("m"), "args": {"chat-template": Path("c")}})
    assert isinstance(server, ServerEngine)
    assert (server.model, server.args) == ("m", {"chat-template": "c"})
