"""Memory of the executor that is released for other users of the device, and allocated again."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from torch import Tensor

from ....bus.control import MEMORY_TAGS
from ....config import WeightsError, shown
from .device import trim
from .kv_cache import KVCache
from .system_memory import LargePages, zeros
from .weights.sync_manager import WeightSyncManager


class ReplicaMemory:
    """The memory of weights and KV cache, by tags.

    A release has two steps, so that planned steps find what they need: `begin_release` marks it and
    refuses new weights; `release` frees it. Tensors stay the same objects, with their shapes.

    Attributes:
        pending: Tags to be released.
        released: Tags without memory.
    """

    def __init__(
        self, caches: Collection[KVCache], weights: WeightSyncManager, *, huge_pages: bool = False
    ) -> None:
        """Take the tensors' owners.

        Args:
            caches: The KV caches of the model and of its draft model, whose weights stay: no
                update would bring them again.
            weights: The model's weights.
            huge_pages: Allocate in large pages again.
        """
        self.pending: set[str] = set()
        self.released: set[str] = set()
        self._caches = caches
        self._weights = weights
        self._huge_pages = huge_pages

    @property
    def lacks(self) -> tuple[str, ...]:
        """Tags that are released or to be released, and weights that are empty."""
        empty = {"weights"} if self._weights.empty else set()
        return tuple(tag for tag in MEMORY_TAGS if tag in self.released | self.pending | empty)

    @property
    def runs(self) -> bool:
        """Whether a step has all that it needs."""
        return not self.released and not self._weights.empty

    def begin_release(self, tags: Collection[str]) -> None:
        """Mark tags to be released.

        Raises:
            WeightsError: A tag is unknown, or new weights wait to be put in place.
        """
        _check(tags)
        new = set(tags) - self.released
        if "weights" in new:
            self._weights.close()
        self.pending |= new

    def release(self, tags: Collection[str]) -> None:
        """Free those of these tags that are `pending`."""
        for tag in self.pending.intersection(tags):
            for tensor in self._tensors(tag):
                # One number remains, expanded to the shape.
                tensor.data = tensor.new_zeros(()).expand(tensor.shape)
            if tag == "weights":
                self._weights.empty = True
            self.pending.remove(tag)
            self.released.add(tag)
        for cache in self._caches:
            cache.moved()
        trim(self._weights.device)

    def resume(self, tags: Collection[str]) -> None:
        """Allocate tags again: KV as zeros, weights empty until an update brings all.

        Raises:
            WeightsError: A tag is unknown, or memory is short; then the tag stays released.
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
        return [tensor for cache in self._caches for tensor in cache.tensors]


def _check(tags: Collection[str]) -> None:
    if unknown := sorted(set(tags) - set(MEMORY_TAGS)):
        known = " or ".join(MEMORY_TAGS)
        raise WeightsError(f"there is no memory {shown(unknown[0])}; give {known}")


def _allocate(tensors: Iterable[Tensor], *, huge: bool) -> None:
    """Allocate memory for all tensors, or for none."""
    tensors = list(tensors)
    try:
        make = LargePages().zeros if huge else zeros
        new = [make(old.shape, old.dtype, old.device) for old in tensors]
    except RuntimeError as error:
        raise no_memory(error) from None
    for tensor, memory in zip(tensors, new, strict=True):
        tensor.data = memory


def no_memory(error: RuntimeError) -> WeightsError:
    """Return the error for torch's out-of-memory errors, on CUDA too."""
    return WeightsError(
        f"the device has not enough memory: {str(error).splitlines()[0]}; free some, and resume "
        "again",
        code="out_of_memory",
    )
