"""ξ from its definition, its zeros where the theory has them, and its cost in programs."""
import jax.numpy as jnp
import numpy as np
import pytest

from tvjax import evaluation, vectors
from tvjax.evaluation import disagreement, disentanglement, disentanglement_pairs, top1

RNG = np.random.default_rng(1)
GRID = [-1.0, 0.0, 0.5]


def floats(*shape):
    return RNG.normal(size=shape).astype(np.float32)


def predict(params, head, images):
    return jnp.tanh(images @ params["w"]) @ head


THETA0, TAUS = {"w": floats(6, 8)}, [{"w": floats(6, 8)} for _ in range(3)]
DATA = [(floats(8, classes), floats(examples, 6)) for classes, examples in ((3, 20), (5, 31), (4, 9))]


def answers(params, data):
    head, images = data
    return np.asarray(predict(params, head, images)).argmax(1)


def test_the_worked_example():
    first = disagreement([0, 1, 2, 1], [0, 2, 2, 1])
    second = disagreement([1, 1, 0], [1, 0, 1])
    assert first + second == pytest.approx(0.916667, abs=1e-6)
    with pytest.raises(ValueError, match="as many predictions"):
        disagreement([0, 1], [0])


def test_the_map_is_its_definition():
    found = disentanglement(predict, THETA0, *TAUS[:2], *DATA[:2], GRID, batch=8)
    for i, a in enumerate(GRID):
        for j, b in enumerate(GRID):
            one, two = vectors.add(THETA0, TAUS[0], scale=a), vectors.add(THETA0, TAUS[1], scale=b)
            both = vectors.add(one, TAUS[1], scale=b)
            pairs = zip((one, two), DATA[:2], strict=True)
            expected = sum((answers(params, data) != answers(both, data)).mean() for params, data in pairs)
            assert found[i, j] == pytest.approx(expected, abs=1e-12)
    assert found.shape == (3, 3) and found[1, 1] == 0 and 0 < found.max() <= 2


def test_each_term_vanishes_on_its_axis():
    none = {"w": np.zeros((6, 8), np.float32)}
    one_class = np.ones((8, 1), np.float32), DATA[1][1]  # nothing disturbs a task of one class
    assert not disentanglement(predict, THETA0, TAUS[0], none, DATA[0], one_class, GRID).any()


def test_a_linear_model_with_disjoint_supports_is_disentangled():
    """Task 1 sees and changes the first features only, task 2 the others."""
    linear = lambda params, head, images: images @ params["w"]
    first, second = np.zeros((6, 4), np.float32), np.zeros((6, 4), np.float32)
    first[:3], second[3:] = floats(3, 4), floats(3, 4)
    images1, images2 = floats(30, 6), floats(30, 6)
    images1[:, 3:], images2[:, :3] = 0, 0
    theta0 = {"w": floats(6, 4)}
    found = disentanglement(linear, theta0, {"w": first}, {"w": second}, (None, images1), (None, images2), GRID)
    assert not found.any()


def test_two_programs_make_the_map():
    mine = lambda params, head, images: predict(params, head, images)
    before = top1._answers._cache_size(), evaluation.combined._cache_size()
    disentanglement(mine, THETA0, *TAUS[:2], *DATA[:2], GRID, batch=8)
    assert (top1._answers._cache_size(), evaluation.combined._cache_size()) <= (before[0] + 1, before[1] + 1)


def test_pairs_are_their_definition():
    scales = [1.0, 0.5, 2.0]
    found = disentanglement_pairs(predict, THETA0, TAUS, DATA, scales=scales, batch=8)
    for i in range(3):
        alone = vectors.add(THETA0, TAUS[i], scale=scales[i])
        for j in range(3):
            both = vectors.add(alone, TAUS[j], scale=scales[j])
            expected = 0.0 if i == j else (answers(alone, DATA[i]) != answers(both, DATA[i])).mean()
            assert found[i, j] == pytest.approx(expected, abs=1e-12)
    assert evaluation.off_diagonal_mean(found) == pytest.approx(found.sum() / 6) and not np.array_equal(found, found.T)


def test_pairs_need_as_many_of_everything():
    with pytest.raises(ValueError, match="got 3 task vectors, 2 data sets, 3 scales"):
        disentanglement_pairs(predict, THETA0, TAUS, DATA[:2])
    with pytest.raises(ValueError, match="square matrix"):
        evaluation.off_diagonal_mean(np.ones((2, 3)))


def test_the_linearised_map_uses_the_same_function():
    encode = lambda params, images: jnp.tanh(images @ params["w"])
    linear = evaluation.classify_linearised(encode)
    found = disentanglement(linear, THETA0, *TAUS[:2], *DATA[:2], [0.0, 0.5], place=evaluation.paired)
    assert found[0, 0] == 0 and found.shape == (2, 2)
