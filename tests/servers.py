"""Groups of real servers: a master and its replica with three sentinels, and a cluster of three."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from redis import exceptions
from redis.asyncio import Redis
from redis.asyncio.cluster import RedisCluster

from .rig import load

LIMIT_S = 40.0
SLOTS = 16384
SERVICE = "main"
# How often sentinels look at servers and tell each other: a tenth to a half of what it is by
# itself. They wait for multiples of it, above all before they make an old master a replica. Only
# a replica of which they heard less than five periods of pings ago becomes a master, and of one
# whose master is gone they hear once a second, whatever is set: with shorter periods every other
# failover finds nobody, and the next one comes six seconds later. And a sentinel that has not
# heard of a failover within four periods of publishing makes the new master a replica again: with
# 0.2 s, one that did not get the processor in time was enough to undo it for good.
QUICK_SENTINEL_MS = {
    "INFO-PERIOD": 1000,
    "PING-PERIOD": 300,
    "ASK-PERIOD": 100,
    "PUBLISH-PERIOD": 1000,
}


chaos_rig = load("chaos_rig")
valkey = chaos_rig.valkey


class Node(chaos_rig.Restartable):
    """One process with its own folder."""

    def __init__(self, program: str, folder: Path, *options: str, sentinel: str = "") -> None:
        """Args: `sentinel` is the configuration of a sentinel, which rewrites its file."""
        super().__init__()
        folder.mkdir(parents=True)
        self.address = f"127.0.0.1:{self.port}"
        self.plain = Redis(port=self.port, protocol=3, decode_responses=True)
        settings = ["--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(folder)]
        self._command = [program, *settings, "--save", "", *options]
        if sentinel:
            file = folder / "sentinel.conf"
            file.write_text(f"port {self.port}\nbind 127.0.0.1\ndir {folder}\n{sentinel}\n")
            self._command = [program, str(file), "--sentinel"]
        self._log = folder / "server.log"

    def _start(self) -> subprocess.Popen[bytes]:
        with self._log.open("ab") as output:
            return subprocess.Popen(self._command, stdout=output, stderr=output)

    async def start(self) -> None:
        self.launch()
        await until(self.plain.ping, f"a server on port {self.port}")

    async def aclose(self) -> None:
        await self.plain.aclose()
        self.kill()


async def until(holds: Callable[[], Awaitable[Any]], what: str) -> Any:
    """The first true answer; an error of the connection is no answer. Fails after `LIMIT_S`."""
    try:
        async with asyncio.timeout(LIMIT_S):
            while True:
                try:
                    answer = await holds()
                except exceptions.RedisError:
                    answer = None
                if answer:
                    return answer
                await asyncio.sleep(0.02)
    except TimeoutError:
        raise AssertionError(f"never came: {what}") from None


def plain_client(url: str) -> Any:
    """Return a client of a server or a cluster, in the form that another program would use."""
    if not url.startswith("redis+cluster://"):
        return Redis.from_url(url)
    host, _, port = url.removeprefix("redis+cluster://").split(",")[0].partition(":")
    return RedisCluster(host=host, port=int(port))


class Sentinels:
    """A master, a replica, and three sentinels that watch them."""

    def __init__(self, nodes: list[Node], sentinels: list[Node]) -> None:
        self.nodes = nodes
        self.sentinels = sentinels
        hosts = ",".join(each.address for each in sentinels)
        self.url = f"redis+sentinel://{hosts}/{SERVICE}"

    async def master(self) -> Node:
        """Whom the first sentinel takes for the master."""
        _, port = await self.sentinels[0].plain.sentinel_get_master_addr_by_name(SERVICE)
        return next(node for node in self.nodes if node.port == int(port))


@asynccontextmanager
async def sentinel_group(folder: Path, program: str = "") -> AsyncIterator[Sentinels]:
    """Starts all, and waits until they know of each other."""
    program = program or valkey()
    async with AsyncExitStack() as stack:

        async def started(node: Node) -> Node:
            stack.push_async_callback(node.aclose)
            await node.start()
            return node

        aof = ("--appendonly", "yes", "--repl-diskless-sync-delay", "0")
        master = await started(Node(program, folder / "a", *aof))
        replica = await started(
            Node(program, folder / "b", *aof, "--replicaof", f"127.0.0.1 {master.port}")
        )
        await until(lambda: _is_linked(replica), "replication")
        watched = f"""sentinel monitor {SERVICE} 127.0.0.1 {master.port} 2
sentinel down-after-milliseconds {SERVICE} 500
sentinel failover-timeout {SERVICE} 3000"""
        sentinels = [
            await started(Node(program, folder / f"s{i}", sentinel=watched)) for i in range(3)
        ]
        for each in sentinels:
            for name, value in QUICK_SENTINEL_MS.items():
                await each.plain.execute_command("SENTINEL DEBUG", name, value)
        for each in sentinels:
            await until(lambda each=each: _knows_all(each), "sentinels that know each other")
        yield Sentinels([master, replica], sentinels)


async def _is_linked(replica: Node) -> bool:
    return (await replica.plain.info("replication"))["master_link_status"] == "up"


async def _knows_all(sentinel: Node) -> bool:
    state = (await sentinel.plain.sentinel_masters())[SERVICE]
    return int(state["num-other-sentinels"]) == 2 and int(state["num-slaves"]) == 1


class Cluster:
    """Three masters, each with a third of the slots, and perhaps a replica of each."""

    def __init__(self, masters: list[Node], replicas: list[Node]) -> None:
        self.masters = masters
        self.replicas = replicas
        self.url = f"redis+cluster://{','.join(each.address for each in masters)}"

    async def keys(self, pattern: str) -> list[set[str]]:
        """Return the keys of each master."""
        return [{key async for key in node.plain.scan_iter(pattern)} for node in self.masters]

    async def has_failed_over(self, place: int) -> bool:
        """Whether a replica is the master in this place, and the other masters know it.

        Until they do, none of them takes the cluster for whole.
        """
        role = await self.replicas[place].plain.role()
        others = [node for which, node in enumerate(self.masters) if which != place]
        count = len(self.masters) + len(self.replicas)
        return role[0] == "master" and all([await _is_whole(node, count) for node in others])


@asynccontextmanager
async def cluster(
    folder: Path, program: str = "", replicas: bool = False
) -> AsyncIterator[Cluster]:
    """Starts the nodes and waits until each takes the cluster for whole."""
    program = program or valkey()
    options = ("--cluster-enabled", "yes", "--cluster-node-timeout", "1000", "--appendonly", "yes")
    options += ("--repl-diskless-sync-delay", "0")
    free_port = load("chaos_rig").free_port
    async with AsyncExitStack() as stack:
        nodes: list[Node] = []
        talks: list[int] = []
        for i in range(6 if replicas else 3):
            # By itself a node would take a port that is larger by 10,000, and may be too large.
            talk = free_port()
            node = Node(program, folder / str(i), *options, "--cluster-port", str(talk))
            talks.append(talk)
            stack.push_async_callback(node.aclose)
            await node.start()
            nodes.append(node)
        masters, others = nodes[:3], nodes[3:]
        for i, node in enumerate(masters):
            bounds = (i * SLOTS // 3, (i + 1) * SLOTS // 3 - 1)
            await node.plain.execute_command("CLUSTER ADDSLOTSRANGE", *bounds)
        for node in nodes[1:]:
            await node.plain.execute_command("CLUSTER MEET", "127.0.0.1", nodes[0].port, talks[0])
        for node in nodes:
            await until(lambda node=node: _is_whole(node, len(nodes)), "a whole cluster")
        for master, replica in zip(masters, others, strict=False):
            name = await master.plain.execute_command("CLUSTER MYID")
            await replica.plain.execute_command("CLUSTER REPLICATE", name)
        for replica in others:
            await until(lambda replica=replica: _is_linked(replica), "replication")
        yield Cluster(masters, others)


async def _is_whole(node: Node, count: int) -> bool:
    info = await node.plain.execute_command("CLUSTER INFO")
    fields = (
        info
        if isinstance(info, dict)
        else dict(line.partition(":")[::2] for line in info.split("\r\n") if line)
    )
    return fields["cluster_state"] == "ok" and int(fields["cluster_known_nodes"]) == count
