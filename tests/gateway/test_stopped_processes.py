"""All doors say at once that an executor was stopped or has ended, and again that it serves."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Iterator

import anyio
import grpc
import httpx
import pytest

from nano_inference.bus import Bus, open_bus
from nano_inference.config import STAGES, Config, load_config
from nano_inference.gateway.gateway import Gateway
from nano_inference.kserve.protobuf import METHODS
from nano_inference.pipeline.client import BusClient
from nano_inference.store.process_state import identity_of

from .api.kserve.calls import Client
from .fake import report

LIMIT_S = 30
PROBES = {
    "/readyz": 503,
    "/health": 503,
    "/v2/health/ready": 400,
    "/v2/models/tiny/ready": 400,
    "/v2/models/tiny.tokens/ready": 400,
}


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    """The process of a fake executor."""
    process = subprocess.Popen(["sleep", "600"])
    yield process
    process.kill()
    process.wait()


async def beat(bus: Bus, pid: int, identity: str) -> None:
    """Report a ready lane with its executor in another process."""
    await bus.store.board.report(
        [
            report(
                stage=stage,
                incarnation=stage,
                pid=pid,
                process=identity if stage == "executor" else "",
            )
            for stage in STAGES
        ]
    )


async def readiness(http: httpx.AsyncClient, call: Client) -> set[bool]:
    """The readiness by each interface; one value if all agree."""
    name = METHODS["ModelReady"].request(name="tiny")
    index = (await http.post("/v2/repository/index", json={})).json()
    over_grpc = (await call("RepositoryIndex")).models
    return {
        *[(await http.get(path)).status_code == 200 for path in PROBES],
        (await http.get("/healthz")).json()["status"] == "ok",
        *[each["state"] == "READY" for each in index],
        *[each.state == "READY" for each in over_grpc],
        (await call("ServerReady")).ready,
        (await call("ModelReady", name)).ready,
    }


async def test_no_door_calls_a_stopped_executor_ready(child: subprocess.Popen[bytes]) -> None:
    config = load_config(env={}, overrides={"gateway.port": 0, "gateway.grpc_port": 0})
    identity = identity_of(child.pid)
    bus = open_bus(Config().bus, frozenset(STAGES), 1)
    async with (
        Gateway(BusClient(bus), config) as gateway,
        httpx.AsyncClient(base_url=gateway.url) as http,
        grpc.aio.insecure_channel(gateway.places["grpc"]) as channel,
    ):

        async def until(ready: bool, word: str) -> None:
            """Wait until the cached state has expired."""
            ends_at = time.monotonic() + LIMIT_S
            while True:
                await beat(bus, child.pid, identity)
                answer = await http.get("/readyz")
                if (answer.status_code == 200) == ready:
                    break
                assert time.monotonic() < ends_at
                await anyio.sleep(0.01)
            assert word in answer.text
            assert await readiness(http, Client(channel)) == {ready}

        await until(True, "ready")
        child.send_signal(signal.SIGSTOP)
        await until(False, "executor is stopped")
        child.send_signal(signal.SIGCONT)
        await until(True, "ready")
        child.kill()
        await until(False, "executor has ended")
    await bus.aclose()
