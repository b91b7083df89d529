"""Whole prompts that attend together, in one call of PyTorch's flash attention (CUDA).

One by one, many short prompts would keep the host busy and the device waiting.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

import msgspec
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.varlen import varlen_attn

from ..attention_options import AttentionOptions
from ..kv_cache import KVCache
from ..loaded_model import LoadedModel
from .backend import QKV
from .gather import PrefillRow


class WholePrompts(msgspec.Struct, frozen=True):
    """Adjacent rows that start their sequences, and see all tokens before them.

    Attributes:
        start: First token of the rows in the batch.
        stop: One past their last.
        offsets: `[rows + 1]` int32, each row's first token from `start` on, and the end.
        longest: Tokens of the longest row.
    """

    start: int
    stop: int
    offsets: Tensor
    longest: int

    def attend(self, _cache: KVCache, _layer: int, qkv: QKV, options: AttentionOptions) -> Tensor:
        """Compute these rows, `[tokens, heads, value_dim]`."""
        tokens = slice(self.start, self.stop)
        queries = qkv[0][tokens]
        # Not all versions of varlen_attn let query heads share a KV head.
        keys, values = (_repeated(part[tokens], queries.shape[1]) for part in qkv[1:])
        limits = self.offsets, self.offsets, self.longest, self.longest
        output = varlen_attn(
            queries, keys, values, *limits, scale=options.scale, window_size=(-1, 0)
        )
        assert isinstance(output, Tensor)
        return output


def can_join_prompts(model: LoadedModel) -> bool:
    """Return whether the device's flash attention computes all layers of a model."""
    if model.device.type != "cuda" or torch.version.hip:
        return False
    if model.dtypes.activations not in (torch.float16, torch.bfloat16):
        return False
    if torch.cuda.get_device_capability(model.device) < (8, 0):
        return False
    plain = all(each.softcap is None and each.sinks is None for each in model.attention_options)
    return plain and all(
        layer.key_dim == layer.value_dim and layer.key_dim % 8 == 0 and layer.key_dim <= 256
        for layer in model.layers
    )


def join_prompts(
    layout: Sequence[PrefillRow], contexts: Tensor
) -> Iterator[PrefillRow | WholePrompts]:
    """Replace adjacent whole prompts of a layout by one entry.

    Args:
        layout: Rows after those of one token.
        contexts: `[rows]`, their contexts, on the device: of a whole prompt, its length.
    """
    row = 0
    for whole, group in groupby(layout, lambda each: each.index is None and each.mask is None):
        rows = list(group)
        if whole and len(rows) > 1:
            ends = contexts[row : row + len(rows)].cumsum(0)
            offsets = F.pad(ends, (1, 0)).to(torch.int32)
            longest = max(each.stop - each.start for each in rows)
            yield WholePrompts(rows[0].start, rows[-1].stop, offsets, longest)
        else:
            yield from rows
        row += len(rows)


def _repeated(part: Tensor, heads: int) -> Tensor:
    """`[tokens, kv_heads, dim]` to `[tokens, heads, dim]`."""
    tokens, kv_heads, dim = part.shape
    if kv_heads == heads:
        return part
    return part[:, :, None].expand(-1, -1, heads // kv_heads, -1).reshape(tokens, heads, dim)
