"""Codecs that keep few entries: the largest magnitudes (magnitude pruning), T-Switch (arXiv:2412.00054), UltraDelta
(arXiv:2505.13126).

Where the kept entries lie is stored as a bit for every entry of the leaf or as ⌈log2 entries⌉ bits for every kept one,
whichever is smaller.
"""
import dataclasses
import math
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tvjax import tree
from tvjax.compression import bits as packed
from tvjax.compression.bits import Bits, Codes
from tvjax.compression.codec import Codec, nothing, per_leaf, restored
from tvjax.compression.quantised import Quantised, Signed, quantise
from tvjax.merging import top
from tvjax.merging.checks import share, within
from tvjax.merging.statistics import static


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sparse:
    """A leaf that is zero but at `places` (Bits, or Codes of flat positions in rising order), where `values` stand:
    floats, or a node that stands for floats."""

    places: Bits | Codes
    values: Any
    shape: tuple[int, ...] = static()

    def flat_places(self):
        """Positions, or a flag for every entry."""
        if isinstance(self.places, Codes):
            return packed.unpack_codes(self.places)
        return packed.unpack(self.places).reshape(-1)

    def restored(self):
        values = self.values.restored() if hasattr(self.values, "restored") else self.values
        codes = isinstance(self.places, Codes)
        places = self.flat_places()
        if packed.library(self.places.packed) is np:
            flat = np.zeros(math.prod(self.shape), values.dtype)
            flat[places] = values
            return flat.reshape(self.shape)
        if values.size == 0:
            return jnp.zeros(self.shape, values.dtype)
        if codes:
            flat = jnp.zeros((math.prod(self.shape),), values.dtype)
            return flat.at[places.astype(jnp.int32)].set(values, unique_indices=True).reshape(self.shape)
        rank = jnp.cumsum(places, dtype=jnp.int32) - 1
        return jnp.where(places, values[jnp.maximum(rank, 0)], jnp.zeros((), values.dtype)).reshape(self.shape)


def sparse_leaf(x, keep, code=None) -> Sparse:
    """The entries of `x` where `keep`; code: what their values are kept as (themselves by default)."""
    places, values = where(keep), np.atleast_1d(np.asarray(x)[np.asarray(keep)])
    return Sparse(places, values if code is None else code(values), tuple(np.shape(x)))


def where(keep) -> Bits | Codes:
    """The true entries as a bitmap or as positions, whichever takes fewer bits.

    >>> where(np.arange(100) == 7).information, where(np.arange(100) % 2 == 0).information
    (7, 100)
    """
    keep = np.asarray(keep)
    width = max(1, (keep.size - 1).bit_length())
    at = np.flatnonzero(keep)
    return packed.pack_codes(at, width=width) if at.size * width < keep.size else packed.pack(keep)


def _alone(shared, own):
    return restored(own)


def _largest(tau, density) -> Any:
    """The task vector with all but its largest magnitudes zeroed, as numpy arrays."""
    kept = top(density=density)([tau])
    return per_leaf(lambda x: np.asarray(x)[0], kept)


# ---------------------------------------------------------------- magnitude pruning
def top_k(*, density) -> Codec:
    """Each task vector's largest magnitudes, a share `density` of all entries, exactly, with their places."""
    share("density", density)

    def own(shared, tau, index):
        return per_leaf(lambda x: sparse_leaf(x, x != 0), _largest(tau, density))
    return Codec(f"top {100 * density:.3g} %", nothing, own, _alone)


def matched_density(tasks: int, *, positions: str = "free") -> float:
    """The density at which T pruned task vectors cost what TALL-masks of T tasks do, (32 + T)·P bits.

    positions: "free" as in the paper, where only values count: (32 + T)/(32·T); "counted", with a bit an entry for the
    places: 1/T.

    >>> [round(matched_density(tasks), 4) for tasks in (8, 14, 20)], matched_density(8, positions="counted")
    ([0.1562, 0.1027, 0.0813], 0.125)
    """
    if positions not in ("free", "counted"):
        raise ValueError(f"positions are 'free' or 'counted'; got {positions!r}")
    return min(1.0, (32 + tasks) / (32 * tasks)) if positions == "free" else 1 / tasks


# ---------------------------------------------------------------- T-Switch
def t_switch(*, density=0.5) -> Codec:
    """T-Switch: where the largest magnitudes lie, their signs, and one factor a task that keeps the kept entries' norm.

    density: the share of entries that stay on (the paper drops about half). About P + density·P bits a task.
    """
    share("density", density)

    def own(shared, tau, index):
        kept = _largest(tau, density)
        parts = [np.asarray(x, np.float64) for x in jax.tree.leaves(kept)]
        square, count = sum((x**2).sum() for x in parts), sum((x != 0).sum() for x in parts)
        factor = np.float32(np.sqrt(square / max(count, 1)))
        code = lambda values: Signed(packed.pack(values > 0), np.float32(1))
        switches = per_leaf(lambda x: _switch(sparse_leaf(x, x != 0, code)), kept)
        return {"factor": factor, "switches": switches}

    def restore(shared, own):
        return per_leaf(lambda node: node.restored() * own["factor"], own["switches"])
    return Codec("t-switch", nothing, own, restore)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Switches:
    """A leaf of −1, 0 and 1."""

    places: Bits | Codes
    signs: Bits
    shape: tuple[int, ...] = static()

    def restored(self):
        return Sparse(self.places, Signed(self.signs, np.float32(1)), self.shape).restored()


def _switch(node: Sparse) -> Switches:
    return Switches(node.places, node.values.signs, node.shape)


# ---------------------------------------------------------------- UltraDelta
def ultra_delta(*, width: int = 4, drop=0.97, spread=0.01, seed: int = 0, balance: str = "nuclear") -> Codec:
    """UltraDelta: `width`-bit codes by leaf, of which a share `drop` is thrown away within every code, at random.

    The third of the entries in leaves of least deviation drops `spread` more, the third of greatest deviation as much
    less as keeps the average. What is left is multiplied by 1/(1 − drop) and, with balance="nuclear", by the mean
    nuclear norm of the task vectors over its own ("none" leaves that out). Encoding again what was decoded rescales
    once more.
    """
    within("drop", drop, 0, 1, open_high=True)
    within("spread", spread, 0, 1)
    if balance not in ("nuclear", "none"):
        raise ValueError(f"balance is 'nuclear' or 'none'; got {balance!r}")

    def factor(mean_norm, tau):
        return np.float32((mean_norm / max(_nuclear(tau), 1e-30) if balance == "nuclear" else 1) / (1 - drop))

    def own(shared, tau, index):
        flat = {name: np.asarray(x) for name, x in tree.flatten(tau).items()}
        rates = drop_rates({name: (float(x.std()), x.size) for name, x in flat.items()}, drop=drop, spread=spread)
        nodes = {name: _stratified(x, rates[name], width, [seed, index, zlib.crc32(name.encode())])
                 for name, x in flat.items()}
        return {"factor": factor(shared, tau), "kept": tree.rebuild(tau, nodes)}

    def restore(shared, own):
        return per_leaf(lambda node: node.restored() * own["factor"], own["kept"])
    share_ = lambda taus: np.float32(np.mean([_nuclear(tau) for tau in taus])) if balance == "nuclear" else None
    return Codec("ultradelta", share_, own, restore, projects=False)


def drop_rates(leaves: dict[str, tuple[float, int]], *, drop, spread) -> dict[str, float]:
    """The rate of each leaf from {name: (standard deviation, entries)}: three tiers whose average is `drop`.

    >>> rates = drop_rates({"a": (1.0, 3), "b": (2.0, 3), "c": (3.0, 3)}, drop=0.5, spread=0.1)
    >>> {name: round(rate, 3) for name, rate in rates.items()}
    {'a': 0.6, 'b': 0.5, 'c': 0.4}
    """
    total, seen, rates, rest = sum(size for _, size in leaves.values()), 0, {}, []
    for name in sorted(leaves, key=lambda name: leaves[name][0]):
        seen += leaves[name][1]
        if seen <= 2 * total / 3:
            rates[name] = drop + spread if seen <= total / 3 else drop
        else:
            rest.append(name)
    size = sum(leaves[name][1] for name in rest)
    taken = sum(rates[name] * leaves[name][1] for name in rates)
    last = min(0.99, max(0.0, (drop * total - taken) / size)) if size else drop
    return {name: min(1.0, rate) for name, rate in rates.items()} | {name: last for name in rest}


def _stratified(x, rate: float, width: int, seeds) -> Sparse:
    node = quantise(jnp.asarray(x), width=width)
    codes = np.asarray(packed.unpack_codes(node.codes)).reshape(-1)
    keep = np.asarray(node.restored()).reshape(-1) != 0
    zeros = 1 - keep.mean() if keep.size else 0
    rate, draws = max(0.0, (rate - zeros) / max(1 - zeros, 1e-9)), np.random.default_rng(seeds)
    for code in np.unique(codes[keep]):
        at = np.flatnonzero(keep & (codes == code))
        keep[draws.permutation(at)[: round(at.size * rate)]] = False
    values = Quantised(packed.pack_codes(codes[keep], width=width), np.float32(node.low), np.float32(node.step))
    return Sparse(where(keep.reshape(x.shape)), values, x.shape)


def _nuclear(tau) -> float:
    """The sum of the singular values of all matrices, as roots of the smaller Gram matrix's eigenvalues."""
    matrices = [np.asarray(x, np.float64) for x in jax.tree.leaves(tau) if np.ndim(x) == 2]
    return float(sum(_singular_values(x).sum() for x in matrices))


def _singular_values(x: np.ndarray) -> np.ndarray:
    gram = x @ x.T if len(x) <= x.shape[1] else x.T @ x
    return np.sqrt(np.maximum(np.linalg.eigvalsh(gram), 0))
