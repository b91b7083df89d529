"""`up --ray` on a real cluster of three nodes: a node is killed, another one is taken for dead
while its processes go on, and the driver is killed.

`test_ray_plan.py` has what needs no cluster.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import select
import shutil
import signal
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from redis import Redis

from ..examples.environments import environment
from ..rig import load, mortal_server
from .ray_cluster import Actor, Cluster, cluster, descendants, eventually

REQUESTS = 200
PREFIX = "nano-ray"
ROLES = {
    *("admission", "fairness", "streaming", "batching", "executor", "batching.1", "executor.1")
}
REPLICA = {"batching.1", "executor.1"}
LIMIT_S = 600.0

pytestmark = [pytest.mark.slow, pytest.mark.soak]


@pytest.fixture(scope="module")
def programs(soak: bool, pytestconfig: pytest.Config) -> Path:
    """The folder of programs of an environment with Ray, which sees our packages too."""
    if not soak:
        pytest.skip("installs packages; run it with --soak")
    cache: pytest.Cache = pytestconfig.cache  # type: ignore[assignment]
    found = Path(os.environ.get("NANO_TEST_RAY") or environment("ray", cache.mkdir("clients")))
    (site,) = found.parent.glob("lib/python*/site-packages")
    ours = sysconfig.get_paths()["purelib"]
    # By this, and not by its path alone, its own .pth files apply: of an editable install.
    (site / "ours.pth").write_text(f"import site; site.addsitedir({ours!r})\n")
    return found


@pytest.fixture
def nodes(programs: Path) -> Iterator[Cluster]:
    folder = Path(tempfile.mkdtemp(prefix="ray", dir="/tmp"))  # paths of sockets are short
    with cluster(programs, folder / "r") as made:
        yield made
    shutil.rmtree(folder, ignore_errors=True)


class Lane:
    """A lane on the cluster, its driver and its load."""

    def __init__(self, nodes: Cluster, url: str, folder: Path) -> None:
        self.nodes, self.url = nodes, url
        self.log = folder / "up.log"
        self.chaos, self._rig = load("chaos"), load("chaos_rig")
        settings = {
            **self.chaos.SETTINGS,
            **self.chaos.RANK_SETTINGS,
            **{"bus.prefix": PREFIX, "engine.tensor_parallel": 2, "pipeline.replicas": 2},
            # Ranks wait for each other, here on two cores.
            "engine.rank_timeout_s": 30.0,
        }
        self.arguments = ["--bus", url, *load("harness").settings_arguments(settings)]
        self.driver = nodes.run("up", "--ray", nodes.address, *self.arguments, log=self.log)
        self.report: dict[str, Any] = {}

    def said(self, text: str) -> bool:
        assert self.driver.poll() is None, self.log.read_text()[-5000:]
        return text in self.log.read_text()

    def actors(self, roles: set[str] = ROLES) -> dict[str, Actor]:
        """All of them, once these and no others are alive."""

        def alive() -> dict[str, Actor]:
            found = self.nodes.actors()
            states = {each.state for each in found.values()}
            return found if set(found) == roles and states == {"ALIVE"} else {}

        return eventually(alive, f"these actors, alive: {sorted(roles)}")

    def pids(self, roles: set[str] = ROLES) -> dict[str, int]:
        """Their workers."""
        return {role: each.pid for role, each in self.actors(roles).items()}

    def load(self, name: str, requests: list[dict[str, Any]]) -> Any:
        return self._rig.Load(self.url, PREFIX, name, requests, 24)

    def replicas(self) -> str:
        """The number of replicas that take part, from admission's report."""
        with Redis.from_url(self.url, decode_responses=True) as redis:
            for _, fields in redis.xrevrange(f"{PREFIX}:stages", count=20):
                for report in json.loads(fields["json"]):
                    if report["stage"] == "admission" and report["state"] == "ready":
                        return str(report["load"]["replicas"])
        return ""

    def process_of(self, actor: Actor, words: str) -> int:
        """The stage's process below an actor's worker."""
        for pid in descendants(actor.pid):
            if words in Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " "):
                return pid
        raise AssertionError(f"{actor.role} runs no process {words}")


async def test_a_pipeline_on_ray_survives_its_nodes_and_its_driver(
    nodes: Cluster, tmp_path: Path
) -> None:
    async with mortal_server(tmp_path / "data", "everysec") as server:
        lane = Lane(nodes, server.url, tmp_path)
        try:
            start = time.monotonic()
            await asyncio.to_thread(eventually, lambda: lane.said("ready"), "a pipeline", LIMIT_S)
            lane.report["started_s"] = round(time.monotonic() - start, 1)
            rng = random.Random(1)
            requests = lane.chaos.chaos_rig.make_requests(REQUESTS, 1, longest=24)
            calm = lane.load("calm", requests)
            async with asyncio.timeout(LIMIT_S):
                await calm.run()
            await a_killed_node(lane, requests, calm, rng)
            await a_node_that_is_taken_for_dead(lane, requests, calm)
            await a_replica_that_runs_elsewhere(lane)
            await a_killed_driver(lane)
        finally:
            lane.driver.kill()
            lane.driver.wait()
            sys.stdout.write(json.dumps(lane.report, indent=1) + "\n")


async def a_killed_node(lane: Lane, requests: list[Any], calm: Any, rng: random.Random) -> None:
    """None of 200 requests is lost, doubled or incomplete, and Ray starts its actors elsewhere."""
    before = lane.actors()
    on = {role: lane.nodes.node_of(actor.pid) for role, actor in before.items()}
    # Each replica is on one node, with its ranks; the head would take Ray itself along.
    assert on["batching"] == on["executor"] != on["batching.1"] == on["executor.1"]
    node = next(number for number in (on["executor"], on["executor.1"]) if number)
    running = lane.load("storm", requests)
    hit = Recovery(running)
    async with asyncio.timeout(LIMIT_S):
        task = asyncio.create_task(running.run())
        await running.until(REQUESTS // 4)
        await hit.happens(lambda: lane.nodes.kill_node(node))
        await task
    result = lane.chaos.compare(requests, running.streams, calm.streams)
    lane.report["killed node"] = {
        "roles": [role for role, number in on.items() if number == node],
        "requests": REQUESTS,
        **{fault: result[fault] for fault in lane.chaos.FAULTS},
        "tokens_again_s": hit.recovered_s,
    }
    assert result["clean"], result
    assert hit.recovered_s is not None
    await asyncio.to_thread(eventually, lambda: lane.replicas() == "2 of 2", "both replicas")
    lane.report["killed node"]["both_replicas_again_s"] = round(time.monotonic() - hit.at_s, 1)
    for role, actor in lane.actors().items():
        moved = on[role] == node
        assert (actor.pid != before[role].pid) == moved, role
        assert lane.nodes.node_of(actor.pid) != node


async def a_node_that_is_taken_for_dead(lane: Lane, requests: list[Any], calm: Any) -> None:
    """Its raylet stops, its processes go on: the stage that Ray starts elsewhere replaces the one
    there, which ends before it takes part in the successor's epoch."""
    nodes = lane.nodes
    before = lane.actors()
    replica = next(
        role for role in ("executor", "executor.1") if nodes.node_of(before[role].pid) != 0
    )
    node = nodes.node_of(before[replica].pid)
    stage = os.pidfd_open(lane.process_of(before[replica], "--stages executor"))
    raylet = nodes.raylet(node)
    number = 80
    running = lane.load("cut", requests[:number])
    hit = Recovery(running)
    async with asyncio.timeout(LIMIT_S):
        task = asyncio.create_task(running.run())
        await running.until(number // 4)
        await hit.happens(lambda: os.kill(raylet, signal.SIGSTOP))
        # It ends although its worker goes on, and Ray can't reach either.
        await asyncio.to_thread(lambda: eventually(lambda: has_ended(stage), "the old one's end"))
        ended_s = round(time.monotonic() - hit.at_s, 1)
        assert exists(before[replica].pid)
        await task
    os.close(stage)
    result = lane.chaos.compare(requests[:number], running.streams, calm.streams[:number])
    lane.report["stopped raylet"] = {
        "requests": number,
        **{fault: result[fault] for fault in lane.chaos.FAULTS},
        "old_stage_ended_s": ended_s,
    }
    assert result["clean"], result
    after = lane.actors()
    # What has been replaced leaves for good, and its successor stays.
    os.kill(raylet, signal.SIGCONT)
    await asyncio.to_thread(eventually, lambda: not exists(before[replica].pid), "the worker's end")
    await asyncio.sleep(5.0)
    assert lane.pids() == {role: each.pid for role, each in after.items()}
    assert after[replica].pid != before[replica].pid


async def a_replica_that_runs_elsewhere(lane: Lane) -> None:
    """Its actors leave, and Ray does not start them again."""
    before = lane.pids()
    options = ["--stages", "batching,executor", "--set", "pipeline.replica=1", *lane.arguments]
    outside = lane.nodes.run("run", *options, log=lane.log.with_name("outside.log"))
    try:
        # All states but DEAD count, and so would a restart.
        kept = {role: pid for role, pid in before.items() if role not in REPLICA}
        assert await asyncio.to_thread(lane.pids, set(kept)) == kept
        await asyncio.to_thread(eventually, lambda: lane.replicas() == "2 of 2", "its successor")
        few = lane.load("elsewhere", lane.chaos.chaos_rig.make_requests(20, 2, longest=20))
        async with asyncio.timeout(LIMIT_S):
            await few.run()
        assert lane.pids(set(kept)) == kept
        assert lane.said("the other replicas continue without it")
    finally:
        outside.kill()
        outside.wait()


async def a_killed_driver(lane: Lane) -> None:
    """It leaves the pipeline as it is, and `down` ends all of it."""
    nodes, roles = lane.nodes, ROLES - REPLICA
    before = lane.pids(roles)
    lane.driver.kill()
    lane.driver.wait()
    few = lane.load("without", lane.chaos.chaos_rig.make_requests(20, 3, longest=20))
    async with asyncio.timeout(LIMIT_S):
        await few.run()
    assert lane.pids(roles) == before
    again = nodes.run("up", "--ray", nodes.address, *lane.arguments, log=lane.log)
    assert await asyncio.to_thread(again.wait, LIMIT_S) == 2
    assert "nano-inference down --ray" in lane.log.read_text()
    prefix = ("--set", f"bus.prefix={PREFIX}")
    ended = nodes.run("down", "--ray", nodes.address, *prefix, log=lane.log)
    assert await asyncio.to_thread(ended.wait, LIMIT_S) == 0
    await asyncio.to_thread(eventually, lambda: not nodes.actors(), "the actors' end")
    status = nodes.ran("status", "--address", nodes.address).stdout
    assert " 0.0/" in status, status


class Recovery:
    """When tokens of requests that a fault hit flow again in a new epoch.

    Attributes:
        at_s: The fault's time.
        recovered_s: From then on; None if none of them needed a new epoch.
    """

    def __init__(self, running: Any) -> None:
        self._running = running
        self._hit: set[int] = set()
        self._epoch = 0
        self.at_s = 0.0
        self.recovered_s: float | None = None
        running.watcher = self._saw

    async def happens(self, fault: Any) -> None:
        self._epoch = await self._running.epoch()
        await asyncio.to_thread(fault)
        self.at_s = time.monotonic()
        self._hit = self._running.in_flight

    def _saw(self, index: int, entry: Any) -> None:
        if self.recovered_s is None and index in self._hit and entry.epoch > self._epoch:
            self.recovered_s = round(entry.at - self.at_s, 1)


def exists(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def has_ended(handle: int) -> bool:
    return bool(select.select([handle], [], [], 0)[0])
