"""Low-rank leaves: a delta B·A kept as its factors, so that adapters are merged without ever forming the dense
matrix. They can be summed over tasks and scaled; spectral steps and `cores` take them too, entry-wise steps do not."""
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from tvjax.tree import wide


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
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

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def __getitem__(self, task):
        return LowRank(self.B[task], self.A[task])

    def __add__(self, other):
        """The sum of two matrices: their factors side by side, so that ranks add up."""
        return LowRank(jnp.concatenate([self.B, other.B], -1), jnp.concatenate([self.A, other.A], -2))

    def __mul__(self, by):
        if is_low_rank(by):
            raise TypeError("the entries of low-rank matrices are not there to be multiplied")
        return LowRank(self.B * by, self.A)

    __rmul__ = __mul__

    def __truediv__(self, by):
        return LowRank(self.B / by, self.A)

    def __ne__(self, other):
        raise TypeError("the entries of a low-rank matrix are not there to be compared")

    __array_ufunc__ = None  # NumPy's numbers leave products to us

    def stacked(self, many):
        """A stack of low-rank matrices; ranks may differ (the smaller ones are filled up with zeros)."""
        rank = max(x.B.shape[-1] for x in many)
        dtype = wide(self.B.dtype)
        B = [jnp.pad(jnp.asarray(x.B).astype(dtype), [(0, 0), (0, rank - x.B.shape[-1])]) for x in many]
        A = [jnp.pad(jnp.asarray(x.A).astype(dtype), [(0, rank - x.A.shape[-2]), (0, 0)]) for x in many]
        return LowRank(jnp.stack(B), jnp.stack(A))


@dataclasses.dataclass(frozen=True)
class _Factored:
    """The dtype of a low-rank leaf's factors."""

    factors: Any

    def __str__(self):
        return f"low-rank {self.factors}"


def is_low_rank(x) -> bool:
    """Whether a leaf is kept as factors."""
    return isinstance(x, LowRank)
