"""The deployments of chaos_days.py, and what happens in each."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import chaos
import mixed_requests
import redis.asyncio
from chaos_day import STOPPED_S, Day, stopped
from chaos_one_server import OneServer
from chaos_rig import STAGES, Deployment, RedisServer, patiently
from harness import descendants, stop
from interfaces import BLOCKED, INTERFACES, SECOND
from soak_watch import role_of

from nano_inference import BusClient
from nano_inference.config import BusConfig, PolicyConfig
from nano_inference.gateway.policy.administration import Administration
from nano_inference.gateway.policy.backend import open_backend
from nano_inference.gateway.policy.store import PolicyStore

sys.path.append(str(Path(__file__).parent.parent))
from tests.servers import SERVICE, cluster, sentinel_group, until


class WithSentinel(Day):
    """A master and its replica, which three sentinels watch."""

    KINDS = ("Sentinel: master killed", "Sentinel: failover by hand", "Sentinel: one killed")
    all_interfaces = tuple(interface for interface in INTERFACES if interface != "redis")

    async def start_server(self) -> None:
        self.group = await self.stack.enter_async_context(sentinel_group(self.folder / "servers"))
        self.url = self.group.url

    async def sentinel_master_killed(self) -> None:
        master = await self.group.master()
        async with killed(master):
            await until(lambda: self._is_other(master), "a new master")
        await self._settled()

    async def sentinel_failover_by_hand(self) -> None:
        master = await self.group.master()
        plain = self.group.sentinels[0].plain
        await patiently(lambda: plain.execute_command("SENTINEL FAILOVER", SERVICE))
        await until(lambda: self._is_other(master), "a new master")
        await self._settled()

    async def sentinel_one_killed(self) -> None:
        sentinel = self.rng.choice(self.group.sentinels[1:])
        sentinel.kill()
        await asyncio.sleep(2)
        await sentinel.start()

    async def _is_other(self, old: Any) -> bool:
        return await self.group.master() is not old

    async def _settled(self) -> None:
        """Wait until the old master follows the new one."""

        async def follows() -> bool:
            master = await self.group.master()
            roles = [await node.plain.role() for node in self.group.nodes if node is not master]
            return all(role[0] == "slave" and role[3] == "connected" for role in roles)

        await until(follows, "replication")


class InCluster(Day):
    """Three masters with a replica each."""

    KINDS = ("cluster: slots moved", "cluster: master killed")
    all_interfaces = tuple(interface for interface in INTERFACES if interface != "redis")

    async def start_server(self) -> None:
        folder = self.folder / "servers"
        self.nodes = await self.stack.enter_async_context(cluster(folder, replicas=True))
        self.url = self.nodes.url
        self._killed: set[int] = set()

    async def _masters(self) -> list[Any]:
        found = []
        for node in (*self.nodes.masters, *self.nodes.replicas):
            with contextlib.suppress(redis.exceptions.RedisError, OSError):
                if (await node.plain.role())[0] == "master":
                    found.append(node)
        return found

    async def cluster_slots_moved(self) -> None:
        """Move the slots of our keys to another master, a third of all at once."""
        masters = await self._masters()
        giver, taker = self.rng.sample(masters, 2)
        name = await taker.plain.execute_command("CLUSTER MYID")
        shards = await giver.plain.execute_command("CLUSTER SLOTS")
        mine = [each for each in shards if int(each[2][1]) == giver.port]
        if not mine:
            return
        first, last = self.rng.choice(mine)[:2]
        middle = (int(first) + int(last)) // 2
        move = ("CLUSTER MIGRATESLOTS SLOTSRANGE", first, middle, "NODE", name)
        await giver.plain.execute_command(*move)

        async def moved() -> bool:
            shards = await taker.plain.execute_command("CLUSTER SLOTS")
            return any(
                int(each[0]) <= middle <= int(each[1]) and int(each[2][1]) == taker.port
                for each in shards
            )

        await until(moved, "moved slots")

    async def cluster_master_killed(self) -> None:
        async def replaced() -> bool:
            return len(await self._masters()) == 3

        async def follows() -> bool:
            role = await victim.plain.role()
            return role[0] == "slave" and role[3] == "connected"

        victim = self.rng.choice(await self._masters())
        async with killed(victim):
            await until(replaced, "a failover")
        # Without its replica the shard could not lose its new master.
        await until(follows, "replication")


@contextlib.asynccontextmanager
async def killed(server: Any) -> AsyncIterator[None]:
    """Kill a server; start it again at the end, even if no failover came."""
    server.kill()
    try:
        yield
    finally:
        await server.start()


class OnPlainServer(Day):
    """One Redis server, to which nothing happens."""

    async def start_server(self) -> None:
        server = RedisServer(self.folder / "data")
        await server.start()
        self.stack.callback(server.kill)
        self.url = server.url

    def plain_client(self) -> redis.asyncio.Redis:
        return redis.asyncio.Redis.from_url(self.url, decode_responses=True, protocol=3)


class Ranks(OnPlainServer):
    """A model over two ranks; one replica."""

    KINDS = ("rank killed", "rank stopped", "first rank killed", "first rank stopped")
    without = ("images", "adapter")
    settings: ClassVar[dict[str, object]] = {
        **chaos.SETTINGS,
        **chaos.RANK_SETTINGS,
        "engine.max_model_len": 512,
        "bus.prefix": "nano-benchmark-days",
        "engine.model_path": "tiny",
        "engine.tensor_parallel": 2,
    }

    async def rank_killed(self) -> None:
        await self.deployment.hit_rank(signal.SIGKILL, self.rng)

    async def rank_stopped(self) -> None:
        await self.deployment.hit_rank(signal.SIGSTOP, self.rng)

    async def first_rank_killed(self) -> None:
        await self.deployment.kill("executor")

    async def first_rank_stopped(self) -> None:
        await self.deployment.kill("executor", signal.SIGSTOP)


class TwoLanes(OnPlainServer):
    """Two lanes of one replica each; a lane that is silent for three seconds loses its requests."""

    KINDS = ("lane stopped for ten seconds", "admission stopped for ten seconds", "lane killed")
    settings: ClassVar[dict[str, object]] = {
        **mixed_requests.SETTINGS,
        "bus.prefix": "nano-benchmark-days",
        "admission.lease_s": 3.0,
    }

    def start_stages(self, settings: dict[str, object]) -> None:
        self.lanes: dict[str, Any] = {}
        for lane in "ab":
            self._start_lane(lane)
        self.stack.push_async_callback(self._stop_lanes)
        self.deployment = self

    def _start_lane(self, lane: str) -> None:
        settings = {**self.settings_now, "bus.lane": lane}
        self.lanes[lane] = Deployment(self.url, self.folder / f"up-{lane}.log", settings)

    async def _stop_lanes(self) -> None:
        for deployment in self.lanes.values():
            await asyncio.to_thread(stop, deployment.process)

    @property
    def process(self) -> Any:
        """The process that `chaos_rig.bounded` watches: lane b is never killed."""
        return self.lanes["b"].process

    async def lane_stopped_for_ten_seconds(self) -> None:
        """The other lane takes over its requests; what it writes when it is back is refused."""
        lane = self.rng.choice("ab")
        await stopped(descendants(self.lanes[lane].process.pid), STOPPED_S)

    async def admission_stopped_for_ten_seconds(self) -> None:
        """The rest of the lane goes on writing to requests that it has lost."""
        pids = descendants(self.lanes[self.rng.choice("ab")].process.pid)
        await stopped([pid for pid in pids if role_of(pid, "") == "admission"], STOPPED_S)

    async def lane_killed(self) -> None:
        """Kill all processes of lane a at once, and start it anew."""
        up = self.lanes["a"].process
        for pid in descendants(up.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        up.wait()
        await asyncio.sleep(self.rng.uniform(3, 6))
        self._start_lane("a")

    async def look(self) -> None:
        """Note how many requests lanes have taken over."""
        text = "".join((self.folder / f"up-{lane}.log").read_text() for lane in "ab")
        taken = re.findall(r'"requests": (\d+), "event": "took_over_from_another_lane"', text)
        self.remarks.append(f"requests taken over from another lane: {sum(map(int, taken))}")


class Chats(OnPlainServer):
    """The features that gateways add to a request: tools, reasoning, guardrails, background
    responses. Two gateways with access control; a model whose template has tools and reasoning.
    """

    KINDS = (*(f"chats: {stage} killed" for stage in STAGES), "chats: gateway killed")
    without = ("images", "adapter", "embedding", "leaving")
    also = ("tool", "reasoning", "guardrail", "background")
    settings: ClassVar[dict[str, object]] = {
        **Day.settings,
        "engine.model_path": "tiny",
        "engine.model_aliases": f'["{SECOND}"]',
        "engine.speculation": "auto",
        "policy.backend": "bus",
    }

    async def start_server(self) -> None:
        """And write the key and the guardrails, which gateways read when they start."""
        await super().start_server()
        config = BusConfig(url=self.url, prefix=str(self.settings["bus.prefix"]))
        async with BusClient.connect(config) as client:
            backend = open_backend(PolicyConfig(backend="bus"), client.bus.store.policy)
            administration = Administration(PolicyStore(backend))
            key = await administration.create_key({"name": "days", "scopes": ["generate"]})
            await administration.set_guardrails({"literals": [BLOCKED]})
        self.key = key["key"]

    def fault(self, kind: str) -> Callable[[], Awaitable[None]]:
        role = kind.removeprefix("chats: ").removesuffix(" killed")
        if role == "gateway":
            return self.gateway_killed
        return partial(self.signal, role, signal.SIGKILL)


DEPLOYMENTS: dict[str, type[Day]] = {
    "redis": OneServer,
    "lanes": TwoLanes,
    "sentinel": WithSentinel,
    "cluster": InCluster,
    "ranks": Ranks,
    "chats": Chats,
}
