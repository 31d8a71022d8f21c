"""Mixtures of task vectors: the affine way gives what the plain way gives, at the price of one pass."""
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tvjax import evaluation, tree, vectors
from tvjax.evaluation import gradient_free, mixtures

pytestmark = pytest.mark.usefixtures("quick_compilation")
DRAW = np.random.default_rng(0).standard_normal
some = lambda *shape: DRAW(shape, np.float32)


def encode(params, x):
    return jnp.tanh(x @ params["a"]) @ params["b"]


THETA0 = {"a": some(3, 5), "b": some(5, 4)}
TAUS = [vectors.TaskVector({"a": 0.3 * some(3, 5), "b": 0.3 * some(5, 4)}) for _ in range(2)]
HEADS = [some(4, 3), some(4, 6)]
SPLITS = [(some(11, 3), np.arange(11) % 3), (some(7, 3), np.arange(7) % 6)]
GRID = [-1.0, 0.0, 0.7, 2.0]
COEFFICIENTS = np.array([[0, 0], [1, 0], [0.5, -2.0], [1, 1]], np.float32)


@pytest.fixture(params=[False, True], ids=["standard", "tangent"])
def way(request):
    """(family, predict and place of the plain way)"""
    place = evaluation.paired if request.param else evaluation.shifted
    predict = (evaluation.classify_linearised if request.param else evaluation.classify)(encode)
    return mixtures.family(encode, THETA0, linear=request.param), predict, place


def test_answers_are_those_of_each_model_alone(way):
    family, predict, place = way
    for head, split in zip(HEADS, SPLITS, strict=True):
        found = mixtures.mixtures(family, TAUS, COEFFICIENTS, head, split, batch=4)
        for row, (a, b) in enumerate(COEFFICIENTS):
            params = evaluation.combined(THETA0, *TAUS, float(a), float(b), place=place)
            np.testing.assert_array_equal(found.classes[row], evaluation.predictions(predict, params, head, split[0]))
            logits = np.asarray(predict(params, head, split[0]))
            expected = np.log(np.exp(logits).sum(-1)) - logits[np.arange(len(logits)), split[1]]
            np.testing.assert_allclose(found.losses[row], expected, rtol=2e-5, atol=2e-5)


def test_passes_do_not_grow_with_the_mixtures_where_features_are_affine(way):
    family, *_ = way
    found = mixtures.mixtures(family, TAUS, COEFFICIENTS, HEADS[0], SPLITS[0])
    assert found.passes == (3 if family.slopes else 4)


def test_a_sweep_of_alpha_is_the_plain_one(way):
    family, predict, place = way
    plain = evaluation.sweep(predict, THETA0, TAUS[0], GRID, {"a": (HEADS[0], SPLITS[0])}, place=place)
    found = mixtures.mixture_accuracy(family, TAUS[:1], np.array(GRID)[:, None], HEADS[0], SPLITS[0])
    np.testing.assert_allclose(found, [one["a"] for one in plain], atol=1e-9)


def test_the_plane_of_two_vectors_is_the_plain_map(way):
    family, predict, place = way
    data = list(zip(HEADS, SPLITS, strict=True))
    found = mixtures.plane(family, *TAUS, *data, GRID)
    plain = evaluation.disentanglement(predict, THETA0, *TAUS, *[(h, x) for h, (x, _) in data], GRID, place=place)
    np.testing.assert_allclose(found.xi, plain, atol=1e-9)
    assert found.xi[1, 1] == 0 and found.losses[0].shape == (4, 4)
    alone = mixtures.mixtures(family, TAUS, [[0.7, 2.0]], *data[1])
    assert found.losses[1][2, 3] == pytest.approx(float(alone.losses.mean()), rel=1e-5)


def test_a_logit_that_is_no_number_is_no_answer():
    family = mixtures.family(lambda params, x: x * params, np.ones((1, 2), np.float32))
    found = mixtures.mixtures(family, np.array([[[np.nan, 0]]], np.float32), [[1.0]], jnp.eye(2),
                              (np.ones((1, 2), np.float32), np.array([0])))
    assert found.classes.tolist() == [[-1]]


def test_rows_that_do_not_fit_the_tasks_are_a_sentence():
    with pytest.raises(ValueError, match=r"there are 2 tasks, and rows of shape \(3,\)"):
        mixtures.mixtures(mixtures.family(encode, THETA0), TAUS, np.zeros((1, 3)), HEADS[0], SPLITS[0])


def test_slopes_are_an_argument_not_a_constant():
    family = mixtures.family(encode, THETA0, linear=True)
    made = jax.make_jaxpr(family.slopes)(THETA0, tree.stack(TAUS), SPLITS[0][0])
    assert sum(np.size(x) for x in made.consts) == 0


# ---------------------------------------------------------------- without gradients
@pytest.mark.parametrize("size", [1, 3])
def test_a_minimum_is_found_within_the_budget(size):
    pytest.importorskip("cma")
    asked = []

    def objective(x):
        asked.append(x)
        return float(np.abs(x - 1.2).sum())
    found = gradient_free.minimise(objective, np.zeros(size), bounds=(-1.5, 1.5), budget=41, seed=3)
    assert len(asked) == len(found.trace) == 41 and (asked[0] == 0).all()
    assert all((np.abs(x) <= 1.5).all() and x.shape == (size,) for x in asked)
    assert found.value == min(value for _, value in found.trace) < objective(np.zeros(size))
    again = gradient_free.minimise(objective, np.zeros(size), bounds=(-1.5, 1.5), budget=41, seed=3)
    np.testing.assert_array_equal(found.best, again.best)


def test_values_that_are_no_numbers_lose():
    pytest.importorskip("cma")
    found = gradient_free.minimise(lambda x: np.nan if x[0] < 0 else float(x[0]), np.ones(2), bounds=(-2, 2), budget=20)
    assert found.value >= 0


def test_a_budget_of_nothing_is_a_sentence():
    with pytest.raises(ValueError, match="at least 1 evaluation"):
        gradient_free.minimise(np.sum, np.zeros(2), bounds=(-1, 1), budget=0)
