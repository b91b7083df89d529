"""How the processes of `up` begin: as forks of warm processes, which all models share."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal

from ..config import split_role
from .children import Child, ForkServer, ForkServerLost, python, spawn
from .watchdog import Watchdog


class Forks:
    """Starts children by their roles; the executors have a fork server for themselves, since only
    they have torch."""

    def __init__(
        self,
        roles: Iterable[str],
        start_method: Literal["forkserver", "spawn"],
        environment: Mapping[str, str] | None,
        say: Callable[[str], None],
    ) -> None:
        """Args: what there will be, and the environment of all (None: this process's own)."""
        self._environment = environment
        self._say = say
        self._servers: dict[str, ForkServer] = {}
        # Each child has a session of its own, and so a process group, with all that it has started.
        self._watchdog = Watchdog()
        if start_method == "spawn" or sys.platform != "linux":
            return
        stages = dict.fromkeys(split_role(role)[0] for role in roles)
        alone = ForkServer(("executor",), environment, self._watchdog)
        others = [stage for stage in stages if stage != "executor"]
        together = ForkServer(others, environment, self._watchdog)
        self._servers = {stage: alone if stage == "executor" else together for stage in stages}

    async def start(self, role: str, arguments: Sequence[str]) -> Child:
        """Runs `nano-inference` with these arguments, for this role."""
        if server := self._servers.get(split_role(role)[0]):
            try:
                return await server.start(arguments)
            except ForkServerLost as error:
                self._say(f"{role} can't be forked ({error}); starting it as a program of its own")
        child = await spawn([*python(), "nano_inference", *arguments], self._environment)
        self._watchdog.add(-child.pid)
        return child

    def ended(self, child: Child) -> None:
        """Has to be told of each child that was waited for."""
        self._watchdog.remove(-child.pid)

    def close(self) -> None:
        """Ends what processes are forked from; they go on."""
        for server in self._servers.values():
            server.close()
        self._watchdog.close()
