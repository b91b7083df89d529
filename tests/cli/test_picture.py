"""A picture in the terminal."""

from __future__ import annotations

import io

from PIL import Image
from rich.console import Console

from nano_inference.cli.picture import Picture

NAMES = {"red": (255, 0, 0), "blue": (0, 0, 255)}


def shown(color_system: str | None) -> str:
    image = Image.new("RGB", (3, 2), (255, 255, 255))
    image.putpixel((1, 0), (250, 20, 0))
    image.putpixel((2, 0), (0, 10, 250))
    image.putpixel((2, 1), (0, 10, 240))
    file = io.StringIO()
    console = Console(file=file, color_system=color_system, force_terminal=color_system is not None)  # type: ignore[arg-type]
    console.print(Picture(image, NAMES))
    return file.getvalue()


def test_two_rows_of_pixels_are_one_line_of_half_blocks() -> None:
    (line,) = shown("truecolor").splitlines()
    white = "255;255;255"
    pairs = [(white, white), ("250;20;0", white), ("0;10;250", "0;10;240")]
    assert line == "".join(f"\x1b[38;2;{up};48;2;{low}m▀\x1b[0m" for up, low in pairs)


def test_without_colours_letters_name_them() -> None:
    assert shown(None) == " rb\n"
