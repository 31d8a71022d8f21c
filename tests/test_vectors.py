"""Task vectors behave as vectors, keep names, dtypes and integers apart, and say what does not fit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tvjax import tree, vectors
from tvjax.vectors import TaskVector


def theta(seed, dtype=np.float32):
    rng = np.random.default_rng(seed)
    draw = lambda *shape: jnp.asarray(rng.integers(-64, 64, shape) / 32, dtype)  # dyadic: sums are exact
    return {
        "layers": {"0": {"weight": draw(4, 3)}, "10": {"weight": draw(4, 3)}, "2": {"weight": draw(4, 3)}},
        "bias": draw(4),
    }


A, B, BASE = (theta(seed) for seed in (1, 2, 0))
TAU, SIGMA = vectors.task_vector(A, BASE), vectors.task_vector(B, BASE)


def same(a, b):
    jax.tree.map(np.testing.assert_array_equal, dict(a), dict(b))


def test_base_plus_task_vector_is_the_fine_tuned_model():
    same(vectors.add(BASE, TAU), A)
    same(vectors.add(A, -TAU), BASE)


def test_the_operators_are_those_of_a_vector_space():
    same(TAU - TAU, TAU * 0.0)
    same(TAU + SIGMA, SIGMA + TAU)
    same(2 * TAU, TAU + TAU)
    same(TAU / 2.0, 0.5 * TAU)
    same(sum([TAU, SIGMA]), TAU + SIGMA)
    same(TAU**2, jax.tree.map(lambda x: x * x, TAU))
    assert isinstance(TAU + SIGMA, TaskVector) and isinstance(jax.jit(lambda t: 2 * t)(TAU), TaskVector)


def test_dot_norm_and_cosines():
    flat = lambda t: np.concatenate([np.ravel(x) for x in tree.flatten(t).values()])
    np.testing.assert_allclose(vectors.dot(TAU, SIGMA), flat(TAU) @ flat(SIGMA), rtol=1e-6)
    np.testing.assert_allclose(vectors.norm(TAU), np.linalg.norm(flat(TAU)), rtol=1e-6)
    matrix = vectors.cosines([TAU, SIGMA, -TAU, 0.0 * TAU])
    assert matrix.shape == (4, 4)
    np.testing.assert_allclose(
        matrix[0],
        [1, flat(TAU) @ flat(SIGMA) / np.linalg.norm(flat(TAU)) / np.linalg.norm(flat(SIGMA)), -1, 0],
        atol=1e-6,
    )


def test_integer_leaves_and_buffers_are_left_out_and_left_alone():
    ids = np.arange(4) + 2**40
    base, tuned = {**BASE, "position_ids": ids}, {**A, "position_ids": ids + 1}
    tau = vectors.task_vector(tuned, base)
    assert "position_ids" not in tau
    moved = vectors.add(base, tau)
    assert moved["position_ids"] is ids


def test_mismatches_name_the_leaves():
    with pytest.raises(
        ValueError, match=r"theta and theta0 differ: only in theta: head; shapes: bias \(1,\) vs \(4,\)"
    ):
        vectors.task_vector({**A, "bias": jnp.ones(1), "head": jnp.ones(2)}, BASE)
    with pytest.raises(ValueError, match="dtypes: bias bfloat16 vs float32"):
        vectors.task_vector({**A, "bias": A["bias"].astype(jnp.bfloat16)}, BASE)
    with pytest.raises(ValueError, match=r"shapes: bias \(4,\) vs \(1,\)"):
        vectors.add(BASE, {"bias": jnp.ones(1)})
    with pytest.raises(ValueError, match="only in tau: haed"):
        vectors.add(BASE, {"haed": jnp.ones(1)})
    with pytest.raises(ValueError, match="no floating-point leaf"):
        vectors.task_vector({"ids": np.arange(3)}, {"ids": np.arange(3)})


def test_sums_warn_of_leaves_that_only_one_has_and_drop_them():
    with pytest.warns(UserWarning, match="left out of the sum, since only one task vector has them: bias"):
        total = TAU + TaskVector({"layers": SIGMA["layers"]})
    assert list(tree.flatten(total)) == ["layers.0.weight", "layers.2.weight", "layers.10.weight"]
    with pytest.raises(ValueError, match="task vectors differ: shapes"):
        TAU + TaskVector({**TAU, "bias": jnp.ones((1, 4))})


def test_low_precision_in_and_out_float32_between():
    low, base = (jax.tree.map(lambda x: x.astype(jnp.bfloat16), t) for t in (A, BASE))
    tau = vectors.task_vector(low, base)
    assert {x.dtype for x in jax.tree.leaves(tau)} == {jnp.dtype(jnp.bfloat16)}
    scaled = vectors.add(base, tau, scale=jnp.float32(0.3))  # a strongly typed scale must not widen the model
    assert {x.dtype for x in jax.tree.leaves(scaled)} == {jnp.dtype(jnp.bfloat16)}
    wide = np.asarray(base["bias"], np.float32) + np.float32(0.3) * np.asarray(tau["bias"], np.float32)
    np.testing.assert_array_equal(
        np.asarray(scaled["bias"], np.float32), np.asarray(jnp.asarray(wide, jnp.bfloat16), np.float32)
    )
    many = [TaskVector({"w": jnp.full(1, 2.0**-9, jnp.bfloat16)})] + [TaskVector({"w": jnp.ones(1, jnp.bfloat16)})]
    assert float(vectors.dot(many[0], many[1])) == 2.0**-9


def test_scales_are_traced():
    calls = []

    @jax.jit
    def apply(base, tau, scale):
        calls.append(None)
        return vectors.add(base, tau, scale=scale)

    for scale in np.linspace(0, 1, 5, dtype=np.float32):
        apply(BASE, TAU, scale)
    assert len(calls) == 1


def test_models_that_share_a_base_are_near_it():
    near = jax.tree.map(lambda x: x + 0.01 * jnp.sign(x), BASE)
    assert vectors.delta_norm_ratio(near, BASE) < 0.05
    rng = np.random.default_rng(5)
    strangers = [{"w": jnp.asarray(rng.standard_normal((64, 64)), jnp.float32)} for _ in range(2)]
    assert abs(vectors.delta_norm_ratio(*strangers) - 2**0.5) < 0.1
