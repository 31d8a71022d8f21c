"""Merges that solve for a matrix: what they minimise, their units, their limits, their data."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tvjax import merging
from tvjax.merging import metric

pytestmark = pytest.mark.usefixtures("quick_compilation")

RNG = np.random.default_rng(0)
X = RNG.standard_normal((3, 6, 5)).astype(np.float32)
SOLVES = {"wudi": merging.wudi, "actmat": merging.actmat, "swudi": merging.swudi, "aswudi": merging.aswudi}


def merge(operator, x=X, **data):
    return np.asarray(operator({"w": x}, **{name: {"w": value} for name, value in data.items()})["w"])


def close(made, expected, atol=1e-5):
    np.testing.assert_allclose(made, expected, atol=atol)


def wudi_objective(W, x):
    return sum(((W - one) @ one.T) ** 2 / (one**2).sum() for one in x).sum()


def test_wudi_minimises_its_objective():
    with jax.enable_x64(True):
        W = merge(merging.wudi(ridge=0.0), X.astype(np.float64))
        slope = jax.grad(wudi_objective)(jnp.asarray(W), jnp.asarray(X, jnp.float64))
    close(slope, 0, 1e-10)


@pytest.mark.parametrize("shape", [(4, 9), (9, 4)])
def test_moments(shape):
    x = RNG.standard_normal((3, *shape)).astype(np.float32)
    x[1] = 0
    moment, gram = metric.moments(jnp.asarray(x), True)
    close(gram, sum(one.T @ one / (one**2).sum() for one in x[[0, 2]]))
    close(moment, sum(one @ one.T @ one / (one**2).sum() for one in x[[0, 2]]))


@pytest.mark.parametrize("name", ["wudi", "actmat"])
def test_a_relative_ridge_has_no_unit_and_an_absolute_one_does(name):
    for units, holds in (("relative", True), ("absolute", False)):
        operator = SOLVES[name](ridge=0.5, units=units)
        small, large = merge(operator, 1e-3 * X) * 1e3, merge(operator)
        same = np.abs(small - large).max() < 1e-5
        assert same == (holds or name == "wudi"), (units, "wudi's weights take the unit out of its eigenvalues")


@pytest.mark.parametrize("name", SOLVES)
def test_orthogonal_row_spaces_merge_to_the_sum(name):
    """In float32 too, though the Gram matrices have a null space."""
    x = np.zeros((3, 6, 8), np.float32)
    for t in range(3):
        x[t, :, 2 * t : 2 * t + 2] = RNG.standard_normal((6, 2))
    close(merge(SOLVES[name](), x), x.sum(0), 2e-5)
    close(merge(SOLVES[name](), x[:1]), x[0], 2e-5)


def test_swudi_goes_from_the_sum_to_the_solution():
    with jax.enable_x64(True):
        x = X.astype(np.float64)
        close(merge(merging.swudi(t=1e-9, rho=1.0), x), x.sum(0), 1e-6)
        close(merge(merging.swudi(t=1e9, rho=1.0), x), merge(merging.wudi(ridge=0.0), x), 1e-8)
        descended, gradient = jnp.asarray(x.sum(0)), jax.jit(jax.grad(lambda W: wudi_objective(W, x) / 2))
        for _ in range(2000):
            descended = descended - 1e-3 * gradient(descended)
        close(merge(merging.swudi(t=2.0, rho=1.0), x), descended, 2e-3)


def test_aswudi_solves_along_the_leading_directions():
    e, V, _ = map(np.asarray, metric.spectrum(metric.moments(jnp.asarray(X), True)[1]))
    K = int(np.ceil(np.sqrt(e).sum() ** 2 / e.sum()))
    made, solution = merge(merging.aswudi()), merge(merging.wudi(ridge=0.0))
    close(made @ V[:, -K:], solution @ V[:, -K:], 1e-4)
    close(made @ V[:, :-K], X.sum(0) @ V[:, :-K], 1e-4)


def test_numbers_are_traced():
    sweep = jax.jit(jax.vmap(lambda rho: merging.swudi(rho=rho)({"w": X})["w"]))(jnp.array([0.2, 0.65, 1.0]))
    for made, rho in zip(sweep, (0.2, 0.65, 1.0), strict=True):
        close(made, merge(merging.swudi(rho=rho)), 2e-5)


# ---------------------------------------------------------------- with data
def grams(features=5, samples=40):
    inputs = RNG.standard_normal((3, samples, features)).astype(np.float32)
    return np.einsum("tni,tnj->tij", inputs, inputs)


def test_regmean_minimises_the_outputs_distance():
    x, gram = X.astype(np.float64), grams().astype(np.float64)
    with jax.enable_x64(True):
        W = merge(merging.regmean(off_diagonal=1.0, ridge=0.0), x, gram=gram)
        distance = lambda W: sum((((W - x[t]) @ gram[t]) * (W - x[t])).sum() for t in range(3))
        close(jax.grad(distance)(jnp.asarray(W)), 0, 1e-9)


def test_regmean_shrinks_off_diagonals_and_averages_where_no_input_ever_is():
    gram = grams()
    diagonal = np.einsum("tii->ti", gram)
    close(
        merge(merging.regmean(off_diagonal=0.0, ridge=0.0), gram=gram),
        (X * diagonal[:, None]).sum(0) / diagonal.sum(0),
        1e-4,
    )
    gram[:, 2] = gram[:, :, 2] = 0
    close(merge(merging.regmean(), gram=gram)[:, 2], X.mean(0)[:, 2], 1e-5)
    close(merge(merging.regmean(), gram=np.zeros_like(gram)), X.mean(0))


def test_fisher_weighs_entries():
    weights = RNG.random(X.shape).astype(np.float32)
    weights[:, 0] = 0
    made = merge(merging.fisher(scale=2.0), fisher=weights)
    close(made[1:], 2 * (weights * X).sum(0)[1:] / weights.sum(0)[1:], 1e-4)
    close(made[0], 2 * X.mean(0)[0])
    close(merge(merging.fisher(floor=2.0), fisher=weights), X.mean(0))
    jitted = jax.jit(lambda taus, fisher: merging.fisher(scale=2.0)(taus, fisher=fisher))({"w": X}, {"w": weights})["w"]
    close(jitted, made)


def test_only_selected_leaves_need_their_grams():
    gram = grams()
    taus = {"fc": {"w": X}, "embedding": {"w": X}, "bias": X[:, :, 0]}
    made = merging.regmean(where=merging.named("fc.w"))(taus, gram={"fc": {"w": gram}})
    close(made["embedding"]["w"], X.mean(0))
    close(made["fc"]["w"], merge(merging.regmean(), gram=gram))
    for run in (merging.regmean(), jax.jit(lambda taus, gram: merging.regmean()(taus, gram=gram))):
        with pytest.raises(ValueError, match=r"gram has nothing for the leaf embedding.w; it has fc.w"):
            run(taus, gram={"fc": {"w": gram}})


@pytest.mark.parametrize(
    "build, message",
    [
        (lambda: merging.wudi(ridge=-1.0), r"ridge lies in \[0, inf\]; got -1"),
        (lambda: merging.actmat(units="percent"), "no units 'percent'"),
        (lambda: merging.swudi(t=0.0), r"t lies in \(0, inf\]"),
        (lambda: merging.swudi(rho=1.5), r"rho lies in \(0, 1\]; got 1.5"),
        (lambda: merging.regmean(off_diagonal=2.0), r"off_diagonal lies in \[0, 1\]"),
        (
            lambda: merge(merging.regmean(), gram=np.ones((3, 4, 4), np.float32)),
            r"has shape \(3, 5, 5\); got \(3, 4, 4\)",
        ),
        (lambda: merge(merging.fisher(), fisher=X[0]), "fisher has the shape of the stack"),
        (lambda: merge(merging.fisher()), "needs fisher"),
    ],
)
def test_slips_get_one_sentence(build, message):
    with pytest.raises(ValueError, match=message):
        build()
