"""tvjax.learning: courses, joint heads, addition, negation, few shots; every way to a model."""
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests import toy_tasks as toy
from tvjax import evaluation, learning, tree, vectors
from tvjax.learning import Scheme, arithmetic, fewshot, heads, ways
from tvjax.learning.course import Course, Verdict, epoch_steps, learn
from tvjax.training import loop

pytestmark = pytest.mark.usefixtures("quick_compilation")
BASE = toy.theta0()
TAUS = {"a": toy.vector(1, BASE), "b": toy.vector(2, BASE), "c": toy.vector(3, BASE)}
HEADS, SPLITS = {}, {}
for i, name in enumerate(TAUS):
    HEADS[name], SPLITS[name] = toy.task(BASE, TAUS[name], 10 + i)
FINETUNED = dict.fromkeys(TAUS, 1.0)
BRISK = Course(epochs=2, batch=24, lr=0.1)


def scaled(names=("a", "b", "c")):
    return ways.scaled(toy.PREDICT, BASE, learning.pool([TAUS[n] for n in names], BASE), Scheme())


def accuracy(way, params, name):
    return evaluation.accuracy(way.predict, ways.model(way, params), HEADS[name], SPLITS[name])


# ---------------------------------------------------------------- ways
def test_coefficients_at_zero_are_the_pretrained_model_and_its_export_has_equal_logits():
    way, x = scaled(), SPLITS["a"][0]
    start = ways.model(way, way.start)
    np.testing.assert_array_equal(toy.PREDICT(start, HEADS["a"], x), toy.PREDICT(BASE, HEADS["a"], x))
    moved = jax.tree.map(lambda c: c + 0.3, way.start)
    exported = jax.device_get(ways.model(way, moved))
    by_hand = vectors.add(BASE, sum(0.3 * vectors.TaskVector(tau) for tau in TAUS.values()))
    np.testing.assert_allclose(toy.PREDICT(exported, HEADS["a"], x), toy.PREDICT(by_hand, HEADS["a"], x), rtol=1e-5,
                               atol=1e-5)


def test_linearised_way_is_the_jvp():
    held = learning.pool(list(TAUS.values()), BASE)
    way = ways.scaled(toy.LINEAR, BASE, held, Scheme(), place=evaluation.paired)
    c = jax.tree.map(lambda c: c + jnp.array([0.2, -0.5, 1.0]), way.start)
    x = jnp.asarray(SPLITS["a"][0])
    total = jax.tree.map(lambda *xs: 0.2 * xs[0] - 0.5 * xs[1] + xs[2], *TAUS.values())
    value, slope = jax.jvp(lambda p: toy.encode(p, x), (BASE,), (total,))
    f = value + slope
    wanted = f / jnp.linalg.norm(f, axis=-1, keepdims=True) @ HEADS["a"]
    np.testing.assert_allclose(way.predict(ways.model(way, c), HEADS["a"], x), wanted, rtol=1e-5, atol=1e-5)


def test_norms_move_norms_alone():
    way = ways.norms(toy.PREDICT, BASE)
    assert set(way.start) == {"layers.0.layer_norm1.weight", "layers.0.layer_norm1.bias"}
    moved = tree.flatten(ways.model(way, jax.tree.map(lambda x: x + 1, way.start)))
    changed = {name for name, x in tree.flatten(BASE).items() if not np.array_equal(x, moved[name])}
    assert changed == set(way.start)


def test_low_rank_way_starts_at_the_base_and_gives_a_sparse_vector():
    way = ways.low_rank(toy.PREDICT, BASE, rank=2, key=jax.random.key(0), alpha=4.0)
    assert set(way.start) == {"layers.0.fc1.weight", "layers.0.fc2.weight"}
    jax.tree.map(np.testing.assert_array_equal, ways.model(way, way.start), BASE)
    params = jax.tree.map(lambda x: x + 0.1, way.start)
    tau = ways.low_rank_vector(way, params)
    assert set(tree.flatten(tau, lambda x: hasattr(x, "B"))) == set(way.start)
    theta, dense = ways.model(way, params), tau["layers"]["0"]["fc1"]["weight"].dense()
    np.testing.assert_allclose(theta["layers"]["0"]["fc1"]["weight"] - BASE["layers"]["0"]["fc1"]["weight"], dense,
                               rtol=1e-4, atol=1e-5)  # a difference of numbers larger than itself
    pooled = learning.pool([tau], BASE)
    assert set(pooled) == set(way.start)  # zero, that is not there, elsewhere


def test_full_fine_tuning_starts_at_the_base():
    way = ways.whole(toy.PREDICT, BASE)
    jax.tree.map(np.testing.assert_array_equal, ways.model(way, way.start), BASE)


# ---------------------------------------------------------------- joint heads and losses
def test_joint_loss_is_the_weighted_sum_of_cross_entropies():
    way = scaled(("a", "b"))
    joined = heads.join([HEADS["a"], HEADS["b"]])
    feed = heads.together([SPLITS["a"], SPLITS["b"]], joined.offsets, batches=[5, 9], seed=0)
    batch = next(feed())
    assert batch[2].tolist() == [0] * 5 + [1] * 9
    weights = jnp.array([-1.0, 2.0])
    loss = heads.weighted(way.point, way.predict)(way.start, batch, None, (way.frozen, (joined.head, joined.owner,
                                                                                        weights)))
    ce = lambda rows, name, offset: optax.softmax_cross_entropy_with_integer_labels(
        toy.PREDICT(BASE, HEADS[name], batch[0][rows]), batch[1][rows] - offset).mean()
    wanted = -ce(slice(0, 5), "a", 0) + 2 * ce(slice(5, 14), "b", joined.offsets[1])
    np.testing.assert_allclose(loss, wanted, rtol=1e-5)


def test_the_penalty_is_added_to_the_loss():
    way = scaled()
    joined = heads.join([HEADS["a"]])
    batch = next(heads.together([SPLITS["a"]], joined.offsets, batches=[8], seed=0)())
    extras = (way.frozen, (joined.head, joined.owner, jnp.ones(1)))
    c = jax.tree.map(lambda c: c + 0.5, way.start)
    plain, with_l1 = (heads.weighted(way.point, way.predict, p=p)(c, batch, None, extras) for p in (0, 1))
    np.testing.assert_allclose(with_l1 - plain, 0.5 * 3 * 0.5, rtol=1e-5)


def test_an_epoch_ends_with_the_shortest_split():
    assert epoch_steps([250, 100, 400], 16) == 7 and epoch_steps([3], 16) == 1


# ---------------------------------------------------------------- the course
def test_the_best_epoch_is_returned_and_the_first_of_equals():
    way, values = scaled(("a",)), iter([0.1, 0.5, 0.2, 0.5, 0.3])
    points = []
    def judge(point, epoch):
        points.append(np.asarray(point["layers"]["0"]["fc1"]["weight"]))
        return Verdict(next(values))
    joined = heads.join([HEADS["a"]])
    feed = heads.together([SPLITS["a"]], joined.offsets, batches=[8], seed=0)
    found = learn(heads.weighted(way.point, way.predict), way, feed, dataclasses.replace(BRISK, epochs=4), steps=2,
                  judge=judge, extras=(joined.head, joined.owner, jnp.ones(1)))
    assert found.epoch == 1 and [v.value for v in found.trace] == [0.1, 0.5, 0.2, 0.5, 0.3]
    np.testing.assert_array_equal(ways.model(way, found.params)["layers"]["0"]["fc1"]["weight"], points[1])
    assert found.losses.shape == (8,)


def test_a_course_worse_than_the_start_returns_zero():
    way = scaled()
    found = fewshot.few_shot(way, HEADS["a"], SPLITS["a"], (SPLITS["a"][0], np.asarray(
        toy.PREDICT(BASE, HEADS["a"], SPLITS["a"][0]).argmax(-1))), course=BRISK, augment="none")
    assert found.epoch == 0 and found.verdict.value == 1.0
    assert all(not c.any() for c in found.params.values())


# ---------------------------------------------------------------- addition and negation
def test_addition_is_no_worse_than_its_start_and_better_than_the_search():
    way = scaled()
    found = arithmetic.addition(way, HEADS, SPLITS, FINETUNED, course=Course(epochs=6, batch=24, lr=0.05))
    assert found.verdict.value == max(v.value for v in found.trace) >= found.trace[0].value
    assert len(found.losses) == 6 * epoch_steps([48], 8)
    total = sum(vectors.TaskVector(tau) for tau in TAUS.values())
    tasks = {name: (HEADS[name], SPLITS[name]) for name in TAUS}
    searched = evaluation.search(lambda scale: evaluation.absolute(evaluation.accuracies(
        toy.PREDICT, vectors.add(BASE, total, scale=scale), tasks)), [0.0, 0.3, 0.6, 1.0])
    assert found.verdict.value > searched.value


def test_negation_keeps_the_control_and_stops_at_its_breach():
    way = scaled(("a",))
    found = arithmetic.negation(way, (HEADS["a"], HEADS["b"]), (SPLITS["a"], SPLITS["b"]),
                                course=Course(epochs=8, batch=16, lr=0.3))
    start = found.trace[0].told[1]
    breaches = [v.told[1] < 0.95 * start for v in found.trace]
    assert not any(breaches[:-1]) and (breaches[-1] == found.trace[-1].stop)
    kept = [v.told[0] for v, breach in zip(found.trace, breaches, strict=True) if not breach]
    assert accuracy(way, found.params, "a") == min(kept) and found.verdict.told[1] >= 0.95 * start


def test_negation_falls_back_to_the_pretrained_model():
    way = scaled(("a",))
    found = arithmetic.negation(way, (HEADS["a"], HEADS["b"]), (SPLITS["a"], SPLITS["b"]), threshold=3.0,
                                course=BRISK)  # a control that cannot be kept
    assert found.epoch == 0 and len(found.trace) == 2 and not any(c.any() for c in found.params.values())


def test_schedules_of_the_paper():
    assert arithmetic.negation_course("svhn") == Course(epochs=2, lr=0.005)
    assert arithmetic.ADDITION == Course(epochs=20, batch=128, lr=1e-3, weight_decay=0.1, decay="constant")
    assert fewshot.FEWSHOT == Course(epochs=10, lr=0.1, decay="cosine") and fewshot.SHOTS == (1, 2, 4, 8, 16)


# ---------------------------------------------------------------- few shots
@pytest.mark.parametrize("k", [1, 3])
def test_k_of_every_class_nested_in_larger_k(k):
    split = (np.arange(60), np.arange(60) % 4)
    few = fewshot.shots(split, k, classes=4, seed=2)
    assert np.bincount(few[1]).tolist() == [k] * 4
    assert set(few[0]) <= set(fewshot.shots(split, k + 1, classes=4, seed=2)[0])


def test_small_sets_are_repeated_to_ten_batches():
    few = fewshot.shots(SPLITS["a"], 1, classes=len(set(SPLITS["a"][1])), seed=0)
    assert fewshot.steps_of(few, BRISK) == 10
    joined = heads.join([HEADS["a"]])
    inputs, _, _ = next(heads.together([few], joined.offsets, batches=[24], seed=0)())
    assert len(inputs) == 24 and len(np.unique(inputs, axis=0)) == len(few[1])


def test_the_targets_vector_is_left_out():
    assert set(fewshot.without(TAUS, "b")) == {"a", "c"}
    with pytest.raises(ValueError, match="vector of a alone"):
        fewshot.without({"a": TAUS["a"]}, "a")


def test_few_shots_learn():
    way = scaled(("a", "b"))
    few = fewshot.shots(SPLITS["a"], 4, classes=3, seed=0)
    found = fewshot.few_shot(way, HEADS["a"], few, SPLITS["a"], course=dataclasses.replace(fewshot.FEWSHOT, epochs=3,
                                                                                         batch=12), augment="none")
    assert found.verdict.value > found.trace[0].value


def test_tasks_of_other_sizes_share_the_compiled_step():
    way, course = scaled(("a", "b")), dataclasses.replace(fewshot.FEWSHOT, epochs=1, batch=16)
    before = loop._advance._cache_size()
    for name, classes in (("a", 3), ("b", 2)):
        split = (SPLITS[name][0], SPLITS[name][1] % classes)
        few = fewshot.shots(split, 2, classes=classes, seed=0)
        fewshot.few_shot(way, HEADS[name][:, :classes], few, split, course=course, augment="none")
    assert loop._advance._cache_size() == before + 1


@pytest.mark.parametrize("make, sentence", [
    (lambda: fewshot.shots(SPLITS["a"][0], 1, classes=3, seed=0), "labels are needed here"),
    (lambda: next(heads.together([SPLITS["a"][0]], [0], batches=[2], seed=0)()), "labels are needed here"),
    (lambda: fewshot.shots(SPLITS["a"], 99, classes=3, seed=0), "99 shots are asked for, and class"),
    (lambda: Course(decay="linear"), "constant, cosine; got 'linear'"),
    (lambda: Course(epochs=0), "epochs must be at least 1"),
    (lambda: heads.fraction(SPLITS["a"], 1.5, seed=0), "above 0 and at most 1; got 1.5"),
    (lambda: arithmetic.addition(scaled(), HEADS, {"a": 0}, FINETUNED), "the same tasks"),
    (lambda: arithmetic.addition(scaled(), HEADS, SPLITS, FINETUNED, course=Course(batch=2)), "no example for each"),
    (lambda: ways.low_rank(toy.PREDICT, BASE, rank=9, key=jax.random.key(0)), "smaller side of every matrix, here 5"),
    (lambda: ways.low_rank(toy.PREDICT, BASE, rank=1, key=jax.random.key(0), names="zzz"), "no matrix matches 'zzz'"),
    (lambda: ways.norms(toy.PREDICT, {"w": np.ones(2)}), "no normalisation layer"),
])
def test_slips(make, sentence):
    with pytest.raises(ValueError, match=sentence):
        make()
