"""What the clients of a cluster know about its commands."""

from __future__ import annotations

from typing import Any

from redis._parsers import AsyncCommandsParser
from redis.asyncio.cluster import ClusterNode


class KnownCommands(AsyncCommandsParser):
    """Where the keys of each command are, as one of the servers says; all clients share it.

    By itself each client of a cluster asks whenever it connects, in the middle of a failover too:
    an answer of 100 kB, which takes 10 ms to read.
    """

    def __init__(self, known: dict[str, Any]) -> None:
        """Share `known`, the table of commands, with other clients; empty at first."""
        super().__init__()
        self.commands = known

    async def initialize(self, node: ClusterNode | None = None) -> None:
        """Read the commands from a server, unless another client has; always without a `node`."""
        if node is not None:
            self.node = node
            if self.commands:
                return
        known = self.commands
        await super().initialize(node)
        known.update(self.commands)
        self.commands = known
