"""Embeddings in messages between stages: the requested pooling, and the vector."""

from __future__ import annotations

from ..config import PoolingKind
from .control import InternalPart


class Pooling(InternalPart, frozen=True, array_like=True):
    """Pooling of a prompt's last hidden states.

    Attributes:
        kind: The pooled tokens.
        normalize: Scale the vector to length 1.
        dimensions: Number of leading components.
        whole: The whole prompt must be in one step, since attention is bidirectional; there is no
            KV.
    """

    kind: PoolingKind
    normalize: bool
    dimensions: int
    whole: bool = False

    @property
    def reads_all(self) -> bool:
        """Whether every prompt token must be computed, even if its KV is cached."""
        return self.whole or self.kind != "last"


class PooledPrompt(InternalPart, frozen=True, array_like=True):
    """The vector of a computed prompt, which ends its sequence.

    Attributes:
        vector: `[Pooling.dimensions]` float32, little-endian.
        adapter_version: Version of its adapter; 0 without one.
    """

    seq_id: int
    vector: bytes
    adapter_version: int = 0
