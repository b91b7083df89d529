"""Parts of rank 0's model runner that have the other ranks do the same."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ....config import EngineConfig, WeightsError
from .kv_cache import KVCache
from .loaded_model import LoadedModel
from .memory import ReplicaMemory
from .model import load_model
from .ranks.commands import ClearCache, CopyBlocks, NewWeights, Release, Resume
from .ranks.group import OneRank, RankError
from .ranks.processes import Ranks
from .sharded_model import load_sharded
from .shards import ShardedWeights


def load_ranks(config: EngineConfig) -> tuple[Ranks | None, LoadedModel]:
    """Load the model of the settings; over several ranks, start the others, and load each one's
    shard.

    Returns:
        The other ranks, None if there are none, and the model or rank 0's shard.

    Raises:
        ModelError: The model can't be loaded.
        RankError: A rank has ended.
    """
    if config.num_ranks == 1 and config.rank_invariant:
        return None, load_sharded(config, OneRank())
    if config.num_ranks == 1:
        return None, load_model(config)
    threads = config.cpu_threads or max(_processors() // config.num_ranks, 1)
    torch.set_num_threads(threads)
    ranks = Ranks(config, threads)
    try:
        model = load_sharded(config, ranks.groups.stage, ranks.groups.pipeline)
        ranks.loaded()
    except RankError as error:
        try:
            raise ranks.why(error) from None
        finally:
            ranks.close()
    except BaseException:
        ranks.close()
        raise
    return ranks, model


@cache
def _processors() -> int:
    """Return torch's default number of threads, as it was before ranks shared them out."""
    return torch.get_num_threads()


class LeaderCache(KVCache):
    """A KV cache whose blocks every rank has, each with its own heads."""

    def __init__(
        self, ranks: Ranks, model: LoadedModel, num_blocks: int, block_size: int, **options: Any
    ) -> None:
        super().__init__(model, num_blocks, block_size, **options)
        self._ranks = ranks

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        if pairs:
            self._ranks.tell(CopyBlocks(tuple(pairs)))
        super().copy_blocks(pairs)

    def clear(self) -> None:
        self._ranks.tell(ClearCache())
        super().clear()


class LeaderMemory(ReplicaMemory):
    """The memory of all ranks: each releases its own."""

    def __init__(self, ranks: Ranks, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._ranks = ranks

    def release(self, tags: Collection[str]) -> None:
        if pending := self.pending.intersection(tags):
            self._ranks.tell(Release(tuple(sorted(pending))))
        super().release(tags)

    def resume(self, tags: Collection[str]) -> None:
        released = self.released.intersection(tags)
        super().resume(tags)
        if not released:
            return
        replies = self._ranks.ask(Resume(tuple(sorted(released))))
        if failed := next((reply for reply in replies if reply.error), None):
            # On all ranks or on none.
            self.pending |= released
            self.release(released)
            raise WeightsError(failed.error, code=failed.code)


def write_to_ranks(ranks: Ranks, shards: ShardedWeights, new_weights: Mapping[str, Tensor]) -> None:
    """Put new weights in place on all ranks, each of which takes its parts.

    Raises:
        RankError: A rank has failed. The weights may be a mixture then.
    """
    ranks.tell(NewWeights())
    shards.write_everywhere(ranks.group.broadcast, new_weights)
