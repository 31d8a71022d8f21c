"""DARE and DELLA against plain loops over the same draws."""
import jax.numpy as jnp
import numpy as np
import pytest

from tvjax import merging, tree
from tvjax.merging.draws import uniform
from tvjax.merging.dropping import relative_ranks
from tvjax.merging.plan import hashed

TASKS = ["mnist", "cars", "svhn"]
RNG = np.random.default_rng(0)
TAUS = {"w": RNG.standard_normal((3, 6, 10)).astype(np.float32), "b": RNG.standard_normal((3, 7)).astype(np.float32)}


def draws(seed):
    """The uniform numbers of each entry, from the names of leaves and tasks alone."""
    names = np.array([hashed(task) for task in TASKS], np.uint32)
    return {leaf: np.asarray(uniform(seed, hashed(leaf), names, 0, x.shape, jnp.float32)) for leaf, x in TAUS.items()}


def dropped(x, kept, probability, rescale):
    """Step by step as in the papers: mask, then rescale."""
    out = np.where(kept, x, 0).astype(np.float64)
    if rescale == "inverse":
        return out / probability
    if rescale == "l1":
        for t in range(len(x)):
            out[t] *= np.abs(x[t]).sum() / np.abs(out[t]).sum()
    return out


@pytest.mark.parametrize("rescale", ["inverse_density", "l1", "none"])
def test_dare_is_its_loop(rescale):
    got = merging.dare(density=0.4, scale=0.7, seed=5, rescale=rescale)(TAUS, tasks=TASKS)
    for leaf, u in draws(5).items():
        expected = 0.7 * dropped(TAUS[leaf], u < 0.4, 0.4, rescale.partition("_")[0]).sum(0)
        np.testing.assert_allclose(got[leaf], expected, rtol=1e-5, atol=1e-6)


def test_dare_ties_elects_among_what_is_left():
    got = merging.dare_ties(density=0.6, seed=1)(TAUS, tasks=TASKS)
    for leaf, u in draws(1).items():
        x = dropped(TAUS[leaf], u < 0.6, 0.6, "inverse")
        agree = np.where(x * np.sign(x.sum(0)) > 0, x, 0)
        np.testing.assert_allclose(got[leaf], agree.sum(0) / np.maximum((agree != 0).sum(0), 1), rtol=1e-5, atol=1e-6)


def keep_probabilities(x, density, epsilon):
    """DELLA's, row by row: from density − ε for the smallest to density + ε for the largest."""
    probability = np.empty(x.shape)
    for t in range(len(x)):
        rows = x[t].reshape(-1, x.shape[-1])
        for i, row in enumerate(rows):
            order = np.argsort(np.abs(row))
            for rank, j in enumerate(order):
                probability[t].reshape(rows.shape)[i, j] = density - epsilon + 2 * epsilon * rank / (len(row) - 1)
    return probability


@pytest.mark.parametrize("rescale", ["inverse_probability", "l1", "none"])
def test_della_is_its_loop(rescale):
    operator = merging.della_linear(density=0.5, epsilon=0.2, scale=1.0, seed=3, rescale=rescale)
    got = operator(TAUS, tasks=TASKS)
    for leaf, u in draws(3).items():
        probability = keep_probabilities(TAUS[leaf], 0.5, 0.2)
        expected = dropped(TAUS[leaf], u < probability, probability, rescale.partition("_")[0]).sum(0)
        np.testing.assert_allclose(got[leaf], expected, rtol=1e-5, atol=1e-6)


def test_ranks_of_equals_and_of_one_entry():
    constant, alone = jnp.ones((1, 2, 4)), jnp.ones((1, 3, 1))
    np.testing.assert_array_equal(relative_ranks(constant), 0.5 * constant)
    np.testing.assert_array_equal(relative_ranks(alone), 0.5 * alone)
    np.testing.assert_allclose(relative_ranks(jnp.array([[2.0, 1.0, 1.0, 5.0, 0.0]])), [[0.75, 0.375, 0.375, 1.0, 0.0]])


def test_draws_follow_the_names_of_tasks():
    order = [2, 0, 1]
    turned = merging.dare(density=0.5)({k: x[order] for k, x in TAUS.items()}, tasks=[TASKS[i] for i in order])
    straight = merging.dare(density=0.5)(TAUS, tasks=TASKS)
    tree_close = lambda a, b: [np.testing.assert_allclose(a[k], b[k], rtol=1e-6, atol=1e-6) for k in tree.flatten(a)]
    tree_close(turned, straight)
    other = merging.dare(density=0.5, seed=1)(TAUS, tasks=TASKS)
    assert np.abs(other["w"] - straight["w"]).max() > 0.1


def test_what_is_kept_is_right_on_average():
    ones = {"w": np.ones((1, 100, 100), np.float32)}
    for operator in (merging.drop(density=0.3), merging.drop_by_rank(density=0.3, epsilon=0.1)):
        made = np.asarray(operator(ones)["w"])
        assert abs(made.mean() - 1) < 0.05 and abs((made != 0).mean() - 0.3) < 0.02
    np.testing.assert_allclose(np.asarray(merging.drop(density=0.3, rescale="l1")(ones)["w"]).mean(), 1, rtol=1e-5)


def test_a_leaf_of_which_nothing_is_left_stays_zero():
    tiny = {"w": np.ones((2, 1), np.float32)}
    made = np.asarray(merging.drop(density=1e-6, rescale="l1")(tiny)["w"])
    np.testing.assert_array_equal(made, 0)


@pytest.mark.parametrize("density, epsilon", [(0.9, 0.15), (0.1, 0.15), (0.5, -0.1)])
def test_epsilon_keeps_probabilities_between_0_and_1(density, epsilon):
    with pytest.raises(ValueError, match=r"epsilon lies in \[0, min\(density, 1 - density\)\]; got"):
        merging.della(density=density, epsilon=epsilon)
