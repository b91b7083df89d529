"""Hosts on one machine: network namespaces whose packets pass through this program.

Each host has a TUN device whose other end is here, so delay, loss and cuts in one direction need no
kernel modules. Linux, root, and iproute2.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import random
import struct
import subprocess
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from harness import engine_command

CENTRE = "centre"
"""The host of this program and of Redis: the namespace that it runs in."""

_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_MTU = 32_000
"""Large packets, since each one passes through Python."""


@dataclass
class Wire:
    """One direction between two hosts."""

    is_cut: bool = False
    delay_s: float = 0.0
    loss: float = 0.0


class Network:
    """Hosts in one subnet, and the wires between them.

    Attributes:
        wires: By sender and receiver.
        dropped: Packets that a fault has dropped.
    """

    def __init__(self, *hosts: str, seed: int = 0) -> None:
        self.hosts = (CENTRE, *hosts)
        self.wires = {(a, b): Wire() for a in self.hosts for b in self.hosts if a != b}
        self.dropped = 0
        self._rng = random.Random(seed)
        self._devices: dict[str, int] = {}
        self._names = {socket_address(self.address(host)): host for host in self.hosts}

    def address(self, host: str) -> str:
        return f"10.77.{os.getpid() % 250}.{1 + self.hosts.index(host)}"

    def namespace(self, host: str) -> str:
        return f"nano-{os.getpid()}-{host}"

    async def __aenter__(self) -> Self:
        for index, host in enumerate(self.hosts):
            device = f"nano{os.getpid() % 100_000}-{index}"
            descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
            self._devices[host] = descriptor
            request = struct.pack("16sH", device.encode(), _IFF_TUN | _IFF_NO_PI)
            fcntl.ioctl(descriptor, _TUNSETIFF, request)
            within: tuple[str, ...] = ()
            if host != CENTRE:
                namespace = self.namespace(host)
                _ip("netns", "add", namespace)
                _ip("link", "set", device, "netns", namespace)
                within = ("-n", namespace)
                _ip(*within, "link", "set", "lo", "up")
            _ip(*within, "addr", "add", f"{self.address(host)}/24", "dev", device)
            _ip(*within, "link", "set", device, "mtu", str(_MTU), "up")
            asyncio.get_running_loop().add_reader(descriptor, self._pass_on, host)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        for host, descriptor in self._devices.items():
            asyncio.get_running_loop().remove_reader(descriptor)
            if host != CENTRE:
                _ip("netns", "delete", self.namespace(host), check=False)
            os.close(descriptor)
        self._devices.clear()

    def heal(self) -> None:
        """Undo all faults."""
        for wire in self.wires.values():
            wire.is_cut, wire.delay_s, wire.loss = False, 0.0, 0.0

    def start(
        self, host: str, log: Path, *command: object, clock: str = "", **settings: object
    ) -> subprocess.Popen[bytes]:
        """Start `nano-inference` on a host, with process ids of its own; it ends with this program.

        Args:
            clock: What its clock is ahead, as libfaketime writes it; the monotonic clock is right.
        """
        prefix = ["ip", "netns", "exec", self.namespace(host)]
        prefix += ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
        environment = dict(os.environ)
        if clock:
            environment |= {"LD_PRELOAD": faketime(), "FAKETIME": clock, "DONT_FAKE_MONOTONIC": "1"}
            environment["FAKETIME_DONT_FAKE_MONOTONIC"] = "1"
        with log.open("ab") as output:
            return subprocess.Popen(
                [*prefix, *engine_command(*command, settings=settings)],
                stdout=output,
                stderr=output,
                env=environment,
            )

    def _pass_on(self, sender: str) -> None:
        while True:
            try:
                packet = os.read(self._devices[sender], 1 << 16)
            except (BlockingIOError, KeyError):
                return
            receiver = self._names.get(packet[16:20]) if packet[0] >> 4 == 4 else None
            if receiver is None or receiver == sender:
                continue
            wire = self.wires[sender, receiver]
            if wire.is_cut or (wire.loss and self._rng.random() < wire.loss):
                self.dropped += 1
            elif wire.delay_s:
                loop = asyncio.get_running_loop()
                loop.call_later(wire.delay_s, self._deliver, receiver, packet)
            else:
                self._deliver(receiver, packet)

    def _deliver(self, receiver: str, packet: bytes) -> None:
        try:
            os.write(self._devices[receiver], packet)
        except (BlockingIOError, KeyError):
            self.dropped += 1


def faketime() -> str:
    """Return the library of Debian's package `faketime`."""
    found = sorted(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"))
    if not found:
        raise RuntimeError("clocks that differ need libfaketime: apt-get install faketime")
    return str(found[0])


def socket_address(address: str) -> bytes:
    return bytes(map(int, address.split(".")))


def _ip(*arguments: str, check: bool = True) -> Any:
    return subprocess.run(["ip", *arguments], check=check, capture_output=not check)
