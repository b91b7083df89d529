"""Calls of a client about the weights, memory and adapters of every lane."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

from ..bus import Bus, control
from ..bus.control import MEMORY_TAGS, MemoryTag
from ..bus.envelope import Message
from ..bus.weights import InFlight, StagedWeights, WeightsSource, check_in_flight, source_of
from ..config import AdapterError
from ..store.loaded_adapter import LoadedAdapter
from .deployment import Deployment
from .models import adapters_of
from .stage_control import (
    Body,
    Decide,
    Recipients,
    StageControl,
    checksums_of,
    finish_together,
    least_version,
    load_adapter_together,
    unload_adapter_together,
    update_weights_together,
)

ANSWER_S = 30.0
"""Longest wait for the answers of all lanes to a short operation."""


class WeightClient:
    """The part of a BusClient for its weights, memory and adapters."""

    bus: Bus
    deployment: Deployment
    _control: StageControl

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
