"""Where on the plane θ0 + aτ₁ + bτ₂ a model is judged: one compiled program for all a and b, in either geometry.

`shifted` is the usual model at θ0 + τ; `paired` keeps (θ0, τ) apart for a predict that linearises at θ0.
"""
import functools

import jax

from tvjax import tangent, tree, vectors


def shifted(theta0, tau):
    """θ0 + τ."""
    return vectors.add(theta0, tau)


def paired(theta0, tau):
    """(θ0, τ), τ in the structure and dtypes of θ0 with zeros where it has no leaf: the arguments of a jvp.

    >>> one = jax.numpy.ones
    >>> paired({"a": one(2), "b": one(1)}, {"b": one(1)})[1]["a"].tolist()
    [0.0, 0.0]
    """
    return theta0, tangent.to_tangent(tau, theta0)


@functools.partial(jax.jit, static_argnames="place")
def moved(theta0, tau, scale, *, place=shifted):
    """The parameters at θ0 + scale·τ; `scale` is traced, so that all scales share one program.

    >>> moved({"w": jax.numpy.ones(1)}, {"w": jax.numpy.ones(1)}, 0.5)["w"].tolist()
    [1.5]
    """
    return place(theta0, jax.tree.map(lambda x: scale * vectors.wide(x), tau))


@functools.partial(jax.jit, static_argnames="place")
def combined(theta0, tau1, tau2, scale1, scale2, *, place=shifted):
    """The parameters at θ0 + scale1·τ₁ + scale2·τ₂; with a scale of 0 to the bit those without that vector."""
    tree.check_same(tau1, tau2, names=("tau1", "tau2"))
    both = lambda x, y: scale1 * vectors.wide(x) + scale2 * vectors.wide(y)
    return place(theta0, jax.tree.map(both, tau1, tau2))
