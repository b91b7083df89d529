"""The encoder of images: Transformers' image processor, vision tower and positions."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor
from transformers import AutoImageProcessor

from ....bus.media import MediaItem
from ....config import ModelError
from ....store.images import StoredImage
from .attention.interface import ImageProbe
from .deepstack import accept_deep_features, deep_features, num_deep_layers
from .media import LookAhead, MediaError, Positions

PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")

_REFUSALS = (
    *(ArithmeticError, AssertionError, LookupError, RuntimeError, TypeError, ValueError),
    SafetensorError,
)
"""Errors of Transformers' code for features that it can't encode."""


def find_image_processor(folder: Path) -> Any | None:
    """Load the image processor of a model's folder; None if it has none.

    Raises:
        ModelError: It can't be read.
    """
    if not any((folder / name).is_file() for name in PROCESSOR_FILES):
        return None
    auto: Any = AutoImageProcessor
    try:
        # Without torchvision, which not every build of torch has.
        return auto.from_pretrained(folder, backend="pil", local_files_only=True)
    except Exception as error:
        raise ModelError(
            f"can't load the image processor in {folder}: {error!s:.300}",
            remedy="save the model's processor there with processor.save_pretrained()",
        ) from error


@torch.no_grad()
def look_ahead(module: Any) -> LookAhead:
    """Return the layers in which the tokens of an image attend to each other in both directions.

    Raises:
        ModelError: Its masks over images are of another kind.
    """
    takes = inspect.signature(module.forward).parameters
    marks = [name for name in ("token_type_ids", "mm_token_type_ids") if name in takes]
    # Marks of tokens are for positions in models that have such.
    if not marks or hasattr(module.base_model, "get_rope_index"):
        return "nowhere"
    name = type(module).__name__
    kinds = torch.tensor([[0, 1, 1, 1, 0, 0, 1, 1, 0]], device=module.device)
    probe = ImageProbe(name, kinds[0].cpu())
    call = {marks[0]: kinds, "use_cache": False, "layer_probe": probe}
    call["logits_to_keep"] = torch.arange(kinds.shape[1], device=module.device)
    try:
        module(input_ids=torch.zeros_like(kinds), **call)
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(
            f"{name} can't be served: {error!s:.300}",
            remedy="choose another model, or its language part alone",
        ) from error
    return probe.look_ahead()


class VisionModel:
    """The `MediaEncoder` of images."""

    kind = "image"

    def __init__(self, module: Any, processor: Any, looks_ahead: LookAhead) -> None:
        """Take the parts of a model in SUPPORTED.

        Args:
            module: The model; its vision part runs with Transformers' own attention.
            processor: Its image processor.
            looks_ahead: As in MediaEncoder.

        Raises:
            ModelError: Its placeholder is no token, or it has features of images that are not
                supported.
        """
        token_id, rows = module.config.image_token_id, module.get_input_embeddings().num_embeddings
        if token_id >= rows:
            # Drafts and logprobs of prompts would look it up.
            raise ModelError(
                f"the image token {token_id} of {type(module).__name__} is beyond its {rows} "
                "embeddings; resize them with resize_token_embeddings()"
            )
        self.looks_ahead = looks_ahead
        self.num_deep = num_deep_layers(module)
        if self.num_deep:
            accept_deep_features(module)
        self._module, self._base = module, module.base_model
        self._processor = processor
        # Layers may have embeddings of their own, of an image's tokens those of padding.
        decoder = module.get_decoder()
        self._decoder = decoder if hasattr(decoder, "get_per_layer_inputs") else None
        self._takes = inspect.signature(self._base.get_image_features).parameters

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of the image processor."""
        settings: dict[str, Any] = self._processor.to_dict()
        return settings

    @property
    def rotates_in_space(self) -> bool:
        """Whether an image's tokens have positions in height and width (M-RoPE)."""
        return hasattr(self._base, "get_rope_index")

    def arguments(self, input_ids: Tensor, places: Tensor, rows: Tensor) -> dict[str, Any]:
        """Return the arguments of the model's forward call, as MediaEncoder says."""
        if self._decoder is not None:
            input_ids = self._padded(input_ids)
        hidden = self._module.get_input_embeddings()(input_ids)
        rows = rows.to(hidden.dtype)
        found: dict[str, Any] = {"inputs_embeds": hidden.index_copy(1, places, rows[:1])}
        if self._decoder is not None and self._decoder.hidden_size_per_layer_input:
            found["per_layer_inputs"] = self._decoder.get_per_layer_inputs(input_ids)
        if self.num_deep:
            found["deep_features"] = deep_features(input_ids, places, rows[1:])
        return found

    @torch.inference_mode()
    def encode(self, item: MediaItem, image: StoredImage) -> Tensor:
        """Return an image's embeddings and features, `[1 + num_deep, item.num_tokens, hidden]`.

        Raises:
            MediaError: The image has another number of tokens, or can't be processed.
        """
        try:
            output = self._base.get_image_features(**self._inputs(image))
        except _REFUSALS as error:
            raise MediaError(f"the image can't be encoded: {error!s:.200}") from error
        deep = output.deepstack_features if self.num_deep else []
        rows = torch.stack([_flat(each) for each in (output.pooler_output, *deep)])
        if rows.shape[1] != item.num_tokens:
            raise MediaError(
                f"the image has {rows.shape[1]} tokens, and the prompt has {item.num_tokens} "
                "placeholders for it"
            )
        return rows

    def positions(self, token_ids: Sequence[int], media: Sequence[MediaItem]) -> Positions | None:
        """Return the positions of a prompt; None if they are its tokens' indices.

        Raises:
            MediaError: The placeholders don't fit the images.
        """
        if not self.rotates_in_space:
            return None
        kinds = torch.zeros(1, len(token_ids), dtype=torch.int)
        for item in media:
            kinds[0, item.places(token_ids)] = 1
        ids = torch.tensor([token_ids])
        try:
            grids = torch.cat([self._grid_of(item) for item in media])
            rows, shift = self._base.get_rope_index(ids, kinds, image_grid_thw=grids)
        except (StopIteration, *_REFUSALS) as error:
            raise MediaError(f"the images don't fit their placeholders: {error!s:.200}") from error
        return Positions(rows[:, 0].numpy(), int(shift))

    def _padded(self, input_ids: Tensor) -> Tensor:
        """Return token ids with padding in place of media, as the model embeds them."""
        config = self._module.config
        ids = (config.image_token_id, config.video_token_id, config.audio_token_id)
        marks = torch.tensor([each for each in ids if each is not None], device=input_ids.device)
        padding = config.get_text_config().pad_token_id
        return input_ids.masked_fill(torch.isin(input_ids, marks), padding)

    def _inputs(self, image: StoredImage) -> dict[str, Tensor]:
        """Return the arguments for the vision tower, on its device."""
        weight = self._module.get_input_embeddings().weight
        found: dict[str, Tensor] = {}
        for name, value in load(image.features).items():
            if name in self._takes:
                dtype = weight.dtype if value.is_floating_point() else value.dtype
                found[name] = value.to(weight.device, dtype)
        return found

    def _grid_of(self, item: MediaItem) -> Tensor:
        """Return the grid of an image, `[1, 3]`, which depends on its size alone."""
        own = self._processor
        rule = sys.modules[type(own).__module__].smart_resize
        # Some processors treat an image as a video of a few equal frames.
        frames = {"num_frames": own.temporal_patch_size, "temporal_factor": own.temporal_patch_size}
        height, width = rule(
            height=item.height,
            width=item.width,
            factor=own.patch_size * own.merge_size,
            min_pixels=own.size["shortest_edge"],
            max_pixels=own.size["longest_edge"],
            **(frames if "num_frames" in inspect.signature(rule).parameters else {}),
        )
        return torch.tensor([[1, height // own.patch_size, width // own.patch_size]])


def _flat(features: Tensor | Sequence[Tensor]) -> Tensor:
    """Return the features of one image, `[tokens, hidden]`."""
    parts = [features] if isinstance(features, Tensor) else features
    return torch.cat([part.reshape(-1, part.shape[-1]) for part in parts])
