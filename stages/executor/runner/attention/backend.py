"""The contract of attention: what a back end is asked in every step."""

from __future__ import annotations

from typing import ClassVar, NamedTuple, Protocol, TypeVar

from torch import Tensor

from ..batch import Rows
from ..kv_cache import KVCache
from ..loaded_model import AttentionOptions

Batch = TypeVar("Batch")


class QKV(NamedTuple):
    """What one layer makes of the tokens of a step, `[tokens, heads or kv_heads, dim]` each.

    Attributes:
        queries: Rotated.
        keys: Rotated.
        values: Their width may differ from that of keys.
    """

    queries: Tensor
    keys: Tensor
    values: Tensor


class AttentionBackend(Protocol[Batch]):
    """One way to compute attention for a step over a paged KV cache.

    One is chosen when a model is loaded, for all of its layers and steps. It keeps nothing of a
    step: all that depends on the step alone is in what `prepare` gives, and `forward` takes it once
    for each layer. Both run on the thread that runs the model, without waiting for the device.

    Attributes:
        name: As the setting `engine.attention` has it.
    """

    name: ClassVar[str]

    def prepare(self, rows: Rows, slots: Tensor, tables: Tensor, contexts: Tensor) -> Batch:
        """Lays out one step for all layers. Reads and changes no KV.

        Args:
            rows: The rows, on the host; their block tables name blocks for all of their tokens.
            slots: `[tokens]` int64, the slot mapping on the device.
            tables: `[rows, blocks]` int64, the block tables on the device.
            contexts: `[rows]` int64, `rows.contexts` on the device.

        Returns:
            What `forward` of this back end takes, for any number of passes over this same step. It
            may share the memory of the arguments, which must stay as they are until the last one.
            What only a layer can tell may be added to it at that layer's first call.
        """
        ...

    def forward(
        self, batch: Batch, cache: KVCache, layer: int, qkv: QKV, options: AttentionOptions
    ) -> Tensor:
        """Attention of one layer for the whole step.

        Writes the new keys and values to this layer's slots of the cache, and nothing else; then a
        query finds its own position there like all others. A token's row sees its own sequence
        only, up to itself. What `cache.gather` gave before is overwritten.

        Args:
            batch: The step.
            cache: The KV cache; the positions before each row's first must be in it.
            layer: The layer, which is of a kind that the back end was made for.
            qkv: The tokens.
            options: The layer's, the same in every call.

        Returns:
            `[tokens, heads, value_dim]` in the queries' dtype.

        Raises:
            KeyError: The model that the back end was made for has no layer of this kind.
        """
        ...
