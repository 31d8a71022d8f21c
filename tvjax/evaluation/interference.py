"""Weight disentanglement (Ortiz-Jimenez et al., 2023, arXiv:2305.12827): does a task vector act on its own task alone?

ξ(α₁, α₂) = Σ_t E_{x∼D_t}[ŷ(x; θ0 + α_t τ_t) ≠ ŷ(x; θ0 + α₁τ₁ + α₂τ₂)], in [0, 2]; 0 where neither disturbs the other.
"""
import numpy as np

from tvjax import sharding
from tvjax.evaluation.points import combined, shifted
from tvjax.evaluation.top1 import predictions


def disagreement(one, other):
    """The share of examples on which two rows of predicted classes differ.

    >>> disagreement([0, 1, 2, 1], [0, 2, 2, 1])
    0.25
    """
    one, other = np.asarray(one), np.asarray(other)
    if one.shape != other.shape or not one.size:
        raise ValueError(f"two rows of as many predictions are needed; got shapes {one.shape} and {other.shape}")
    return int((one != other).sum()) / one.size


def disentanglement(predict, theta0, tau1, tau2, data1, data2, grid, *, batch=128, place=shifted):
    """ξ on grid × grid, a numpy array (α₁, α₂): row i is α₁ = grid[i], column j is α₂ = grid[j].

    data1, data2: (head, images) of the two tasks. Takes 2n + 2n² passes for n grid points, all by two compiled
    programs. `place`: `shifted`, or `paired` with a predict from `classify_linearised`.
    """
    data, grid = (data1, data2), [float(scale) for scale in grid]
    (theta0, tau1, tau2), _ = sharding.settled(theta0, tau1, tau2)

    def answers(task, scale1, scale2):
        params = combined(theta0, tau1, tau2, scale1, scale2, place=place)
        return predictions(predict, params, *data[task], batch=batch)

    alone1, alone2 = [answers(0, a, 0.0) for a in grid], [answers(1, 0.0, b) for b in grid]
    error = lambda i, a, j, b: disagreement(alone1[i], answers(0, a, b)) + disagreement(alone2[j], answers(1, a, b))
    return np.array([[error(i, a, j, b) for j, b in enumerate(grid)] for i, a in enumerate(grid)])


def disentanglement_pairs(predict, theta0, taus, data, *, scales=None, batch=128, place=shifted):
    """Pair-wise ξ, (tasks, tasks): row i, column j is E_{x∼D_i}[ŷ(θ0 + λ_i τ_i) ≠ ŷ(θ0 + λ_i τ_i + λ_j τ_j)].

    Not symmetric; the diagonal is 0. taus: the task vectors; data: (head, images) of each; scales: each one's λ, 1
    where None. Block-wise coefficients are applied to the vectors beforehand (arXiv:2407.02880).
    """
    scales = [1.0] * len(taus) if scales is None else [float(scale) for scale in scales]
    if not len(taus) == len(data) == len(scales):
        raise ValueError(f"one head and one scale a task vector: got {len(taus)} task vectors, {len(data)} data sets, "
                         f"{len(scales)} scales")
    (theta0, taus), _ = sharding.settled(theta0, list(taus))

    def answers(i, j, scale):
        params = combined(theta0, taus[i], taus[j], scales[i], scale, place=place)
        return predictions(predict, params, *data[i], batch=batch)

    error = np.zeros((len(taus), len(taus)))
    for i in range(len(taus)):
        alone = answers(i, i, 0.0)
        for j in range(len(taus)):
            error[i, j] = 0.0 if i == j else disagreement(alone, answers(i, j, scales[j]))
    return error


def off_diagonal_mean(matrix):
    """The mean of the entries off the diagonal of a square matrix.

    >>> off_diagonal_mean(np.array([[9.0, 1.0], [2.0, 9.0]]))
    1.5
    """
    matrix = np.asarray(matrix)
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1] or len(matrix) < 2:
        raise ValueError(f"a square matrix of at least two tasks is needed; got shape {matrix.shape}")
    return float(matrix[~np.eye(len(matrix), dtype=bool)].mean())
