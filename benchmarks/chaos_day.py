"""A deployment of chaos_days.py: stages, two gateways, and what may happen to them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Self

import mixed_requests
import redis.asyncio
from chaos_http import GatewayProcess
from chaos_rig import STAGES, Deployment
from harness import descendants, free_port, stop
from interfaces import INTERFACES, Interfaces
from soak_watch import role_of

from nano_inference import BusClient
from nano_inference.config import BusConfig

REPLICAS = ("batching", "batching.1", "executor", "executor.1")
STOPPED_S = 10.0


class Day:
    """A deployment, and its faults by kind.

    Attributes:
        faults: By kind; each returns once it is over.
        process: `up`.
        remarks: What was unexpected or particular.
        without: Kinds of requests that it doesn't serve.
        also: Kinds that others don't serve.
        key: Key of its gateways; "" for none.
        all_interfaces: The interfaces that it has.
    """

    KINDS: ClassVar[tuple[str, ...]] = ()
    without: ClassVar[tuple[str, ...]] = ()
    also: ClassVar[tuple[str, ...]] = ()
    key = ""
    all_interfaces: tuple[str, ...] = INTERFACES
    settings: ClassVar[dict[str, object]] = {
        **mixed_requests.SETTINGS,
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
        self.faults = {kind: self.fault(kind) for kind in self.KINDS}

    def fault(self, kind: str) -> Callable[[], Awaitable[None]]:
        """Return what makes a fault of a kind."""
        name = kind.replace(": ", "_").replace(",", "").replace(" ", "_").lower()
        return getattr(self, name)  # type: ignore[no-any-return]

    @property
    def process(self) -> Any:
        return self.deployment.process

    async def __aenter__(self) -> Self:
        mixed_requests.write_adapter(self.folder / "adapter")
        settings = dict(self.settings)
        if "adapter" not in self.without:
            adapters = {mixed_requests.ADAPTER: str(self.folder / "adapter")}
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
            self.key,
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
                reports = await self.client.deployment.reports()
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

    async def gateway_killed(self) -> None:
        index = self.rng.randrange(2)
        (await self.gateway_of(index)).kill()
        await self.gateway_of(index)


async def stopped(pids: Sequence[int], seconds: float) -> None:
    """Stop processes for some time."""
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        if number == signal.SIGSTOP:
            await asyncio.sleep(seconds)
