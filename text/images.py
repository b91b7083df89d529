"""Images in a model's prompts: how many tokens each takes, and where they stand.

A model's processor replaces the placeholder of an image in a text by the tokens that its embeddings
take, among them sometimes others (rows of tiles, begin and end). That is Transformers' own code, on
its back end with PIL; it needs the sizes of the images only.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from copy import copy
from functools import lru_cache, partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..config import ModelError, RequestError, cut
from .image_tokens import Expanded, ImageTokens, Size, placeholder_id_of
from .model_folder import folder_of, read_json
from .tokenizer import load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_SAME_FOR_IMAGES = {"SmolVLMProcessor": "Idefics3Processor"}
"""Processors that need packages for videos, and others that treat images the same way."""

_SIZES_ONLY = {"PixtralProcessor": "pixtral"}
"""Processors whose module takes one function about sizes from the back end with torchvision, which
the back end with PIL has too; with their folder in Transformers."""

_OF_FIXED_SHAPE = frozenset({"pixel_values", "image_sizes", "batch_num_images", "num_crops"})
"""Results of processors that bring each image, or each tile of it, to the same shape."""

_REMEMBERED = 4096
"""Sizes whose expansion is kept."""


class ImageProcessor:
    """The image part of a model's processor.

    Attributes:
        placeholder: An image's place in a text, as chat templates write it.
        mark_id: The token of `placeholder`.
        placeholder_id: The token in whose place embeddings of an image go; mostly `mark_id`.
        image_processor: Transformers' image processor, with the PIL back end.
        options: Its arguments, as the model's processor gives them.
        folder: With its settings.
        fingerprint: Fingerprint of everything besides the image that its features depend on.
        differs_in_company: Whether features also depend on whether a prompt has other images.
    """

    def __init__(self, processor: Any, placeholder_id: int, folder: Path) -> None:
        """Args:
        processor: Transformers' processor.
        placeholder_id: `image_token_id` of the model's settings.
        folder: With its files.
        """
        self._processor = processor
        self._tokenizer: PreTrainedTokenizerFast = processor.tokenizer
        self.image_processor: Any = processor.image_processor
        if not self._tokenizer.chat_template:
            # Some folders have it with the processor alone.
            self._tokenizer.chat_template = processor.chat_template
        self.placeholder = str(processor.image_token)
        self.placeholder_id = placeholder_id
        self.mark_id = int(self._tokenizer.convert_tokens_to_ids(self.placeholder))
        self._special_ids = {*self._tokenizer.all_special_ids, self.mark_id, placeholder_id}
        self._merged: dict[str, Any] = processor._merge_kwargs(
            tokenizer_init_kwargs=self._tokenizer.init_kwargs
        )["images_kwargs"]
        self.options: dict[str, Any] = {}
        with suppress(_Called):
            self._replace((1, 1), self._note_options)
        self.folder = folder
        settings = self.image_processor.to_json_string() + json.dumps(self.options)
        names = self.image_processor.model_input_names
        self.differs_in_company = "batch_num_images" in names
        self.fingerprint = hashlib.sha256(settings.encode()).hexdigest()
        self._replacement = lru_cache(_REMEMBERED)(self._compute)
        self._encoded = lru_cache(_REMEMBERED)(self._encode)

    @classmethod
    def of(
        cls, folder: Path, tokenizer: PreTrainedTokenizerFast | None = None
    ) -> ImageProcessor | None:
        """Load the processor of a model's folder; None for a model without images.

        Nothing is downloaded and no code from the folder is run.

        Args:
            tokenizer: The folder's; loaded if None. Its image tokens become special ones.

        Raises:
            ModelError: The model takes images, and its processor can't be used.
        """
        folder = folder_of(folder)
        placeholder_id = placeholder_id_of(folder)
        if placeholder_id is None:
            return None
        try:
            processor = _load_processor(folder, tokenizer or load_tokenizer(folder))
            return cls(processor, placeholder_id, folder)
        except ModelError:
            raise
        # Whatever Transformers raises for settings that it can't read.
        except Exception as error:
            if "torchvision" in str(error).lower():
                raise ModelError(
                    f"Transformers has no image processor for the model in {folder} that works "
                    "without torchvision, which would bring torch into the processes that decode "
                    "images; send it texts only, or serve a model of the table in docs/images.md"
                ) from error
            reason = cut(str(error) or type(error).__name__, 300)
            raise ModelError(
                f"the image processor in {folder} can't be loaded: {reason}; save the model's "
                "processor there with processor.save_pretrained()"
            ) from error

    def num_tokens(self, sizes: Sequence[Size]) -> list[int]:
        """Return the number of placeholder tokens of each image of a prompt.

        Raises:
            RequestError: invalid_image: the model can't take an image of this size.
        """
        encoded = map(self._encoded, self.replacements(sizes))
        return [ids.count(self.placeholder_id) for ids in encoded]

    def check_growth(self, sizes: Sequence[Size], *, max_pixels: int, max_side: int) -> None:
        """Check that no image of a prompt becomes too large while it is processed, by the rule by
        which its sides are made equal, or its shorter side gets a fixed length.

        Raises:
            RequestError: image_too_large.
        """
        for place, size in enumerate(sizes):
            for width, height in self._sizes_within(size, alone=len(sizes) == 1):
                if width * height > max_pixels or max(width, height) > max_side:
                    raise RequestError(
                        f"images[{place}] can't be used: the model's processor makes {width} x "
                        f"{height} pixels of its {size[0]} x {size[1]}, and at most {max_pixels} "
                        f"pixels (images.max_pixels) with sides of {max_side} (images.max_side) "
                        "are taken; send one whose sides differ less",
                        code="image_too_large",
                    )

    def _sizes_within(self, size: Size, *, alone: bool) -> Iterable[Size]:
        """Return the sizes of an image while it is processed, as far as the model's settings don't
        bound them."""
        own, (width, height) = self.image_processor, size
        tiles = hasattr(own, "image_grid_pinpoints")
        if hasattr(own, "pad_to_square") and (not alone if tiles else own.do_pad):
            width = height = max(size)
            yield width, height
        shortest = own.size.shortest_edge if own.size and own.do_resize else None
        if shortest and not own.size.longest_edge and not tiles:
            long = int(shortest * max(width, height) / min(width, height))
            yield (shortest, long) if width <= height else (long, shortest)

    def replacements(self, sizes: Sequence[Size]) -> list[str]:
        """Return the text that replaces the placeholder of each image of a prompt.

        Raises:
            RequestError: invalid_image: the model can't take an image of this size.
        """
        alone = len(sizes) == 1
        return [self._replacement(size, alone) for size in sizes]

    def expand_text(self, text: str, sizes: Sequence[Size]) -> str:
        """Return a text with each placeholder replaced, as Transformers' processor does.

        Raises:
            RequestError: images_mismatch: not one placeholder for each image. invalid_image.
        """
        parts = text.split(self.placeholder)
        if len(parts) - 1 != len(sizes):
            raise self._mismatch(len(parts) - 1, len(sizes))
        found = [parts[0]]
        for replacement, part in zip(self.replacements(sizes), parts[1:], strict=True):
            found += (replacement, part)
        return "".join(found)

    def expand(self, token_ids: Iterable[int], sizes: Sequence[Size]) -> Expanded:
        """Return a prompt with all placeholder tokens.

        Args:
            token_ids: With one placeholder for each image, or with all of them already.
            sizes: Sizes of the images, in order.

        Raises:
            RequestError: images_mismatch: the placeholders don't fit the images. invalid_image.
        """
        given = tuple(token_ids)
        if not sizes:
            return Expanded(given, ())
        replacements = list(map(self._encoded, self.replacements(sizes)))
        marks, held = given.count(self.mark_id), given.count(self.placeholder_id)
        if marks == len(sizes) and (self.mark_id == self.placeholder_id or not held):
            found: list[int] = []
            rest = iter(replacements)
            for token_id in given:
                found += next(rest) if token_id == self.mark_id else (token_id,)
            given = tuple(found)
        return Expanded(given, self._located(given, replacements))

    def ranges(self, expanded: Expanded, sizes: Sequence[Size]) -> list[tuple[int, int]]:
        """Return the offset and length of each image's tokens, with those between its placeholders.

        Args:
            sizes: Those with which the prompt was expanded.
        """
        cores = [self._core(self._encoded(each)) for each in self.replacements(sizes)]
        return [
            (image.start - core.index(self.placeholder_id), len(core))
            for image, core in zip(expanded.images, cores, strict=True)
        ]

    def check_no_images(self, token_ids: Sequence[int]) -> None:
        """Refuse a prompt without images that has tokens of some: the model would read embeddings
        that stand for nothing.

        Raises:
            RequestError: images_mismatch.
        """
        for token_id in {self.mark_id, self.placeholder_id}:
            if number := token_ids.count(token_id):
                raise RequestError(
                    f"the prompt has {number} image tokens ({self.placeholder}, id {token_id}) and "
                    "no images; give the images, or leave these tokens out",
                    code="images_mismatch",
                )

    def _located(
        self, token_ids: tuple[int, ...], replacements: list[tuple[int, ...]]
    ) -> tuple[ImageTokens, ...]:
        """Return where the images are in an expanded prompt, after a check of their tokens."""
        found: list[ImageTokens] = []
        at = 0
        for place, ids in enumerate(replacements):
            core, number = self._core(ids), ids.count(self.placeholder_id)
            start = _index(token_ids, core, at)
            if start < 0 or self.placeholder_id in token_ids[at:start]:
                raise self._wrong_tokens(place, number, token_ids, len(replacements))
            found.append(ImageTokens(start + core.index(self.placeholder_id), number))
            at = start + len(core)
        if self.placeholder_id in token_ids[at:]:
            raise self._wrong_tokens(len(replacements) - 1, found[-1].number, token_ids, len(found))
        return tuple(found)

    def _core(self, ids: tuple[int, ...]) -> tuple[int, ...]:
        """Return the tokens from the first special one to the last: white space around them may
        have become one token with its neighbours."""
        special = [place for place, token_id in enumerate(ids) if token_id in self._special_ids]
        return ids[special[0] : special[-1] + 1]

    def _compute(self, size: Size, alone: bool) -> str:
        """Return an image's replacement.

        Args:
            alone: Whether the prompt has no other image. LLaVA-OneVision cuts only those into
                tiles.
        """
        try:
            return self._replace(size, partial(self._inputs, size, alone))
        # Sizes that the model's settings don't allow, such as a side of 1 pixel, or 200 times the
        # other one.
        except (ValueError, ZeroDivisionError, AssertionError, IndexError, OverflowError) as error:
            raise RequestError(
                f"the model can't take an image of {size[0]} x {size[1]} pixels "
                f"({cut(str(error), 200)}); send one of another size",
                code="invalid_image",
            ) from None

    def _replace(self, size: Size, process: Callable[[dict[str, Any]], dict[str, Any]]) -> str:
        """Return an image's replacement by the model's processor.

        Args:
            size: Of the image.
            process: In place of the image processor; takes its arguments.
        """
        caller = copy(self._processor)
        caller.image_processor = _StandIn(self.image_processor, process)
        # Of no size in memory.
        image = np.broadcast_to(np.uint8(0), (size[1], size[0], 3))
        _, (text, *_) = caller._process_images([image], **self._merged)
        return str(text)

    def _note_options(self, options: dict[str, Any]) -> dict[str, Any]:
        self.options = {name: each for name, each in options.items() if name != "return_tensors"}
        raise _Called

    def _inputs(self, size: Size, alone: bool, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return what the image processor finds out about an image, as far as its tokens depend on
        it. If the processor makes another shape of each image, an empty one is processed.
        """
        width, height = size
        own = self.image_processor
        if hasattr(own, "get_number_of_image_patches"):
            patches = own.get_number_of_image_patches(height, width, kwargs)
            if isinstance(patches, tuple):
                return {"rows": [[patches[1]]], "cols": [[patches[2]]]}
            if hasattr(own, "merge_size"):
                return {"image_grid_thw": np.array([[1, patches, 1]])}
            return {"num_patches": [patches]}
        if rule := getattr(sys.modules[type(own).__module__], "get_resize_output_image_size", None):
            edges = own.size.longest_edge or (own.size.height, own.size.width)
            empty = np.broadcast_to(np.uint8(0), (3, height, width))
            return {"image_sizes": [rule(empty, edges, kwargs["patch_size"], "channels_first")]}
        if "num_soft_tokens_per_image" in own.model_input_names:
            (number,) = self._processor._get_num_multimodal_tokens([(height, width)])[
                "num_image_tokens"
            ]
            return {"num_soft_tokens_per_image": [number]}
        shape = own.crop_size if own.do_center_crop else own.size
        if _OF_FIXED_SHAPE.issuperset(own.model_input_names) and shape.height and shape.width:
            pixels = np.zeros((1, shape.height, shape.width), np.uint8)
            crops = 0
            if kwargs.get("do_pan_and_scan"):
                names = ("min_crop_size", "max_num_crops", "min_ratio_to_activate")
                limits = {f"pan_and_scan_{name}": kwargs[f"pan_and_scan_{name}"] for name in names}
                # Parts of it are views.
                empty = np.broadcast_to(np.uint8(0), (3, height, width))
                crops = len(own.pan_and_scan(empty, **limits))
            return {
                "pixel_values": [[pixels]] if hasattr(own, "image_grid_pinpoints") else [pixels],
                "image_sizes": [(height, width)],
                "batch_num_images": [1] if alone else [2],
                "num_crops": [crops],
            }
        from PIL import Image

        image = Image.new("RGB", size)
        # Nested: the images of one prompt.
        return dict(own([[image]] if alone else [[image, image]], **kwargs))

    def _encode(self, text: str) -> tuple[int, ...]:
        ids = self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        if self.placeholder_id not in ids:
            raise RequestError(
                f"the model's tokenizer doesn't know the placeholder of images (token "
                f"{self.placeholder_id}); save the model's own tokenizer in its folder",
                code="images_not_supported",
            )
        return tuple(ids)

    def _mismatch(self, marks: int, images: int) -> RequestError:
        return RequestError(
            f"the prompt has {marks} placeholders ({self.placeholder}) for {images} images; write "
            "one where each image belongs",
            code="images_mismatch",
        )

    def _wrong_tokens(
        self, place: int, number: int, token_ids: tuple[int, ...], images: int
    ) -> RequestError:
        marks = token_ids.count(self.mark_id)
        if marks < images:
            return self._mismatch(marks, images)
        return RequestError(
            f"the prompt's {token_ids.count(self.placeholder_id)} image tokens "
            f"({self.placeholder_id}) don't fit its {images} images: images[{place}] takes "
            f"{number}; give one placeholder ({self.placeholder}) for each image, or the tokens of "
            "the model's processor",
            code="images_mismatch",
        )


class _Called(Exception):
    """The image processor has been called."""


class _StandIn:
    """An image processor that processes no image, with the attributes of a real one."""

    def __init__(self, own: Any, process: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        """`process`: takes the arguments of a call, and returns its result."""
        self._own, self._process = own, process

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def __call__(self, images: object, **options: Any) -> dict[str, Any]:
        return self._process(options)


def _load_processor(folder: Path, tokenizer: PreTrainedTokenizerFast) -> Any:
    """Load a processor without its part for videos, which needs torchvision.

    Raises:
        ModelError: Transformers has no processor for the model.
    """
    from transformers import AutoImageProcessor
    from transformers.processing_utils import ProcessorMixin

    auto: Any = AutoImageProcessor
    image_processor = auto.from_pretrained(
        str(folder), backend="pil", local_files_only=True, trust_remote_code=False
    )
    settings, _ = ProcessorMixin.get_processor_dict(str(folder), local_files_only=True)
    kind = _processor_class(folder, settings)

    class ImagesOnly(kind):  # type: ignore[misc, valid-type]
        def check_argument_for_proper_class(self, argument_name: str, argument: object) -> type:
            return type(argument)

    parts = {"image_processor": image_processor, "tokenizer": tokenizer}
    arguments = [parts.get(name) for name in ImagesOnly.get_attributes()]
    return ImagesOnly.from_args_and_dict(arguments, settings)


def _processor_class(folder: Path, settings: dict[str, Any]) -> type:
    from transformers.models.auto import processing_auto

    known: Any = processing_auto
    name: Any = settings.get("processor_class")
    for file in ("preprocessor_config.json", "tokenizer_config.json"):
        name = name or read_json(folder / file, {}).get("processor_class")
    kind = read_json(folder / "config.json", {}).get("model_type")
    name = name or known.PROCESSOR_MAPPING_NAMES.get(kind)
    name = _SAME_FOR_IMAGES.get(name, name)
    found = _class_of(name) if isinstance(name, str) else None
    if not isinstance(found, type) or not hasattr(found, "replace_image_token"):
        raise ModelError(
            f"Transformers has no processor for {kind} that places images in a prompt ({name}); "
            "serve another model, or its language part alone"
        )
    return found


def _class_of(name: str) -> Any:
    """Return a processor's class; None if Transformers has none of this name."""
    import transformers

    if (family := _SIZES_ONLY.get(name)) is None:
        return getattr(transformers, name, None)
    package = f"transformers.models.{family}"
    missing, there = f"{package}.image_processing_{family}", f"image_processing_pil_{family}"
    absent = missing not in sys.modules
    sys.modules.setdefault(missing, import_module(f"{package}.{there}"))
    try:
        return getattr(import_module(f"{package}.processing_{family}"), name)
    finally:
        if absent:
            del sys.modules[missing]


def _index(ids: tuple[int, ...], part: tuple[int, ...], start: int) -> int:
    """Return where `part` begins in `ids`, from `start` on; -1 if nowhere."""
    first = part[0]
    while True:
        try:
            start = ids.index(first, start)
        except ValueError:
            return -1
        if ids[start : start + len(part)] == part:
            return start
        start += 1
