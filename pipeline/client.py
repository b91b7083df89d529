"""What a client does with a bus: publish requests, follow their outputs, cancel them."""

from __future__ import annotations

import asyncio
import uuid
from asyncio import Task
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from contextlib import aclosing
from types import TracebackType
from typing import Any, Literal

from ..bus import Bus, Outcome, OutputStream, open_bus
from ..bus.codec import written_id
from ..bus.control import (
    MEMORY_TAGS,
    Cancel,
    CancelAll,
    FlushCache,
    JoinWeightsGroup,
    LeaveWeightsGroup,
    MemoryTag,
    Pause,
    ReleaseMemory,
    Resume,
    ResumeMemory,
    TellWeightVersion,
    UpdateFairness,
    UpdateWeights,
)
from ..bus.messages import Message
from ..bus.public import Completion, Output
from ..bus.weights import (
    InFlight,
    LocalWeights,
    StagedWeights,
    WeightsSource,
    check_in_flight,
    lay_down,
    pick_up,
)
from ..config import BusConfig, ConfigError, FairnessConfig
from ..store.board import StageReport
from ..telemetry import Metrics, TraceContext, Tracing, names, now_ns
from .cancellations import Cancellations
from .client_adapters import AdapterClient
from .completing import Completing, Request
from .deployment import Deployment
from .models import ModelOperations
from .operators import Operators, least_version
from .update_together import update_together

ANSWER_S = 30.0
"""How long to wait for every lane's answer to what should be done at once."""


class BusClient(ModelOperations, AdapterClient, Completing):
    """Submits requests over a bus, from wherever the bus can be reached.

    `async with BusClient.connect("redis://127.0.0.1:6390") as client:` opens a connection of its
    own; `Pipeline` makes one on its own bus.

    What is done to a pipeline (`pause`, `update_weights` and so on) is done to every lane that
    lives under the bus's prefix, or to `lane` alone; BusError `unknown_lane` if it does not live.
    Of several models it is done to one, by its client (`of_model`); else BusError `model_required`.

    Attributes:
        tracing: Makes the spans of requests that are published without a trace.
        metrics: Of the process, for what is built on this client.
    """

    def __init__(
        self, bus: Bus, tracing: Tracing | None = None, metrics: Metrics | None = None
    ) -> None:
        self.bus = bus
        self.tracing = tracing or Tracing()
        self.metrics = metrics or Metrics()
        sender = f"client-{uuid.uuid4().hex[:8]}"
        self._operators = Operators(bus, sender)
        self._deployment = Deployment(bus, self._operators, self._bus_of, sender)
        self._owns_bus = False
        self._cancellations = Cancellations()

    @classmethod
    def connect(
        cls,
        bus: str | BusConfig,
        tracing: Tracing | None = None,
        metrics: Metrics | None = None,
    ) -> BusClient:
        """A client of the pipeline at a Redis URL. Nothing is sent until it is used.

        Raises:
            ConfigError: `bus` is not a Redis URL.
        """
        config = BusConfig(url=bus) if isinstance(bus, str) else bus
        if config.url == "memory":
            raise ConfigError("a memory bus can't be connected to; use Pipeline.submit there")
        client = cls(open_bus(config), tracing, metrics)
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
        """Closes the connection, if it is this client's own; cancellations go out before."""
        await self._cancellations.wait()
        await self._close_models()
        if self._owns_bus:
            await self.bus.aclose()

    def _on(self, bus: Bus) -> BusClient:
        client = BusClient(bus, self.tracing, self.metrics)
        client._owns_bus = True
        return client

    async def publish(self, request: Request | bytes, trace: TraceContext | None = None) -> str:
        """Publishes a request without waiting for anything.

        Args:
            request: A GenerateRequest, the same as a dict, or its JSON.
            trace: Where its spans belong; None: below a span of its own, which begins a trace.

        Returns:
            The entry's id; with it, and the request's id if it has one, `follow` finds the output.
        """
        trace = trace or self._published_span(request)
        return await self.bus.requests.publish(
            request, traceparent=trace.traceparent, tracestate=trace.tracestate
        )

    async def submit(
        self, request: Request | bytes, trace: TraceContext | None = None
    ) -> AsyncGenerator[Output, None]:
        """Publishes a request and yields its output: chunks as they come, then one Completion.

        Whatever is wrong with the request comes as a Completion with an error. When the caller
        stops before the end, the request is cancelled. The arguments are those of `publish`.
        """
        publishing = asyncio.create_task(self.publish(request, trace))
        done = False
        try:
            entry_id = await asyncio.shield(publishing)
            request_id = written_id(request) or entry_id
            results = self.bus.results
            async with aclosing(
                results.follow(request_id, entry_id, just_published=True)
            ) as outputs:
                async for output in outputs:
                    done = isinstance(output, Completion)
                    yield output
        finally:
            if not done:
                await self._cancel_shielded(request, publishing)

    def follow(
        self, request_id: str, entry_id: str = "", *, just_published: bool = False
    ) -> OutputStream[Output]:
        """The outputs of a request that was published, from the first one on.

        They stay readable, and nothing is cancelled when the caller stops. The arguments, and what
        it raises, are those of `ResultStreams.follow`.
        """
        return self.bus.results.follow(
            request_id, entry_id, just_published=just_published, keep=True
        )

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
        await self._deployment.cancel(cancel)

    async def _cancel_shielded(self, request: Request | bytes, publishing: Task[str]) -> None:
        """Cancels what was published, also when the caller himself was cancelled, even while he
        published: the request would run on.

        It takes as long as it takes; the caller waits no longer than the patience.
        """

        async def cancel() -> None:
            await asyncio.wait([publishing])
            if not publishing.cancelled() and publishing.exception() is None:
                entry_id = publishing.result()
                await self.cancel(written_id(request) or entry_id, entry_id)

        await self._cancellations.begin(cancel())

    async def pause(self, in_flight: InFlight = "keep", *, lane: str | None = None) -> None:
        """Returns when no step is under way any more, and none is run until `resume`.

        Args:
            in_flight: What becomes of requests in flight. keep: they go on from their KV
                afterwards. retract: they compute it again. abort: they end at once with what they
                have, status "cancelled" and code "aborted".
            lane: Only this lane; every lane when None, here and in all that follow.

        Raises:
            WeightsError: There is no such way.
            BusError: A lane did not answer.
        """
        check_in_flight(in_flight)
        await self._operate("batching", Pause(in_flight), lane=lane)
        if in_flight == "abort":
            await self.cancel_all(lane=lane)

    async def resume(self, *, lane: str | None = None) -> None:
        """Goes on after `pause`. Raises BusError as that does."""
        await self._operate("batching", Resume(), lane=lane)

    async def cancel_all(self, *, lane: str | None = None) -> None:
        """Ends all requests that were taken from the queue; they keep what they have.

        Raises BusError when a lane did not answer.
        """
        await self._operate("admission", CancelAll(), lane=lane)

    async def flush_cache(self, *, lane: str | None = None) -> None:
        """Forgets all cached prefixes. Raises BusError when a lane did not answer."""
        await self._operate("batching", FlushCache(), lane=lane)

    async def update_weights(
        self,
        weights: WeightsSource | StagedWeights | Mapping[str, Any],
        *,
        in_flight: InFlight = "keep",
        version: int | None = None,
        partial: bool = False,
        timeout_s: float = 300.0,
        lane: str | None = None,
    ) -> int:
        """Replaces the weights of every lane between two steps, while requests are in flight.

        Generation goes on while the new weights are fetched. `pause` before and `resume` after
        it is the blocking way. Several executors all fetch and check them before the first one
        changes.

        Args:
            weights: Where they are, or, when the executor runs in this process, a state dict,
                which must not change until this returns, or the parts of `stage_weights`.
            in_flight: As for `pause`, applied when the weights change: "abort" ends what runs or
                waits to run in a lane, and lets what is still queued run with the new weights.
            version: What to count from then on, above the present version; None for the next,
                counted from the newest of all executors.
            partial: Whether parameters that are not among them stay as they are.
            timeout_s: How long fetching them may take.
            lane: Only this lane. The others keep theirs, and their tokens tell which made them.

        Returns:
            The version of the weights in place.

        Raises:
            WeightsError: They could not be taken; the old ones are in place everywhere. Only as
                `weights_differ` some executors have changed: the message tells all versions.
            BusError: An executor did not answer; its tokens tell their version.
        """
        check_in_flight(in_flight)
        source: WeightsSource | StagedWeights
        source = lay_down(uuid.uuid4().hex, weights) if isinstance(weights, Mapping) else weights
        try:
            update = UpdateWeights(source, in_flight, version, partial, timeout_s)
            executors = await self._operators.started("executor", ANSWER_S, lane)
            if len(executors) == 1:
                return await self._operate("executor", update, timeout_s + ANSWER_S, executors)

            async def ask(body: Message, limit_s: float) -> list[Outcome]:
                return await self._operators.ask("executor", body, limit_s, executors)

            return await update_together(ask, executors, update, ANSWER_S)
        finally:
            if isinstance(source, LocalWeights):
                pick_up(source.key)

    async def join_weights_group(
        self,
        group: str,
        address: str,
        world_size: int,
        *,
        rank_offset: int = 1,
        backend: Literal["gloo", "nccl"] = "gloo",
        timeout_s: float = 60.0,
        lane: str | None = None,
    ) -> None:
        """Lets every lane's executor join a torch.distributed group that a trainer broadcasts to.

        Args:
            group: Its name; one of this name that was joined before is left.
            address: host:port of the group's TCP store, which rank 0 keeps.
            world_size: How many there are, rank 0 included.
            rank_offset: The rank of the first lane's executor; the others follow it.
            backend: "gloo", or "nccl" where trainer and executors have GPUs.
            timeout_s: How long to wait for the others.

        Raises:
            WeightsError: An executor could not join.
            BusError: A lane did not answer.
        """

        def wish(index: int) -> Message:
            rank = rank_offset + index
            return JoinWeightsGroup(group, address, rank, world_size, backend, timeout_s)

        await self._operate("executor", wish, timeout_s + ANSWER_S, lane=lane)

    async def leave_weights_group(self, group: str, *, lane: str | None = None) -> None:
        """Lets every lane's executor leave a group, also one that broadcasts and hangs.

        Raises:
            BusError: A lane did not answer.
        """
        await self._operate("executor", LeaveWeightsGroup(group), lane=lane)

    async def stage_weights(
        self,
        update: str,
        weights: WeightsSource,
        *,
        timeout_s: float = 300.0,
        lane: str | None = None,
    ) -> None:
        """Has every lane fetch a part of an update and keep it.

        Nothing changes until `update_weights` is called with `StagedWeights`, the update's name
        and the number of its parts. Until then the executors hold the parts beside the model.

        Args:
            update: A name for the update; what was kept under another one is dropped.
            weights: Where the part is. A tensor that comes again replaces the former.
            timeout_s: How long fetching it may take.

        Raises:
            WeightsError: It could not be taken, or does not fit the model.
            BusError: A lane did not answer.
        """
        part = UpdateWeights(weights, partial=True, timeout_s=timeout_s, part_of=update)
        await self._operate("executor", part, timeout_s + ANSWER_S, lane=lane)

    async def weight_version(self, *, lane: str | None = None) -> int:
        """The version of the weights in place; with several lanes the smallest.

        Raises:
            BusError: A lane did not answer.
        """
        return await self._operate("executor", TellWeightVersion(), lane=lane)

    async def release_memory(
        self, tags: Iterable[MemoryTag] = MEMORY_TAGS, *, lane: str | None = None
    ) -> None:
        """Gives memory of every lane back to its device, for a trainer that shares it.

        Until all is resumed no step runs: requests wait, and what runs computes its KV again
        afterwards. What is released already stays so.

        Args:
            tags: "kv_cache"; "weights", which are lost: no step runs before an update has brought
                all of them. Both when not given.

        Raises:
            WeightsError: There is no such tag, or a weight update is under way.
            BusError: A lane did not answer.
        """
        await self._operate("executor", ReleaseMemory(tuple(tags)), lane=lane)

    async def resume_memory(
        self,
        tags: Iterable[MemoryTag] = MEMORY_TAGS,
        *,
        timeout_s: float = 300.0,
        lane: str | None = None,
    ) -> None:
        """Takes memory again that was released; what is there already stays as it is.

        Args:
            tags: As for `release_memory`.
            timeout_s: How long to wait; on CUDA steps are recorded again.

        Raises:
            WeightsError: There is no such tag; or there is not enough memory (`out_of_memory`),
                and what could not be had is still released.
            BusError: A lane did not answer.
        """
        await self._operate("executor", ResumeMemory(tuple(tags)), timeout_s, lane=lane)

    async def reports(self) -> list[StageReport]:
        """How the stages are, of all models, as their processes told within the last seconds."""
        return await self._deployment.reports()

    async def trouble(self) -> str:
        """Why requests would not be served with the weights that were sent; "" when they would,
        of several models when one would.

        It may be a second out of date, since that is how often stages report.
        """
        return await self._deployment.trouble()

    async def fairness(self) -> dict[str, FairnessConfig]:
        """The fairness settings in force, by lane, as of about a second ago.

        Of several models' lanes each is called as `MODEL:LANE`.
        """
        return await self._deployment.fairness()

    async def update_fairness(self, config: FairnessConfig, lane: str | None = None) -> None:
        """Replaces fairness's settings at once, for what waits and runs too.

        They hold until they are replaced again or the stage's process is started anew, which
        begins with those that it was configured with.

        Args:
            config: All settings; those not named in it are back at their defaults.
            lane: The lane that takes them; every lane when None.
        """
        await self._control("fairness", UpdateFairness(config), lane)

    async def _operate(
        self,
        stage: str,
        body: Message | Callable[[int], Message],
        timeout_s: float = ANSWER_S,
        recipients: list[tuple[str, str]] | None = None,
        lane: str | None = None,
    ) -> int:
        """Tells every lane and waits until all have done it; returns the least weight version.

        Args:
            stage: Which stage of the lanes does it.
            body: What to tell it; where it depends on the lane, by the lane's index.
            timeout_s: How long to wait for the answers.
            recipients: (lane, role) of whom to tell; everyone when None, or all of `lane`.

        Raises as `least_version`.
        """
        recipients = recipients or await self._operators.started(stage, ANSWER_S, lane)
        outcomes = await self._operators.ask(stage, body, timeout_s, recipients)
        return least_version(recipients, outcomes, timeout_s)

    async def _control(self, stage: str, body: Message, lane: str | None = None) -> None:
        """Tells every lane that lives: whose a request is, only they know. Or the one named."""
        await self._operators.tell(stage, body, await self._operators.everyone(stage, lane))

    def _published_span(self, request: Request | bytes) -> TraceContext:
        if not self.tracing.enabled:
            return TraceContext()
        now = now_ns()
        attributes = {names.REQUEST_ID: written_id(request)}
        own = self.tracing.begin()
        self.tracing.span("publish", TraceContext(), now, now, attributes, own=own)
        return own
