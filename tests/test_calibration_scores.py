"""Scores against a loop over examples and draws; rounds of a calibration, seeds, presets, the number of devices."""
import functools
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tvjax import calibration, evaluation, tree
from tvjax.calibration import rounds
from tvjax.models import t5

pytestmark = pytest.mark.usefixtures("quick_compilation")
RNG = np.random.default_rng(0)
PARAMS = {"attn": {"q": RNG.normal(size=(4, 3)).astype(np.float32)}, "fc": RNG.normal(size=(2, 4)).astype(np.float32)}
IMAGES = RNG.normal(size=(11, 3)).astype(np.float32)
HEAD = np.pad(RNG.normal(size=(2, 3)).astype(np.float32), ((0, 0), (0, 2)))  # two columns are no class
CLASSES = np.int32(3)


def encode(params, images):
    return jnp.tanh(images @ params["attn"]["q"].T) @ params["fc"].T


LOGITS = calibration.of_classifier(evaluation.classify(encode))
FROZEN = {"fc": PARAMS["fc"]}
SCORED = {"attn": PARAMS["attn"]}
ALL = (FROZEN, HEAD, CLASSES)


def by_loop(score, samples, seed):
    labels, total = calibration.draw_classes(LOGITS, SCORED, IMAGES, *ALL, samples=samples, seed=seed), 0
    assert labels.shape == (11, samples) and labels.max() < 3
    for image, row in zip(IMAGES, labels, strict=True):
        for label in row:
            z = lambda p, image=image: LOGITS(p, image, *ALL)[:3]
            of = (lambda p, z=z, y=label: jax.nn.log_softmax(z(p))[y]) if score == "fisher" else (
                lambda p, z=z, y=label: z(p)[y])
            g = np.asarray(jax.grad(of)(SCORED)["attn"]["q"], np.float64)
            total = total + (np.abs(g) if score == "abs" else g**2)
    return total / labels.size


@pytest.mark.parametrize("score, samples", [("fisher", 1), ("logit_sq", 3), ("abs", 2)])
def test_scores_are_those_of_a_loop(score, samples):
    found = calibration.sensitivity(LOGITS, SCORED, IMAGES, *ALL, score=score, samples=samples, seed=5)
    np.testing.assert_allclose(found["attn"]["q"], by_loop(score, samples, 5), rtol=1e-5, atol=1e-6)


def test_scores_do_not_depend_on_the_budget():
    run = functools.partial(calibration.sensitivity, LOGITS, SCORED, IMAGES, *ALL)
    np.testing.assert_allclose(run()["attn"]["q"], run(budget=48)["attn"]["q"], rtol=1e-6)


def test_classes_are_drawn_from_the_softmax():
    images = np.repeat(IMAGES[:1], 4000, 0)
    drawn = calibration.draw_classes(LOGITS, SCORED, images, *ALL)
    p = jax.nn.softmax(LOGITS(SCORED, IMAGES[0], *ALL))[:3]
    np.testing.assert_allclose(np.bincount(drawn[:, 0], minlength=3) / 4000, p, atol=0.03)
    assert np.array_equal(drawn[:5], calibration.draw_classes(LOGITS, SCORED, images[:5], *ALL))


def test_choices_of_a_text_to_text_model():
    """The logit of a choice is the sum of its tokens' log-probabilities; embeddings and head are not scored."""
    model = t5.T5(t5.Spec(vocabulary=9, width=4, head_width=2, hidden=4, depth=1, decoder_depth=1, heads=2))
    params = jax.jit(lambda key: t5.init(model, key))(jax.random.key(0))
    ids, mask = jnp.array(RNG.integers(2, 9, (3, 4)), jnp.int32), jnp.ones((3, 4), bool)
    choices = jnp.array([[[3, 1, 0], [4, 5, 1]], [[2, 2, 1], [5, 1, 0]], [[7, 1, 0], [8, 1, 0]]])
    scored, frozen = tree.partition(params, calibration.scored(params))
    assert not any("shared" in name or "relative" in name for name in tree.flatten(scored))
    logits, examples = calibration.of_choices(t5.choice_log_probs(model)), (ids, mask, choices)
    labels = calibration.draw_classes(logits, scored, examples, frozen)
    found = calibration.sensitivity(logits, scored, examples, frozen, score="logit_sq")
    of = t5.token_log_probs(model)
    gradient = jax.jit(jax.grad(lambda p, *inputs: of(tree.union(p, frozen), *inputs).sum()))
    grads = [gradient(scored, ids[i:i + 1], mask[i:i + 1], choices[i:i + 1, y]) for i, (y,) in enumerate(labels)]
    loop = jax.tree.map(lambda *leaves: np.mean([np.asarray(x) ** 2 for x in leaves], 0), *grads)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), found, loop)


def calibrate(**options):
    return calibration.calibrate(LOGITS, PARAMS, IMAGES, {}, HEAD, CLASSES, **{"sparsity": 0.6} | options)


def test_rounds_narrow_down_to_the_target():
    found = calibrate()
    assert found.kept == (15, 12, 10, 8) and calibration.count(found.mask) == 8  # N = 20
    assert found.examples == (11,) * 4


@pytest.mark.parametrize("batches, batch, seen", [(2, 3, 6), (None, 3, 11), (9, 5, 11)])
def test_how_many_examples_a_round_takes(batches, batch, seen):
    assert calibrate(batches_per_round=batches, batch=batch).examples == (seen,) * 4


def test_rounds_take_different_examples():
    first, second = (rounds.round_examples(100, r, batches=1, batch=30, seed=0) for r in (0, 1))
    assert len(set(first)) == 30 and set(first) != set(second)


def test_masks_follow_from_the_seed():
    same = [calibrate(seed=3, batches_per_round=1, batch=4).mask for _ in range(2)]
    jax.tree.map(np.testing.assert_array_equal, *same)
    others = [calibrate(seed=seed, batches_per_round=1, batch=4, sparsity=0.5).mask for seed in range(4)]
    assert len({tuple(np.ravel(mask["attn"]["q"]).tolist()) for mask in others}) > 1


def test_one_round_is_the_lowest_scores():
    found = calibrate(rounds=1, batches_per_round=None, seed=2)
    scores = calibration.sensitivity(LOGITS, PARAMS, IMAGES, {}, HEAD, CLASSES, seed=rounds.round_seed(2, 0))
    jax.tree.map(np.testing.assert_array_equal, found.mask, calibration.by_score(scores, density=0.4))


def test_excluded_weights_stay_in_the_forward_pass_or_shrink():
    mask = {"fc": jnp.array([[True, False]])}
    params = {"fc": jnp.array([[0.3, 0.7]])}
    np.testing.assert_array_equal(rounds.softened(params, mask, 1.0)["fc"], params["fc"])
    np.testing.assert_allclose(rounds.softened(params, mask, 0.1)["fc"], [[0.3, 0.07]], rtol=1e-6)
    differ = [bool((a != b).any()) for a, b in zip(jax.tree.leaves(calibrate(soft=1.0).mask),
                                                   jax.tree.leaves(calibrate(soft=0.0).mask), strict=True)]
    assert any(differ)


def test_both_presets_run_and_differ():
    options = {name: {k: v for k, v in calibration.preset(name).items() if k in rounds.CALIBRATION}
               for name in calibration.PRESETS}
    assert options["paper"]["score"] == "fisher" and options["official"]["soft"] == 0.1
    found = {name: calibrate(**chosen, batch=1) for name, chosen in options.items()}
    assert found["paper"].examples == (10,) * 4 and found["official"].examples == (11,) * 4


@pytest.mark.parametrize("options, sentence", [
    ({"sparsity": 1.0}, "between 0 and 1"), ({"rounds": 0}, "at least one round"),
    ({"score": "fischer"}, "did you mean"),
    ({"samples": 0}, "at least one class"), ({"budget": 10}, "does not hold the gradient of one example"),
    ({"soft": 1.5}, "from 0 to 1"), ({"batches_per_round": 0}, "at least one batch"),
])
def test_slips_are_one_sentence(options, sentence):
    with pytest.raises(ValueError, match=sentence):
        calibrate(**options)


def test_no_examples_and_no_preset():
    with pytest.raises(ValueError, match="no examples to calibrate on"):
        calibration.calibrate(LOGITS, PARAMS, IMAGES[:0], {}, HEAD, CLASSES)
    with pytest.raises(ValueError, match="did you mean 'official'"):
        calibration.preset("oficial")


def test_gradients_that_are_not_finite_name_the_tensor():
    bad = {**PARAMS, "fc": PARAMS["fc"] * np.inf}
    with pytest.raises(ValueError, match=r"the gradient is not finite in attn\.q"):
        calibration.calibrate(LOGITS, bad, IMAGES, {}, HEAD, CLASSES)


def flags(mask):
    return "".join(str(int(bit)) for x in jax.tree.leaves(mask) for bit in np.ravel(x))


def test_masks_are_the_same_on_any_number_of_devices():
    program = """if True:
        import jax
        from tests import test_calibration_scores as here
        assert jax.device_count() == 3
        print(here.flags(here.calibrate(batches_per_round=1, batch=9, seed=1).mask))
    """
    env = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=3", "JAX_PLATFORMS": "cpu",
           "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True,
                          cwd=os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    assert done.stdout.strip() == flags(calibrate(batches_per_round=1, batch=9, seed=1).mask)


def test_scored_and_frozen_tensors_make_one_model():
    whole = calibration.sensitivity(LOGITS, PARAMS, IMAGES, {}, HEAD, CLASSES)
    part = calibration.sensitivity(LOGITS, SCORED, IMAGES, *ALL)
    np.testing.assert_allclose(tree.flatten(whole)["attn.q"], part["attn"]["q"], rtol=1e-6)
