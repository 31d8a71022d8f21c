"""The scale α of a task vector, chosen on validation data: the best of a grid, the first of equals.

Protocols: addition and negation of arXiv:2212.04089 with the grid of arXiv:2305.12827, 0, 0.05, …, 1.
"""
import math
from typing import NamedTuple

GRID = tuple(i / 20 for i in range(21))
SLACK = 1e-9  # below any difference of two accuracies; keeps 0.95 · 0.686 ≤ 0.6517 true in binary


class Search(NamedTuple):
    """`best` scale, its `value`, and the whole `trace`: a tuple (scale, value, …) for each point of the grid."""

    best: float
    value: float
    trace: tuple


def search(evaluate, grid=GRID):
    """The scale of `grid` where `evaluate(scale)` is largest; the first one where several are, nan never.

    Where all values are equal this is the first grid point (the official code, which starts from 0 and takes only what
    is above, returns nothing when all are 0).

    >>> search(lambda scale: -abs(scale - 0.5), grid=[0.0, 0.5, 1.0])[:2]
    (0.5, -0.0)
    """
    trace = tuple((float(scale), float(evaluate(scale))) for scale in grid)
    best = _first_best(trace, lambda row: row[1], larger=True)
    if best is None:
        raise ValueError(f"no scale can be chosen: the value is nan at all {len(trace)} points of the grid")
    return Search(best[0], best[1], trace)


def search_negation(target, control, grid=GRID, *, control_at_zero, threshold=0.95):
    """The scale with the least `target(scale)` among those with `control(scale)` ≥ threshold·control_at_zero.

    The first one wins where several are least. Where none keeps the control, the answer is scale 0, the model itself.
    `trace` holds (scale, target, control); `value` is the target's.

    >>> search_negation(lambda s: 1 - s, lambda s: 0.9 if s < 1 else 0.5, [0.0, 0.5, 1.0], control_at_zero=0.9)[:2]
    (0.5, 0.5)
    """
    trace = tuple((float(scale), float(target(scale)), float(control(scale))) for scale in grid)
    kept = [row for row in trace if row[2] >= threshold * control_at_zero - SLACK]
    best = _first_best(kept, lambda row: row[1], larger=False)
    if best is None:
        best = next((row for row in trace if row[0] == 0), None) or (0.0, float(target(0.0)))
    return Search(best[0], best[1], trace)


def _first_best(rows, value, *, larger):
    known = [row for row in rows if not math.isnan(value(row))]
    if not known:
        return None
    return max(known, key=value) if larger else min(known, key=value)  # both return the first of equals
