"""The weights in place as whole tensors, for what is compared with them.

The functions may run on any thread, beside the forward pass, while no update is staged.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from torch import Tensor

from .....config import WeightsError, shown
from ..shards import Box
from .sync_manager import WeightSyncManager
from .transports.layout import as_bytes


def base_of(manager: WeightSyncManager, name: str) -> Tensor:
    """Return the numbers of a tensor in place.

    Raises:
        WeightsError: The model has no such tensor, or has not its numbers in this process.
    """
    if (shard := manager.shards.shards.get(name)) is None:
        raise WeightsError(
            f"the delta changes {shown(name)}, which is no tensor of the model; make it from the "
            "engine's names (InferenceEngine.state_dict), which differ from a checkpoint's where "
            "loading renames or fuses tensors, or send those tensors as a whole"
        )
    if manager.read_everywhere is not None:
        return manager.read_everywhere(name)
    boxes = shard.boxes()
    for box in boxes:
        if not box.converts and tuple(box.target.shape) == shard.shape:
            return box.target
    if any(box.converts for box in boxes):
        raise WeightsError(
            f"a delta can't change {shown(name)}: it is held as codes, and the numbers that the "
            "codes were made of are gone; send the whole tensor, or set "
            "engine.reference_model_path to unquantized, which keeps them",
            code="weights_quantized",
        )
    return manager.shards.read_one(name)


def whole_boxes(manager: WeightSyncManager, name: str) -> Sequence[Box]:
    """Return the places of a tensor that is here as a whole and in its own form; else none."""
    shard = manager.shards.shards[name]
    boxes = shard.boxes()
    is_whole = all(not box.converts and tuple(box.target.shape) == shard.shape for box in boxes)
    return boxes if is_whole and manager.read_everywhere is None else ()


def first_names(manager: WeightSyncManager) -> dict[str, str]:
    """Return the first name of each tensor of the model, by all its names."""
    first: dict[int, str] = {}
    state = manager.shards.whole.state_dict(keep_vars=True)
    return {name: first.setdefault(id(tensor), name) for name, tensor in state.items()}


def checksums(manager: WeightSyncManager) -> dict[str, str]:
    """Return the SHA-256 of each tensor's bytes, by its first name.

    Raises:
        WeightsError: Their memory is released; or, as `base_of`, they are held as codes.
    """
    if manager.empty:
        raise WeightsError(
            "the memory of the weights is released",
            code="memory_released",
            remedy="resume it before an update",
        )
    names = sorted({*first_names(manager).values()})
    tensors = ((name, as_bytes(base_of(manager, name))) for name in names)
    return {name: hashlib.sha256(each.cpu().numpy().data).hexdigest() for name, each in tensors}
