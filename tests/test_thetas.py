"""Models in, a model out: the same as task vectors by hand, with one rounding, whatever the container."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tvjax import merging, vectors

RNG = np.random.default_rng(0)
THETA0 = {
    "layer": {"weight": RNG.standard_normal((6, 4)).astype(np.float32)},
    "bias": RNG.standard_normal(6).astype(np.float32),
}
THETAS = [jax.tree.map(lambda x: x + RNG.standard_normal(x.shape).astype(np.float32), THETA0) for _ in range(3)]


@pytest.mark.parametrize("method", ["task_arithmetic", "ties", "tsv_m"])
def test_merge_is_theta0_plus_the_operator(method):
    operator = merging.build(method)
    by_hand = vectors.add(THETA0, operator([vectors.task_vector(theta, THETA0) for theta in THETAS]))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), merging.merge(operator, THETAS, THETA0), by_hand
    )
    program = jax.jit(lambda thetas, theta0: merging.merge(operator, thetas, theta0))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), program(THETAS, THETA0), by_hand)


def test_low_precision_is_rounded_once():
    low = lambda tree: jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), tree)
    theta0, thetas = low(THETA0), [low(theta) for theta in THETAS]
    merged = merging.merge(merging.task_arithmetic(scale=0.3), thetas, theta0)
    up = lambda x: np.asarray(x, np.float32)
    for name in ("bias",):
        exact = up(theta0[name]) + np.float32(0.3) * sum(up(theta[name]) - up(theta0[name]) for theta in thetas)
        np.testing.assert_array_equal(up(merged[name]), up(jnp.asarray(exact, jnp.bfloat16)))
        assert merged[name].dtype == jnp.bfloat16


def test_buffers_are_the_base_models_own():
    ids = np.arange(3) + 2**40
    with_ids = lambda theta, ids: {**theta, "position_ids": ids}
    merged = merging.merge(merging.average(), [with_ids(theta, ids + 1) for theta in THETAS], with_ids(THETA0, ids))
    np.testing.assert_array_equal(merged["position_ids"], ids)
    assert merged["position_ids"].dtype == np.int64


def test_the_callers_models_stay():
    before = jax.tree.map(np.copy, [THETA0, *THETAS])
    merging.merge(merging.ties(), THETAS, THETA0)
    jax.tree.map(np.testing.assert_array_equal, before, [THETA0, *THETAS])


def test_bad_input_gets_one_sentence():
    with pytest.raises(ValueError, match="the list of models is empty"):
        merging.merge(merging.average(), [], THETA0)
    with pytest.raises(
        ValueError, match=r"model b and theta0 differ: only in theta0: layer.weight; shapes: bias \(1,\) vs \(6,\)"
    ):
        merging.merge(merging.average(), [THETA0, {"bias": np.ones(1, np.float32)}], THETA0, tasks=["a", "b"])
    with pytest.raises(ValueError, match="bias came out as"):
        merging.merge(merging.top(density=0.5), THETAS, THETA0)
    with pytest.raises(ValueError, match="bias holds NaN or infinite entries"):
        merging.merge(merging.average(), [{**THETAS[0], "bias": np.full(6, np.inf, np.float32)}], THETA0)
