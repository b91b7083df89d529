"""Tensors of a call where they travel: within its messages, or in a slot of shared memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import numpy as np

from .codec import decode_infer_response, encode_infer_request, encode_infer_request_shm
from .elements import byte_size, raw_bytes
from .pool_slot import PoolSlot
from .tensors import (
    Array,
    InferResponse,
    NamedTensor,
    RequestedOutput,
    SharedMemory,
    TensorError,
)


class Staged:
    """A request that is ready to be sent.

    Attributes:
        message: The ModelInferRequest.
        writes: Whether the server is to write outputs into the slot.
    """

    def __init__(
        self,
        model: str,
        inputs: Iterable[NamedTensor],
        outputs: Sequence[str | NamedTensor],
        slot: PoolSlot | None,
        shared: bool,
        **said: Any,
    ) -> None:
        """Makes a request. The arguments are those of `KServeClient.infer`.

        Args:
            shared: Whether tensors go through the slot, and not within the messages.
            said: Of `codec.RequestFields` all but the outputs.

        Raises:
            TensorError: A tensor has no datatype.
            ValueError: The inputs don't fit the slot, or an output is to be put outside of it.
        """
        tensors = list(inputs)
        self._slot = slot
        self._memory = slot if shared else None
        self._places = {
            each.name: _place(each, slot) for each in outputs if isinstance(each, NamedTensor)
        }
        self.writes = shared and bool(self._places)
        names = [each if isinstance(each, str) else each.name for each in outputs]
        wanted = [
            RequestedOutput(name, self._places.get(name) if shared else None) for name in names
        ]
        if self._memory is None:
            self.message = encode_infer_request(model, tensors, requested_outputs=wanted, **said)
        else:
            region, offsets = self._memory.pool.name, _offsets(tensors, self._memory)
            self.message = encode_infer_request_shm(
                model, tensors, region, offsets, requested_outputs=wanted, **said
            )

    def taken(self, message: Any) -> InferResponse:
        """An answer to it, a ModelInferResponse, with each output where it is to be put.

        Those of BYTES are there as well, but copied for the answer: no array can show them.

        Raises:
            RequestError: It can't be read, or an output is larger than its place.
        """
        response = decode_infer_response(message, self._memory)
        outputs = tuple(NamedTensor(each.name, self._put(each)) for each in response.outputs)
        return msgspec.structs.replace(response, outputs=outputs)

    def _put(self, tensor: NamedTensor) -> Array:
        """An output's array, which ends with the slot where it lies there."""
        place = self._places.get(tensor.name)
        if place is None or self._slot is None:
            return tensor.data
        if (size := byte_size(tensor)) > place.byte_size:
            raise TensorError(
                f"the output {tensor.name} has {size} bytes and its place {place.byte_size}; make "
                "that larger"
            )
        if self._memory is None:
            self._slot.write(place, raw_bytes(tensor))
        if tensor.data.dtype == np.object_:
            return tensor.data
        return self._slot.array_at(place, tensor.data.shape, tensor.data.dtype)


def _place(output: NamedTensor, slot: PoolSlot | None) -> SharedMemory:
    offset = None if slot is None else slot.offset_of(output.data)
    if slot is None or offset is None:
        raise ValueError(f"{output.name} is to be put where the slot has not made it with scratch")
    return SharedMemory(slot.pool.name, output.data.nbytes, offset)


def _offsets(tensors: Sequence[NamedTensor], slot: PoolSlot) -> list[int]:
    """Where inputs are in a slot, after those that are elsewhere were copied there."""
    offsets = [slot.offset_of(each.data) for each in tensors]
    outside = [place for place, offset in enumerate(offsets) if offset is None]
    raws = [raw_bytes(tensors[place]) for place in outside]
    rooms = slot.scratch([(len(raw), np.uint8) for raw in raws])
    for place, room, raw in zip(outside, rooms, raws, strict=True):
        room[:] = np.frombuffer(raw, np.uint8)
        offsets[place] = slot.offset_of(room)
    return [offset for offset in offsets if offset is not None]
