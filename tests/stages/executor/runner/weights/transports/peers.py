"""Starts and stops trainers that are programs."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

from nano_inference.bus.weights import GroupWeights
from nano_inference.stages.executor.runner.weights.transports.layout import meta_of

from ......programs import Program


def free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


class Peer(Program):
    """`peer.py`, rank 0 of a group, which is killed at the end of the block."""

    def __init__(self, group: str = "weights", world_size: int = 2) -> None:
        self.group = group
        self.address = free_address()
        program = Path(__file__).with_name("peer.py")
        super().__init__(program, self.address, str(world_size), group)

    def tell(self, command: str, file: Path) -> None:
        self.stdin.write(f"{command} {file}\n")
        self.stdin.flush()

    def hear(self) -> str:
        """The next thing it has done."""
        return self.output.readline().strip()

    def source(self, file: Path) -> GroupWeights:
        """The description of a file that it sends."""
        return described(self.group, load_file(file))

    def hang(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)


def described(group: str, tensors: Mapping[str, Tensor]) -> GroupWeights:
    """The message of a trainer like slime, which broadcasts tensors one by one."""
    return GroupWeights(group, tuple(meta_of(name, each) for name, each in sorted(tensors.items())))
