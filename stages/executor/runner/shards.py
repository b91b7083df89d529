"""The addresses of whole tensors' elements on this rank, for loading and updates."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor, nn

_PIECE_BYTES = 1 << 26
"""Bytes of a whole tensor that are sent at a time, if one of its rows is not larger."""


class Box(NamedTuple):
    """A part of a whole tensor that this rank has.

    Attributes:
        target: The numbers here, a view of a parameter.
        place: The part of the whole tensor, a slice with bounds in each dimension.
    """

    target: Tensor
    place: tuple[slice, ...]

    def write(self, part: Tensor, start: int = 0) -> None:
        """Copy rows of the part, `[rows, ...]`, of which the first one is `start`."""
        if not self.place:  # a number without dimensions
            self.target.copy_(part)
        else:
            self.target[start : start + part.shape[0]].copy_(part)


def whole_box(owner: nn.Module, name: str) -> Box:
    """Return the place of a tensor that a module has as a whole."""
    tensor: Tensor = getattr(owner, name).data
    return Box(tensor, tuple(slice(0, size) for size in tensor.shape))


def boxes_in(module: nn.Module, name: str) -> list[Box]:
    """Return the parts of a tensor of the whole model that a rank's model has.

    A module that has parts of its tensors, or holds them in another form, has a method `boxes`.

    Args:
        module: The model.
        name: Name of the whole tensor.
    """
    owner_name, _, own_name = name.rpartition(".")
    owner = module.get_submodule(owner_name)
    boxes: Callable[[str], list[Box]] | None = getattr(owner, "boxes", None)
    return [whole_box(owner, own_name)] if boxes is None else boxes(own_name)


class Shard(msgspec.Struct, frozen=True):
    """This rank's part of a whole tensor.

    Attributes:
        shape: Shape of the whole tensor.
        dtype: Dtype of the tensor.
        boxes: Returns the parts. They may change: experts move, memory is released.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    boxes: Callable[[], Sequence[Box]]

    def write(self, tensor: Tensor) -> None:
        """Copy this rank's parts of a whole tensor."""
        self.write_rows(tensor, 0)

    def write_rows(self, rows: Tensor, start: int) -> None:
        """Copy this rank's parts of rows (first dimension) of a whole tensor.

        Args:
            rows: `[rows, ...]`.
            start: The first one's place in the whole tensor.
        """
        with torch.no_grad():
            for box in self.boxes():
                if not box.place:  # a number without dimensions
                    box.write(rows)
                    continue
                own, *others = box.place
                first = max(own.start, start)
                last = min(own.stop, start + rows.shape[0])
                if first < last:
                    part = rows[(slice(first - start, last - start), *others)]
                    box.write(part, first - own.start)


class Receipt:
    """One source of new weights, of which every rank has received its parts.

    Other ranks hold theirs under this number until it is written, or this object is gone.

    Attributes:
        number: Number of the receipt.
        layout: `ShardedWeights.layout` when it began.
    """

    def __init__(self, number: int, layout: int) -> None:
        self.number, self.layout = number, layout


@dataclass(frozen=True, eq=False)
class NewShard:
    """A new whole tensor, of which each rank holds its parts.

    Attributes:
        shape: Shape of the whole tensor.
        dtype: Dtype of the tensor, the model's.
        parts: This rank's, in the order of `Shard.boxes`.
        digest: Digest of the whole tensor's bytes, if the model has it under several names; else 0.
        receipt: With which it came.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: tuple[Tensor, ...]
    digest: int
    receipt: Receipt

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return _product(self.shape) * self.dtype.itemsize


NewWeight = Tensor | NewShard
"""A new value of a parameter: as a whole on rank 0, or in parts on all ranks."""


class ShardedWeights:
    """The whole model's tensors, and this rank's parts of them.

    Attributes:
        whole: The whole model, on the meta device if this rank has a part of it.
        shards: By the names of its tensors, tied ones under each name.
        layout: Rises when parts change places, as when experts move.
    """

    def __init__(self, whole: nn.Module, shards: Mapping[str, Shard]) -> None:
        self.whole = whole
        self.shards = shards
        self.layout = 0

    @classmethod
    def of(cls, module: nn.Module) -> ShardedWeights:
        """Return the weights of a model that is here as a whole."""
        shards = {
            name: Shard(tuple(tensor.shape), tensor.dtype, partial(boxes_in, module, name))
            for name, tensor in module.state_dict(keep_vars=True).items()
        }
        return cls(module, shards)

    def write(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy this rank's parts of whole tensors."""
        for name, tensor in tensors.items():
            self.shards[name].write(tensor)

    def missing(self, names: Collection[str]) -> list[str]:
        """Return the tensors that these leave out; one of several names of a tied tensor is
        enough."""
        own = self.whole.state_dict(keep_vars=True)
        given = {id(own[name]) for name in own.keys() & names}
        return sorted(name for name, tensor in own.items() if id(tensor) not in given)

    def parts_of(self, name: str, tensor: Tensor) -> tuple[Tensor, ...]:
        """Return copies of this rank's parts of a whole tensor, for `write_parts`."""
        return tuple(
            tensor[place].clone() if place else tensor.clone()
            for _, place in self.shards[name].boxes()
        )

    def write_parts(self, parts: Mapping[str, Sequence[Tensor]]) -> None:
        """Copy this rank's parts of tensors, while `layout` is that of `parts_of`."""
        with torch.no_grad():
            for name, tensors in parts.items():
                for box, tensor in zip(self.shards[name].boxes(), tensors, strict=True):
                    box.write(tensor)

    def read(self) -> dict[str, Tensor]:
        """Return copies of the whole tensors, of which this rank must have every part."""
        found = {}
        for name, shard in self.shards.items():
            found[name] = whole = torch.empty(shard.shape, dtype=shard.dtype)
            for target, place in shard.boxes():
                whole[place] = target
        return found

    def write_everywhere(
        self, broadcast: Callable[[Tensor], None], tensors: Mapping[str, Tensor] | None
    ) -> None:
        """Send whole tensors from rank 0 to all ranks, each of which keeps its parts.

        They are sent in pieces, so that another rank needs memory for one piece more. All ranks
        call this between the same two steps.

        Args:
            broadcast: `RankGroup.broadcast`.
            tensors: On rank 0 by name, as in `shards`; None on others.

        Raises:
            RankError: A rank has failed. The weights may be a mixture then.
        """
        names = sorted(self.shards)
        chosen = torch.zeros(len(names), dtype=torch.uint8)
        if tensors is not None:
            chosen = torch.tensor([name in tensors for name in names], dtype=torch.uint8)
        broadcast(chosen)
        for name, is_sent in zip(names, chosen.tolist(), strict=True):
            if is_sent:
                self._send(broadcast, self.shards[name], None if tensors is None else tensors[name])

    def _send(
        self, broadcast: Callable[[Tensor], None], shard: Shard, tensor: Tensor | None
    ) -> None:
        # A number without dimensions is sent as one row.
        shape = shard.shape or (1,)
        row_bytes = max(shard.dtype.itemsize * _product(shape[1:]), 1)
        count = max(_PIECE_BYTES // row_bytes, 1)
        for start in range(0, shape[0], count):
            stop = min(start + count, shape[0])
            piece = torch.empty((stop - start, *shape[1:]), dtype=shard.dtype)
            if tensor is not None:
                piece.copy_(
                    tensor.view(shape)[start:stop] if not shard.shape else tensor[start:stop]
                )
            broadcast(piece)
            if shard.shape:
                shard.write_rows(piece, start)
            else:
                shard.write(piece[0])


def _product(numbers: Sequence[int]) -> int:
    product = 1
    for number in numbers:
        product *= number
    return product
