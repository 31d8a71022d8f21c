"""Low-rank leaves: a delta B·A kept as its factors, so that adapters are merged without ever forming the dense matrix."""
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from tvjax.tree import wide


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LowRank:
    """The matrix B·A of shape (out, in) as B (out, rank) and A (rank, in); with leading axes of tasks, a stack of them.

    >>> LowRank(jnp.ones((3, 1)), jnp.ones((1, 2))).dense().shape
    (3, 2)
    """

    B: Any
    A: Any

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.B.shape[:-1], self.A.shape[-1])

    @property
    def dtype(self):
        return _Factored(self.B.dtype)

    def dense(self):
        return jnp.matmul(self.B, self.A, precision="highest")

    def stacked(self, many):
        """A stack of low-rank matrices; ranks may differ (the smaller ones are filled up with zeros)."""
        rank = max(x.B.shape[-1] for x in many)
        dtype = wide(self.B.dtype)
        B = jnp.stack([jnp.pad(jnp.asarray(x.B).astype(dtype), [(0, 0), (0, rank - x.B.shape[-1])]) for x in many])
        A = jnp.stack([jnp.pad(jnp.asarray(x.A).astype(dtype), [(0, rank - x.A.shape[-2]), (0, 0)]) for x in many])
        return LowRank(B, A)


@dataclasses.dataclass(frozen=True)
class _Factored:
    """The dtype of a low-rank leaf's factors."""

    factors: Any

    def __str__(self):
        return f"low-rank {self.factors}"


def is_low_rank(x) -> bool:
    """Whether a leaf is kept as factors."""
    return isinstance(x, LowRank)
