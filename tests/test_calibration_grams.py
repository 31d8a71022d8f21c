"""Gram matrices against the inputs recomputed by hand, streaming, and RegMean++ against a sequential loop."""
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tvjax import merging, tree, vectors
from tvjax.calibration import grams
from tvjax.models import clip
from tvjax.models.layers import Linear

pytestmark = pytest.mark.usefixtures("quick_compilation")


class Two(nn.Module):
    """h = tanh(first(x)), second(h), each in a block of its own, then a head that is used twice."""

    @nn.compact
    def __call__(self, x):
        for i in (0, 1):
            x = jnp.tanh(Linear(4, name=f"layers_{i}")(x))
        head = Linear(3, name="head")
        return head(x) + head(2 * x)


def apply(params, x):
    return Two().apply({"params": params}, x)


X = np.random.default_rng(0).standard_normal((10, 5)).astype(np.float32)
PARAMS = Two().init(jax.random.key(0), jnp.asarray(X))["params"]


def test_grams_are_means_over_all_inputs_of_a_layer():
    made = grams.collect(apply, PARAMS, [X[:4], X[4:8], X[8:]])
    hidden = [X]
    for i in (0, 1):
        layer = jax.tree.map(np.asarray, PARAMS[f"layers_{i}"])
        hidden.append(np.tanh(hidden[-1] @ layer["weight"].T + layer["bias"]))
    expected = {f"layers_{i}.weight": hidden[i].T @ hidden[i] / 10 for i in (0, 1)}
    expected["head.weight"] = (1 + 4) * hidden[2].T @ hidden[2] / 20
    assert set(made) == set(expected)
    for name, gram in expected.items():
        np.testing.assert_allclose(made[name], gram, atol=1e-5)
    assert grams.linear_weights(apply, PARAMS, X) == ["layers_0.weight", "layers_1.weight", "head.weight"]


def test_every_matrix_of_a_transformer_is_seen_but_its_positions():
    spec = clip.Spec(vision=clip.VisionSpec(8, 16, 1, 2, image_size=4, patch=2), text=None, projection_dim=4)
    model = clip.CLIP(spec)
    theta0 = jax.eval_shape(lambda key: clip.init(model, key), jax.random.key(0))
    seen = grams.linear_weights(clip.image_features(model), theta0, jax.ShapeDtypeStruct((3, 4, 4, 3), jnp.float32))
    matrices = [name for name, x in tree.flatten(theta0).items() if x.ndim == 2 and "position" not in name]
    assert sorted(seen) == sorted(matrices)


def test_regmean_plus_plus_goes_block_by_block():
    taus = {task: jax.tree.map(lambda x, k=k: 0.3 * np.random.default_rng(k).standard_normal(x.shape).astype("f4"),
                               PARAMS) for k, task in enumerate("ab")}
    batches = {"a": [X[:5]], "b": [X[5:]]}
    made = tree.flatten(grams.regmean_plus_plus(apply, PARAMS, taus, batches))
    flat = {task: dict(tree.flatten(tau)) for task, tau in taus.items()}
    for name in ("layers_0.bias", "layers_1.bias", "head.bias"):
        mean = (flat["a"][name] + flat["b"][name]) / 2
        np.testing.assert_allclose(made[name], mean, atol=1e-6)
        flat["a"][name] = flat["b"][name] = mean
    for name in ("layers_0.weight", "layers_1.weight", "head.weight"):
        theta = {task: vectors.add(PARAMS, tree.unflatten(one)) for task, one in flat.items()}
        gram = np.stack([grams.collect(apply, theta[task], batches[task])[name] for task in "ab"])
        solved = merging.regmean()({"w": np.stack([flat["a"][name], flat["b"][name]])}, gram={"w": gram})["w"]
        np.testing.assert_allclose(made[name], solved, atol=1e-4)
        flat["a"][name] = flat["b"][name] = solved


def test_what_cannot_be_collected_gets_one_sentence():
    with pytest.raises(ValueError, match="no batches"):
        grams.collect(apply, PARAMS, [])
    with pytest.raises(ValueError, match="no linear layer with a matrix `weight`"):
        grams.collect(lambda params, x: x * params["w"], {"w": jnp.ones(())}, [X])
