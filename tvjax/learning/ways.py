"""Ways to a model: which numbers are trained, and how they become what `predict` takes.

`point(params, frozen)` is θ0 + Σ Λ_i τ_i for task vectors, θ0 with other norms for the usual test-time adaptation,
θ0 + B·A for LoRA. Whatever trains and judges takes a `Way`, so that baselines run under the very same protocol.
"""
import functools
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tvjax import tree, vectors
from tvjax.evaluation import shifted
from tvjax.learning import coefficients
from tvjax.learning.coefficients import Scheme
from tvjax.learning.pool import Pool
from tvjax.merging.lowrank import LowRank

NORMS = r"(^|\.)(layer_?norm\d*|ln_\w+|norm\d*|LayerNorm|pre_layrnorm|post_layernorm|\w*layer_norm\w*)\."


class Way(NamedTuple):
    """`start` is trained, `frozen` is not; point(params, frozen) is the first argument of predict(point, head, inputs).

    `point` and `predict` are the same objects for the same kinds of models: compiled steps are kept under them.
    """

    start: Any
    frozen: Any
    point: Callable[[Any, Any], Any]
    predict: Callable[[Any, Any, Any], Any]


def scaled(predict, theta0, held: Pool, scheme: Scheme, *, place: Callable = shifted) -> Way:
    """aTLAS: coefficients on a pool, from zero.

    place: `evaluation.shifted`, or `evaluation.paired` with a predict from `classify_linearised`: then the model is
      f(x; θ0) + ∇f(x; θ0)·ΣΛ_iτ_i.
    """
    return Way(coefficients.init(held, scheme), (theta0, held), _scaled(scheme, place), predict)


@functools.cache
def _scaled(scheme, place):
    def point(params, frozen):
        theta0, held = frozen
        return place(theta0, coefficients.delta(held, params, scheme))
    return point


def whole(predict, theta0, *, place: Callable = shifted) -> Way:
    """Full fine-tuning, as a difference to θ0 that starts at zero."""
    return Way(jax.tree.map(lambda x: jnp.zeros_like(jnp.asarray(x)), vectors.floats(theta0)), theta0, _added(place),
               predict)


@functools.cache
def _added(place):
    return lambda params, theta0: place(theta0, params)


def norms(predict, theta0) -> Way:
    """The weights and biases of the normalisation layers alone, the baseline of test-time adaptation."""
    flat = {name: x for name, x in tree.flatten(theta0).items() if re.search(NORMS, name)}
    if not flat:
        raise ValueError("the model has no normalisation layer by its names; there are "
                         f"{tree.listing(list(tree.flatten(theta0)))}")
    return Way({name: jnp.array(x) for name, x in flat.items()}, theta0, _replaced, predict)


def _replaced(params, theta0):
    return tree.rebuild(theta0, {**tree.flatten(theta0), **params})


def low_rank(predict, theta0, *, rank: int, key, alpha: float | None = None, names: str = r"layers\.\d+\..*weight$"
             ) -> Way:
    """LoRA fine-tuning (arXiv:2106.09685): θ0 + (alpha/rank)·B·A for the matrices named by a pattern, B from zero.

    names: a regular expression; the default is every matrix in a numbered layer, attention and MLP. alpha: rank where
      None.
    """
    flat = {name: x for name, x in tree.flatten(theta0).items() if re.search(names, name) and x.ndim == 2}
    if not flat:
        raise ValueError(f"no matrix matches {names!r}; there are {tree.listing(list(tree.flatten(theta0)))}")
    if not 0 < rank <= min(min(x.shape) for x in flat.values()):
        raise ValueError(f"rank is from 1 to the smaller side of every matrix, here "
                         f"{min(min(x.shape) for x in flat.values())}; got {rank}")
    keys = jax.random.split(key, len(flat))
    start = {name: {"B": jnp.zeros((x.shape[0], rank)), "A": jax.random.normal(k, (rank, x.shape[1])) * rank**-0.5}
             for (name, x), k in zip(flat.items(), keys, strict=True)}
    return Way(start, (theta0, jnp.float32((alpha or rank) / rank)), _with_products, predict)


def _with_products(params, frozen):
    theta0, scale = frozen
    products = {name: scale * jnp.matmul(one["B"], one["A"]) for name, one in params.items()}
    return vectors.add(theta0, tree.unflatten(products))


def low_rank_vector(way: Way, params) -> dict:
    """The task vector of trained LoRA factors, low-rank leaf by leaf; zero, that is absent, elsewhere."""
    return tree.unflatten({name: LowRank(way.frozen[1] * one["B"], one["A"]) for name, one in params.items()})


@functools.partial(jax.jit, static_argnames="point")
def _pointed(params, frozen, *, point):
    return point(params, frozen)


def model(way: Way, params: Any) -> Any:
    """The model of trained numbers, for `predict`; with standard task vectors θ(Λ) itself, which can be saved.

    It costs at inference what θ0 does.
    """
    return _pointed(params, way.frozen, point=way.point)
