"""Loaded adapters, in capacities and reports of stages."""

from __future__ import annotations

import msgspec


class LoadedAdapter(msgspec.Struct, frozen=True, array_like=True):
    """An adapter loaded in an executor.

    Attributes:
        id: The name in requests.
        version: Of its weights.
        folder: The source folder; "" if the weights can't be read again.
        rank: The largest rank of its layers.
        num_bytes: Device memory.
    """

    id: str
    version: int
    folder: str = ""
    rank: int = 0
    num_bytes: int = 0
