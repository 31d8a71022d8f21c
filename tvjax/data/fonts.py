"""Characters drawn with the fonts that Matplotlib ships (DejaVu, STIX): grey master images, rendered once and kept.

A master is a (48, 48) uint8 image, 255 = ink: the glyph centred by its bounding box, large glyphs reduced to fit, small
ones enlarged by at most 1.6, so that a capital stays larger than a small letter.
"""
import functools
import pathlib

import matplotlib
import numpy as np
from matplotlib.ft2font import FT2Font
from PIL import Image, ImageDraw, ImageFont

SIDE = 48
_EM, _BOX, _GROW = 36, 38, 1.6


def font_path(name: str) -> pathlib.Path:
    """Path of the font file `name` (without .ttf) inside Matplotlib; ValueError when Matplotlib does not ship it."""
    path = pathlib.Path(matplotlib.get_data_path(), "fonts", "ttf", name + ".ttf")
    if not path.is_file():
        there = ", ".join(sorted(p.stem for p in path.parent.glob("*.ttf")))
        raise ValueError(f"Matplotlib ships no font {name!r}; there are {there}")
    return path


@functools.lru_cache(maxsize=64)
def coverage(font: str) -> frozenset[int]:
    """Code points that `font` draws."""
    return frozenset(FT2Font(str(font_path(font))).get_charmap())


@functools.lru_cache(maxsize=512)
def _face(font: str, size: int) -> ImageFont.FreeTypeFont:
    return ImageFont.truetype(str(font_path(font)), size, layout_engine=ImageFont.Layout.BASIC)


@functools.lru_cache(maxsize=32768)
def master(char: str, font: str) -> np.ndarray:
    """The glyph of `char` in `font`, a read-only (48, 48) uint8 image, 255 = ink; ValueError when the font lacks it.

    >>> int(master("A", "DejaVuSans").max())
    255
    """
    if ord(char) not in coverage(font):
        raise ValueError(f"font {font!r} does not draw U+{ord(char):04X}")
    left, top, right, bottom = _face(font, _EM).getbbox(char)
    extent = max(right - left, bottom - top, 1)
    face = _face(font, max(6, int(_EM * min(_GROW, _BOX / extent))))
    left, top, right, bottom = face.getbbox(char)
    image = Image.new("L", (SIDE, SIDE))
    ImageDraw.Draw(image).text(((SIDE - left - right) / 2, (SIDE - top - bottom) / 2), char, fill=255, font=face)
    pixels = np.asarray(image).copy()
    pixels.setflags(write=False)
    return pixels
