"""The bus within one process."""

from .bus import MemoryBus

__all__ = ["MemoryBus"]
