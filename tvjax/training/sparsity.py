"""Sparse fine-tuning: θ ← θ + c ⊙ update with a mask c, and no gradient or state for a tensor that c leaves out whole.

Entries outside of the mask keep their bits, weight decay or not. Source of the masked step: arXiv:2504.02620, Eq. 7.
"""
import dataclasses
import functools
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from tvjax import tree
from tvjax.training.loop import Fitted, fit
from tvjax.training.recipe import Recipe, adamw

SEEN = ("chosen", "all")


class Masked(NamedTuple):
    """State of a masked transformation: the mask, kept here so that a compiled step takes it as an argument."""

    mask: Any
    inner: Any


def sparse(inner, mask):
    """Updates only the entries where `mask` is true; the others keep their bits, weight decay or not.

    `mask` is a tree of booleans like the parameters. Gradients are masked before `inner` (so that clipping and moments
    see the chosen entries alone) and the update after it. One inner transformation always gives the same `update`: a
    step compiled for one mask serves the next.

    >>> step = sparse(optax.sgd(1.0), {"w": jnp.array([True, False])})
    >>> grads = {"w": jnp.array([1.0, 1.0])}
    >>> step.update(grads, step.init(grads), grads)[0]["w"].tolist()
    [-1.0, 0.0]
    """
    return optax.GradientTransformation(lambda params: Masked(mask, inner.init(params)), _sparse_update(inner.update))


@functools.lru_cache
def _sparse_update(inner):
    def update(updates, state, params=None):
        updates, inner_state = inner(keep(state.mask, updates), state.inner, params)
        return keep(state.mask, updates), Masked(state.mask, inner_state)
    return update


def keep(mask, updates, off=0.0):
    """The entries of `updates` where the mask is true; the others times `off`."""
    return jax.tree.map(lambda m, x: jnp.where(m, x, (off * x).astype(x.dtype) if off else jnp.zeros_like(x)), mask,
                        updates)


def masked_adamw(recipe: Recipe, mask, *, moments: str = "chosen", norm: str = "chosen", off: float = 0.0):
    """`optimizer(recipe)` whose step and weight decay act on the mask's entries alone.

    moments: whether Adam's moments see the gradient's "chosen" entries or "all"; the same on the chosen entries.
    norm: whether the gradient is clipped by the norm of its "chosen" entries or of "all" those of the tensors here; the
      authors' code is all, all. This is the only way in which the two differ in their results.
    off: the factor of the update elsewhere: 0 leaves these entries alone; 0.1 is what LoTA's vision code does.

    >>> recipe = Recipe(steps=10, lr=0.1, warmup=0, weight_decay=0.1)
    >>> p, step = jnp.array([1.0, -2.0]), masked_adamw(recipe, jnp.array([True, False]))
    >>> with jax.numpy_dtype_promotion("standard"):
    ...     update, _ = step.update(jnp.array([0.5, 0.5]), step.init(p), p)
    >>> (p + update).round(4).tolist()
    [0.8899999856948853, -2.0]
    """
    for name, value in (("moments", moments), ("norm", norm)):
        if value not in SEEN:
            raise ValueError(f"{name} is 'chosen' or 'all'; got {value!r}")
    if not 0 <= off <= 1:
        raise ValueError(f"off is the factor of the update outside of the mask, from 0 to 1; got {off}")
    recipe = dataclasses.replace(recipe, seed=0)
    inner = adamw(recipe)
    return optax.GradientTransformation(lambda params: Masked(mask, inner.init(params)),
                                        _masked_adamw(recipe, moments, norm, float(off)))


@functools.lru_cache
def _masked_adamw(recipe, moments, norm, off):
    inner = adamw(recipe)

    def update(updates, state, params=None):
        chosen = keep(state.mask, updates, off)
        length = optax.tree.norm(chosen if norm == "chosen" else updates)
        factor = jnp.where(length < recipe.clip, 1.0, recipe.clip / length)
        seen = jax.tree.map(lambda g: (factor * g).astype(g.dtype), updates if moments == "all" or off else chosen)
        updates, inner_state = inner.update(seen, state.inner, params)
        return keep(state.mask, updates, off), Masked(state.mask, inner_state)
    return update


def touched(mask) -> list[str]:
    """The names of the tensors in which a mask has at least one entry; a ValueError where there is none.

    >>> touched({"a": jnp.array([True, False]), "b": jnp.array([False])})
    ['a']
    """
    flat = tree.flatten(mask)
    found = jax.device_get([jnp.any(leaf) for leaf in flat.values()])
    names = [name for name, some in zip(flat, found, strict=True) if some]
    if not names:
        raise ValueError("the mask is empty: no entry would be trained")
    return names


def fit_sparse(loss: Callable, params, mask, feed, recipe: Recipe, *, frozen=None, moments: str = "chosen",
               norm: str = "chosen", off: float = 0.0, tensors: Collection[str] = (), **options) -> Fitted:
    """`fit` on the entries of a mask; the result holds the whole tree, the same bits as `params` outside of the mask.

    mask: a tree of booleans over some or all tensors of `params`; a tensor that it lacks is frozen. Frozen tensors, and
      those without a true entry, are arguments that no gradient is taken by: their backward pass is never compiled, and
      they have no optimizer state.
    tensors: names that are carried along though the mask leaves them out, so that runs whose masks touch different
      tensors share one compiled step. Nothing in them moves.
    loss, feed, recipe, frozen, options: as for `fit`. moments, norm, off: see `masked_adamw`.

    Raises:
      ValueError: where the mask is of another tree or empty.
    """
    check_mask(mask, params)
    flags = tree.flatten(mask)
    names = list(tree.flatten(mask)) if off else {*touched(mask), *(name for name in tensors if name in flags)}
    trained, still = tree.partition(params, names)
    still = jax.tree.map(jnp.asarray, still)  # on the devices once, not at every step
    transform = masked_adamw(recipe, tree.partition(mask, names)[0], moments=moments, norm=norm, off=off)
    fitted = fit(_partly(loss, frozen is not None), trained, feed, recipe, frozen=(still, frozen), transform=transform,
                 **options)
    return fitted._replace(params=tree.rebuild(params, tree.flatten(tree.union(fitted.params, still))))


@functools.cache
def _partly(loss, takes_frozen):
    """`loss` as a function of the trained tensors, the others given as frozen."""
    def partly(trained, batch, key, frozen):
        still, rest = frozen
        whole = tree.union(trained, still)
        return loss(whole, batch, key, rest) if takes_frozen else loss(whole, batch, key)
    return partly


def check_mask(mask, params) -> None:
    """Raises ValueError naming the leaves where a mask is not made of flags shaped as the parameters."""
    flat, theirs = tree.flatten(mask), tree.flatten(params)
    faults = tree.differences(flat, {name: x for name, x in theirs.items() if name in flat},
                              names=("the mask", "the parameters"), dtypes=False)
    faults += [f"{name} is {leaf.dtype}, not bool" for name, leaf in flat.items() if leaf.dtype != jnp.bool_]
    if faults:
        raise ValueError(f"the mask is of another tree: {'; '.join(faults)}")


def training_bytes(params, mask=None) -> dict[str, int]:
    """Bytes of parameters, gradients, optimizer state (two moments) and mask, of full or sparse fine-tuning.

    >>> params = {"a": jnp.ones(4), "b": jnp.ones(4)}
    >>> mask = {"a": jnp.array([True, False, False, False]), "b": jnp.zeros(4, bool)}
    >>> sum(training_bytes(params).values()), sum(training_bytes(params, mask).values())
    (128, 84)
    """
    size = lambda part: sum(int(x.nbytes) for x in jax.tree.leaves(part))
    trained = params if mask is None else tree.partition(params, touched(mask))[0]
    flags = 0 if mask is None else size(tree.partition(mask, touched(mask))[0])
    return {"parameters": size(params), "gradients": size(trained), "state": 2 * size(trained), "mask": flags}
