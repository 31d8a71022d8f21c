"""Any apply(params, x) will do: fine-tuned, subtracted, merged, judged, whatever library its parameters come from."""
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tvjax import evaluation, merging, training, tree, vectors

pytestmark = pytest.mark.usefixtures("quick_compilation")
WIDTH, FEATURES = 6, 4
HEADS = {"a": np.eye(FEATURES, dtype=np.float32)[:, :2], "b": np.eye(FEATURES, dtype=np.float32)[:, 2:]}
RECIPE = training.Recipe(steps=12, batch=64, lr=0.05, warmup=2, weight_decay=0.0)


def plain():
    """Functions over a dict."""
    rng = np.random.default_rng(0)
    params = {"in": {"weight": rng.normal(size=(WIDTH, 8)).astype(np.float32) / 3},
              "out": {"weight": rng.normal(size=(8, FEATURES)).astype(np.float32) / 9}}
    return params, lambda p, x: jnp.tanh(x @ p["in"]["weight"]) @ p["out"]["weight"]


def linen():
    import flax.linen as nn
    model = nn.Sequential([nn.Dense(8), jnp.tanh, nn.Dense(FEATURES)])
    params = model.init(jax.random.key(0), jnp.ones((1, WIDTH)))["params"]
    return params, lambda p, x: model.apply({"params": p}, x)


def nnx():
    from flax import nnx

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.first, self.second = nnx.Linear(WIDTH, 8, rngs=rngs), nnx.Linear(8, FEATURES, rngs=rngs)

        def __call__(self, x):
            return self.second(jnp.tanh(self.first(x)))

    graph, state = nnx.split(Net(nnx.Rngs(0)))
    return nnx.to_pure_dict(state), lambda p, x: nnx.merge(graph, p)(x)


def equinox():
    eqx = pytest.importorskip("equinox")
    model = eqx.nn.MLP(WIDTH, FEATURES, 8, 1, activation=jnp.tanh, key=jax.random.key(0))
    params, static = eqx.partition(model, eqx.is_inexact_array)
    return params, lambda p, x: jax.vmap(eqx.combine(p, static))(x)


def data(task, count=64):
    """Task a asks for the sign of the first number, task b for that of the second."""
    x = np.random.default_rng(1 if task == "a" else 2).normal(size=(count, WIDTH)).astype(np.float32)
    return x, (x[:, 0 if task == "a" else 1] > 0).astype(np.int32)


@pytest.mark.parametrize("make", [plain, linen, nnx, equinox])
def test_fine_tune_merge_evaluate(make):
    theta0, apply = make()
    predict = lambda params, head, x: apply(params, x) @ head
    loss = lambda params, batch, key, head: training.cross_entropy(predict(params, head, batch[0]), batch[1])
    thetas = [training.fit(loss, theta0, functools.partial(training.batches, data(task), batch=64, seed=0), RECIPE,
                           frozen=HEADS[task]).params for task in HEADS]
    assert jax.tree.structure(thetas[0]) == jax.tree.structure(theta0)
    judge = lambda params: [evaluation.accuracy(predict, params, HEADS[task], data(task), batch=64) for task in HEADS]
    tuned = [judge(theta)[i] for i, theta in enumerate(thetas)]
    assert min(tuned) > 0.85

    taus = [vectors.task_vector(theta, theta0) for theta in thetas]
    added = vectors.add(theta0, sum(taus))
    merged = merging.merge(merging.task_arithmetic(scale=1.0), thetas, theta0)
    assert jax.tree.structure(merged) == jax.tree.structure(added) == jax.tree.structure(theta0)
    for name, leaf in tree.flatten(merged).items():
        np.testing.assert_allclose(leaf, tree.flatten(added)[name], rtol=1e-6, atol=1e-6)
    assert np.mean(judge(merged)) > np.mean(judge(theta0)) + 0.1
    forgot = judge(vectors.add(theta0, taus[0], scale=-1.0))
    assert forgot[0] < tuned[0] - 0.3
