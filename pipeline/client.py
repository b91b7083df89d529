"""What a client does with a bus: publish requests, follow their outputs, cancel them."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from types import TracebackType
from typing import Any

import anyio
import msgspec

from ..bus import Bus, open_bus
from ..bus.links import CONTROL, at
from ..bus.messages import (
    Cancel,
    Completion,
    FlushCache,
    GenerateRequest,
    Output,
    Pause,
    Resume,
    UpdateFairness,
)
from ..config import REPLICATED, BusConfig, ConfigError, FairnessConfig
from ..telemetry import TraceContext, Tracing, names, now_ns
from .health import replicas_of

Request = GenerateRequest | dict[str, Any]

CANCEL_PATIENCE_S = 2.0
"""How long a caller that leaves a stream waits for its request's cancellation to be sent."""


class BusClient:
    """Submits requests over a bus, from wherever the bus can be reached.

    `async with BusClient.connect("redis://127.0.0.1:6390") as client:` opens a connection of its
    own; `Pipeline` makes one on its own bus.
    """

    def __init__(self, bus: Bus, tracing: Tracing | None = None) -> None:
        self.bus = bus
        self._tracing = tracing or Tracing(None)
        self._name = f"client-{uuid.uuid4().hex[:8]}"
        self._owns_bus = False

    @classmethod
    def connect(cls, bus: str | BusConfig, tracing: Tracing | None = None) -> BusClient:
        """A client of the pipeline at a Redis URL. Nothing is sent until it is used.

        Raises:
            ConfigError: `bus` is not a Redis URL.
        """
        config = BusConfig(url=bus) if isinstance(bus, str) else bus
        if config.url == "memory":
            raise ConfigError("a memory bus can't be connected to; use Pipeline.submit there")
        client = cls(open_bus(config), tracing)
        client._owns_bus = True
        return client

    async def __aenter__(self) -> BusClient:
        """Raises BusError when the bus can't be reached."""
        try:
            await self.bus.ping()
        except BaseException:
            await self.aclose()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Closes the connection, if it is this client's own."""
        if self._owns_bus:
            await self.bus.aclose()

    async def publish(self, request: Request | bytes) -> str:
        """Publishes a request without waiting for anything.

        Args:
            request: A GenerateRequest, the same as a dict, or its JSON.

        Returns:
            The entry's id; with it, and the request's id if it has one, `follow` finds the output.
        """
        trace = self._published_span(request)
        return await self.bus.requests.publish(
            request, traceparent=trace.traceparent, tracestate=trace.tracestate
        )

    async def submit(self, request: Request | bytes) -> AsyncGenerator[Output, None]:
        """Publishes a request and yields its output: chunks as they come, then one Completion.

        Whatever is wrong with the request comes as a Completion with an error. When the caller
        stops before the end, the request is cancelled.
        """
        entry_id = await self.publish(request)
        request_id = request_id_of(request) or entry_id
        done = False
        try:
            async with aclosing(self.bus.results.follow(request_id, entry_id)) as outputs:
                async for output in outputs:
                    done = isinstance(output, Completion)
                    yield output
        finally:
            if not done:
                # Also when the caller itself was cancelled, which ends every wait in here.
                with anyio.move_on_after(CANCEL_PATIENCE_S, shield=True):
                    await self.cancel(request_id, entry_id)

    async def complete(self, request: Request | bytes) -> Completion:
        """Publishes a request and waits for its terminal message."""
        async with aclosing(self.submit(request)) as outputs:
            async for output in outputs:
                if isinstance(output, Completion):
                    return output
        raise AssertionError("the output ended without a terminal message")

    async def cancel(self, request_id: str, entry_id: str = "") -> None:
        """Ends a request; one that has ended is left alone.

        Args:
            request_id: The request's id.
            entry_id: What `publish` returned. With it the request is found even before it is let
                in; without it only one that is in flight.
        """
        message = "the client cancelled the request"
        cancel = Cancel(request_id, entry_id, "cancelled", "cancelled", message)
        await self._control("admission", cancel)

    async def pause(self) -> None:
        """No further steps are run; requests in flight stay as they are."""
        await self._control("batching", Pause())

    async def resume(self) -> None:
        """Goes on after `pause`."""
        await self._control("batching", Resume())

    async def flush_cache(self) -> None:
        """Forgets all cached prefixes."""
        await self._control("batching", FlushCache())

    async def fairness(self) -> dict[str, FairnessConfig]:
        """The settings by which fairness goes, by lane, as the lanes told them a second ago."""
        return {
            report.lane: msgspec.json.decode(settings, type=FairnessConfig)
            for report in await self.bus.stages.read()
            if isinstance(settings := report.load.get("settings"), str)
        }

    async def update_fairness(self, config: FairnessConfig, lane: str | None = None) -> None:
        """Replaces fairness's settings at once, for what waits and runs too.

        They hold until they are replaced again or the stage's process is started anew, which
        begins with those that it was configured with.

        Args:
            config: All settings; those not named in it are back at their defaults.
            lane: The lane that takes them; every lane when None.
        """
        await self._control("fairness", UpdateFairness(config), lane)

    async def _control(
        self,
        stage: str,
        body: Cancel | Pause | Resume | FlushCache | UpdateFairness,
        only: str | None = None,
    ) -> None:
        """Tells every lane that lives: whose a request is, only they know. Or `only` one."""
        lanes = await self.bus.lanes() if only is None else [only]
        senders = [
            self.bus.sender(at(CONTROL[stage], replica), self._name, lane)
            for lane in lanes
            for replica in await self._replicas_of(stage, lane)
        ]
        for sender in senders:
            await sender.send(body)
        for sender in senders:
            await sender.flush()

    async def _replicas_of(self, stage: str, lane: str) -> list[int]:
        """The replicas of a stage, as far as has been heard of them lately; 0 in any case."""
        if stage not in REPLICATED:
            return [0]
        reports = await self.bus.stages.read()
        return replicas_of(report.stage for report in reports if report.lane == lane)

    def _published_span(self, request: Request | bytes) -> TraceContext:
        if not self._tracing.enabled:
            return TraceContext()
        now = now_ns()
        attributes = {names.REQUEST_ID: request_id_of(request)}
        return self._tracing.span("publish", TraceContext(), now, now, attributes)


def request_id_of(request: Request | bytes) -> str:
    """The request's own id, or "" when it has none that can be read."""
    if isinstance(request, GenerateRequest):
        return request.request_id if isinstance(request.request_id, str) else ""
    if isinstance(request, bytes):
        try:
            request = msgspec.json.decode(request)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return ""
    request_id = request.get("request_id", "") if isinstance(request, dict) else ""
    return request_id if isinstance(request_id, str) else ""
