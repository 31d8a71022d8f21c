"""The recipe's numbers, AdamW against torch, the data order, and a loop that can be interrupted without a trace."""
import functools
import itertools
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tvjax import checkpoints, training
from tvjax.training import Recipe, loop

RNG = np.random.default_rng(0)
SPLIT = (RNG.normal(size=(10, 3)).astype(np.float32), RNG.integers(0, 2, 10).astype(np.int32))
PARAMS = {"w": RNG.normal(size=(2, 3)).astype(np.float32), "b": np.zeros(2, np.float32)}
RECIPE = Recipe(steps=9, batch=4, lr=0.05, warmup=2, seed=3)


def loss(params, batch, key):
    """A noisy linear classifier: the noise shows whether randomness follows the step."""
    images, labels = batch
    noisy = images + 0.1 * jax.random.normal(key, images.shape)
    return training.cross_entropy(noisy @ params["w"].T + params["b"][None], labels)


def feed(recipe):
    return functools.partial(training.batches, SPLIT, batch=recipe.batch, seed=recipe.seed)


def loosely(f, *args):
    """optax's Adam is not written for strict dtype promotion."""
    with jax.numpy_dtype_promotion("standard"):
        return f(*args)


def assert_same_bits(a, b):
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(np.asarray(x), np.asarray(y)), a, b)


# --- recipe ---

def test_schedule_has_the_papers_numbers():
    rate = training.schedule(Recipe(lr=1e-5, warmup=500, steps=2000))
    expected = {0: 2e-8, 499: 1e-5, 500: 1e-5, 1250: 5e-6}
    for step, lr in expected.items():
        np.testing.assert_allclose(rate(step), lr, rtol=1e-5)
    np.testing.assert_allclose(rate(1999), 1.0966e-11, rtol=1e-4)  # the number is given to five digits


def test_epochs_give_about_two_thousand_steps():
    trained_on = {"cars": 7330, "dtd": 3384, "eurosat": 21600, "gtsrb": 23976, "mnist": 55000, "resisc45": 17010,
                  "sun397": 17865, "svhn": 68257}
    steps = [training.epochs_to_steps(training.EPOCHS[t], examples=n, batch=128) for t, n in trained_on.items()]
    assert len(training.EPOCHS) == 20 and all(1900 <= s <= 2200 for s in steps)


@pytest.mark.parametrize("slip, words", [
    (dict(steps=0), "steps must be at least 1"), (dict(lr=-1.0), "lr must be positive"),
    (dict(warmup=2000), "warmup must be at least 0 and below steps"), (dict(batch=3, accumulation=2), "divide batch"),
])
def test_recipe_refuses_slips(slip, words):
    with pytest.raises(ValueError, match=words):
        Recipe(**slip)


def test_optimizer_is_torchs_clip_and_adamw():
    torch = pytest.importorskip("torch")
    recipe = Recipe(steps=20, lr=0.01, warmup=3, weight_decay=0.1)
    grads = [RNG.normal(size=(4, 3)).astype(np.float32) * scale for scale in (3, 1, 0.1, 5, 0.01, 2)]
    start = RNG.normal(size=(4, 3)).astype(np.float32)
    theirs = torch.nn.Parameter(torch.tensor(start))
    adamw = torch.optim.AdamW([theirs], lr=recipe.lr, weight_decay=recipe.weight_decay)
    ours, transform = jnp.array(start), training.optimizer(recipe)
    state = transform.init(ours)
    for step, grad in enumerate(grads):
        adamw.param_groups[0]["lr"] = float(training.schedule(recipe)(step))
        theirs.grad = torch.tensor(grad)
        torch.nn.utils.clip_grad_norm_([theirs], recipe.clip)
        adamw.step()
        updates, state = loosely(transform.update, jnp.array(grad), state, ours)
        ours = optax.apply_updates(ours, updates)
    np.testing.assert_allclose(ours, theirs.detach().numpy(), atol=1e-6)


def test_sparse_step_by_hand():
    inner = optax.adamw(0.1, weight_decay=0.1)
    transform = training.sparse(inner, jnp.array([True, False]))
    params = jnp.array([1.0, -2.0])
    updates, _ = loosely(transform.update, jnp.array([0.5, 0.5]), transform.init(params), params)
    np.testing.assert_allclose(optax.apply_updates(params, updates), [0.89, -2.0], atol=1e-6)


# --- data order and losses ---

def test_every_example_is_seen_equally_often():
    seen = np.concatenate(list(training.batches(np.arange(7), batch=3, seed=1, steps=7)))
    assert np.bincount(seen).tolist() == [3] * 7
    assert sorted(seen[:7]) == list(range(7)) and list(seen[:7]) != list(seen[7:14])


@pytest.mark.parametrize("batch", [1, 3, 7, 20])
def test_batches_can_be_entered_at_any_step(batch):
    whole = list(training.batches(SPLIT, batch=batch, seed=5, steps=9))
    late = list(training.batches(SPLIT, batch=batch, seed=5, start=4, steps=9))
    assert_same_bits(whole[4:], late)
    other = next(training.batches(SPLIT, batch=batch, seed=6, start=4))
    assert batch == 1 or not np.array_equal(other[0], late[0][0])


def test_a_split_has_one_length():
    with pytest.raises(ValueError, match=r"got \[3, 4\]"):
        next(training.batches((np.zeros(3), np.zeros(4)), batch=2))


def test_normalise_along_either_channel_axis():
    images = RNG.integers(0, 256, (2, 4, 4, 3)).astype(np.uint8)
    mean, std = (0.1, 0.2, 0.3), (0.5, 0.6, 0.7)
    expected = (images / 255 - np.array(mean)) / np.array(std)
    np.testing.assert_allclose(training.normalise(jnp.array(images), mean, std), expected, atol=1e-6)
    moved = training.normalise(jnp.array(images.transpose(0, 3, 1, 2)), mean, std, axis=-3)
    np.testing.assert_allclose(moved, expected.transpose(0, 3, 1, 2), atol=1e-6)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_cross_entropy_is_torchs(smoothing):
    torch = pytest.importorskip("torch")
    logits, labels = RNG.normal(size=(5, 4)).astype(np.float32), np.array([0, 3, 1, 1, 2])
    theirs = torch.nn.functional.cross_entropy(torch.tensor(logits), torch.tensor(labels), label_smoothing=smoothing)
    ours = training.cross_entropy(jnp.array(logits), jnp.array(labels), smoothing=smoothing)
    np.testing.assert_allclose(ours, theirs.item(), rtol=1e-6)


# --- the loop ---

def test_fit_is_the_loop_written_out():
    fitted = training.fit(loss, PARAMS, feed(RECIPE), RECIPE)
    params, transform = jax.tree.map(jnp.array, PARAMS), training.optimizer(RECIPE)
    state, losses = transform.init(params), []
    for step, batch in enumerate(training.batches(SPLIT, batch=4, seed=3, steps=9)):
        value, grads = jax.value_and_grad(loss)(params, batch, jax.random.fold_in(jax.random.key(3), step))
        updates, state = loosely(transform.update, grads, state, params)
        params = optax.apply_updates(params, updates)
        losses.append(float(value))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), fitted.params, params)
    np.testing.assert_allclose(fitted.losses, losses, rtol=1e-6)
    assert fitted.steps == 9 and fitted.seconds > 0 and fitted.rate > 0


def test_the_callers_arrays_survive():
    params = jax.tree.map(jnp.array, PARAMS)
    training.fit(loss, params, feed(RECIPE), RECIPE)
    assert_same_bits(params, PARAMS)  # a donated array would raise


def test_accumulation_gives_the_gradient_of_the_whole_batch():
    quiet = lambda params, batch, key: jnp.mean((batch[0] @ params["w"].T - 1) ** 2)
    whole = training.fit(quiet, PARAMS, feed(RECIPE), RECIPE)
    parts = Recipe(steps=9, batch=4, lr=0.05, warmup=2, seed=3, accumulation=2)
    halves = training.fit(quiet, PARAMS, feed(parts), parts)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), whole.params, halves.params)
    np.testing.assert_allclose(whole.losses, halves.losses, rtol=1e-5)


def test_parts_of_a_batch_have_their_own_randomness():
    noise = lambda params, batch, key: (params["w"].sum() * 0, {"noise": jax.random.normal(key)})
    parts = Recipe(steps=1, batch=4, warmup=0, accumulation=2)
    key = jax.random.fold_in(jax.random.key(0), 0)
    expected = np.mean([jax.random.normal(jax.random.fold_in(key, i)) for i in range(2)])
    np.testing.assert_allclose(training.fit(noise, PARAMS, feed(parts), parts).aux["noise"], expected, rtol=1e-6)


def test_frozen_arrays_get_no_gradient_and_no_state():
    def with_head(params, batch, key, head):
        return training.cross_entropy(batch[0] @ params["w"].T @ head, batch[1])

    head = jnp.array(RNG.normal(size=(2, 2)), jnp.float32)
    before = np.array(head)
    fitted = training.fit(with_head, {"w": PARAMS["w"]}, feed(RECIPE), RECIPE, frozen=head)
    assert set(fitted.params) == {"w"} and not np.array_equal(fitted.params["w"], PARAMS["w"])
    assert_same_bits(head, before)
    state = loop._start({"w": PARAMS["w"]}, training.optimizer(RECIPE), RECIPE)
    assert {x.shape for x in jax.tree.leaves(state["opt"])} == {(), (2, 3)}


def test_sparse_fitting_keeps_the_bits_outside_of_the_mask():
    mask = {"w": jnp.array(RNG.random((2, 3)) < 0.5), "b": jnp.zeros(2, bool)}
    transform = training.sparse(training.optimizer(RECIPE), mask)
    fitted = training.fit(loss, PARAMS, feed(RECIPE), RECIPE, transform=transform)
    assert_same_bits(fitted.params["b"], PARAMS["b"])
    changed = np.asarray(fitted.params["w"]) != PARAMS["w"]
    assert_same_bits(changed, mask["w"])


def test_one_compilation_serves_runs_and_seeds():
    before = loop._advance._cache_size()
    mine = lambda params, batch, key: loss(params, batch, key)
    for seed in range(3):
        recipe = Recipe(steps=4, batch=4, warmup=1, seed=seed)
        training.fit(mine, PARAMS, feed(recipe), recipe)
    assert loop._advance._cache_size() == before + 1


def test_a_loss_that_is_not_finite_stops_with_its_step():
    broken = lambda params, batch, key: jnp.where(batch[0].max() > 0, jnp.nan, 1.0) * params["w"].sum()
    images = np.stack([np.zeros((4, 3))] * 5 + [np.ones((4, 3))] * 4).astype(np.float32)
    with pytest.raises(ValueError, match="loss is nan at step 5 of 9"):
        training.fit(broken, PARAMS, [(x, x) for x in images], RECIPE)


def test_weights_that_are_not_finite_are_not_returned():
    steep = lambda params, batch, key: jnp.sqrt(jnp.abs(params["b"])).sum()  # value 0, gradient nan at 0
    with pytest.raises(ValueError, match="weights are not finite after step 1"):
        training.fit(steep, PARAMS, feed(RECIPE), Recipe(steps=1, warmup=0))


@pytest.mark.parametrize("count", [0, 8])
def test_batches_that_end_early_are_an_error(count):
    with pytest.raises(ValueError, match=f"ended at step {count} of 9"):
        training.fit(loss, PARAMS, itertools.islice(training.batches(SPLIT, batch=4), count), RECIPE)


def test_progress_bar_shows_loss_and_speed(capsys):
    training.fit(loss, PARAMS, feed(RECIPE), RECIPE, log_every=4, progress=True)
    shown = capsys.readouterr().err
    assert "9/9" in shown and "loss=" in shown and "examples=" in shown
    training.fit(loss, PARAMS, feed(RECIPE), RECIPE, progress=None)
    assert capsys.readouterr().err == ""


FOUR_DEVICES = """
import functools, sys
import jax, numpy as np
sys.path.insert(0, {here!r})
import test_training as t
from tvjax import checkpoints, training
from tvjax.training import loop
mesh = jax.make_mesh((4,), ("batch",), axis_types=(jax.sharding.AxisType.Auto,))
put = lambda spec: lambda x: jax.device_put(x, jax.NamedSharding(mesh, spec))
quiet = lambda params, batch, key: training.cross_entropy(batch[0] @ params["w"].T, batch[1])
for parts in (1, 2):
    recipe = training.Recipe(steps=6, batch=8, lr=0.05, warmup=2, accumulation=parts)
    one = training.fit(quiet, {{"w": t.PARAMS["w"]}}, t.feed(recipe), recipe)
    before = loop._advance._cache_size()
    four = training.fit(quiet, put(jax.P())({{"w": t.PARAMS["w"]}}), t.feed(recipe), recipe, place=put(jax.P("batch")))
    assert len(four.params["w"].sharding.device_set) == 4
    assert loop._advance._cache_size() == before + 1, loop._advance._cache_size() - before
    np.testing.assert_allclose(four.params["w"], one.params["w"], atol=1e-6)
print("equal")
"""


def test_four_devices_give_the_weights_of_one():
    here = pathlib.Path(__file__).parent
    env = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    program = [sys.executable, "-c", FOUR_DEVICES.format(here=str(here))]
    done = subprocess.run(program, env=env, capture_output=True, text=True)
    assert done.stdout.strip() == "equal", done.stderr[-2000:]


# --- interruption ---

class Stopped(Exception):
    """The machine goes away."""


def stopping(feed, at):
    """The feed, which raises before it gives the batch of step `at`."""
    def from_step(*, start):
        for step, batch in enumerate(feed(start=start), start):
            if step == at:
                raise Stopped
            yield batch
    return from_step


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("at", [0, 2, 5, 8])
def test_an_interrupted_run_ends_with_the_same_bits(tmp_path, at, parts):
    recipe = Recipe(steps=9, batch=4, lr=0.05, warmup=2, seed=3, accumulation=parts)
    whole = training.fit(loss, PARAMS, feed(recipe), recipe)
    again = functools.partial(training.fit, loss, PARAMS, recipe=recipe, state_dir=tmp_path / "state", save_every=2)
    with pytest.raises(Stopped):
        again(feed=stopping(feed(recipe), at))
    resumed = again(feed=feed(recipe))
    assert_same_bits((whole.params, whole.losses), (resumed.params, resumed.losses))
    done = again(feed=stopping(feed(recipe), 0))  # nothing is left to do: the feed is not even asked
    assert_same_bits((whole.params, whole.losses), (done.params, done.losses))


def test_an_interrupted_sparse_run_keeps_its_mask(tmp_path):
    mask = {"w": jnp.array(RNG.random((2, 3)) < 0.5), "b": jnp.ones(2, bool)}
    fit = functools.partial(training.fit, loss, PARAMS, recipe=RECIPE, save_every=2)
    whole = fit(feed=feed(RECIPE), transform=training.sparse(training.optimizer(RECIPE), mask))
    for run in (stopping(feed(RECIPE), 5), feed(RECIPE)):
        transform = training.sparse(training.optimizer(RECIPE), mask)
        try:
            resumed = fit(feed=run, transform=transform, state_dir=tmp_path / "state")
        except Stopped:
            continue
    assert_same_bits((whole.params, whole.losses), (resumed.params, resumed.losses))


def test_a_resumed_run_starts_where_it_was_saved(tmp_path):
    asked = []
    def spying(*, start):
        asked.append(start)
        return feed(RECIPE)(start=start)
    run = functools.partial(training.fit, loss, PARAMS, recipe=RECIPE, state_dir=tmp_path / "state", save_every=4)
    with pytest.raises(Stopped):
        run(feed=stopping(spying, 7))
    run(feed=spying)
    assert asked == [0, 4]


def test_an_iterable_is_replayed_to_where_the_run_was(tmp_path):
    given = list(training.batches(SPLIT, batch=4, seed=3, steps=9))
    whole = training.fit(loss, PARAMS, given, RECIPE)
    run = functools.partial(training.fit, loss, PARAMS, recipe=RECIPE, state_dir=tmp_path / "state", save_every=4)
    with pytest.raises(ValueError, match="ended at step 6"):
        run(feed=given[:6])
    assert_same_bits(whole.params, run(feed=given).params)


def test_a_folder_of_another_run_is_refused(tmp_path):
    training.fit(loss, PARAMS, feed(RECIPE), RECIPE, state_dir=tmp_path / "state")
    other = Recipe(steps=9, batch=4, lr=0.06, warmup=2, seed=3)
    with pytest.raises(ValueError, match=r"holds a run with lr=0.05 \(now 0.06\)"):
        training.fit(loss, PARAMS, feed(other), other, state_dir=tmp_path / "state")


def test_a_diverged_state_is_not_saved(tmp_path):
    broken = lambda params, batch, key: jnp.where(batch[0].max() > 0, jnp.nan, 1.0) * params["w"].sum()
    images = [np.full((4, 3), step >= 5, np.float32) for step in range(9)]
    with pytest.raises(ValueError, match="loss is nan at step 5"):
        training.fit(broken, PARAMS, [(x, x) for x in images], RECIPE, state_dir=tmp_path / "state", save_every=2)
    assert checkpoints.latest_step(tmp_path / "state") == 4


def test_a_watcher_sees_the_steps_and_ends_the_run():
    seen = []
    def watch(params, done):
        seen.append((done, float(params["w"])))
        return done == 4
    recipe = training.Recipe(steps=10, batch=1, lr=0.1, warmup=0)
    fitted = training.fit(lambda params, batch, key: (params["w"] - batch[0]) ** 2, {"w": jnp.float32(0)},
                          itertools.repeat(np.ones(1, np.float32)), recipe, watch=watch, watch_every=2)
    assert [done for done, _ in seen] == [2, 4] and seen[-1][1] == float(fitted.params["w"])
    assert fitted.steps == 4 and fitted.losses.shape == (4,)
