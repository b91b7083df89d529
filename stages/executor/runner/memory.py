"""Memory of a lane that is released for somebody else on the device, and taken again."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from torch import Tensor

from ....bus.control import MEMORY_TAGS
from ....config import WeightsError, shown
from .device import trim
from .kv_cache import KVCache
from .system_memory import zeros
from .weights import WeightSyncManager


class ReplicaMemory:
    """What of a lane's memory is there.

    A release has two steps, so that steps of the model that are planned already find what they
    need: from `begin_release` on it is known, and new weights are refused; `release` does it.
    The tensors stay the same objects, with their shapes, so whoever holds one finds its memory.

    Attributes:
        pending: What is to be released.
        released: What is.
    """

    def __init__(
        self,
        cache: KVCache,
        weights: WeightSyncManager,
        *,
        draft_cache: KVCache | None = None,
        huge_pages: bool = False,
    ) -> None:
        """Of a model's cache and weights.

        Args:
            cache: The cache.
            weights: The weights.
            draft_cache: Of a draft model, which comes and goes with the other. Its weights stay:
                nobody would send them again.
            huge_pages: Whether what comes back is to have large pages.
        """
        self.pending: set[str] = set()
        self.released: set[str] = set()
        self._caches = (cache,) if draft_cache is None else (cache, draft_cache)
        self._weights = weights
        self._huge_pages = huge_pages

    @property
    def lacks(self) -> tuple[str, ...]:
        """What is released or to be released, and weights that hold nothing."""
        empty = {"weights"} if self._weights.empty else set()
        return tuple(tag for tag in MEMORY_TAGS if tag in self.released | self.pending | empty)

    @property
    def runs(self) -> bool:
        """Whether a step would find all that it needs."""
        return not self.released and not self._weights.empty

    def begin_release(self, tags: Collection[str]) -> None:
        """From now on these are to be released; what is so already stays so.

        Raises:
            WeightsError: There is no such tag; or new weights wait to be put in place.
        """
        _check(tags)
        new = set(tags) - self.released
        if "weights" in new:
            self._weights.close()
        self.pending |= new

    def release(self, tags: Collection[str]) -> None:
        """Gives back what of these is `pending`."""
        for tag in self.pending.intersection(tags):
            for tensor in self._tensors(tag):
                # One number is left, which stands for all.
                tensor.data = tensor.new_zeros(()).expand(tensor.shape)
            if tag == "weights":
                self._weights.empty = True
            self.pending.remove(tag)
            self.released.add(tag)
        for cache in self._caches:
            cache.moved()
        trim(self._weights.device)

    def resume(self, tags: Collection[str]) -> None:
        """Takes these again: KV as zeros, weights that hold nothing until all have come.

        Raises:
            WeightsError: There is no such tag; or there is not enough memory, and what could not
                be had is still released.
        """
        _check(tags)
        for tag in MEMORY_TAGS:
            if tag in self.released.intersection(tags):
                _allocate(self._tensors(tag), huge=self._huge_pages)
                self.released.remove(tag)
            elif tag in tags:
                self.pending.discard(tag)
            if tag == "weights" and tag not in self.released | self.pending:
                self._weights.open()
        for cache in self._caches:
            cache.moved()

    def _tensors(self, tag: str) -> list[Tensor]:
        if tag == "weights":
            return self._weights.parameters()
        return [tensor for cache in self._caches for tensor in (*cache.keys, *cache.values)]


def _check(tags: Collection[str]) -> None:
    if unknown := sorted(set(tags) - set(MEMORY_TAGS)):
        known = " or ".join(MEMORY_TAGS)
        raise WeightsError(f"there is no memory {shown(unknown[0])}; give {known}")


def _allocate(tensors: Iterable[Tensor], *, huge: bool) -> None:
    """New memory for each, or for none."""
    tensors = list(tensors)
    try:
        new = [zeros(old.shape, old.dtype, old.device, huge=huge) for old in tensors]
    except RuntimeError as error:
        raise no_memory(error) from None
    for tensor, memory in zip(tensors, new, strict=True):
        tensor.data = memory


def no_memory(error: RuntimeError) -> WeightsError:
    """For what torch raises, on CUDA too, when there is not enough."""
    return WeightsError(
        f"the device has not enough memory: {str(error).splitlines()[0]}; free some, and resume "
        "again",
        code="out_of_memory",
    )
