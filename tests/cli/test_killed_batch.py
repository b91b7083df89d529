"""A batch while stages, a gateway and the Redis server are killed, on each kind of server."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from ..commands import Command
from ..servers import Cluster, Sentinels, cluster, sentinel_group
from .servers import free_ports

LINES = 2000
LIMIT_S = 300
"""A failover loses confirmed requests, and it takes two minutes to find that."""
ENDS = ("completed", "failed", "expired", "cancelled")


class Client:
    """A client of two gateways, which calls until one answers."""

    def __init__(self, http: httpx.AsyncClient, ports: list[int]) -> None:
        self._http, self._ports = http, ports

    async def call(self, method: str, path: str, **given: Any) -> Any:
        while True:
            for port in self._ports:
                try:
                    url = f"http://127.0.0.1:{port}{path}"
                    answer = await self._http.request(method, url, **given)
                    if answer.status_code < 400:
                        return answer
                except httpx.TransportError:
                    pass
                await asyncio.sleep(0.1)

    async def begin(self) -> str:
        lines = [
            {"custom_id": f"c{number}", "method": "POST", "url": "/v1/completions", "body": body}
            for number in range(LINES)
            for body in [
                {
                    "model": "tiny",
                    "prompt": f"{number % 50} + 1 =",
                    "max_tokens": 4,
                    "temperature": 0,
                }
            ]
        ]
        content = "\n".join(map(json.dumps, lines)).encode()
        form: dict[str, Any] = {"data": {"purpose": "batch"}, "files": {"file": ("in", content)}}
        file_id = (await self.call("POST", "/v1/files", **form)).json()["id"]
        body = {"input_file_id": file_id, "endpoint": "/v1/completions"}
        return str((await self.call("POST", "/v1/batches", json=body)).json()["id"])

    async def until(self, batch_id: str, done: int) -> dict[str, Any]:
        """Wait for so many answers, or the batch's end."""
        while True:
            found = dict((await self.call("GET", f"/v1/batches/{batch_id}")).json())
            if found["request_counts"]["completed"] >= done or found["status"] in ENDS:
                return found
            await asyncio.sleep(0.2)

    async def kill(self, stage: str) -> None:
        lanes = (await self.call("GET", "/status")).json()["lanes"]
        os.kill(lanes[0]["stages"][stage]["pid"], signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.soak(only=True)
@pytest.mark.parametrize("kind", ["embedded", "sentinel", "cluster"])
async def test_a_batch_has_one_answer_for_each_line_on_each_kind_of_server(
    kind: str, tmp_path: Path
) -> None:
    port = free_ports(3)
    own, other = port + 1, port + 2
    async with AsyncExitStack() as stack:
        address, bus, fail = f"redis://127.0.0.1:{port}", ["--port", str(port)], _nothing
        if kind != "embedded":
            opened = sentinel_group if kind == "sentinel" else _cluster
            group: Sentinels | Cluster = await stack.enter_async_context(opened(tmp_path / "redis"))
            address, fail = group.url, _failover_of(group)
            bus = ["--bus", address]

        def run(name: str, *arguments: str) -> Command:
            command = Command(*arguments, log=tmp_path / name)
            return stack.enter_context(command)

        gateway = ["gateway", "--bus", address, "--port", str(other)]
        run("up", "up", *bus, "--gateway", str(own), "--set", "batches.lease_s=3")
        http = await stack.enter_async_context(httpx.AsyncClient(timeout=30))
        client = Client(http, [own, other])
        await client.call("GET", "/readyz")
        killed = run("gateway", *gateway)
        async with asyncio.timeout(LIMIT_S):
            batch_id = await client.begin()
            await client.until(batch_id, LINES // 6)
            await client.kill("executor")
            await client.until(batch_id, LINES // 3)
            killed.kill()
            await fail()
            await client.until(batch_id, LINES // 2)
            run("gateway2", *gateway)
            await client.kill("admission")
            await client.until(batch_id, LINES * 2 // 3)
            await client.kill("streaming")
            found = await client.until(batch_id, LINES + 1)
            assert found["status"] == "completed", found
            answers = []
            for name in ("output_file_id", "error_file_id"):
                if found[name]:
                    text = (await client.call("GET", f"/v1/files/{found[name]}/content")).text
                    answers += [json.loads(each) for each in text.splitlines()]
    counts = Counter(each["custom_id"] for each in answers)
    assert counts == {f"c{number}": 1 for number in range(LINES)}
    assert {each["response"]["status_code"] for each in answers if each["response"]} == {200}
    texts = {
        (int(each["custom_id"][1:]) % 50, each["response"]["body"]["choices"][0]["text"])
        for each in answers
    }
    assert len(texts) == 50, "equal prompts have equal answers"


async def _nothing() -> None:
    """The embedded server is `up`'s own."""


def _cluster(folder: Path) -> Any:
    return cluster(folder, replicas=True)


def _failover_of(group: Sentinels | Cluster) -> Callable[[], Awaitable[None]]:
    """Return what kills a master, whose replica takes over."""

    async def fail() -> None:
        master = group.masters[0] if isinstance(group, Cluster) else await group.master()
        master.kill()

    return fail
