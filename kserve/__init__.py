"""KServe V2 as Triton's clients speak it: tensors, their codecs, shared memory, and a client.

Clients and servers share this package; the server is `nano_inference.gateway.api.kserve`.
docs/kserve.md has examples. Names are loaded on first use, so that tensors alone don't import gRPC.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .client import KServeClient as KServeClient
    from .client import KServeError as KServeError
    from .pool import BufferPool as BufferPool
    from .pool import PoolAcquireTimeout as PoolAcquireTimeout
    from .pool import PoolSlot as PoolSlot
    from .tensors import InferRequest as InferRequest
    from .tensors import InferResponse as InferResponse
    from .tensors import ModelSpec as ModelSpec
    from .tensors import NamedTensor as NamedTensor
    from .tensors import TensorError as TensorError
    from .tensors import TensorSpec as TensorSpec
    from .tensors import text_tensor as text_tensor

_NAMES = {
    ".client": "KServeClient KServeError",
    ".pool": "BufferPool PoolAcquireTimeout PoolSlot",
    ".tensors": """
        InferRequest InferResponse ModelSpec NamedTensor TensorError TensorSpec text_tensor
    """,
}
_HOME = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name], __name__), name)
