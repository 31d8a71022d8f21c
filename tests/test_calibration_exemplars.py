"""Exemplar gradients and Fisher diagonals against plain loops, label-free losses, files, and what is refused."""
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tvjax import merging
from tvjax.calibration import exemplars
from tvjax.calibration.exemplars import Exemplars, draw, exemplar_gradients, fisher_diagonals

pytestmark = pytest.mark.usefixtures("quick_compilation")

RNG = np.random.default_rng(0)
THETA = {"fc": {"weight": RNG.standard_normal((4, 3)).astype(np.float32)}}


def predict(params, head, inputs):
    return jnp.tanh(inputs @ params["fc"]["weight"].T) @ head


def some(classes, count=6):
    head = jnp.asarray(RNG.standard_normal((4, classes)), jnp.float32)
    return Exemplars(head, RNG.standard_normal((count, 3)).astype(np.float32), RNG.integers(0, classes, count))


TASKS = {"a": some(3), "b": some(5)}


def plain_loss(theta, one, i, loss):
    log_p = jax.nn.log_softmax(predict(theta, one.head, one.inputs[i : i + 1])[0])
    return -log_p[one.labels[i]] if loss == "cross_entropy" else -(jnp.exp(log_p) * log_p).sum()


@pytest.mark.parametrize("loss", ["cross_entropy", "entropy"])
def test_gradients_are_those_of_a_loop(loss):
    made = {how: exemplar_gradients(predict, THETA, TASKS, loss=loss, reduce=how)["fc"]["weight"]
            for how in ("mean_abs", "abs_mean", "mean")}
    for t, one in enumerate(TASKS.values()):
        slope = jax.grad(lambda theta, i, one=one: plain_loss(theta, one, i, loss))
        each = np.stack([slope(THETA, i)["fc"]["weight"] for i in range(6)])
        np.testing.assert_allclose(made["mean_abs"][t], np.abs(each).mean(0), atol=1e-6)
        np.testing.assert_allclose(made["abs_mean"][t], np.abs(each.mean(0)), atol=1e-6)
        np.testing.assert_allclose(made["mean"][t], each.mean(0), atol=1e-6)


def test_the_entropy_needs_no_labels_and_feeds_the_algebra():
    blind = {task: one._replace(labels=None) for task, one in TASKS.items()}
    made = exemplar_gradients(predict, THETA, blind, loss="entropy")
    np.testing.assert_array_equal(made["fc"]["weight"], exemplar_gradients(predict, THETA, TASKS, loss="entropy")["fc"]
                                  ["weight"])
    taus = {"fc": {"weight": RNG.standard_normal((2, 4, 3)).astype(np.float32)}}
    assert np.count_nonzero(merging.tatr(quantile=0.5)(taus, gradients=made)["fc"]["weight"]) == 6


def test_fisher_is_the_mean_of_squares_at_each_models_own_parameters():
    thetas = {"a": THETA, "b": jax.tree.map(lambda x: 2 * x, THETA)}
    made = fisher_diagonals(predict, thetas, TASKS, loss="cross_entropy")["fc"]["weight"]
    for t, (task, one) in enumerate(TASKS.items()):
        slope = jax.grad(lambda theta, i, one=one: plain_loss(theta, one, i, "cross_entropy"))
        each = np.stack([slope(thetas[task], i)["fc"]["weight"] for i in range(6)])
        np.testing.assert_allclose(made[t], (each**2).mean(0), atol=1e-6)
    drawn = fisher_diagonals(predict, thetas, TASKS)["fc"]["weight"]
    np.testing.assert_array_equal(drawn, fisher_diagonals(predict, thetas, TASKS)["fc"]["weight"])
    assert drawn.min() >= 0 and np.abs(drawn - made).max() > 1e-4


def test_sampled_labels_approach_the_exact_fisher():
    """Over many copies of one input: Σ_y p(y)(∇ log p(y))²."""
    one = Exemplars(TASKS["a"].head, np.repeat(TASKS["a"].inputs[:1], 4000, 0))
    made = fisher_diagonals(predict, {"a": THETA}, {"a": one})["fc"]["weight"][0]
    log_p = lambda theta, y: jax.nn.log_softmax(predict(theta, one.head, one.inputs[:1])[0])[y]
    exact = sum(np.exp(log_p(THETA, y)) * jax.grad(log_p)(THETA, y)["fc"]["weight"] ** 2 for y in range(3))
    np.testing.assert_allclose(made, exact, atol=0.05 * exact.max())


def test_draws_are_functions_of_seed_and_task():
    inputs, labels = np.arange(20), np.arange(20)
    one = lambda **given: draw(inputs, labels, count=5, **given)[1].tolist()
    assert one(task="a") == one(task="a") != one(task="b") and one(task="a", seed=1) != one(task="a")
    assert len(set(one(task="a"))) == 5


def test_files_keep_order_and_say_what_they_hold(tmp_path):
    made = exemplar_gradients(predict, THETA, TASKS)
    path = tmp_path / "gradients.safetensors"
    exemplars.save_stack(made, path, tasks=TASKS, loss="cross_entropy")
    np.testing.assert_array_equal(exemplars.load_stack(path)["fc"]["weight"], made["fc"]["weight"])
    turned = exemplars.load_stack(path, tasks=["b", "a"])
    np.testing.assert_array_equal(turned["fc"]["weight"], made["fc"]["weight"][::-1])
    with pytest.raises(ValueError, match="holds nothing of c; it has a, b"):
        exemplars.load_stack(path, tasks=["a", "c"])


@pytest.mark.parametrize("change, message", [
    ({"labels": None}, "the exemplars of a have no labels, which loss='cross_entropy' needs; loss='entropy' goes"),
    ({"labels": np.full(6, 3)}, "the exemplars of a hold the label 3, but its head has the classes 0 … 2"),
    ({"inputs": np.full((6, 3), np.nan, np.float32)}, "the gradient is not finite in fc.weight"),
    ({"inputs": np.zeros((0, 3), np.float32), "labels": np.zeros(0, int)}, "there are no examples"),
])
def test_exemplars_that_cannot_be_used_get_one_sentence(change, message):
    with pytest.raises(ValueError, match=message):
        exemplar_gradients(predict, THETA, {"a": TASKS["a"]._replace(**change)})


def test_slips_get_one_sentence():
    with pytest.raises(ValueError, match="no loss 'entropie'; did you mean 'entropy'"):
        exemplar_gradients(predict, THETA, TASKS, loss="entropie")
    with pytest.raises(ValueError, match="7 exemplars of a are asked for; there are 6"):
        draw(*TASKS["a"][1:], count=7, task="a")
    with pytest.raises(ValueError, match="there are exemplars of b but no parameters"):
        fisher_diagonals(predict, {"a": THETA}, TASKS)
