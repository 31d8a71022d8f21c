"""What is merged and what is not: leaves left at θ0 by name, and tied leaves, which are merged once.

A leaf that is left out has the merged delta 0, whatever its task vectors; statistics of the operator (thresholds,
norms) are taken over the other leaves alone.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from tvjax import tree
from tvjax.merging.averaging import mean
from tvjax.merging.averaging import scale as scaled
from tvjax.merging.operator import Operator, named, on, step

HEADS = r"(^|\.)(lm_head|classifier|score|qa_outputs|head)(\.|$)"


def exclude(operator: Operator, pattern: str) -> Operator:
    """The operator without the leaves whose names contain the regular expression `pattern`: they stay θ0.

    `HEADS` is a pattern for the heads of Hugging Face models. `left_out` lists what a pattern hits in a model.

    >>> from tvjax import merging
    >>> merge = exclude(merging.total(), "^head")
    >>> merged = merge({"head": jnp.ones((2, 1)), "body": jnp.ones((2, 1))})
    >>> merged["head"].tolist(), merged["body"].tolist()
    ([0.0], [2.0])
    """
    _check_pattern(pattern)
    return on(named(pattern), step(_nothing), operator)


def averaged(operator: Operator, pattern: str, *, scale=1.0) -> Operator:
    """The operator, but leaves whose names contain `pattern` become scale times the mean of their task vectors.

    >>> from tvjax import merging
    >>> averaged(merging.total(), "bias")({"bias": jnp.ones((2, 1)), "kernel": jnp.ones((2, 1))})["bias"].tolist()
    [1.0]
    """
    _check_pattern(pattern)
    return on(named(pattern), mean() | scaled(by=scale), operator)


def _nothing(x):
    return jnp.zeros(x.shape[1:], getattr(x.dtype, "factors", x.dtype))


def left_out(operator: Operator, model: Any) -> list[str]:
    """The names of all leaves of a model (a tree, or names) that the operator leaves as in θ0.

    Those are the leaves that `exclude` hits and, in a tree, those that are not floating-point: no task vector has them.

    >>> from tvjax import merging
    >>> left_out(exclude(merging.mean(), "bias"), ["fc.weight", "fc.bias"])
    ['fc.bias']
    """
    listed = isinstance(model, Sequence)
    leaves = dict.fromkeys(model) if listed else tree.flatten(model)
    shapes = {name: np.shape(leaf) if leaf is not None else () for name, leaf in leaves.items()}
    stages = [stage for stage in operator.stages if stage.leaf is _nothing]
    counters = [] if listed else [name for name, leaf in leaves.items() if not tree.is_float(leaf)]
    return [n for n in leaves if n in counters or any(stage.holds(n, shapes[n]) for stage in stages)]


def untie(params: Any, aliases: Mapping[str, str]) -> Any:
    """The tree without the leaves that are another's alias, {alias: leaf}, so that each tied weight is merged once.

    Raises:
      ValueError: if a tree holds both and they differ, as they do when a head was untied while fine-tuning.

    >>> untie({"wte": np.ones(2), "lm_head": np.ones(2)}, {"lm_head": "wte"})
    {'wte': array([1., 1.])}
    """
    flat = tree.flatten(params)
    for alias, name in aliases.items():
        if alias not in flat:
            continue
        if name not in flat:
            raise ValueError(f"{alias} is tied to {name}, which is not there; there are {tree.listing(list(flat))}")
        if np.shape(flat[alias]) != np.shape(flat[name]) or not np.array_equal(flat[alias], flat[name]):
            raise ValueError(f"{alias} and {name} are tied but differ; merge them as two leaves (without this alias)")
    return tree.unflatten({name: leaf for name, leaf in flat.items() if name not in aliases})


def retie(params: Any, aliases: Mapping[str, str]) -> Any:
    """The tree with every alias, {alias: leaf}, holding its leaf again: what `untie` took away.

    >>> retie({"wte": 1.0}, {"lm_head": "wte"})
    {'wte': 1.0, 'lm_head': 1.0}
    """
    flat = tree.flatten(params)
    if missing := [name for name in aliases.values() if name not in flat]:
        raise ValueError(f"there is no leaf {tree.listing(missing)} to tie to; there are {tree.listing(list(flat))}")
    return tree.unflatten({**flat, **{alias: flat[name] for alias, name in aliases.items()}})


def _check_pattern(pattern: str) -> None:
    import re

    try:
        re.compile(pattern)
    except (re.error, TypeError) as error:
        raise ValueError(f"{pattern!r} is not a regular expression: {error}") from None
