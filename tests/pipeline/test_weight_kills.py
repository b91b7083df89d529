"""SIGKILL of any process at each point between the begin and the end of a trainer's update: all
executors have the old weights, or all the new ones, and the interface says which.

The decisions are in `tests/stages/executor/changes/test_decided.py`, every day.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.torch import save_file

from nano_inference import BusClient
from nano_inference.config import all_roles

from .. import oracle
from ..cli.servers import free_port
from . import reference
from .test_processes import Deployment

POINTS = (
    *("begun", "in part 1", "after part 1", "in part 2", "after part 2"),
    *("finish at once", "finish early", "finish midway", "finish late", "finished"),
)
"""When a process is killed."""

DELAYS_S = {"finish at once": 0.0, "finish early": 0.02, "finish midway": 0.08, "finish late": 0.2}

REPLICAS, RANKS = 2, 2
VICTIMS = (
    *("gateway", "executor", "rank of executor", "admission", "executor.1", "rank of executor.1"),
    *("batching", "gateway", "batching.1", "fairness", "streaming"),
)

LIMIT_S = 90.0
ROUNDS = 100


def is_there(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def _children(pid: int, pattern: str = "") -> list[int]:
    """The children of a process whose command line has a pattern."""
    command = ["pgrep", "-P", str(pid), "-f", "--", pattern or "."]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    return sorted(map(int, found.stdout.split()))


class Trainer:
    """A trainer that repeats a call whose answer is lost, as TRL's client does."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.client = httpx.AsyncClient(base_url=url, timeout=LIMIT_S)

    async def call(self, method: str, path: str, body: Any = None) -> httpx.Response:
        end = time.monotonic() + LIMIT_S
        while True:
            with suppress(httpx.TransportError):
                answer = await self.client.request(method, path, json=body)
                code = answer.headers.get("X-Error-Code", "")
                if answer.status_code < 500 and code != "weights_busy":
                    return answer
            assert time.monotonic() < end, f"{path} has no answer"
            await asyncio.sleep(0.1)


class Fleet:
    """A deployment of two replicas over two ranks each, and a gateway."""

    def __init__(self, deployment: Deployment, client: BusClient, url: str, folder: Path) -> None:
        self.deployment, self.client, self.folder = deployment, client, folder
        self.trainer = Trainer(url)
        self.loaded = dict(reference.model().state_dict())

    def parts_of(self, version: int) -> list[str]:
        """Two files with the weights that spell a version."""
        tensors = {k: v.contiguous() for k, v in oracle.announcing(self.loaded, version).items()}
        names = sorted(tensors)
        paths = []
        for number, chosen in enumerate((names[::2], names[1::2])):
            path = self.folder / f"part-{version}-{number}.safetensors"
            save_file({name: tensors[name] for name in chosen}, path)
            paths.append(str(path))
        return paths

    def pid_of(self, victim: str) -> int:
        of_rank = victim.removeprefix("rank of ")
        role, _, replica = of_rank.partition(".")
        pattern = "gateway --with-parent" if role == "gateway" else f"--stages {role}"
        wanted = f"pipeline.replica={replica or 0}"
        for pid in _children(self.deployment.process.pid, pattern):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().replace("\0", " ")
            if role in ("executor", "batching") and wanted not in words:
                continue
            if of_rank == victim:
                return pid
            if ranks := _children(pid):
                return ranks[-1]
        return 0

    def kill(self, victim: str) -> bool:
        pid = self.pid_of(victim)
        if pid:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return bool(pid)

    async def settle(self) -> None:
        """Wait until all processes take part, and the gateway answers."""
        end = time.monotonic() + LIMIT_S
        while True:
            reports = [
                each
                for each in await self.client.deployment.reports()
                if each.state == "ready" and is_there(each.pid)
            ]
            if {each.stage for each in reports} == set(all_roles(REPLICAS)):
                break
            assert time.monotonic() < end, "a stage does not come back"
            await asyncio.sleep(0.05)
        await self.trainer.call("GET", "/weight_info")

    async def versions(self) -> set[int]:
        """The versions that executors report."""
        return {
            int(each.load["weight_version"])
            for each in await self.client.deployment.reports()
            if each.stage.startswith("executor")
            and "weight_version" in each.load
            and is_there(each.pid)
        }

    async def tokens(self) -> set[int]:
        body = {"prompt": "98 + 25 =", "max_tokens": 3, "temperature": 0, "ignore_eos": True}
        body["return_token_ids"] = True

        async def one(number: int) -> list[int]:
            prompt = f"{number} + 25 ="
            answer = await self.trainer.call("POST", "/v1/completions", body | {"prompt": prompt})
            assert answer.status_code == 200, answer.text
            found: list[int] = answer.json()["choices"][0]["token_ids"]
            return found

        return {token for each in await asyncio.gather(*map(one, range(8))) for token in each}


async def one_update(fleet: Fleet, version: int, point: str, victim: str) -> tuple[bool, bool]:
    """Update with a kill; return whether a process was killed, and whether the trainer was told
    that the new weights are in place."""
    trainer, killed = fleet.trainer, [False]

    async def during(delay_s: float, work: Callable[[], Any]) -> httpx.Response:
        task = asyncio.ensure_future(work())
        await asyncio.sleep(delay_s)
        killed[0] = fleet.kill(victim)
        answer: httpx.Response = await task
        return answer

    def at(name: str) -> None:
        if point == name:
            killed[0] = fleet.kill(victim)

    started = await trainer.call("POST", "/start_weight_update", {"replace": True})
    assert started.status_code == 200, started.text
    at("begun")
    for number, path in enumerate(fleet.parts_of(version), 1):

        async def send(path: str = path) -> httpx.Response:
            return await trainer.call("POST", "/update_weights", {"update_info": {"path": path}})

        answer = await (during(0.01, send) if point == f"in part {number}" else send())
        if answer.status_code != 200:
            return killed[0], False
        at(f"after part {number}")

    async def finish() -> httpx.Response:
        body = {"weight_version": str(version)}
        return await trainer.call("POST", "/finish_weight_update", body)

    delay_s = DELAYS_S.get(point)
    answer = await (
        finish() if delay_s is None else during(delay_s * (1 + version % 5) / 3, finish)
    )
    at("finished")
    assert answer.headers.get("X-Error-Code", "") != "weights_differ", answer.text
    if point == "finished" and answer.status_code == 200:
        again = await finish()
        assert again.status_code == 200, again.text
        assert again.json()["version"] == version
    return killed[0], answer.status_code == 200


async def rounds(fleet: Fleet, number: int) -> dict[str, Any]:
    """Update this often, each time with a kill; return what came of it."""
    present, outcomes, kills = 0, Counter[str](), Counter[str]()
    for index in range(number):
        point = POINTS[index % len(POINTS)]
        victim = VICTIMS[index % len(VICTIMS)]  # another one at each point each time
        version = index + 1
        await fleet.settle()
        killed, said_new = await one_update(fleet, version, point, victim)
        await fleet.settle()
        expected = version if said_new else present
        about = f"round {index}: {victim} killed at {point!r}, new: {said_new}"
        info = (await fleet.trainer.call("GET", "/weight_info")).json()
        assert info["version"] == expected, (about, info, await fleet.versions())
        end = time.monotonic() + LIMIT_S
        while (found := await fleet.versions()) != {expected}:
            assert time.monotonic() < end, (about, found, expected)
            await asyncio.sleep(0.05)
        if expected:
            assert await fleet.tokens() == {oracle.token_of(expected)}, about
        present = expected
        kills[victim] += killed
        outcomes[f"{point}: {'new' if said_new else 'old'}"] += 1
    return {"rounds": number, "kills": dict(kills), "outcomes": dict(sorted(outcomes.items()))}


@pytest.fixture
def deployment(redis_url: str, tmp_path: Path) -> Iterator[tuple[Deployment, str]]:
    port = free_port()
    settings: dict[str, object] = {
        "pipeline.replicas": REPLICAS,
        "pipeline.max_restarts": 10_000,
        "engine.tensor_parallel": RANKS,
        "engine.max_batch_size": 8,
        "engine.model_path": "tiny",
        "engine.weight_log": tmp_path / "log",
        "gateway.port": port,
        "gateway.sync_timeout_s": 30,
    }
    prefix = f"up-{uuid.uuid4().hex[:8]}"
    running = Deployment(redis_url, prefix, endpoint="", log=tmp_path / "up", settings=settings)
    try:
        yield running, f"http://127.0.0.1:{port}"
    finally:
        running.stop()


@pytest.mark.slow
@pytest.mark.soak(only=True)
async def test_a_killed_process_leaves_all_old_or_all_new_weights(
    deployment: tuple[Deployment, str], tmp_path: Path
) -> None:
    running, url = deployment
    async with BusClient.connect(running.bus) as client:
        found = await rounds(Fleet(running, client, url, tmp_path), ROUNDS)
    report = json.dumps(found, indent=1)
    assert set(found["kills"]) == set(VICTIMS), report
    assert sum(found["kills"].values()) == found["rounds"], report
