"""Scenes of glyphs with a class for every pixel, and words to read: small tasks of other kinds, in Matplotlib's fonts.

A scene is 32 × 32: four cells, each empty or with one of the task's characters; pixel labels are 0 for paper and one
more than the character's place in the task for ink. Tasks differ in script, colours and noise; splits differ in fonts.
"""
from typing import NamedTuple

import numpy as np
from PIL import Image

from tvjax.data import fonts, glyphs

SIDE, CELL = 32, 16


class Scenes(NamedTuple):
    images: np.ndarray  # (N, 32, 32, 3) uint8
    labels: np.ndarray  # (N, 32, 32) int32, 0: paper


class Scene(NamedTuple):
    """A task: its characters, and the colours of ink and paper in [0, 1]."""

    chars: str
    ink: tuple[float, float, float]
    paper: tuple[float, float, float]
    noise: float


TASKS = {
    "greek scenes": Scene("ΩΔΨ", (0.95, 0.9, 0.3), (0.1, 0.1, 0.45), 0.08),
    "cyrillic scenes": Scene("ЖФЦ", (0.15, 0.05, 0.1), (0.9, 0.7, 0.7), 0.12),
}


def classes(name: str) -> int:
    """How many classes a pixel of the task may have, paper with them."""
    return 1 + len(_task(name).chars)


def load(name: str, split: str, *, count: int, seed: int = 0) -> Scenes:
    """`count` scenes of a split, the same for the same arguments.

    >>> scenes = load("greek scenes", "val", count=2)
    >>> scenes.images.shape, int(scenes.labels.max())
    ((2, 32, 32, 3), 3)
    """
    task = _task(name)
    if split not in glyphs.FONTS:
        raise ValueError(f"no split {split!r}; there are {', '.join(glyphs.FONTS)}")
    rng = np.random.default_rng([seed, list(TASKS).index(name), list(glyphs.FONTS).index(split)])
    labels = np.stack([_labels(task, split, rng) for _ in range(count)])
    ink, paper = (np.asarray(colour, np.float32) for colour in (task.ink, task.paper))
    clean = np.where(labels[..., None] > 0, ink, paper)
    noisy = clean + task.noise * rng.standard_normal(clean.shape, np.float32)
    return Scenes((255 * noisy.clip(0, 1)).astype(np.uint8), labels.astype(np.int32))


WORDS = ("TREE", "LAKE", "STAR", "MOON", "BIRD", "FISH", "ROAD", "WIND")  # which of them an image spells is its class


class Words(NamedTuple):
    images: np.ndarray  # (N, 32, 32, 3) uint8
    labels: np.ndarray  # (N,) int32, a place in `WORDS`


def words(split: str, *, count: int, seed: int = 0) -> Words:
    """`count` images that spell a word of four letters, two above two, the same for the same arguments.

    >>> found = words("val", count=2)
    >>> found.images.shape, found.labels.shape
    ((2, 32, 32, 3), (2,))
    """
    if split not in glyphs.FONTS:
        raise ValueError(f"no split {split!r}; there are {', '.join(glyphs.FONTS)}")
    rng = np.random.default_rng([seed, len(TASKS), list(glyphs.FONTS).index(split)])
    labels = rng.integers(0, len(WORDS), count).astype(np.int32)
    ink = np.stack([_spelled(WORDS[label], split, rng) for label in labels])[..., None]
    paper = rng.uniform(0.6, 1.0, (count, 1, 1, 3))
    clean = np.where(ink, paper * rng.uniform(0.0, 0.4, (count, 1, 1, 1)), paper)
    noisy = clean + 0.1 * rng.standard_normal(clean.shape)
    return Words((255 * noisy.clip(0, 1)).astype(np.uint8), labels)


def _spelled(word: str, split: str, rng) -> np.ndarray:
    rows = [np.concatenate([_mask(char, split, rng) for char in word[at:at + 2]], 1) for at in (0, 2)]
    return np.concatenate(rows, 0)


def _task(name: str) -> Scene:
    if name not in TASKS:
        raise ValueError(f"no task of scenes {name!r}; there are {', '.join(TASKS)}")
    return TASKS[name]


def _labels(task: Scene, split: str, rng) -> np.ndarray:
    canvas = np.zeros((SIDE, SIDE), np.int64)
    for top in range(0, SIDE, CELL):
        for left in range(0, SIDE, CELL):
            which = int(rng.integers(-1, len(task.chars)))  # −1: an empty cell
            if which >= 0:
                mask = _mask(task.chars[which], split, rng)
                canvas[top:top + CELL, left:left + CELL][mask] = 1 + which
    return canvas


def _mask(char: str, split: str, rng) -> np.ndarray:
    known = [font for font in glyphs.FONTS[split] if ord(char) in fonts.coverage(font)]
    master = Image.fromarray(fonts.master(char, known[int(rng.integers(len(known)))]))
    return np.asarray(master.resize((CELL, CELL), Image.Resampling.BILINEAR)) > 110
