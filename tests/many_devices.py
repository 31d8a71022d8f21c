"""What the tests of sharding compute on one device and on many: all that trains, scores and judges, on a toy encoder.

    python tests/many_devices.py OUT.npz [brief | HOST:PORT,COUNT,INDEX]

writes the numbers under names, on all devices that there are.
"""
import functools
import sys

import jax
import numpy as np

from tests import toy_tasks
from tvjax import calibration, evaluation, sharding, tangent, training, tree
from tvjax.calibration import exemplars
from tvjax.evaluation import mixtures
from tvjax.learning import adamerging, arithmetic, coefficients, course, ways
from tvjax.learning.pool import pool

RECIPE = training.Recipe(steps=5, batch=16, lr=0.02, warmup=1)
MIXED = ((0.0, 0.0), (1.0, 0.5))


def tasks():
    base = toy_tasks.theta0()
    taus = [toy_tasks.vector(seed, base) for seed in (1, 2)]
    made = {name: toy_tasks.task(base, tau, seed) for name, tau, seed in zip("ab", taus, (3, 4), strict=True)}
    return jax.device_get(base), jax.device_get(taus), made


def loss(params, batch, key, head):
    x, labels = batch
    return training.cross_entropy(toy_tasks.PREDICT(params, head, x), labels)


def tangent_loss(tau, batch, key, frozen):
    theta0, head = frozen
    x, labels = batch
    features = tangent.linearised(toy_tasks.encode)(theta0, tau, x)
    return training.cross_entropy(features @ head, labels)


def low_rank_loss(phi, batch, key, frozen):
    theta0, head = frozen
    w = theta0["layers"]["0"]["fc1"]["weight"] + phi["B"] @ phi["A"]
    layer = {**theta0["layers"]["0"], "fc1": {"weight": w}}
    return loss({"layers": {"0": layer}}, batch, key, head)


@functools.cache
def one_logits():
    return calibration.of_classifier(toy_tasks.PREDICT)


def training_numbers(base, made):
    head, split = made["a"]
    feed = functools.partial(training.batches, split, batch=RECIPE.batch, seed=0)
    yield "full", training.fit(loss, base, feed, RECIPE, frozen=head)
    parts = training.Recipe(**{**RECIPE.__dict__, "accumulation": 2})
    yield "accumulated", training.fit(loss, base, feed, parts, frozen=head)
    zero = jax.tree.map(np.zeros_like, base)
    yield "tangent", training.fit(tangent_loss, zero, feed, RECIPE, frozen=(base, head))
    mask = calibration.at_random(base, density=0.3, seed=1)
    yield "sparse", training.fit_sparse(loss, base, mask, feed, RECIPE, frozen=head)
    rng = np.random.default_rng(0)
    phi = {"A": rng.standard_normal((2, 5)).astype(np.float32), "B": np.zeros((7, 2), np.float32)}
    yield "low-rank", training.fit(low_rank_loss, phi, feed, RECIPE, frozen=(base, head))


class Stopped(Exception):
    """The machine goes away."""


def resumed(base, made, folder):
    """Training that ends at step 3, and goes on from the state saved at step 2."""
    head, split = made["a"]

    def feed(start=0):
        for step, batch in enumerate(training.batches(split, batch=RECIPE.batch, seed=0, start=start), start):
            if step == 3 and not start:
                raise Stopped
            yield batch
    run = functools.partial(training.fit, loss, base, feed, RECIPE, frozen=head, state_dir=folder, save_every=2)
    try:
        run()
    except Stopped:
        pass
    again = run()
    assert again.steps == RECIPE.steps
    return again


def calibration_numbers(base, made):
    head, (x, labels) = made["a"]
    classes = np.int32(toy_tasks.CLASSES)
    found = calibration.calibrate(one_logits(), base, x, {}, head, classes, rounds=2, batch=8, batches_per_round=2)
    yield "mask", found.mask
    given = {name: exemplars.Exemplars(head, *split) for name, (head, split) in made.items()}
    yield "gradients", exemplars.exemplar_gradients(toy_tasks.PREDICT, base, given)
    yield "random mask", calibration.at_random(base, density=0.2, seed=3)


def learning_numbers(base, taus, made):
    held = pool(taus)
    inputs = {name: (head, split[0]) for name, (head, split) in made.items()}
    adapted = adamerging.adapt(toy_tasks.PREDICT, base, held, inputs, steps=4, lr=0.01, batch=8, batches=2, every=2)
    yield "adamerging", {"coefficients": adapted.coefficients, "losses": adapted.losses}
    way = ways.scaled(toy_tasks.PREDICT, base, held, coefficients.Scheme(by="part", parts=3))
    heads, splits = ({name: pair[i] for name, pair in made.items()} for i in (0, 1))
    learned = arithmetic.addition(way, heads, splits, dict.fromkeys(made, 1.0), batch=16,
                                  course=course.Course(epochs=2, batch=32, lr=0.05))
    yield "atlas", {"coefficients": learned.params, "losses": learned.losses}


def judged_numbers(base, taus, made):
    yield "accuracy", evaluation.accuracies(toy_tasks.PREDICT, base, made, batch=16)
    yield "sweep", evaluation.sweep(toy_tasks.PREDICT, base, taus[0], (0.5, 1.0), made, batch=16)
    yield "features", evaluation.features(toy_tasks.encode, base, made["a"][1][0], batch=16)
    pair = [(head, split[0]) for head, split in made.values()]
    yield "xi", evaluation.disentanglement(toy_tasks.PREDICT, base, *taus, *pair, (-1.0, 1.0), batch=16)
    yield "pairs", evaluation.disentanglement_pairs(toy_tasks.PREDICT, base, taus, pair, batch=16)
    for name, linear in {"mixtures": False, "affine": True}.items():
        way = mixtures.family(toy_tasks.encode, base, linear=linear)
        yield name, mixtures.mixtures(way, taus, MIXED, *made["b"], batch=16)._asdict()
    yield "head", evaluation.zero_shot_head(
        toy_tasks.encode, base, tokens, ("a", "bb", "ccc"), ("{}", "no {}"), logit_scale=0.5, batch=3)


def tokens(prompts):
    return np.array([[len(prompt), *map(ord, prompt.ljust(4)[:4])] for prompt in prompts], np.float32) / 64


BRIEF = ("full/", "mask/", "gradients/", "random mask/", "accuracy/", "sweep/", "features/", "xi/", "pairs/",
         "mixtures/", "affine/", "head/", "split/")


def brief_numbers():
    """Some of them."""
    base, taus, made = tasks()
    return flat([next(training_numbers(base, made)), *calibration_numbers(base, made),
                 *judged_numbers(base, taus, made)])


def numbers(folder):
    """{name: array} of everything; `folder` keeps a state."""
    base, taus, made = tasks()
    return flat([*training_numbers(base, made), ("resumed", resumed(base, made, folder)),
                 *calibration_numbers(base, made), *learning_numbers(base, taus, made),
                 *judged_numbers(base, taus, made)])


def flat(named):
    """{name/leaf: array} of pairs (name, tree)."""
    found = {}
    for name, value in named:
        if isinstance(value, training.Fitted):
            value = {"params": value.params, "losses": value.losses}
        found |= {f"{name}/{leaf}": np.asarray(x) for leaf, x in tree.flatten(jax.device_get(value)).items()}
    return found


def on_the_mesh():
    """Checks of where things lie: rules, batches of each process's own rows, one sentence."""
    layout = sharding.layout(data=-1)
    base, _, made = tasks()
    head, (x, labels) = made["a"]
    first, last = sharding.local_rows(16, layout)
    batch = sharding.spread_local((x[first:last], labels[first:last]), layout)
    assert batch[0].shape == (16, 5) and len(batch[0].sharding.device_set) == layout.mesh.size
    params = sharding.place(base, layout)
    value = jax.jit(loss)(params, batch, None, sharding.replicate(head, layout))
    np.testing.assert_allclose(float(value), float(loss(base, (x[:16], labels[:16]), None, head)), rtol=1e-5)
    assert sharding.found(params).mesh == layout.mesh
    return layout


def split_by_rules():
    """Fine-tuning with tensors split over `model` gives the weights of one device."""
    base = {"w": np.arange(32, dtype=np.float32).reshape(8, 4) / 32, "b": np.zeros(3, np.float32)}
    x = np.random.default_rng(0).standard_normal((16, 4)).astype(np.float32)
    feed = lambda start=0: ((x, np.zeros(16, np.int32)) for _ in range(start, 4))
    recipe = training.Recipe(steps=4, batch=16, lr=0.05, warmup=1)
    return training.fit(linear_loss, base, feed, recipe).params


def linear_loss(params, batch, key):
    x, labels = batch
    return training.cross_entropy(x @ params["w"].T, labels) + params["b"].sum() ** 2


def main(out, where=""):
    brief, where = where == "brief", "" if where == "brief" else where
    if where:
        sharding.start(where, timeout=30)
        sharding.agree({"config": {"lr": 1}})
    layout = on_the_mesh()
    print(sharding.told(layout, tasks()[0]))
    with sharding.on(layout):
        found = brief_numbers() if brief else numbers(f"{out}.state")
    if not where:
        with sharding.on(sharding.layout(data=2, model=jax.device_count() // 2, rules=("w=model,-", "b="))):
            found |= {f"split/{name}": x for name, x in split_by_rules().items()}
    if jax.process_index() == 0:
        np.savez(out, **found)
    sharding.finish()


if __name__ == "__main__":
    main(*sys.argv[1:])
