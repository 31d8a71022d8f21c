"""Masks of one bit an entry, and small integers of a few bits: packed on disk and on the device, unpacked only inside
the operation that uses them.

Leaves are flattened; the first entry is the highest bit of the first byte (numpy's "big"), the last byte is filled with
zeros. So any number of entries can be packed, and how many there are is kept beside the bytes.
"""
import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tvjax import tree
from tvjax.merging.statistics import static

ORDER = "big"
WIDEST = 32  # bits of an integer code


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Bits:
    """Masks of shape `shape`, packed: (..., ⌈entries/8⌉) bytes, leading axes being those of a stack (tasks)."""

    packed: Any
    shape: tuple[int, ...] = static()

    @property
    def entries(self) -> int:
        return math.prod(self.shape)

    @property
    def information(self) -> int:
        """How many bits it holds, filling of the last byte left out."""
        return math.prod(self.packed.shape[:-1]) * self.entries

    def __getitem__(self, index) -> "Bits":
        return Bits(self.packed[index], self.shape)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Codes:
    """Integers below 2^width of shape `shape`, `width` bits each, packed into bytes."""

    packed: Any
    shape: tuple[int, ...] = static()
    width: int = static()

    @property
    def information(self) -> int:
        """How many bits it holds, filling of the last byte left out."""
        return math.prod(self.shape) * self.width


def is_packed(x) -> bool:
    """Whether a node of a tree is packed bits or codes."""
    return isinstance(x, (Bits, Codes))


def library(x) -> Any:
    """numpy for numpy's arrays and scalars, `jax.numpy` for JAX's and traced ones."""
    return np if isinstance(x, (np.ndarray, np.generic)) else jnp


def size(entries: int) -> int:
    """The bytes of so many bits."""
    return -(-entries // 8)


def pack(mask, *, axes: int = 0) -> Bits:
    """A boolean array as bits; its first `axes` axes stay axes (1 for a stack of tasks). Numpy stays numpy.

    >>> mask = np.arange(11) % 3 == 0
    >>> pack(mask).packed.tolist(), unpack(pack(mask)).tolist() == mask.tolist()
    ([146, 64], True)
    """
    xp = library(mask)
    lead, shape = mask.shape[:axes], mask.shape[axes:]
    flat = xp.reshape(mask, (*lead, math.prod(shape)))
    return Bits(xp.packbits(flat.astype(bool), axis=-1, bitorder=ORDER), tuple(shape))


def unpack(bits: Bits):
    """The boolean array, leading axes of a stack first."""
    xp = library(bits.packed)
    flat = xp.unpackbits(bits.packed, axis=-1, count=bits.entries, bitorder=ORDER)
    return xp.reshape(flat, (*bits.packed.shape[:-1], *bits.shape)).astype(bool)


def where_bits(bits: Bits, x):
    """x where the bits are set, 0 elsewhere. Inside `jit` the unpacking is part of this very loop: no mask is kept.

    >>> jax.jit(where_bits)(pack(jnp.array([True, False, True])), jnp.array([1.0, 2.0, 3.0])).tolist()
    [1.0, 0.0, 3.0]
    """
    return jnp.where(unpack(bits), x, jnp.zeros_like(x))


def pack_codes(codes, *, width: int) -> Codes:
    """Integers in [0, 2^width) as codes.

    >>> pack_codes(np.array([5, 2, 7]), width=3).packed.tolist()
    [171, 128]
    """
    if not 1 <= width <= WIDEST:
        raise ValueError(f"a code has 1 to {WIDEST} bits; got width={width}")
    xp = library(codes)
    shifts = xp.arange(width - 1, -1, -1, dtype=xp.uint32)
    digits = (codes.reshape(-1, 1).astype(xp.uint32) >> shifts[None]) & xp.uint32(1)
    return Codes(xp.packbits(digits.astype(bool).reshape(-1), bitorder=ORDER), tuple(codes.shape), width)


def unpack_codes(codes: Codes):
    """The integers, uint32, in their shape."""
    xp = library(codes.packed)
    count = math.prod(codes.shape)
    digits = xp.unpackbits(codes.packed, count=count * codes.width, bitorder=ORDER).reshape(count, codes.width)
    value = xp.zeros((count,), xp.uint32)
    for i in range(codes.width):  # a running sum: exact, and one loop once compiled
        value = (value << xp.uint32(1)) | digits[:, i].astype(xp.uint32)
    return value.reshape(codes.shape)


# ---------------------------------------------------------------- trees
def flatten(masks) -> dict[str, Any]:
    """{name: Bits} of a tree of packed masks."""
    return tree.flatten(masks, is_packed)


def count_tasks(masks) -> int:
    """How many tasks a tree of stacked masks holds."""
    found = {bits.packed.shape[0] if bits.packed.ndim == 2 else -1 for bits in flatten(masks).values()}
    if len(found) != 1 or -1 in found:
        raise ValueError("these are not stacked masks: every leaf has one leading axis of tasks, as long as others'")
    return found.pop()


def stack(masks) -> Any:
    """The masks of several tasks as one tree, tasks first."""
    for other in masks[1:]:
        check_shapes(other, {name: bits.shape for name, bits in flatten(masks[0]).items()}, of="the first task's")
    join = lambda *leaves: Bits(library(leaves[0].packed).stack([leaf.packed for leaf in leaves]), leaves[0].shape)
    return jax.tree.map(join, *masks, is_leaf=is_packed)


def take(masks, task) -> Any:
    """The masks of one task, whose number may be traced."""
    return jax.tree.map(lambda bits: bits[task], masks, is_leaf=is_packed)


def check_shapes(masks, shapes, *, of: str = "the model's") -> None:
    """Raises one sentence where masks belong to another tree than that of `shapes` ({name: shape})."""
    mine = {name: bits.shape for name, bits in flatten(masks).items()}
    if strange := [name for name in mine if name not in shapes] + [name for name in shapes if name not in mine]:
        raise ValueError(f"these masks are of another tree than {of}: {tree.listing(strange)} are in one of them only")
    if other := [f"{name} {mine[name]} vs {tuple(shapes[name])}" for name in mine if mine[name] != tuple(shapes[name])]:
        raise ValueError(f"these masks are of another tree than {of}: {tree.listing(other)}")
