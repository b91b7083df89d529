"""A rank's parts of new weights, taken from whole tensors as they come."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import xxhash
from torch import Tensor

from .....config import WeightsError
from ..shards import NewShard, NewWeight, Receipt, ShardedWeights
from .checks import check_fits, check_open, digest_of, is_finite, not_finite
from .conversion import PartsMissing, as_parameters, split_converted


class PartsTaker:
    """Keeps this rank's parts of whole tensors, which may be freed afterwards.

    Tensors that a checkpoint stores otherwise than the model are kept until those that are fused
    with them have come, at most a layer of them at a time if they come in this order.

    Attributes:
        error: Why the tensors don't fit the model; None if they do so far.
        left: Whole tensors that can't be converted without others.
    """

    def __init__(
        self,
        shards: ShardedWeights,
        names: Sequence[str],
        receipt: Receipt,
        *,
        checks: bool,
        checkpoint: bool = False,
    ) -> None:
        """Begin.

        Args:
            shards: Shards of this rank.
            names: Names of all tensors that will come.
            receipt: For `parts`.
            checks: Whether to look at the numbers too, as one rank does for all.
            checkpoint: As in `as_parameters`.
        """
        self.error: WeightsError | None = None
        self.left: dict[str, Tensor] = {}
        self._shards, self._receipt, self._checks = shards, receipt, checks
        self._checksum = xxhash.xxh3_64()
        self._parts: dict[str, NewWeight] = {}
        self._not_finite: list[str] = []
        state = shards.whole.state_dict(keep_vars=True)
        # Names decide, as in `as_parameters`.
        known = not checkpoint and all(name in state for name in names)
        groups = {} if known else split_converted(shards, names)[1]
        self._group_of = {name: group for group, members in groups.items() for name in members}
        self._missing = Counter(self._group_of.values())
        self._waiting: dict[str, dict[str, Tensor]] = {group: {} for group in groups}
        times = Counter(id(tensor) for tensor in state.values())
        self._tied = {name for name, tensor in state.items() if times[id(tensor)] > 1}
        self._parameters = {*dict(shards.whole.named_parameters(remove_duplicate=False))}

    @property
    def checksum(self) -> int:
        """The checksum of all names and bytes so far."""
        return self._checksum.intdigest()

    def take(self, name: str, tensor: Tensor) -> None:
        """Take a whole tensor. After an error it is only counted."""
        self._checksum.update(f"{name} {digest_of(tensor)} ".encode())
        if self.error is not None:
            return
        try:
            self._take(name, tensor)
        except WeightsError as error:
            self.error = error

    def parts(self) -> dict[str, NewWeight]:
        """Return what all tensors have made, and `left`.

        Raises:
            WeightsError: They don't fit the model, or are not finite.
        """
        if self.error is not None:
            raise self.error
        if self._not_finite:
            raise not_finite(self._not_finite)
        return {**self._parts, **self.left}

    def _take(self, name: str, tensor: Tensor) -> None:
        group = self._group_of.get(name)
        if group is None:
            self._keep(name, tensor)
            return
        waiting = self._waiting[group]
        waiting[name] = tensor
        self._missing[group] -= 1
        if self._missing[group]:
            return
        del self._waiting[group]
        try:
            parameters = as_parameters(self._shards.whole, waiting, checkpoint=True)
        except PartsMissing:
            self.left |= waiting
            return
        for own_name, parameter in parameters.items():
            self._keep(own_name, parameter)

    def _keep(self, name: str, tensor: Tensor) -> None:
        shard = self._shards.shards[name]
        check_fits(name, tensor, shard)
        check_open(name, shard)
        tensor = tensor.to(shard.dtype)
        # Numbers that are not finite have no codes.
        checks = self._checks or shard.converts
        if checks and name in self._parameters and not is_finite(tensor):
            self._not_finite.append(name)
            return
        self._parts[name] = NewShard(
            shard.shape,
            shard.dtype,
            self._shards.parts_of(name, tensor),
            digest_of(tensor) if self._checks and name in self._tied else 0,
            self._receipt,
        )
