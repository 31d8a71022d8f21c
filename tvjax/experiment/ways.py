"""Ways of fine-tuning as families of models: what is trained, and how a vector in its space moves the model.

standard f(x; θ0 + τ) · tangent f(x; θ0) + ∇f·τ · adapters f(x; θ0, φ0 + τ), or linearised at φ0 by module or network.
"""
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from tvjax import adapters, tangent, tree, vectors
from tvjax.evaluation import classify, paired, shifted
from tvjax.evaluation.mixtures import Family
from tvjax.experiment.loading import Problem
from tvjax.experiment.partial_plan import WayPlan


class Way(NamedTuple):
    """`start` is the tree that is trained, at its beginning: τ is what training adds to it."""

    plan: WayPlan
    family: Family
    start: Any

    @property
    def name(self) -> str:
        return self.plan.name

    @property
    def trained(self) -> int:
        """How many numbers are trained."""
        return tree.size(self.start)


def build(plan: WayPlan, about: Problem, seed: int) -> Way:
    """The way of a plan on a problem; the φ0 of adapters is drawn from the plan's seed and the run's."""
    theta0 = about.theta0
    if plan.kind in ("standard", "tangent"):
        return Way(plan, _whole(about, plan), theta0)
    phi0 = jax.device_get(adapters.start(plan.method, sites(about), seed=plan.seed + seed))
    encode, base = about.encode, (theta0, phi0)
    if not plan.scope:
        return Way(plan, Family(base, _beside, _adapted(encode, plan.method), readout=about.readout), phi0)
    slopes = _phi_slopes(encode, plan.method) if plan.scope == "network" else None
    return Way(plan, Family(base, _around, _expanded(encode, plan.method, plan.scope), slopes, about.readout), phi0)


def sites(about: Problem) -> dict[str, adapters.Site]:
    """Where adapters may sit in the problem's encoder."""
    inputs, _ = next(iter(about.splits.values()))["val"]
    return adapters.find(about.encode, about.theta0, jax.tree.map(lambda x: x[:2], inputs))


def _whole(about: Problem, plan: WayPlan) -> Family:
    encode, theta0 = tangent.rematerialised(about.encode, plan.remat), about.theta0
    if plan.kind == "standard":
        return Family(theta0, shifted, _plainly(encode), readout=about.readout)
    return Family(theta0, paired, linearly(encode), tangent.slopes(encode), about.readout)


# ---------------------------------------------------------------- (base, τ) -> point
def _beside(base, tau):
    theta0, phi0 = base
    return theta0, vectors.add(phi0, tau)


def _around(base, tau):
    theta0, phi0 = base
    return theta0, phi0, vectors.add(phi0, tau)


# ---------------------------------------------------------------- (point, inputs, key) -> features
@functools.cache
def _plainly(encode: Callable) -> Callable:
    return lambda point, inputs, key=None: encode(point, inputs)


@functools.cache
def linearly(encode: Callable) -> Callable:
    return lambda point, inputs, key=None: tangent.linearised(encode)(*point, inputs)


@functools.cache
def _adapted(encode: Callable, method) -> Callable:
    return lambda point, inputs, key=None: adapters.adapted(encode, method)(*point, inputs, key=key)


@functools.cache
def _expanded(encode: Callable, method, scope: str) -> Callable:
    return lambda point, inputs, key=None: adapters.linearised(encode, method, scope)(*point, inputs, key=key)


@functools.cache
def _phi_slopes(encode: Callable, method) -> Callable:
    """(base, taus, inputs) -> features at φ0 and their derivatives along each τ."""
    def run(base, taus, inputs):
        theta0, phi0 = base
        return tangent.slopes(adapters.in_phi(encode, method))(phi0, taus, theta0, inputs)
    return run


# ---------------------------------------------------------------- training
@functools.cache
def loss(family: tuple, smoothing: float, criterion: Callable) -> Callable:
    """(trained, (inputs, labels), key, (base, start, head, classes)) -> a problem's criterion under a padded head.

    family: (place, encode, readout) of a `Family`.
    """
    place, encode, readout = family

    def loss(trained, batch, key, frozen):
        inputs, labels = batch
        base, start, head, classes = frozen
        point = place(base, tangent.difference(trained, start))
        score = lambda head, inputs: classify(_itself, readout)(encode(point, inputs, key=key), head, None)
        return criterion(score, head, classes, inputs, labels, smoothing=smoothing)
    return loss


def _itself(features, _):
    return features
