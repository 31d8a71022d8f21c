"""Pieces of leaves: chunks of a few fixed sizes, so that a few programs serve every model, or whole leaves."""
import dataclasses
import itertools
import math
from typing import NamedTuple

import numpy as np

from tvjax.merging import numbers, plan

SIZES = (1 << 12, 1 << 16, 3 << 16)  # entries of a piece, multiples of draws.BLOCK; the last divides many matrices
MOST = 1 << 22  # entries of a piece, of all tasks: what a cache holds, and memory when there are thousands of tasks


class Piece(NamedTuple):
    """A part of a leaf: entries start:stop flattened and padded to a fixed size, or the whole leaf."""

    leaf: plan.Leaf
    start: int
    stop: int
    whole: bool


def sizes(tasks: int) -> tuple[int, ...]:
    """The sizes of pieces that so many tasks allow.

    >>> sizes(8)[-1], sizes(30)[-1], sizes(10_000)[-1]
    (196608, 65536, 4096)
    """
    return tuple(size for size in SIZES if size * tasks <= MOST) or SIZES[:1]


def chunks(leaf: plan.Leaf, tasks: int, first: int = 0, last: int | None = None) -> list[Piece]:
    """A leaf of so many tasks, or its entries first:last, in chunks, the largest first.

    The same as those of the whole leaf if `first` is a multiple of the largest size.
    """
    entries, allowed = math.prod(leaf.shape) if last is None else last, sizes(tasks)
    cuts = [first]
    for size in allowed[:0:-1] or allowed:
        cuts += range(cuts[-1] + size, entries + 1, size)
    cuts += [entries] if cuts[-1] < entries else []
    return [Piece(leaf, start, stop, False) for start, stop in itertools.pairwise(cuts)]


def pad(x: np.ndarray) -> np.ndarray:
    """Entries (tasks, n) padded with zeros to the next fixed size, which every stage and statistic ignores."""
    size = next(size for size in SIZES if size >= x.shape[-1])
    return x if x.shape[-1] == size else np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, size - x.shape[-1])])


def cut(array, piece: Piece):
    """The part of entry-wise data (shaped as the leaf, or as the stack) that belongs to a piece."""
    flat = np.asarray(array).reshape(*np.shape(array)[: np.ndim(array) - len(piece.leaf.shape)], -1)
    return pad(flat[..., piece.start : piece.stop])


def cut_numbers(stage, piece: Piece):
    """The stage with the part of its numbers by entry that belongs to a piece."""
    mine = {k: numbers.Entries({"": cut(v.array, piece)})
            for k, v in stage.numbers.items() if isinstance(v, numbers.Entries)}
    return dataclasses.replace(stage, numbers={**stage.numbers, **mine}) if mine else stage
