"""Rows of training tokens: a picture each, and several questions about it."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from ..tokenizer import TURN_END, TURN_START, FastTokenizer, encode
from .pictures import CELL, COLOURS, PLACES, SHAPES, SIDE, Scene, draw, make_scene
from .questions import Question, questions
from .settings import VisionSettings

IMAGE = "<image>"

USER, ASSISTANT = f"{TURN_START}user\n", f"{TURN_END}\n{TURN_START}assistant\n"

DIGIT = "digit"
LABELS = (("", *SHAPES, DIGIT), ("", *COLOURS), ("", *"0123456789"), PLACES)
"""The labels of a patch: shapes, colours, digits and positions."""


def pixels_of(images: list[Image.Image]) -> Tensor:
    """Return pictures of `SIDE` pixels as the processor does: `[pictures, 3, side, side]`."""
    array = np.stack([np.asarray(image) for image in images])
    return torch.from_numpy(array).permute(0, 3, 1, 2).float() / 127.5 - 1


def labels_of(scene: Scene, patch: int) -> np.ndarray[Any, Any]:
    """Return the numbers of the labels of each patch: `[patches, 4]`."""
    side = SIDE // patch
    labels = np.zeros((side, side, len(LABELS)), dtype=np.int64)
    shapes, colours, digits, _ = LABELS
    size = CELL // patch
    cells = np.arange(side) // size
    labels[..., 3] = 3 * cells[:, None] + cells
    for thing in scene.things:
        row, column = (size * part for part in divmod(thing.place, 3))
        named = (shapes.index(thing.shape), colours.index(thing.colour), 0)
        labels[row : row + size, column : column + size, :3] = named
    for place, digit in enumerate(scene.number):
        named = (shapes.index(DIGIT), colours.index(scene.colour), digits.index(digit))
        labels[:, place * side // 2 : (place + 1) * side // 2, :3] = named
    return labels.reshape(-1, len(LABELS))


class Batch(NamedTuple):
    """Rows with a picture each.

    Attributes:
        pixels: `[rows, 3, side, side]`.
        labels: Labels of the patches: `[rows, patches, 4]`.
        tokens: `[rows, length]`.
        targets: The next tokens; -100 outside answers.
        positions: `[rows, length]`.
        mask: The tokens that each token attends to: `[rows, 1, length, length]`.
    """

    pixels: Tensor
    labels: Tensor
    tokens: Tensor
    targets: Tensor
    positions: Tensor
    mask: Tensor


class Row:
    """The tokens of one picture and of the questions about it.

    Attributes:
        parts: The number of each token's question; 0: the beginning, which all questions see.
    """

    def __init__(self, drawer: Drawer, asked: list[Question], *, together: bool) -> None:
        self.tokens = list(drawer.beginning)
        self.targets = [-100] * len(self.tokens)
        self.parts = [0] * len(self.tokens)
        self.positions = list(range(len(self.tokens)))
        for number, each in enumerate(asked, 1):
            before = f"\n{USER}" if together and number > 1 else ""
            ask = encode(drawer.tokenizer, f"{before}{each.text}{ASSISTANT}")
            answer = encode(drawer.tokenizer, f"{each.answer}{TURN_END}")
            begin = len(self.tokens) if together else len(drawer.beginning)
            self.tokens += ask + answer
            self.targets += [-100] * (len(ask) - 1) + answer + [-100]
            self.parts += [1 if together else number] * (len(ask) + len(answer))
            self.positions += range(begin, begin + len(ask) + len(answer))


class Drawer:
    """Endless batches of a split."""

    def __init__(self, settings: VisionSettings, tokenizer: FastTokenizer) -> None:
        self.settings, self.tokenizer = settings, tokenizer
        self.rng = random.Random(f"pictures/{settings.seed}")
        self.beginning = encode(tokenizer, USER + IMAGE * settings.image_tokens)
        self.pad = tokenizer.pad_token_id

    def scenes(self) -> tuple[list[Scene], Tensor, Tensor]:
        """Return scenes, their pixels and the labels of their patches."""
        scenes = [make_scene(self.rng, "train") for _ in range(self.settings.pictures)]
        pixels = pixels_of([draw(scene, self.rng) for scene in scenes])
        labels = np.stack([labels_of(scene, self.settings.patch) for scene in scenes])
        return scenes, pixels, torch.from_numpy(labels)

    def batch(self) -> Batch:
        """Return the next batch."""
        scenes, pixels, labels = self.scenes()
        rows = [
            Row(
                self,
                questions(scene, self.rng, self.settings.questions),
                together=self.rng.random() < 0.5,
            )
            for scene in scenes
        ]
        length = max(len(row.tokens) for row in rows)

        def padded(name: str, filler: int) -> Tensor:
            lists = [getattr(row, name) for row in rows]
            return torch.tensor([each + [filler] * (length - len(each)) for each in lists])

        parts = padded("parts", -1)
        same = parts[:, :, None] == parts[:, None, :]
        mask = (same | (parts == 0)[:, None, :]) & torch.ones(length, length).tril().bool()
        return Batch(
            pixels,
            labels,
            padded("tokens", self.pad),
            padded("targets", -100),
            padded("positions", 0),
            mask[:, None],
        )
