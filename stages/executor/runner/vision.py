"""Images of a model that takes them: Transformers' image processor, vision tower and positions."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor
from transformers import AutoImageProcessor

from ....bus.media import MediaItem
from ....config import ModelError
from ....store.images import StoredImage
from .batch import IntArray

SUPPORTED = frozenset(
    (
        "gemma3",
        "idefics3",
        "internvl",
        "llava",
        "llava_onevision",
        "qwen2_5_vl",
        "qwen2_vl",
        "smolvlm",
    )
)
"""Kinds of models whose images are served. In others an image may be more than embeddings in place
of tokens, such as features that are added in several layers."""

PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")

ImageKey = tuple[str, int]
"""`MediaItem.key`."""

_REFUSALS = (
    *(ArithmeticError, AssertionError, LookupError, RuntimeError, TypeError, ValueError),
    SafetensorError,
)
"""Errors of Transformers' code for features that it can't encode."""


class Positions(msgspec.Struct, frozen=True):
    """Rotary positions of a prompt with images, where they are not the tokens' indices.

    Attributes:
        prompt: `[3, prompt]`: in time, height and width.
        shift: What is added to the index of a generated token.
    """

    prompt: IntArray
    shift: int


class ImageError(Exception):
    """An image can't be encoded; the message is for the client."""


def find_image_processor(folder: Path, model_type: str) -> Any | None:
    """Load the image processor of a model's folder; None if it has none, or takes no images here.

    Raises:
        ModelError: It can't be read.
    """
    has_one = any((folder / name).is_file() for name in PROCESSOR_FILES)
    if not has_one or model_type not in SUPPORTED:
        return None
    auto: Any = AutoImageProcessor
    try:
        # Without torchvision, which not every build of torch has.
        return auto.from_pretrained(folder, backend="pil", local_files_only=True)
    except Exception as error:
        raise ModelError(f"can't load the image processor in {folder}: {error!s:.300}") from error


class VisionModel:
    """Encodes images, one at a time, so that an embedding's bits don't depend on other images.

    Attributes:
        sees_itself: As in ImageCapacity.
    """

    def __init__(self, module: Any, processor: Any, *, sees_itself: bool) -> None:
        """Take the parts of a model in SUPPORTED.

        Args:
            module: The model; its vision part runs with Transformers' own attention.
            processor: Its image processor.
            sees_itself: As the attribute.

        Raises:
            ModelError: Its placeholder is no token.
        """
        token_id, rows = module.config.image_token_id, module.get_input_embeddings().weight.shape[0]
        if token_id >= rows:
            # Drafts and logprobs of prompts would look it up.
            raise ModelError(
                f"the image token {token_id} of {type(module).__name__} is beyond its {rows} "
                "embeddings; resize them with resize_token_embeddings()"
            )
        self.sees_itself = sees_itself
        self._module, self._base = module, module.base_model
        self._processor = processor
        self._takes = inspect.signature(self._base.get_image_features).parameters

    @property
    def settings(self) -> dict[str, Any]:
        """Of the image processor."""
        settings: dict[str, Any] = self._processor.to_dict()
        return settings

    @property
    def rotates_in_space(self) -> bool:
        """Whether an image's tokens have positions in height and width (M-RoPE)."""
        return hasattr(self._base, "get_rope_index")

    def embed(self, input_ids: Tensor) -> Tensor:
        """Return the embeddings of tokens, `[..., hidden]`, as the model computes them."""
        embeddings: Tensor = self._module.get_input_embeddings()(input_ids)
        return embeddings

    @torch.inference_mode()
    def encode(self, item: MediaItem, image: StoredImage) -> Tensor:
        """Return an image's embeddings, `[item.num_tokens, hidden]`.

        Raises:
            ImageError: The image has another number of tokens, or can't be processed.
        """
        try:
            output = self._base.get_image_features(**self._inputs(image)).pooler_output
        except _REFUSALS as error:
            raise ImageError(f"the image can't be encoded: {error!s:.200}") from error
        parts = [output] if isinstance(output, Tensor) else output
        rows = torch.cat([part.reshape(-1, part.shape[-1]) for part in parts])
        if len(rows) != item.num_tokens:
            raise ImageError(
                f"the image has {len(rows)} tokens, and the prompt has {item.num_tokens} "
                "placeholders for it"
            )
        return rows

    def positions(self, token_ids: Sequence[int], media: Sequence[MediaItem]) -> Positions | None:
        """Return the positions of a prompt; None if they are its tokens' indices.

        Raises:
            ImageError: The placeholders don't fit the images.
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
            raise ImageError(f"the images don't fit their placeholders: {error!s:.200}") from error
        return Positions(rows[:, 0].numpy(), int(shift))

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
        height, width = rule(
            item.height,
            item.width,
            factor=own.patch_size * own.merge_size,
            min_pixels=own.size["shortest_edge"],
            max_pixels=own.size["longest_edge"],
        )
        return torch.tensor([[1, height // own.patch_size, width // own.patch_size]])


class ImageEmbeddings:
    """The embeddings of images that plans name, until a plan drops them.

    Attributes:
        num_encoded: Images encoded so far.
    """

    def __init__(self, vision: VisionModel) -> None:
        self._vision = vision
        self._kept: dict[ImageKey, Tensor] = {}
        self._failures: dict[ImageKey, str] = {}
        self.num_encoded = 0

    def clear(self) -> None:
        """Drop all: the weights have changed, or memory is released."""
        self._kept.clear()
        self._failures.clear()

    def apply(
        self,
        forgotten: Sequence[ImageKey],
        encodes: Sequence[MediaItem],
        images: Mapping[str, StoredImage],
    ) -> None:
        """Drop embeddings, then encode images. One that fails is noted for `of`.

        Args:
            forgotten: Keys to drop.
            encodes: To encode.
            images: By name, as far as there are any.
        """
        for key in forgotten:
            self._kept.pop(key, None)
            self._failures.pop(key, None)
        for item in encodes:
            image = images.get(item.name)
            if image is None:
                self._failures[item.key] = "the image is not stored any more; send it again"
                continue
            try:
                self._kept[item.key] = self._vision.encode(item, image)
            except ImageError as error:
                self._failures[item.key] = str(error)
            else:
                self.num_encoded += 1

    def of(self, item: MediaItem) -> Tensor:
        """Return an image's embeddings, `[num_tokens, hidden]`.

        Raises:
            ImageError: It could not be encoded.
            KeyError: No plan has encoded it.
        """
        if (failure := self._failures.get(item.key)) is not None:
            raise ImageError(failure)
        return self._kept[item.key]
