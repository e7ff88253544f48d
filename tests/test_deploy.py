"""The files of docs/deploy: a unit of systemd, a manifest of Kubernetes, and a dashboard of Grafana."""

import json
import re
import shlex
import shutil
import subprocess
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from typer.main import get_command

from batchrunner.cli.entry import app
from batchrunner.runner.foreground import TERM_DRAIN_S
from batchrunner.serve.owners import read_owners
from tests.conftest import ROOT, eventually, job_of, started, write_job
from tests.e2e.test_serve import FAST, Server, requests_of, serving
from tests.e2e.test_serve_owners import KEYS, client_of, write_keys

DEPLOY = ROOT / "docs" / "deploy"
UNIT = (DEPLOY / "batchrun-serve.service").read_text()
MANIFEST = [*yaml.safe_load_all((DEPLOY / "batchrun-serve.yaml").read_text())]
DASHBOARD = json.loads((DEPLOY / "grafana-dashboard.json").read_text())
OPENMETRICS = "application/openmetrics-text; version=1.0.0"


def settings_of(section: str) -> dict[str, list[str]]:
    """Return the settings of a section of the unit; a setting may occur several times."""
    (text,) = re.findall(rf"^\[{section}\]\n(.*?)(?=^\[|\Z)", UNIT, re.DOTALL | re.MULTILINE)
    settings = defaultdict(list)
    for line in text.splitlines():
        if line and not line.startswith("#"):
            name, _, value = line.partition("=")
            settings[name].append(value)
    return settings


def serve_options(arguments: list[str]) -> dict[str, str]:
    """Return the options of `batchrun serve`, all of which exist and have a value; `arguments` follow it."""
    words = [word for argument in arguments for word in argument.split("=", 1)]
    options = dict(zip(words[::2], words[1::2], strict=True))
    command = get_command(app).commands["serve"]  # type: ignore[attr-defined]
    assert {*options} <= {name for parameter in command.params for name in parameter.opts}
    return options


def check_as_deployed(options: Mapping[str, str], tmp_path: Path, paths: list[str]) -> None:
    """Serve with the options of a file, on a free port and the simulated engine; each path answers 200."""
    assert {*options} == {"--engine", "--dir", "--host", "--port", "--keys"}
    keys = write_keys(tmp_path / "keys.yaml")
    with serving(tmp_path / "state", "--host", options["--host"], "--keys", keys, *FAST) as server:
        for path in paths:
            assert get(server, path).status_code == 200
        assert get(server, "/metrics").status_code == 401


def get(server: Server, path: str, **headers: str) -> httpx.Response:
    """Call the server without its API."""
    return httpx.get(server.url.removesuffix("/v1") + path, headers=headers, trust_env=False)


def test_the_unit_serves(tmp_path: Path) -> None:
    """Its command exists with all options, reloads keys by SIGHUP, and has the time to stop that it needs."""
    service = settings_of("Service")
    program, subcommand, *arguments = shlex.split(service["ExecStart"][0])
    assert (Path(program).name, subcommand) == ("batchrun", "serve")
    options = serve_options(arguments)
    assert options["--dir"] == f"/var/lib/{service['StateDirectory'][0]}"
    assert (service["ExecReload"], "--keys" in options) == (["/bin/kill -HUP $MAINPID"], True)
    assert (service["KillSignal"], service["KillMode"]) == (["SIGTERM"], ["mixed"])
    assert int(service["TimeoutStopSec"][0]) > 2 * TERM_DRAIN_S
    assert (service["Restart"], service["RestartPreventExitStatus"]) == (["on-failure"], ["2"])
    check_as_deployed(options, tmp_path, ["/health", "/ready"])


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    """systemd knows each setting."""
    unit = tmp_path / "batchrun-serve.service"
    program = shlex.split(settings_of("Service")["ExecStart"][0])[0]
    unit.write_text(UNIT.replace(program, "/bin/true"))
    done = subprocess.run(["systemd-analyze", "verify", unit], check=False, capture_output=True, text=True)
    # An unknown setting is only a warning.
    assert (done.returncode, done.stderr) == (0, "")


def test_the_manifest_serves(tmp_path: Path) -> None:
    """Options exist, probes answer, volumes and ports match, and one server at a time uses the records."""
    secret, claim, deployment, service = MANIFEST
    kinds = [each["kind"] for each in MANIFEST]
    assert kinds == ["Secret", "PersistentVolumeClaim", "Deployment", "Service"]
    spec, pod = deployment["spec"], deployment["spec"]["template"]["spec"]
    assert (spec["replicas"], spec["strategy"]["type"]) == (1, "Recreate")
    assert spec["selector"]["matchLabels"] == spec["template"]["metadata"]["labels"]
    assert service["spec"]["selector"] == spec["selector"]["matchLabels"]
    assert pod["terminationGracePeriodSeconds"] > 2 * TERM_DRAIN_S

    (container,) = pod["containers"]
    subcommand, *arguments = container["args"]
    assert subcommand == "serve"
    options = serve_options(arguments)
    (port,) = container["ports"]
    assert int(options["--port"]) == port["containerPort"]
    assert [each["targetPort"] for each in service["spec"]["ports"]] == [port["name"]]
    probes = {name: container[f"{name}Probe"]["httpGet"] for name in ("startup", "liveness", "readiness")}
    paths = {name: probe["path"] for name, probe in probes.items()}
    assert paths == {"startup": "/health", "liveness": "/health", "readiness": "/ready"}
    assert {probe["port"] for probe in probes.values()} == {port["name"]}

    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert mounts.keys() == volumes.keys()
    assert options["--dir"] == mounts["state"]
    assert volumes["state"]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    assert volumes["keys"]["secret"]["secretName"] == secret["metadata"]["name"]
    directory, _, name = options["--keys"].rpartition("/")
    assert directory == mounts["keys"]
    assert [each["value"] for each in container["env"] if each["name"] == "HOME"] == [mounts["tmp"]]
    (tmp_path / name).write_text(secret["stringData"][name])
    assert any(owner.admin for owner in read_owners(tmp_path / name))

    assert pod["securityContext"]["runAsNonRoot"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert container["resources"]["limits"]["memory"]
    check_as_deployed(options, tmp_path, [*paths.values()])


Labels = dict[str, set[str]]


def labels_in(text: str) -> Labels:
    """Return the names of the samples that can be in OpenMetrics, with the labels that they have there."""
    labels = {}
    for family in text_string_to_metric_families(text):  # type: ignore[no-untyped-call]
        suffix = {"counter": "_total", "info": "_info"}.get(family.type, "")
        names = {name for sample in family.samples for name in sample.labels}
        labels[family.name + suffix] = names
    return labels


@pytest.fixture(name="of_serve", scope="module")
def _of_serve(tmp_path_factory: pytest.TempPathFactory) -> Labels:
    """The metrics of a server that has done a batch."""
    directory = tmp_path_factory.mktemp("served")
    keys = write_keys(directory / "keys.yaml", anna={"max_tokens_per_day": 10**6})
    with serving(directory / "state", "--keys", keys, *FAST) as server:
        anna = client_of(server, "anna")
        anna.ended(anna.begin(requests_of(3)))
        reply = get(server, "/metrics", Authorization=f"Bearer {KEYS['root']}", Accept=OPENMETRICS)
    return labels_in(reply.text)


@pytest.fixture(name="of_run", scope="module")
def _of_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Labels]:
    """The metrics of a run that has done some of its rows."""
    directory = tmp_path_factory.mktemp("run")
    engine = {"kind": "simulated", "step_s": 0.01, "max_running": 8}
    job = job_of(directory, engine, rows=20_000, sampling={"max_new_tokens": 4})
    with started(write_job(job, directory), "--metrics", "localhost:0") as running:
        running.wait_for_line("metrics: http")
        url = running.lines[-1].partition("metrics: ")[2].strip()

        def text() -> str:
            return httpx.get(url, headers={"Accept": OPENMETRICS}, trust_env=False).text

        eventually(lambda: "batchrunner_time_left_seconds " in text())
        yield labels_in(text())


def expressions() -> list[tuple[str, str]]:
    """Return each expression of the dashboard's panels with its legend."""
    targets = [target for panel in DASHBOARD["panels"] for target in panel.get("targets", ())]
    return [(target["expr"], target["legendFormat"]) for target in targets]


def test_the_dashboard_asks_for_metrics_that_exist(of_serve: Labels, of_run: Labels) -> None:
    """Each name, and each label of a selector, a grouping, a legend or a variable, is exported."""
    labels = {name: {*names, "instance", "job"} for name, names in (of_serve | of_run).items()}
    assert len(expressions()) > 20
    for expression, legend in expressions():
        names = re.findall(r"\b(?:batchrunner|process)_\w+", expression)
        assert names
        for name, selector in re.findall(r"\b(\w+)\{(.*?)\}", expression):
            assert {*re.findall(r"(\w+)=", selector)} <= labels[name], expression
        of_all = set.intersection(*(labels[name] for name in names))
        groups = {
            word for group in re.findall(r"(?:by|on) \((.*?)\)", expression) for word in group.split(", ")
        }
        assert groups <= of_all, expression
        shown = {*re.findall(r"\{\{(\w+)\}\}", legend)}
        # A sum has only the labels by which it is grouped.
        assert shown <= (groups if "sum" in expression else of_all), expression
    for variable in DASHBOARD["templating"]["list"]:
        if variable["type"] == "query":
            (pair,) = re.findall(r"^label_values\((\w+), (\w+)\)$", variable["query"])
            assert pair[1] in labels[pair[0]]


def test_the_dashboard_is_whole() -> None:
    """Panels have different IDs and do not overlap, and use only the variables that the dashboard has."""
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells: list[Any] = []
    for panel in panels:
        place = panel["gridPos"]
        cells += [(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])]
    assert len({*cells}) == len(cells)
    assert max(x for x, _ in cells) < 24
    variables = {variable["name"] for variable in DASHBOARD["templating"]["list"]} | {"__rate_interval"}
    used = {*re.findall(r"\$\{?(\w+)", json.dumps(panels))}
    assert used == variables


def test_the_page_lists_the_metrics(of_serve: Labels) -> None:
    """The table in docs/how-to/serve.md has the metrics of the server, each with its labels."""
    page = (ROOT / "docs" / "how-to" / "serve.md").read_text()
    rows = re.findall(r"^\| `(batchrunner_serve_\w+)` \| (.*?) ?\|", page, re.MULTILINE)
    documented = {name: {*re.findall(r"`(\w+)`", labels)} for name, labels in rows}
    exported = {name: labels for name, labels in of_serve.items() if name.startswith("batchrunner_")}
    assert documented == exported
