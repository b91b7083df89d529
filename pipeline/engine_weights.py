"""New weights for an engine on its caller's thread, by the executor's own means."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Literal

from ..bus.control import MEMORY_TAGS, JoinWeightsGroup, MemoryTag, UpdateWeights
from ..bus.weights import (
    FolderWeights,
    GroupWeights,
    InFlight,
    WeightsSource,
    check_in_flight,
)
from ..config import WeightsError
from ..stages.batching import BatchingCore
from ..stages.executor.changes.arguments import check_arguments
from ..stages.executor.core import ExecutorCore
from ..stages.executor.runner.weights import (
    WeightGroups,
    WeightSyncManager,
    fetch,
    weights_lost,
)
from .engine_requests import Finished, memory_released

if TYPE_CHECKING:
    from torch import Tensor


def receive_weights(
    source: Mapping[str, Tensor] | WeightsSource,
    version: int | None,
    weights: WeightSyncManager,
    groups: WeightGroups,
    timeout_s: float,
) -> dict[str, Tensor]:
    """Weights that are checked to be finite, in the model's dtypes and by its names.

    Blocks until they are there.

    Args:
        source: The tensors, or where they are.
        version: What they are to be counted as.
        weights: Of the model that is to take them.
        groups: Those that the engine is in.
        timeout_s: How long others may be silent.

    Raises:
        WeightsError: They can't be taken now, are not to be had, or are not for this model.
    """
    if not isinstance(source, Mapping | WeightsSource):
        raise WeightsError(
            f"new weights are a state dict, FolderWeights(path), SharedWeights(...).source or "
            f"WeightsGroup(...).broadcast(...).source, not {type(source).__name__}"
        )
    try:
        weights.check_version(version)
    except WeightsError:
        if isinstance(source, GroupWeights):
            groups.skip(source.group)  # else these would be taken for the next ones
        raise
    if isinstance(source, Mapping):
        tensors = source
    else:
        check_arguments(UpdateWeights(source, timeout_s=timeout_s), weights.limits)
        tensors = fetch(source, groups, timeout_s, weights.limits)
    return weights.prepare(tensors, checkpoint=isinstance(source, FolderWeights))


class WeightsDoor:
    """The part of an engine that is about weights, and the memory that a trainer may have."""

    _groups: WeightGroups
    _batching: BatchingCore
    _uncollected: list[Finished]

    @property
    def _executor(self) -> ExecutorCore:
        raise NotImplementedError

    def _advance(self) -> list[tuple[str, list[Finished]]]:
        raise NotImplementedError

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
        """Replaces the model's weights; tokens sampled from then on carry the next version.

        What the prefix cache holds from older weights is never used for a sequence that starts
        after the update.

        Args:
            state_dict: The whole model's, by parameter name, on any device and in any dtype. Or
                where it is, as docs/weights.md says: it is fetched before this returns.
            blocking: Put in place before this returns; otherwise before the next step, and the
                tensors must not be changed till then.
            in_flight: What becomes of requests under way. keep: they go on from their KV as it
                is. retract: they compute the KV of their tokens again, with the new weights.
                abort: the next step ends them with what they have.
            version: What to count from then on, above the present version; None for the next.
            partial: Whether parameters that are not in `state_dict` stay as they are.
            timeout_s: How long a group may be silent while weights come from it.

        Raises:
            WeightsError: The weights can't be had or read, are not finite or don't fit the model,
                or an update waits already; weights and version are as they were. Or writing them
                failed midway, as `weights_lost`: nothing is generated before an update has
                brought all of them. Not blocking, the next step raises what shows only then.
        """
        check_in_flight(in_flight)
        weights = self._executor.weights
        tensors = receive_weights(state_dict, version, weights, self._groups, timeout_s)
        sync = weights.sync_blocking if blocking else weights.start_sync
        try:
            version = sync(tensors, version, partial=partial)
        finally:
            self._tell_memory()
        self._batching.change_weights(version, in_flight)

    def state_dict(self) -> dict[str, Tensor]:
        """The weights in place, by parameter name, as `update_weights` takes them; not copies.

        Raises:
            WeightsError: They were released or lost, and no others have come.
        """
        if "weights" in self._executor.memory.lacks:
            raise self._unable()
        return self._executor.model.module.state_dict()

    def get_weight_version(self) -> int:
        """The version of the weights in place; 0 are those that were loaded."""
        return self._executor.weights.version

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
        """Joins a torch.distributed group that a trainer broadcasts weights to (`WeightsGroup`).

        Args:
            group: Its name; one of this name that was joined before is left.
            address: host:port of the group's TCP store, which rank 0 keeps.
            world_size: How many there are, rank 0 included.
            rank: This engine's, at least 1.
            backend: "gloo", or "nccl" where trainer and engine have GPUs.
            timeout_s: How long to wait for the others.

        Raises:
            WeightsError: The group can't be, or the others did not come in time.
        """
        wish = JoinWeightsGroup(group, address, rank, world_size, backend, timeout_s)
        weights = self._executor.weights
        check_arguments(wish, weights.limits)
        self._groups.join(wish, weights.device).result()

    def leave_weights_group(self, group: str) -> None:
        """Leaves a group, if this engine is in it."""
        self._groups.leave(group)

    def release_memory(self, tags: Collection[MemoryTag] = MEMORY_TAGS) -> None:
        """Gives memory back to the device, for a trainer that shares it.

        Until all is resumed nothing is generated; requests under way compute their KV again
        afterwards. What is released already stays so, and the reference model keeps its memory.

        Args:
            tags: "kv_cache"; "weights", which are lost: nothing is generated before an update has
                brought all of them. Both when not given.

        Raises:
            WeightsError: There is no such tag, or a weight update waits for the next step.
        """
        memory = self._executor.memory
        memory.begin_release(tags)
        self._tell_memory()
        if memory.pending:
            self._uncollected += [pair for _, pairs in self._advance() for pair in pairs]

    def resume_memory(self, tags: Collection[MemoryTag] = MEMORY_TAGS) -> None:
        """Takes memory again that was released; what is there already stays as it is.

        Raises:
            WeightsError: There is no such tag; or there is not enough memory (`out_of_memory`),
                and what could not be had is still released.
        """
        try:
            self._executor.resume_memory(tags)
        finally:
            self._tell_memory()

    def _tell_memory(self) -> None:
        """Report to batching the memory that is missing, and that waits to be released."""
        memory = self._executor.memory
        self._batching.change_memory(memory.lacks, tuple(memory.pending))

    def _unable(self) -> WeightsError:
        """The error of a call for which weights or KV cache are missing."""
        if lost := self._executor.weights.lost:
            return weights_lost(lost)
        return memory_released(self._batching.lacks)
