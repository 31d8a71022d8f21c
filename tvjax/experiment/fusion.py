"""Fusion of the task vectors of a subset: which coefficients, chosen on which answers (Tang et al., arXiv:2310.04742).

All but TIES stay in the span of the task vectors, so that a fusion is a row of coefficients, one a task of the run,
0 outside of the subset. `judge(rows) -> (values, losses)` tells the score of each row on the data that select: the mean
over the subset of accuracy/fine-tuned accuracy, and the mean loss.
"""
import itertools
import math
import random
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from tvjax.evaluation.gradient_free import minimise

Judge = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]


class Chosen(NamedTuple):
    """`row` of coefficients; `value`, its score on the data that chose, nan where nothing was chosen; `asked`: rows
    judged."""

    row: np.ndarray
    value: float
    asked: int


def subsets(tasks: int, size: int, *, most: int = 0, seed: int = 0) -> list[tuple[int, ...]]:
    """All subsets of `size` tasks in lexicographic order, or `most` of them drawn by the seed.

    >>> len(subsets(7, 3)), subsets(3, 2)
    (35, [(0, 1), (0, 2), (1, 2)])
    >>> len(subsets(8, 4, most=5))
    5
    """
    if not 1 <= size <= tasks:
        raise ValueError(f"a subset has from 1 to {tasks} tasks; got size={size}")
    every = list(itertools.combinations(range(tasks), size))
    return sorted(random.Random(f"{seed}/{size}").sample(every, most)) if 0 < most < math.comb(tasks, size) else every


def average(subset: Sequence[int], tasks: int) -> Chosen:
    """1/n for each task of the subset.

    >>> average((0, 2), 4).row.tolist()
    [0.5, 0.0, 0.5, 0.0]
    """
    return Chosen(_row(subset, tasks, 1 / len(subset)), float("nan"), 0)


def task_arithmetic(judge: Judge, subset: Sequence[int], tasks: int, grid: Sequence[float] | np.ndarray) -> Chosen:
    """One λ of the grid for all tasks, the first of the best."""
    rows = np.stack([_row(subset, tasks, scale) for scale in grid])
    values, _ = judge(rows)
    best = int(np.argmax(values))  # the first of equals
    return Chosen(rows[best], float(values[best]), len(rows))


def greedy(judge: Judge, subset: Sequence[int], tasks: int, grid: Sequence[float] | np.ndarray) -> Chosen:
    """Task after task, the λ of the grid with the best score, the earlier ones being kept."""
    row, value = np.zeros(tasks), float("nan")
    for task in subset:
        rows = np.repeat(row[None], len(grid), 0)
        rows[:, task] = grid
        values, _ = judge(rows)
        best = int(np.argmax(values))
        row, value = rows[best], float(values[best])
    return Chosen(row, value, len(subset) * len(grid))


def lorahub(judge: Judge, subset: Sequence[int], tasks: int, *, budget: int = 40, bound: float = 1.5,
            penalty: float = 0.05, seed: int = 0) -> Chosen:
    """Weights w of least loss + penalty·mean|w| within ±bound, from 0, without gradients (arXiv:2307.13269)."""
    def objective(w):
        row = np.zeros(tasks)
        row[list(subset)] = w
        return float(judge(row[None])[1][0]) + penalty * float(np.abs(w).mean())
    found = minimise(objective, np.zeros(len(subset)), bounds=(-bound, bound), budget=budget, seed=seed)
    row = np.zeros(tasks)
    row[list(subset)] = found.best
    return Chosen(row, -found.value, budget)


def _row(subset, tasks: int, scale: float) -> np.ndarray:
    row = np.zeros(tasks)
    row[list(subset)] = scale
    return row
