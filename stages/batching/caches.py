"""The prefix caches by name."""

from __future__ import annotations

from typing import Literal

from .cache import KVCacheManager


def cache_class(name: Literal["paged", "radix"]) -> type[KVCacheManager]:
    """Return a class of prefix caches, without importing the other."""
    if name == "paged":
        from .paged import PagedKVCache

        return PagedKVCache
    from .radix import RadixKVCache

    return RadixKVCache
