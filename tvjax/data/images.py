"""A vision task as arrays: source, split rule, classes in the registry's order, images decoded and cut as CLIP does.

Only the examples that are asked for are decoded, by several threads. A test image that is also a training image is
looked for: data sets were published with such splits (DTD in checkpoints of arXiv:2405.07813 before December 2024).
"""
import concurrent.futures
import hashlib
import os
import re

import numpy as np
from PIL import Image

from tvjax.data import sources, splits, vision
from tvjax.data.arrays import Pictures
from tvjax.data.sources import Records, Source

LEAK = 0.01  # the share of test images among the training images from which on the split is refused


def read(name: str, roots, *, side: int, examples: dict[str, int]) -> tuple[dict[str, Pictures], str]:
    """({split: images (N, side, side, 3) and labels}, what was taken and how it was split).

    examples: how many of each split at most, taken by a permutation that depends on nothing but their number.
    Raises ValueError for a task without a source, classes that are not the registry's, images that do not decode, and
    test images that were trained on.
    """
    task = vision.task(name)
    source = sources.open_source(task, tuple(roots))
    rows, how = _rows(task, source)
    order = classes(task, source.names, source.said)
    found = {}
    for split, (records, indices) in rows.items():
        chosen = indices[splits.first(len(indices), examples[split])]
        labels = order[np.asarray(records.labels)[chosen]]
        found[split] = Pictures(_decoded(records, chosen, side), labels.astype(np.int32))
    check_leak(found["train"].images, found["test"].images, f"{task.name} ({source.said})")
    return found, f"{source.said}; {how}"


def _rows(task: vision.Task, source: Source) -> tuple[dict[str, tuple[Records, np.ndarray]], str]:
    """{split: (records, indices)} by the task's rule, and the rule in words."""
    train, test, val = source.splits["train"], source.splits["test"], source.splits.get("val")
    whole = lambda records: np.arange(len(records.labels))
    if val is not None and task.rule == "own":
        return {"train": (train, whole(train)), "val": (val, whole(val)), "test": (test, whole(test))}, "its own val"
    if val is not None and task.rule == "train+val":
        train = _joined(train, val)
    ours, held = splits.train_val(len(train.labels))
    said = f"val: {len(held)} of {len(train.labels)} training images, {splits.index_hash(held)}"
    return {"train": (train, ours), "val": (train, held), "test": (test, whole(test))}, said


def _joined(one: Records, other: Records) -> Records:
    cut = len(one.labels)
    part = lambda i: (one, i) if i < cut else (other, i - cut)
    return Records(np.concatenate([one.labels, other.labels]), lambda i: part(i)[0].get(part(i)[1]),
                   lambda i: part(i)[0].where(part(i)[1]))


def classes(task: vision.Task, names, said: str) -> np.ndarray:
    """The registry's label of each label of the source: by name, by number, or as they are where there are no names.

    Raises ValueError where the classes are not those that the head is made of.
    """
    if not names:
        return np.arange(task.classes)
    if len(names) != task.classes:
        raise ValueError(f"{said} has {len(names)} classes, but {task.name} has {task.classes}, one for each column of "
                         "its head")
    if all(name.strip().isdigit() for name in names):
        numbers = np.array([int(name) for name in names])
        if sorted(numbers) in (list(range(task.classes)), list(range(1, task.classes + 1))):
            return numbers - numbers.min()
    for known in (task.folders, task.classnames):
        index = {plain(name): i for i, name in enumerate(known)}
        if all(plain(name) in index for name in names):
            return np.array([index[plain(name)] for name in names])
    strange = next(name for name in names if plain(name) not in {plain(one) for one in task.classnames})
    raise ValueError(f"{said} has a class {strange!r}, which is none of {task.name}'s {task.classes}, as "
                     f"{task.classnames[0]!r}: name its classes so, or number them from 0")


def plain(name: str) -> str:
    """A class name without case, blanks and punctuation, by which different spellings are the same.

    >>> plain("001.Black_footed_Albatross"), plain("T-shirt/top")
    ('blackfootedalbatross', 'tshirttop')
    """
    return re.sub(r"[\W_]", "", re.sub(r"^\d+\.", "", name).lower())


def _decoded(records: Records, indices, side: int) -> np.ndarray:
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as threads:
        return np.stack(list(threads.map(lambda i: crop(records.get(int(i)), side), indices)))


def crop(image: Image.Image, side: int) -> np.ndarray:
    """(side, side, 3) uint8: the shorter side scaled to `side` by bicubic interpolation, then the middle.

    >>> crop(Image.new("RGB", (40, 20)), 10).shape
    (10, 10, 3)
    """
    width, height = image.size
    short, long = min(width, height), max(width, height)
    longer = int(side * long / short)
    size = (side, longer) if width <= height else (longer, side)
    scaled = image if image.size == size else image.resize(size, Image.Resampling.BICUBIC)
    left, top = (size[0] - side) // 2, (size[1] - side) // 2
    return np.asarray(scaled.crop((left, top, left + side, top + side)))


def check_leak(train: np.ndarray, test: np.ndarray, what: str) -> None:
    """Raises ValueError where more than 1 % of the test images are, to the pixel, training images."""
    digest = lambda image: hashlib.blake2b(np.ascontiguousarray(image).tobytes(), digest_size=16).digest()
    seen = {digest(image) for image in train}
    both = sum(digest(image) in seen for image in test)
    if both > LEAK * len(test):
        raise ValueError(f"{what}: {both} of {len(test)} test images are training images too, so that its accuracy "
                         "would say nothing: take the official splits apart")
