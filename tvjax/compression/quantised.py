"""Codecs of a few bits an entry: EMR (arXiv:2405.17461), BitDelta (arXiv:2402.10193), uniform and residual quantisation
(TVQ and RTVQ, arXiv:2503.06921).

EMR: τ̂_t = γ_t · m_t ⊙ u. BitDelta: sign(τ) · mean|τ| of each leaf. TVQ: b-bit codes between a leaf's least and greatest
entry. RTVQ: a base, the mean of the task vectors in 3 bits, that all share, and each task's offset to it in 2.
"""
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tvjax import tree
from tvjax.compression import bits as packed
from tvjax.compression.bits import Bits, Codes
from tvjax.compression.codec import Codec, nothing, per_leaf, restored
from tvjax.merging import emr, emr_mask, emr_rescale, mean


# ---------------------------------------------------------------- EMR
def emr_codec(*, average: str = "leaf") -> Codec:
    """EMR: a unified vector of 32·P bits, for each task the entries whose sign agrees with it (P bits) and a factor.

    average: how the factor's means are taken, by "leaf" as in the authors' code or by "entry" (see `emr_rescale`).
    """
    def own(unified, tau, index):
        stack = jax.tree.map(lambda x: x[None], tau)
        unified = tree.rebuild(tau, tree.flatten(unified))
        mask = per_leaf(lambda m: packed.pack(m[0]), emr_mask(stack, unified))
        return {"mask": mask, "factor": emr_rescale(stack, unified, average=average)[0]}

    def restore(unified, own):
        kept = lambda x, m: packed.where_bits(m, x) * jnp.asarray(own["factor"]).astype(x.dtype)
        return per_leaf(kept, unified, own["mask"])
    return Codec("emr", lambda taus: emr()(taus), own, restore)


# ---------------------------------------------------------------- BitDelta
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Signed:
    """Signs (bits: not negative) and one magnitude for a leaf."""

    signs: Bits
    scale: Any

    def restored(self):
        signs = packed.unpack(self.signs)
        return packed.library(signs).where(signs, self.scale, -self.scale)


def bitdelta() -> Codec:
    """BitDelta without its calibration: each leaf as its signs (0 counts as +) times its mean magnitude; P + 32·leaves
    bits a task."""
    return Codec("bitdelta", nothing, lambda shared, tau, index: per_leaf(_signed, tau), _alone)


def _alone(shared, own):
    return restored(own)


@jax.jit
def _signed(x):
    return Signed(packed.pack(x >= 0), jnp.abs(x).mean())


# ---------------------------------------------------------------- uniform quantisation
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Quantised:
    """A leaf as low + step·code."""

    codes: Codes
    low: Any
    step: Any

    def restored(self):
        return self.low + self.step * packed.unpack_codes(self.codes).astype(self.low.dtype)


@functools.partial(jax.jit, static_argnames="width")
def quantise(x, *, width: int) -> Quantised:
    """The leaf on a grid of 2^width points from its least to its greatest entry, each entry at the nearest one.

    >>> quantise(jnp.array([-1.0, 0.1, 2.0]), width=2).restored().tolist()
    [-1.0, 0.0, 2.0]
    """
    low, high = (x.min(), x.max()) if x.size else (jnp.zeros((), x.dtype), jnp.zeros((), x.dtype))
    step = (high - low) / (2**width - 1)
    at = jnp.where(step > 0, (x - low) / jnp.where(step > 0, step, 1), 0)
    return Quantised(packed.pack_codes(jnp.round(at), width=width), low, step)


def tvq(*, width: int = 4) -> Codec:
    """TVQ: every leaf of a task vector in codes of `width` bits; width·P + 64·leaves bits a task."""
    _check(width)
    return Codec(f"tvq {width} bits", nothing,
                 lambda shared, tau, index: per_leaf(lambda x: quantise(x, width=width), tau), _alone)


def rtvq(*, base: int = 3, offset: int = 2) -> Codec:
    """RTVQ: the mean task vector in `base` bits, shared, and what each task differs from it in `offset` bits."""
    _check(base)
    _check(offset)

    def share(taus):
        return per_leaf(lambda x: quantise(x, width=base), mean()(taus))

    def own(shared, tau, index):
        return per_leaf(lambda x, node: _offset(x, node, width=offset), tau, shared)

    def restore(shared, own):
        return per_leaf(lambda node, more: node.restored() + more.restored(), shared, own)
    return Codec(f"rtvq {base}+{offset} bits", share, own, restore)


@functools.partial(jax.jit, static_argnames="width")
def _offset(x, node: Quantised, *, width: int) -> Quantised:
    return quantise(x - node.restored(), width=width)


def _check(width) -> None:
    if not (isinstance(width, (int, np.integer)) and 1 <= width <= 16):
        raise ValueError(f"codes have 1 to 16 bits; got {width!r}")
