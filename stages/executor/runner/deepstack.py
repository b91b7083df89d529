"""DeepStack: features of images that the first layers of a language model add to their outputs.

Transformers' language models take them as arguments of `forward`, but the models around them accept
them only together with the images' pixels. A hook passes on ours.
"""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ....config import ModelError

_MASK, _FEATURES = "visual_pos_masks", "deepstack_visual_embeds"


class DeepFeatures(NamedTuple):
    """Features of the images of a step.

    Attributes:
        places: `[1, tokens]`, true for the images' tokens.
        features: `[layers, image tokens, hidden]`, in the order of the tokens.
    """

    places: Tensor
    features: Tensor


def deep_features(input_ids: Tensor, places: Tensor, features: Tensor) -> DeepFeatures:
    """Return the features of a step; `places`: the indices of the images' tokens, rising."""
    marks = torch.zeros_like(input_ids, dtype=torch.bool)
    return DeepFeatures(marks.index_fill_(1, places, True), features)


def num_deep_layers(module: Any) -> int:
    """Return how many layers add features of images.

    Raises:
        ModelError: The language model doesn't take them.
    """
    number = len(getattr(module.config.vision_config, "deepstack_visual_indexes", ()))
    if number and _taker(module) is None:
        raise ModelError(
            f"{type(module).__name__} has DeepStack features of images, which its language model "
            "doesn't take; choose another model"
        )
    return number


def accept_deep_features(module: nn.Module) -> None:
    """Let a model's forward call take `deep_features`; without them it stays as it is."""
    taker = _taker(module)
    assert taker is not None, "num_deep_layers comes before"

    def pass_on(_: nn.Module, args: Any, call: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        given: DeepFeatures | None = call.pop("deep_features", None)
        if given is not None:
            call[_MASK], call[_FEATURES] = given.places, list(given.features)
        return args, call

    taker.register_forward_pre_hook(pass_on, with_kwargs=True)


def _taker(module: nn.Module) -> nn.Module | None:
    for child in module.modules():
        if _FEATURES in inspect.signature(child.forward).parameters:
            return child
    return None
