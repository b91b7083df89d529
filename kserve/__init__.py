"""KServe V2 as Triton's clients speak it: tensors, their codecs, shared memory, and a client.

Clients and servers share this package; the server is `nano_inference.gateway.api.kserve`.
docs/kserve.md has examples. Names are loaded on first use, so that tensors alone don't import gRPC.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .client import KServeClient, KServeError
    from .pool import BufferPool, PoolAcquireTimeout, PoolSlot
    from .tensors import (
        InferRequest,
        InferResponse,
        ModelSpec,
        NamedTensor,
        TensorError,
        TensorSpec,
        text_tensor,
    )

__all__ = [
    "BufferPool",
    "InferRequest",
    "InferResponse",
    "KServeClient",
    "KServeError",
    "ModelSpec",
    "NamedTensor",
    "PoolAcquireTimeout",
    "PoolSlot",
    "TensorError",
    "TensorSpec",
    "text_tensor",
]

_MODULES = {
    "BufferPool": "pool",
    "KServeClient": "client",
    "KServeError": "client",
    "PoolAcquireTimeout": "pool",
    "PoolSlot": "pool",
}
"""The modules of names that are not in `tensors`."""


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_MODULES.get(name, 'tensors')}", __name__), name)
