"""The Helm chart: rendered, and checked against the schemas of Kubernetes.

There is no helm here. `render` knows the part of its template language that the chart
uses, and fails on everything else.
"""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from planner.api.settings import ENVIRONMENT_PREFIX, Settings

CHART = Path(__file__).parents[1] / "docker" / "helm"
VERSION = "1.33"
ACTION = re.compile(r"\{\{(-?)\s*(.*?)\s*(-?)\}\}", re.DOTALL)
RELEASE = "demo"


def values(**changes: dict[str, Any]) -> dict[str, Any]:
    """The chart's values, with changes to its sections."""
    found: dict[str, Any] = copy.deepcopy(
        yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    )
    for section, change in changes.items():
        found[section] |= change
    return found


def render(template: str, given: dict[str, Any]) -> str:
    """The text of a template: values, `if`, `not`, and four filters."""
    template = re.sub(r"[ \t]*\n?[ \t]*\{\{-", "\n{{-", template)
    pieces, shown, position = [], [True], 0
    for action in ACTION.finditer(template):
        text = template[position : action.start()]
        position = action.end()
        if all(shown):
            pieces.append(text.rstrip() if action[1] else text)
        words = action[2].split()
        if words[0] == "if":
            negated = words[1] == "not"
            shown.append(bool(value_of(words[-1], given)) != negated)
        elif words == ["end"]:
            shown.pop()
        elif all(shown):
            pieces.append(evaluated(action[2], given))
    assert shown == [True], "an `if` without its `end`"
    return "".join(pieces) + template[position:]


def evaluated(expression: str, given: dict[str, Any]) -> str:
    """A value after its filters."""
    first, *filters = [part.strip() for part in expression.split("|")]
    name = first.removeprefix("toYaml ")
    value = value_of(name, given)
    if name != first:
        value = yaml.safe_dump(value, default_flow_style=False).rstrip()
    for each in filters:
        words = each.split()
        if words[0] == "nindent":
            value = "\n" + "\n".join(
                " " * int(words[1]) + line for line in str(value).splitlines()
            )
        elif words == ["quote"]:
            value = json.dumps(str(value))
        elif words == ["int64"]:
            value = int(value)
        else:
            raise AssertionError(f"unknown filter {each!r}")
    return str(value)


def value_of(name: str, given: dict[str, Any]) -> Any:
    """`.Values.a.b` or `.Release.Name`; an unknown name is an error."""
    if name == ".Release.Name":
        return RELEASE
    first, second, *path = name.split(".")
    assert (first, second) == ("", "Values"), name
    found: Any = given
    for part in path:
        found = found[part]
    return found


def documents(**changes: dict[str, Any]) -> list[dict[str, Any]]:
    """All resources that the chart makes."""
    given = values(**changes)
    found: list[dict[str, Any]] = []
    for path in sorted((CHART / "templates").glob("*.yaml")):
        text = render(path.read_text(encoding="utf-8"), given)
        found += [each for each in yaml.safe_load_all(text) if each]
    return found


def named(kind: str, name: str, **changes: dict[str, Any]) -> dict[str, Any]:
    """One resource."""
    found = [each for each in documents(**changes) if each["kind"] == kind]
    return next(each for each in found if each["metadata"]["name"] == name)


def container(name: str, **changes: dict[str, Any]) -> dict[str, Any]:
    """The container of a deployment."""
    deployment = named("Deployment", f"{RELEASE}-{name}", **changes)
    (found,) = deployment["spec"]["template"]["spec"]["containers"]
    assert isinstance(found, dict)
    return found


def test_the_values_fit_their_schema() -> None:
    """And a misspelled value is refused."""
    schema = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
    jsonschema.validate(values(), schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(values(worker={"replica": 3}), schema)


@pytest.mark.parametrize("autoscaling", [False, True])
@pytest.mark.parametrize("labels", [{}, {"team": "training"}])
def test_resources_fit_the_schemas_of_kubernetes(
    autoscaling: bool, labels: dict[str, str]
) -> None:
    """Every resource that Kubernetes itself defines, strictly."""
    found = documents(
        autoscaling={"enabled": autoscaling},
        networkPolicy={"clientNamespaceLabels": labels},
    )
    ours = [each for each in found if "keda" not in each["apiVersion"]]
    assert len(ours) == 7
    assert len(found) - len(ours) == autoscaling
    for each in ours:
        kubernetes_validate.validate(each, VERSION, strict=True)


def test_names_lead_to_each_other() -> None:
    """Selectors match the pods' labels, ports have their names, and volumes are mounted."""
    for name in ("api", "worker"):
        spec = named("Deployment", f"{RELEASE}-{name}")["spec"]
        pod = spec["template"]
        assert (
            spec["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
        )
        mounted = {mount["name"] for mount in container(name)["volumeMounts"]}
        assert mounted == {volume["name"] for volume in pod["spec"]["volumes"]}
    service = named("Service", f"{RELEASE}-api")["spec"]
    pods = named("Deployment", f"{RELEASE}-api")["spec"]["template"]["metadata"]
    assert service["selector"].items() <= pods["labels"].items()
    ports = {port["name"] for port in container("api")["ports"]}
    assert {port["targetPort"] for port in service["ports"]} <= ports


def test_variables_are_settings() -> None:
    """Every variable of the containers is a setting, and its value is accepted."""
    for name in ("api", "worker"):
        given = {
            variable["name"]: variable.get("value", "postgresql://host/name")
            for variable in container(name)["env"]
        }
        assert "PLANNER_DATABASE_URL" in given
        settings = {
            name.removeprefix(ENVIRONMENT_PREFIX).lower(): value
            for name, value in given.items()
        }
        Settings.model_validate(settings)


def test_workers_scale_with_the_queue() -> None:
    """KEDA counts unfinished jobs; without it the number of workers is fixed."""
    enabled = {"enabled": True}
    scaled = named("ScaledObject", f"{RELEASE}-worker", autoscaling=enabled)["spec"]
    assert scaled["scaleTargetRef"] == {"name": f"{RELEASE}-worker"}
    (trigger,) = scaled["triggers"]
    assert "FROM jobs" in trigger["metadata"]["query"]
    assert trigger["metadata"]["connectionFromEnv"] in str(container("worker"))
    worker = named("Deployment", f"{RELEASE}-worker", autoscaling=enabled)
    assert "replicas" not in worker["spec"]
    assert named("Deployment", f"{RELEASE}-worker")["spec"]["replicas"] == 2


def test_metrics_of_workers_are_reachable() -> None:
    """Annotation, port, setting and network policy have the port of the values."""
    pod = named("Deployment", f"{RELEASE}-worker", worker={"metricsPort": 9123})
    notes = pod["spec"]["template"]["metadata"]["annotations"]
    assert notes["prometheus.io/port"] == "9123"
    worker = container("worker", worker={"metricsPort": 9123})
    assert {"name": "metrics", "containerPort": 9123} in worker["ports"]
    assert {"name": "PLANNER_METRICS_PORT", "value": "9123"} in worker["env"]
    policy = named("NetworkPolicy", f"{RELEASE}-worker", worker={"metricsPort": 9123})
    (rule,) = policy["spec"]["ingress"]
    assert rule["ports"] == [{"port": 9123}]


def test_pods_are_restricted() -> None:
    """No root, no writable root, no privileges, no token of the cluster, no open network."""
    for name in ("api", "worker"):
        pod = named("Deployment", f"{RELEASE}-{name}")["spec"]["template"]["spec"]
        assert pod["securityContext"]["runAsNonRoot"]
        assert not pod["automountServiceAccountToken"]
        context = container(name)["securityContext"]
        assert context["readOnlyRootFilesystem"]
        assert context["capabilities"] == {"drop": ["ALL"]}
        assert {"startupProbe", "livenessProbe"} <= container(name).keys()
    policies = [each for each in documents() if each["kind"] == "NetworkPolicy"]
    assert {kind for each in policies for kind in each["spec"]["policyTypes"]} == {
        *("Ingress", "Egress")
    }
