"""The contract of attention back ends."""

from __future__ import annotations

from typing import ClassVar, NamedTuple, Protocol, TypeVar

from torch import Tensor

from ..attention_options import AttentionOptions
from ..batch import Rows
from ..kv_cache import KVCache

PREFIX = "nano_"
"""The beginning of the names of our attention functions, all of which take latents."""

Batch = TypeVar("Batch")


class QKV(NamedTuple):
    """Queries, keys and values of a step, `[tokens, heads or kv_heads, dim]` each.

    Attributes:
        queries: Rotated.
        keys: Rotated.
        values: Their width may differ from that of keys. Those of a latent layer are a view of the
            keys.
    """

    queries: Tensor
    keys: Tensor
    values: Tensor


class AttentionBackend(Protocol[Batch]):
    """A way to compute attention for a step over a paged KV cache.

    One is chosen when a model is loaded, for all layers and steps. It keeps nothing of a step:
    `prepare` returns what depends on the step alone, and `forward` takes it once per layer. Both
    run on the model's thread, without waiting for the device.

    Attributes:
        name: The value of the setting `engine.attention`.
    """

    name: ClassVar[str]

    def prepare(self, rows: Rows, slots: Tensor, tables: Tensor, contexts: Tensor) -> Batch:
        """Prepare one step for all layers. Reads and writes no KV.

        Args:
            rows: The rows, on the host; their block tables cover all of their tokens.
            slots: `[tokens]` int64, the slot mapping on the device.
            tables: `[rows, blocks]` int64, the block tables on the device.
            contexts: `[rows]` int64, `rows.contexts` on the device.

        Returns:
            The argument for `forward`, for any number of passes over this step. It may share the
            memory of the arguments, which must not change before the last one. A layer's first
            call may add to it.
        """
        ...

    def multiply_heads(self, rows: Tensor, matrices: Tensor, out: Tensor) -> None:
        """Multiply each head's rows with a matrix of its own, for latent attention.

        Args:
            rows: `[tokens, heads, inputs]`, the last dimension contiguous.
            matrices: `[heads, inputs, outputs]`, each contiguous, or its transpose.
            out: `[tokens, heads, outputs]` for the products, the last dimension contiguous.
        """
        ...

    def forward(
        self, batch: Batch, cache: KVCache, layer: int, qkv: QKV, options: AttentionOptions
    ) -> Tensor:
        """Attention of one layer for the whole step.

        Writes the new keys and values to this layer's slots of the cache, and nothing else; nothing
        for a layer that reads another's, which has written the same ones. A
        token attends to its own sequence only, up to itself, or up to `rows.reach` in models with
        such images. Overwrites earlier results of `cache.gather`.

        Args:
            batch: The step.
            cache: The KV cache; the positions before each row's first must be in it.
            layer: The layer, of a kind that the back end was made for.
            qkv: The tokens.
            options: Options of the layer, the same in every call.

        Returns:
            `[tokens, heads, value_dim]` in the queries' dtype.

        Raises:
            KeyError: The back end was made for a model without layers of this kind.
        """
        ...
