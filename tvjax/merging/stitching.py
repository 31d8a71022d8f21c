"""Localize-and-Stitch without data (He et al., 2024, arXiv:2408.13656): each task keeps its largest entries, and where
several keep one, it is their mean."""
from tvjax.merging.averaging import nonzero_mean
from tvjax.merging.averaging import scale as scaled
from tvjax.merging.operator import Operator
from tvjax.merging.signs import top


def localize_and_stitch(*, density=0.01, scale=1.0) -> Operator:
    """Localize-and-Stitch, its form without data (arXiv:2408.13656): the largest entries of each task vector, averaged
    where several tasks keep one.

    density: kept share of each task vector, over the whole model, in (0, 1]; 0.01 in the paper. scale: multiplies the
    result; the paper takes 1.

    >>> import numpy as np
    >>> taus = {"w": np.array([[4.0, -3.0, 1.0, 0.0], [2.0, 0.0, 0.0, 3.0]], np.float32)}
    >>> localize_and_stitch(density=0.5)(taus)["w"].tolist()
    [3.0, -3.0, 0.0, 3.0]
    """
    return top(density=density) | nonzero_mean() | scaled(by=scale)
