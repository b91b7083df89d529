"""Faults of one Redis server, its disk and its connections, and of processes' clocks and memory."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import signal
import socket
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

import redis.asyncio
from chaos_day import STOPPED_S, Day, stopped
from chaos_rig import STAGES, Proxy, RedisServer
from harness import stop
from hosts_net import faketime

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

        Not those of stages: with libfaketime an executor that has to compile its kernels fails at
        times, and computes other bits without them. chaos_hosts.py has a host with another clock.
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
        """Reset connections to gateways, before, within and after a request."""
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


def _run(*command: str) -> None:
    subprocess.run(command, check=True)
