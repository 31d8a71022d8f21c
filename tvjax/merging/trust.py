"""TATR, task arithmetic in a trust region (Sun et al., ICLR 2025, arXiv:2501.15065): entries where one task's vector
goes along another task's gradient are left out, for all tasks.

Ω = Σ_{i≠j} |g_j ⊙ τ_i|; an entry is kept where Ω < ε, the quantile of Ω over the whole model. Ω is summed pair by pair
as Σ_{i<j} (|g_i||τ_j| + |g_j||τ_i|) with running sums over tasks, so that nothing cancels and 0 stays 0.
"""
import jax.numpy as jnp

from tvjax.merging.averaging import as_like, total
from tvjax.merging.averaging import scale as scaled
from tvjax.merging.checks import choice, share
from tvjax.merging.operator import Operator, identity, step
from tvjax.merging.statistics import Kth, Least, check_scope

SOURCES = ("gradients", "vectors")


def trust_region(*, quantile=0.99, by: str = "gradients", scope: str = "global") -> Operator:
    """Zeroes the entries of all task vectors outside the trust region, Ω ≥ ε: what follows with `|` merges the rest.

    ε is entry ⌊quantile·n⌋ of the n values Ω in ascending order (the last one at most), so that ties at ε go too; where
    ε is the least value too, as it is where no tasks conflict or there is one task alone, the entries at ε stay.

    quantile: in (0, 1]. by: "gradients" (data: `gradients`, a tree shaped as the stack, signed or of magnitudes, see
    `calibration.exemplar_gradients`), or "vectors", the zero-shot form without data, where |τ_j| stands for |g_j|.
    scope: where the quantile is taken: over the whole model ("global"), each "layer" or each "leaf".

    >>> (trust_region(quantile=0.5, by="vectors") | total())({"w": jnp.array([[4.0, 0.0], [3.0, 1.0]])})["w"].tolist()
    [0.0, 1.0]
    """
    attach, pairs = _source(by)
    bound = Kth(share("quantile", quantile), NEGATED[by], check_scope(scope), 1)
    return attach | step(_inside, bound, Least(pairs, scope), options={"by": by})


def trust_pairs(*, quantile=0.99, by: str = "gradients") -> Operator:
    """Zeroes the entries outside the intersection of one trust region for each ordered pair of tasks (i, j), i ≠ j.

    The region of a pair is |g_j ⊙ τ_i| < its own quantile. An ablation: it drops more than `trust_region`, and costs
    T(T − 1) order statistics. Options as there.

    >>> (trust_pairs(quantile=0.5, by="vectors") | total())({"w": jnp.array([[4.0, 0.0], [3.0, 1.0]])})["w"].tolist()
    [0.0, 1.0]
    """
    attach, _ = _source(by)
    score, least = PAIRS[by]
    bound = Kth(share("quantile", quantile), score, "global", 1)
    return attach | step(_inside_all, bound, Least(least), options={"by": by})


def scale_descent(*, by=1.0) -> Operator:
    """Entries whose joint step descends, Σ_{i≠j} g_j τ_i < 0, times `by`; all others zero. An ablation of TATR.

    Data: `gradients` as signed means. by: the multiplier, one number.

    >>> data = {"w": jnp.array([[1.0, 1.0], [-1.0, 1.0]])}
    >>> (scale_descent(by=0.5) | total())({"w": jnp.array([[2.0, 1.0], [0.0, 1.0]])}, gradients=data)["w"].tolist()
    [1.0, 0.0]
    """
    return step(_attach, needs=("gradients",)) | step(_descending, by=by)


def conflicts(*, by: str = "gradients") -> Operator:
    """Ω itself, Σ_{i≠j} |g_j ⊙ τ_i| for each entry, in place of a merge. Data and `by` as in `trust_region`.

    >>> conflicts(by="vectors")({"w": jnp.array([[4.0, 0.0], [3.0, 1.0]])})["w"].tolist()
    [24.0, 0.0]
    """
    attach, _ = _source(by)
    return attach | step(_omega, options={"by": by})


def tatr(*, quantile=0.99, scale=0.3, inner: Operator | None = None, scope: str = "global") -> Operator:
    """TATR (Sun et al., 2025): scale · the merge `inner` (Σ τ by default) of the entries in the trust region, Ω < ε of
    Ω = Σ_{i≠j} |g_j ⊙ τ_i| (arXiv:2501.15065).

    Data: `gradients`, a tree shaped as the stack, of each task's loss at θ0 over a few exemplars. quantile, scope: see
    `trust_region`. inner: any merge, such as `ties()`.

    >>> taus, data = {"w": jnp.array([[4.0, 0.0], [3.0, 1.0]])}, {"w": jnp.array([[1.0, 1.0], [1.0, 0.0]])}
    >>> tatr(quantile=0.5, scale=1.0)(taus, gradients=data)["w"].tolist()
    [0.0, 1.0]
    """
    return trust_region(quantile=quantile, scope=scope) | (total() if inner is None else inner) | scaled(by=scale)


def tatr_zero_shot(*, quantile=0.99, scale=0.3, inner: Operator | None = None, scope: str = "global") -> Operator:
    """TATR without data: each task vector stands for its task's gradient, Ω = Σ_{i≠j} |τ_j ⊙ τ_i| (arXiv:2501.15065).

    Options as in `tatr`.

    >>> tatr_zero_shot(quantile=0.5, scale=1.0)({"w": jnp.array([[4.0, 0.0], [3.0, 1.0]])})["w"].tolist()
    [0.0, 1.0]
    """
    region = trust_region(quantile=quantile, by="vectors", scope=scope)
    return region | (total() if inner is None else inner) | scaled(by=scale)


# ---------------------------------------------------------------- leaf functions
def _source(by: str):
    """What puts gradients beside the task vectors, and Ω as one row of scores."""
    choice("by", by, SOURCES)
    return (step(_attach, needs=("gradients",)) if by == "gradients" else identity()), SCORES[by]


def _attach(x, gradients):
    """(tasks, …) task vectors above (tasks, …) gradients: entry-wise scores see both."""
    if gradients.shape != x.shape:
        raise ValueError("gradients have the shape of the stack, (tasks, ...) for each leaf; here they differ")
    stacked = jnp.asarray(gradients).astype(x.dtype)
    return jnp.stack([*[x[t] for t in range(x.shape[0])], *[stacked[t] for t in range(x.shape[0])]])


def _split(x, by: str):
    """The rows of task vectors and those that stand for gradients."""
    rows = [x[t] for t in range(x.shape[0])]
    return (rows[: len(rows) // 2], rows[len(rows) // 2 :]) if by == "gradients" else (rows, rows)


def _omega(x, by: str):
    rows, slopes = _split(x, by)
    return _crossed([jnp.abs(row) for row in rows], [jnp.abs(slope) for slope in slopes])


def _crossed(rows, slopes):
    """Σ_{i≠j} slope_j · row_i, by running sums."""
    found, rows_before, slopes_before = jnp.zeros_like(rows[0]), rows[0], slopes[0]
    for row, slope in zip(rows[1:], slopes[1:], strict=True):
        found = found + row * slopes_before + slope * rows_before
        rows_before, slopes_before = rows_before + row, slopes_before + slope
    return found


def _by_gradients(x):
    return _omega(x, "gradients")[None]


def _by_vectors(x):
    return _omega(x, "vectors")[None]


def _less_by_gradients(x):
    return -_by_gradients(x)


def _less_by_vectors(x):
    return -_by_vectors(x)


SCORES = {"gradients": _by_gradients, "vectors": _by_vectors}
NEGATED = {"gradients": _less_by_gradients, "vectors": _less_by_vectors}


def _kept(score, bound, least):
    """Whether scores lie below the bound, or at it where it is the least score."""
    bound, least = as_like(bound, score), as_like(least, score)
    return (score < bound) | ((bound <= least) & (score <= bound))


def _inside(x, negated, least, by):
    keep = _kept(_omega(x, by), -negated[0], least[0])
    rows, _ = _split(x, by)
    return jnp.stack([jnp.where(keep, row, 0) for row in rows])


def _pairs(x, by: str):
    """|g_j τ_i| for all ordered pairs of different tasks, a row for each; at least one row."""
    rows, slopes = _split(x, by)
    found = [jnp.abs(slope * row) for i, row in enumerate(rows) for j, slope in enumerate(slopes) if i != j]
    return jnp.stack(found or [jnp.zeros_like(rows[0])])


def _pairs_by_gradients(x):
    return _pairs(x, "gradients")


def _pairs_by_vectors(x):
    return _pairs(x, "vectors")


def _less_pairs_by_gradients(x):
    return -_pairs(x, "gradients")


def _less_pairs_by_vectors(x):
    return -_pairs(x, "vectors")


PAIRS = {
    "gradients": (_less_pairs_by_gradients, _pairs_by_gradients),
    "vectors": (_less_pairs_by_vectors, _pairs_by_vectors),
}


def _inside_all(x, negated, least, by):
    pairs = _pairs(x, by)
    keep = jnp.ones(pairs.shape[1:], bool)
    for pair in range(pairs.shape[0]):
        keep = keep & _kept(pairs[pair], -negated[pair], least[pair])
    rows, _ = _split(x, by)
    return jnp.stack([jnp.where(keep, row, 0) for row in rows])


def _descending(x, by):
    rows, slopes = _split(x, "gradients")
    descends = _crossed(rows, slopes) < 0
    return jnp.stack([jnp.where(descends, as_like(by, row) * row, 0) for row in rows])
