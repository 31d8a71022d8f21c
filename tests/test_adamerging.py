"""AdaMerging against a plain loop of optax on the whole formula; clamping, groups of shapes, pools in bfloat16."""
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tvjax import learning, vectors
from tvjax.learning import adamerging

pytestmark = pytest.mark.usefixtures("quick_compilation")

RNG = np.random.default_rng(0)
THETA = {"fc": {"weight": RNG.standard_normal((4, 3)).astype(np.float32), "bias": np.zeros(4, np.float32)}}
TAUS = [jax.tree.map(lambda x: RNG.standard_normal(x.shape).astype(np.float32), THETA) for _ in range(2)]
TASKS = {task: (jnp.asarray(RNG.standard_normal((4, classes)), jnp.float32),
                RNG.standard_normal((12, 3)).astype(np.float32)) for task, classes in (("a", 3), ("b", 5))}


HELD = learning.pool(TAUS, THETA)


def predict(params, head, inputs):
    return jnp.tanh(inputs @ params["fc"]["weight"].T + params["fc"]["bias"][None]) @ head


def plain(by, steps, lr):
    """Coefficients and losses: the mean entropy of 2 batches of 4 of each task, summed."""
    def loss(c, batches):
        scaled = [jax.tree.map(lambda x: x, tau) for tau in TAUS]
        for t, tau in enumerate(scaled):
            for leaf in ("weight", "bias"):
                tau["fc"][leaf] = jnp.clip(c["task" if by == "task" else f"fc.{leaf}"], 0, 1)[t] * tau["fc"][leaf]
        theta = vectors.add(vectors.add(THETA, scaled[0]), scaled[1])
        total = jnp.zeros(())
        for (head, _), inputs in zip(TASKS.values(), batches, strict=True):
            log_p = jax.nn.log_softmax(predict(theta, head, inputs))
            total += 2 * -(jnp.exp(log_p) * log_p).sum(-1).mean()
        return total

    names = ["task"] if by == "task" else ["fc.weight", "fc.bias"]
    c, losses = {name: jnp.full(2, 0.3) for name in names}, []
    moments, slopes = optax.adam(lr).init(c), jax.jit(jax.value_and_grad(loss))
    for step in range(steps):
        batches = [adamerging._inputs(TASKS, [task], 4, 2, 0, step).reshape(8, 3) for task in TASKS]
        value, slope = slopes(c, batches)
        with jax.numpy_dtype_promotion("standard"):
            change, moments = optax.adam(lr).update(slope, moments)
        c = optax.apply_updates(c, change)
        losses.append(value)
    return {name: jnp.clip(value, 0, 1) for name, value in c.items()}, np.array(losses)


@pytest.mark.parametrize("by", ["task", "tensor"])
def test_steps_are_those_of_the_whole_formula(by):
    made = adamerging.adapt(predict, THETA, HELD, TASKS, by=by, steps=4, lr=0.2, batch=4, every=2)
    expected, losses = plain(by, 4, 0.2)
    np.testing.assert_allclose(made.losses, losses, rtol=1e-5)
    for name, value in expected.items():
        np.testing.assert_allclose(made.coefficients[name], value, atol=1e-5)
    assert [step for step, _ in made.trace] == [0, 2, 4]
    theta = adamerging.merged(THETA, HELD, made.coefficients)
    spread = adamerging.by_task(made.coefficients, learning.pool(TAUS, THETA))
    bias = sum(spread["fc.bias"][t] * TAUS[t]["fc"]["bias"] for t in range(2))
    np.testing.assert_allclose(theta["fc"]["bias"], bias, atol=1e-6)


def test_entropy_falls_from_init_within_bounds_and_bfloat16_is_near():
    made = adamerging.adapt(predict, THETA, HELD, TASKS, steps=60, lr=0.05, batch=6)
    assert np.all(made.trace[0][1]["fc.weight"] == np.float32(0.3))
    assert made.losses[-10:].mean() < 0.9 * made.losses[:10].mean()
    assert all((c >= 0).all() and (c <= 1).all() for _, one in made.trace for c in one.values())
    half = adamerging.adapt(predict, THETA, learning.pool(TAUS, THETA, store="bfloat16"), TASKS, steps=60, lr=0.05,
                            batch=6)
    np.testing.assert_allclose(half.losses[-1], made.losses[-1], rtol=0.02)


def test_the_gradient_is_zero_outside_the_bounds():
    made = adamerging.adapt(predict, THETA, HELD, TASKS, steps=3, lr=0.05, batch=4, value=1.5)
    assert all((c == 1).all() for c in made.coefficients.values())


def test_tasks_of_other_shapes_have_a_scan_of_their_own():
    """Inputs of 12 × 2 × 3 as two tokens, averaged by `predict`, beside those of one."""
    def tokens(params, head, inputs):
        return predict(params, head, inputs.mean(1) if inputs.ndim == 3 else inputs)
    head, inputs = TASKS["b"]
    mixed = {"a": TASKS["a"], "b": (head, np.stack([inputs, inputs], 1))}
    one, other = (adamerging.adapt(tokens, THETA, HELD, tasks, steps=2, batch=4)
                  for tasks in (TASKS, mixed))
    np.testing.assert_allclose(one.losses, other.losses, rtol=1e-5)


def test_slips_get_one_sentence():
    with pytest.raises(ValueError, match=r"a step takes 32 inputs of each task \(2 batches of 16\); a has 12"):
        adamerging.adapt(predict, THETA, HELD, TASKS)
    with pytest.raises(ValueError, match="there is no task to adapt to"):
        adamerging.adapt(predict, THETA, HELD, {})
    with pytest.raises(ValueError, match="by is one of task, tensor"):
        adamerging.adapt(predict, THETA, HELD, TASKS, by="layer")


def test_inputs_are_trees_too():
    """Token ids beside a mask, as text models take them."""
    def read(params, head, inputs):
        ids, mask = inputs["ids"], inputs["mask"].astype(jnp.float32)
        table = params["fc"]["weight"]
        mean = (table[ids] * mask[..., None]).sum(1) / mask.sum(1, keepdims=True)
        return jnp.tanh(mean) @ head
    tasks = {task: (head[:3], {"ids": RNG.integers(0, 4, (12, 5)), "mask": np.ones((12, 5), np.int32)})
             for task, (head, _) in TASKS.items()}
    made = adamerging.adapt(read, THETA, HELD, tasks, steps=2, batch=4)
    assert np.isfinite(made.losses).all() and set(made.coefficients) == {"fc.weight", "fc.bias"}
