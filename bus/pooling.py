"""What the messages between stages say of embeddings: which vector is wanted, and the vector."""

from __future__ import annotations

from ..config import PoolingKind
from .control import InternalPart


class Pooling(InternalPart, frozen=True, array_like=True):
    """How a prompt's last hidden states become its vector.

    Attributes:
        kind: Of which tokens.
        normalize: Whether the vector gets the length 1.
        dimensions: How many of its first numbers are wanted.
        whole: Whether all of a prompt has to be in one step, since its tokens look ahead. There is
            no KV then.
    """

    kind: PoolingKind
    normalize: bool
    dimensions: int
    whole: bool = False

    @property
    def reads_all(self) -> bool:
        """Whether each token of the prompt has to be computed, though its KV may be cached."""
        return self.whole or self.kind != "last"


class PooledPrompt(InternalPart, frozen=True, array_like=True):
    """The vector of a prompt that is computed. Its sequence ends with it.

    Attributes:
        vector: `[Pooling.dimensions]` float32, little-endian.
        adapter_version: Of the adapter that it was made with; 0 without one.
    """

    seq_id: int
    vector: bytes
    adapter_version: int = 0
