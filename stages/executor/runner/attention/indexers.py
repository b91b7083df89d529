"""Sparse attention whose indexer chooses the tokens that a query sees (DSA: DeepSeek V3.2, GLM 5).

An indexer scores all earlier tokens by keys of its own, one small key per token, and the layer
attends to the `index_topk` best; a context of at most so many is seen whole. The cache keeps the
indexer's keys beside the layer's own (IndexKeys).

In a step, Transformers' own indexer runs over each row by itself, with a cache that stores and
gathers the row's keys. Two things are done in another way, so that they don't depend on how a
prompt is cut: products of queries with cached keys, token by token (`_product`), and the choice
among equal scores, of which the earliest are taken (`_Choice`). Transformers takes any of them.
Scores of real models, sums over 32 heads or more, are hardly ever equal.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import FunctionType
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .....config import ModelError
from ..attention_options import AttentionOptions, Span
from ..batch import IntArray, Rows
from ..kv_cache import KVCache
from ..state.kinds import StateTensor
from .backend import QKV
from .gather import soft_cap, softmax, visible

_MOST_SCORES = 1 << 25
"""Scores of an indexer in memory at a time (float32: 128 MiB)."""

_NAMES = {"update_indexer", "matmul", "relu", "topk", "index_topk"}
"""Names in the code of a known indexer."""


class IndexKeys(msgspec.Struct, frozen=True):
    """The keys of one layer's indexer.

    Attributes:
        layer: The `layer_idx`.
        width: Numbers of a token.
    """

    layer: int
    width: int

    def tensors(self, dtype: torch.dtype) -> tuple[StateTensor, ...]:
        return (StateTensor((self.width,), dtype, True),)


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
        chosen: Tensor,
        layer: int,
        options: AttentionOptions,
        qkv: QKV,
        output: Tensor,
    ) -> None:
        """Replace the attention of tokens that see more than are chosen, one by one.

        Their keys and values are in the cache.

        Args:
            chosen: `[1, tokens, index_topk]`, positions.
            layer: The index of the layer in the cache.
            options: Options of the layer.
            qkv: The tokens.
            output: `[tokens, heads, value_dim]`, with all tokens seen.
        """
        cache, heads, most = self.cache, qkv.keys.shape[1], chosen.shape[-1]
        rows, positions = self.rows.flat
        of_heads = torch.arange(heads, device=output.device)[:, None]
        sinks = None if options.sinks is None else options.sinks.view(heads, -1)
        # Shapes are fixed here, so the function mode is not needed.
        with torch._C.DisableTorchFunction():
            for token in np.flatnonzero(positions >= most).tolist():
                seen = chosen[0, token].sort().values.cpu().numpy()
                index = self.slots(int(rows[token]), seen) * heads + of_heads
                keys, values = (
                    each.view(heads, most, -1) for each in cache.gather(layer, index.view(-1))
                )
                queries = qkv.queries[token].view(heads, -1, qkv.queries.shape[-1])
                scores = torch.bmm(queries, keys.transpose(1, 2)) * options.scale
                if options.softcap is not None:
                    scores = soft_cap(scores, options.softcap)
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
        """As of a tensor, but the earliest of equal scores come first."""
        assert dim == -1
        found = self._scores.sort(dim=-1, descending=True, stable=True)
        return torch.return_types.topk((found.values[..., :count], found.indices[..., :count]))  # type: ignore[attr-defined]


class _Torch:
    """The module torch for an indexer's code, with `_product` in place of `matmul`."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def matmul(left: Tensor, right: Tensor) -> Tensor:
        return _product(left, right)


def _product(left: Tensor, right: Tensor) -> Tensor:
    """`[1, tokens, rows, width]` by `[1, tokens or 1, width, keys]`.

    Keys are the rows of each product, so that its shape but for their number is fixed.
    """
    right = right.expand(-1, left.shape[1], -1, -1)
    if left.shape[2] == 1:
        return (right.mT.contiguous() * left).sum(-1)[:, :, None]
    pairs = zip(left[0], right[0].mT, strict=True)
    return torch.stack([F.linear(keys, queries).mT for queries, keys in pairs])[None]


class Indexer:
    """The forward pass of one indexer within our steps; other callers run its class's own."""

    def __init__(self, module: Any) -> None:
        """`module`: one that `take_indexers` knows."""
        self._module = module
        own: Any = inspect.unwrap(type(module).forward)
        self._signature = inspect.signature(own)
        globals_ = {**own.__globals__, "torch": _Torch()}
        self._run = FunctionType(own.__code__, globals_, own.__name__, own.__defaults__)
        self._run.__kwdefaults__ = own.__kwdefaults__

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the chosen positions of each token, `[1, tokens, index_topk]`.

        Those of a token that sees no more than `index_topk` are of no use.
        """
        call = dict(self._signature.bind(self._module, *args, **kwargs).arguments)
        hidden: Tensor = call["hidden_states"]
        count, most = hidden.shape[1], self._module.index_topk
        step = call.get("past_key_values")
        if not isinstance(step, IndexedStep):
            if isinstance(call["attention_mask"], Tensor):
                found: Tensor = type(self._module).forward(**call)
                return found
            return hidden.new_zeros(1, count, most, dtype=torch.int32)  # the probe
        chosen = hidden.new_zeros(1, count, most, dtype=torch.int32)
        for piece in step.pieces(max(_MOST_SCORES // self._module.n_heads, 1)):
            stop = piece.first + piece.count
            part = {name: _cut(each, piece.first, stop, count) for name, each in call.items()}
            seen = visible(piece.start, piece.count, 0, Span(), hidden.device)
            part["attention_mask"] = _Choice(seen)
            part["past_key_values"] = piece
            found = self._run(**part)
            chosen[:, piece.first : stop, : found.shape[-1]] = found
        return chosen


def _cut(value: Any, start: int, stop: int, count: int) -> Any:
    if isinstance(value, tuple):
        return tuple(_cut(each, start, stop, count) for each in value)
    if isinstance(value, Tensor) and value.dim() > 1 and value.shape[1] == count:
        return value[:, start:stop]
    return value


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
        forward: Any = inspect.unwrap(type(indexer).forward)
        known = {*forward.__code__.co_names} >= _NAMES
        if not (known and hasattr(indexer, "head_dim") and hasattr(indexer, "n_heads")):
            raise ModelError(
                f"{type(module).__name__} can't be served: an indexer of a kind that is not known "
                "here chooses the tokens that its layers see; choose another model"
            )
        if not isinstance(vars(indexer).get("forward"), Indexer):
            indexer.forward = Indexer(indexer)
        found.append(IndexKeys(layer.layer_idx, indexer.head_dim))
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
