"""Parts of rank 0's model runner that have the other ranks do the same."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ....config import AdapterError, EngineConfig, WeightsError
from .adapters.adapter import Adapter, rank_of
from .adapters.table import AdapterTable
from .comparison import compare_shards
from .kv_cache import KVCache
from .linear.method import LoraPair
from .loaded_model import LoadedModel
from .memory import ReplicaMemory
from .ranks import commands as do
from .ranks.group import OneRank
from .ranks.processes import Ranks
from .ranks.rank_error import RankError
from .sharded_model import load_sharded


def load_shards(config: EngineConfig) -> tuple[Ranks | None, LoadedModel]:
    """Load a model like `load_ranks`, over several ranks or `rank_invariant`."""
    if config.num_ranks == 1:
        model = load_sharded(config, OneRank())
        compare_shards(config, model, OneRank())
        return None, model
    threads = config.cpu_threads or max(_processors() // config.num_ranks, 1)
    torch.set_num_threads(threads)
    ranks = Ranks(config, threads)
    try:
        model = load_sharded(config, ranks.groups.stage, ranks.groups.pipeline)
        compare_shards(config, model, ranks.groups.stage)
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
            self._ranks.tell(do.CopyBlocks(tuple(pairs)))
        super().copy_blocks(pairs)

    def clear(self) -> None:
        self._ranks.tell(do.ClearCache())
        super().clear()


@dataclass(eq=False)
class LeaderAdapters(AdapterTable):
    """The adapters of all ranks, each of which has its part. They have the same slots."""

    ranks: Ranks = field(kw_only=True)

    def stage(self, adapter: Adapter) -> None:
        super().stage(adapter)
        layers = []
        for name, (a, b) in adapter.pairs.items():
            layers.append((name, *a.shape, b.shape[-1]))
        self.ranks.tell(do.StageAdapter(adapter.id, adapter.version, tuple(layers)))
        for pair in adapter.pairs.values():
            for tensor in pair:
                self.ranks.group.broadcast(tensor.contiguous())
        replies = self.ranks.replies()
        if failed := next((reply for reply in replies if reply.error), None):
            # On all ranks or on none.
            self.unstage(adapter.id, adapter.version)
            raise AdapterError(failed.error, code=failed.code)

    def unstage(self, id: str, version: int) -> None:
        super().unstage(id, version)
        self.ranks.tell(do.UnstageAdapter(id, version))

    def switch(self, id: str, version: int) -> tuple[int, int]:
        slots = super().switch(id, version)
        self.ranks.tell(do.SwitchAdapter(id, version))
        return slots


def receive_adapter(
    command: do.StageAdapter, broadcast: Callable[[Tensor], None], dtype: torch.dtype
) -> Adapter:
    """Return the whole adapter that rank 0 sends after its command.

    Args:
        command: The command.
        broadcast: `RankGroup.broadcast`.
        dtype: Dtype of its tensors.

    Raises:
        RankError: A rank has failed.
    """
    pairs = {}
    for name, rank, inputs, outputs in command.layers:
        pairs[name] = pair = LoraPair(
            torch.empty(rank, inputs, dtype=dtype), torch.empty(1, rank, outputs, dtype=dtype)
        )
        for tensor in pair:
            broadcast(tensor)
    return Adapter(command.adapter, command.version, rank_of(pairs), pairs)


class LeaderMemory(ReplicaMemory):
    """The memory of all ranks: each releases its own."""

    def __init__(self, ranks: Ranks, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._ranks = ranks

    def release(self, tags: Collection[str]) -> None:
        if pending := self.pending.intersection(tags):
            self._ranks.tell(do.Release(tuple(sorted(pending))))
        super().release(tags)

    def resume(self, tags: Collection[str]) -> None:
        released = self.released.intersection(tags)
        super().resume(tags)
        if not released:
            return
        replies = self._ranks.ask(do.Resume(tuple(sorted(released))))
        if failed := next((reply for reply in replies if reply.error), None):
            # On all ranks or on none.
            self.pending |= released
            self.release(released)
            raise WeightsError(failed.error, code=failed.code)
