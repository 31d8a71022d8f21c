"""TSV-C (Gargiulo et al., 2025, arXiv:2412.00081): each matrix of a task vector as its leading singular triplets."""
import dataclasses
import functools
from typing import Any

import jax
import numpy as np

from tvjax.compression.codec import Codec, nothing, per_leaf, restored
from tvjax.merging.checks import share
from tvjax.merging.factors import product, svd, turned


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Triplets:
    """A matrix U diag(s) Vᵀ as (U diag(s), V)."""

    left: Any
    right: Any

    def restored(self):
        return product(self.left, turned(self.right))


def tsv_c(*, density) -> Codec:
    """TSV-C: ⌊density·min(rows, columns)⌋ triplets (at least one) of each matrix, other leaves as they are.

    density: the paper takes 1/T, so that all tasks together cost about two models. 32·k·(rows + columns) bits a matrix.
    """
    share("density", density)

    def own(shared, tau, index):
        return per_leaf(lambda x: _triplets(x, density) if x.ndim == 2 else x, tau)
    return Codec("tsv-c", nothing, own, lambda shared, own: restored(own))


def _triplets(x, density) -> Any:
    k = max(1, int(np.floor(density * min(x.shape) + 1e-6)))
    if k * sum(x.shape) >= x.size:
        return x  # the factors would be larger than the matrix
    return _leading(x, k=k)


@functools.partial(jax.jit, static_argnames="k")
def _leading(x, *, k: int) -> Triplets:
    found = svd(x, k=k)
    return Triplets(found.U * found.s[None], found.V)
