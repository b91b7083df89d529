"""`up` whose executors are killed: they come back, and say which weights they have."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import urllib.request
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from nano_inference import BusClient, Completion, PastWeights, WeightDelta, WeightLog
from nano_inference.bus.weights import GroupWeights, TensorMeta
from nano_inference.config import BusError, all_roles
from nano_inference.stages.executor.runner.weights.transports import SharedWeights, WeightsGroup

from .. import oracle
from . import reference
from .builders import DTYPE, raises
from .test_processes import Deployment, five_free_ports

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

LIMIT_S = 240


@contextmanager
def up(redis_url: str, log: Path, replicas: int, **more: object) -> Iterator[Deployment]:
    ports = five_free_ports() if replicas == 1 else 0
    settings: dict[str, object] = {
        "pipeline.replicas": replicas,
        "telemetry.metrics_port": ports,
        "engine.max_batch_size": 8,
        "engine.dtype": DTYPE,
        "engine.model_path": "tiny",
        **more,
    }
    prefix = f"up-{uuid.uuid4().hex[:8]}"
    deployment = Deployment(redis_url, prefix, endpoint="", log=log, settings=settings)
    deployment.metrics_port = ports
    try:
        yield deployment
        assert deployment.stop() == 0
    finally:
        if deployment.process.poll() is None:
            deployment.stop()


@pytest.fixture(scope="module")
def deployment(redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """One for the tests with one replica, each of which has its executor killed once. It begins
    with the weights of the model's folder, and each test leaves them as the next one says."""
    with up(redis_url, tmp_path_factory.mktemp("up") / "log", 1) as running:
        yield running


async def ready(client: BusClient, killed: int = 0) -> dict[str, int]:
    """The processes of the roles that take part, without one that was killed now or before: its
    last report stays for a while."""
    return {
        report.stage: report.pid
        for report in await client.deployment.reports()
        if report.state == "ready" and report.pid != killed and is_there(report.pid)
    }


async def until_ready(client: BusClient, replicas: int, killed: int = 0) -> dict[str, int]:
    """The processes of all roles, once all take part."""
    while set(found := await ready(client, killed)) != set(all_roles(replicas)):  # noqa: ASYNC110
        await asyncio.sleep(0.05)
    return found


def is_there(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


async def kill_executor(client: BusClient, replicas: int, role: str = "executor") -> None:
    killed = (await until_ready(client, replicas))[role]
    os.kill(killed, signal.SIGKILL)
    await until_ready(client, replicas, killed)


def stamped(completion: Completion) -> list[tuple[int, list[int]]]:
    """(version, its tokens) for each span of each sample."""
    assert completion.status == "done", completion.error
    found = []
    for sample in completion.samples:
        starts = [start for _, start in sample.weight_versions] + [len(sample.token_ids)]
        for (version, start), stop in zip(sample.weight_versions, starts[1:], strict=True):
            found.append((version, list(sample.token_ids[start:stop])))
    return found


def measured(deployment: Deployment, metric: str) -> list[float]:
    """The values of a metric in all processes."""
    values = []
    for port in range(deployment.metrics_port, deployment.metrics_port + 5):
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as reply:
            lines = reply.read().decode().splitlines()
        values += [float(line.split()[-1]) for line in lines if line.startswith(metric)]
    return values


async def test_a_killed_executor_reports_lost_weights(deployment: Deployment) -> None:
    """They came through shared memory."""
    loaded = dict(reference.model().state_dict())
    prompt = reference.tokenizer().encode("12 + 30 =")
    first = {"prompt": "12 + 30 =", "sampling": {"temperature": 0, "max_tokens": 8}}
    with SharedWeights(oracle.announcing(loaded, 7)) as shared:
        async with asyncio.timeout(LIMIT_S), BusClient.connect(deployment.bus) as client:
            await until_ready(client, 1)
            assert await client.update_weights(shared.source, version=7) == 7
            # Afterwards, the prefix cache must not give KV of version 7.
            assert stamped(await client.complete(first)) == [(7, [oracle.token_of(7)] * 8)]
            await kill_executor(client, 1)
            ((version, tokens),) = stamped(await client.complete(first))
            assert (version, tokens) == (0, reference.generate(prompt, 8))
            assert await asyncio.to_thread(deployment.told_by, "weights", "version") == "0\n"
            status = json.loads(await asyncio.to_thread(deployment.told_by, "status", "--json"))
            load = status["lanes"][0]["stages"]["executor"]["load"]
            assert (load["weight_version"], load["behind_version"]) == (0, 7)
            assert "behind version 7" in " ".join(
                (await asyncio.to_thread(deployment.told_by, "status")).split()
            )
            assert "weights_behind" in deployment.log.read_text()
            assert 7.0 in await asyncio.to_thread(measured, deployment, "nano_weight_behind")
            assert await client.update_weights(shared.source, version=8) == 8
            assert stamped(await client.complete(first)) == [(8, [oracle.token_of(7)] * 8)]


async def test_a_killed_executor_ends_the_wait_for_its_update(deployment: Deployment) -> None:
    """Before, it has weights that came through shared memory, and afterwards those of the model."""
    never_sent = GroupWeights("weights", (TensorMeta("model.norm.weight", "float32", (128,)),))
    with WeightsGroup("127.0.0.1:0", 2, timeout_s=LIMIT_S) as group:
        async with asyncio.timeout(LIMIT_S), BusClient.connect(deployment.bus) as client:
            await until_ready(client, 1)
            before = await client.weight_version()
            await client.join_weights_group("weights", group.address, 2)
            update = asyncio.create_task(client.update_weights(never_sent, timeout_s=10 * LIMIT_S))
            asking = asyncio.create_task(client.weight_version())
            assert await asking == before  # it has got as far as that
            assert not update.done()
            await kill_executor(client, 1)
            with raises("no_answer", kind=BusError):
                await update
            assert await client.weight_version() == 0


@pytest.mark.soak(only=True)
async def test_killed_executors_catch_up_from_the_log(redis_url: str, tmp_path: Path) -> None:
    """Two replicas, after deltas that came in messages: whichever is killed, the lane has one
    version, and a token has its weights."""
    loaded = {name: each.bfloat16() for name, each in reference.model().state_dict().items()}
    logged = {"engine.weight_log": str(tmp_path / "weights"), "engine.weight_log_snapshot_every": 3}
    request = {"prompt": "12 + 30 =", "sampling": {"temperature": 0, "max_tokens": 8}}
    with up(redis_url, tmp_path / "log", 2, **logged) as deployment:
        async with asyncio.timeout(LIMIT_S), BusClient.connect(deployment.bus) as client:
            await until_ready(client, 2)
            before = loaded
            for version in range(1, 9):
                new = oracle.announcing(loaded, version)
                delta = WeightDelta.between(before, new, base_version=version - 1)
                assert await client.update_weights(delta) == version
                await kill_executor(client, 2, ("executor", "executor.1")[version % 2])
                assert await client.weight_version() == version, "the least of both"
                for found in await asyncio.gather(*(client.complete(request) for _ in range(4))):
                    assert stamped(found) == [(version, [oracle.token_of(version)] * 8)]
                before = new
            assert await client.update_weights(PastWeights(1)) == version + 1
            found = await client.complete(request)
            assert stamped(found) == [(version + 1, [oracle.token_of(1)] * 8)]
    versions = [each.version for each in WeightLog(tmp_path / "weights").versions()]
    assert versions == [*range(version + 2)]
