"""Glyphs: twenty classification tasks and a control task, drawn with the fonts that Matplotlib ships; no download.

A task is a Unicode block in a visual domain of its own; its classes are the characters' Unicode names. Images are
32 × 32 RGB. Splits are disjoint by construction: the rule "fonts" draws val and test with fonts that train never uses;
where a block exists in too few fonts, the rule "slant" draws them with strokes that lean more than any in train.
Everything follows from (task, split, seed).
"""
import dataclasses
import difflib
import functools
import importlib.resources
import pathlib
import unicodedata
import zlib
from typing import NamedTuple

import numpy as np
from PIL import Image

from tvjax.data import domains, fonts
from tvjax.data.glyphs_blocks import BLOCKS, characters

SIZES = {"train": 2400, "val": 500, "test": 1000}
EXAMPLES = {"train": 2400, "val": 250, "test": 1000}  # of them, those that the protocol uses
RECIPE = {"steps": 200, "batch": 64, "lr": 3e-4, "warmup": 20, "weight_decay": 0.1}  # the protocol's fine-tuning
TEMPLATES = ("{}", "a picture of {}", "the character {}", "a drawing of the symbol {}")
FONTS = {
    "train": ("DejaVuSans", "DejaVuSans-Bold", "DejaVuSans-Oblique", "DejaVuSansMono", "DejaVuSansMono-Bold",
              "DejaVuSerif"),
    "val": ("DejaVuSerif-Bold", "DejaVuSansMono-Oblique"),
    "test": ("DejaVuSerif-Italic", "DejaVuSerif-BoldItalic", "STIXGeneral"),
}
UPRIGHT = ("DejaVuSans", "DejaVuSans-Bold", "DejaVuSansMono", "DejaVuSansMono-Bold")
SLANTS = {"train": (0.0, 0.10), "val": (0.13, 0.17), "test": (0.19, 0.25)}  # |horizontal shift| per unit of height
BY_FONTS = ("greek", "armenian", "digits", "arrows", "cyrillic", "georgian", "latin")


class Split(NamedTuple):
    images: np.ndarray  # (N, 32, 32, 3) uint8
    labels: np.ndarray  # (N,) int32


@dataclasses.dataclass(frozen=True)
class Task:
    """One row of the benchmark. `rule` says what keeps the splits apart; `domain` is a row of `domains.FIELDS`."""
    name: str
    chars: str
    rule: str
    domain: tuple[float, ...]
    templates: tuple[str, ...] = TEMPLATES

    @property
    def classnames(self) -> tuple[str, ...]:
        """Unicode names in lower case, in the order of the labels."""
        return tuple(unicodedata.name(c).lower() for c in self.chars)


_look = domains.domain
_LOOKS = {
    "greek": _look(outline=1.0, stripes=0.42, ink=(0.95, 0.9, 0.3), paper=(0.05, 0.1, 0.4)),
    "braille": _look(angle=30, noise=0.18, ink=(0.1, 0.1, 0.1), paper=(0.8, 0.8, 0.7)),
    "armenian": _look(wave=2.4, wave_length=12, ink=(0.6, 0.1, 0.1), paper=(0.95, 0.85, 0.7)),
    "digits": _look(clouds=0.75, ink=(0.9, 0.9, 0.9), paper=(0.3, 0.3, 0.3)),
    "tifinagh": _look(weight=0.9, blur=1.0, stripes=0.13, texture_angle=60, ink=(0.9, 0.5, 0.1), paper=(0.2, 0.1, 0.3)),
    "hebrew": _look(checks=0.6, ink=(0.95, 0.35, 0.35), paper=(0.1, 0.3, 0.1)),
    "arrows": _look(occlusion=0.34, shade=0.8, ink=(0.1, 0.3, 0.6), paper=(0.7, 0.8, 0.9)),
    "syllabics": _look(stretch=0.6, stripes=0.3, texture_length=5, ink=(0.0, 0.2, 0.1), paper=(0.6, 0.75, 0.6)),
    "cyrillic": _look(checks=0.55, texture_length=7, texture_angle=30, ink=(1.0, 1.0, 1.0), paper=(0.3, 0.0, 0.1)),
    "hexagrams": _look(stretch=0.3, angle=-25, shade=0.4, ink=(0.3, 0.2, 0.1), paper=(0.9, 0.8, 0.5)),
    "georgian": _look(clutter=0.75, ink=(0.9, 0.8, 0.9), paper=(0.3, 0.1, 0.4)),
    "operators": _look(noise=0.3, clutter=0.65, ink=(0.15, 0.1, 0.1), paper=(0.65, 0.7, 0.65)),
    "ogham": _look(wave=2.2, wave_length=20, angle=-24, ink=(0.85, 0.85, 0.8), paper=(0.35, 0.4, 0.35)),
    "cards": _look(stripes=0.3, texture_length=22, texture_angle=90, ink=(0.1, 0.05, 0.2), paper=(0.9, 0.8, 0.8)),
    "lao": _look(blur=1.0, clouds=0.5, ink=(0.9, 0.9, 0.2), paper=(0.1, 0.3, 0.1)),
    "boxes": _look(angle=27, stripes=0.29, texture_length=6, texture_angle=45, ink=(0.9,) * 3, paper=(0.2, 0.3, 0.5)),
    "nko": _look(outline=1.0, weight=0.4, wave=1.9, ink=(0.05, 0.05, 0.05), paper=(0.85, 0.6, 0.6)),
    "lisu": _look(angle=-38, ink=(0.2, 0.4, 0.1), paper=(0.85, 0.95, 0.8)),
    "arabic": _look(stripes=0.6, texture_length=9, texture_angle=-45, ink=(0.1, 0.1, 0.4), paper=(0.8, 0.7, 0.5)),
    "latin": _look(angle=34, clouds=0.4, ink=(0.95, 0.95, 0.95), paper=(0.5, 0.25, 0.1)),
}
_RULE_OF = {c: "fonts" if name in BY_FONTS else "slant"
            for name, pair in BLOCKS.items() for c in characters(" ".join(pair))}


def _task(name: str) -> Task:
    chars = characters(BLOCKS[name][0])
    return Task(name, chars, _RULE_OF[chars[0]], tuple(map(float, _LOOKS[name])))


TASKS: tuple[Task, ...] = tuple(map(_task, BLOCKS))
_PLAIN = _look(shade=0.25, noise=0.05, ink=(0.15, 0.1, 0.25), paper=(0.9, 0.85, 0.95))
CONTROL = Task("control", "".join(characters(held) for _, held in BLOCKS.values()), "as its block",
               tuple(map(float, _PLAIN)))


def suite(size: int) -> tuple[str, ...]:
    """Names of the first 8, 14 or 20 tasks, the protocol's three sizes."""
    if size not in (8, 14, 20):
        raise ValueError(f"no suite of {size} tasks; there are suites of 8, 14 and 20")
    return tuple(t.name for t in TASKS[:size])


def task(name: str) -> Task:
    """The task (or the control task) called `name`; ValueError with the nearest name when there is none."""
    found = {t.name: t for t in (*TASKS, CONTROL)}
    if name not in found:
        near = difflib.get_close_matches(str(name), found, n=1, cutoff=0)
        raise ValueError(f"no glyph task {name!r}; did you mean {near[0]!r}? There are {', '.join(found)}")
    return found[name]


def pretrained_dir() -> pathlib.Path:
    """Directory of the small CLIP that ships with the package, a Hugging Face checkpoint."""
    return pathlib.Path(str(importlib.resources.files("tvjax.data"))) / "glyphs_clip"


@functools.cache
def faces(char: str, split: str) -> tuple[str, ...]:
    """Fonts that may draw `char` in a split."""
    among = FONTS[split] if _RULE_OF.get(char, "slant") == "fonts" else UPRIGHT
    return tuple(f for f in among if ord(char) in fonts.coverage(f))


def slants(chars: str, split: str, rng: np.random.Generator) -> np.ndarray:
    """A random lean for each character: its split's band on either side under the rule "slant", else train's band."""
    bands = np.array([SLANTS["train" if _RULE_OF.get(c, "slant") == "fonts" else split] for c in chars], np.float32)
    size = bands[:, 0] + (bands[:, 1] - bands[:, 0]) * rng.random(len(chars), np.float32)
    return size * rng.choice(np.array([-1, 1], np.float32), len(chars))


def draw(chars: str, split: str, rows: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Images (N, 32, 32, 3) uint8 of N characters, each in a random face of the split, in domain rows (N, 22)."""
    picks = rng.random(len(chars))
    choices = [faces(c, split) for c in chars]
    masters = np.stack([fonts.master(c, f[int(r * len(f))]) for c, f, r in zip(chars, choices, picks, strict=True)])
    return domains.render(masters, rows, slants(chars, split, rng), rng)


def load(name: str, split: str, *, seed: int = 0, most: int | None = None) -> Split:
    """Images and labels of a split, classes balanced, order shuffled; the same arrays for the same (name, split, seed).

    most: the first so many alone, the same as those of the whole split.

    >>> load("greek", "val").images.shape
    (500, 32, 32, 3)
    """
    row = task(name)
    if split not in SIZES:
        raise ValueError(f"no split {split!r}; there are {', '.join(SIZES)}")
    rng = np.random.default_rng([seed, zlib.crc32(f"{name}/{split}".encode())])
    labels = rng.permutation(np.arange(SIZES[split], dtype=np.int32) % len(row.chars))
    look = np.tile(np.array(row.domain, np.float32), (256, 1))
    parts = np.split(labels, range(256, len(labels), 256))[:None if most is None else -(-most // 256)]
    images = [draw("".join(row.chars[i] for i in part), split, look[:len(part)], rng) for part in parts]
    return Split(np.concatenate(images)[:most], labels[:most])


def contact_sheet(name: str, split: str = "train", *, columns: int = 12, rows: int = 4, seed: int = 0) -> Image.Image:
    """The first columns × rows images of a split as one picture, for looking."""
    tiles = load(name, split, seed=seed).images[:columns * rows]
    tiles = np.pad(tiles, ((0, 0), (1, 1), (1, 1), (0, 0))).reshape(rows, columns, 34, 34, 3)
    return Image.fromarray(tiles.transpose(0, 2, 1, 3, 4).reshape(rows * 34, columns * 34, 3))
