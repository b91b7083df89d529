"""Sparse attention whose indexer chooses the tokens that a query sees (DSA: DeepSeek V3.2, GLM 5),
or blocks of tokens (MiniMax M3).

An indexer scores all earlier tokens by keys of its own, one small key per token, and the layer
attends to the best; a context of at most as many is seen whole. The cache keeps the indexer's keys
beside the layer's own (IndexKeys).

In a step, Transformers' own indexer runs over each row by itself, with a cache that stores and
gathers the row's keys. Two things are done in another way, so that they don't depend on how a
prompt is cut: products of queries with cached keys, token by token (`_product`), and the choice
among equal scores, of which the earliest are taken (`_Choice`). Transformers takes any of them.
Scores of real models, sums over 32 heads or more, are hardly ever equal.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from types import FunctionType
from typing import Any, ClassVar

import msgspec
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .....config import ModelError
from ..attention_options import AttentionOptions, Span
from ..batch import IntArray, Rows
from ..kv_cache import KVCache
from ..state.kinds import IndexKeys
from .backend import PREFIX, QKV
from .gather import soft_cap, softmax, visible

_MOST_SCORES = 1 << 25
"""Scores of an indexer in memory at a time (float32: 128 MiB)."""


class IndexedStep:
    """A step for indexers; stands for Transformers' cache and keeps nothing of other keys."""

    def __init__(self, rows: Rows, cache: KVCache) -> None:
        self.rows, self.cache = rows, cache
        self._block_size = cache.block_size

    def update(
        self, keys: Tensor, values: Tensor, _layer: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Return the tensors, which our attention stores."""
        return keys, values

    def pieces(self, most: int) -> Iterator[_Piece]:
        """Cut the rows so that tokens times context is at most `most`, unless of one token."""
        token = 0
        for row, (start, count) in enumerate(
            zip(self.rows.starts, self.rows.num_tokens, strict=True)
        ):
            size = max(most // int(start + count), 1)
            for done in range(0, int(count), size):
                some = min(size, int(count) - done)
                slots = self.slots(row, np.arange(start + done + some))
                yield _Piece(token + done, some, int(start) + done, slots, self.cache)
            token += int(count)

    def slots(self, row: int, positions: IntArray) -> Tensor:
        """Return the places of a row's positions in the cache."""
        blocks = self.rows.tables[row, positions // self._block_size]
        found = torch.from_numpy(blocks * self._block_size + positions % self._block_size)
        return found.to(self.cache.keys[0].device)

    def attend_chosen(
        self,
        module: Any,
        call: Mapping[str, Any],
        layer: int,
        options: AttentionOptions,
        qkv: QKV,
        output: Tensor,
    ) -> None:
        """Replace the attention of tokens that see more than is chosen, one by one.

        Their keys and values are in the cache.

        Args:
            module: The attention layer.
            call: Of the attention function, with numbers of blocks of positions,
                `[1, tokens, most]` or `[1, kv_heads, tokens, most]`, in a layer that chooses.
            layer: The index of the layer in the cache.
            options: Options of the layer.
            qkv: The tokens.
            output: `[tokens, heads, value_dim]`, with all tokens seen.
        """
        found = [call[each.keyword] for each in _KINDS if call.get(each.keyword) is not None]
        if not found:
            return
        chosen: Tensor = found[0].flatten(0, -3)
        heads, most = qkv.keys.shape[1], chosen.shape[-1]
        # Query heads are taken together that share keys and a choice.
        parts = max(heads, len(chosen))
        chosen = chosen.repeat_interleave(parts // len(chosen), 0)
        size = 1 if module.indexer is None else module.indexer.forward.size
        rows, positions = self.rows.flat
        of_heads = torch.arange(parts, device=output.device)[:, None] // (parts // heads)
        sinks = None if options.sinks is None else options.sinks.view(parts, -1)
        # Shapes are fixed here, so the function mode is not needed.
        with torch._C.DisableTorchFunction():
            for token in np.flatnonzero(positions // size >= most).tolist():
                blocks = chosen[:, token].sort().values.cpu().numpy()
                seen = (blocks[..., None] * size + np.arange(size)).reshape(len(blocks), -1)
                hidden = torch.from_numpy(seen > positions[token]).to(output.device)
                index = self.slots(int(rows[token]), np.minimum(seen, positions[token])) * heads
                context = self.cache.gather(layer, (index + of_heads).view(-1))
                keys, values = (each.view(parts, most * size, -1) for each in context)
                queries = qkv.queries[token].reshape(parts, -1, qkv.queries.shape[-1])
                scores = torch.bmm(queries, keys.transpose(1, 2)) * options.scale
                if options.softcap is not None:
                    scores = soft_cap(scores, options.softcap)
                scores = scores.masked_fill(hidden[:, None], float("-inf"))
                attended = torch.bmm(softmax(scores, sinks), values)
                output[token] = attended.reshape(output.shape[1:])


class _Piece(msgspec.Struct, frozen=True):
    """Tokens of one row; Transformers' cache for an indexer's call.

    Attributes:
        first: First token in the batch.
        count: Tokens.
        start: Position of the first.
        slots: `[start + count]`, places in the cache of all positions up to the last.
        cache: The cache.
    """

    first: int
    count: int
    start: int
    slots: Tensor
    cache: KVCache

    def update_indexer(self, keys: Tensor, layer: int) -> Tensor:
        """Store the tokens' keys, `[1, count, width]`; return those of all positions."""
        kept = self.cache.index_keys[layer].view(-1, keys.shape[-1])
        kept.index_copy_(0, self.slots[self.start :], keys[0].to(kept.dtype))
        return kept.index_select(0, self.slots)[None].to(keys.dtype)

    @property
    def layers(self) -> _Layers:
        """The caches of single layers, in Transformers' terms."""
        return _Layers(self)


class _Layers(msgspec.Struct, frozen=True):
    piece: _Piece
    layer: int = 0

    def __getitem__(self, layer: int) -> _Layers:
        return _Layers(self.piece, layer)

    def update_index(self, keys: Tensor) -> Tensor:
        """As `update_indexer`, for `[1, 1, count, width]`."""
        return self.piece.update_indexer(keys[:, 0], self.layer)[:, None]


class _Choice:
    """A causal mask that an indexer adds to its scores, and then the scores that it chooses from.

    Attributes:
        dtype: That of a mask to be added.
    """

    dtype = torch.float32

    def __init__(self, seen: Tensor) -> None:
        """`seen`: `[tokens, positions]`, true where a token may see a position."""
        self._hidden = ~seen[None]

    def __radd__(self, scores: Tensor) -> _Choice:
        self._scores = scores.masked_fill(self._hidden, float("-inf"))
        self.shape = scores.shape
        return self

    def topk(self, count: int, dim: int) -> Any:
        """Return a tensor's top-k, of equal scores the earliest first."""
        assert dim == -1
        found = self._scores.sort(dim=-1, descending=True, stable=True)
        return torch.return_types.topk((found.values[..., :count], found.indices[..., :count]))


class _Torch:
    """The module torch for an indexer's code, with another `matmul`."""

    def __init__(self, matmul: Callable[[Tensor, Tensor], Tensor]) -> None:
        self.matmul = matmul

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _product(left: Tensor, right: Tensor) -> Tensor:
    """`[1, tokens, rows, width]` by `[1, tokens or 1, width, keys]`.

    Keys are the rows of each product, so that its shape but for their number is fixed.
    """
    right = right.expand(-1, left.shape[1], -1, -1)
    if left.shape[2] == 1:
        return (right.mT.contiguous() * left).sum(-1)[:, :, None]
    pairs = zip(left[0], right[0].mT, strict=True)
    return torch.stack([F.linear(keys, queries).mT for queries, keys in pairs])[None]


def _product_by_head(left: Tensor, right: Tensor) -> Tensor:
    """`[1, rows, tokens, width]` by `[1, 1, width, keys]`, likewise."""
    return _product(left.transpose(1, 2), right).transpose(1, 2)


class Indexer:
    """The forward pass of one indexer within our steps; other callers run its class's own.

    Attributes:
        size: Positions of a block that is chosen as a whole.
        most: Blocks that are chosen.
        heads: Heads of its queries.
        width: Numbers of a key.
    """

    names: ClassVar = {"update_indexer", "matmul", "relu", "topk", "index_topk"}
    """Names in the code of its forward pass."""

    matmul: ClassVar = staticmethod(_product)
    keyword: ClassVar = "indices"
    """The keyword of its choice in calls of the attention function."""

    def __init__(self, module: Any) -> None:
        """`module`: one of a known kind."""
        self._module = module
        own: Any = inspect.unwrap(type(module).forward)
        self._signature = inspect.signature(own)
        globals_ = {**own.__globals__, "torch": _Torch(self.matmul)}
        self._run = FunctionType(own.__code__, globals_, own.__name__, own.__defaults__)
        self._run.__kwdefaults__ = own.__kwdefaults__
        self.size, self.most, self.heads = self._sizes()
        self.width: int = module.head_dim

    def _sizes(self) -> tuple[int, int, int]:
        return 1, self._module.index_topk, self._module.n_heads

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the chosen blocks of each token, `[1, tokens, most]`, or of each token for each
        KV head, `[1, kv_heads, tokens, most]`.

        Those of a token that sees no more than `most` are of no use.
        """
        call = dict(self._signature.bind(self._module, *args, **kwargs).arguments)
        hidden: Tensor = call["hidden_states"]
        count = hidden.shape[1]
        step = call.get("past_key_values")
        if isinstance(step, IndexedStep):
            found = [self._choose(call, step_piece) for step_piece in step.pieces(self._largest)]
            return torch.cat(found, dim=-2)
        if self._module.config._attn_implementation.startswith(PREFIX):
            return hidden.new_zeros(1, count, self.most, dtype=torch.int32)  # the probe
        own: Tensor = type(self._module).forward(**call)
        return own

    @property
    def _largest(self) -> int:
        return max(_MOST_SCORES // self.heads, 1)

    def _choose(self, call: dict[str, Any], piece: _Piece) -> Tensor:
        stop, count = piece.first + piece.count, call["hidden_states"].shape[1]
        part = {name: _cut(each, piece.first, stop, count) for name, each in call.items()}
        if "attention_mask" in part:
            device = call["hidden_states"].device
            part["attention_mask"] = _Choice(visible(piece.start, piece.count, 0, Span(), device))
        found: Tensor = self._run(**{**part, "past_key_values": piece})
        return F.pad(found, (0, self.most - found.shape[-1]))


class BlockIndexer(Indexer):
    """An indexer that chooses blocks of positions for each KV head (MiniMax M3)."""

    names: ClassVar = {"update_index", "matmul", "amax", "topk", "topk_blocks", "local_blocks"}
    matmul: ClassVar = staticmethod(_product_by_head)
    keyword: ClassVar = "block_indices"

    def _sizes(self) -> tuple[int, int, int]:
        module = self._module
        return module.block_size, module.topk_blocks, module.num_heads


def _cut(value: Any, start: int, stop: int, count: int) -> Any:
    if isinstance(value, tuple):
        return tuple(_cut(each, start, stop, count) for each in value)
    if isinstance(value, Tensor) and value.dim() > 1 and value.shape[1] == count:
        return value[:, start:stop]
    return value


_KINDS = (Indexer, BlockIndexer)


def take_indexers(module: Any) -> tuple[IndexKeys, ...]:
    """Let the indexers of a model keep their keys in our cache; return these keys' descriptions.

    Raises:
        ModelError: An indexer works in a way that is not known here.
    """
    found = []
    for layer in module.modules():
        indexer = getattr(layer, "indexer", None)
        if indexer is None:
            continue
        if not isinstance(vars(indexer).get("forward"), Indexer):
            names = {*inspect.unwrap(type(indexer).forward).__code__.co_names}
            kind = next((each for each in _KINDS if each.names <= names), None)
            if kind is None or not hasattr(indexer, "head_dim"):
                raise ModelError(
                    f"{type(module).__name__} can't be served: an indexer of a kind that is not "
                    "known here chooses the tokens that its layers see; choose another model"
                )
            indexer.forward = kind(indexer)
        found.append(IndexKeys(layer.layer_idx, indexer.forward.width))
    if found:
        module.get_decoder().register_forward_pre_hook(_with_step, with_kwargs=True)
    return tuple(found)


def _with_step(_module: nn.Module, args: Any, call: dict[str, Any]) -> tuple[Any, Any]:
    if (cache := call.get("kv_cache")) is None:
        return args, call
    call = {**call}
    if (rows := call.pop("step_rows", None)) is None:
        raise RuntimeError("a step with an indexer needs its rows on the host")
    step = IndexedStep(rows, cache)
    return args, {**call, "past_key_values": step, "indexed_step": step}
