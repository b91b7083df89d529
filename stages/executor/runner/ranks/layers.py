"""Modules that several ranks compute together.

Each sharded dimension is cut into parts, and a rank has a run of them. Partial sums are kept and
exchanged in float32, and added by `sum_pairwise`. Where bits must not depend on the number of
ranks, there are always `PARTS` parts, each a product of its own: products of other shapes may be
summed in another order. Else a rank has one part.

Of a bfloat16 model each part's product is rounded to bfloat16, since torch's products return the
dtype of their arguments; only the sum over parts is in float32.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..shards import Box
from .group import PARTS, RankGroup, sum_pairwise
from .plan import Style

Boxes = Callable[[], list[Box]]


@dataclass(frozen=True, eq=False)
class Layout:
    """How dimensions are cut.

    Attributes:
        group: The ranks.
        invariant: Bits don't depend on their number.
    """

    group: RankGroup
    invariant: bool

    @property
    def parts(self) -> int:
        """Parts of each sharded dimension."""
        return PARTS if self.invariant else self.group.size

    @property
    def own(self) -> range:
        """This rank's parts."""
        count = self.parts // self.group.size
        return range(self.group.rank * count, (self.group.rank + 1) * count)

    def sum(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the sum of float32 tensors, one for each own part, over all ranks."""
        return self.group.all_reduce(sum_pairwise(parts).contiguous())

    def run(self, size: int) -> slice:
        """Return this rank's run of a dimension; the last part may be shorter than the others."""
        piece = -(-size // self.parts)
        return slice(self.own.start * piece, min(self.own.stop * piece, size))


class RowParallelLinear(nn.Module):
    """A linear layer over this rank's input features, summed over ranks.

    Attributes:
        parts: A linear layer for each part.
        bias: Added to the sum; None for none.
    """

    def __init__(self, whole: nn.Linear, layout: Layout, *, splits_input: bool) -> None:
        """`splits_input`: the input has the features of all ranks."""
        super().__init__()
        self.in_features, self.out_features = whole.in_features, whole.out_features
        self.bias = whole.bias
        self._layout = layout
        self._width = whole.in_features // layout.parts
        self._splits_input = splits_input
        like = {"device": whole.weight.device, "dtype": whole.weight.dtype}
        self.parts = nn.ModuleList(
            nn.Linear(self._width, whole.out_features, bias=False, **like) for _ in layout.own
        )

    @property
    def is_whole(self) -> bool:
        """Whether no other rank has a part, so that nothing is exchanged."""
        return self._layout.group.size == 1

    def forward(self, x: Tensor) -> Tensor:
        """`[..., in or local in]` to `[..., out]`."""
        own, width = self._layout.own, self._width
        if self._splits_input:
            x = x[..., own.start * width : own.stop * width]
        # Products of strided rows may be summed in another order.
        pieces = [piece.contiguous() for piece in torch.split(x, width, -1)]
        parts = [part(piece).float() for part, piece in zip(self.parts, pieces, strict=True)]
        total = self._layout.sum(parts)
        if self.bias is not None:
            total = total + self.bias.float()
        return total.to(x.dtype)

    def boxes(self) -> list[Box]:
        """Return the places of `weight`."""
        rows, width = slice(0, self.out_features), self._width
        return [
            Box(layer.get_parameter("weight").data, (rows, slice(part * width, (part + 1) * width)))
            for part, layer in zip(self._layout.own, self.parts, strict=True)
        ]


def column_parallel(whole: nn.Linear, layout: Layout, *, fused: int = 1) -> tuple[nn.Linear, int]:
    """Return a linear layer of this rank's output features, and the features of a part.

    `fused`: Layers of one size, side by side in `whole`, each of which is cut.
    """
    size = whole.out_features // fused
    piece = -(-size // layout.parts)
    run = layout.run(size)
    like = {"device": whole.weight.device, "dtype": whole.weight.dtype}
    has_bias = whole.bias is not None
    local = nn.Linear(whole.in_features, fused * (run.stop - run.start), bias=has_bias, **like)
    if layout.invariant:
        # On the instance: kernels, whose products don't depend on the number of columns, take the
        # layer by its type. The reference is weak, or the cycle would keep the model in memory.
        forward: Any = partial(_by_pieces, cast(nn.Linear, weakref.proxy(local)), piece)
        local.forward = forward  # type: ignore[method-assign]
    return local, piece


def _by_pieces(layer: nn.Linear, size: int, x: Tensor) -> Tensor:
    """Compute a linear layer as one product for each run of `size` output features."""
    weights = torch.split(layer.weight, size)
    biases = [None] * len(weights) if layer.bias is None else torch.split(layer.bias, size)
    pieces = [F.linear(x, *each) for each in zip(weights, biases, strict=True)]
    return torch.cat(pieces, dim=-1)


def column_boxes(
    layer: nn.Linear, name: str, whole: nn.Linear, layout: Layout, fused: int
) -> Boxes:
    """Return the places of `weight` or `bias`, one for each part of each fused layer."""
    size = whole.out_features // fused
    run = layout.run(size)
    piece = -(-size // layout.parts)
    parts = [
        slice(index * size + start, index * size + min(start + piece, run.stop))
        for index in range(fused)
        for start in range(run.start, run.stop, piece)
    ]

    def boxes() -> list[Box]:
        tensor = getattr(layer, name).data
        others = tuple(slice(0, width) for width in tensor.shape[1:])
        targets = torch.split(tensor, [part.stop - part.start for part in parts])
        return [Box(target, (part, *others)) for target, part in zip(targets, parts, strict=True)]

    return boxes


class GatheredLinear(nn.Module):
    """A linear layer whose output features are computed by ranks, and gathered.

    Attributes:
        local: This rank's.
    """

    def __init__(self, whole: nn.Linear, layout: Layout) -> None:
        super().__init__()
        self.in_features, self.out_features = whole.in_features, whole.out_features
        self._group = layout.group
        self.local, piece = column_parallel(whole, layout)
        self._most = piece * len(layout.own)

    @property
    def weight(self) -> Tensor:
        """This rank's rows."""
        return self.local.weight

    def forward(self, x: Tensor) -> Tensor:
        """`[..., in]` to `[..., out]`."""
        output: Tensor = self.local(x)
        if self._group.size == 1:
            return output
        if missing := self._most - output.shape[-1]:
            output = F.pad(output, (0, missing))
        ranks = self._group.all_gather(output.contiguous())
        return torch.cat([*ranks], dim=-1)[..., : self.out_features]


class VocabParallelEmbedding(nn.Module):
    """An embedding whose vectors are spread over ranks.

    Attributes:
        inner: The model's own module with this rank's vectors; it may scale them.
    """

    def __init__(self, whole: nn.Embedding, layout: Layout) -> None:
        """`whole` is changed and used."""
        super().__init__()
        self._group = layout.group
        self._rows = layout.run(whole.num_embeddings)
        self.num_embeddings, self.embedding_dim = whole.num_embeddings, whole.embedding_dim
        self.inner = whole
        count = self._rows.stop - self._rows.start
        whole.weight = nn.Parameter(whole.weight[:count].detach().clone(), requires_grad=False)
        whole.num_embeddings = count
        whole.padding_idx = None  # only for gradients, and may be another rank's

    @property
    def weight(self) -> Tensor:
        """This rank's vectors."""
        return self.inner.weight

    def forward(self, ids: Tensor) -> Tensor:
        """`[...]` to `[..., hidden]`."""
        local = ids - self._rows.start
        mine = (local >= 0) & (local < self.inner.num_embeddings)
        vectors = self.inner(torch.where(mine, local, 0))
        # Exact: all but one are zero. One rank adds zero too, for which -0 becomes 0.
        return self._group.all_reduce(torch.where(mine[..., None], vectors, 0) + 0)

    def boxes(self) -> list[Box]:
        """Return the places of `weight`."""
        return [Box(self.inner.weight.data, (self._rows, slice(0, self.embedding_dim)))]


class ParallelExperts(nn.Module):
    """The routed experts of a layer: each rank has a part of each, or some as a whole.

    Every rank has all tokens, so a rank none of whose experts was chosen exchanges zeros.

    Attributes:
        gate_up_proj: `[own experts, parts, 2 * part width, hidden]`; gates first.
        down_proj: `[own experts, parts, hidden, part width]`.
        owners: The rank of each expert, `[experts]`, where each has one; else None.
        own: The experts of which this rank has weights, in their order.
        counts: Tokens of each expert since the last reset, `[experts]`.
    """

    def __init__(self, whole: Any, layout: Layout, *, whole_experts: bool) -> None:
        super().__init__()
        self.num_experts, self.hidden_dim, self.intermediate_dim = whole.down_proj.shape
        self.act_fn = whole.act_fn
        self.counts = torch.zeros(self.num_experts, dtype=torch.int64, device="cpu")
        self._layout = layout
        self.owners: list[int] | None = None
        self.own = list(range(self.num_experts))
        self._parts = layout.own
        num_parts = layout.parts
        if whole_experts:
            share = self.num_experts // layout.group.size
            self.owners = [expert // share for expert in range(self.num_experts)]
            self.own = self._owned(self.owners)
            num_parts = PARTS if layout.invariant else 1
            self._parts = range(num_parts)
        # The sum over an expert's parts is exchanged before the sum over a token's experts, so
        # that no bit depends on who has which. Without need the latter comes first: it is smaller.
        self._by_slots = whole_experts or layout.invariant
        self._width = self.intermediate_dim // num_parts
        like = {"device": whole.down_proj.device, "dtype": whole.down_proj.dtype}
        shape = len(self.own), len(self._parts)
        gates = torch.empty(*shape, 2 * self._width, self.hidden_dim, **like)
        downs = torch.empty(*shape, self.hidden_dim, self._width, **like)
        self.gate_up_proj = nn.Parameter(gates, requires_grad=False)
        self.down_proj = nn.Parameter(downs, requires_grad=False)

    def forward(self, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """The weighted sum of each token's experts.

        Args:
            hidden: `[tokens, hidden]`.
            top_k_index: `[tokens, top_k]`, each token's experts.
            top_k_weights: `[tokens, top_k]`.

        Returns:
            `[tokens, hidden]`.
        """
        tokens, top_k = top_k_index.shape
        chosen = top_k_index.flatten()
        counts = torch.bincount(chosen, minlength=self.num_experts)
        self.counts += counts.to(self.counts.device)
        order = torch.argsort(chosen, stable=True)
        runs = torch.split(order, counts.tolist())
        slots = hidden.new_zeros(tokens * top_k, self.hidden_dim, dtype=torch.float32)
        for place, expert in enumerate(self.own):
            if len(slot := runs[expert]):
                slots[slot] = self._expert(place, hidden[slot // top_k])
        group = self._layout.group
        if self._by_slots:
            slots = group.all_reduce(slots)
        by_token = slots.view(tokens, top_k, self.hidden_dim)
        weights = top_k_weights.float()
        total = hidden.new_zeros(tokens, self.hidden_dim, dtype=torch.float32)
        for place in range(top_k):
            total = total + by_token[:, place] * weights[:, place, None]
        if not self._by_slots:
            total = group.all_reduce(total)
        return total.to(hidden.dtype)

    def _expert(self, place: int, rows: Tensor) -> Tensor:
        """Return this rank's part of an expert's output, `[rows, hidden]` float32."""
        outputs = []
        for gate_up, down in zip(self.gate_up_proj[place], self.down_proj[place], strict=True):
            gate, up = F.linear(rows, gate_up).chunk(2, dim=-1)
            outputs.append(F.linear(self.act_fn(gate) * up, down).float())
        return sum_pairwise(outputs)

    def read_counts(self, *, reset: bool = False) -> list[int]:
        """Return the tokens of each expert since the last reset."""
        counts: list[int] = self.counts.tolist()
        if reset:
            self.counts.zero_()
        return counts

    def set_owners(self, owners: Sequence[int]) -> None:
        """Move experts to other ranks. All ranks call this between the same two steps.

        Args:
            owners: The rank of each expert, `[experts]`; each rank has equally many.

        Raises:
            ValueError: Experts don't belong to ranks, or not equally many to each.
            RankError: A rank has failed.
        """
        group, before = self._layout.group, self.owners
        if before is None or sorted(owners) != sorted(before):
            raise ValueError("each rank must own equally many experts, and all of them be owned")
        leaving = [
            [e for e in range(self.num_experts) if before[e] == rank and owners[e] != rank]
            for rank in range(group.size)
        ]
        kept = [expert for expert in self.own if owners[expert] == group.rank]
        new = self._owned(list(owners))
        found: dict[int, list[Tensor]] = {}
        parameters = (self.gate_up_proj.data, self.down_proj.data)
        for turn in range(max(map(len, leaving))):
            givers = [experts[turn] if turn < len(experts) else None for experts in leaving]
            given = givers[group.rank]
            place = 0 if given is None else self.own.index(given)
            for parameter in parameters:
                ranks = group.all_gather(parameter[place].contiguous())
                for expert, weights in zip(givers, ranks, strict=True):
                    if expert is not None and owners[expert] == group.rank:
                        found.setdefault(expert, []).append(weights.clone())
        # Experts that stay keep their places, so that only those that move are copied.
        places = [expert if expert in kept else None for expert in self.own]
        arrivals = iter(sorted(found))
        for place, expert in enumerate(places):
            if expert is None:
                places[place] = arriving = next(arrivals)
                for parameter, weights in zip(parameters, found.pop(arriving), strict=True):
                    parameter[place].copy_(weights)
        self.own = [expert for expert in places if expert is not None]
        assert sorted(self.own) == new
        self.owners = list(owners)

    def _owned(self, owners: Sequence[int]) -> list[int]:
        rank = self._layout.group.rank
        return [expert for expert in range(self.num_experts) if owners[expert] == rank]

    def gate_up_boxes(self) -> list[Box]:
        """Return the places of `gate_up_proj`."""
        width, hidden = self._width, slice(0, self.hidden_dim)
        found = []
        for place, expert in enumerate(self.own):
            for index, part in enumerate(self._parts):
                for half in range(2):
                    start = half * self.intermediate_dim + part * width
                    target = self.gate_up_proj.data[place, index, half * width :][:width]
                    where = (slice(expert, expert + 1), slice(start, start + width), hidden)
                    found.append(Box(target[None], where))
        return found

    def down_boxes(self) -> list[Box]:
        """Return the places of `down_proj`."""
        width, hidden = self._width, slice(0, self.hidden_dim)
        return [
            Box(
                self.down_proj.data[place, index][None],
                (slice(expert, expert + 1), hidden, slice(part * width, (part + 1) * width)),
            )
            for place, expert in enumerate(self.own)
            for index, part in enumerate(self._parts)
        ]


def shard_module(whole: Any, style: Style, layout: Layout) -> tuple[nn.Module, Mapping[str, Boxes]]:
    """Return a module that computes this rank's part, and the places of the whole parameters.

    Args:
        whole: The module, on the meta device; it may be used as a part.
        style: Of the plan.
        layout: How to cut.
    """
    if style is Style.VOCABULARY:
        embedding = VocabParallelEmbedding(whole, layout)
        return embedding, {"weight": embedding.boxes}
    if style in (Style.EXPERT_WIDTH, Style.WHOLE_EXPERTS):
        experts = ParallelExperts(whole, layout, whole_experts=style is Style.WHOLE_EXPERTS)
        return experts, {
            "gate_up_proj": experts.gate_up_boxes,
            "down_proj": experts.down_boxes,
        }
    if style in (Style.ROWS, Style.ROWS_OF_WHOLE):
        rows = RowParallelLinear(whole, layout, splits_input=style is Style.ROWS_OF_WHOLE)
        return rows, {"weight": rows.boxes, **({} if rows.bias is None else {"bias": _all(rows)})}
    fused = 2 if style is Style.COLUMNS_PACKED else 1
    module: nn.Module
    if style is Style.COLUMNS_GATHERED:
        module = gathered = GatheredLinear(whole, layout)
        local = gathered.local
    else:
        module = local = column_parallel(whole, layout, fused=fused)[0]
    names = ["weight"] if whole.bias is None else ["weight", "bias"]
    return module, {name: column_boxes(local, name, whole, layout, fused) for name in names}


def _all(module: RowParallelLinear) -> Boxes:
    return lambda: [Box(module.bias.data, (slice(0, module.out_features),))]
