"""The shell that all stages share: an actor with one inbox, taking one message at a time."""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar

import anyio
import structlog

from ..bus import Bus, Inbox, Outcome, Sender
from ..bus.control import Reset, StageReady, StageStarted, StageStopped
from ..bus.links import CONTROL, AnyLink, Link, M, at
from ..bus.messages import Envelope
from ..config import REPLICATED, BusError, Config, NanoInferenceError, cut, role_of
from ..config.logger import get_logger
from ..store.board import LoadedAdapter, StageState
from ..telemetry import Attributes, Metrics, TraceContext, Tracing, is_sampled, names, now_ns


class StageContext:
    """What a stage is given to run with."""

    def __init__(
        self,
        config: Config,
        bus: Bus,
        tracing: Tracing,
        on_ready: Callable[[str], None] = lambda stage: None,
        on_drained: Callable[[], None] = lambda: None,
        metrics: Metrics | None = None,
        replica: int = 0,
    ) -> None:
        """A context for the stages of one process.

        Args:
            config: All settings.
            bus: Carries the stages' messages.
            tracing: Makes spans.
            on_ready: Called with its role when a stage takes part in an epoch.
            on_drained: Called when admission has drained.
            metrics: Where to record; nothing is recorded when None.
            replica: The replica that batching and the executor belong to.
        """
        self.config = config
        self.bus = bus
        self.tracing = tracing
        self.on_ready = on_ready
        self.on_drained = on_drained
        self.metrics = metrics or Metrics()
        self.replica = replica


class Actor(ABC):
    """One stage. A new object for each time that the stage is started.

    Epochs: when a stage has failed and comes back, admission begins a new epoch and sends Reset
    to all. A stage then drops what it holds and answers StageReady; messages of older epochs that
    are still on their way are dropped when they arrive. The Reset itself may be overtaken by the
    first message of the new epoch on another link, so a larger epoch on any message has the same
    effect.

    Attributes:
        name: Which of the five stages.
        role: The same, and of which replica; others know it by this name.
    """

    name: ClassVar[str]

    def __init__(self, context: StageContext) -> None:
        self.config = context.config
        self.bus = context.bus
        self.tracing = context.tracing
        self.replica = context.replica
        self.role = role_of(self.name, self.replica)
        # Tell the replicas apart in metrics and spans, where there are several.
        self.labels: dict[str, str] = {}
        if self.config.pipeline.replicas > 1 and self.name in REPLICATED:
            self.labels = {names.REPLICA: str(self.replica)}
        self.metrics = context.metrics.labelled(self.labels)
        self.incarnation = f"{self.role}-{uuid.uuid4().hex[:8]}"
        self.epoch = 0
        # The incarnation of admission that has asked last for a part in its epoch.
        self.leader = ""
        self.opened = self.closed = False
        self.failed = False
        self.log = get_logger().bind(stage=self.role)
        self._on_ready = context.on_ready
        # The epoch in which this stage takes part; 0 before the first.
        self._part_of = 0
        self._senders: dict[AnyLink, Sender] = {}

    # --- what a stage says --------------------------------------------------------------------

    async def open(self) -> None:  # noqa: B027  (most stages have nothing to load)
        """Loads what the stage needs. Runs before any message is taken."""

    async def close(self) -> None:  # noqa: B027
        """Frees what `open` loaded, since the stage ends.

        It runs while the stage is being cancelled: what it awaits it must shield, with a time
        limit. Afterwards the object should hold little memory, since a traceback may keep it alive.
        """

    @abstractmethod
    async def handle(self, envelope: Envelope) -> None:
        """Takes one message."""

    async def tick(self) -> None:  # noqa: B027
        """Runs after each batch of messages, and when `wake_at_ns` has come."""

    def wake_at_ns(self) -> int | None:
        """When `tick` should run although no message came; None for never."""
        return None

    @abstractmethod
    async def reset(self) -> None:
        """Drops all that belongs to a request: a new epoch begins."""

    async def announce(self) -> None:
        """Tells admission that the stage takes part in the current epoch."""
        await self.send(CONTROL["admission"], StageReady(self.role, self.incarnation))
        self.takes_part()

    @property
    def holds_all(self) -> bool:
        """Whether the stage has loaded what it needs and has not closed."""
        return self.opened and not self.closed

    def takes_part(self) -> None:
        """From now on the stage counts as ready, until a new epoch begins."""
        self._part_of = self.epoch
        self._on_ready(self.role)

    def condition(self) -> tuple[StageState, str]:
        """How the stage is, and if it is not ready, what it waits for."""
        if self.failed:
            return "starting", "it failed and is started again"
        if not self.opened:
            return "starting", "it is loading"
        if not self.epoch:
            return "waiting", "admission has not begun an epoch"
        if self._part_of != self.epoch:
            return "waiting", self.waits_for()
        return "ready", ""

    def waits_for(self) -> str:
        """What is missing for this stage to take part in an epoch that has begun."""
        return "it is making ready"

    def load(self) -> dict[str, int | float | str]:
        """A few numbers for `status`, cheap to compute: they are asked for about once a second."""
        return {}

    def adapters(self) -> tuple[LoadedAdapter, ...]:
        """Those that requests can name, where that is known. Asked for about once a second."""
        return ()

    def begun(self) -> int | None:
        """How many requests of the lane have begun and are not answered; None where that is not
        known. Asked for about once a second."""
        return None

    async def measure(self) -> None:  # noqa: B027
        """Records gauges, and what counters have gained. Where there are metrics, it is called
        about once a second."""

    # --- running ------------------------------------------------------------------------------

    async def run(self) -> None:
        """Runs until cancelled. Whatever it raises means that the stage has failed."""
        await self.open()
        self.opened = True
        try:
            # It stays open when this stage fails, or senders would fail with it. The next
            # incarnation opens its own, which closes this one.
            inbox = await self.bus.open_inbox(self.role)
            started = StageStarted(self.role, self.incarnation)
            await self.send(CONTROL["admission"], started, epoch=0)
            await self.receive_forever(inbox)
        finally:
            self.closed = True
            await self.close()

    async def receive_forever(self, inbox: Inbox) -> None:
        """Takes messages one at a time, oldest first."""
        while True:
            for envelope in await self._receive(inbox):
                await self._dispatch(envelope)
            await self.tick()

    async def _receive(self, inbox: Inbox) -> list[Envelope]:
        """Waits for messages, until `wake_at_ns` at the longest."""
        wake_at = self.wake_at_ns()
        if wake_at is None:
            return await inbox.receive()
        with anyio.move_on_after(max(0.0, (wake_at - now_ns()) / 1e9)):
            return await inbox.receive()
        return []

    async def leave(self, reason: str, *, failed: bool = False) -> None:
        """Tells admission that what this stage held is lost; `failed`: not in good order."""
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
                self.epoch = envelope.epoch
                await self.reset()
        if isinstance(envelope.body, Reset):
            self.leader = envelope.sender
            await self.announce()
        else:
            await self.handle(envelope)

    def own(self, link: Link[M]) -> Link[M]:
        """This replica's, of a link that each has."""
        return at(link, self.replica)

    async def flush(self, link: AnyLink) -> None:
        """Waits until what was sent on a link has left this process."""
        await self._sender(link).flush()

    async def send(
        self,
        link: Link[M],
        body: M,
        *,
        epoch: int | None = None,
        trace: TraceContext | None = None,
        budget_ns: int | None = None,
    ) -> None:
        """Sends a message in the current epoch."""
        await self._sender(link).send(
            body,
            epoch=self.epoch if epoch is None else epoch,
            traceparent=trace.traceparent if trace else "",
            tracestate=trace.tracestate if trace else "",
            budget_ns=budget_ns,
        )

    async def answer(
        self,
        operation_id: str,
        weight_version: int = 0,
        error: NanoInferenceError | None = None,
        newest_version: int = 0,
    ) -> None:
        """Tells whoever sent a control message that it is done, or why not."""
        outcome = Outcome(
            lane=self.config.bus.lane,
            role=self.role,
            code=error.code if error else "",
            message=error.message if error else "",
            weight_version=weight_version,
            newest_version=newest_version,
        )
        try:
            await self.bus.replies.answer(operation_id, outcome)
        except BusError as reason:
            # Nobody loses a request by it: whoever waits finds that no answer came in time.
            self.log.warning("answer_lost", operation=operation_id, reason=reason.message)

    def _sender(self, link: AnyLink) -> Sender:
        sender = self._senders.get(link)
        if sender is None:
            sender = self._senders[link] = self.bus.sender(link, self.incarnation)
        return sender

    def log_of(self, request_id: str, trace: TraceContext) -> structlog.typing.FilteringBoundLogger:
        """The log for lines about a request: with its id, and where its trace is."""
        bound: structlog.typing.FilteringBoundLogger = self.log.bind(
            request_id=request_id, **trace.log_ids
        )
        return bound

    def records(self, traceparent: str) -> bool:
        """Whether spans are made of a request. What is only for spans is done behind this."""
        return self.tracing.enabled and is_sampled(traceparent)

    def first_context(self, entry_id: str) -> TraceContext:
        """Of the trace of a request whose client gave none: the ids of admission's span.

        They follow from the entry, so that a successor goes on with its predecessor's trace. On a
        bus that is not durable, where the ids of entries repeat, they are new each time.
        """
        bus = self.config.bus
        root = f"{bus.url}/{bus.prefix}/{entry_id}" if self.bus.durable else ""
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
    ) -> None:
        """This stage's span of a request that leaves it now; see `Tracing.span`.

        Its name is the stage's, unless it is of something special that the stage does.
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
            error=error,
            own=own,
        )


def deadline_of(envelope: Envelope, now: int) -> int | None:
    """The envelope's remaining budget as a deadline on this process's clock.

    The time on the wire is not counted: that would take clocks that agree.
    """
    return None if envelope.budget_ns is None else now + envelope.budget_ns


def budget_of(deadline_ns: int | None, now: int) -> int | None:
    """What is left until a deadline, to be sent on."""
    return None if deadline_ns is None else deadline_ns - now
