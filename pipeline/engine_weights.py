"""The calls of an `InferenceEngine` about its weights and memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Literal

from ..bus.control import MEMORY_TAGS, JoinWeightsGroup, MemoryTag, UpdateWeights, WeightsReady
from ..bus.weights import GroupWeights, InFlight, LocalWeights, WeightsSource, source_of
from ..config import WeightsError
from ..config.clock import now_ns
from ..stages.admission.core import AdmissionCore
from ..stages.batching import BatchingCore
from .engine_calls import one_at_a_time
from .engine_requests import Finished

if TYPE_CHECKING:
    from torch import Tensor

    from ..stages.executor.core import ExecutorCore
    from ..stages.executor.parts.memory import MemoryRelease
    from ..stages.executor.parts.weights import WeightChanges
    from ..stages.executor.runner.weights.sync_manager import WeightSyncManager


@one_at_a_time
class EngineWeights(ABC):
    """The weights and memory of an engine."""

    _admission: AdmissionCore
    _batching: BatchingCore
    _uncollected: list[Finished]

    @property
    @abstractmethod
    def _executor(self) -> ExecutorCore:
        """The executor. Raises RuntimeError after the shutdown."""

    @abstractmethod
    def _advance(self) -> list[tuple[str, list[Finished]]]:
        """Run a step; return what has finished, by request."""

    def update_weights(
        self,
        state_dict: Mapping[str, Tensor] | WeightsSource,
        blocking: bool = False,
        *,
        in_flight: InFlight = "keep",
        version: int | None = None,
        partial: bool = False,
        timeout_s: float = 300.0,
    ) -> None:
        """Replace the model's weights; tokens sampled from then on carry the next version.

        A sequence that starts after the update never uses KV that older weights computed.

        Args:
            state_dict: All weights by parameter name, on any device and in any dtype. Or their
                source (docs/weights.md), from which they are fetched before this returns.
            blocking: Put in place before this returns; otherwise before the next step, and the
                tensors must not change until then: that step would drop the update, and raise.
            in_flight: How unfinished requests go on. keep: with their KV as it is. retract: they
                compute their KV again with the new weights. abort: the next step ends them early.
            version: The new version, above the current one; None for the next.
            partial: Whether parameters that are missing in `state_dict` stay as they are.
            timeout_s: Longest silence of a group that sends weights.

        Raises:
            WeightsError: The weights can't be fetched or read, are not finite or don't fit the
                model, or another update is pending; weights and version are unchanged. Or, as
                `weights_lost`, writing failed midway: nothing is generated before an update of all
                weights. Without `blocking`, the next step raises errors of writing.
        """
        from ..stages.executor.changes.arguments import check_arguments

        changes, weights = self._changes, self._weights
        with source_of(state_dict) as source:
            update = UpdateWeights(source, in_flight, version, partial, timeout_s)
            try:
                self._check_none_waits()
                weights.check_version(version)
                check_arguments(update, weights.limits)
            except WeightsError:
                if isinstance(source, GroupWeights):
                    # Otherwise the next update would receive this broadcast.
                    changes.groups.skip(source.group)
                raise
            fetched = changes.fetch(update)
        try:
            version = changes.put(fetched, version, partial=partial, blocking=blocking)
            weights.borrowed = not blocking and isinstance(source, LocalWeights)
        finally:
            self._report_memory()
        self._batching.receive(WeightsReady(version, in_flight), now_ns())
        self._admission.set_weights(version)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the current weights by parameter name, as `update_weights` takes them; copies with
        `rank_invariant` or codes: then the weights that these stand for, or are made of if the
        engine holds them (`reference_model_path`).

        Raises:
            WeightsError: They were released or lost, and not replaced; or ranks share them.
        """
        if "weights" in self._memory.memory.lacks:
            raise self._memory.lacking(self._batching.lacks)
        if self._executor.ranks is not None:
            raise WeightsError("ranks share the weights; read them where they come from")
        model = self._executor.model
        return model.module.state_dict() if model.shards is None else model.shards.read()

    def get_weight_version(self) -> int:
        """Return the version of the current weights; 0 for those loaded from the model's folder."""
        return self._weights.version

    def join_weights_group(
        self,
        group: str,
        address: str,
        world_size: int,
        *,
        rank: int = 1,
        backend: Literal["gloo", "nccl"] = "gloo",
        timeout_s: float = 60.0,
    ) -> None:
        """Join a torch.distributed group to which a trainer broadcasts weights (`WeightsGroup`).

        Args:
            group: Its name; a group of the same name is left first.
            address: host:port of the group's TCP store, which rank 0 runs.
            world_size: Number of ranks, rank 0 included.
            rank: This engine's rank, at least 1; that of the first of the model's ranks, which are
                members each.
            backend: "gloo", or "nccl" where trainer and engine have GPUs.
            timeout_s: Longest wait for the other ranks.

        Raises:
            WeightsError: The arguments are invalid, or other ranks did not join in time.
        """
        from ..stages.executor.changes.arguments import check_arguments

        wish = JoinWeightsGroup(group, address, rank, world_size, backend, timeout_s)
        check_arguments(wish, self._weights.limits)
        self._changes.groups.join(wish, self._weights.device).result()

    def leave_weights_group(self, group: str) -> None:
        """Leave a group, if this engine is in it."""
        self._changes.groups.leave(group)

    def release_memory(self, tags: Collection[MemoryTag] = MEMORY_TAGS) -> None:
        """Release memory to the device, for a trainer that shares it.

        Nothing is generated until all memory is resumed; unfinished requests compute their KV
        again afterwards. The reference model keeps its memory.

        Args:
            tags: "kv_cache"; "weights", which are lost: nothing is generated before an update of
                all weights. Default: both.

        Raises:
            WeightsError: A tag is unknown, or a weight update waits for the next step.
        """
        self._check_none_waits()
        memory = self._memory.memory
        memory.begin_release(tags)
        self._report_memory()
        if memory.pending:
            self._uncollected += [pair for _, pairs in self._advance() for pair in pairs]

    def resume_memory(self, tags: Collection[MemoryTag] = MEMORY_TAGS) -> None:
        """Allocate released memory again.

        Raises:
            WeightsError: A tag is unknown; or there is not enough memory (`out_of_memory`), and
                memory that could not be allocated is still released.
        """
        try:
            self._memory.resume(tags)
        finally:
            self._report_memory()

    # --- internals ----------------------------------------------------------------------------

    @property
    def _changes(self) -> WeightChanges:
        from ..stages.executor.parts.weights import WeightChanges

        return self._executor.part(WeightChanges)

    @property
    def _weights(self) -> WeightSyncManager:
        return self._changes.manager

    @property
    def _memory(self) -> MemoryRelease:
        from ..stages.executor.parts.memory import MemoryRelease

        return self._executor.part(MemoryRelease)

    def _check_none_waits(self) -> None:
        if self._weights.pending_version:
            raise WeightsError(
                "a weight update waits for the next step",
                remedy="call step(), or pass blocking=True to that update",
                code="weights_busy",
            )

    def _report_memory(self) -> None:
        """Report to batching the memory that is missing, and that waits to be released."""
        self._batching.receive(self._memory.state_now(), now_ns())
