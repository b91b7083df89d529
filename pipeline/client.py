"""The client of a bus: publishes requests, follows and cancels them, and controls pipelines."""

from __future__ import annotations

import asyncio
import math
import uuid
from asyncio import Task
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from ..bus import Bus, OutputStream, control, open_bus
from ..bus.codec import written_id
from ..bus.kv_events import KVEventEntry
from ..bus.public import DEFAULT_TENANT, Completion, KVSessionResult, Output, SessionAction
from ..bus.shards import Layout
from ..bus.weights import (
    PAUSE_MODES,
    PauseMode,
    check_in_flight,
)
from ..config import BusConfig, ConfigError, FairnessConfig, ModelConfig, ReplicaRole
from ..store.service import LaneService
from ..telemetry import Metrics, TraceContext, Tracing, names, now_ns
from .cancellations import Cancellations
from .client_operation import observed
from .client_weights import ANSWER_S, WeightClient
from .deployment import Deployment
from .models import ModelStatus, expert_owners
from .scoring import Request, Submitter
from .sessions import best_result, check_action
from .stage_control import (
    StageControl,
    least_version,
)


class BusClient(WeightClient, Submitter):
    """Submits requests over a bus, from any place that reaches the bus.

    `async with BusClient.connect("redis://127.0.0.1:6390") as client:` opens a connection of its
    own; `Pipeline` has one on its own bus.

    Operations on a pipeline (`pause`, `update_weights` and so on) apply to every living lane under
    the bus's prefix, or to `lane` alone; BusError `unknown_lane` if it is not alive. Of several
    models they apply to one, by its client (`of_model`); else BusError `model_required`.

    Attributes:
        bus: The bus.
        deployment: The state of all models under the bus's prefix.
        tracing: Makes the spans of requests that are published without a trace.
        metrics: The metrics of this process.
    """

    def __init__(
        self, bus: Bus, tracing: Tracing | None = None, metrics: Metrics | None = None
    ) -> None:
        self.tracing = tracing or Tracing()
        self.metrics = metrics or Metrics()
        self.bus = bus
        sender = f"client-{uuid.uuid4().hex[:8]}"
        self._control = StageControl(bus, sender)
        self.deployment = Deployment(bus, self._control, sender)
        self._owns_bus = False
        self._cancellations = Cancellations()

    @classmethod
    def connect(
        cls, bus: str | BusConfig, tracing: Tracing | None = None, metrics: Metrics | None = None
    ) -> BusClient:
        """Return a client of the pipeline at a Redis URL. It connects on first use.

        Raises:
            ConfigError: `bus` is not a Redis URL.
        """
        config = BusConfig(url=bus) if isinstance(bus, str) else bus
        if config.url == "memory":
            raise ConfigError("a memory bus can't be connected to; use Pipeline.submit there")
        return cls._owning(open_bus(config), tracing, metrics)

    @classmethod
    def _owning(cls, bus: Bus, tracing: Tracing | None, metrics: Metrics | None) -> BusClient:
        client = cls(bus, tracing, metrics)
        client._owns_bus = True
        return client

    def __repr__(self) -> str:
        return f"BusClient({self.bus!r})"

    async def __aenter__(self) -> BusClient:
        """Raises BusError if the bus can't be reached."""
        try:
            await self.bus.ping()
        except BaseException:
            await self.aclose()
            raise
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the connection, if it is this client's own, after pending cancellations."""
        await self._cancellations.wait()
        await self.deployment.aclose()
        if self._owns_bus:
            await self.bus.aclose()

    # --- requests -----------------------------------------------------------------------------

    async def publish(self, request: Request | bytes, trace: TraceContext | None = None) -> str:
        """Publish a request without waiting for its output.

        Args:
            request: A GenerateRequest, the same as a dict, or its JSON.
            trace: The parent of its spans; None: a new span, which begins a trace.

        Returns:
            The entry's id, for `follow`, with the request's id if it has one.
        """
        trace = trace or self._published_span(request)
        return await self.bus.requests.publish(
            request, traceparent=trace.traceparent, tracestate=trace.tracestate
        )

    def submit(
        self, request: Request | bytes, trace: TraceContext | None = None
    ) -> AsyncGenerator[Output, None]:
        """Publish a request and yield its outputs (see `Submitter`).

        Args:
            request: As for `publish`.
            trace: The parent of its spans; None: a span until its last output, which begins a
                trace.
        """
        if trace is not None:
            return self._submit(request, trace)
        context, operation = observed(request, self.tracing, self.metrics)
        outputs = self._submit(request, context)
        return outputs if operation is None else operation.observing(outputs)

    async def _submit(
        self, request: Request | bytes, trace: TraceContext
    ) -> AsyncGenerator[Output, None]:
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
        """Return the outputs of a published request, from the first one on.

        They stay readable, and the request goes on when the caller stops. Arguments and errors are
        those of `ResultStreams.follow`.
        """
        return self.bus.results.follow(
            request_id, entry_id, just_published=just_published, keep=True
        )

    async def cancel(self, request_id: str, entry_id: str = "") -> None:
        """End a request; nothing happens to one that has ended.

        Args:
            request_id: The request's id.
            entry_id: The result of `publish`, which finds the request before admission, too;
                without it only a request in flight is found.
        """
        message = "the client cancelled the request"
        cancel = control.Cancel(request_id, entry_id, "cancelled", "cancelled", message)
        await self.deployment.cancel(cancel)

    async def _cancel_shielded(self, request: Request | bytes, publishing: Task[str]) -> None:
        """Cancel a request whose caller stopped, or was cancelled, perhaps while publishing.

        The cancellation goes on after the caller's wait (`CANCEL_PATIENCE_S`).
        """

        async def cancel() -> None:
            await asyncio.wait([publishing])
            if not publishing.cancelled() and publishing.exception() is None:
                entry_id = publishing.result()
                await self.cancel(written_id(request) or entry_id, entry_id)

        await self._cancellations.begin(cancel())

    # --- steps, weights and memory --------------------------------------------------------------

    async def pause(self, in_flight: PauseMode = "keep", *, lane: str | None = None) -> None:
        """Pause all steps until `resume`; returns when no step runs any more.

        Args:
            in_flight: The mode for requests in flight. keep: with their KV as it is. retract: they
                compute it again. abort: they end at once, with status "cancelled" and code
                "aborted". wait: batching's finish first, however long it takes.
            lane: Only this lane; every lane when None, here and in all operations below.

        Raises:
            WeightsError: `in_flight` is unknown.
            BusError: A lane did not answer.
        """
        check_in_flight(in_flight, PAUSE_MODES)
        limit_s = math.inf if in_flight == "wait" else ANSWER_S
        await self._operate("batching", control.Pause(in_flight), limit_s, lane=lane)
        if in_flight == "abort":
            await self.cancel_all(lane=lane)

    async def resume(self, *, lane: str | None = None) -> None:
        """Go on after `pause`. Raises BusError if a lane did not answer."""
        await self._operate("batching", control.Resume(), lane=lane)

    async def cancel_all(self, *, lane: str | None = None) -> None:
        """End all requests that lanes have taken; they keep their tokens.

        Raises BusError if a lane did not answer.
        """
        await self._operate("admission", control.CancelAll(), lane=lane)

    async def flush_cache(self, *, lane: str | None = None) -> None:
        """Drop all cached prefixes and responses. Raises BusError if a lane did not answer."""
        await self._operate("batching", control.FlushCache(), lane=lane)
        # After batching: what runs from then on has no cached prefix.
        await self._operate("admission", control.FlushCache(), lane=lane)

    async def kv_events(self, *, kept: bool = False) -> OutputStream[KVEventEntry]:
        """Return the KV events of all replicas from now on, where `engine.kv_events` is set.

        A client of one model (`of_model`) gets that model's. docs/kv-events.md says how to keep an
        index. Call `aclose` when leaving it early.

        Args:
            kept: Begin with the oldest entry that the stream keeps.

        Raises:
            ChannelClosed: The bus was closed.
        """
        return await self.bus.kv_events.follow(kept=kept)

    async def kv_session(
        self,
        session: str,
        action: SessionAction,
        *,
        ttl_s: float | None = None,
        tenant: str = DEFAULT_TENANT,
        lane: str | None = None,
    ) -> KVSessionResult:
        """Pin, release, demote or prefetch the KV of a conversation between two turns.

        Args:
            session: The id that its requests have in `kv_session`.
            action: docs/kv-sessions.md lists them.
            ttl_s: Seconds for which the session is known from now on; None: as before.
            tenant: The tenant of its requests.
            lane: Only this lane; every lane when None.

        Returns:
            What became of it, by the replica that has most of the session's KV.

        Raises:
            RequestError: `invalid_kv_session`: `action` is unknown.
            BusError: A lane did not answer.
        """
        call = control.ControlSession(tenant, session, check_action(action), ttl_s)
        recipients = await self._control.ready_recipients("batching", ANSWER_S, lane)
        outcomes = await self._control.request("batching", call, ANSWER_S, recipients)
        least_version(recipients, outcomes, ANSWER_S)
        return best_result(outcome.kv_session for outcome in outcomes)

    def of_model(self, model: str) -> BusClient:
        """Return a client of one model of the deployment, with its own connection; close it.

        Its requests are for that model, even if they name another, and its operations apply to the
        lanes of that model.

        Args:
            model: Its id.

        Raises:
            BusError: The bus is in memory, which has one model.
        """
        return self._owning(self.bus.of_model(model), self.tracing, self.metrics)

    async def models(self) -> list[ModelStatus]:
        """Return the models of the deployment, in the order of their ids.

        A deployment without `models` in its settings has one, once an executor has loaded it.

        Raises:
            BusError: The bus can't be reached.
        """
        return await self.deployment.models()

    async def load_model(self, model: str | ModelConfig) -> ModelStatus:
        """Load a model while others serve; return when it is ready.

        Nothing happens if it is loaded; concurrent calls load it once. Requests for it wait.

        Args:
            model: One of its names, or the settings of a new model.

        Raises:
            ModelError: `unknown_model`; `model_exists`, one of its names is in use;
                `model_load_failed`, with the error; `out_of_memory_budget`, see
                `deployment.max_memory_bytes`. Nothing has changed.
            BusError: `no_model_manager`: no process loads models here.
        """
        name, spec = (model, None) if isinstance(model, str) else (model.id, model)
        return await self.deployment.manage(control.LoadModel(name, spec))

    async def unload_model(
        self, model: str, *, timeout_s: float | None = None, remove: bool = False
    ) -> ModelStatus:
        """Unload a model while others serve; return when its processes have ended.

        It takes no more requests, and answers those it has. Nothing happens if it is not loaded.

        Args:
            model: One of its names.
            timeout_s: Longest time for its requests; the rest ends with an error.
            remove: Whether to remove it from the deployment.

        Returns:
            Its status then.

        Raises:
            ModelError: `unknown_model`.
            BusError: `no_model_manager`: no process unloads models here.
        """
        return await self.deployment.manage(control.UnloadModel(model, timeout_s, remove))

    async def shards(self) -> Layout:
        """Return the shards of the requests stream. Raises BusError."""
        return await self.bus.requests.shards()

    async def set_shards(self, shards: int) -> Layout:
        """Change the number of shards while requests run (docs/redis.md); see
        `RequestQueue.set_shards`.
        """
        return await self.bus.requests.set_shards(shards)

    # --- fairness -----------------------------------------------------------------------------

    async def update_fairness(self, config: FairnessConfig, lane: str | None = None) -> None:
        """Replace fairness's settings at once, for waiting and running requests, too.

        They hold until the next update, or until the stage's process restarts with its configured
        settings.

        Args:
            config: All settings; missing ones get their defaults.
            lane: Only this lane; every lane when None.
        """
        recipients = await self._control.recipients("fairness", lane)
        await self._control.send("fairness", control.UpdateFairness(config), recipients)

    async def tenant_service(self) -> list[LaneService]:
        """Return what each lane with `fairness.exchange_interval_s` has served to each tenant.

        Raises:
            BusError: The bus can't be reached.
        """
        return sorted(await self.bus.store.service.exchange(None), key=lambda each: each.lane)

    async def move_experts(self, owners: Sequence[int], *, lane: str | None = None) -> None:
        """Give the experts of a model over several ranks other owners, between two steps. No token
        changes.

        Args:
            owners: The rank of each expert of a layer; each rank owns equally many.
            lane: Only this lane; every lane when None.

        Raises:
            WeightsError: Experts have no owners there (`engine.expert_parallel`), or these don't
                fit.
            BusError: A lane did not answer.
        """
        await self._operate("executor", control.MoveExperts(tuple(owners)), lane=lane)

    async def expert_owners(self) -> dict[str, tuple[int, ...]]:
        """Return which rank owns each expert, by lane; of lanes where one does."""
        return {
            f"{report.model}:{report.lane}".removeprefix(":"): expert_owners(report.load)
            for report in await self.deployment.reports()
            if "expert_owners" in report.load
        }

    async def update_roles(self, roles: Sequence[ReplicaRole], lane: str | None = None) -> None:
        """Replace the replicas' roles; sequences stay where they run.

        They hold until the next update, or until the stage's process restarts with its configured
        roles. A pipeline that starts without `pipeline.roles` passes no KV on: what the replicas
        that decode get is computed again.

        Args:
            roles: One for each replica; empty: each does all.
            lane: Only this lane; every lane when None.

        Raises:
            ConfigError: They don't fit the replicas.
            BusError: A lane has not answered.
        """
        recipients = await self._control.ready_recipients("fairness", ANSWER_S, lane)
        change = control.UpdateRoles(tuple(roles))
        outcomes = await self._control.request("fairness", change, ANSWER_S, recipients)
        least_version(recipients, outcomes, ANSWER_S, ConfigError)

    # --- internals ----------------------------------------------------------------------------

    def _published_span(self, request: Request | bytes) -> TraceContext:
        if not self.tracing.enabled:
            return TraceContext()
        now = now_ns()
        attributes = {names.REQUEST_ID: written_id(request)}
        own = self.tracing.begin()
        self.tracing.span("publish", TraceContext(), now, now, attributes, own=own, kind="producer")
        return own
