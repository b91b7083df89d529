"""The groups of a rank: all ranks, those that share its layers, and the ends of the pipeline.

Rank = stage * tensor_parallel + tensor rank.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import msgspec

from .....config import EngineConfig
from .group import OneRank, RankGroup
from .pipelining import PipelineRank
from .rank_error import RankError
from .shared_memory import SharedMemoryGroup, make_memory

MOST_DESCRIPTORS = 5
"""Limit of a rank's descriptors: its connections for commands and calls, and its groups' memory."""

_SLOT_BYTES = 1 << 22
"""Tensors that are larger go in pieces."""


class RankGroups(msgspec.Struct, frozen=True, eq=False):
    """The groups of one rank.

    Attributes:
        all: All ranks.
        stage: Ranks that share this one's layers.
        outputs: The ends of the pipeline, if this rank is one of them; else None.
        pipeline: This rank's place in it; None with one stage.
    """

    all: RankGroup
    stage: RankGroup
    outputs: RankGroup | None = None
    pipeline: PipelineRank | None = None

    def set_timeout(self, timeout_s: float) -> None:
        """Set the longest wait for other ranks."""
        for group in self._each():
            group.timeout_s = timeout_s

    def fail(self, reason: str) -> None:
        """Let the operations of ranks that wait raise `RankError`. From any thread."""
        for group in self._each():
            group.fail(reason)

    def close(self) -> None:
        """Close all of them."""
        for group in self._each():
            group.close()

    def _each(self) -> list[RankGroup]:
        others = (self.stage, self.outputs)
        return [self.all, *(each for each in others if each is not None and each is not self.all)]


class GroupMemories:
    """The memory of all ranks' groups, made by rank 0.

    Attributes:
        groups: Groups of rank 0.
    """

    def __init__(self, config: EngineConfig) -> None:
        """Raises RankError if it can't be made."""
        self._width, self._last = config.tensor_parallel, config.num_ranks - config.tensor_parallel
        self._stages: list[SharedMemoryGroup | int] = []
        self._all = SharedMemoryGroup.create(config.num_ranks, _SLOT_BYTES)
        if not self._last:
            self.groups = RankGroups(self._all, self._all)
            return
        stage: RankGroup = OneRank()
        outputs: SharedMemoryGroup | None = None
        try:
            self._outputs = outputs = SharedMemoryGroup.create(2, _SLOT_BYTES)
            if self._width > 1:
                stage = first = SharedMemoryGroup.create(self._width, _SLOT_BYTES)
                self._stages.append(first)
                for _ in range(1, config.pipeline_parallel):
                    self._stages.append(make_memory(self._width, _SLOT_BYTES))
            pipeline = PipelineRank(self._all, self._width, outputs)
        except BaseException:
            self.close_descriptors()
            RankGroups(self._all, stage, outputs).close()
            raise
        self.groups = RankGroups(self._all, stage, outputs, pipeline)

    def of(self, rank: int) -> list[int]:
        """Return the descriptors of a rank's groups, for `join_groups`."""
        found = [self._all.descriptor]
        if self._stages:
            stage = self._stages[rank // self._width]
            found.append(stage if isinstance(stage, int) else stage.descriptor)
        if self._last and rank == self._last:
            found.append(self._outputs.descriptor)
        return found

    def close_descriptors(self) -> None:
        """Close those of groups without rank 0, which other ranks have."""
        while self._stages:
            if isinstance(stage := self._stages.pop(), int):
                os.close(stage)


def join_groups(
    config: EngineConfig, all_ranks: SharedMemoryGroup, memories: Sequence[int]
) -> RankGroups:
    """Attach a rank's other groups.

    Args:
        config: The settings.
        all_ranks: The group of all ranks.
        memories: Descriptors of the others, as of `GroupMemories.of`.

    Raises:
        RankError: They can't be attached.
    """
    if config.pipeline_parallel == 1:
        return RankGroups(all_ranks, all_ranks)
    stage_number, tensor_rank = divmod(all_ranks.rank, config.tensor_parallel)
    left = list(memories)
    stage: RankGroup = OneRank()
    outputs: RankGroup | None = None
    if config.tensor_parallel > 1:
        stage = SharedMemoryGroup.attach(left.pop(0), tensor_rank)
    if stage_number == config.pipeline_parallel - 1 and tensor_rank == 0:
        outputs = SharedMemoryGroup.attach(left.pop(0), 1)
    if left:
        raise RankError("a rank has groups that it doesn't know")
    for group in (stage, outputs):
        if group is not None:
            group.timeout_s = all_ranks.timeout_s
    pipeline = PipelineRank(all_ranks, config.tensor_parallel, outputs)
    return RankGroups(all_ranks, stage, outputs, pipeline)
