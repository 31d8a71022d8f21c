"""Ranges of hyper-parameters, checked once when an operator is built; traced numbers pass, since they have no value
yet."""
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from tvjax import tree
from tvjax.merging.numbers import RULES


def choice(name: str, value: str, known: Sequence[str]) -> str:
    """`value` if it is one of `known`."""
    if value not in known:
        raise ValueError(f"no {name} {value!r}; {tree.did_you_mean(str(value), known)} (there are {', '.join(known)})")
    return value


def share(name: str, value):
    """`value` if it is a share in (0, 1], as are all numbers of a rule."""
    return within(name, value, 0.0, 1.0, open_low=True)


def within(name: str, value, low, high, *, open_low: bool = False, open_high: bool = False):
    """`value` if all of its concrete numbers lie in the interval from `low` to `high`."""
    for number in concrete(value):
        inside = (number > low if open_low else number >= low) & (number < high if open_high else number <= high)
        if not np.all(inside):
            interval = f"{'(' if open_low else '['}{low:g}, {high:g}{')' if open_high else ']'}"
            raise ValueError(f"{name} lies in {interval}; got {number if np.ndim(number) else float(number):}")
    return value


def weights(value, *, normalize: bool = False):
    """`value` as numbers for tasks (lists become arrays; None and rules pass); one sentence if they are to be
    normalized and sum to 0."""
    if isinstance(value, list | tuple):
        traced = any(isinstance(part, Tracer) for part in value)
        value = jnp.stack([jnp.asarray(part, float) for part in value]) if traced else np.asarray(value, np.float64)
    for number in concrete(value) if normalize and value is not None else []:
        for_tasks = number.ndim == 1 or (number.ndim == 0 and not isinstance(value, RULES))
        if for_tasks and not np.abs(number.sum()) > 1e-12 * np.abs(number).sum():
            raise ValueError(f"the weights {number.tolist()} sum to 0 and cannot be normalized; use normalize=False")
    return value


def concrete(value) -> list[np.ndarray]:
    """The numbers of a scalar, array or rule that have a value now."""
    leaves = jax.tree.leaves(value) if isinstance(value, RULES) else [value]
    if any(isinstance(leaf, str) or leaf is None for leaf in leaves):
        raise ValueError(f"a number is wanted here; got {value!r}")
    return [np.asarray(leaf) for leaf in leaves if not isinstance(leaf, Tracer) and type(leaf) is not object]
