"""Seeded pictures for the bundled vision model: coloured shapes, or a number of two digits."""

from __future__ import annotations

import random
from dataclasses import dataclass

from PIL import Image, ImageDraw

from ..examples import Split, split_of

SIDE = 48
"""Width and height of a picture in pixels."""

CELL = SIDE // 3
"""Width and height of one of the nine places for a shape."""

SHAPES = ("circle", "square", "triangle")

COLOURS = {
    "red": (220, 30, 30),
    "green": (30, 160, 50),
    "blue": (40, 80, 230),
    "yellow": (240, 200, 20),
    "purple": (150, 50, 190),
    "orange": (250, 130, 20),
}

PLACES = (
    "top left",
    "top",
    "top right",
    "left",
    "middle",
    "right",
    "bottom left",
    "bottom",
    "bottom right",
)

BACKGROUNDS = ((255, 255, 255), (225, 225, 225), (30, 30, 40))

MOST_SHAPES = 5

# Each digit in 5 columns and 7 rows.
DIGITS = tuple(
    digit.split()
    for digit in (
        ".###. #...# #..## #.#.# ##..# #...# .###.",
        "..#.. .##.. ..#.. ..#.. ..#.. ..#.. .###.",
        ".###. #...# ....# ...#. ..#.. .#... #####",
        "##### ...#. ..#.. ...#. ....# #...# .###.",
        "...#. ..##. .#.#. #..#. ##### ...#. ...#.",
        "##### #.... ####. ....# ....# #...# .###.",
        "..##. .#... #.... ####. #...# #...# .###.",
        "##### ....# ...#. ..#.. .#... .#... .#...",
        ".###. #...# #...# .###. #...# #...# .###.",
        ".###. #...# #...# .#### ....# ...#. .##..",
    )
)


@dataclass(frozen=True)
class Thing:
    """A shape. place: index of its name in PLACES."""

    shape: str
    colour: str
    place: int

    @property
    def name(self) -> str:
        """The shape's name in answers, without an article."""
        return f"{self.colour} {self.shape}"


@dataclass(frozen=True)
class Scene:
    """The content of a picture: shapes in the order of their positions, or a number in a colour."""

    things: tuple[Thing, ...] = ()
    number: str = ""
    colour: str = ""

    @property
    def key(self) -> str:
        """The key of the split: numbers are held out in all colours."""
        return self.number or repr(self.things)


def make_scene(rng: random.Random, split: Split) -> Scene:
    """Return a scene of a split, a number in two of five."""
    while True:
        if rng.random() < 0.4:
            scene = Scene(number=str(rng.randint(10, 99)), colour=rng.choice(list(COLOURS)))
        else:
            places = sorted(rng.sample(range(len(PLACES)), rng.randint(1, MOST_SHAPES)))
            colours = [rng.choice(list(COLOURS)) for _ in places]
            # Half of the pictures have several of one shape, so that counting is needed.
            shapes = rng.sample(SHAPES, rng.choice((2, 3)))
            scene = Scene(
                tuple(
                    Thing(rng.choice(shapes), colour, place)
                    for colour, place in zip(colours, places, strict=True)
                )
            )
        if split_of(scene.key) == split:
            return scene


def draw(scene: Scene, rng: random.Random) -> Image.Image:
    """Return the picture of a scene; exact places, shades and the sizes of shapes are random."""
    image = Image.new("RGB", (SIDE, SIDE), rng.choice(BACKGROUNDS))
    pen = ImageDraw.Draw(image)
    if scene.number:
        _draw_number(pen, scene, rng)
    for thing in scene.things:
        size = rng.randint(10, 14)
        row, column = divmod(thing.place, 3)
        left, top = (cell * CELL + rng.randint(0, CELL - size) for cell in (column, row))
        _draw_shape(pen, thing.shape, (left, top, size - 1), _shade(thing.colour, rng))
    return image


def _draw_shape(
    pen: ImageDraw.ImageDraw, shape: str, box: tuple[int, int, int], fill: tuple[int, int, int]
) -> None:
    left, top, side = box
    right, bottom = left + side, top + side
    if shape == "circle":
        pen.ellipse((left, top, right, bottom), fill)
    elif shape == "square":
        pen.rectangle((left, top, right, bottom), fill)
    else:
        pen.polygon(((left + side // 2, top), (right, bottom), (left, bottom)), fill)


def _draw_number(pen: ImageDraw.ImageDraw, scene: Scene, rng: random.Random) -> None:
    dot, fill = 4, _shade(scene.colour, rng)
    left = (SIDE - 11 * dot) // 2 + rng.randint(-1, 1)
    top = (SIDE - 7 * dot) // 2 + rng.randint(-2, 2)
    for place, digit in enumerate(scene.number):
        for row, dots in enumerate(DIGITS[int(digit)]):
            for column, mark in enumerate(dots):
                if mark == "#":
                    x, y = left + (6 * place + column) * dot, top + row * dot
                    pen.rectangle((x, y, x + dot - 1, y + dot - 1), fill)


def _shade(colour: str, rng: random.Random) -> tuple[int, int, int]:
    red, green, blue = (min(255, max(0, part + rng.randint(-15, 15))) for part in COLOURS[colour])
    return red, green, blue
