"""One quantised layer of a checkpoint: its tensors, their checks, and the codes made of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NamedTuple, TypeVar

import msgspec
import torch
from torch import Tensor
from torch.nn import functional as F

from ......config import ModelError
from ...kernels.codes import Codes, PlainCodes, Scales

T = TypeVar("T")

Positive = Annotated[int, msgspec.Meta(ge=1)]

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
"""Dtypes of scales."""


class ReadLayer(NamedTuple):
    """A layer's weights as codes.

    Attributes:
        form: The form of the codes.
        plain: The codes, their scales and offsets.
        input_order: `[inputs]`: the layer's input for each input of the codes; None for their own
            order.
    """

    form: Codes
    plain: PlainCodes
    input_order: Tensor | None = None


class StoredLayer(NamedTuple):
    """A layer's tensors as the checkpoint stores them.

    Attributes:
        name: The layer's name in the checkpoint.
        tensors: By the last part of their names.
        outputs: Output features.
        inputs: Input features.
    """

    name: str
    tensors: Mapping[str, Tensor]
    outputs: int
    inputs: int

    def take(
        self, name: str, dtypes: Sequence[torch.dtype], shapes: Sequence[tuple[int, ...]]
    ) -> Tensor:
        """Return a tensor, which must have one of these dtypes and one of these shapes."""
        found = self.tensors.get(name)
        if found is None:
            raise self.error(name, "is missing; copy or convert the checkpoint again")
        if found.dtype not in dtypes:
            wanted = " or ".join(str(each).removeprefix("torch.") for each in dtypes)
            raise self.error(
                name, f"has dtype {str(found.dtype).removeprefix('torch.')}, and must be {wanted}"
            )
        if tuple(found.shape) not in shapes:
            wanted = " or ".join(str(list(each)) for each in shapes)
            raise self.error(
                name,
                f"has the shape {list(found.shape)}, where a layer of {self.inputs} inputs and "
                f"{self.outputs} outputs with this quantization_config needs {wanted}; the two are "
                "not of one checkpoint",
            )
        return found

    def scales(
        self,
        name: str,
        shapes: Sequence[tuple[int, ...]],
        dtypes: Sequence[torch.dtype] = FLOATS,
    ) -> Tensor:
        """Return a tensor of scales, which must be finite."""
        found = self.take(name, dtypes, shapes)
        if not found.float().isfinite().all():
            raise self.error(name, "has scales that are NaN or infinite; quantise the model again")
        return found

    def error(self, tensor: str, problem: str) -> ModelError:
        """Return the error about a tensor."""
        return ModelError(f"{self.name}.{tensor} {problem}")


class CheckpointFormat(ABC):
    """A format of quantised weights.

    Attributes:
        label: Its name for people, with its bits.
        markers: Tensors whose presence shows that a layer is quantised.
        names: All tensors that stand for a weight.
        ignored: Tensors beside them that don't change the weight.
        notes: Sentences about what of the checkpoint isn't used.
    """

    label: str
    markers: frozenset[str]
    names: frozenset[str]
    ignored: frozenset[str] = frozenset()
    notes: tuple[str, ...] = ()

    @abstractmethod
    def read(self, layer: StoredLayer) -> ReadLayer:
        """Return a layer's weights as codes.

        Raises:
            ModelError: A tensor is missing, or doesn't fit the layer or the configuration.
        """


def settings_of(config: Mapping[str, Any], kind: type[T]) -> T:
    """Return the fields of a quantization_config that matter; others are left out.

    Raises:
        ModelError: A field has a wrong type.
    """
    present = {name: each for name, each in config.items() if each is not None}
    try:
        return msgspec.convert(present, kind)
    except msgspec.ValidationError as error:
        from ......config.wrong_values import told_of

        raise ModelError(
            f"in config.json {told_of(error, 'quantization_config', present)}",
            remedy="copy or convert the checkpoint again",
        ) from error


def unsupported(what: str, advice: str = "") -> ModelError:
    """Return the error about a checkpoint whose meaning would be lost."""
    advice = advice or "give the unquantised checkpoint, with engine.quantization int8 or int4"
    return ModelError(f"{what} is not supported; {advice}")


def join_plain(parts: Sequence[PlainCodes]) -> PlainCodes:
    """Return the codes of layers over the same inputs as those of one layer."""
    if any(each.offsets is not None for each in parts):
        parts = [with_offsets(each) for each in parts]
    found = [each.offsets.values for each in parts if each.offsets is not None]
    offsets = Scales(torch.cat(found)) if found else None
    scales = Scales(torch.cat([each.scales.values for each in parts]))
    return PlainCodes(torch.cat([each.codes for each in parts]), scales, offsets)


def with_offsets(plain: PlainCodes) -> PlainCodes:
    """Return codes with offsets, of zero if they had none."""
    if plain.offsets is not None:
        return plain
    return plain._replace(offsets=Scales(torch.zeros_like(plain.scales.wide())))


def unpack_bits(packed: Tensor, bits: int, count: int) -> Tensor:
    """Return codes that are packed without gaps, the first in the lowest bits.

    Args:
        packed: `[rows, words]` of integers.
        bits: Bits of a code, up to 8.
        count: Codes of a row.

    Returns:
        `[rows, count]` uint8.
    """
    # By one dimension: of columns of one word the last stride may be any.
    rows = packed.contiguous().view(-1).view(torch.uint8).view(len(packed), -1)
    if 8 % bits == 0:
        parts = [rows >> shift & (1 << bits) - 1 for shift in range(0, 8, bits)]
        return torch.stack(parts, -1).flatten(1)[:, :count]
    first = torch.arange(count, device=packed.device) * bits
    pairs = F.pad(rows, (0, 1)).short()
    pairs = pairs[:, first // 8] | pairs[:, first // 8 + 1] << 8
    return (pairs >> (first % 8).short() & (1 << bits) - 1).to(torch.uint8)


def words_of(count: int, bits: int) -> int:
    """Return the words of 32 bits that hold so many codes."""
    return -(-count * bits // 32)


def integer_form(layer: StoredLayer, bits: int, group: int) -> Codes:
    """Return the form of integers whose middle is zero, in the smallest container.

    Args:
        layer: The layer.
        bits: Bits of an integer, 2 to 8.
        group: Inputs of a group; -1 for all.
    """
    if not 2 <= bits <= 8:
        raise unsupported(f"quantization_config in config.json: weights of {bits} bits")
    return Codes(
        layer.outputs,
        layer.inputs,
        bits=4 if bits <= 4 else 8,
        group=check_group(group, layer.inputs),
        zero=1 << bits - 1,
    )


def check_group(group: int, inputs: int) -> int:
    """Return the inputs of a group, as a multiple of 8.

    Raises:
        ModelError: Groups begin between multiples of 8.
    """
    if group == -1 or group >= inputs:
        return -(-inputs // 8) * 8
    if group < 1 or group % 8:
        raise unsupported(
            f"quantization_config in config.json: a group of {group} inputs",
            "it must be -1 or a multiple of 8, so quantise the model again",
        )
    return group


def offsets_of(form: Codes, scales: Tensor, zero_points: Tensor) -> Scales | None:
    """Return offsets for zero points, exactly; None where all are the form's zero.

    Args:
        form: The form.
        scales: `[outputs, groups]`.
        zero_points: Likewise, of integers.
    """
    distances = zero_points.int() - form.zero
    # At most 9 bits times scales of at most 11, or of float32 up to its rounding.
    return Scales(scales.float() * distances) if distances.any() else None


def group_order(layer: StoredLayer, name: str, form: Codes) -> Tensor | None:
    """Return the order of inputs in which those of a group are neighbours; None for their own.

    Args:
        layer: The layer.
        name: The tensor with each input's group.
        form: The form.
    """
    groups = layer.take(name, (torch.int32, torch.int64), [(layer.inputs,)]).long()
    if int(groups.min()) < 0 or int(groups.max()) >= form.groups:
        wrong = int(groups.min()) if int(groups.min()) < 0 else int(groups.max())
        raise layer.error(
            name, f"names group {wrong} of {form.groups}; copy or quantise the model again"
        )
    own = torch.arange(layer.inputs, device=groups.device)
    order = groups.argsort(stable=True)
    if not torch.equal(groups[order], own // form.group):
        raise layer.error(
            name,
            f"has groups of other sizes than {form.group}, which scales here can't have; quantise "
            "the model again",
        )
    return None if torch.equal(order, own) else order
