"""The addresses of whole tensors' elements on this rank, for loading and updates."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Self

import msgspec
import torch
from torch import Tensor, nn

Held = Tensor | Mapping[str, Tensor]
"""A new part in the form in which a box has it, so that only copying remains."""


class Box(msgspec.Struct, frozen=True):
    """A part of a whole tensor that this rank has.

    A box of another form than the whole tensor's overrides all methods.

    Attributes:
        target: The numbers here, a view of a parameter.
        place: The part of the whole tensor, a slice with bounds in each dimension.
    """

    target: Tensor
    place: tuple[slice, ...]

    @property
    def converts(self) -> bool:
        """Whether the numbers have another form here, which takes time to make."""
        return False

    @property
    def fixed(self) -> str:
        """Why no new numbers can be written; "" if they can."""
        return ""

    def hold(self, whole: Tensor) -> Held:
        """Return a copy of the part of a whole tensor, for `put`."""
        return (whole[self.place] if self.place else whole).clone()

    def put(self, part: Held) -> None:
        """Copy a part that is held: a tensor, or some elements of it at `places`."""
        if isinstance(part, Tensor):
            self.target.copy_(part)
        else:
            places, values = (part[name].to(self.target.device) for name in ("places", "values"))
            self.target.put_(places, values)

    def read(self) -> Tensor:
        """Return the part's numbers, in the form of the whole tensor."""
        return self.target

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

    @property
    def converts(self) -> bool:
        """Whether a part has another form here."""
        return any(box.converts for box in self.boxes())

    @property
    def fixed(self) -> str:
        """Why no new numbers can be written; "" if they can."""
        return next((box.fixed for box in self.boxes() if box.fixed), "")

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
    parts: tuple[Held, ...]
    digest: int
    receipt: Receipt

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return product(self.shape) * self.dtype.itemsize


NewWeight = Tensor | NewShard
"""A new value of a parameter: as a whole on rank 0, or in parts on all ranks."""


class ShardedWeights:
    """The whole model's tensors, and this rank's parts of them.

    Attributes:
        whole: The whole model, on the meta device if the model here has parts of its tensors, or
            holds them in another form.
        shards: By the names of its tensors, tied ones under each name.
        by_rank: Whether the model is one rank's part.
        others: Plain models that are here as a whole, and get the same new weights.
        layout: Rises when parts change places, as when experts move.
    """

    def __init__(
        self, whole: nn.Module, shards: Mapping[str, Shard], *, by_rank: bool = True
    ) -> None:
        self.whole = whole
        self.shards = shards
        self.by_rank = by_rank
        self.others: list[nn.Module] = []
        self.layout = 0

    @classmethod
    def of(cls, module: nn.Module, whole: nn.Module | None = None) -> Self:
        """Return the weights of a model that is here as a whole.

        Args:
            module: The model.
            whole: The same model with plain tensors, on the meta device, if `module` holds some in
                another form; None if it holds none.
        """
        whole = module if whole is None else whole
        state = whole.state_dict(keep_vars=True)
        names: dict[int, list[str]] = {}
        for name, tensor in state.items():
            names.setdefault(id(tensor), []).append(name)

        others: list[nn.Module] = []

        def boxes(tied: Sequence[str]) -> list[Box]:
            # One tensor of the whole model may be several here.
            models = (module, *others)
            found = [box for one in models for name in tied for box in boxes_in(one, name)]
            return [*{(box.target.data_ptr(), type(box)): box for box in found}.values()]

        shards = {
            name: Shard(tuple(tensor.shape), tensor.dtype, partial(boxes, names[id(tensor)]))
            for name, tensor in state.items()
        }
        weights = cls(whole, shards, by_rank=False)
        weights.others = others
        return weights

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

    @cached_property
    def converts(self) -> bool:
        """Whether some tensors have another form here."""
        return any(shard.converts for shard in self.shards.values())

    def parts_of(self, name: str, tensor: Tensor) -> tuple[Held, ...]:
        """Return copies of this rank's parts of a whole tensor, for `write_parts`."""
        with torch.no_grad():
            return tuple(box.hold(tensor) for box in self.shards[name].boxes())

    def write_parts(self, parts: Mapping[str, Sequence[Held]]) -> None:
        """Copy this rank's parts of tensors, while `layout` is that of `parts_of`."""
        with torch.no_grad():
            for name, tensors in parts.items():
                for box, tensor in zip(self.shards[name].boxes(), tensors, strict=True):
                    box.put(tensor)

    def read(self) -> dict[str, Tensor]:
        """Return copies of the whole tensors, of which this rank must have every part."""
        return {name: self.read_one(name) for name in self.shards}

    def read_one(self, name: str) -> Tensor:
        """Return a copy of a whole tensor, as `read`."""
        shard = self.shards[name]
        whole = torch.empty(shard.shape, dtype=shard.dtype)
        for box in shard.boxes():
            whole[box.place] = box.read()
        return whole


def product(numbers: Sequence[int]) -> int:
    product = 1
    for number in numbers:
        product *= number
    return product
