"""The Helm chart, rendered by Helm's own library as `helm template` does, without a cluster."""

from __future__ import annotations

import copy
from importlib import import_module
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy" / "helm" / "nano-inference"
OVERLAYS = {path.stem: path for path in sorted((CHART / "values").glob("*.yaml"))}
RELEASE, NAMESPACE = "demo", "ai"

Values = dict[str, Any]


def library() -> Any:
    """Helm. (Its runtime takes seconds to start, and every worker imports this file.)"""
    return import_module("helm_python")


def merged(*layers: Values) -> Values:
    """Values as Helm merges those of several files: later ones win, lists as a whole."""
    result: Values = {}
    for layer in layers:
        for name, value in layer.items():
            if isinstance(value, dict) and isinstance(result.get(name), dict):
                result[name] = merged(result[name], value)
            else:
                result[name] = copy.deepcopy(value)
    return result


def values_of(overlay: str | None, **more: Any) -> Values:
    """The values of an overlay, and the secrets without which it is refused."""
    given = yaml.safe_load(OVERLAYS[overlay].read_text()) if overlay else {}
    secrets: Values = {}
    if given.get("redis", {}).get("enabled", True):
        secrets["redis"] = {"password": 'a b"+%/ü'}
    if given.get("pools"):
        secrets["kvTransfer"] = {"secret": "kv"}
    return merged(secrets, given, more)


def rendered(values: Values, release: str = RELEASE, namespace: str = NAMESPACE) -> list[Values]:
    """All objects of a release.

    Raises:
        helm.HelmError: The chart refuses the values.
    """
    helm = library()
    with helm.Chart.load(CHART) as chart:
        texts = chart.render(values, name=release, namespace=namespace)
    return [
        found
        for name, text in texts.items()
        if name.endswith(".yaml")
        for found in yaml.safe_load_all(text)
        if found
    ]


def notes(values: Values) -> str:
    """Return the notes that `helm install` prints at its end."""
    helm = library()
    with helm.Chart.load(CHART) as chart:
        texts = chart.render(values, name=RELEASE, namespace=NAMESPACE)
    (text,) = [text for name, text in texts.items() if name.endswith("NOTES.txt")]
    return text


def one(objects: list[Values], kind: str, ending: str) -> Values:
    """The one object of a kind whose name ends so."""
    (found,) = [
        each
        for each in objects
        if each["kind"] == kind and each["metadata"]["name"].endswith(ending)
    ]
    return found


def workloads(objects: list[Values]) -> list[Values]:
    """Return the objects that make pods."""
    return [each for each in objects if each["kind"] in ("Deployment", "StatefulSet")]


def pod_of(workload: Values) -> Values:
    """The pod's specification."""
    spec: Values = workload["spec"]["template"]["spec"]
    return spec
