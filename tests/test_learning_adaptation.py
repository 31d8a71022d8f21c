"""tvjax.learning.adaptation, ufm, views: objectives against plain loops, filters, trusted sets, what moves."""
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import toy_tasks as toy
from tvjax import learning, training
from tvjax.learning import Scheme, adaptation, ufm, views, ways
from tvjax.learning.heads import join

pytestmark = pytest.mark.usefixtures("quick_compilation")
BASE = toy.theta0()
HEAD, SPLIT = toy.task(BASE, toy.vector(1, BASE), 10)
X = SPLIT[0]
WAY = ways.scaled(toy.PREDICT, BASE, learning.pool([toy.vector(1, BASE), toy.vector(2, BASE)], BASE), Scheme())
SHORT = dataclasses.replace(adaptation.TTA, epochs=2, batch=16, lr=0.02)
KNOWN = join([HEAD]).owner >= 0


# ---------------------------------------------------------------- contrast
def test_contrast_is_simclr():
    rng = np.random.default_rng(0)
    f = rng.standard_normal((8, 5)).astype(np.float32)
    unit = f / np.linalg.norm(f, axis=1, keepdims=True)
    rows = []
    for i in range(8):
        near = unit @ unit[i] / 0.1
        others = np.delete(np.exp(near), i)
        rows.append(-np.log(np.exp(near[(i + 4) % 8]) / others.sum()))
    np.testing.assert_allclose(adaptation.nt_xent(jnp.asarray(f)), np.mean(rows), rtol=1e-5)


def test_contrast_falls_on_images():
    images = np.random.default_rng(0).integers(0, 255, (16, 4, 4, 1), np.uint8)
    encode = lambda params, x: jnp.tanh(x.astype(jnp.float32).reshape(x.shape[0], -1) / 255 @ params["w"])
    predict = lambda params, head, x: encode(params, x) @ head
    base = {"w": jnp.asarray(np.random.default_rng(1).standard_normal((16, 6)), jnp.float32)}
    rng = np.random.default_rng(2)
    taus = [{"w": jnp.asarray(rng.standard_normal((16, 6)), jnp.float32)} for _ in range(4)]
    way = ways.scaled(predict, base, learning.pool(taus), Scheme(by="column"))
    found = adaptation.contrast(way, 6, images, course=dataclasses.replace(SHORT, epochs=30, lr=0.05))
    assert found.losses[-6:].mean() < found.losses[:6].mean()


# ---------------------------------------------------------------- entropy
def test_entropy_filters_unreliable_samples():
    entropies = adaptation.entropies(jnp.array([[9.0, 0, 0, 7], [0.1, 0, 0, 7]]), jnp.array([True] * 3 + [False]))
    limit = 0.4 * np.log(3)
    assert adaptation.reliable(entropies, limit).tolist() == [1.0, 0.0]
    p = np.exp([0.1, 0, 0]) / np.exp([0.1, 0, 0]).sum()
    np.testing.assert_allclose(entropies[1], -(p * np.log(p)).sum(), rtol=1e-5)
    assert adaptation.counted_mean(entropies, jnp.zeros(2)) == 0


def test_sharpness_aware_loss_by_hand():
    loss = adaptation._sar(WAY.point, WAY.predict)
    joined, radius = join([HEAD]), np.float32(0.3)
    every = jax.jit(lambda c: adaptation.entropies(WAY.predict(WAY.point(c, WAY.frozen), joined.head, X), KNOWN))
    mean = jax.jit(lambda c, rows: (every(c) * rows).sum() / rows.sum())
    found = lambda c: np.asarray(every(c))
    limit = np.float32(np.median(found(WAY.start)))
    first = found(WAY.start) < limit
    slope = jax.jit(jax.grad(mean))(WAY.start, first.astype(np.float32))
    length = np.sqrt(sum(np.sum(np.square(g)) for g in slope.values()))
    there = {name: c + radius / length * slope[name] for name, c in WAY.start.items()}
    both = first & (found(there) < limit)
    assert 0 < both.sum() < len(X)
    value, gradient = jax.jit(jax.value_and_grad(loss))(WAY.start, X, None, (WAY.frozen, (joined.head, KNOWN, limit,
                                                                                         radius)))
    both = both.astype(np.float32)
    np.testing.assert_allclose(value, mean(there, both), rtol=1e-4)
    wanted = jax.jit(jax.grad(mean))(there, both)  # the gradient at the perturbed point, for the point itself
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5), gradient, wanted)


def test_entropy_falls():
    found = adaptation.entropy(WAY, HEAD, X, course=dataclasses.replace(SHORT, epochs=6, batch=48), margin=1.0)
    assert found.losses[-1] < found.losses[0] and found.epoch == 6


def test_the_norm_baseline_adapts_too():
    way = ways.norms(toy.PREDICT, BASE)
    found = adaptation.entropy(way, HEAD, X, course=SHORT, margin=1.0)
    assert set(found.params) == set(way.start)
    assert any(np.abs(found.params[name] - way.start[name]).max() > 0 for name in way.start)


# ---------------------------------------------------------------- UFM
@pytest.mark.parametrize("exponent, wanted", [(0.5, [0.522879, 0.279491, 0.197630]), (1.0, [0.7, 0.2, 0.1]),
                                              (2.0, [0.907407, 0.074074, 0.018519])])
def test_targets_of_the_worked_example(exponent, wanted):
    np.testing.assert_allclose(ufm.sharpen(jnp.array([0.7, 0.2, 0.1]), exponent=exponent), wanted, atol=1e-6)


def test_trusted_sets_are_the_likeliest_of_each_class():
    p = np.random.default_rng(0).dirichlet(np.ones(3), 30)
    trust = ufm.trusted(p, share=0.4)
    for c in range(3):
        wanted = set(np.argsort(-p[:, c])[:4])
        assert set(trust.rows[trust.classes == c]) == wanted
    assert set(trust.rest) == set(range(30)) - set(trust.rows)
    assert len(ufm.trusted(np.full((1000, 2), 0.5), most=100).rows) == 200
    assert len(ufm.trusted(p).rows) == 30


def test_trusted_sets_are_those_of_each_epochs_model(monkeypatch):
    seen, whole = [], ufm.trusted
    monkeypatch.setattr(ufm, "trusted", lambda p, **more: (seen.append(np.array(p)), whole(p, **more))[1])
    found = ufm.ufm(WAY, HEAD, X, course=dataclasses.replace(SHORT, lr=0.3), augment="none", share=0.3)
    assert len(seen) == 3 and np.abs(seen[0] - seen[1]).max() > 1e-3
    logits = WAY.predict(ways.model(WAY, found.params), HEAD, X)
    np.testing.assert_allclose(seen[-1], jax.nn.softmax(logits), rtol=1e-4, atol=1e-5)
    assert found.epoch == 2


def test_a_batch_is_a_quarter_trusted():
    trust = ufm.trusted(np.random.default_rng(0).dirichlet(np.ones(3), 40), share=0.5)
    rows, classes, sure = ufm.compose_batch(trust, batch=16, step=3, seed=0)
    assert sure.sum() == 4 and len(rows) == 16
    pairs = set(zip(trust.rows, trust.classes, strict=True))
    assert {(r, c) for r, c in zip(rows[sure], classes[sure], strict=True)} <= pairs
    assert set(rows[~sure]) <= set(trust.rest)
    again, _, _ = ufm.compose_batch(trust, batch=16, step=3, seed=0)
    np.testing.assert_array_equal(rows, again)


def test_omega_rises_to_one():
    assert [ufm.threshold(step, 11) for step in (0, 5, 10)] == pytest.approx([0.9, 0.95, 1.0])


def test_objective_is_normalised_by_what_is_accepted():
    rng = np.random.default_rng(0)
    strong = jnp.asarray(rng.standard_normal((4, 3)), jnp.float32)
    guess = jnp.array([[0.0, 0.0, 1.0], [0.95, 0.05, 0.0], [0.6, 0.4, 0.0], [0.0, 0.92, 0.08]])
    sure, classes = np.array([True, False, False, False]), np.array([1, 0, 0, 0])
    logs = np.asarray(jax.nn.log_softmax(strong))
    wanted = -logs[0, 1] - np.mean([(np.asarray(guess[i]) * logs[i]).sum() for i in (1, 3)])
    objective = jax.jit(ufm.objective)
    np.testing.assert_allclose(objective(strong, guess, classes, sure, 0.9), wanted, rtol=1e-5)
    alone = objective(strong, guess, classes, sure, 1.0)
    np.testing.assert_allclose(alone, -logs[0, 1], rtol=1e-5)


def test_guesses_have_no_derivative():
    loss = ufm._loss(WAY.point, WAY.predict, "none", 2.0)
    joined = join([HEAD])
    batch = (X, np.zeros(len(X), np.int32), np.zeros(len(X), bool), np.full(len(X), 0.3, np.float32))
    gradient = jax.jit(jax.grad(loss))(WAY.start, batch, None, (WAY.frozen, (joined.head, KNOWN)))
    logits = jax.jit(lambda c: jnp.where(KNOWN[None], WAY.predict(WAY.point(c, WAY.frozen), joined.head, X), -1e9))
    fixed = ufm.sharpen(jax.nn.softmax(logits(WAY.start)), exponent=2.0)
    plain = jax.jit(lambda c: ufm.objective(logits(c), fixed, batch[1], batch[2], 0.3))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4), gradient,
                 jax.jit(jax.grad(plain))(WAY.start))


# ---------------------------------------------------------------- views
def test_views_are_crops_within_the_range():
    images = np.random.default_rng(0).integers(0, 256, (3, 8, 8, 3), np.uint8)
    images[2] = 77
    strong = jax.jit(views.view("crop and flip"))
    made = strong(jax.random.key(0), images)
    np.testing.assert_allclose(made[2], 77, rtol=1e-4)  # a constant image stays constant
    assert made.shape == images.shape and made.min() >= 0 and made.max() <= 255
    assert np.abs(np.asarray(made) - images).max() > 1
    np.testing.assert_array_equal(made, strong(jax.random.key(0), images))
    assert views.view("none") is None


def test_a_whole_crop_is_the_image_or_its_mirror(monkeypatch):
    monkeypatch.setattr(views, "RATIO", (1.0, 1.0))
    images = np.random.default_rng(0).integers(0, 256, (12, 6, 6, 1), np.uint8)
    for flip, found in ((0.0, set()), (0.5, set())):
        one = jax.jit(functools.partial(views._one, least=1.0, flip=flip))
        for i, key in enumerate(jax.random.split(jax.random.key(1), 12)):
            made = np.asarray(one(key, images[i].astype(np.float32)))
            same, mirror = (np.allclose(made, x, atol=1e-3) for x in (images[i], images[i][:, ::-1]))
            assert same or mirror
            found.add(bool(same))
        assert found == ({True} if flip == 0 else {True, False})


@pytest.mark.parametrize("make, sentence", [
    (lambda: adaptation.entropy(WAY, HEAD, SPLIT), "takes inputs alone"),
    (lambda: adaptation.contrast(WAY, 6, X, augment="none"), "two different views"),
    (lambda: views.view("rotate"), "'none', 'crop', 'crop and flip'; got 'rotate'"),
    (lambda: views.view("crop")(jax.random.key(0), X), "needs images"),
    (lambda: views.view("crop", least=0.0), "above 0 and at most 1"),
])
def test_slips(make, sentence):
    with pytest.raises(ValueError, match=sentence):
        make()


def test_labels_are_left_behind():
    np.testing.assert_array_equal(adaptation.unlabelled(SPLIT), X)
    assert training.size(adaptation.unlabelled(SPLIT)) == len(X)
