"""The Helm chart with each overlay: valid, hardened, and refused where it could not work."""

from __future__ import annotations

import copy
import json
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from typing import Any

import kubernetes_validate
import pytest
import yaml
from kubernetes_validate import utils

from nano_inference.config import load_config

from .charts import (
    CHART,
    NAMESPACE,
    OVERLAYS,
    ROOT,
    Values,
    library,
    merged,
    one,
    pod_of,
    rendered,
    values_of,
    workloads,
)

# Beside the overlays: what none of them has.
INGRESS = {
    "gateway": {"tlsSecret": "tls", "insecure": False},
    "ingress": {"enabled": True, "host": "ai.example.org", "tlsSecret": "tls"},
    "networkPolicy": {"clients": [{"namespaceSelector": {}}]},
}
CASES: dict[str, Values] = {name: values_of(name) for name in OVERLAYS}
CASES["ingress"] = values_of(None, **INGRESS)
CASES["keda by prometheus"] = values_of(
    "keda", keda={"source": "prometheus", "minReplicas": 1, "keySecret": ""}
)
OLDEST, NEWEST = "1.31", "1.37"
"""The first version of Kubernetes that the chart allows, and the newest with schemas here."""


@cache
def custom_kinds() -> dict[str, Any]:
    """Models of the CRDs. (Their import takes seconds, and every worker imports this file.)"""
    from cloudcoil.models.keda import v1alpha1 as keda
    from cloudcoil.models.prometheus_operator import v1 as operator

    return {
        "ScaledObject": keda.ScaledObject,
        "TriggerAuthentication": keda.TriggerAuthentication,
        "ServiceMonitor": operator.ServiceMonitor,
        "PrometheusRule": operator.PrometheusRule,
    }


@cache
def rendered_case(case: str) -> list[Values]:
    return rendered(CASES[case])


@pytest.fixture(params=CASES)
def objects(request: pytest.FixtureRequest) -> list[Values]:
    return rendered_case(request.param)


def check(found: Values, version: str) -> None:
    """Checks an object strictly: an unknown field is an error."""
    kind = custom_kinds().get(found["kind"])
    if kind is None:
        kubernetes_validate.validate(found, version, strict=True)
    else:
        # Models of the CRDs drop unknown fields.
        model = kind.model_validate(found)
        assert model.model_dump(by_alias=True, exclude_none=True, mode="json") == found


def fields_of(value: Any) -> Any:
    """The value with types for texts and numbers, and one of equal items; its kind as it is."""
    if isinstance(value, dict):
        return {
            key: each if key in ("kind", "apiVersion") else fields_of(each)
            for key, each in sorted(value.items())
        }
    if isinstance(value, list):
        return sorted({json.dumps(fields_of(each)) for each in value})
    return type(value).__name__


@pytest.mark.soak
def test_objects_match_the_schemas_of_kubernetes(soak: bool) -> None:
    """Every different object of all cases; every day those that differ in more than values."""
    versions = (OLDEST, NEWEST) if soak else (OLDEST,)
    objects = [each for case in CASES for each in rendered_case(case)]
    every = {json.dumps(each if soak else fields_of(each)): each for each in objects}
    # Most of each check is reading the schemas again.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(utils, "schema_contents", cache(utils.schema_contents))
        for version in versions:
            for each in every.values():
                check(each, version)


def test_a_misspelt_field_is_found() -> None:
    """So the test above can fail, for both kinds of schemas."""
    gateway = copy.deepcopy(one(rendered_case("keda"), "Deployment", "-gateway"))
    pod_of(gateway)["containers"][0]["readynessProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError, match="readynessProbe"):
        check(gateway, OLDEST)
    scaled = copy.deepcopy(one(rendered_case("keda"), "ScaledObject", "-lane"))
    scaled["spec"]["maxReplicas"] = 3
    with pytest.raises(AssertionError):
        check(scaled, OLDEST)


def test_objects_have_unique_names_in_the_namespace(objects: list[Values]) -> None:
    names = Counter((each["kind"], each["metadata"]["name"]) for each in objects)
    assert set(names.values()) == {1}
    assert {each["metadata"]["namespace"] for each in objects} == {NAMESPACE}


# Names that YAML reads as something else; as long as Helm allows; and no names of a Service.
NAMES = ("true", "null", "123", "0x1f", "off", "a.b", "a" * 53, f"nano-inference-{'b' * 38}")
DNS_NAME = re.compile(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?")
MOST_STATEFUL_SET = 63 - len("-0123456789")
"""Kubernetes adds a hash, in a label of the pods."""


@pytest.mark.parametrize("name", NAMES)
def test_any_name_of_a_release_and_a_namespace_is_a_text(name: str) -> None:
    """Kubernetes accepts the names of all objects, in the longest pool too."""
    pools = [{"name": "true", "replicas": 1}, {"name": "p" * 21, "replicas": 1}]
    objects = rendered(values_of("monitoring", pools=pools), name, name)
    for each in objects:
        assert each["metadata"]["namespace"] == name
        assert each["metadata"]["labels"]["app.kubernetes.io/instance"] == name
        assert DNS_NAME.fullmatch(each["metadata"]["name"])
    for workload in workloads(objects):
        assert len(workload["metadata"]["name"]) <= MOST_STATEFUL_SET
        labels = workload["spec"]["template"]["metadata"]["labels"]
        assert workload["spec"]["selector"]["matchLabels"].items() <= labels.items()
        assert all(isinstance(value, str) for value in labels.values())
    names = Counter((each["kind"], each["metadata"]["name"]) for each in objects)
    assert set(names.values()) == {1}


def test_releases_with_similar_names_have_objects_of_their_own() -> None:
    similar = ("a.b", "a-b", "c" * 53, "c" * 52, "1-nano-inference", "1.nano-inference")
    names = {rendered(values_of(None), name)[0]["metadata"]["name"] for name in similar}
    assert len(names) == len(similar)


def test_a_name_that_yaml_reads_as_something_else_stays_one() -> None:
    """Names of objects, and of a lane, which its processes read as YAML."""
    redis = {"enabled": False, "existingSecret": "123", "urlKey": "null", "password": ""}
    pools = [{"name": "p", "replicas": 1}]
    values = values_of(
        None,
        redis=redis,
        pools=pools,
        lane="true",
        networkPolicy={"egress": [{}]},
        model={"claim": "1"},
    )
    pod = pod_of(one(rendered(values), "StatefulSet", "-p"))
    (bus,) = [each["secret"] for each in pod["volumes"] if each["name"] == "bus"]
    assert (bus["secretName"], bus["items"][0]["key"]) == ("123", "null")
    (claim,) = [each for each in pod["volumes"] if each["name"] == "models"]
    assert claim["persistentVolumeClaim"]["claimName"] == "1"
    env = {each["name"]: each.get("value", "0") for each in pod["containers"][0]["env"]}
    name = "NANO_INFERENCE_BUS__LANE"
    assert load_config(env={name: env[name]}).bus.lane == "true"


def test_containers_are_hardened(objects: list[Values]) -> None:
    """The requirements of kube-linter, Polaris and the restricted pod security standard hold."""
    for workload in workloads(objects):
        pod = pod_of(workload)
        assert pod["automountServiceAccountToken"] is False
        assert pod["enableServiceLinks"] is False
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["runAsUser"] >= 10_000
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()
        assert not any("hostPath" in volume for volume in pod["volumes"])
        for container in pod["containers"]:
            security = container["securityContext"]
            assert security["readOnlyRootFilesystem"] is True
            assert security["allowPrivilegeEscalation"] is False
            assert security["capabilities"] == {"drop": ["ALL"]}
            for kind in ("requests", "limits"):
                assert {"cpu", "memory"} <= container["resources"][kind].keys()
            assert {"startupProbe", "livenessProbe", "readinessProbe"} <= container.keys()
            assert re.search(r":[\w.]+$", container["image"])
            assert not container["image"].endswith(":latest")


def test_secrets_are_only_in_secrets(objects: list[Values]) -> None:
    public = [each for each in objects if each["kind"] != "Secret"]
    text = yaml.safe_dump(public)
    assert "a b" not in text
    assert "redis://" not in text


def test_every_pod_is_under_a_network_policy(objects: list[Values]) -> None:
    """And what each may reach is listed."""
    policies = [each["spec"] for each in objects if each["kind"] == "NetworkPolicy"]
    for workload in workloads(objects):
        labels = workload["spec"]["template"]["metadata"]["labels"].items()
        own = [each for each in policies if each["podSelector"]["matchLabels"].items() <= labels]
        assert {kind for each in own for kind in each["policyTypes"]} == {"Ingress", "Egress"}


def test_selectors_find_exactly_their_pods(objects: list[Values]) -> None:
    """Services, budgets and workloads: none selects the pods of another."""
    pods = {
        each["metadata"]["name"]: each["spec"]["template"]["metadata"]["labels"].items()
        for each in workloads(objects)
    }

    def chosen(selector: dict[str, str]) -> set[str]:
        return {name for name, labels in pods.items() if selector.items() <= labels}

    for each in workloads(objects):
        assert chosen(each["spec"]["selector"]["matchLabels"]) == {each["metadata"]["name"]}
    for each in objects:
        if each["kind"] == "PodDisruptionBudget":
            assert chosen(each["spec"]["selector"]["matchLabels"]) == {each["metadata"]["name"]}
    stages = chosen(one(objects, "Service", "nano-inference")["spec"]["selector"])
    assert stages == {name for name in pods if not name.endswith("-redis")}


def test_the_settings_are_settings(objects: list[Values], tmp_path: Any) -> None:
    """Each process can read what the chart gives it: the file, and the variables."""
    path = tmp_path / "config.yaml"
    path.write_text(one(objects, "ConfigMap", "nano-inference")["data"]["config.yaml"])
    for workload in workloads(objects):
        if workload["metadata"]["name"].endswith("-redis"):
            continue
        (container,) = pod_of(workload)["containers"]
        # What the kubelet fills in.
        env = {each["name"]: each.get("value", "1") for each in container["env"]}
        env = {name: value.replace("$(POD_IP)", "10.0.0.5") for name, value in env.items()}
        env = {name: value for name, value in env.items() if not name.endswith("_FILE")}
        env["NANO_INFERENCE_BUS__URL"] = "redis://a"
        config = load_config(path, env=env)
        assert container["args"][-2:] == ["--config", "/etc/nano-inference/config.yaml"]
        if container["name"] == "lane":
            assert config.bus.lane == "1"
        elif container["name"] not in ("gateway", "front"):
            assert config.pipeline.replica == 1


def mounts(container: Values) -> dict[str, str]:
    return {each["mountPath"]: each["name"] for each in container["volumeMounts"]}


def test_written_folders_are_volumes(objects: list[Values]) -> None:
    """The root file system is read-only."""
    for workload in workloads(objects):
        pod = pod_of(workload)
        (container,) = pod["containers"]
        writable = {"/data"} if container["name"] == "redis" else {"/tmp", "/var/cache", "/dev/shm"}
        assert writable <= mounts(container).keys()
        claims = workload["spec"].get("volumeClaimTemplates", [])
        volumes = {each["name"] for each in pod["volumes"]}
        volumes |= {each["metadata"]["name"] for each in claims}
        assert set(mounts(container).values()) == volumes


# --- each overlay -------------------------------------------------------------------------------


def test_ordinals_are_lanes() -> None:
    lane = one(rendered_case("lanes"), "StatefulSet", "-lane")
    assert lane["spec"]["replicas"] == 3
    (container,) = pod_of(lane)["containers"]
    (name,) = [each for each in container["env"] if each["name"] == "NANO_INFERENCE_BUS__LANE"]
    path = name["valueFrom"]["fieldRef"]["fieldPath"]
    assert path == "metadata.labels['apps.kubernetes.io/pod-index']"


def test_ordinals_of_pools_are_the_replicas_with_their_roles(tmp_path: Any) -> None:
    """Each replica of the settings is one pod, in the pool of its role."""
    found = rendered_case("prefill-decode")
    (tmp_path / "c.yaml").write_text(
        one(found, "ConfigMap", "nano-inference")["data"]["config.yaml"]
    )
    config = load_config(tmp_path / "c.yaml", env={})
    replicas: dict[int, str] = {}
    for role in ("prefill", "decode"):
        spec = one(found, "StatefulSet", f"-{role}")["spec"]
        first = spec.get("ordinals", {"start": 0})["start"]
        replicas |= dict.fromkeys(range(first, first + spec["replicas"]), role)
    assert [replicas[number] for number in range(config.pipeline.replicas)] == list(
        config.pipeline.roles
    )
    assert one(found, "StatefulSet", "-front")["spec"]["replicas"] == 1


def test_ranks_are_processes_of_one_pod(tmp_path: Any) -> None:
    found = rendered_case("ranks")
    (tmp_path / "c.yaml").write_text(
        one(found, "ConfigMap", "nano-inference")["data"]["config.yaml"]
    )
    config = load_config(tmp_path / "c.yaml", env={})
    assert config.engine.tensor_parallel == 2
    (container,) = pod_of(one(found, "StatefulSet", "-lane"))["containers"]
    assert int(container["resources"]["limits"]["cpu"]) >= config.engine.tensor_parallel


def test_kv_tier_fits_its_volume(tmp_path: Any) -> None:
    found = rendered_case("kv-tier")
    (tmp_path / "c.yaml").write_text(
        one(found, "ConfigMap", "nano-inference")["data"]["config.yaml"]
    )
    config = load_config(tmp_path / "c.yaml", env={})
    lane = one(found, "StatefulSet", "-lane")
    (claim,) = lane["spec"]["volumeClaimTemplates"]
    size = int(claim["spec"]["resources"]["requests"]["storage"].removesuffix("Gi")) * 2**30
    assert config.engine.kv_disk_bytes == 100 * 2**30 < size
    (container,) = pod_of(lane)["containers"]
    assert mounts(container)[config.engine.kv_disk_path] == "kv"


def test_keda_scales_by_numbers_that_the_gateway_has() -> None:
    """Both are numbers of `/status`; the address is one that the gateway answers to."""
    from nano_inference.pipeline.status import PipelineStatus

    found = rendered_case("keda")
    spec = one(found, "ScaledObject", "-lane")["spec"]
    lane = one(found, "StatefulSet", spec["scaleTargetRef"]["name"])
    assert "replicas" not in lane["spec"], "an upgrade would undo what KEDA did"
    settings = yaml.safe_load(one(found, "ConfigMap", "nano-inference")["data"]["config.yaml"])
    for trigger in spec["triggers"]:
        place = re.fullmatch(r"http://([\w.-]+):(\d+)/status", trigger["metadata"]["url"])
        assert place is not None
        assert place[1] in settings["gateway"]["allowed_hosts"]
        assert int(place[2]) == one(found, "Service", "-gateway")["spec"]["ports"][0]["port"]
        assert trigger["metadata"]["valueLocation"] in PipelineStatus.__struct_fields__
    gateway = pod_of(one(found, "Deployment", "-gateway"))["containers"][0]
    assert gateway["readinessProbe"]["httpGet"]["path"] == "/livez", "it scales from none"
    usual = pod_of(one(rendered_case("lanes"), "Deployment", "-gateway"))["containers"][0]
    assert usual["readinessProbe"]["httpGet"]["path"] == "/readyz"


def test_queries_of_keda_are_of_metrics() -> None:
    from nano_inference.telemetry import instruments

    names = {
        each.name.replace(".", "_")
        for each in vars(instruments).values()
        if isinstance(each, instruments.Instrument)
    }
    triggers = one(rendered_case("keda by prometheus"), "ScaledObject", "-lane")["spec"]["triggers"]
    asked = {re.findall(r"nano_\w+", each["metadata"]["query"])[0] for each in triggers}
    assert asked == {"nano_queue_length", "nano_requests_in_flight"}
    assert asked <= names


def test_monitoring_reads_every_pod() -> None:
    found = rendered_case("monitoring")
    labels = one(found, "ServiceMonitor", "nano-inference")["spec"]["selector"]["matchLabels"]
    services = [each for each in found if each["kind"] == "Service"]
    (service,) = [each for each in services if labels.items() <= each["metadata"]["labels"].items()]
    (port,) = service["spec"]["ports"]
    for workload in workloads(found):
        if not workload["metadata"]["name"].endswith("-redis"):
            (container,) = pod_of(workload)["containers"]
            opened = {each["name"]: each["containerPort"] for each in container["ports"]}
            assert opened["metrics"] == port["targetPort"]
    rules = one(found, "PrometheusRule", "nano-inference")["spec"]
    assert rules == yaml.safe_load((ROOT / "deploy" / "alerts.yaml").read_text())
    board = one(found, "ConfigMap", "-dashboard")["data"]["nano-inference.json"]
    assert board == (ROOT / "deploy" / "grafana-dashboard.json").read_text()


# --- refusals -----------------------------------------------------------------------------------

REFUSED: dict[str, tuple[Values, str]] = {
    "calls cut off": ({"gateway": {"graceSeconds": 70}}, "must be below gateway.graceSeconds"),
    "requests cut off": ({"lanes": {"graceSeconds": 120}}, "must be below lanes.graceSeconds"),
    "no password": ({"redis": {"password": ""}}, "redis.password must be set"),
    "two buses": ({"redis": {"url": "redis://x"}}, "set redis.enabled to false"),
    "no bus": ({"redis": {"enabled": False}}, "must name a bus"),
    "no way to the bus": (
        {"redis": {"enabled": False, "url": "redis://x"}},
        "networkPolicy.egress must allow",
    ),
    "roles without secret": (
        {"pools": [{"name": "p", "role": "prefill", "replicas": 1}]},
        "kvTransfer.secret must be set",
    ),
    "scaled pools": (
        {"keda": {"enabled": True}, "pools": [{"name": "p", "replicas": 1}]},
        "keda scales lanes",
    ),
    "status without key": ({"keda": {"enabled": True}}, "keda.keySecret must name"),
    "no metric to start with": (
        {"keda": {"enabled": True, "source": "prometheus", "minReplicas": 0}},
        "needs keda.source metrics-api",
    ),
    "no name for the ingress": ({"ingress": {"enabled": True}}, "ingress.host must be set"),
    "two pools of a name": (
        {"pools": [{"name": "p", "replicas": 1}, {"name": "p", "replicas": 2}]},
        "pools: two are named p",
    ),
    "a pool that ends with a dash": ({"pools": [{"name": "p-", "replicas": 1}]}, "'p-' does not"),
    "no memory": ({"redis": {"maxMemory": "5xx"}}, 'redis.maxMemory is "5xx"; it must be'),
    "all memory": ({"redis": {"maxMemory": "0"}}, "it must be a number of bytes above 0"),
    "a size of nothing": ({"redis": {"storage": "5xx"}}, "'5xx' does not match"),
    "no scheme": (
        {"redis": {"enabled": False, "url": "s3cret@host:6379"}},
        "redis.url must begin with redis://",
    ),
    "another scheme": (
        {"redis": {"enabled": False, "url": "http://host"}},
        "must begin with redis",
    ),
    "a lane with a space": ({"lane": "a b"}, 'lane is "a b"; it must have 1 to 64 characters'),
    "a lane without a name": ({"lane": ""}, "it must have 1 to 64 characters"),
    "a bus in a ConfigMap": ({"settings": {"bus": {"url": "redis://x"}}}, "set redis.url"),
    "a port twice": (
        {"monitoring": {"enabled": True, "port": 8000}},
        "monitoring.port 8000 is gateway.port or kvTransfer.port too",
    ),
    "no port": ({"gateway": {"port": 0}}, "minimum"),
    "no name of a claim": ({"model": {"claim": "A_b"}}, "'A_b' does not match"),
    "no interval": ({"monitoring": {"interval": "often"}}, "'often' does not match"),
    "no digest": ({"image": {"digest": "latest"}}, "'latest' does not match"),
    "a label that is no text": ({"executor": {"nodeSelector": {"gpu": True}}}, "want string"),
    "an unknown value": ({"gatewy": {}}, "gatewy"),
    "a wrong type": ({"lanes": {"replicas": "many"}}, "replicas"),
    "an unknown role": ({"pools": [{"name": "p", "role": "x", "replicas": 1}]}, "role"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_unworkable_values_are_refused(case: str) -> None:
    more, message = REFUSED[case]
    with pytest.raises(library().HelmError, match=re.escape(message)) as refused:
        rendered(merged(values_of(None), more))
    assert "s3cret" not in str(refused.value)


def test_drain_ends_before_the_kill() -> None:
    """preStop + drain < grace, of what is rendered."""
    found = rendered_case("lanes")
    for kind, ending in (("Deployment", "-gateway"), ("StatefulSet", "-lane")):
        pod = pod_of(one(found, kind, ending))
        (container,) = pod["containers"]
        env = {each["name"]: each.get("value") for each in container["env"]}
        drain = float(env["NANO_INFERENCE_PIPELINE__DRAIN_TIMEOUT_S"])
        hook = container.get("lifecycle", {"preStop": {"sleep": {"seconds": 0}}})
        assert hook["preStop"]["sleep"]["seconds"] + drain < pod["terminationGracePeriodSeconds"]


# --- the page -----------------------------------------------------------------------------------


def test_lint_finds_nothing() -> None:
    for values in (values_of(None), values_of("prefill-decode")):
        found = library().lint(CHART, values, strict=True, namespace=NAMESPACE)
        assert [each["error"] for each in found["messages"]] == ["icon is recommended"]


def table() -> Iterator[str]:
    """The objects of each overlay, as docs/deploy.md has them."""
    yield "| overlay | objects |"
    yield "| --- | --- |"
    for name in OVERLAYS:
        kinds = Counter(each["kind"] for each in rendered_case(name))
        parts = (f"{count} {kind}" if count > 1 else kind for kind, count in sorted(kinds.items()))
        yield f"| `{name}` | {', '.join(parts)} |"


def test_the_page_lists_the_objects() -> None:
    page = (ROOT / "docs" / "deploy.md").read_text()
    found = re.search(r"<!-- table: objects -->\n\n(.*?)\n\n<!-- end -->", page, re.S)
    assert found is not None
    assert found[1] == "\n".join(table())
