"""Switching inside `jit`: one program for all tasks, mixed batches equal to single tasks, nothing copied per task."""
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tvjax import compression, vectors
from tvjax.compression import bits, building, store, switch, tall

DRAWS = np.random.default_rng(0)
SHAPES = {"fc": {"weight": (6, 9), "bias": (6,)}, "out": (3, 6)}
TASKS = 4


def draw():
    one = lambda shape: jnp.asarray(DRAWS.normal(size=shape), jnp.float32)
    return jax.tree.map(one, SHAPES, is_leaf=lambda x: type(x) is tuple)


THETA0, TAUS = draw(), [draw() for _ in range(TASKS)]
TAU = tall.multi_task_vector(TAUS)
MASKS = compression.tall_masks(TAUS, TAU)
X = jnp.asarray(DRAWS.normal(size=(11, 9)), jnp.float32)


def apply(params, x):
    hidden = jnp.tanh(x @ params["fc"]["weight"].T + params["fc"]["bias"][None])
    return {"logits": hidden @ params["out"].T}


def expected(task, x=X):
    return apply(compression.reconstruct(THETA0, TAU, bits.take(MASKS, task)), x)["logits"]


def test_one_compilation_serves_all_tasks():
    count = []

    def counted(params, x):
        count.append(1)
        return apply(params, x)
    forward = switch.switched(counted)
    for task in range(TASKS):
        found = forward(THETA0, TAU, MASKS, task, X)["logits"]
        np.testing.assert_allclose(found, expected(task), atol=1e-6)
    assert len(count) == 1


def test_frozen_leaves_and_dtypes():
    theta0 = {**jax.tree.map(lambda x: x.astype(jnp.bfloat16), THETA0), "frozen": jnp.arange(3)}
    found = jax.jit(switch.params_for)(theta0, TAU, MASKS, 2, jnp.array([1.0, 1.0, 0.5, 1.0]))
    assert found["frozen"].tolist() == [0, 1, 2] and found["out"].dtype == jnp.bfloat16
    step = jax.tree.map(lambda x: 0.5 * x, tall.masked(TAU, bits.take(MASKS, 2)))
    want = vectors.add(theta0, step)
    np.testing.assert_array_equal(np.asarray(found["out"], np.float32), np.asarray(want["out"], np.float32))


@pytest.mark.parametrize("tasks", [[0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2], [2] * 11, [3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 0]])
@pytest.mark.parametrize("block", [1, 4, 32])
def test_mixed_batches(tasks, block):
    forward = jax.jit(switch.mixed, static_argnames=("apply", "block"))
    found = forward(apply, THETA0, TAU, MASKS, jnp.array(tasks), X, block=block)["logits"]
    want = jnp.stack([expected(task)[i] for i, task in enumerate(tasks)])
    np.testing.assert_allclose(found, want, atol=2e-6)


def test_mixed_batches_by_vmap():
    tasks = jnp.array([0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2])
    found = jax.jit(switch.per_example, static_argnames="apply")(apply, THETA0, TAU, MASKS, tasks, X)["logits"]
    want = jnp.stack([expected(int(task))[i] for i, task in enumerate(tasks)])
    np.testing.assert_allclose(found, want, atol=2e-6)


@pytest.mark.parametrize("examples, count, block", [(1, 4, 8), (7, 3, 2), (40, 5, 8)])
def test_blocks_hold_every_example_once(examples, count, block):
    for seed in range(4):
        tasks = jnp.asarray(np.random.default_rng(seed).integers(0, count, examples), jnp.int32)
        places, owners, used = map(np.asarray, switch.blocks(tasks, count, block=block))
        assert set(places[used].reshape(-1).tolist()) == set(range(examples)) and np.all(places[~used] == examples)
        assert np.all(np.asarray(tasks)[places[used]] == owners[used][:, None])
        assert len(owners) <= count + max(examples - count, 0) // block


def test_no_mask_is_kept():
    """The compiled switch of a large leaf needs less scratch memory than the mask as bytes would take."""
    size = 1 << 16
    tau, masks = {"w": jnp.ones(size)}, {"w": bits.pack(jnp.ones((3, size), bool), axes=1)}
    program = jax.jit(switch.params_for).lower({"w": jnp.zeros(size)}, tau, masks, 1).compile()
    assert program.memory_analysis().temp_size_in_bytes < size
    held = switch.device_bytes({"w": jnp.zeros(size)}, tau, masks)
    assert held == {"switch": 8 * size + 3 * size // 8, "models": 12 * size}


def test_from_a_store(tmp_path):
    building.build(tmp_path / "s", THETA0, TAUS, tasks=("a", "b", "c", "d"), kind="emr")
    opened = store.open_store(tmp_path / "s")
    parts = store.load_switch(opened)
    found = jax.jit(switch.params_for)(parts["theta0"], parts["tau"], parts["masks"], 1, parts["factors"])
    np.testing.assert_allclose(found["out"], store.load(opened, "b")["out"], atol=1e-6)


def test_masks_of_another_tree_are_refused():
    with pytest.raises(ValueError, match="masks are of another tree than the shared vector's"):
        switch.params_for(THETA0, {"fc": TAU["fc"]}, MASKS, 0)
    with pytest.raises(ValueError, match="at least one example; got block=0"):
        switch.mixed(apply, THETA0, TAU, MASKS, jnp.array([0]), X[:1], block=0)
