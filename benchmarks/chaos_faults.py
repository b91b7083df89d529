"""The deployments of chaos_days.py, and what happens in each."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import re
import resource
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Self

import chaos
import chaos_mixed
import redis.asyncio
from chaos_http import GatewayProcess
from chaos_rig import Deployment, Proxy, RedisServer, patiently
from harness import descendants, free_port, stop
from hosts_net import faketime
from interfaces import INTERFACES, Interfaces
from soak_watch import role_of

from nano_inference import BusClient
from nano_inference.config import BusConfig

sys.path.append(str(Path(__file__).parent.parent))
from tests.servers import SERVICE, cluster, sentinel_group, until

STAGES = ("admission", "fairness", "batching", "executor", "streaming")
REPLICAS = ("batching", "batching.1", "executor", "executor.1")
STOPPED_S = 10.0
SOCKETS = 350
"""Sockets closed hard by one fault."""
MEMORY = Path("/sys/fs/cgroup/memory")
SLOW_DISK = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <unistd.h>
static int slow(const char *name, int file) {
  if (!access(getenv("SLOW_DISK"), F_OK)) usleep(400000);
  return ((int (*)(int))dlsym(RTLD_NEXT, name))(file);
}
int fdatasync(int file) { return slow("fdatasync", file); }
int fsync(int file) { return slow("fsync", file); }
"""
"""A library for the server: each fsync takes 0.4 s more while a file exists."""


class Day:
    """A deployment, and its faults by kind.

    Attributes:
        faults: By kind; each returns once it is over.
        process: `up`.
        remarks: What was unexpected or particular.
        without: Kinds of requests that it doesn't serve.
        all_interfaces: The interfaces that it has.
    """

    KINDS: ClassVar[tuple[str, ...]] = ()
    without: ClassVar[tuple[str, ...]] = ()
    all_interfaces: tuple[str, ...] = INTERFACES
    settings: ClassVar[dict[str, object]] = {
        **chaos_mixed.SETTINGS,
        "bus.prefix": "nano-benchmark-days",
        "pipeline.replicas": 2,
    }

    def __init__(self, folder: Path, rng: random.Random) -> None:
        self.folder, self.rng = folder, rng
        self.stack = contextlib.AsyncExitStack()
        self.gateways: list[GatewayProcess] = []
        self.grpc: list[int] = []
        self.url = ""
        self.deployment: Any = None
        self.remarks: list[str] = []
        self.faults: dict[str, Callable[[], Awaitable[None]]] = {
            kind: getattr(self, kind.replace(": ", "_").replace(",", "").replace(" ", "_").lower())
            for kind in self.KINDS
        }

    @property
    def process(self) -> Any:
        return self.deployment.process

    async def __aenter__(self) -> Self:
        chaos_mixed.write_adapter(self.folder / "adapter")
        settings = dict(self.settings)
        if "adapter" not in self.without:
            adapters = {chaos_mixed.ADAPTER: str(self.folder / "adapter")}
            settings["engine.adapters"] = json.dumps(adapters)
        self.settings_now = settings
        try:
            await self.start_server()
            self.start_stages(settings)
            for index in range(2):
                port = free_port()
                log = self.folder / f"gateway-{index}.log"
                more = {**settings, "gateway.grpc_port": port}
                gateway = GatewayProcess(self.url, log, more)
                self.stack.callback(gateway.kill)
                self.gateways.append(gateway)
                self.grpc.append(port)
                with self.environment():
                    await gateway.start()
            await self.until_ready()
        except BaseException:
            await self.stack.aclose()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        await self.stack.aclose()

    def start_stages(self, settings: dict[str, object]) -> None:
        self.deployment = Deployment(self.url, self.folder / "up.log", settings)
        self.stack.push_async_callback(asyncio.to_thread, stop, self.deployment.process)

    async def start_server(self) -> None:
        """Start what `url` names."""
        raise NotImplementedError

    @contextlib.contextmanager
    def environment(self) -> Iterator[None]:
        """Within it gateways get variables that they need."""
        yield

    def interfaces(self) -> Interfaces:
        """Return the ways in."""
        return Interfaces(
            self.client,
            self.plain_client(),
            str(self.settings["bus.prefix"]),
            [gateway.url for gateway in self.gateways],
            [f"127.0.0.1:{port}" for port in self.grpc],
            str(self.settings["engine.model_path"]),
        )

    def plain_client(self) -> redis.asyncio.Redis | None:
        return None

    async def until_ready(self, limit_s: float = 600.0) -> None:
        """Wait until all stages are ready."""
        config = BusConfig(url=self.url, prefix=str(self.settings["bus.prefix"]))
        self.client = await self.stack.enter_async_context(BusClient.connect(config))
        wanted = {*STAGES, *(REPLICAS if self.settings.get("pipeline.replicas") == 2 else ())}
        end = time.monotonic() + limit_s
        while time.monotonic() < end and self.process.poll() is None:
            with contextlib.suppress(Exception):
                reports = await self.client.reports()
                if wanted <= {each.stage for each in reports if each.state == "ready"}:
                    return
            await asyncio.sleep(0.5)
        raise RuntimeError(f"{type(self).__name__} is not ready")

    async def look(self) -> None:
        """Note at the end what was unexpected or particular."""

    async def find(self, role: str) -> int:
        """Return the process of a stage, once there is one."""
        while True:
            for pid in descendants(self.process.pid):
                if role_of(pid, "") == role:
                    return pid
            await asyncio.sleep(0.05)

    async def signal(self, role: str, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(await self.find(role), number)

    async def gateway_of(self, index: int) -> GatewayProcess:
        """Return a gateway that runs."""
        gateway = self.gateways[index]
        if gateway.process is None or gateway.process.poll() is not None:
            with self.environment():
                await gateway.start()
        return gateway


class OneServer(Day):
    """One Redis server on a disk of its own, behind a proxy; gateways' clocks can jump."""

    KINDS = (
        "stage killed",
        "replica killed",
        "stage terminated",
        "gateway killed",
        "gateway terminated",
        "Redis killed",
        "connections cut",
        "partition, one way",
        "partition, both ways",
        "stopped for ten seconds",
        "disk full",
        "disk slow",
        "clock jump",
        "out of memory",
        "descriptors used up",
        "sockets closed hard",
    )

    async def start_server(self) -> None:
        disk = self.folder / "disk"
        disk.mkdir()
        _run("mount", "-t", "tmpfs", "-o", "size=400m", "nano-days", str(disk))
        self.stack.callback(subprocess.run, ["umount", "-l", str(disk)])
        self.slow, self.clock = self.folder / "slow", self.folder / "clock"
        source, library = self.folder / "slow.c", self.folder / "slow.so"
        source.write_text(SLOW_DISK)
        _run("cc", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl")
        self.clock.write_text("+0\n")
        self.disk = disk
        self.server = RedisServer(disk / "data")
        self.server.environment = {
            **os.environ,
            "LD_PRELOAD": str(library),
            "SLOW_DISK": str(self.slow),
        }
        await self.server.start()
        self.stack.callback(self.server.kill)
        self.proxy = Proxy(self.server.port)
        await self.proxy.start()
        self.stack.push_async_callback(self.proxy.aclose)
        self.url = self.proxy.url

    @contextlib.contextmanager
    def environment(self) -> Iterator[None]:
        more = {
            "LD_PRELOAD": faketime(),
            "FAKETIME_TIMESTAMP_FILE": str(self.clock),
            "FAKETIME_CACHE_DURATION": "1",
            "DONT_FAKE_MONOTONIC": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        }
        os.environ.update(more)
        try:
            yield
        finally:
            for name in more:
                del os.environ[name]

    def plain_client(self) -> redis.asyncio.Redis:
        return redis.asyncio.Redis.from_url(self.server.url, decode_responses=True, protocol=3)

    async def stage_killed(self) -> None:
        await self.signal(self.rng.choice(STAGES), signal.SIGKILL)

    async def replica_killed(self) -> None:
        await self.signal(self.rng.choice(("batching.1", "executor.1")), signal.SIGKILL)

    async def stage_terminated(self) -> None:
        await self.signal(self.rng.choice((*STAGES, "executor.1")), signal.SIGTERM)

    async def gateway_killed(self) -> None:
        index = self.rng.randrange(2)
        (await self.gateway_of(index)).kill()
        await self.gateway_of(index)

    async def gateway_terminated(self) -> None:
        index = self.rng.randrange(2)
        gateway = await self.gateway_of(index)
        await asyncio.to_thread(stop, gateway.process)
        await self.gateway_of(index)

    async def redis_killed(self) -> None:
        self.server.kill()
        await asyncio.sleep(self.rng.uniform(0, 1))
        await self.server.start()

    async def connections_cut(self) -> None:
        self.proxy.cut(self.rng.choice((0.3, 1.0)), self.rng)

    async def partition_one_way(self) -> None:
        await self._stall(self.rng.choice(("requests", "replies")))

    async def partition_both_ways(self) -> None:
        await self._stall("requests", "replies")

    async def _stall(self, *flows: str) -> None:
        for name in flows:
            self.proxy.flows[name].clear()
        await asyncio.sleep(self.rng.uniform(2, 8))
        for name in flows:
            self.proxy.flows[name].set()

    async def stopped_for_ten_seconds(self) -> None:
        pid = await self.find(self.rng.choice((*STAGES, "executor.1")))
        await stopped([pid], STOPPED_S)

    async def disk_full(self) -> None:
        """Fill the server's disk. It ends, since it may confirm nothing more, and is restarted."""
        room = self.disk / "room"
        with contextlib.suppress(OSError), room.open("wb") as file:
            while True:
                file.write(bytes(1 << 20))
        for _ in range(50):
            if self.server.process.poll() is not None:
                break
            await asyncio.sleep(0.1)
        else:
            self.remarks.append("the server survived a full disk")
        room.unlink()
        self.server.kill()
        await self.server.start()

    async def disk_slow(self) -> None:
        self.slow.touch()
        await asyncio.sleep(self.rng.uniform(3, 6))
        self.slow.unlink()

    async def clock_jump(self) -> None:
        """Let the clocks of both gateways jump, up to an hour ahead or back.

        Not those of stages: with libfaketime executors fail to run the compiler at times, and have
        no kernels then, so other bits. chaos_hosts.py has a whole host with another clock.
        """
        self.clock.write_text(f"{self.rng.choice((3600, 300, 2, -2, -300, -3600)):+d}\n")
        await asyncio.sleep(3)

    async def out_of_memory(self) -> None:
        """Put an executor in a memory group with no room, until the kernel kills it.

        What it has stays charged to its old group, so its next new pages are one too many.
        """
        pid = await self.find(self.rng.choice(("executor", "executor.1")))
        group = MEMORY / f"nano-days-{os.getpid()}"
        group.mkdir(exist_ok=True)
        try:
            (group / "cgroup.procs").write_text(str(pid))
            for _ in range(100):
                used = int((group / "memory.usage_in_bytes").read_text())
                with contextlib.suppress(OSError):
                    (group / "memory.limit_in_bytes").write_text(str(max(used - (2 << 20), 1)))
                await asyncio.sleep(0.1)
                if not (group / "cgroup.procs").read_text().strip():
                    return
            self.remarks.append(f"executor {pid} was not killed for its memory")
        finally:
            with contextlib.suppress(OSError):
                (group / "memory.limit_in_bytes").write_text("-1")
            with contextlib.suppress(OSError, ProcessLookupError):
                (MEMORY / "cgroup.procs").write_text(str(pid))
            for _ in range(20):
                with contextlib.suppress(OSError):
                    group.rmdir()
                    break
                await asyncio.sleep(0.1)

    async def descriptors_used_up(self) -> None:
        """Leave a process no descriptor for some seconds."""
        role = self.rng.choice((*STAGES, "gateway"))
        gateway = await self.gateway_of(self.rng.randrange(2))
        pid = gateway.process.pid if role == "gateway" else await self.find(role)
        with contextlib.suppress(OSError):
            limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
            used = len(os.listdir(f"/proc/{pid}/fd"))
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (used, limits[1]))
            if self.rng.random() < 0.5:
                self.proxy.cut(1.0, self.rng)  # so that it needs new ones
            await asyncio.sleep(self.rng.uniform(2, 4))
            resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)

    async def sockets_closed_hard(self) -> None:
        """Reset connections to gateways, before, within and behind a request."""
        await asyncio.to_thread(self._reset_sockets)

    def _reset_sockets(self) -> None:
        body = json.dumps({"prompt": "12 + 30 =", "max_tokens": 100, "stream": True}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n"
        whole = head.encode() + b"Content-Type: application/json\r\n\r\n" + body
        ports = [*(gateway.port for gateway in self.gateways), *self.grpc]
        for number in range(SOCKETS):
            with contextlib.suppress(OSError), socket.socket() as client:
                client.settimeout(2)
                client.connect(("127.0.0.1", ports[number % len(ports)]))
                client.sendall(whole[: self.rng.randrange(len(whole) + 1)])
                if number % 7 == 0:
                    client.sendall(whole)
                    client.recv(1)
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


class WithSentinel(Day):
    """A master and its replica, which three sentinels watch."""

    KINDS = ("Sentinel: master killed", "Sentinel: failover by hand", "Sentinel: one killed")
    all_interfaces = tuple(interface for interface in INTERFACES if interface != "redis")

    async def start_server(self) -> None:
        self.group = await self.stack.enter_async_context(sentinel_group(self.folder / "servers"))
        self.url = self.group.url

    async def sentinel_master_killed(self) -> None:
        master = await self.group.master()
        master.kill()
        await until(lambda: self._is_other(master), "a new master")
        await master.start()
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
        masters = await self._masters()
        victim = self.rng.choice(masters)
        victim.kill()

        async def replaced() -> bool:
            return len(await self._masters()) == 3

        await until(replaced, "a failover")
        await victim.start()
        await asyncio.sleep(2)


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
        **chaos_mixed.SETTINGS,
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
        """What `chaos_rig.bounded` looks at: lane b is never killed."""
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


async def stopped(pids: Sequence[int], seconds: float) -> None:
    """Stop processes for some time."""
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        if number == signal.SIGSTOP:
            await asyncio.sleep(seconds)


DEPLOYMENTS: dict[str, type[Day]] = {
    "redis": OneServer,
    "lanes": TwoLanes,
    "sentinel": WithSentinel,
    "cluster": InCluster,
    "ranks": Ranks,
}


def _run(*command: str) -> None:
    subprocess.run(command, check=True)
