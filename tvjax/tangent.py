"""Models linearised at θ0: f_lin(x; τ) = f(x; θ0) + ∇f(x; θ0)·τ (Ortiz-Jimenez et al., 2023, arXiv:2305.12827).

The output is affine in τ. So once the T slopes ∇f(x; θ0)·τ_t of a batch are at hand (`slopes`), every Σ c_t τ_t costs a
sum of T + 1 arrays (`affine`): a sweep over coefficients passes the data through the network once.
"""
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from tvjax import tree, vectors
from tvjax.tree import Tree

POLICIES = ("none", "dots", "all")


def tangent(apply: Callable, theta0: Tree) -> Callable:
    """f_lin as a function of (τ, inputs): `apply(θ0, inputs) + ∂/∂ε apply(θ0 + ετ, inputs)` at ε = 0.

    apply: (params, *inputs) -> an array or a tree of arrays. τ may lack leaves of θ0, which then do not move. What is
    returned is a pytree that holds θ0: give it to `jit` as an argument.

    Raises:
      ValueError: where a leaf of θ0 holds no floating-point numbers, or `apply` has no forward derivative.

    >>> f = tangent(lambda params, x: params["w"] ** 2 * x, {"w": jnp.array(3.0)})
    >>> float(f({"w": jnp.array(1.0)}, 2.0))  # 9·2 + 2·3·2·τ
    30.0
    """
    check_base(theta0)
    return jax.tree_util.Partial(linearised(apply), theta0)


@functools.cache
def linearised(apply: Callable) -> Callable:
    """(theta0, tau, *inputs) -> f(x; θ0) + ∇f(x; θ0)·τ, the same function for the same `apply`.

    >>> linearised(jnp.multiply)(jnp.array(2.0), jnp.array(0.5), 3.0).item()
    7.5
    """
    def run(theta0, tau, *inputs, **more):
        model = lambda params: apply(params, *inputs, **more)
        value, slope = push(model, theta0, to_tangent(tau, theta0))
        return jax.tree.map(jnp.add, value, slope)
    return run


@functools.cache
def slopes(apply: Callable) -> Callable:
    """(theta0, taus, *inputs) -> (f(x; θ0), ∇f(x; θ0)·τ_t for all t), the latter with a leading axis of tasks.

    taus: a stack, leading axis tasks, or a list. The network is passed once for its value; one slope at a time is
    computed, so that memory does not grow with the number of tasks but for the slopes themselves.

    >>> value, slope = slopes(jnp.multiply)(jnp.array(2.0), jnp.array([0.5, 1.0]), 3.0)
    >>> value.item(), slope.tolist()
    (6.0, [1.5, 3.0])
    """
    def run(theta0, taus, *inputs, **more):
        taus = tree.stack(taus) if isinstance(taus, (list, tuple)) else taus
        model = lambda params: apply(params, *inputs, **more)

        def compute():
            value, linear = jax.linearize(model, theta0)
            return value, jax.lax.map(lambda tau: linear(to_tangent(tau, theta0)), taus)
        return _with_a_derivative(compute)
    return run


def affine(value: Tree, slope: Tree, coefficients) -> Tree:
    """value + Σ_t c_t·slope_t: the output at θ0 + Σ_t c_t τ_t of a linearised model.

    coefficients: (..., tasks); the result has their leading axes in front of those of `value`.

    >>> affine(jnp.array([6.0]), jnp.array([[1.5], [3.0]]), jnp.array([[0.0, 0.0], [1.0, 2.0]])).tolist()
    [[6.0], [13.5]]
    """
    coefficients = jnp.asarray(coefficients)
    lead = tuple(range(coefficients.ndim - 1))

    def one(value, slope):
        moved = jnp.tensordot(coefficients.astype(slope.dtype), slope, 1, precision="highest")
        return jnp.expand_dims(value, lead) + moved
    return jax.tree.map(one, value, slope)


def push(model: Callable, at: Tree, along: Tree):
    """(model(at), its derivative along a direction), by `jax.jvp`; ValueError where there is no forward derivative."""
    return _with_a_derivative(lambda: jax.jvp(model, (at,), (along,)))


# ---------------------------------------------------------------- task vectors in either geometry
def to_tangent(tau: Tree, theta0: Tree) -> Tree:
    """τ as a tangent at θ0: its structure and dtypes, with zeros for the leaves that τ lacks.

    >>> to_tangent({"a": jnp.ones(2)}, {"a": jnp.zeros(2), "b": jnp.zeros(1)})["b"].tolist()
    [0.0]
    """
    step, base = tree.flatten(tau), tree.flatten(theta0)
    if faults := _misfits(step, base):
        raise ValueError(f"theta0 and tau differ: {'; '.join(faults)}")
    fill = lambda name, x: jnp.asarray(step[name]).astype(x.dtype) if name in step else jnp.zeros_like(x)
    return tree.rebuild(theta0, {name: fill(name, x) for name, x in base.items()})


def to_standard(tau: Tree, theta0: Tree) -> vectors.TaskVector:
    """A tangent at θ0 as a task vector, τ for θ = θ0 + τ: its floating-point leaves by name.

    The numbers stay; what changes is the model that they belong to, f(x; θ0 + τ) instead of f_lin(x; τ).

    >>> to_standard({"a": jnp.ones(1)}, {"a": jnp.zeros(1)})
    TaskVector(1 leaves, 1 entries)
    """
    if faults := _misfits(tree.flatten(tau), tree.flatten(theta0)):
        raise ValueError(f"theta0 and tau differ: {'; '.join(faults)}")
    return vectors.TaskVector(vectors.floats(tau))


def difference(theta: Tree, theta0: Tree) -> Tree:
    """θ − θ0 leaf by leaf, for use inside a loss, where `vectors.task_vector` would check names again and again."""
    return jax.tree.map(jnp.subtract, theta, theta0)


def _misfits(step: dict, base: dict) -> list[str]:
    known = {name: base[name] for name in step if name in base}
    return tree.differences(known, step, names=("theta0", "tau"), dtypes=False)


# ---------------------------------------------------------------- memory
@functools.cache
def rematerialised(apply: Callable, policy: str = "dots") -> Callable:
    """`apply` whose reverse derivative keeps less and computes it again.

    policy: "dots" keeps the products of weights and activations and recomputes what lies between (norms, softmax,
    activations), "all" keeps the inputs alone, "none" is `apply` itself. Values and gradients are the same.
    """
    if policy not in POLICIES:
        raise ValueError(f"no policy {policy!r}; {tree.did_you_mean(policy, POLICIES)}")
    if policy == "none":
        return apply
    keep = jax.checkpoint_policies.dots_with_no_batch_dims_saveable if policy == "dots" else None
    return functools.wraps(apply)(jax.checkpoint(apply, policy=keep))


# ---------------------------------------------------------------- at the door
def check_base(theta0: Tree) -> None:
    """Raises where θ0 holds leaves along which there is no derivative."""
    flat = tree.flatten(theta0)
    kind = lambda x: getattr(x, "dtype", type(x).__name__)
    if other := [f"{name} ({kind(x)})" for name, x in flat.items() if not tree.is_float(x)]:
        raise ValueError(f"a tangent model moves floating-point leaves alone, and theta0 holds {tree.listing(other)}: "
                         "give theta0 without them (tvjax.vectors.floats) and let apply know them")
    if not flat:
        raise ValueError("theta0 has no leaf to linearise in")


def _with_a_derivative(compute: Callable[[], Any]):
    """`compute()`, a pair (value, …), with JAX's complaints about forward derivatives as one sentence."""
    try:
        found = compute()
    except (TypeError, ValueError, NotImplementedError) as error:
        if any(word in str(error).lower() for word in ("jvp", "forward-mode", "differentia")):
            raise ValueError("apply has no forward derivative, so it has no tangent model: "
                             f"{_first_line(error)}") from None
        raise
    kinds = {str(x.dtype) for x in jax.tree.leaves(found[0]) if not tree.is_float(x)}
    if kinds:
        raise ValueError(f"apply is not differentiable: it returns {', '.join(sorted(kinds))}; give one that returns "
                         "features or logits, not classes")
    return found


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0].rstrip(".")
