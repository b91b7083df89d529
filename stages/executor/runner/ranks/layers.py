"""Modules that several ranks compute together: embeddings, experts, and those of `linear`.

Partial sums are kept and exchanged in float32, and added by `sum_pairwise`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..shards import Box, boxes_in
from .group import PARTS, Layout, sum_pairwise
from .linear import shard_linear
from .plan import Style


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
        self.inner: Any = whole
        count = self._rows.stop - self._rows.start
        whole.weight = nn.Parameter(whole.weight[:count].detach().clone(), requires_grad=False)
        whole.num_embeddings = count
        whole.padding_idx = None  # only for gradients, and may be another rank's

    @property
    def weight(self) -> Tensor:
        """This rank's vectors."""
        weight: Tensor = self.inner.weight
        return weight

    @property
    def is_plain(self) -> bool:
        """Whether the vectors are no codes."""
        return "weight" in self.inner._parameters

    def forward(self, ids: Tensor) -> Tensor:
        """`[...]` to `[..., hidden]`."""
        local = ids - self._rows.start
        mine = (local >= 0) & (local < self.inner.num_embeddings)
        vectors = self.inner(torch.where(mine, local, 0))
        # Exact: all but one are zero. One rank adds zero too, for which -0 becomes 0.
        return self._group.all_reduce(torch.where(mine[..., None], vectors, 0) + 0)

    def boxes(self, _: str) -> list[Box]:
        """Return the places of `weight`."""
        place = (self._rows, slice(0, self.embedding_dim))
        return [msgspec.structs.replace(box, place=place) for box in boxes_in(self.inner, "weight")]


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

    def boxes(self, name: str) -> list[Box]:
        """Return the places of "gate_up_proj" or "down_proj"."""
        width, hidden = self._width, slice(0, self.hidden_dim)
        found = []
        for place, expert in enumerate(self.own):
            whole = slice(expert, expert + 1)
            for index, part in enumerate(self._parts):
                if name == "down_proj":
                    columns = slice(part * width, (part + 1) * width)
                    found.append(
                        Box(self.down_proj.data[place, index][None], (whole, hidden, columns))
                    )
                    continue
                for half in range(2):
                    start = half * self.intermediate_dim + part * width
                    target = self.gate_up_proj.data[place, index, half * width :][:width]
                    found.append(Box(target[None], (whole, slice(start, start + width), hidden)))
        return found


def shard_module(whole: Any, style: Style, layout: Layout) -> nn.Module:
    """Return a module that computes this rank's part; `boxes_in` has the places of its parameters.

    Args:
        whole: The module, on the meta device; it may be used as a part.
        style: Style of the module in the plan.
        layout: Cuts of the dimensions.
    """
    match style:
        case Style.VOCABULARY:
            return VocabParallelEmbedding(whole, layout)
        case Style.EXPERT_WIDTH | Style.WHOLE_EXPERTS:
            return ParallelExperts(whole, layout, whole_experts=style is Style.WHOLE_EXPERTS)
        case _:
            return shard_linear(whole, style, layout)
