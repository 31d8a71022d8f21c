"""Masked AdamW by its numbers and laws, and sparse fitting: bits outside of the mask, no state for frozen tensors."""
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tvjax import training
from tvjax.training import Recipe, loop, sparsity

pytestmark = pytest.mark.usefixtures("quick_compilation")
RNG = np.random.default_rng(0)
SPLIT = (RNG.normal(size=(10, 3)).astype(np.float32), RNG.integers(0, 2, 10).astype(np.int32))
PARAMS = {"inner": {"w": RNG.normal(size=(4, 3)).astype(np.float32), "b": np.zeros(4, np.float32)},
          "outer": {"w": RNG.normal(size=(2, 4)).astype(np.float32)}}
MASK = {"inner": {"w": jnp.array(RNG.random((4, 3)) < 0.5), "b": jnp.zeros(4, bool)},
        "outer": {"w": jnp.zeros((2, 4), bool)}}
RECIPE = Recipe(steps=6, batch=4, lr=0.05, warmup=2, weight_decay=0.1, clip=0.3)


def loss(params, batch, key):
    images, labels = batch
    hidden = jnp.tanh(images @ params["inner"]["w"].T + params["inner"]["b"][None])
    return training.cross_entropy(hidden @ params["outer"]["w"].T, labels)


def feed(recipe=RECIPE):
    return functools.partial(training.batches, SPLIT, batch=recipe.batch, seed=recipe.seed)


def steps(transform, params, grads):
    """The parameters after some steps of an optax transformation."""
    state = transform.init(params)
    for grad in grads:
        with jax.numpy_dtype_promotion("standard"):
            updates, state = transform.update(grad, state, params)
        params = optax.apply_updates(params, updates)
    return params, state


@pytest.mark.parametrize("options", [{}, {"moments": "all"}, {"moments": "all", "norm": "all"}])
def test_one_step_by_hand(options):
    """p = [1, −2], g = [.5, .5], c = [1, 0], lr .1, decay .1 ⇒ [.89, −2]."""
    recipe = Recipe(steps=10, lr=0.1, warmup=0, weight_decay=0.1)
    transform = training.masked_adamw(recipe, jnp.array([True, False]), **options)
    found, _ = steps(transform, jnp.array([1.0, -2.0]), [jnp.array([0.5, 0.5])])
    np.testing.assert_allclose(found, [0.89, -2.0], atol=1e-6)


def test_a_full_mask_is_the_plain_optimizer():
    grads = [jax.tree.map(lambda x: jnp.asarray(RNG.normal(size=x.shape), jnp.float32), PARAMS) for _ in range(3)]
    ones = jax.tree.map(lambda x: jnp.ones(x.shape, bool), PARAMS)
    plain, _ = steps(training.optimizer(RECIPE), PARAMS, grads)
    masked, _ = steps(training.masked_adamw(RECIPE, ones), PARAMS, grads)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7), plain, masked)


def test_moments_change_nothing_and_the_norm_does():
    """D5: what Adam's moments see elsewhere has no effect on the chosen entries; the clip norm has."""
    mask = jnp.array([True, True, False, False])
    grads = [jnp.asarray(RNG.normal(size=4), jnp.float32) * (1 + 5 * i) for i in range(4)]
    run = lambda **options: np.asarray(steps(training.masked_adamw(RECIPE, mask, **options), jnp.ones(4), grads)[0])
    np.testing.assert_array_equal(run(moments="chosen"), run(moments="all"))
    np.testing.assert_array_equal(run(norm="all"), run(norm="all", moments="all"))
    assert np.abs(run(norm="all") - run(norm="chosen")).max() > 1e-4
    for options in ({}, {"norm": "all", "moments": "all"}):
        np.testing.assert_array_equal(run(**options)[2:], np.ones(2, np.float32))


def test_other_entries_at_a_tenth_of_the_rate():
    """LoTA's vision code: its masks hold 0.1, not 0."""
    recipe = Recipe(steps=10, lr=0.1, warmup=0, weight_decay=0.1)
    found, _ = steps(training.masked_adamw(recipe, jnp.array([True, False]), off=0.1), jnp.array([1.0, 1.0]),
                     [jnp.array([0.5, 0.5])])
    np.testing.assert_allclose(found, [0.89, 0.989], atol=1e-6)


@pytest.mark.parametrize("options", [{}, {"moments": "all", "norm": "all"}])
def test_fitting_keeps_the_bits_outside_of_the_mask(options):
    fitted = training.fit_sparse(loss, PARAMS, MASK, feed(), RECIPE, **options)
    changed = jax.tree.map(lambda a, b: np.asarray(a) != b, fitted.params, PARAMS)
    jax.tree.map(np.testing.assert_array_equal, changed, MASK)


def test_fitting_parts_is_fitting_the_whole_under_the_same_mask():
    parts = training.fit_sparse(loss, PARAMS, MASK, feed(), RECIPE)
    whole = training.fit(loss, PARAMS, feed(), RECIPE, transform=training.masked_adamw(RECIPE, MASK))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7), parts.params, whole.params)


def test_frozen_tensors_get_no_gradient_and_no_state(monkeypatch):
    kept = {}
    real = sparsity.fit
    def spying(loss, params, feed, recipe, **options):
        kept["state"] = options["transform"].init(params)
        kept["jaxpr"] = jax.make_jaxpr(jax.grad(lambda p: loss(p, SPLIT, None, options["frozen"])))(params)
        return real(loss, params, feed, recipe, **options)
    monkeypatch.setattr(sparsity, "fit", spying)
    training.fit_sparse(loss, PARAMS, MASK, feed(), RECIPE)
    assert {x.shape for x in jax.tree.leaves(kept["state"])} == {(), (4, 3)}
    assert [v.aval.shape for v in kept["jaxpr"].jaxpr.outvars] == [(4, 3)]
    bytes_ = training.training_bytes(PARAMS, MASK)
    assert bytes_ == {"parameters": 96, "gradients": 48, "state": 96, "mask": 12}


def test_one_compilation_serves_all_masks_of_the_same_tensors():
    training.fit_sparse(loss, PARAMS, MASK, feed(), RECIPE)
    before = loop._advance._cache_size()
    other = {**MASK, "inner": {**MASK["inner"], "w": ~MASK["inner"]["w"]}}
    training.fit_sparse(loss, PARAMS, other, feed(), RECIPE)
    assert loop._advance._cache_size() == before


def test_frozen_arguments_of_the_loss_still_arrive():
    scaled = lambda params, batch, key, scale: scale * loss(params, batch, key)
    fitted = training.fit_sparse(scaled, PARAMS, MASK, feed(), RECIPE, frozen=jnp.float32(2.0))
    assert np.isfinite(fitted.losses).all()


@pytest.mark.parametrize("mask, sentence", [
    ({"inner": {"w": jnp.ones((3, 4), bool)}}, r"another tree: shapes: inner\.w \(3, 4\) vs \(4, 3\)"),
    ({"other": jnp.ones(3, bool)}, "another tree: only in the mask: other"),
    ({"inner": {"w": jnp.ones((4, 3))}}, r"inner\.w is float32, not bool"),
    (jax.tree.map(jnp.zeros_like, MASK), "the mask is empty"),
])
def test_masks_that_do_not_fit(mask, sentence):
    with pytest.raises(ValueError, match=sentence):
        training.fit_sparse(loss, PARAMS, mask, feed(), RECIPE)


@pytest.mark.parametrize("options", [{"moments": "some"}, {"norm": "none"}, {"off": 2.0}])
def test_options_that_do_not_exist(options):
    with pytest.raises(ValueError, match="got"):
        training.masked_adamw(RECIPE, MASK, **options)
