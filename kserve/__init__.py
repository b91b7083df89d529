"""KServe V2, as Triton's clients speak it: tensors, their codec, shared memory, and a client.

What a client and a server both need; the server is `nano_inference.gateway.api.kserve`.
docs/kserve.md has examples. Names are loaded on first use, so that a user of tensors alone does not
pay for gRPC.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .client import KServeClient
    from .errors import KServeError
    from .pool import BufferPool, PoolAcquireTimeout
    from .pool_slot import PoolSlot
    from .tensors import (
        InferRequest,
        InferResponse,
        ModelSpec,
        NamedTensor,
        TensorError,
        TensorSpec,
        text_tensor,
    )

_HOME = {
    "BufferPool": ".pool",
    "InferRequest": ".tensors",
    "InferResponse": ".tensors",
    "KServeClient": ".client",
    "KServeError": ".errors",
    "ModelSpec": ".tensors",
    "NamedTensor": ".tensors",
    "PoolAcquireTimeout": ".pool",
    "PoolSlot": ".pool_slot",
    "TensorError": ".tensors",
    "TensorSpec": ".tensors",
    "text_tensor": ".tensors",
}

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


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name], __name__), name)
