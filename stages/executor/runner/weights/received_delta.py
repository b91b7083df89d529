"""New weights of a delta that has come: compared with the weights in place, and checked."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..shards import NewShard, NewWeight, Receipt
from .checks import digest_of, is_finite, not_finite
from .delta import Changes, DeltaEntry, WeightDelta, changed_tensor, check_base
from .in_place import base_of, whole_boxes
from .sync_manager import WeightSyncManager

_SPARSE = 1 / 32
"""The changed part of a tensor up to which only its elements are written between two steps. At 1 %
that takes a third of the time that copying the tensor takes, at 0.1 % an eightieth."""


class ReceivedDelta:
    """A delta for the weights of a manager.

    Attributes:
        delta: The delta.
    """

    def __init__(self, payload: Mapping[str, Tensor], manager: WeightSyncManager) -> None:
        """Raises WeightsError as `WeightDelta`, or `weights_base` for another base version."""
        self.delta = WeightDelta(payload)
        manager.check_base(self.delta.head.base_version)
        self._manager = manager

    def new_weights(self) -> dict[str, NewWeight]:
        """Return the new tensors by parameter name: as a whole, or the changed elements alone.

        Raises:
            WeightsError: They are of other weights (`weights_base`), damaged (`weights_delta`), not
                finite, or their base is not here.
        """
        found: dict[str, NewWeight] = {}
        bad: list[str] = []
        for entry in self.delta.head.tensors:
            name = entry.meta.name
            base = base_of(self._manager, name)
            check_base(entry, base)
            changes = self.delta.changes(entry)
            new = changed_tensor(entry, base, changes)
            if not is_finite(new):
                bad.append(name)
            found[name] = self._sparse(entry, changes, new) or new
        if bad:
            raise not_finite(bad)
        return found

    def _sparse(self, entry: DeltaEntry, changes: Changes, new: Tensor) -> NewShard | None:
        """Return the changed elements, if they can be written alone in less time."""
        name, places = entry.meta.name, changes.places
        if places is None or len(places) > _SPARSE * new.numel():
            return None
        boxes = whole_boxes(self._manager, name)
        if not boxes:
            return None
        chosen = torch.from_numpy(places)
        part = {"places": chosen, "values": new.view(-1)[chosen]}
        return NewShard(
            tuple(new.shape),
            new.dtype,
            (part,) * len(boxes),
            digest_of(new),
            Receipt(0, self._manager.shards.layout),
        )
