"""Per-example gradients against a plain loop, over chunks, devices and reductions; bad input."""
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tvjax import calibration

pytestmark = pytest.mark.usefixtures("quick_compilation")
RNG = np.random.default_rng(0)
PARAMS = {"layers": {"0": {"weight": RNG.normal(size=(4, 3)).astype(np.float32)},
                     "1": {"weight": RNG.normal(size=(2, 4)).astype(np.float32)}}}
X = RNG.normal(size=(13, 3)).astype(np.float32)
HEAD = RNG.normal(size=2).astype(np.float32)


def output(params, example, head):
    hidden = jnp.tanh(params["layers"]["0"]["weight"] @ example)
    return head @ (params["layers"]["1"]["weight"] @ hidden)


def by_loop(finish):
    grads = [jax.grad(output)(PARAMS, x, HEAD) for x in X]
    return finish([np.asarray(jax.tree.leaves(g)[0], np.float64) for g in grads])


LOOPS = {
    "mean_abs": lambda grads: np.mean([np.abs(g) for g in grads], 0),
    "mean_square": lambda grads: np.mean([g**2 for g in grads], 0),
    "mean": lambda grads: np.mean(grads, 0),
    "abs_mean": lambda grads: np.abs(np.mean(grads, 0)),
}


@pytest.mark.parametrize("reduce", LOOPS)
def test_reductions_are_those_of_a_loop(reduce):
    found = calibration.reduced(output, PARAMS, X, HEAD, reduce=reduce)
    np.testing.assert_allclose(jax.tree.leaves(found)[0], by_loop(LOOPS[reduce]), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("more", [{"budget": 80}, {"budget": 200}, {"chunk": 1}])
def test_chunks_change_nothing(more):
    """80 bytes are the gradient of one example."""
    whole = calibration.reduced(output, PARAMS, X, HEAD, reduce="mean_square")
    parts = calibration.reduced(output, PARAMS, X, HEAD, reduce="mean_square", **more)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), whole, parts)


def test_a_square_of_the_mean_is_something_else():
    square = calibration.reduced(output, PARAMS, X, HEAD, reduce="mean_square")
    mean = calibration.reduced(output, PARAMS, X, HEAD, reduce="mean")
    assert float(jnp.abs(square["layers"]["0"]["weight"] - mean["layers"]["0"]["weight"] ** 2).max()) > 0.1


def test_fewer_examples_than_groups():
    one = calibration.reduced(output, PARAMS, X[:1], HEAD, reduce="mean")
    want = jax.grad(output)(PARAMS, X[0], HEAD)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), one, want)


def test_low_precision_is_summed_in_float32():
    half = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), PARAMS)
    found = calibration.reduced(output, half, X.astype(jnp.bfloat16), HEAD.astype(jnp.bfloat16), reduce="mean_abs")
    assert {x.dtype for x in jax.tree.leaves(found)} == {jnp.dtype(jnp.float32)}


def test_inputs_stay_as_they_are():
    params, before = jax.tree.map(jnp.array, PARAMS), jax.tree.map(np.array, PARAMS)
    calibration.reduced(output, params, X, HEAD, reduce="mean")
    jax.tree.map(np.testing.assert_array_equal, params, before)


@pytest.mark.parametrize("more, sentence", [
    ({"budget": 79}, "a budget of 79 bytes does not hold the gradient of one example, 80 bytes"),
    ({"reduce": "mean_square_root"}, "did you mean 'mean_square'"),
    ({"examples": X[:0]}, "there are no examples to calibrate on"),
    ({"examples": (X, X[:2])}, "arrays of examples have one common length; here are 2, 13"),
    ({"examples": X * np.inf}, r"not finite in layers\.0\.weight"),
    ({"params": {}}, "no parameter to take a gradient by"),
])
def test_slips_are_one_sentence(more, sentence):
    more = {"reduce": "mean", "params": PARAMS, "examples": X} | more
    params, examples = more.pop("params"), more.pop("examples")
    with pytest.raises(ValueError, match=sentence):
        calibration.reduced(output, params, examples, HEAD, **more)
