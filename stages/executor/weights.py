"""New weights for the model that runs, and the version that says which ones made a token."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ...config import ModelError


class WeightSyncManager:
    """Replaces a model's weights in place, all of them or none.

    Everything that could be wrong with new weights is looked for before the first tensor is
    written, so a refused update leaves weights and version as they were. The version is counted
    up once the last tensor is in place.

    Attributes:
        version: Of the weights in place; 0 are those that were loaded.
    """

    def __init__(self, module: nn.Module) -> None:
        self.version = 0
        self._module = module
        self._pending: Mapping[str, Tensor] | None = None

    @property
    def pending(self) -> bool:
        """Whether an update waits for `maybe_finish_sync`."""
        return self._pending is not None

    def start_sync(self, new_weights: Mapping[str, Tensor]) -> None:
        """Takes new weights, to be put in place between two steps. They must not change till then.

        Args:
            new_weights: By parameter name, as `state_dict` gives them, on any device and in any
                dtype. One of several names of a tied parameter is enough.

        Raises:
            ModelError: An update is waiting already, or the weights don't fit the model.
        """
        if self._pending is not None:
            raise ModelError("a weight update is under way already; wait until it is in place")
        self._check(new_weights)
        self._pending = new_weights

    def maybe_finish_sync(self) -> bool:
        """Puts the waiting weights in place, if there are any; returns whether it did."""
        if self._pending is None:
            return False
        new_weights, self._pending = self._pending, None
        self._write(new_weights)
        return True

    def sync_blocking(self, new_weights: Mapping[str, Tensor]) -> None:
        """Puts new weights in place at once.

        Raises:
            ModelError: As `start_sync`.
        """
        self.start_sync(new_weights)
        self.maybe_finish_sync()

    def _check(self, new_weights: Mapping[str, Tensor]) -> None:
        own = self._module.state_dict(keep_vars=True)
        unknown = sorted(new_weights.keys() - own.keys())
        given = {id(own[name]) for name in new_weights.keys() & own.keys()}
        missing = sorted(name for name, tensor in own.items() if id(tensor) not in given)
        for kind, names in (("does not have", unknown), ("needs, which are missing", missing)):
            if names:
                raise ModelError(
                    f"the new weights don't fit: {len(names)} tensors that the model {kind}, such "
                    f"as {names[0]!r}; pass the state_dict of the same architecture"
                )
        first_of: dict[int, str] = {}
        for name, tensor in new_weights.items():
            if not isinstance(tensor, Tensor) or tensor.shape != own[name].shape:
                shown = tuple(getattr(tensor, "shape", ())) or type(tensor).__name__
                raise ModelError(
                    f"the new weights don't fit: {name!r} is {shown}, and the model's is "
                    f"{tuple(own[name].shape)}"
                )
            first = first_of.setdefault(id(own[name]), name)
            if first != name and not torch.equal(tensor, new_weights[first]):
                raise ModelError(
                    f"the new weights don't fit: {first!r} and {name!r} are one tensor in this "
                    "model, and differ; tie them in the trainer too"
                )

    @torch.no_grad()
    def _write(self, new_weights: Mapping[str, Tensor]) -> None:
        own = self._module.state_dict(keep_vars=True)
        for name, tensor in new_weights.items():
            own[name].data.copy_(tensor)
        self.version += 1
