"""tvjax.learning.tip and lpp: formulas at the start and in training, alone and with task vectors."""
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import toy_tasks as toy
from tvjax import evaluation, learning
from tvjax.learning import Scheme, lpp, tip, ways

pytestmark = pytest.mark.usefixtures("quick_compilation")
BASE = toy.theta0()
TAU = toy.vector(1, BASE)
HEAD, SPLIT = toy.task(BASE, TAU, 10)
FEW, VAL = (tuple(x[rows] for x in SPLIT) for rows in (slice(0, 24), slice(24, 48)))
WAY = ways.scaled(toy.PREDICT, BASE, learning.pool([TAU, toy.vector(2, BASE)], BASE), Scheme())


def features(split):
    return tip.features(WAY, BASE, split[0], width=toy.WIDTH, batch=16)


def test_features_are_those_of_the_head():
    np.testing.assert_allclose(features(SPLIT) @ np.asarray(HEAD), toy.PREDICT(BASE, HEAD, SPLIT[0]), rtol=1e-4,
                               atol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(features(SPLIT), axis=1), 1, rtol=1e-5)


def test_tip_formula_entry_by_entry():
    cached, f = features(FEW), features(VAL)
    adapter = {"cache": jnp.asarray(cached), "beta": jnp.array([1.5, 0.7])}
    onehot = jax.nn.one_hot(FEW[1], toy.CLASSES)
    found = tip.logits(adapter, jnp.asarray(f), jnp.asarray(f) @ HEAD, onehot)
    wanted = f @ np.asarray(HEAD)
    for i, row in enumerate(f):
        for key, label in zip(cached, FEW[1], strict=True):
            wanted[i, label] += 0.7 * np.exp(-1.5 * (1 - row @ key))
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


def test_tip_starts_from_the_cache_and_the_papers_betas():
    adapter = tip.start(3 * features(FEW))
    np.testing.assert_allclose(adapter["cache"], features(FEW), rtol=1e-5)
    assert adapter["beta"].tolist() == [1.0, 2.0]


def test_tip_alone_trains_and_moves_beta_faster_than_the_cache():
    found = tip.alone(features(FEW), FEW[1], HEAD, (features(VAL), VAL[1]),
                      course=dataclasses.replace(tip.ALONE, epochs=15, batch=24))
    assert found.losses[-1] < found.losses[0] and found.verdict.value >= found.trace[0].value
    moved = tip.alone(features(FEW), FEW[1], HEAD, None, course=dataclasses.replace(tip.ALONE, epochs=15, batch=24))
    start = tip.start(features(FEW))
    assert np.abs(moved.params["beta"] - start["beta"]).max() > 10 * np.abs(moved.params["cache"]
                                                                             - start["cache"]).max()


def test_tip_joint_trains_coefficients_and_adapter():
    found = tip.joint(WAY, HEAD, FEW, VAL, course=dataclasses.replace(tip.JOINT, epochs=2, batch=12), augment="none")
    both = tip.joint_way(WAY, HEAD, FEW, batch=16)
    at = lambda params: evaluation.accuracy(both.predict, ways.model(both, params), HEAD, VAL)
    assert at(found.params) == found.verdict.value >= at(both.start)
    assert found.losses[-1] < found.losses[0]
    if found.epoch:
        assert all(np.abs(c).max() > 0 for c in found.params["way"].values())


def test_lpp_start_is_the_papers():
    f = features(FEW)
    probe, rates = lpp.start(f, FEW[1], HEAD)
    t = np.asarray(HEAD) / np.linalg.norm(HEAD, axis=0)
    for c in range(toy.CLASSES):
        np.testing.assert_allclose(probe.weights[:, c], f[FEW[1] == c].sum(0), rtol=1e-4, atol=1e-5)
    means = [(f[FEW[1] == c] @ t[:, c]).mean() for c in range(toy.CLASSES)]
    np.testing.assert_allclose(probe.alpha, 250 * np.mean(means), rtol=1e-4)
    np.testing.assert_allclose(rates.weights, 4 * len(f) / np.linalg.eigvalsh(f.T @ f).max(), rtol=1e-4)
    np.testing.assert_allclose(rates.alpha, len(f) / (4 * ((f @ t) ** 2).sum(0).max()), rtol=1e-4)
    np.testing.assert_allclose(lpp.logits(probe, f), f @ probe.weights + probe.alpha[None] * (f @ t), rtol=1e-4,
                               atol=1e-4)


def test_lpp_is_descent_with_its_rates():
    f, labels = features(FEW), FEW[1]
    probe, rates = lpp.start(f, labels, HEAD)
    loss = lambda probe: -jax.nn.log_softmax(lpp.logits(probe, f))[jnp.arange(len(f)), labels].mean()
    speed, losses = 0.0, []
    for i in range(12):
        losses.append(float(loss(probe)))
        slope = jax.grad(loss)(probe)
        speed = 0.9 * speed + slope.weights
        alpha = probe.alpha - (rates.alpha * slope.alpha if (i + 1) % 10 == 0 else 0)
        probe = lpp.Probe(probe.weights - rates.weights * speed, alpha, probe.text)
    found, traced = lpp.train(f, labels, HEAD, epochs=12)
    np.testing.assert_allclose(traced, losses, rtol=1e-4)
    np.testing.assert_allclose(found.weights, probe.weights, rtol=1e-3, atol=1e-3)  # a dozen steps of momentum
    assert lpp.accuracy(found, (f, labels)) >= lpp.accuracy(lpp.start(f, labels, HEAD)[0], (f, labels))


def test_lpp_needs_every_class():
    with pytest.raises(ValueError, match="an example of every class"):
        lpp.start(features(FEW), np.zeros_like(FEW[1]), HEAD)
