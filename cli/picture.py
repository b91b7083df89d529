"""A picture in the terminal."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

if TYPE_CHECKING:
    from PIL.Image import Image

Pixel = tuple[int, int, int]


@dataclass
class Picture:
    """A small RGB image, a column for each pixel and a line for two rows of pixels.

    Without colours, every other row is left out, and a pixel is the first letter of the nearest
    name.

    Attributes:
        names: RGB values by name, for terminals without colours. A pixel like the
            first one is blank there.
    """

    image: Image
    names: dict[str, Pixel]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        plain = console.color_system is None
        for top in range(0, self.image.height - 1, 2):
            yield self._letters(top) if plain else self._blocks(top)

    def _blocks(self, top: int) -> Text:
        """Return two rows of pixels as half blocks."""
        line = Text()
        for column in range(self.image.width):
            upper, lower = (self._pixel(column, row) for row in (top, top + 1))
            line.append("▀", style=f"rgb{_list(upper)} on rgb{_list(lower)}")
        return line

    def _letters(self, top: int) -> Text:
        letters = (self._letter(self._pixel(column, top)) for column in range(self.image.width))
        return Text("".join(letters).rstrip())

    def _letter(self, pixel: Pixel) -> str:
        if pixel == self._pixel(0, 0):
            return " "
        return min(self.names, key=lambda name: _distance(pixel, self.names[name]))[0]

    def _pixel(self, column: int, row: int) -> Pixel:
        pixel = self.image.getpixel((column, row))
        assert isinstance(pixel, tuple)
        red, green, blue = pixel
        return int(red), int(green), int(blue)


def _list(pixel: Pixel) -> str:
    return "({},{},{})".format(*pixel)


def _distance(one: Pixel, other: Pixel) -> int:
    return sum((a - b) ** 2 for a, b in zip(one, other, strict=True))
