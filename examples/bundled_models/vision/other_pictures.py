"""A second drawer of the same scenes, which shares no code with `pictures` and is never trained on.

The model's own drawer has hard edges, one size of canvas, few sizes of shapes and digits of dots.
This one draws on a canvas of another size, eight times as fine, and scales it down, so that edges
are smooth; sizes and places vary more, some shapes are outlines, and digits are a font's.
"""

from __future__ import annotations

import random

from PIL import Image, ImageDraw, ImageFont

from .pictures import COLOURS, Scene

_FINE = 8
"""Supersampling on each side."""

_CANVASES = (60, 96, 150, 224)
"""Widths and heights in pixels; the processor scales them."""

_BACKGROUNDS = ((250, 250, 245), (210, 215, 220), (40, 40, 35))


def draw_otherwise(scene: Scene, rng: random.Random) -> Image.Image:
    """Return the picture of a scene."""
    side = rng.choice(_CANVASES) * _FINE
    image = Image.new("RGB", (side, side), rng.choice(_BACKGROUNDS))
    pen = ImageDraw.Draw(image)
    if scene.number:
        font = ImageFont.load_default(side * rng.uniform(0.45, 0.65))
        middle = side / 2 + side * rng.uniform(-0.04, 0.04), side / 2
        pen.text(middle, scene.number, COLOURS[scene.colour], font, anchor="mm")
    cell = side / 3
    for thing in scene.things:
        row, column = divmod(thing.place, 3)
        size = cell * rng.uniform(0.5, 0.95)
        left = column * cell + rng.uniform(0, cell - size)
        top = row * cell + rng.uniform(0, cell - size)
        line = round(size * rng.uniform(0.15, 0.3)) if rng.random() < 0.25 else 0
        _draw(pen, thing.shape, (left, top, left + size, top + size), thing.colour, line)
    return image.resize((side // _FINE, side // _FINE), Image.Resampling.LANCZOS)


def _draw(
    pen: ImageDraw.ImageDraw,
    shape: str,
    box: tuple[float, float, float, float],
    colour: str,
    line: int,
) -> None:
    """Draw a shape, or its outline of a width above 0."""
    style = {"outline": COLOURS[colour], "width": line} if line else {"fill": COLOURS[colour]}
    left, top, right, bottom = box
    if shape == "circle":
        pen.ellipse(box, **style)
    elif shape == "square":
        pen.rectangle(box, **style)
    else:
        pen.polygon([((left + right) / 2, top), (right, bottom), (left, bottom)], **style)
