"""The commands of docs/deploy.md: run here, or marked with the reason why not."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from nano_inference.config import load_config

from ..cli.servers import free_port
from ..commands import Command
from .charts import ROOT
from .test_systemd import FOLDER, Unit

PAGE = (ROOT / "docs" / "deploy.md").read_text()
LIMIT_S = 120


def commands(section: str | None = None) -> list[str]:
    """The commands of a section, or of the page, in blocks that carry no reason against it."""
    text = PAGE
    if section is not None:
        _, _, text = PAGE.partition(f"\n## {section}\n")
        text, _, _ = text.partition("\n## ")
    fences = re.findall(r"^(<!-- untested: [^\n]+ -->\n)?```\n(.*?)^```", text, re.M | re.S)
    lines = [line for reason, fence in fences if not reason for line in fence.splitlines()]
    return [line.removeprefix("$ ") for line in lines if line.startswith(("$ ", "# "))]


def test_every_command_is_run_or_says_why_not() -> None:
    serve, *asked = commands()
    assert serve == "nano-inference serve --port 8000 &"
    assert len(asked) == 3
    assert len(set(asked)) == 1, "the same request each time"
    run = [*commands("A laptop"), *commands("One server"), *commands("Two servers")]
    assert run == commands()


def streamed(command: str, port: int, running: list[Command]) -> str:
    """The text that a `curl` of the page prints, once the server answers."""
    arguments = shlex.split(command.replace(":8000/", f":{port}/"))
    assert arguments[0] == "curl"
    end_s = time.monotonic() + LIMIT_S
    while True:
        assert [each.poll() for each in running] == [None] * len(running)
        ran = subprocess.run(
            [*arguments, "--silent", "--fail"], capture_output=True, text=True, timeout=LIMIT_S
        )
        if ran.returncode == 0:
            break
        assert time.monotonic() < end_s, ran.stderr
        time.sleep(0.2)
    lines = [line.removeprefix("data: ") for line in ran.stdout.splitlines()]
    events = [json.loads(line) for line in lines if line.startswith("{")]
    assert len(events) > 1
    return "".join(each["choices"][0]["text"] for each in events if each["choices"])


@pytest.mark.slow
def test_a_laptop(tmp_path: Path) -> None:
    serve, curl = commands("A laptop")
    port = free_port()
    _, *arguments = shlex.split(serve.removesuffix(" &").replace("8000", str(port)))
    with Command(*arguments, stdout=tmp_path / "stdout") as server:
        assert streamed(curl, port, [server]) == " 123"


def service(name: str, environment: dict[str, str], folder: Path) -> Command:
    """The command of a unit, with its variables, and the paths of its files here."""
    unit = Unit(name)["Service"]
    text = unit["ExecStart"].replace("/etc/nano-inference", str(folder))
    _, *arguments = shlex.split(re.sub(r"\$\{(\w+)\}", lambda match: environment[match[1]], text))
    # %d: the folder of credentials, which `LoadCredential` fills.
    assert unit["LoadCredential"].split(":")[0] == "bus-url"
    environment = environment | {"NANO_INFERENCE_BUS__URL_FILE": str(folder / "bus-url")}
    return Command(*arguments, environment={**os.environ, **environment}, stdout=folder / name)


@pytest.mark.slow
def test_one_server_and_a_second_one(redis_url: str, tmp_path: Path) -> None:
    port = free_port()
    text = (FOLDER / "config.yaml").read_text().replace("8000", str(port))
    (tmp_path / "config.yaml").write_text(f"{text}\nbus:\n  prefix: units\n")
    (tmp_path / "bus-url").write_text(redis_url)
    lines = (FOLDER / "b.env").read_text().splitlines()
    second = dict(line.split("=", 1) for line in lines if not line.startswith("#"))
    with ExitStack() as stack:
        up = stack.enter_context(service("nano-inference.service", {}, tmp_path))
        run = stack.enter_context(service("nano-inference@.service", second, tmp_path))
        (curl,) = commands("One server")
        assert streamed(curl, port, [up, run]) == " 123"
        end_s = time.monotonic() + LIMIT_S
        ready: set[str] = set()
        while ready != {"0", "b"}:
            assert time.monotonic() < end_s, ready
            lanes = httpx.get(f"http://127.0.0.1:{port}/status").json()["lanes"]
            ready = {each["lane"] for each in lanes if not each["reason"]}
        up.terminate()
        run.terminate()
        assert (up.wait(LIMIT_S), run.wait(LIMIT_S)) == (0, 0)


def composed(password: str) -> dict[str, Any]:
    """deploy/compose.yaml with this password, as compose fills it in."""
    text = (ROOT / "deploy" / "compose.yaml").read_text()
    found: dict[str, Any] = yaml.safe_load(re.sub(r"\$\{REDIS_PASSWORD:\?[^}]*\}", password, text))
    assert "$" not in yaml.safe_dump(found)
    return found


def test_the_server_of_compose_requires_a_password() -> None:
    """No command line shows the password, and compose starts nothing without it."""
    found = composed("a-password")
    server = found["services"]["redis"]
    (config,) = server["configs"]
    lines = found["configs"][config["source"]]["content"].splitlines()
    assert "requirepass a-password" in lines
    assert server["command"] == f"valkey-server {config['target']}"
    assert "password" not in str([each.get("command") for each in found["services"].values()])


def test_images_have_exact_versions() -> None:
    """In compose, in the chart, in the Dockerfile, and on the pages."""
    texts = [path.read_text() for path in (ROOT / "deploy").rglob("*.yaml")]
    found = re.findall(r"^ *image: ([^{\s]+)$", "\n".join(texts), re.M)
    texts = [path.read_text() for path in (ROOT / "docs").glob("*.md")]
    texts.append((ROOT / "deploy" / "Dockerfile").read_text())
    found += re.findall(r"docker\.io/[\w./:-]+", "\n".join(texts))
    assert len(found) == 8
    for image in found:
        assert re.search(r":v?\d+\.\d+\.\d+(-[\w-]+)?$", image), image
    servers = [image.rpartition(":")[2] for image in found if "valkey" in image]
    # With the repairs of CVE-2025-49844 and CVE-2026-21863.
    assert min(tuple(map(int, version.split("."))) for version in servers) >= (8, 1, 6)


def test_the_service_of_compose_has_settings() -> None:
    """And its port is that of its command; nothing of it is privileged."""
    service = composed("a-password")["services"]["nano-inference"]
    config = load_config(env=service["environment"])
    assert config.policy.backend == "bus"
    assert service["command"] == ["up", "--gateway", "8000"]
    assert service["ports"] == ["127.0.0.1:8000:8000"]
    assert config.bus.url == "redis://:a-password@redis:6379"
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    grace_s = float(service["stop_grace_period"].removesuffix("s"))
    assert grace_s > 2 * config.pipeline.drain_timeout_s
