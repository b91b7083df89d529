"""Adapters of a model that is spread over ranks: the part of each rank.

An adapter needs no exchange of its own. Of a layer whose output features are sharded, a rank has
the columns of B for its own. Of a layer whose inputs are sharded, it has the columns of A for each
of its parts, and the whole B: each part adds its share to the layer's partial sum.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ..loaded_model import LoadedModel
from ..ranks.layers import GatheredLinear, RowParallelLinear
from .adapter import LoraPair


def own_pairs(pairs: Mapping[str, LoraPair], model: LoadedModel) -> Mapping[str, LoraPair]:
    """Return an adapter's pairs for this rank's modules.

    Args:
        pairs: By the names of the whole model's modules.
        model: The model, or this rank's shard.
    """
    if model.shards is None:
        return pairs
    own: dict[str, LoraPair] = {}
    for name, pair in pairs.items():
        places = [box.place for box in model.shards.shards[f"{name}.weight"].boxes()]
        if not places:
            continue  # a layer of another stage
        module = model.module.get_submodule(name)
        if isinstance(module, RowParallelLinear):
            for index, (_, inputs) in enumerate(places):
                own[f"{name}.parts.{index}"] = LoraPair(pair.a[:, inputs].contiguous(), pair.b)
        else:
            name = f"{name}.local" if isinstance(module, GatheredLinear) else name
            (b,) = pair.b
            own[name] = LoraPair(pair.a, torch.stack([b[:, rows] for rows, *_ in places]))
    return own
