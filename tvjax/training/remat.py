"""Rematerialisation: a network whose numbered blocks keep no activations, but compute them again for their gradients.

It trades time for memory (about one more forward pass) and changes no result. On CPU, XLA takes it back: equal
computations are merged there, whatever barrier stands between them.
"""
import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax


@functools.cache
def rematerialised(apply: Callable) -> Callable:
    """`apply` of a Flax model, each of whose blocks (modules that are called by a number) is recomputed going back.

    One function always gives the same result, so that compiled steps are shared.
    """
    def again(*args, **kwargs):
        with nn.intercept_methods(_recompute):
            return apply(*args, **kwargs)
    return again


def _recompute(call, args, kwargs, context):
    name = context.module.name
    if context.method_name == "__call__" and name is not None and name.isdigit():
        return jax.checkpoint(lambda *args: call(*args, **kwargs))(*args)
    return call(*args, **kwargs)


def held_bytes(f: Callable, params: Any, *args) -> int:
    """Bytes that the backward pass of f(params, *args) by `params` keeps from the forward pass.

    Counted from shapes, without computing anything: activations, masks, partial results, and the weights that the
    backward pass multiplies by, as automatic differentiation keeps them, before a compiler fuses some of them away.

    >>> import jax.numpy as jnp
    >>> held_bytes(lambda w, x: jnp.tanh(w * x).sum(), jnp.ones(4), jnp.ones(4))
    48
    """
    _, back = jax.eval_shape(lambda params: jax.vjp(lambda p: f(p, *args), params), params)
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(back))
