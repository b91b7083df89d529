"""Base of all stages' shells: an actor with one inbox that handles one message at a time."""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import ClassVar

import anyio
import anyio.lowlevel
import structlog

from ..bus import Bus, Inbox, Outcome, Sender
from ..bus.control import Reset, StageReady, StageStarted, StageStopped
from ..bus.envelope import Envelope
from ..bus.kv_sessions import KVSessionResult
from ..bus.links import CONTROL, AnyLink, Link, M, at
from ..config import (
    REPLICATED,
    BusError,
    Config,
    NanoInferenceError,
    cut,
    role_of,
    role_of_sender,
)
from ..config.errors import stage_replaced
from ..config.logger import get_logger
from ..store.board import StageState
from ..store.loaded_adapter import LoadedAdapter
from ..telemetry import Attributes, Metrics, TraceContext, Tracing, is_sampled, names, now_ns


@dataclass(frozen=True)
class StageContext:
    """Surroundings of the stages of one process.

    Attributes:
        config: All settings.
        bus: Carries the stages' messages.
        tracing: Makes spans.
        on_ready: Called with a stage's role when it takes part in an epoch.
        on_drained: Called when admission has drained.
        metrics: Records metrics.
        replica: The replica of batching and the executor.
        called: Returns when stages that have loaded may take part; at once except in a standby.
    """

    config: Config
    bus: Bus
    tracing: Tracing
    on_ready: Callable[[str], None] = lambda stage: None
    on_drained: Callable[[], None] = lambda: None
    metrics: Metrics | None = None
    replica: int = 0
    called: Callable[[], Awaitable[object]] = anyio.lowlevel.checkpoint


class Actor(ABC):
    """One stage; a new object for each start.

    Epochs: when a stage restarts after a failure, admission begins a new epoch and sends Reset to
    all. A stage then drops its state and answers StageReady; late messages of older epochs are
    dropped. On another link the first message of the new epoch may overtake the Reset, so a larger
    epoch on any message has the same effect.

    Attributes:
        name: One of the five stages.
        role: The stage's name with its replica.
    """

    name: ClassVar[str]

    def __init__(self, context: StageContext) -> None:
        self.config = context.config
        self.bus = context.bus
        self.tracing = context.tracing
        self.replica = context.replica
        self.role = role_of(self.name, self.replica)
        # Distinguish replicas in metrics and spans.
        self.labels: dict[str, str] = {}
        if self.config.pipeline.replicas > 1 and self.name in REPLICATED:
            self.labels = {names.REPLICA: str(self.replica)}
        self.metrics = (context.metrics or Metrics()).labelled(self.labels)
        self.incarnation = f"{self.role}-{uuid.uuid4().hex[:8]}"
        self.epoch = 0
        # The incarnation of admission that sent the last Reset.
        self.leader = ""
        self.opened = self.closed = False
        self.failed = False
        self.log = get_logger().bind(stage=self.role)
        self._on_ready, self._called = context.on_ready, context.called
        # The epoch in which this stage takes part; 0 for none.
        self._part_of = 0
        self._senders: dict[AnyLink, Sender] = {}
        self._inbox: Inbox | None = None
        self._received: Counter[str] = Counter()

    # --- overridden by stages -----------------------------------------------------------------

    async def open(self) -> None:  # noqa: B027  (most stages have nothing to load)
        """Load models and files, before the first message."""

    async def close(self) -> None:  # noqa: B027
        """Free what `open` has loaded.

        It runs during cancellation: awaits must be shielded, with a time limit. Afterwards the
        object should hold little memory, since a traceback may keep it alive.
        """

    @abstractmethod
    async def handle(self, envelope: Envelope) -> None:
        """Handle one message."""

    async def tick(self) -> None:  # noqa: B027
        """Run after each batch of messages, and at `wake_at_ns`."""

    def wake_at_ns(self) -> int | None:
        """Return when `tick` is due without a message; None for never."""
        return None

    @abstractmethod
    async def reset(self) -> None:
        """Drop all requests, since a new epoch begins."""

    async def announce(self) -> None:
        """Report to admission that the stage takes part in the current epoch."""
        await self.send(CONTROL["admission"], StageReady(self.role, self.incarnation))
        self.takes_part()

    @property
    def holds_all(self) -> bool:
        """Whether the stage is loaded and not closed."""
        return self.opened and not self.closed

    @property
    def in_epoch(self) -> bool:
        """Whether the stage takes part in the current epoch."""
        return self._part_of == self.epoch

    def takes_part(self) -> None:
        """Mark the stage as ready until a new epoch begins."""
        self._part_of = self.epoch
        self._on_ready(self.role)

    def condition(self) -> tuple[StageState, str]:
        """Return the stage's state and, if it is not ready, the reason."""
        if self.failed:
            return "starting", "it failed and is started again"
        if not self.opened:
            share = self.loaded_share()
            return "starting", "it is loading" + ("" if share is None else f" ({share:.0%})")
        if not self.epoch:
            return "waiting", "admission has not begun an epoch"
        if not self.in_epoch:
            return "waiting", self.waits_for()
        return "ready", ""

    def loaded_share(self) -> float | None:
        """Return which share is loaded of what the stage loads; None if that is unknown."""
        return None

    def waits_for(self) -> str:
        """Return why the stage does not take part in the current epoch."""
        return "it is making ready"

    def load(self) -> dict[str, int | float | str]:
        """Return a few numbers for `status`. Called about once a second."""
        return {}

    def traffic(self) -> dict[str, int | str]:
        """Return how many messages wait in the inbox, and the number received from each role."""
        if self._inbox is None:
            return {}
        received = ",".join(f"{role}={number}" for role, number in self._received.items())
        return {"inbox": len(self._inbox), "received": received}

    def adapters(self) -> tuple[LoadedAdapter, ...]:
        """Return the adapters that requests can name, if known. Called about once a second."""
        return ()

    def begun(self) -> int | None:
        """Return the number of requests of the lane that have begun and are not answered; None if
        unknown. Called about once a second."""
        return None

    async def measure(self) -> None:  # noqa: B027
        """Record gauges and increments of counters. Called about once a second with metrics on."""

    # --- running ------------------------------------------------------------------------------

    async def run(self) -> None:
        """Run until cancelled. An exception means that the stage has failed."""
        await self.open()
        self.opened = True
        try:
            await self._called()
            # It stays open after a failure, or senders would fail too. The next incarnation's
            # inbox closes this one.
            inbox = await self.bus.open_inbox(self.role)
            started = StageStarted(self.role, self.incarnation)
            await self.send(CONTROL["admission"], started, epoch=0)
            await self.receive_forever(inbox)
        finally:
            self.closed = True
            await self.close()

    async def receive_forever(self, inbox: Inbox) -> None:
        """Handle messages one at a time, oldest first."""
        self._inbox, received = inbox, self._received
        while True:
            for envelope in await self._receive(inbox):
                received[role_of_sender(envelope.sender)] += 1
                await self._dispatch(envelope)
            await self.tick()

    async def _receive(self, inbox: Inbox) -> list[Envelope]:
        """Wait for messages, until `wake_at_ns` at the latest."""
        wake_at = self.wake_at_ns()
        if wake_at is None:
            return await inbox.receive()
        with anyio.move_on_after(max(0.0, (wake_at - now_ns()) / 1e9)):
            return await inbox.receive()
        return []

    async def leave(self, reason: str, *, failed: bool = False) -> None:
        """Report to admission that this stage's state is lost; `failed`: it has crashed."""
        stopped = StageStopped(self.role, self.incarnation, cut(reason), failed)
        await self.send(CONTROL["admission"], stopped, epoch=0)

    async def _dispatch(self, envelope: Envelope) -> None:
        if envelope.epoch:
            if envelope.epoch < self.epoch:
                self.log.debug("stale_message_dropped", type=type(envelope.body).__name__)
                return
            if envelope.epoch > self.epoch:
                if not await self.bus.is_epoch(envelope.epoch):
                    self.log.warning("message_of_no_epoch_dropped", epoch=envelope.epoch)
                    return
                if not await self.bus.is_newest(self.role):
                    raise stage_replaced(self.role, self.config.bus.lane)
                self.epoch = envelope.epoch
                await self.reset()
        if isinstance(envelope.body, Reset):
            self.leader = envelope.sender
            await self.announce()
        else:
            await self.handle(envelope)

    def own(self, link: Link[M]) -> Link[M]:
        """Return this replica's link."""
        return at(link, self.replica)

    async def flush(self, link: AnyLink) -> None:
        """Wait until all messages sent on a link have left this process."""
        await self._sender(link).flush()

    async def send(
        self,
        link: Link[M],
        body: M,
        *,
        epoch: int | None = None,
        trace: TraceContext | None = None,
        budget_ns: int | None = None,
        operation_id: str = "",
    ) -> None:
        """Send a message, by default in the current epoch."""
        await self._sender(link).send(
            body,
            epoch=self.epoch if epoch is None else epoch,
            traceparent=trace.traceparent if trace else "",
            tracestate=trace.tracestate if trace else "",
            budget_ns=budget_ns,
            operation_id=operation_id,
        )

    async def answer(
        self,
        operation_id: str,
        weight_version: int = 0,
        error: NanoInferenceError | None = None,
        newest_version: int = 0,
        kv_session: KVSessionResult | None = None,
        checksums: dict[str, str] | None = None,
        logged: str = "",
    ) -> None:
        """Answer a control message: done, or the error."""
        outcome = Outcome(
            lane=self.config.bus.lane,
            role=self.role,
            code=error.code if error else "",
            message=error.message if error else "",
            weight_version=weight_version,
            newest_version=newest_version,
            kv_session=kv_session,
            checksums=checksums,
            logged=logged,
        )
        try:
            await self.bus.replies.answer(operation_id, outcome)
        except BusError as reason:
            # No request is lost: the caller's wait times out.
            self.log.warning("answer_lost", operation=operation_id, reason=reason.message)

    def _sender(self, link: AnyLink) -> Sender:
        sender = self._senders.get(link)
        if sender is None:
            sender = self._senders[link] = self.bus.sender(link, self.incarnation)
        return sender

    def log_of(self, request_id: str, trace: TraceContext) -> structlog.typing.FilteringBoundLogger:
        """Return the log bound to a request's id and trace."""
        bound: structlog.typing.FilteringBoundLogger = self.log.bind(
            request_id=request_id, **trace.log_ids
        )
        return bound

    def records(self, traceparent: str) -> bool:
        """Return whether a request has spans."""
        return self.tracing.enabled and is_sampled(traceparent)

    def first_context(self, key: str) -> TraceContext:
        """Return the context of admission's span, for a request without a client's trace.

        Its ids are derived from the entry, so that a successor continues its predecessor's trace.
        On a bus in memory, where entry ids repeat, they are random.
        """
        bus = self.config.bus
        root = f"{bus.url}/{bus.prefix}/{key}" if self.bus.durable else ""
        return self.tracing.begin(root)

    def span(
        self,
        request_id: str,
        trace: TraceContext,
        start_ns: int,
        attributes: Attributes | None = None,
        *,
        name: str = "",
        error: str = "",
        events: tuple[tuple[str, int], ...] = (),
        own: TraceContext | None = None,
        links: tuple[str, ...] = (),
    ) -> None:
        """Record this stage's span of a request that leaves it now; see `Tracing.span`.

        `name` defaults to the stage's.
        """
        if not self.tracing.enabled:
            return
        self.tracing.span(
            name or self.name,
            trace,
            start_ns,
            now_ns(),
            {
                names.STAGE: self.name,
                names.REQUEST_ID: request_id,
                names.EPOCH: self.epoch,
                **self.labels,
                **(attributes or {}),
            },
            events=events,
            links=links,
            error=error,
            own=own,
        )


def deadline_of(envelope: Envelope, now: int) -> int | None:
    """Return the envelope's remaining budget as a deadline on this process's clock.

    The time on the wire is not counted, since clocks may differ.
    """
    return None if envelope.budget_ns is None else now + envelope.budget_ns


def budget_of(deadline_ns: int | None, now: int) -> int | None:
    """Return the time left until a deadline, for the next envelope."""
    return None if deadline_ns is None else deadline_ns - now
