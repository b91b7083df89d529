"""Models as JSON tells of them: their metadata, their configuration, and how they are."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ....kserve.tensors import ModelSpec, TensorSpec
from .service import ModelState

Json = dict[str, Any]


def metadata_json(spec: ModelSpec) -> Json:
    """What a model takes and gives."""
    return {
        "name": spec.name,
        "versions": list(spec.versions),
        "platform": spec.platform,
        "inputs": [_tensor(each) for each in spec.inputs],
        "outputs": [_tensor(each) for each in spec.outputs],
    }


def config_json(spec: ModelSpec) -> Json:
    """The same as Triton's configuration of a model has it, which says besides what may be left
    out, and whether there may be several answers."""
    return {
        "name": spec.name,
        "platform": spec.platform,
        "backend": spec.platform,
        "max_batch_size": 0,
        "input": [_configured(each) | {"optional": each.optional} for each in spec.inputs],
        "output": [_configured(each) for each in spec.outputs],
        "model_transaction_policy": {"decoupled": spec.decoupled},
    }


def index_json(states: Iterable[ModelState]) -> list[Json]:
    """The repository's index."""
    return [
        {
            "name": each.name,
            "version": each.version,
            "state": "READY" if each.ready else "UNAVAILABLE",
            "reason": each.reason,
        }
        for each in states
    ]


def _tensor(spec: TensorSpec) -> Json:
    return {"name": spec.name, "datatype": spec.datatype, "shape": list(spec.shape)}


def _configured(spec: TensorSpec) -> Json:
    # Triton's configuration has a name of its own for this one alone.
    kind = "STRING" if spec.datatype == "BYTES" else spec.datatype
    return {"name": spec.name, "data_type": f"TYPE_{kind}", "dims": list(spec.shape)}
