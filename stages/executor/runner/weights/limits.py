"""What new weights may have at most, so that no message and no file is more work than an update."""

from __future__ import annotations

from typing import NamedTuple

from torch import nn

from .....config import WeightsError

_TIMES_THE_MODEL = 10
"""A checkpoint has more tensors than a model that fuses them: queries, keys and values apart, gates
and projections apart, scales beside them, parts that Transformers does not load."""

_MORE_TENSORS = 10_000
_MORE_BYTES = 1 << 30

_WIDEST_BYTES = 8
"""Of a number: float64."""

_ENTRY_BYTES = 256
"""What a header or an index has for a tensor; about 130 where names are long."""

_METADATA_BYTES = 4 << 20
"""What a header may have besides."""


class WeightLimits(NamedTuple):
    """Bounds of one source of weights: a message, all files of a folder, all parts of an update.

    Attributes:
        tensors: How many it may have.
        num_bytes: How large they may be together.
    """

    tensors: int = 1 << 62
    num_bytes: int = 1 << 62

    @property
    def header_bytes(self) -> int:
        """How long a list of so many tensors may be."""
        return _METADATA_BYTES + _ENTRY_BYTES * self.tensors

    def check_tensors(self, number: int) -> None:
        """Raises WeightsError when there are more."""
        if number > self.tensors:
            raise WeightsError(
                f"{number} tensors are more than this model can take, {self.tensors}; send those "
                "of its architecture, or raise engine.max_weight_tensors"
            )

    def check_bytes(self, number: int) -> None:
        """Raises WeightsError when there are more."""
        if number > self.num_bytes:
            raise WeightsError(
                f"{number} bytes of new weights are more than this model can take, "
                f"{self.num_bytes}; send those of its architecture, or raise "
                "engine.max_weight_bytes"
            )


UNLIMITED = WeightLimits()


def limits_of(module: nn.Module, tensors: int = 0, num_bytes: int = 0) -> WeightLimits:
    """What a model can take; an argument above 0 goes before what follows from the model.

    A parameter of three dimensions counts as many as its first has: there experts are fused, which
    checkpoints have one by one.
    """
    parameters = list(module.parameters())
    counted = sum(tensor.shape[0] if tensor.dim() > 2 else 1 for tensor in parameters)
    numbers = sum(tensor.numel() for tensor in parameters)
    return WeightLimits(
        tensors or _TIMES_THE_MODEL * counted + _MORE_TENSORS,
        num_bytes or _WIDEST_BYTES * numbers + _MORE_BYTES,
    )
