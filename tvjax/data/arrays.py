"""Image classification from `.npz` files: the arrays `{task}_{train,test}_{x,y}`, and `{task}_val_{x,y}` where given.

x: (N, height, width) or (N, height, width, 1 or 3) uint8; y: (N,) integers from 0. `{task}_classes` may hold the class
names. A validation split that is not there is taken from the training one by the rule of `tvjax.data.splits`.
"""
import pathlib
import re
import zipfile
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from PIL import Image

from tvjax.data import splits

KEY = re.compile(r"(.+)_train_x")
DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
CLASSNAMES = {name: tuple(f"digit {word}" for word in DIGITS) for name in ("mnist", "usps", "kannada", "sign", "svhn")}
TEMPLATES = ("{}", "a picture of {}", "the character {}", "a drawing of the symbol {}")


class Pictures(NamedTuple):
    images: np.ndarray  # (N, height, width, 3) uint8
    labels: np.ndarray  # (N,) int32


class Arrays(NamedTuple):
    """A task; `classnames` is None where the file names no classes and the task is none that is known."""
    classes: int
    classnames: tuple[str, ...] | None
    splits: dict[str, Pictures]
    source: str


def files(sources: Iterable[str]) -> dict[str, pathlib.Path]:
    """{task: file} of all tasks in the files."""
    found: dict[str, pathlib.Path] = {}
    for source in sources:
        for task in tasks(source):
            if task in found:
                raise ValueError(f"both {found[task]} and {source} hold the task {task!r}")
            found[task] = pathlib.Path(source)
    return found


def tasks(path) -> list[str]:
    """The names of the tasks in a file, which is not read for it."""
    with _opened(path) as archive:
        names = [found[1] for key in archive.files if (found := KEY.fullmatch(key))]
    if not names:
        raise ValueError(f"{path} holds no task: its arrays are to be called TASK_train_x, TASK_train_y, "
                         "TASK_test_x, TASK_test_y")
    return names


def _opened(path):
    try:
        found = np.load(path)
    except FileNotFoundError:
        raise ValueError(f"there is no file {path}: name a .npz file with arrays TASK_train_x … in sources") from None
    except (ValueError, OSError, zipfile.BadZipFile):
        raise ValueError(f"{path} is no .npz file of arrays") from None
    if not isinstance(found, np.lib.npyio.NpzFile):
        raise ValueError(f"{path} is one array; a .npz file with arrays TASK_train_x … is needed")
    return found


def read(path, task: str, *, side: int | None = None) -> Arrays:
    """A task of a file, its images scaled to `side` × `side` where that is given; ValueError for what does not fit."""
    with _opened(path) as archive:
        if missing := [key for key in (f"{task}_{split}_{part}" for split in ("train", "test") for part in "xy")
                       if key not in archive.files]:
            raise ValueError(f"{path} lacks the array {missing[0]}")
        parts = [split for split in ("train", "val", "test") if f"{task}_{split}_x" in archive.files]
        found = {split: _pictures(archive[f"{task}_{split}_x"], archive[f"{task}_{split}_y"], side,
                                  f"{path}, {task}_{split}") for split in parts}
        told = f"{task}_classes" in archive.files
        named = tuple(map(str, archive[f"{task}_classes"])) if told else CLASSNAMES.get(task)
    classes = 1 + int(max(part.labels.max() for part in found.values()))
    if named is not None and len(named) < classes:
        raise ValueError(f"{path}: {task} has {len(named)} class names, but labels up to {classes - 1}")
    return Arrays(classes if named is None else len(named), named, *_with_val(found, f"{path}, {task}"))


def _pictures(x, y, side, where) -> Pictures:
    grey = x.ndim == 3 or x.ndim == 4 and x.shape[-1] == 1
    if x.dtype != np.uint8 or not (grey or x.ndim == 4 and x.shape[-1] == 3):
        raise ValueError(f"{where}_x has shape {x.shape} and type {x.dtype}; images are (N, height, width) or "
                         "(N, height, width, 1 or 3), uint8")
    if y.shape != x.shape[:1] or not np.issubdtype(y.dtype, np.integer) or not len(y) or y.min() < 0:
        raise ValueError(f"{where}_y has shape {y.shape} and type {y.dtype}; it needs {len(x)} integers from 0 on")
    images = np.broadcast_to(x.reshape(*x.shape[:3], 1), (*x.shape[:3], 3)) if grey else x
    return Pictures(scaled(images, side), y.astype(np.int32))


def scaled(images: np.ndarray, side: int | None) -> np.ndarray:
    """Images (N, side, side, 3) by bicubic interpolation, as CLIP's image processor does; as they are for None.

    >>> scaled(np.zeros((2, 4, 4, 3), np.uint8), 8).shape
    (2, 8, 8, 3)
    """
    if side is None or images.shape[1:3] == (side, side):
        return np.ascontiguousarray(images)
    resized = lambda one: Image.fromarray(np.ascontiguousarray(one)).resize((side, side), Image.Resampling.BICUBIC)
    return np.stack([np.asarray(resized(one)) for one in images])


def _with_val(found: dict[str, Pictures], where: str) -> tuple[dict[str, Pictures], str]:
    if "val" in found:
        return found, f"{where} (its own validation split)"
    whole = found["train"]
    train, val = splits.train_val(len(whole.labels))
    take = lambda rows: Pictures(whole.images[rows], whole.labels[rows])
    said = f"{where} (validation: {len(val)} of {len(whole.labels)} training examples, {splits.index_hash(val)})"
    return {"train": take(train), "val": take(val), "test": found["test"]}, said
