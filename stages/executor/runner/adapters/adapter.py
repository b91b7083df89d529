"""A LoRA adapter's tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from ..linear.method import LoraPair


class AdapterLimits(NamedTuple):
    """`engine.max_adapters` and `engine.max_adapter_rank`."""

    adapters: int = 32
    rank: int = 256


@dataclass(frozen=True)
class Adapter:
    """An adapter that fits the model, in its dtype and on its device.

    Attributes:
        id: Its name in requests.
        version: Version of its weights; rises with every change of this id.
        rank: The largest rank of its layers.
        pairs: By module name: as read, those of the whole model; in an AdapterTable, this rank's.
        folder: The folder it was read from; "" if it can't be read again.
        stamp: Stamp of the folder's files.
    """

    id: str
    version: int
    rank: int
    pairs: Mapping[str, LoraPair]
    folder: str = ""
    stamp: str = ""

    @property
    def num_bytes(self) -> int:
        """Bytes of its tensors."""
        return sum(tensor.nbytes for pair in self.pairs.values() for tensor in pair)


def rank_of(pairs: Mapping[str, LoraPair]) -> int:
    """Return the largest rank of an adapter's layers."""
    return max(pair.a.shape[0] for pair in pairs.values())
