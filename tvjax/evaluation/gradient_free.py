"""A minimum without derivatives, within a budget of evaluations: CMA-ES (Hansen, arXiv:1604.00772), of the package cma.

LoRAHub (Huang et al., 2023, arXiv:2307.13269) looks for its weights so, there by nevergrad's NGOpt.
"""
from collections.abc import Callable
from typing import NamedTuple

import numpy as np


class Found(NamedTuple):
    """The best point met, its value, and all that were tried: a tuple of (point, value) in order."""

    best: np.ndarray
    value: float
    trace: tuple


def minimise(objective: Callable[[np.ndarray], float], start, *, bounds: tuple, budget: int,
             seed: int = 0, spread: float = 0.5) -> Found:
    """The best of `budget` evaluations of `objective` within `bounds` in every coordinate, the first being at `start`.

    spread: the first standard deviation, in units of the coordinates. A value that is not a number counts as infinite.
    The same seed gives the same points.

    >>> found = minimise(lambda x: float(((x - 0.5) ** 2).sum()), np.zeros(2), bounds=(-1.5, 1.5), budget=60)
    >>> len(found.trace), found.value < 0.05
    (60, True)
    """
    start = np.asarray(start, float)
    low, high = bounds
    if not (budget >= 1 and low < high and ((low <= start) & (start <= high)).all()):
        raise ValueError("a budget of at least 1 evaluation and a start within the bounds are needed; got "
                         f"budget={budget}, bounds={bounds}, start={start.tolist()}")
    trace: list[tuple[np.ndarray, float]] = []

    def judge(points):
        values = [float(objective(point)) for point in points]
        trace.extend(zip(points, values, strict=True))
        return [value if np.isfinite(value) else np.inf for value in values]
    judge([start])
    search = _search(start, spread, low, high, seed)
    size = start.size
    while left := budget - len(trace):
        points = search.ask(min(left, search.popsize))
        values = judge([point[:size] for point in points])
        if len(points) == search.popsize:
            search.tell(points, values)
    best, value = min(trace, key=lambda pair: pair[1] if np.isfinite(pair[1]) else np.inf)
    return Found(best, value, tuple(trace))


def _search(start, spread, low, high, seed):
    try:
        import cma
    except ImportError:
        raise ValueError("the search without gradients needs the package cma: pip install 'tvjax[search]'") from None
    start = np.append(start, 0.0) if start.size == 1 else start  # cma wants two coordinates; the second has no effect
    return cma.CMAEvolutionStrategy(start, spread, {"bounds": [low, high], "seed": seed + 1, "verbose": -9})
