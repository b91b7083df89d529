"""Workflow engines whose process is killed in mid-generation: each token is computed once.

Each program of `programs/durable/` is a workflow of three generations. Its first process kills
itself in the middle of the second one, and its second process goes on.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from ..cli.servers import free_ports
from .environments import WORKFLOWS

PROGRAMS = Path(__file__).parent / "programs" / "durable"
LIMIT_S = 120
STEPS, TOKENS = 3, 900
# The first token of a generation is made with its prompt.
DECODED = TOKENS - 1


def test_every_program_has_its_environment() -> None:
    assert {path.stem for path in PROGRAMS.glob("on_*.py")} == {f"on_{name}" for name in WORKFLOWS}


class Workflow:
    """A workflow, its processes, and the engine that it calls.

    Attributes:
        folder: The folder of its state.
    """

    def __init__(self, name: str, python: Path, addresses: dict[str, str], folder: Path) -> None:
        self.folder = folder
        self.id = f"{name}-{time.time_ns()}"
        self._command = [str(python), str(PROGRAMS / f"on_{name}.py")]
        self._metrics = addresses["NANO_INFERENCE_METRICS_URL"]
        self._before = self._counted()
        self._variables = addresses | {
            "WORKFLOW_ID": self.id,
            "STATE_FOLDER": str(folder),
            "TOKENS": str(TOKENS),
        }

    def _counted(self) -> int:
        found = re.findall(
            r"^nano_tokens_decoded_total\S* (\S+)", httpx.get(self._metrics).text, re.M
        )
        return sum(int(float(each)) for each in found)

    @property
    def decoded(self) -> int:
        """How many tokens the engine has decoded for it."""
        return self._counted() - self._before

    @contextmanager
    def running(self, *, crashes: bool, **variables: str) -> Iterator[subprocess.Popen[str]]:
        """One of its processes; it `crashes` in the middle of the second generation."""
        # The engine's counter is behind by parts of a second.
        after = self._before + DECODED + DECODED // 4
        own = {"CRASH_AFTER": str(after) if crashes else "0"}
        with running(self._command, **self._variables, **own, **variables) as process:
            yield process

    def crashed(self, process: subprocess.Popen[str]) -> None:
        """Check that a process has killed itself in the middle of the second generation."""
        assert process.wait(LIMIT_S) == -signal.SIGKILL
        crashed_at = int((self.folder / "crashed").read_text()) - self._before
        assert DECODED < crashed_at < 2 * DECODED

    def check(self, texts: list[str]) -> None:
        """Check what it has returned, and that each token of it was computed once."""
        assert len(texts) == STEPS
        assert all(texts)
        until(lambda: self.decoded >= STEPS * DECODED)
        assert self.decoded == STEPS * DECODED


@contextmanager
def running(command: list[str], **variables: str) -> Iterator[subprocess.Popen[str]]:
    """A process in the background, killed at the end."""
    with subprocess.Popen(
        command, env=os.environ | variables, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def until(holds: Callable[[], Any]) -> None:
    """Wait for servers and counters, which are behind by parts of a second."""
    end = time.monotonic() + LIMIT_S
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.05)


def answers(url: str) -> bool:
    try:
        return httpx.get(url).status_code == 200
    except httpx.TransportError:
        return False


@pytest.fixture
def workflow(
    request: pytest.FixtureRequest,
    programs: Callable[[str], Path],
    addresses: dict[str, str],
    tmp_path: Path,
) -> Workflow:
    name: str = request.param
    return Workflow(name, programs(name) / "python", addresses, tmp_path)


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.parametrize("workflow", ["dbos", "dbos_agent"], indirect=True)
def test_a_workflow_of_dbos_computes_each_token_once(workflow: Workflow) -> None:
    with workflow.running(crashes=True) as process:
        workflow.crashed(process)
    with workflow.running(crashes=False) as process:
        out, _ = process.communicate(timeout=LIMIT_S)
    workflow.check(json.loads(out.splitlines()[-1]))


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.parametrize("workflow", ["temporal"], indirect=True)
def test_a_workflow_of_temporal_computes_each_token_once(
    workflow: Workflow, programs: Callable[[str], Path]
) -> None:
    port = free_ports(2)
    server = [str(programs("temporal") / "temporal"), "server", "start-dev", "--headless"]
    server += ["--log-level", "error", "--port", str(port), "--http-port", str(port + 1)]
    address = {"TEMPORAL_ADDRESS": f"127.0.0.1:{port}"}
    with running(server):
        with workflow.running(crashes=True, **address) as process:
            workflow.crashed(process)
        with workflow.running(crashes=False, **address) as process:
            out, _ = process.communicate(timeout=LIMIT_S)
    workflow.check(json.loads(out.splitlines()[-1]))


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.parametrize("workflow", ["restate"], indirect=True)
def test_a_workflow_of_restate_computes_each_token_once(
    workflow: Workflow, node_folders: Callable[[str], Path]
) -> None:
    port = free_ports(4)
    ingress, admin, node, service = (f"127.0.0.1:{port + each}" for each in range(4))
    (server,) = node_folders("restate").glob("node_modules/@restatedev/*/bin/restate-server")
    command = [str(server), "--listen-mode", "tcp", "--base-dir", str(workflow.folder)]
    places = {
        "RESTATE_INGRESS__BIND_ADDRESS": ingress,
        "RESTATE_ADMIN__BIND_ADDRESS": admin,
        "RESTATE_BIND_ADDRESS": node,
    }
    address = {"SERVICE_ADDRESS": service}
    with running([*command, "--no-logo", "--log-filter", "error"], **places):
        with workflow.running(crashes=True, **address) as process:
            until(lambda: answers(f"http://{admin}/health"))
            deployments = f"http://{admin}/deployments"
            until(lambda: httpx.post(deployments, json={"uri": f"http://{service}"}).is_success)
            url = f"http://{ingress}/three_steps/{workflow.id}/run/send"
            httpx.post(url, json={}).raise_for_status()
            workflow.crashed(process)
        with workflow.running(crashes=False, **address):
            url = f"http://{ingress}/restate/workflow/three_steps/{workflow.id}/attach"
            workflow.check(httpx.get(url, timeout=LIMIT_S).json())
