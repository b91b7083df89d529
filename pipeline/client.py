"""The client of a bus: publishes requests, follows and cancels them, and controls pipelines."""

from __future__ import annotations

import asyncio
import math
import uuid
from asyncio import Task
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Literal

from ..bus import Bus, OutputStream, control, open_bus
from ..bus.codec import written_id
from ..bus.control import MEMORY_TAGS, MemoryTag
from ..bus.envelope import Message
from ..bus.kv_events import KVEventEntry
from ..bus.public import DEFAULT_TENANT, Completion, KVSessionResult, Output, SessionAction
from ..bus.shards import Layout
from ..bus.weights import (
    PAUSE_MODES,
    InFlight,
    PauseMode,
    StagedWeights,
    WeightsSource,
    check_in_flight,
    source_of,
)
from ..config import AdapterError, BusConfig, ConfigError, FairnessConfig, ModelConfig, ReplicaRole
from ..store.loaded_adapter import LoadedAdapter
from ..store.service import LaneService
from ..telemetry import Metrics, TraceContext, Tracing, names, now_ns
from .cancellations import Cancellations
from .deployment import Deployment
from .models import ModelStatus, adapters_of, expert_owners
from .scoring import Request, Submitter
from .sessions import best_result, check_action
from .stage_control import (
    Body,
    Decide,
    Recipients,
    StageControl,
    check_size,
    checksums_of,
    finish_together,
    least_version,
    load_adapter_together,
    unload_adapter_together,
    update_weights_together,
)

ANSWER_S = 30.0
"""Longest wait for the answers of all lanes to a short operation."""


class BusClient(Submitter):
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

    async def submit(
        self, request: Request | bytes, trace: TraceContext | None = None
    ) -> AsyncGenerator[Output, None]:
        """Publish a request and yield its outputs (see `Submitter`); `trace` as for `publish`."""
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

    async def update_weights(
        self,
        weights: WeightsSource | StagedWeights | Mapping[str, Any],
        *,
        in_flight: InFlight = "keep",
        version: int | None = None,
        partial: bool = False,
        timeout_s: float = 300.0,
        lane: str | None = None,
        name: str = "",
        decide: Decide | None = None,
    ) -> int:
        """Replace the weights of every lane between two steps, while requests are in flight.

        Generation goes on while the new weights are fetched, unless `pause` comes before and
        `resume` after it. All executors fetch and check them before the first one changes.

        Args:
            weights: Their source; or the parts of `stage_weights`; or, if the executor runs in this
                process, a state dict, which must not change until this returns.
            in_flight: As for `pause`, when the weights change: "abort" ends requests that batching
                has, and queued ones run with the new weights.
            version: The new version, above the current one; None for the next after the newest of
                all executors.
            partial: Whether missing parameters stay as they are.
            timeout_s: Longest time to fetch them.
            lane: Only this lane; the tokens of other lanes carry their own version.
            name: As for `finish_update`; `decide` records the version before any executor changes.

        Returns:
            The version of the weights.

        Raises:
            WeightsError: An executor refused them; the old weights are in place everywhere. Only as
                `weights_differ` some executors have changed: the message has all versions.
            BusError: An executor did not answer; its tokens carry their version.
        """
        check_in_flight(in_flight)
        with source_of(weights) as source:
            check_size(self.bus, source)
            update = control.UpdateWeights(source, in_flight, version, partial, timeout_s)
            executors = await self._control.ready_recipients("executor", ANSWER_S, lane)
            if len(executors) == 1 and decide is None:
                return await self._operate("executor", update, timeout_s + ANSWER_S, executors)
            about = (self._control, executors, update, ANSWER_S)
            return await update_weights_together(*about, name, decide)

    async def finish_update(
        self, name: str, version: int, logged: str = "", *, timeout_s: float = 300.0
    ) -> int:
        """Have every executor put a decided update in place (`finish_together`)."""
        finish = control.FinishUpdate(name, version, logged)
        return await finish_together(self._control, finish, timeout_s)

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
        """Have every lane's executor join a torch.distributed group that a trainer broadcasts to.

        Args:
            group: Its name; a group of the same name is left first.
            address: host:port of the group's TCP store, which rank 0 runs.
            world_size: Number of ranks, rank 0 included. Each rank of a model counts.
            rank_offset: The first rank of the first executor; its others follow, and then those of
                the next executor.
            backend: "gloo", or "nccl" where trainer and executors have GPUs.
            timeout_s: Longest wait for the other ranks.

        Raises:
            WeightsError: An executor could not join.
            BusError: A lane did not answer.
        """

        executors = await self._control.ready_recipients("executor", ANSWER_S, lane)
        sizes = await self._control.ranks_of(executors)

        def join(index: int) -> Message:
            rank = rank_offset + sum(sizes[:index])
            return control.JoinWeightsGroup(group, address, rank, world_size, backend, timeout_s)

        await self._operate("executor", join, timeout_s + ANSWER_S, executors)

    async def leave_weights_group(self, group: str, *, lane: str | None = None) -> None:
        """Have every lane's executor leave a group, even during a broadcast that hangs.

        Raises:
            BusError: A lane did not answer.
        """
        await self._operate("executor", control.LeaveWeightsGroup(group), lane=lane)

    async def stage_weights(
        self,
        update: str,
        weights: WeightsSource,
        *,
        part: int | None = None,
        timeout_s: float = 300.0,
        lane: str | None = None,
    ) -> None:
        """Have every lane fetch a part of an update and hold it beside the model.

        Nothing changes until `update_weights` with `StagedWeights`, the update's name and the
        number of its parts.

        Args:
            update: The update's name; parts of another update are dropped.
            weights: The part's source. A tensor that comes again replaces the former.
            part: Its number, from 0; one that comes again replaces the former. None for the next.
            timeout_s: Longest time to fetch it.

        Raises:
            WeightsError: It could not be fetched, or does not fit the model.
            BusError: A lane did not answer.
        """
        check_size(self.bus, weights)
        message = control.UpdateWeights(
            weights, partial=True, timeout_s=timeout_s, part_of=update, part=part
        )
        await self._operate("executor", message, timeout_s + ANSWER_S, lane=lane)

    async def weight_version(self, *, lane: str | None = None) -> int:
        """Return the version of the current weights; the smallest of several lanes.

        Raises:
            BusError: A lane did not answer.
        """
        return await self._operate("executor", control.TellWeightVersion(), lane=lane)

    async def weight_checksums(self) -> dict[str, str]:
        """Return the SHA-256 of each parameter (`checksums_of`)."""
        return await checksums_of(self._control, ANSWER_S)

    async def release_memory(
        self, tags: Iterable[MemoryTag] = MEMORY_TAGS, *, lane: str | None = None
    ) -> None:
        """Release memory of every lane to its device, for a trainer that shares it.

        No step runs until all memory is resumed: requests wait, and running ones compute their KV
        again afterwards.

        Args:
            tags: "kv_cache"; "weights", which are lost: no step runs before an update of all
                weights. Default: both.

        Raises:
            WeightsError: A tag is unknown, or a weight update is in progress.
            BusError: A lane did not answer.
        """
        await self._operate("executor", control.ReleaseMemory(tuple(tags)), lane=lane)

    async def resume_memory(
        self,
        tags: Iterable[MemoryTag] = MEMORY_TAGS,
        *,
        timeout_s: float = 300.0,
        lane: str | None = None,
    ) -> None:
        """Allocate released memory again.

        Args:
            tags: As for `release_memory`.
            timeout_s: Longest wait; on CUDA graphs are captured again.

        Raises:
            WeightsError: A tag is unknown; or there is not enough memory (`out_of_memory`), and
                memory that could not be allocated is still released.
            BusError: A lane did not answer.
        """
        await self._operate("executor", control.ResumeMemory(tuple(tags)), timeout_s, lane=lane)

    # --- adapters -----------------------------------------------------------------------------

    async def load_adapter(
        self,
        id: str,
        folder: str,
        *,
        in_flight: InFlight = "keep",
        version: int | None = None,
        timeout_s: float = 300.0,
        lane: str | None = None,
    ) -> int:
        """Load a LoRA adapter, or replace the weights of a loaded one, while requests run.

        From then on requests name it by `id` in their `model`. All executors read and check it
        before the first one changes.

        Args:
            id: 1 to 128 letters, digits and . _ : / @ + -, and no name of a model.
            folder: A folder written by PEFT's `save_pretrained`, on the executors' machines.
            in_flight: The mode for its requests in flight. keep: with their KV and the new weights.
                retract: they compute their KV again. abort: they end early.
            version: The new version, above all former ones of this id; None for the next.
            timeout_s: Longest time to read it.
            lane: Only this lane; a gateway lists the adapters that every lane has.

        Returns:
            Its version. Requests can name it from then on.

        Raises:
            AdapterError: An executor refused it and nothing has changed. Only as `adapters_differ`
                some executors have changed. `model_exists`: another model, or its adapter, has this
                name.
            BusError: An executor did not answer.
        """
        check_in_flight(in_flight)
        own = self.bus.model
        for record in (await self.bus.store.models.read()).values() if own else ():
            spec = record.spec
            if id in ((own, *spec.aliases) if spec.id == own else record.names):
                raise AdapterError(
                    f"the model {spec.id!r} has the name {id!r:.80}; take another",
                    code="model_exists",
                )
        load = control.LoadAdapter(id, folder, in_flight, version)
        executors = await self._control.ready_recipients("executor", ANSWER_S, lane)
        return await load_adapter_together(self._control, executors, load, timeout_s + ANSWER_S)

    async def unload_adapter(
        self,
        id: str,
        *,
        in_flight: InFlight = "keep",
        timeout_s: float = 300.0,
        lane: str | None = None,
    ) -> None:
        """Unload an adapter. New requests that name it are refused at once.

        Args:
            id: Its id.
            in_flight: "abort" ends its requests in flight; otherwise they finish first.
            timeout_s: Longest time for that. After it nothing is unloaded, but requests for the
                adapter stay refused until it is loaded again.
            lane: Only this lane.

        Raises:
            AdapterError: `adapter_not_found`.
            BusError: A lane did not answer, or requests are still in flight.
        """
        check_in_flight(in_flight)
        unload = control.UnloadAdapter(id, in_flight)
        await unload_adapter_together(self._control, unload, timeout_s, ANSWER_S, lane)

    async def adapters(self, *, lane: str | None = None) -> tuple[LoadedAdapter, ...]:
        """Return the adapters that requests can name in every lane of their model, or in `lane`;
        about a second old."""
        return adapters_of(await self.deployment.reports(), lane)

    # --- models -------------------------------------------------------------------------------

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

    async def _operate(
        self,
        stage: str,
        body: Body,
        timeout_s: float = ANSWER_S,
        recipients: Recipients | None = None,
        lane: str | None = None,
    ) -> int:
        """Send a message to a stage of every lane, or of `lane`; wait until all have done it.

        `body` may depend on the recipient's index. Returns and raises as `least_version`.
        """
        recipients = recipients or await self._control.ready_recipients(stage, ANSWER_S, lane)
        outcomes = await self._control.request(stage, body, timeout_s, recipients)
        return least_version(recipients, outcomes, timeout_s)

    def _published_span(self, request: Request | bytes) -> TraceContext:
        if not self.tracing.enabled:
            return TraceContext()
        now = now_ns()
        attributes = {names.REQUEST_ID: written_id(request)}
        own = self.tracing.begin()
        self.tracing.span("publish", TraceContext(), now, now, attributes, own=own)
        return own
