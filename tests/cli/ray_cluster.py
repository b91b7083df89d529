"""A Ray cluster on this machine: a head and other nodes, each a raylet with its own processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from .servers import free_port

LIMIT_S = 300.0


class Actor:
    """An actor as `ray list actors` shows it.

    Attributes:
        role: The end of its name.
        state: State of Ray, such as "ALIVE" and "RESTARTING".
        pid: Process id of its worker; 0 without one.
    """

    def __init__(self, shown: dict[str, Any]) -> None:
        self.role = shown["name"].rpartition("/")[2]
        self.state = shown["state"]
        self.pid = int(shown["pid"] or 0)
        self.restarts = int(shown.get("num_restarts") or 0)


class Cluster:
    """Three nodes, the first of which is the head.

    Attributes:
        address: Address of the head.
    """

    def __init__(self, programs: Path, folder: Path, cpus: int = 8) -> None:
        """Args: the folder of Ray's programs; a short path, since it has sockets; CPUs that Ray
        counts on each node, of which one is to have room for all actors."""
        self._programs, self._folder, self._cpus = programs, folder, cpus
        self._dashboard = free_port()
        self.address = f"127.0.0.1:{free_port()}"
        self.nodes: list[subprocess.Popen[bytes]] = []
        self._environment = os.environ | {
            "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
            # By itself Ray runs workers at the lowest priority but four.
            "RAY_worker_niceness": "0",
            # It gives nodes 30 s to start.
            "RAY_raylet_start_wait_time_s": "120",
            "RAY_DISABLE_DOCKER_CPU_WARNING": "1",
        }

    def start(self) -> None:
        head = ["--head", "--port", self.address.rpartition(":")[2], "--temp-dir", self._folder]
        self._start(*head, "--include-dashboard", "true", "--dashboard-port", self._dashboard)
        eventually(lambda: self.ran("status", "--address", self.address).returncode == 0, "a head")
        for _ in range(2):
            self.add()

    def add(self) -> None:
        """Start another node."""
        before = self.num_nodes()
        self._start("--address", self.address)

        def there() -> bool:
            if self.nodes[-1].poll() is not None:  # on a busy machine Ray's own limits may pass
                kill_all(self.nodes.pop().pid)
                self._start("--address", self.address)
            return self.num_nodes() > before

        eventually(there, "a node")

    def num_nodes(self) -> int:
        """The number of living nodes."""
        ran = self.ran("status", "--address", self.address)
        active = ran.stdout.partition("Active:")[2].partition("Pending:")[0]
        return active.count("node_")

    def _start(self, *options: object) -> None:
        own = ["--block", "--node-ip-address", "127.0.0.1", "--num-cpus", str(self._cpus)]
        own += ["--object-store-memory", "80000000", "--disable-usage-stats"]
        command = [str(self._programs / "ray"), "start", *map(str, options), *own]
        with (self._folder.parent / "ray.log").open("ab") as log:
            process = subprocess.Popen(
                command, env=self._environment, stdout=log, stderr=log, start_new_session=True
            )
        self.nodes.append(process)

    def run(self, *arguments: str, log: Path) -> subprocess.Popen[bytes]:
        """Start `nano-inference` where Ray is."""
        command = [str(self._programs / "python"), "-m", "nano_inference", *arguments]
        with log.open("ab") as output:
            return subprocess.Popen(
                command, env=self._environment, stdout=output, stderr=output, start_new_session=True
            )

    def ran(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run `ray` to its end."""
        command = [str(self._programs / "ray"), *arguments]
        return subprocess.run(
            command, env=self._environment, capture_output=True, text=True, timeout=LIMIT_S
        )

    def actors(self) -> dict[str, Actor]:
        """The actors by role; empty while the dashboard does not answer."""
        url = f"http://127.0.0.1:{self._dashboard}"
        ran = self.ran("list", "actors", "--address", url, "--format", "json", "--detail")
        with suppress(json.JSONDecodeError):
            shown = [Actor(each) for each in json.loads(ran.stdout) if each["state"] != "DEAD"]
            return {actor.role: actor for actor in shown}
        return {}

    def node_of(self, pid: int) -> int:
        """Return which node a process belongs to."""
        roots = [node.pid for node in self.nodes]
        while pid not in roots:
            pid = parent_of(pid)
        return roots.index(pid)

    def raylet(self, node: int) -> int:
        """Return the process id of a node's raylet."""
        (found,) = [
            pid for pid in descendants(self.nodes[node].pid) if is_program(pid, "raylet/raylet")
        ]
        return found

    def kill_node(self, node: int) -> None:
        """SIGKILL its raylet and all processes that it has started, as when it loses power."""
        kill_all(self.nodes[node].pid)
        self.nodes[node].wait()

    def close(self) -> None:
        for node in reversed(self.nodes):
            if node.poll() is None:
                kill_all(node.pid)
                node.wait()


def eventually(holds: Callable[[], Any], what: str, limit_s: float = LIMIT_S) -> Any:
    """Wait until something holds, and return it."""
    end = time.monotonic() + limit_s
    while not (found := holds()):
        assert time.monotonic() < end, f"never came: {what}"
        time.sleep(0.1)
    return found


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def descendants(pid: int) -> list[int]:
    """All processes below one."""
    children: dict[int, list[int]] = {}
    for each in Path("/proc").iterdir():
        if each.name.isdecimal():
            with suppress(OSError):
                children.setdefault(parent_of(int(each.name)), []).append(int(each.name))
    found, left = [], [pid]
    while left:
        more = children.get(left.pop(), [])
        found += more
        left += more
    return found


def is_program(pid: int, name: str) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text().partition("\0")[0].endswith(name)
    return False


def kill_all(pid: int) -> None:
    """SIGKILL a process and all below it: first stopped, so that none starts another."""
    every = [pid, *descendants(pid)]
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for each in every:
            with suppress(ProcessLookupError):
                os.kill(each, number)


@contextmanager
def cluster(programs: Path, folder: Path) -> Iterator[Cluster]:
    """Run the cluster's nodes."""
    made = Cluster(programs, folder)
    try:
        made.start()
        yield made
    finally:
        made.close()
